"""Conversations with the sampler's logprobs, as trajectories of token ids: rendered, and held against what was sampled.

A chat completion names the tokens that it sampled; their ids come from rendering the conversation with the model's own
template and tokenizer. Both must agree on every sampled token, and each answer must stand behind the very ids that the
model was asked for it with. Otherwise other tokens would be trained than were sampled, or behind another context: the
trajectory is broken.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from pydantic import ValidationError

from activities.formats import Chat, message_of
from activities.prompt_rows import Question
from activities.rows import Row
from activities.template_process import TemplateProcess
from activities.tokenizer import ModelTokenizer, load_tokenizer
from activities.tool_calls import with_parsed_calls
from shared.errors import InvalidInput
from shared.jobs import Artifact
from shared.settings import S3Settings
from shared.trajectories import ChatTrajectory, SampledTurn, TokenLogprob, Trajectory

_TOKEN_ID = "token_id:"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_PLACE = "messages"  # of a conversation alone; whoever asks knows its file and line

_ANOTHER_CONTEXT = (
    "a later turn was sampled behind other ids than this answer and what it was asked with (templates rewrite earlier "
    "turns, and tokenizers join their ends): let a trajectory end with this answer"
)


class BrokenConversation(Exception):
    """A conversation that is no trajectory: the field, a short name for the rule, and a sentence."""

    def __init__(self, field: str, rule: str, message: str) -> None:
        self.field, self.rule, self.message = field, rule, message
        super().__init__(f"{field}: {message}")


@dataclass(frozen=True)
class _Turns:
    """Messages as templates take them, and how some of them were sampled, by message."""

    messages: list[dict[str, Any]]
    sampled: dict[int, SampledTurn]

    @property
    def last(self) -> int:
        return max(self.sampled)


class Conversations:
    """Reads conversations of one model. Its tokenizer and template are opened at the first; `with` closes them."""

    def __init__(self, model: Artifact | None, cache: Path, s3: S3Settings) -> None:
        self._model, self._cache, self._s3 = model, cache, s3
        self._open: tuple[ModelTokenizer, TemplateProcess] | None = None
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def trajectory_of(self, chat: ChatTrajectory, max_tokens: int) -> Trajectory:
        """The token form of a conversation.

        Raises:
            BrokenConversation: it is no conversation, too long, or does not give again what was sampled.
            InvalidInput: the model has no chat template, or its template does not end.
        """
        tokenizer, process = self._opened()
        turns = _turns_of(chat)
        tools = [dict(tool) for tool in chat.tools] if chat.tools else None
        answers = _answers(turns, tools, tokenizer, process)
        for i, turn in turns.sampled.items():
            _check_tokens(i, turn, answers[i], tokenizer)
        asked = _asked(turns, tools, tokenizer, process)
        ids = asked[turns.last] + answers[turns.last][: len(turns.sampled[turns.last].logprobs.tokens)]
        if len(ids) > max_tokens:
            _broken(_PLACE, "too_long", f"{len(ids)} tokens; max_tokens is {max_tokens}")
        logprobs: list[float | None] = [None] * len(ids)
        for i, turn in turns.sampled.items():
            start = len(asked[i])
            if ids[:start] != asked[i] or (i != turns.last and ids[start : start + len(answers[i])] != answers[i]):
                _broken(f"messages.{i}", "context", _ANOTHER_CONTEXT)
            for k, token in enumerate(turn.logprobs.tokens):
                logprobs[start + k] = token.logprob
        return Trajectory(
            token_ids=tuple(ids),
            sampled=tuple(logprob is not None for logprob in logprobs),
            logprobs=tuple(logprobs),
            reward=chat.reward,
            advantage=chat.advantage,
            policy_version=chat.policy_version or 0,
            finish_reason=_end_of(turns.sampled[turns.last]),
            metrics=chat.metrics,
            metadata=chat.metadata,
        )

    def _opened(self) -> tuple[ModelTokenizer, TemplateProcess]:
        if self._open is None:
            if self._model is None:
                raise InvalidInput("trajectories of messages need the model that they are rendered for", _PLACE)
            tokenizer = load_tokenizer(self._model, self._cache, self._s3)
            if tokenizer.template is None:
                rule = "the model has no chat template: send trajectories as token ids"
                raise InvalidInput(rule, tokenizer.place)
            process = self._closing.enter_context(TemplateProcess(tokenizer.template, tokenizer.place))
            self._open = tokenizer, process
        return self._open


def _turns_of(chat: ChatTrajectory) -> _Turns:
    """Messages and choices told apart; nothing of how a turn was sampled is left in its message."""
    turns = _Turns([], {})
    for i, given in enumerate(chat.messages):
        match given.get("message"):
            case dict() as inner:
                message, sampling = inner, {key: value for key, value in given.items() if key != "message"}
            case _:
                beside = set(SampledTurn.model_fields)
                message = {key: value for key, value in given.items() if key not in beside}
                sampling = {key: value for key, value in given.items() if key in beside}
        try:
            turns.messages.append(with_parsed_calls(message_of(Row(_PLACE, {}), f"messages[{i}]", message)))
        except InvalidInput as error:
            _broken(_PLACE, "messages", error.message)
        if sampling.get("logprobs") is not None:
            turns.sampled[i] = _sampled(i, sampling, turns.messages[-1]["role"])
    if not turns.sampled:
        _broken(_PLACE, "nothing_sampled", "no assistant's turn has logprobs: there is nothing to train")
    return turns


def _sampled(i: int, sampling: dict[str, Any], role: str) -> SampledTurn:
    place = f"messages.{i}"
    if role != "assistant":
        _broken(f"{place}.logprobs", "role", f"the message is the {role}'s: an assistant's alone are sampled")
    try:
        turn = SampledTurn.model_validate(sampling)
    except ValidationError as error:
        first = error.errors()[0]
        _broken(".".join([place, *map(str, first["loc"])]), "logprobs", first["msg"])
    tokens, ids = len(turn.logprobs.tokens), turn.token_ids
    if not tokens:
        _broken(f"{place}.logprobs", "missing_logprobs", "it names no token: ask the server for logprobs")
    if ids is not None and len(ids) != tokens:
        _broken(f"{place}.token_ids", "length", f"it has {len(ids)} entries for {tokens} logprobs")
    return turn


def _answers(
    turns: _Turns, tools: list[Any] | None, tokenizer: ModelTokenizer, process: TemplateProcess
) -> dict[int, list[int]]:
    """The ids of each sampled turn, with the one that ends it, in the conversation up to the last of them."""
    messages = turns.messages[: turns.last + 1]
    weights = [i + 1.0 if i in turns.sampled else 0.0 for i in range(len(messages))]
    try:
        [rendered] = process.spans([Chat(_PLACE, messages, tools, weights)])
    except InvalidInput as error:
        _refused(error)
    encoded = tokenizer.encode([rendered.text], [rendered.spans])
    return {i: encoded.id_T[encoded.weight_T == i + 1].tolist() for i in turns.sampled}


def _asked(
    turns: _Turns, tools: list[Any] | None, tokenizer: ModelTokenizer, process: TemplateProcess
) -> dict[int, list[int]]:
    """The ids that the model was asked for each sampled turn with."""
    questions = [Question(_PLACE, turns.messages[:i], tools, {}) for i in turns.sampled]
    try:
        texts = process.asked(questions)
    except InvalidInput as error:
        _refused(error)
    return {i: tokenizer.tokens_of(text) for i, text in zip(turns.sampled, texts, strict=True)}


def _check_tokens(i: int, turn: SampledTurn, own: list[int], tokenizer: ModelTokenizer) -> None:
    """The turn's ids, of which the last ends it, must be those that were sampled. The end may be the template's own."""
    tokens = turn.logprobs.tokens
    for k, (token, token_id) in enumerate(zip(tokens, own, strict=False)):
        given = turn.token_ids[k] if turn.token_ids is not None else _id_of(token)
        if not _is_same(token, given, token_id, tokenizer):
            _broken(f"messages.{i}.logprobs.content.{k}", "differs", _difference(token, given, token_id, tokenizer))
    if len(tokens) not in (len(own), len(own) - 1):
        rule = f"{len(tokens)} tokens were sampled, and the conversation has {len(own)} there, end token and all"
        _broken(f"messages.{i}.logprobs", "differs", rule)


def _end_of(turn: SampledTurn) -> Literal["stop", "length"] | None:
    match turn.finish_reason:
        case "length":
            return "length"
        case "stop" | "tool_calls" | "function_call":
            return "stop"
        case _:
            return None


def _id_of(token: TokenLogprob) -> int | None:
    number = token.token.removeprefix(_TOKEN_ID)
    return int(number) if number != token.token and number.isdecimal() else None


def _is_same(token: TokenLogprob, given: int | None, own: int, tokenizer: ModelTokenizer) -> bool:
    if given is not None:
        return given == own
    if token.bytes is not None and bytes(token.bytes) == tokenizer.bytes_of(own):
        return True
    text = tokenizer.decode([own])
    return token.token == text and _UNKNOWN not in text


def _difference(token: TokenLogprob, given: int | None, own: int, tokenizer: ModelTokenizer) -> str:
    text = tokenizer.decode([own])
    if given is None and _UNKNOWN in text:
        return f"token {own} is a part of a character, which its text cannot show: ask the server for token ids"
    sampled = f"{token.token!r:.60}" if given is None else f"token {given}"
    return f"{sampled} was sampled, and the conversation has {text!r:.60} there (token {own})"


def _refused(error: InvalidInput) -> NoReturn:
    """A conversation that the template refuses is broken; a template that does not end refuses the step."""
    if error.place != _PLACE:
        raise error
    _broken(_PLACE, "template", error.message)


def _broken(field: str, rule: str, message: str) -> NoReturn:
    raise BrokenConversation(field, rule, message)
