"""Converts conversations to trajectories of token ids.

An answer's ids must be those that were sampled; tokenizing its text may give others. If this installation gave the
answer, its record holds the ids of prompt and answer. Ids that the client sends are compared with the text. If it sends
texts alone, rendering the conversation must give every sampled token again. Any other trajectory counts as broken,
since other tokens would be trained than were sampled.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from activities.formats.examples import Chat, Question
from activities.formats.rows import Row, message_of
from activities.tokenizing.template_process import TemplateProcess
from activities.tokenizing.tokenizer import ModelTokenizer, load_tokenizer
from activities.tokenizing.tool_calls import with_parsed_calls
from shared.chat.answer_records import AnswerRecord, DrawnChoice, recall
from shared.chat.trajectories import ChatTrajectory, SampledTurn, SentTrajectory, TokenLogprob, Trajectory
from shared.contract import Artifact
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.settings import S3Settings
from shared.storage.store import ObjectStore

_AT_ONCE = 16
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
class Turns:
    """Messages as templates take them; and of those that were sampled, by index, the records of that."""

    messages: list[dict[str, Any]]
    sampled: dict[int, SampledTurn]


def turns_of(chat: ChatTrajectory) -> Turns:
    """Separate the messages of a conversation from the records of how they were sampled.

    Raises:
        BrokenTrajectory: it is no conversation, or nothing in it was sampled.
    """
    turns = Turns([], {})
    for i, given in enumerate(chat.messages):
        match given.get("message"):
            case dict() as inner:
                message, sampling = inner, {key: value for key, value in given.items() if key != "message"}
            case _:
                beside = set(SampledTurn.model_fields)
                message = {key: value for key, value in given.items() if key not in beside}
                sampling = {key: value for key, value in given.items() if key in beside}
        try:
            turns.messages.append(with_parsed_calls(message_of(Row(PLACE, {}), f"messages[{i}]", message)))
        except InvalidInput as error:
            raise BrokenTrajectory(PLACE, "messages", error.message) from error
        if sampling.get("logprobs") is not None or sampling.get("answer_id") is not None:
            turns.sampled[i] = _sampled(i, sampling, turns.messages[-1]["role"])
    if not turns.sampled:
        rule = "no assistant's turn has logprobs, or an answer_id: there is nothing to train"
        raise BrokenTrajectory(PLACE, "nothing_sampled", rule)
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


class RememberedAnswers:
    """Reads the records of answers that one tenant was given, and caches those that were fetched last."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self._found: dict[str, AnswerRecord | None] = {}

    def fetch(self, answer_ids: Iterable[str]) -> None:
        """Read several answers in parallel into the cache, in place of its contents. Raises StoreUnavailable."""
        wanted = sorted(set(answer_ids))
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(lambda answer_id: recall(self._store, self._tenant, answer_id), wanted)
            self._found = dict(zip(wanted, found, strict=True))

    def get(self, answer_id: str) -> AnswerRecord | None:
        """Return an answer; None if the id is not one of this tenant's, or the answer is no longer kept."""
        if answer_id not in self._found:
            self._found[answer_id] = recall(self._store, self._tenant, answer_id)
        return self._found[answer_id]


def is_same_message(message: dict[str, Any], choice: DrawnChoice) -> bool:
    """Compare a client's message with an answer: its text, and the functions that it calls."""
    told = with_parsed_calls({"tool_calls": [call.model_dump() for call in choice.tool_calls]})
    return _text(message) == (choice.content or "") and _calls(message) == _calls(told)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    functions = [call.get("function") if isinstance(call, dict) else None for call in message.get("tool_calls") or ()]
    return [(one.get("name"), one.get("arguments")) if isinstance(one, dict) else (None, None) for one in functions]


@dataclass(frozen=True)
class PublishedPolicy:
    """The policy that a step starts from: its number in the run, and the name and version that it was published as.

    `version` is None before anything is published. `every`: so many numbers lie between two published versions.
    """

    number: int
    name: str | None = None
    version: int | None = None
    every: int = 1

    def number_of(self, version: int | None, name: str | None = None) -> int | None:
        """The run's number of a published version; 0 for what is older than the run, None for what is another's."""
        if version is None or name not in (None, self.name):
            return None
        if self.version is None:
            return 0
        newest = self.number - self.number % self.every
        return min(self.number, max(0, newest - (self.version - version) * self.every))


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
    """Ids in the order in which the model saw them, with the logprobs of those that were sampled."""

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

    `counts`: turns whose ids came from records, turns that were rendered, and answer ids without a record.
    """

    def __init__(
        self,
        model: Artifact | None,
        cache: Path,
        s3: S3Settings,
        answers: RememberedAnswers | None = None,
        policy: PublishedPolicy | None = None,
    ) -> None:
        self._model, self._cache, self._s3 = model, cache, s3
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
            named = (message.get("answer_id") for chat in chats for message in chat.messages)
            self._answers.fetch(answer_id for answer_id in named if isinstance(answer_id, str))

    def trajectories_of(self, chat: ChatTrajectory, max_tokens: int) -> tuple[Trajectory, ...]:
        """Convert a conversation to token ids: one sequence, or several if the prompt of a later answer does not
        contain the ids of earlier answers (templates rewrite earlier turns, or texts were tokenized again).

        Raises:
            BrokenTrajectory: it is no conversation, is too long, or does not give the sampled tokens again.
            InvalidInput: the model has no chat template, or its template does not end.
        """
        turns = turns_of(chat)
        tools = [dict(tool) for tool in chat.tools] if chat.tools else None
        drawn = [self._drawn(i, turn, turns, tools) for i, turn in turns.sampled.items()]
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

    def _drawn(self, i: int, turn: SampledTurn, turns: Turns, tools: list[Any] | None) -> _Drawn:
        record = None
        if turn.answer_id is not None:
            record = self._answers.get(turn.answer_id) if self._answers is not None else None
            if record is None and turn.logprobs is None:
                rule = "no answer of this id is remembered here, and there are no logprobs beside it"
                raise BrokenTrajectory(f"messages.{i}.answer_id", "unknown_answer", rule)
            self.counts["unknown_answers"] += record is None
        if record is not None:
            self.counts["remembered_turns"] += 1
            return self._remembered(i, turn, turns.messages[i], record)
        self.counts["rendered_turns"] += 1
        tokenizer, process = self._opened()
        return _rendered(i, turns, tools, tokenizer, process)

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
            if self._model is None:
                raise InvalidInput("trajectories of messages need the model that they are rendered for", PLACE)
            tokenizer = load_tokenizer(self._model, self._cache, self._s3)
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


def _rendered(
    i: int, turns: Turns, tools: list[Any] | None, tokenizer: ModelTokenizer, process: TemplateProcess
) -> _Drawn:
    """Return a turn's ids, and those of the conversation before it as a server renders it.

    Templates may render the last answer differently from earlier ones (with empty thoughts, or without thoughts), so
    both forms are compared with the sampled tokens.
    """
    turn, ends = turns.sampled[i], (i + 1, max(turns.sampled) + 1)
    assert turn.logprobs is not None
    try:
        [text] = process.asked([Question(PLACE, turns.messages[:i], tools, {})])
        rows = [(turns.messages[:end], [float(k == i) for k in range(end)]) for end in sorted(set(ends))]
        rendered = process.spans([Chat(PLACE, messages, tools, weights) for messages, weights in rows])
    except InvalidInput as error:
        if error.place != PLACE:  # a failure of the template itself, not of this conversation
            raise
        raise BrokenTrajectory(PLACE, "template", error.message) from error
    differs: BrokenTrajectory | None = None
    for each in rendered:
        encoded = tokenizer.encode([each.text], [each.spans])
        try:
            ids = _drawn_ids(i, turn, encoded.id_T[encoded.weight_T == 1.0].tolist(), turns.messages[i], tokenizer)
        except BrokenTrajectory as error:
            differs = differs or error
        else:
            logprobs = [token.logprob for token in turn.logprobs.tokens]
            return _Drawn(tokenizer.tokens_of(text), ids, logprobs, _end_of(turn))
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
