"""Converts conversations to trajectories of token ids.

An answer's ids must be those that were sampled; tokenizing its text may give others. If this installation gave the
answer, its record holds the ids of prompt and answer. Ids that the client sends are compared with the text. If it sends
texts alone, rendering the conversation must give every sampled token again. Any other trajectory counts as broken,
since other tokens would be trained than were sampled.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import ValidationError

from activities.formats.examples import Chat, Question
from activities.formats.messages import message_of, tools_of
from activities.formats.rows import Row
from activities.tokenizing.template_process import TemplateProcess
from activities.tokenizing.tokenizer import ModelTokenizer, TokenizerFiles
from activities.trajectories.remembered_answers import PublishedPolicy, RememberedAnswers, is_same_message
from longshore.fields import Artifact
from shared.chat.answer_records import AnswerRecord
from shared.chat.trajectories import (
    ChatHistory,
    ChatTrajectory,
    SampledTurn,
    SentTokenLogprob,
    SentTrajectory,
    Trajectory,
)
from shared.errors import InvalidInput
from shared.field_rules import first_error

PLACE = "messages"  # the place in errors about a conversation; callers add file and line
_TOKEN_ID = "token_id:"
_ENDS: dict[str, Literal["stop", "length"]] = {
    "length": "length",
    **dict.fromkeys(("stop", "tool_calls", "function_call"), "stop"),
}
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class BrokenTrajectory(Exception):
    """A trajectory that cannot be trained: the field, a short name for the rule, and a sentence."""

    def __init__(self, field: str, rule: str, message: str) -> None:
        self.field, self.rule, self.message = field, rule, message
        super().__init__(f"{field}: {message}")


@dataclass(frozen=True)
class Conversation:
    """Messages as templates take them; and records of the sampled ones, by index."""

    messages: list[dict[str, Any]]
    sampled: dict[int, SampledTurn]


def conversation_of(history: ChatHistory) -> Conversation:
    """Separate the messages of a conversation from the records of how they were sampled.

    Raises BrokenTrajectory: it is not a conversation.
    """
    turns = Conversation([], {})
    for i, given in enumerate(history.messages):
        match given.get("message"):
            case dict() as inner:
                message, sampling = inner, {key: value for key, value in given.items() if key != "message"}
            case _:
                beside = set(SampledTurn.model_fields)
                message = {key: value for key, value in given.items() if key not in beside}
                sampling = {key: value for key, value in given.items() if key in beside}
        try:
            turns.messages.append(message_of(Row(PLACE, {}), f"messages[{i}]", message))
        except InvalidInput as error:
            raise BrokenTrajectory(PLACE, "messages", error.message) from error
        if sampling.get("logprobs") is not None or sampling.get("answer_id") is not None:
            turns.sampled[i] = _sampled(i, sampling, turns.messages[-1]["role"])
    return turns


def _sampled(i: int, sampling: dict[str, Any], role: str) -> SampledTurn:
    place = f"messages.{i}"
    if role != "assistant":
        rule = f"the message is the {role}'s: an assistant's alone are sampled"
        raise BrokenTrajectory(f"{place}.logprobs", "role", rule)
    try:
        turn = SampledTurn.model_validate(sampling)
    except ValidationError as error:
        field, rule = first_error(error)
        raise BrokenTrajectory(f"{place}.{field}", "logprobs", rule) from error
    if turn.logprobs is None:
        return turn
    tokens, ids = len(turn.logprobs.tokens), turn.token_ids
    if not tokens:
        rule = "it names no token: ask the server for logprobs"
        raise BrokenTrajectory(f"{place}.logprobs", "missing_logprobs", rule)
    if ids is not None and len(ids) != tokens:
        raise BrokenTrajectory(f"{place}.token_ids", "length", f"it has {len(ids)} entries for {tokens} logprobs")
    return turn


@dataclass(frozen=True)
class _Drawn:
    """An answer as it was sampled: the prompt's ids, the answer's ids, and their logprobs."""

    asked: list[int]
    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"] | None
    policy_version: int | None = None


@dataclass
class _Sequence:
    """Ids in the order that the model saw them, with the logprobs of sampled ones."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    def extend(self, turn: _Drawn) -> None:
        context = turn.asked[len(self.ids) :]
        self.ids += [*context, *turn.ids]
        self.logprobs += [*[None] * len(context), *turn.logprobs]
        self.finish_reason = turn.finish_reason


class Conversations:
    """Converts conversations of one model. Its tokenizer and template are loaded when needed, and closed by `with`.

    `files`: its tokenizer's. `counts`: turns whose ids came from records, turns that were rendered, and answer ids
    without a record.
    """

    def __init__(
        self,
        model: Artifact | None,
        files: TokenizerFiles | None,
        answers: RememberedAnswers | None = None,
        policy: PublishedPolicy | None = None,
    ) -> None:
        self._model, self._files = model, files
        self._answers = answers
        self._policy = policy or PublishedPolicy(0)
        self._open: tuple[ModelTokenizer, TemplateProcess] | None = None
        self._closing = ExitStack()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def prepare(self, trajectories: Iterable[SentTrajectory]) -> None:
        """Read the records of these trajectories' answers in parallel. Raises StoreUnavailable."""
        if self._answers is not None:
            chats = (one for one in trajectories if isinstance(one, ChatTrajectory))
            told = (message for chat in chats for history in chat.histories for message in history.messages)
            named = (message.get("answer_id") for message in told)
            self._answers.fetch(answer_id for answer_id in named if isinstance(answer_id, str))

    def trajectories_of(self, chat: ChatTrajectory, max_tokens: int) -> tuple[Trajectory, ...]:
        """Convert conversations to token ids: one sequence, or several if the prompt of a later answer does not
        contain the ids of earlier answers (templates rewrite earlier turns, or texts were tokenized again).

        Raises:
            BrokenTrajectory: it is not a conversation, is too long, or does not reproduce the sampled tokens.
            InvalidInput: the model has no chat template, or its template does not end.
        """
        drawn: list[_Drawn] = []
        for number, history in enumerate(chat.histories):
            try:
                drawn += self._answers_of(history, chat.own_answers)
            except BrokenTrajectory as fault:
                if number == 0:
                    raise
                place = f"additional_histories.{number - 1}.{fault.field}"
                raise BrokenTrajectory(place, fault.rule, fault.message) from fault
        if not drawn:
            rule = "no assistant's turn has logprobs, or an answer_id: there is nothing to train"
            raise BrokenTrajectory(PLACE, "nothing_sampled", rule)
        sequences = _chained(drawn)
        if (longest := max(len(one.ids) for one in sequences)) > max_tokens:
            raise BrokenTrajectory(PLACE, "too_long", f"{longest} tokens; max_tokens is {max_tokens}")
        version = drawn[0].policy_version
        if version is None:
            version = chat.policy_version
        if version is None:
            version = self._policy.number_of(chat.model_version)
        return tuple(
            Trajectory(
                token_ids=tuple(one.ids),
                sampled=tuple(logprob is not None for logprob in one.logprobs),
                logprobs=tuple(one.logprobs),
                reward=chat.reward,
                advantage=chat.advantage,
                policy_version=version,
                finish_reason=one.finish_reason,
                metrics=chat.metrics,
                metadata=chat.metadata,
            )
            for one in sequences
        )

    def _answers_of(self, history: ChatHistory, own_answers: bool) -> list[_Drawn]:
        turns = conversation_of(history)
        try:
            tools = tools_of(Row(PLACE, {"tools": [dict(tool) for tool in history.tools or ()]}))
        except InvalidInput as error:
            raise BrokenTrajectory("tools", "tools", error.message) from error
        drawn = [self._drawn(i, turn, turns, tools, own_answers) for i, turn in turns.sampled.items()]
        return [each for each in drawn if each is not None]

    def _drawn(
        self, i: int, turn: SampledTurn, turns: Conversation, tools: list[Any] | None, own_answers: bool
    ) -> _Drawn | None:
        """Return how an answer was drawn; None for another policy's answer if only the run's own count."""
        record = self._answers.get(turn.answer_id) if self._answers is not None and turn.answer_id is not None else None
        if record is not None:
            if own_answers and record.name != self._policy.name:
                return None
            self.counts["remembered_turns"] += 1
            return self._remembered(i, turn, turns.messages[i], record)
        if turn.logprobs is None or own_answers:
            rule = "no answer of this id is remembered here" + ("" if own_answers else ", and it has no logprobs")
            raise BrokenTrajectory(f"messages.{i}.answer_id", "unknown_answer", rule)
        self.counts["unknown_answers"] += turn.answer_id is not None
        return self._found_by_content(i, turn, turns, tools)

    def _found_by_content(self, i: int, turn: SampledTurn, turns: Conversation, tools: list[Any] | None) -> _Drawn:
        """Return how an answer without an id was drawn: as its text says, or else as the record of its content."""
        tokenizer, process = self._opened()
        asked = _asked_ids(i, turns, tools, tokenizer, process)
        try:
            drawn = _rendered(i, turns, asked, tools, tokenizer, process)
        except BrokenTrajectory as fault:
            assert turn.logprobs is not None
            logprobs = [token.logprob for token in turn.logprobs.tokens]
            found = self._answers.alike(asked, logprobs) if self._answers and fault.rule == "differs" else None
            if found is None:
                raise
            self.counts["remembered_turns"] += 1
            return self._remembered(i, turn.model_copy(update={"index": found[1]}), turns.messages[i], found[0])
        self.counts["rendered_turns"] += 1
        return drawn

    def _remembered(self, i: int, turn: SampledTurn, message: dict[str, Any], record: AnswerRecord) -> _Drawn:
        """Take an answer's ids from its record, if the client's message is the one that was answered."""
        place = f"messages.{i}"
        if self._model is not None and record.model_sha256 != self._model.sha256:
            rule = "another model than the run's gave this answer"
            raise BrokenTrajectory(f"{place}.answer_id", "another_model", rule)
        if turn.index >= len(record.choices):
            raise BrokenTrajectory(f"{place}.index", "unknown_answer", f"the answer has {len(record.choices)} choices")
        choice = record.choices[turn.index]
        if not is_same_message(message, choice):
            rule = "the message is not what the answer of this id said: send it as it was given, or without answer_id"
            raise BrokenTrajectory(f"{place}.message", "another_text", rule)
        if turn.token_ids is not None and turn.token_ids != choice.token_ids:
            rule = "these are not the ids that were drawn for the answer of this id"
            raise BrokenTrajectory(f"{place}.token_ids", "differs", rule)
        version = self._policy.number_of(record.version, record.name)
        return _Drawn(list(record.prompt_ids), list(choice.token_ids), list(choice.logprobs), _end_of(turn), version)

    def _opened(self) -> tuple[ModelTokenizer, TemplateProcess]:
        if self._open is None:
            if self._files is None:
                raise InvalidInput("trajectories of messages need the model that they are rendered for", PLACE)
            tokenizer = self._files.load()
            if tokenizer.template is None:
                rule = "the model has no chat template: send trajectories as token ids"
                raise InvalidInput(rule, tokenizer.place)
            process = self._closing.enter_context(TemplateProcess(tokenizer.template, tokenizer.place))
            self._open = tokenizer, process
        return self._open


def _chained(drawn: Sequence[_Drawn]) -> list[_Sequence]:
    """Join answers into one sequence, as long as each one's prompt begins with the ids of the sequence so far."""
    sequences: list[_Sequence] = []
    for turn in drawn:
        if not sequences or turn.asked[: len(sequences[-1].ids)] != sequences[-1].ids:
            sequences.append(_Sequence())
        sequences[-1].extend(turn)
    return sequences


def _asked_ids(
    i: int, turns: Conversation, tools: list[Any] | None, tokenizer: ModelTokenizer, process: TemplateProcess
) -> list[int]:
    """Return the ids of the conversation before a turn, as a server renders it."""
    try:
        [prompt] = process.asked([Question(PLACE, turns.messages[:i], tools, {})])
    except InvalidInput as error:
        raise _of_the_conversation(error) from error
    return tokenizer.tokens_of(prompt.text)


def _of_the_conversation(error: InvalidInput) -> Exception:
    """Return a failure to render as the trajectory's, unless the template itself fails."""
    return BrokenTrajectory(PLACE, "template", error.message) if error.place == PLACE else error


def _rendered(
    i: int,
    turns: Conversation,
    asked: list[int],
    tools: list[Any] | None,
    tokenizer: ModelTokenizer,
    process: TemplateProcess,
) -> _Drawn:
    """Return a turn's ids from its text, after the ids of its prompt.

    Templates may render the last answer differently from earlier ones (with empty thoughts, or without thoughts), so
    both forms are compared with the sampled tokens.
    """
    turn, ends = turns.sampled[i], (i + 1, max(turns.sampled) + 1)
    assert turn.logprobs is not None
    try:
        rows = [(turns.messages[:end], [float(k == i) for k in range(end)]) for end in sorted(set(ends))]
        rendered = process.spans([Chat(PLACE, messages, tools, weights) for messages, weights in rows])
    except InvalidInput as error:
        raise _of_the_conversation(error) from error
    differs: BrokenTrajectory | None = None
    for each in rendered:
        encoded = tokenizer.encode([each.text], [each.spans])
        try:
            ids = _drawn_ids(i, turn, encoded.id_T[encoded.weight_T == 1.0].tolist(), turns.messages[i], tokenizer)
        except BrokenTrajectory as error:
            differs = differs or error
        else:
            logprobs = [token.logprob for token in turn.logprobs.tokens]
            return _Drawn(asked, ids, logprobs, _end_of(turn))
    assert differs is not None
    raise differs


def _drawn_ids(
    i: int, turn: SampledTurn, own: list[int], message: dict[str, Any], tokenizer: ModelTokenizer
) -> list[int]:
    """Return the client's ids if they have the turn's text; else the rendered ids, which must be the sampled tokens."""
    assert turn.logprobs is not None
    tokens = turn.logprobs.tokens
    given = list(turn.token_ids) if turn.token_ids is not None else [_id_of(token) for token in tokens]
    whole = [token_id for token_id in given if token_id is not None]
    if len(whole) == len(given) and _says_the_same(whole, own, message, tokenizer):
        return whole
    for k, (token, token_id) in enumerate(zip(tokens, own, strict=False)):
        if not _is_same(token, given[k], token_id, tokenizer):
            place = f"messages.{i}.logprobs.content.{k}"
            raise BrokenTrajectory(place, "differs", _difference(token, given[k], token_id, tokenizer))
    if len(tokens) not in (len(own), len(own) - 1):
        rule = f"{len(tokens)} tokens were sampled, and the conversation has {len(own)} there, end token and all"
        raise BrokenTrajectory(f"messages.{i}.logprobs", "differs", rule)
    return own[: len(tokens)]


def _says_the_same(given: list[int], own: list[int], message: dict[str, Any], tokenizer: ModelTokenizer) -> bool:
    """True if ids have a turn's text, however it is tokenized. The template's last token need not be among them."""
    text = tokenizer.decode(given)
    if text in (tokenizer.decode(own), tokenizer.decode(own[:-1])):
        return True
    content = message.get("content")
    is_text = isinstance(content, str) and not message.get("tool_calls")
    return is_text and tokenizer.spoken(given).strip() == str(content).strip()


def _end_of(turn: SampledTurn) -> Literal["stop", "length"] | None:
    return _ENDS.get(turn.finish_reason or "")


def _id_of(token: SentTokenLogprob) -> int | None:
    number = token.token.removeprefix(_TOKEN_ID)
    return int(number) if number != token.token and number.isdecimal() else None


def _is_same(token: SentTokenLogprob, given: int | None, own: int, tokenizer: ModelTokenizer) -> bool:
    if given is not None:
        return given == own
    if token.bytes is not None and bytes(token.bytes) == tokenizer.bytes_of(own):
        return True
    text = tokenizer.decode([own])
    return token.token == text and _UNKNOWN not in text


def _difference(token: SentTokenLogprob, given: int | None, own: int, tokenizer: ModelTokenizer) -> str:
    text = tokenizer.decode([own])
    if given is None and _UNKNOWN in text:
        return f"token {own} is a part of a character, which its text cannot show: ask the server for token ids"
    sampled = f"{token.token!r:.60}" if given is None else f"token {given}"
    return f"{sampled} was sampled, and the conversation has {text!r:.60} there (token {own})"
