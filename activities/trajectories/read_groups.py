"""Reads trajectory groups: parses and checks them, refuses or drops those that cannot be trained, and counts them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from activities.formats.rows import Chat, Question, Row, call_of, lines_of, message_of, tools_of
from activities.sampling.completions import RoutesFile
from activities.tokenizing.tokenizer import ModelTokenizer, TemplateProcess, TokenizerFiles
from longshore.fields import Artifact, Frozen
from longshore.losses import COMPARE_GROUPS
from longshore.runs import RLRun
from shared.chat.episodes import EpisodeEnd
from shared.chat.trajectories import (
    FORMS,
    LOOKUP_AT_ONCE,
    AnswerLookup,
    AnswerRecord,
    ChatHistory,
    ChatTrajectory,
    DrawnChoice,
    DrawnSequence,
    DrawnTurn,
    EpisodeTrajectory,
    SampledTurn,
    SentGroup,
    SentTokenLogprob,
    SentTrajectory,
    TokenSequence,
    Trajectory,
    content_digest,
    parse_record,
    sequences_of_turns,
)
from shared.errors import InvalidInput
from shared.field_rules import first_error, first_rule

# --- Answers that this installation gave ---
# Their records, whether a client's message is one, and which policy gave it.


class RememberedAnswers:
    """The records of answers that one tenant was given. Those that were fetched last are cached.

    `look_up`: reads them, as `look_up` of shared/chat/trajectories.py does with a store.
    """

    def __init__(self, look_up: Callable[[AnswerLookup], Sequence[str | None]]) -> None:
        self._look_up = look_up
        self._found: dict[str, AnswerRecord | None] = {}

    def fetch(self, answer_ids: Iterable[str]) -> None:
        """Read several answers, in parallel, into the cache, in place of its contents. Raises as `look_up` does."""
        self._found, wanted = {}, sorted(set(answer_ids))
        for first in range(0, len(wanted), LOOKUP_AT_ONCE):
            ids = tuple(wanted[first : first + LOOKUP_AT_ONCE])
            texts = self._look_up(AnswerLookup(ids=ids))
            self._found |= zip(ids, map(parse_record, texts), strict=True)

    def get(self, answer_id: str) -> AnswerRecord | None:
        """Return an answer; None if the id is not one of this tenant's, or the answer is no longer kept."""
        if answer_id not in self._found:
            [text] = self._look_up(AnswerLookup(ids=(answer_id,)))
            self._found[answer_id] = parse_record(text)
        return self._found[answer_id]

    def end_of(self, episode: str) -> EpisodeEnd | None:
        """Return what counts of an episode; None if it has not ended, or is not this tenant's."""
        [text] = self._look_up(AnswerLookup(episode=episode))
        return None if text is None else EpisodeEnd.model_validate_json(text)

    def alike(self, prompt_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[AnswerRecord, int] | None:
        """Return an answer, and the number of its choice, by its content: for clients that lose the id."""
        for text in self._look_up(AnswerLookup(alike=content_digest(prompt_ids, logprobs))):
            if (record := parse_record(text)) is not None and record.prompt_ids == tuple(prompt_ids):
                for index, choice in enumerate(record.choices):
                    if choice.logprobs == tuple(logprobs):
                        return record, index
        return None


def is_same_message(message: dict[str, Any], choice: DrawnChoice) -> bool:
    """Compare a client's message with an answer: its text, and the functions that it calls."""
    told = [call_of(Row("tool_calls", {}), "tool_calls", call.model_dump()) for call in choice.tool_calls]
    return (message.get("content") or "") == (choice.content or "") and _calls(message) == _calls({"tool_calls": told})


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


@dataclass(frozen=True)
class PublishedPolicy:
    """The policy that a step starts from: its number in the run, and the name and version that it was published as.

    `version` is None before anything is published. `every`: the difference between two consecutive versions' numbers.
    """

    number: int
    name: str | None = None
    version: int | None = None
    every: int = 1

    def number_of(self, version: int | None, name: str | None = None) -> int | None:
        """The run's number of a published version; 0 for a version before the run, None for another policy's."""
        if version is None or name not in (None, self.name):
            return None
        if self.version is None:
            return 0
        newest = self.number - self.number % self.every
        return min(self.number, max(0, newest - (self.version - version) * self.every))


# --- Converts conversations to trajectories of token ids ---
#
# An answer's ids must be those that were sampled; tokenizing its text may give others. If this installation gave the
# answer, its record holds the ids of prompt and answer. Ids that the client sends are compared with the text. If it
# sends texts alone, rendering the conversation must give every sampled token again. Any other trajectory counts as
# broken, since other tokens would be trained than were sampled.

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
        drawn: list[DrawnTurn] = []
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
        sequences = sequences_of_turns(drawn)
        _check_lengths(sequences, max_tokens, PLACE)
        version = next(iter(drawn[0].versions), None)
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

    def episode_of(self, sent: EpisodeTrajectory, max_tokens: int) -> tuple[Trajectory, ...]:
        """Convert an episode's answers to token ids: one sequence for each branch of the conversation.

        Raises BrokenTrajectory: it has not ended, or its answers are no longer kept, or a branch is too long.
        """
        end = self._answers.end_of(sent.episode) if self._answers is not None else None
        if self._answers is None or end is None:
            raise BrokenTrajectory("episode", "unknown_episode", "no episode of this id has ended here")
        if not end.answer_ids:
            raise BrokenTrajectory("episode", "nothing_sampled", "it has no answer that counts")
        self._answers.fetch(end.answer_ids)
        turns: list[DrawnTurn] = []
        for answer_id in end.answer_ids:
            if (record := self._answers.get(answer_id)) is None:
                raise BrokenTrajectory("episode", "unknown_answer", f"its answer {answer_id} is no longer kept")
            if self._model is not None and record.model_sha256 != self._model.sha256:
                raise BrokenTrajectory("episode", "another_model", "another model than the run's answered it")
            [choice] = record.choices
            turns.append(self._recorded(record, choice, choice.finish_reason))
        branches = sequences_of_turns(turns)
        _check_lengths(branches, max_tokens, "episode")
        self.counts["remembered_turns"] += len(end.answer_ids)
        self.counts["episode_branches"] += len(branches)
        return tuple(
            Trajectory(
                token_ids=tuple(one.ids),
                sampled=tuple(logprob is not None for logprob in one.logprobs),
                logprobs=tuple(one.logprobs),
                policy_versions=tuple(one.versions),
                finish_reason=one.finish_reason,
                **sent.model_dump(exclude={"episode"}),
            )
            for one in branches
        )

    def _recorded(
        self, record: AnswerRecord, choice: DrawnChoice, finish_reason: Literal["stop", "length"] | None
    ) -> DrawnTurn:
        versions = [self._policy.number_of(record.version, record.name)] * len(choice.token_ids)
        return DrawnTurn(record.prompt_ids, choice.token_ids, choice.logprobs, finish_reason, versions)

    def _answers_of(self, history: ChatHistory, own_answers: bool) -> list[DrawnTurn]:
        turns = conversation_of(history)
        try:
            tools = tools_of(Row(PLACE, {"tools": [dict(tool) for tool in history.tools or ()]}))
        except InvalidInput as error:
            raise BrokenTrajectory("tools", "tools", error.message) from error
        drawn = [self._drawn(i, turn, turns, tools, own_answers) for i, turn in turns.sampled.items()]
        return [each for each in drawn if each is not None]

    def _drawn(
        self, i: int, turn: SampledTurn, turns: Conversation, tools: list[Any] | None, own_answers: bool
    ) -> DrawnTurn | None:
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

    def _found_by_content(self, i: int, turn: SampledTurn, turns: Conversation, tools: list[Any] | None) -> DrawnTurn:
        """Return how an answer without an id was drawn: as its text says, or else as the record of its content."""
        tokenizer, process = self._opened()
        try:
            [prompt] = process.asked([Question(PLACE, turns.messages[:i], tools, {})])
        except InvalidInput as error:
            raise _of_the_conversation(error) from error
        asked = tokenizer.tokens_of(prompt.text)
        try:
            drawn = self._rendered(i, turns, asked, tools)
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

    def _rendered(self, i: int, turns: Conversation, asked: list[int], tools: list[Any] | None) -> DrawnTurn:
        """Return a turn's ids from its text, after the ids of its prompt.

        Templates may render the last answer differently from earlier ones (with empty thoughts, or without thoughts),
        so both forms are compared with the sampled tokens.
        """
        tokenizer, process = self._opened()
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
                return DrawnTurn(asked, ids, logprobs, _end_of(turn))
        assert differs is not None
        raise differs

    def _remembered(self, i: int, turn: SampledTurn, message: dict[str, Any], record: AnswerRecord) -> DrawnTurn:
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
        return self._recorded(record, choice, _end_of(turn))

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


def _check_lengths(sequences: Sequence[DrawnSequence], max_tokens: int, place: str) -> None:
    if (longest := max(len(one.ids) for one in sequences)) > max_tokens:
        raise BrokenTrajectory(place, "too_long", f"{longest} tokens; max_tokens is {max_tokens}")


def _of_the_conversation(error: InvalidInput) -> Exception:
    """Return a failure to render as the trajectory's, unless the template itself fails."""
    return BrokenTrajectory(PLACE, "template", error.message) if error.place == PLACE else error


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


MAX_TRAJECTORIES = 65_536
_ROUTES = "routes"  # the rule that no run drops trajectories for


class GroupsReport(Frozen):
    """Counts of a step's groups and trajectories. Names without `groups` count trajectories."""

    num_groups: int = 0
    num_trajectories: int = 0
    trained_groups: int = 0
    trained_trajectories: int = 0
    dropped_broken: int = 0
    dropped_single_groups: int = 0
    dropped_equal_groups: int = 0
    equal_reward_groups: int = 0
    dropped_for: dict[str, int] = Field(default_factory=dict)
    turns: dict[str, int] = Field(default_factory=dict)

    @property
    def summary(self) -> str:
        """A sentence on the broken trajectories."""
        reasons = ", ".join(f"{count} {rule}" for rule, count in sorted(self.dropped_for.items()))
        return f"{self.dropped_broken} of {self.num_trajectories} trajectories were left out: {reasons}"


@dataclass(frozen=True)
class Scored:
    """A trajectory as it was read. A broken one has no sequences, but its reward still counts in its group.

    A conversation has several sequences if an answer's prompt does not contain the earlier answers' ids.
    `turn_rewards`: as sent.
    """

    reward: float
    metrics: dict[str, float]
    sequences: tuple[Trajectory, ...]
    turn_rewards: tuple[float, ...] | None = None

    @cached_property
    def answers(self) -> list[list[int]]:
        """The places of the last id of each answer, by sequence."""
        return [answers_of(one) for one in self.sequences]

    @property
    def earned(self) -> tuple[float, ...]:
        """The reward of each answer. The last one has the rest."""
        given = list(self.turn_rewards or [0.0] * max(1, sum(map(len, self.answers))))
        given[-1] += self.reward - math.fsum(given)
        return tuple(given)


Group = tuple[Scored, ...]


def sequences_of(group: Group) -> list[Trajectory]:
    """Return all sequences of a group."""
    return [sequence for one in group for sequence in one.sequences]


@dataclass(frozen=True)
class Rules:
    """The run and the model's limits that trajectories are checked against. `policy_version`: at the step's start.

    `conversations` converts those of chat messages; without it they are refused. `routes`: of all trajectories, if the
    trainer takes them.
    """

    run: RLRun
    policy_version: int
    vocab_size: int
    conversations: Conversations | None = None
    routes: RoutesFile | None = None


@dataclass
class GroupsRead:
    """The groups to train, all groups before any was dropped, and counts."""

    groups: list[Group] = field(default_factory=list)
    all_groups: list[Group] = field(default_factory=list)
    report: GroupsReport = field(default_factory=GroupsReport)


def parse_groups(path: Path, name: str) -> Iterator[tuple[str, SentGroup]]:
    """Parse a file's groups. Yields each line's place and group.

    Raises InvalidInput: a line is not a group; names the place in it.
    """
    for place, line in lines_of(path, name):
        try:
            yield place, SentGroup.model_validate_json(line)
        except ValidationError as error:
            raise InvalidInput(first_rule(error, FORMS), place) from None


def read_groups(parsed: Iterable[tuple[str, SentGroup]], rules: Rules) -> GroupsRead:
    """Check every trajectory, and keep the trainable ones.

    Raises InvalidInput: there is no group; or one is broken and the run does not drop those.
    """
    read, counts, reasons = GroupsRead(), dict.fromkeys(GroupsReport.model_fields, 0), dict[str, int]()
    del counts["dropped_for"], counts["turns"]
    for place, group in parsed:
        counts["num_groups"] += 1
        counts["num_trajectories"] += len(group.trajectories)
        if counts["num_trajectories"] > MAX_TRAJECTORIES:
            raise InvalidInput(f"a step has at most {MAX_TRAJECTORIES:,} trajectories", place)
        if rules.conversations is not None:
            rules.conversations.prepare(group.trajectories)
        scored = tuple(_scored(place, group, rules, reasons))
        num_whole = sum(bool(one.sequences) for one in scored)
        counts["dropped_broken"] += len(group.trajectories) - num_whole
        if not scored:
            continue
        read.all_groups.append(scored)
        if (reason := _nothing_to_learn(scored, rules.run)) is not None:
            counts["equal_reward_groups"] += reason != "dropped_single_groups"
            if reason in counts:
                counts[reason] += 1
                continue
        if num_whole:
            read.groups.append(scored)
    if not counts["num_groups"]:
        raise InvalidInput("there is no trajectory group: send one JSON object per line", "groups")
    counts["trained_groups"] = len(read.groups)
    counts["trained_trajectories"] = sum(bool(one.sequences) for group in read.groups for one in group)
    turns = dict(rules.conversations.counts) if rules.conversations is not None else {}
    read.report = GroupsReport(**counts, dropped_for=reasons, turns=turns)
    return read


def _scored(place: str, group: SentGroup, rules: Rules, reasons: dict[str, int]) -> Iterator[Scored]:
    """Yield the trajectories of a group. A broken one has no sequences; without a finite reward it is left out."""
    for number, sent in enumerate(group.trajectories):
        try:
            earned = sent.turn_rewards if isinstance(sent, Trajectory) else None
            yield _shaped(Scored(sent.reward, sent.metrics, _read(sent, rules), earned), rules.run)
        except BrokenTrajectory as fault:
            if rules.run.broken == "refuse" or fault.rule == _ROUTES:
                raise InvalidInput(fault.message, f"{place}: trajectories.{number}.{fault.field}") from fault
            reasons[fault.rule] = reasons.get(fault.rule, 0) + 1
            if math.isfinite(sent.reward):
                yield Scored(sent.reward, sent.metrics, ())


def _shaped(one: Scored, run: RLRun) -> Scored:
    """Take the penalty of a long answer off its reward, and keep it as a metric.

    With b buffer tokens before the limit of L: p * min(1, (tokens - (L - b)) / b) if that is positive (DAPO: Yu et
    al. 2025, arXiv:2503.14476, eq. 13).
    """
    if run.overlong is None:
        return one
    tokens = sum(sum(each.sampled) for each in one.sequences)
    beyond = tokens - (run.longest_answer - run.overlong.buffer_tokens)
    penalty = run.overlong.penalty * min(1.0, max(0.0, beyond / run.overlong.buffer_tokens))
    return replace(one, reward=one.reward - penalty, metrics=one.metrics | {"overlong_penalty": penalty})


def _read(sent: SentTrajectory, rules: Rules) -> tuple[Trajectory, ...]:
    """The sequences of token ids of a trajectory. Raises BrokenTrajectory when it cannot be trained."""
    sequences: tuple[Trajectory, ...]
    if isinstance(sent, Trajectory):
        sequences = (sent, *(_of_branch(sent, branch) for branch in sent.branches))
    elif rules.conversations is None:
        raise BrokenTrajectory("messages", "messages", "trajectories of token ids alone are taken here")
    elif isinstance(sent, ChatTrajectory):
        sequences = rules.conversations.trajectories_of(sent, rules.run.max_tokens)
    else:
        sequences = rules.conversations.episode_of(sent, rules.run.max_tokens)
    for one in sequences:
        _check(one, rules)
    if isinstance(sent, Trajectory) and sent.turn_rewards is not None:
        num, wanted = len(sent.turn_rewards), sum(len(answers_of(one)) for one in sequences)
        if num != wanted or not all(map(math.isfinite, sent.turn_rewards)):
            rule = f"it has {num} entries for {wanted} answers, all of them finite numbers"
            raise BrokenTrajectory("turn_rewards", "reward", rule)
    return sequences


def _of_branch(sent: Trajectory, branch: TokenSequence) -> Trajectory:
    own = {"reward": sent.reward, "advantage": sent.advantage, "policy_version": sent.policy_version}
    return Trajectory(**dict(branch), **own)


def answers_of(one: Trajectory) -> list[int]:
    """Return the place of the last id of each answer, a run of sampled ids."""
    ends = zip(one.sampled, (*one.sampled[1:], False), strict=True)
    return [place for place, (is_sampled, goes_on) in enumerate(ends) if is_sampled and not goes_on]


def _check(one: Trajectory, rules: Rules) -> None:
    """Raises BrokenTrajectory with the first rule that it breaks."""
    run, length = rules.run, len(one.token_ids)
    for name in ("sampled", "logprobs", "token_rewards", "policy_versions"):
        column = getattr(one, name)
        if column is not None and (found := len(column)) != length:
            raise BrokenTrajectory(name, "length", f"it has {found} entries for {length} token_ids")
    if length > run.max_tokens:
        raise BrokenTrajectory("token_ids", "too_long", f"{length} tokens; max_tokens is {run.max_tokens}")
    if not 0 <= min(one.token_ids) <= max(one.token_ids) < rules.vocab_size:
        rule = f"ids lie in 0 to {rules.vocab_size - 1}, the model's own"
        raise BrokenTrajectory("token_ids", "vocabulary", rule)
    if not any(one.sampled):
        raise BrokenTrajectory("sampled", "nothing_sampled", "no token was sampled: there is nothing to train")
    if one.sampled[0]:
        rule = "the first token cannot be sampled: nothing stands before it"
        raise BrokenTrajectory("sampled", "first_sampled", rule)
    if not math.isfinite(one.reward):
        raise BrokenTrajectory("reward", "reward", f"it is {one.reward}; a reward is a finite number")
    sampled = [p for p, is_sampled in zip(one.logprobs, one.sampled, strict=True) if is_sampled]
    if None in sampled:
        rule = f"{sampled.count(None)} sampled tokens have none: the trainer's are compared with the sampler's"
        raise BrokenTrajectory("logprobs", "missing_logprobs", rule)
    if not all(p is None or (math.isfinite(p) and p <= 0) for p in sampled):
        raise BrokenTrajectory("logprobs", "logprobs", "logprobs of sampled tokens are finite, and at most 0")
    if run.advantages != "given" and one.advantage is not None:
        raise BrokenTrajectory("advantage", "advantage", f"the run computes {run.advantages}: it would be ignored")
    if run.advantages == "given" and (one.advantage is None or not math.isfinite(one.advantage)):
        raise BrokenTrajectory("advantage", "advantage", "the run's advantages are given: a finite number")
    if one.token_rewards is not None and run.critic is None:
        raise BrokenTrajectory("token_rewards", "reward", "they are a critic's to read, and the run has none")
    if not all(map(math.isfinite, one.token_rewards or ())):
        raise BrokenTrajectory("token_rewards", "reward", "rewards are finite numbers")
    _check_version(one, rules)
    _check_routes(one, rules)


def _check_version(one: Trajectory, rules: Rules) -> None:
    # Without a version it may be from the run's beginning.
    versions, bound = [version or 0 for version in one.token_versions], rules.run.max_staleness
    field = "policy_version" if one.policy_versions is None else "policy_versions"
    if (newest := max(versions)) > rules.policy_version:
        message = f"{newest} does not exist yet: the newest is {rules.policy_version}"
        raise BrokenTrajectory(field, "future", message)
    oldest, behind = min(versions), rules.policy_version - min(versions)
    if bound is not None and behind > bound:
        message = f"{oldest} is {behind} behind {rules.policy_version}; max_staleness is {bound}"
        raise BrokenTrajectory(field, "stale", message)


def _check_routes(one: Trajectory, rules: Rules) -> None:
    if rules.routes is None and one.routes is not None:
        raise BrokenTrajectory(
            "routes", _ROUTES, "they are taken of a run's own samples alone, of a mixture of experts"
        )
    if rules.routes is not None:
        try:
            routes_of(one, rules.routes)
        except InvalidInput as error:
            raise BrokenTrajectory("routes", _ROUTES, error.message) from error


def routes_of(one: Trajectory, routes: RoutesFile) -> NDArray[np.integer]:
    """Return the experts of a trajectory's tokens, [L, layers, experts of a token]. Raises InvalidInput without any."""
    if one.routes is None:
        raise InvalidInput("it has none, and the trainer is to take the sampler's experts", "routes")
    return routes.of_sequence(one.token_ids, one.sampled.index(True), one.routes)


def _nothing_to_learn(group: Group, run: RLRun) -> str | None:
    """Return why a group's advantages are all 0, as the name of a count, or `kept` if the run keeps it; else None."""
    if run.advantages not in COMPARE_GROUPS:
        return None
    if len(group) == 1:
        return "dropped_single_groups"
    if len({one.earned if run.credit == "turn" else one.reward for one in group}) == 1:
        return "dropped_equal_groups" if run.equal_rewards == "drop" else "kept"
    return None
