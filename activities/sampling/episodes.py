"""Plays episodes: the policy and a user's environment take turns, until one of them ends it.

The ids that were drawn are trained: a turn's prompt begins with the ids of the turns before, unless the
chat template writes these in another way; then a further sequence begins. Each answer is in the store before the
environment sees it. As the environment is a function of row, seed and answers, an attempt after a kill plays the same
episode with these answers, and continues with the same bits.
"""

import hashlib
import json
import logging
import math
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from activities.formats.dataset import question_of
from activities.formats.rows import Row, is_deep, message_of, messages_of
from activities.heartbeats import in_parallel
from activities.host_context import HostContext, Parts
from activities.sampling.client import Completion, Sampler
from activities.sampling.completions import (
    Branch,
    Drawing,
    Sample,
    SampledGroup,
    sample_of,
    sample_seed,
)
from activities.sampling.questions import ChatPrompts, Prompt, told_calls
from activities.sampling.samplers import refusing
from activities.sandbox.calls import CodeProcess, Limits
from activities.tokenizing.render_prompts import PromptRow
from longshore.dataset_runs import Dataset, DatasetSource, named_sources
from longshore.environments import END_REASONS, Agent, Course, EndReason, PythonEnvironment
from longshore.fields import Artifact, Frozen, added
from shared.chat.completions import DrawnBy
from shared.chat.messages import ChatAnswer, ToolCall
from shared.chat.trajectories import AnswerRecord, DrawnChoice, DrawnSequence, DrawnTurn, add_turn
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.settings import GradingSettings

_PLACE = "rollouts.environment"
_SAID_BYTES = 1 << 20  # of one observation
_WAITS = 6  # times its processor time that a step may take in all, on a busy machine
_stepping = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
"""Held by a step. It cannot wait for anything but a processor."""
_NOT_OURS = "its process answers what ours do not"
_TRIES = 3  # of an environment whose process is killed from outside
_TURN: TypeAdapter[tuple[str, Completion]] = TypeAdapter(tuple[str, Completion])
MOST_REWARD = 1e9  # so that no sum overflows
METRIC_NAME, MOST_METRICS = r"^[A-Za-z_]\w{0,63}$", 32
_log = logging.getLogger(__name__)


class EpisodePlan(Frozen):
    """How the episode of a sample is played: with an environment, or by an agent.

    `source`: how the prompts' rows are read. `max_tokens`: the longest conversation.
    """

    environment: PythonEnvironment | None = None
    agent: Agent | None = added(None)
    source: Dataset
    max_tokens: int = Field(ge=2)

    @property
    def key(self) -> str:
        """All that an episode depends on, beside the files."""
        sources = named_sources(self.source).values()
        fields = "".join(source.model_dump_json(include={"format", "prompt_field"}) for source in sources)
        whose = self.environment or self.agent
        assert whose is not None
        return f"{whose.model_dump_json()} {fields} {self.max_tokens}"


class EpisodeCounts(Frozen):
    """Counts of episodes. `num_later`: turns that have one before them; `num_kept`: those that kept its drawn ids."""

    num: int
    num_turns: int
    num_later: int
    num_kept: int
    ends: dict[EndReason, int]

    @classmethod
    def of(cls, courses: Sequence[Course]) -> "EpisodeCounts":
        num_turns = sum(course.num_turns for course in courses)
        return cls(
            num=len(courses),
            num_turns=num_turns,
            num_later=num_turns - len(courses),
            num_kept=sum(course.num_kept for course in courses),
            ends={end: sum(course.end == end for course in courses) for end in END_REASONS},
        )

    @property
    def metrics(self) -> dict[str, float]:
        ends = {f"episode_end_{end}": count / self.num for end, count in self.ends.items() if count}
        kept = {"episode_kept_share": self.num_kept / self.num_later} if self.num_later else {}
        return {"episode_turns_mean": self.num_turns / self.num} | kept | ends


# --- The environment's side ---


class BrokenEnvironment(Exception):
    """An environment raised an error, or returned what it must not; the message says which."""


class StepLimit(Exception):
    """A step took more than it may, which the policy may have caused."""


class Said(Frozen):
    """What a step returned."""

    observation: str | tuple[dict[str, Any], ...] | None = None
    reward: float | None = Field(default=None, ge=-MOST_REWARD, le=MOST_REWARD)
    done: bool = False
    metrics: dict[Annotated[str, Field(pattern=METRIC_NAME)], float] = Field(
        default_factory=dict, max_length=MOST_METRICS
    )


class EnvironmentProcess:
    """The environment of one episode, in a separate process in the sandbox. Close it."""

    def __init__(
        self, environment: PythonEnvironment, item: dict[str, Any], seed: int, limits: GradingSettings
    ) -> None:
        step_s = limits.python_time_s
        self._frame = json.dumps([environment.source, item, seed, step_s]).encode()
        whole_s = (math.ceil(step_s) + 1) * (environment.max_turns + 2)
        self._limits = Limits(limits.python_memory_bytes, whole_s, _WAITS * step_s, answer_bytes=_SAID_BYTES)
        self._answers: list[dict[str, Any]] = []
        self._process: CodeProcess | None = None

    def reset(self) -> Said:
        """Begin. Raises BrokenEnvironment, StepLimit; InvalidInput: this system refuses to isolate it."""
        return _checked(lambda: Said(observation=self._ask(None)))

    def step(self, answer: dict[str, Any]) -> Said:
        """Take the policy's answer. Raises BrokenEnvironment; StepLimit: the environment is then as before it."""
        said = self._ask(["step", answer])
        self._answers.append(answer)
        if not isinstance(said, dict):
            raise BrokenEnvironment(f"step returned a {type(said).__name__}, and not a dict")
        return _checked(lambda: Said.model_validate(said))

    def score(self) -> float | None:
        """Return what its `score` says of the state that was reached; None without one. Raises BrokenEnvironment."""
        try:
            score = self._ask(["score"])
        except StepLimit as error:
            raise BrokenEnvironment(f"score: {error}") from error
        return _checked(lambda: Said(reward=score)).reward

    def close(self) -> None:
        """End its process. If it is asked again, what was answered is played again in a new one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ask(self, question: Any) -> Any:
        """Return what the environment says. If its process is killed from outside, a new one is asked."""
        for tries_left in reversed(range(_TRIES)):
            try:
                if self._process is None:
                    self._process = CodeProcess("environment", self._frame, self._limits)
                    for earlier in [None, *(["step", answer] for answer in self._answers)] if question else []:
                        self._answer(earlier)
                return self._answer(question)
            except StepLimit:
                self.close()
                raise
            except (RuntimeError, OSError) as error:
                self.close()
                if not tries_left:
                    raise BrokenEnvironment(str(error)[:4000]) from error
                _log.warning("an environment's process was lost, and is begun anew: %s", error)
        raise AssertionError("the last try returns or raises")

    def _answer(self, question: Any) -> Any:
        assert self._process is not None
        try:
            with _stepping:
                told = json.loads(self._process.answer(json.dumps(question).encode()))
            json.dumps(told, ensure_ascii=False).encode()
        except InvalidInput as error:
            raise StepLimit(error.message) from error
        except UnicodeEncodeError as error:
            raise BrokenEnvironment("a text holds half of a surrogate pair (\\ud800 to \\udfff)") from error
        except (ValueError, RecursionError) as error:
            raise BrokenEnvironment(_NOT_OURS) from error
        if is_deep(told):
            raise BrokenEnvironment("it returned what is nested too deep")
        match told:
            case {"said": said}:
                return said
            case {"failed": str(reason), "is_limit": True}:
                raise StepLimit(reason)
            case {"failed": str(reason)}:
                raise BrokenEnvironment(reason)
        raise BrokenEnvironment(_NOT_OURS)


def _checked(read: Callable[[], Said]) -> Said:
    try:
        return read()
    except ValidationError as error:
        raise BrokenEnvironment(f"it returned what it must not: {first_rule(error)}") from error


# --- The episode ---


@dataclass(frozen=True)
class Played:
    """An episode that has ended. `prompt_ids`: of its first turn; `prompt_routes`: their experts."""

    prompt_ids: tuple[int, ...]
    prompt_routes: bytes
    sample: Sample
    drawn_by: tuple[DrawnBy, ...]

    def with_prompt_of(self, num: int, how: Drawing) -> "Played":
        """Return the episode with the first `num` ids as its prompt, and the others of the prompt in the sample."""
        rest, item_bytes = self.prompt_ids[num:], 0 if how.routes is None else how.routes.dtype.itemsize
        if not rest:
            return self
        sample, versions = self.sample, self.sample.policy_versions
        told = {
            "token_ids": rest + sample.token_ids,
            "logprobs": (None,) * len(rest) + sample.logprobs,
            "policy_versions": (None,) * len(rest) + versions if versions else (),
            "routes": self.prompt_routes[num * item_bytes :] + sample.routes,
        }
        prompt_routes = self.prompt_routes[: num * item_bytes]
        return replace(
            self,
            prompt_ids=self.prompt_ids[:num],
            prompt_routes=prompt_routes,
            sample=sample.model_copy(update=told),
        )


class Transcript:
    """The answers of an episode as they are trained: in as few sequences of ids as there can be."""

    def __init__(self, how: Drawing, place: str) -> None:
        self._how, self._place = how, place
        self._sequences: list[DrawnSequence] = []
        self._text, self._drawn_by = "", dict[DrawnBy, None]()
        self._num_turns = self.num_kept = 0

    @property
    def order(self) -> list[int]:
        """The numbers of the answers in the order of the sequences."""
        return [number for one in self._sequences for number in one.turns]

    def take(self, prompt: Prompt, completion: Completion) -> None:
        """Take the next answer. Raises InvalidInput: the sampler sent what cannot be trained."""
        how, version = self._how, self._how.policy_version
        routes = how.routes_of(completion, len(prompt.ids), self._place)
        sample, logprobs = sample_of(completion, self._place, version), completion.logprobs
        versions = sample.policy_versions or (version,) * len(completion.token_ids)
        turn = DrawnTurn(prompt.ids, completion.token_ids, logprobs, sample.finish_reason, versions, routes)
        add_turn(self._sequences, self._num_turns, turn)
        self._text = completion.text
        self._drawn_by |= dict.fromkeys(how.weights_of(completion))
        self._num_turns += 1
        self.num_kept += prompt.continues

    def played(self, course: Course) -> Played:
        """Put the answers together."""
        version, shape = self._how.policy_version, self._how.routes
        item_bytes = 0 if shape is None else shape.dtype.itemsize

        def tokens(one: DrawnSequence) -> dict[str, Any]:
            num_prompt = _num_prompt(one)
            own = tuple(one.versions[num_prompt:])
            return {
                "token_ids": tuple(one.ids[num_prompt:]),
                "logprobs": tuple(one.logprobs[num_prompt:]),
                "finish_reason": one.finish_reason,
                "policy_versions": own if set(own) - {None, version} else (),
                "routes": one.routes[num_prompt * item_bytes :],
            }

        first, *rest = self._sequences
        branches = tuple(
            Branch(
                prompt_ids=tuple(one.ids[: _num_prompt(one)]),
                prompt_routes=one.routes[: _num_prompt(one) * item_bytes],
                **tokens(one),
            )
            for one in rest
        )
        return Played(
            prompt_ids=tuple(first.ids[: _num_prompt(first)]),
            prompt_routes=first.routes[: _num_prompt(first) * item_bytes],
            sample=Sample(text=self._text, branches=branches, course=course, **tokens(first)),
            drawn_by=tuple(self._drawn_by),
        )


def answer_of(
    prompt: Prompt, completion: Completion, answer_id: str, model: Artifact
) -> tuple[ChatAnswer, AnswerRecord]:
    """Return an answer as a message, and its record, whose ids a later turn keeps.

    `answer_id`: as `told_calls` has it.
    """
    has_tools = bool(prompt.question.tools) and not completion.was_cut_off
    text, calls = told_calls(completion.text, answer_id) if has_tools else (completion.text, ())
    answer = ChatAnswer(content=None if calls and not text else text, tool_calls=calls or None)
    choice = DrawnChoice(
        content=answer.content,
        tool_calls=calls,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason="length" if completion.was_cut_off else "stop",
    )
    return answer, AnswerRecord(
        answer_id=answer_id, model_sha256=model.sha256, prompt_ids=prompt.ids, choices=(choice,)
    )


@dataclass(frozen=True)
class Player:
    """Plays episodes with a policy that a sampler serves.

    Attributes:
        writers: write conversations as prompts. An episode has one of them.
        name: the policy's in the sampler.
        model: whose tokenizer and chat template write the conversation.
        sources: how the prompts' rows are read, by the names of a mixture's sources.
        turns: answers of episodes that have not ended; `known`: those that an earlier attempt has drawn.
    """

    host: HostContext
    writers: Sequence[ChatPrompts]
    sampler: Sampler
    name: str
    model: Artifact
    how: Drawing
    plan: EpisodePlan
    sources: Mapping[str, DatasetSource]
    turns: Parts
    known: frozenset[int]

    def group(
        self, episode: Callable[[int, int, PromptRow], Played], group: int, row: int, prompt: PromptRow
    ) -> SampledGroup:
        """Play the episodes of a prompt, all at once.

        Args:
            episode: plays one, by the numbers of group and sample.

        Raises:
            InvalidInput: the sampler refuses a prompt; the environment cannot begin, or begins in different ways.
            SamplerUnavailable: it does not answer, or no longer serves the policy.
        """
        members = range(self.how.group_size)
        ended = dict(in_parallel(lambda member: (member, episode(group, member, prompt)), members, len(members)))
        played = [ended[member] for member in members]
        first, *rest = (one.prompt_ids for one in played)
        if self.plan.environment is not None and any(ids != first for ids in rest):
            raise InvalidInput(f"reset returns different things for one row and seed ({prompt.place})", _PLACE)
        columns = zip(first, *rest, strict=False)
        shared = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))  # agents may tell the time
        whole = [one.with_prompt_of(shared, self.how) for one in played]
        return SampledGroup(
            group=group,
            row=row,
            place=prompt.place,
            source=prompt.source,
            prompt_ids=whole[0].prompt_ids,
            policy_version=self.how.policy_version,
            samples=tuple(one.sample for one in whole),
            drawn_by=tuple(dict.fromkeys(by for one in whole for by in one.drawn_by)),
            prompt_routes=whole[0].prompt_routes,
        )

    def in_environment(self, group: int, member: int, prompt: PromptRow) -> Played:
        """Play one episode with the run's environment."""
        environment = self.plan.environment
        assert environment is not None
        seed = sample_seed(self.how.seed, group)
        process = EnvironmentProcess(environment, prompt.item, seed, self.host.settings.grading)
        number = (group * self.how.group_size + member) * environment.max_turns
        with closing(process):
            talk = _Talk(self, self.writer(group, member), process, prompt)
            for turn in range(environment.max_turns):
                draws = seed + member if not turn else sample_seed(self.how.seed, group, member, turn)
                if (end := talk.turn(number + turn, draws)) is not None:
                    break
            return talk.ended(end or "turn_limit")

    def writer(self, group: int, member: int) -> ChatPrompts:
        """Return the one that writes an episode's prompts."""
        return self.writers[(group + member) % len(self.writers)]

    def drawn(self, number: int, prompt_ids: tuple[int, ...], max_tokens: int, seed: int, place: str) -> Completion:
        """Return the answer of a turn: the one that is in the store, or a new one, which is put there first."""
        asked = digest_of_ids(prompt_ids)
        if number in self.known:
            before, completion = self.recorded(number)
            if before == asked:
                return completion
            _log.warning("%s: the environment says something else than before; the turn is drawn again", place)
        completion = self.draw(prompt_ids, max_tokens, seed, place)
        self.record(number, asked, completion)
        return completion

    def draw(self, prompt_ids: tuple[int, ...], max_tokens: int, seed: int, place: str) -> Completion:
        """Have the sampler draw an answer. Raises as `group` does."""
        sampling = self.how.sampling.model_copy(update={"max_tokens": max_tokens})
        with refusing(self.sampler, self.name, place):
            [completion] = self.sampler.sample(self.name, prompt_ids, sampling, 1, seed, self.how.route_bytes)
        return completion

    def recorded(self, number: int) -> tuple[str, Completion]:
        """Return the digest of a question that was answered, and the answer."""
        return _TURN.validate_json(self.turns.get(number))

    def record(self, number: int, asked: str, completion: Completion) -> None:
        """Put an answer into the store. `asked`: the digest of its question."""
        self.turns.keep(number, _TURN.dump_json((asked, completion)))


def digest_of_ids(prompt_ids: tuple[int, ...], *others: object) -> str:
    """Return the digest of a question: its ids, and what else its answer depends on."""
    digest = hashlib.sha256(array("Q", prompt_ids))
    if others:
        digest.update(repr(others).encode())
    return digest.hexdigest()


def begun(
    source: DatasetSource, process: EnvironmentProcess, prompt: PromptRow
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Begin an episode. Returns the row's messages, those of the environment, and the row's tools.

    Raises InvalidInput: the environment does not begin.
    """
    question = question_of(source)(Row(prompt.place, prompt.item))
    try:
        return question.messages, _observed(process.reset(), ()), question.tools or []
    except (BrokenEnvironment, StepLimit) as error:
        raise InvalidInput(f"reset: {error} ({prompt.place})", f"{_PLACE}.source") from error


def _observed(said: Said, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return an observation as messages. Raises BrokenEnvironment: they are none."""
    if not said.observation:
        return []
    messages: list[dict[str, Any]]
    if not isinstance(said.observation, str):
        messages = list(said.observation)
    elif len(calls) != 1:
        messages = [{"role": "user", "content": said.observation}]
    else:
        [call] = calls
        named = {"tool_call_id": call.id, "name": call.function.name}
        messages = [{"role": "tool", **named, "content": said.observation}]
    try:
        return messages_of(Row("observation", {"messages": messages}), "messages")
    except InvalidInput as error:
        raise BrokenEnvironment(f"it returned what it must not: {error}") from error


class _Talk:
    """An episode that is played: its conversation, its answers, and what the environment gave for them."""

    def __init__(self, player: Player, writer: ChatPrompts, process: EnvironmentProcess, prompt: PromptRow) -> None:
        """Begin. Raises InvalidInput: the environment does not begin."""
        self._player, self._writer, self._process, self._place = player, writer, process, prompt.place
        asked, observed, self._tools = begun(player.sources[prompt.source], process, prompt)
        self._messages, self._num_asked = [*asked, *observed], len(asked)
        self._transcript = Transcript(player.how, prompt.place)
        self._last: tuple[str, AnswerRecord] | None = None  # the last answer, by the conversation that it ends
        self._rewards: list[float | None] = []
        self._metrics: dict[str, float] = {}
        self._error: str | None = None

    def turn(self, number: int, seed: int) -> EndReason | None:
        """Draw an answer, and let the environment take it. Returns why the episode ends with it, if it does."""
        try:
            prompt = self._writer.prompt(self._player.model, self._messages, self._tools, self._earlier)
        except InvalidInput as error:
            if not self._rewards:
                raise InvalidInput(error.message, self._place) from error
            return self._broke(f"its observation cannot be written: {error}")
        room, most = self._player.plan.max_tokens - len(prompt.ids), self._player.how.sampling.max_tokens
        if room < 1:
            if not self._rewards:
                rule = f"the first turn's {len(prompt.ids)} tokens leave no room for an answer within max_tokens"
                raise InvalidInput(f"{rule} ({self._place})", _PLACE)
            return "context_limit"
        completion = self._player.drawn(number, prompt.ids, min(room, most), seed, self._place)
        calls = self._answered(prompt, completion)
        if completion.was_cut_off:
            return "context_limit" if room < most else "token_limit"
        asked = {"content": self._messages[-1]["content"] or "", "tool_calls": [_call(call) for call in calls]}
        try:
            said = self._process.step(asked)
            self._messages += _observed(said, calls)
        except StepLimit:
            return "step_limit"
        except BrokenEnvironment as error:
            return self._broke(str(error))
        self._rewards[-1] = said.reward
        self._metrics |= said.metrics
        return "completed" if said.done else None

    def _earlier(self, conversation: str) -> AnswerRecord | None:
        return self._last[1] if self._last is not None and self._last[0] == conversation else None

    def _answered(self, prompt: Prompt, completion: Completion) -> tuple[ToolCall, ...]:
        """Put an answer behind the conversation. Returns its calls."""
        self._transcript.take(prompt, completion)
        self._rewards.append(None)
        answer, record = answer_of(prompt, completion, str(len(self._rewards)), self._player.model)
        self._last = prompt.conversation(answer), record
        told = answer.model_dump(mode="json", exclude_none=True)
        self._messages.append(message_of(Row(self._place, {}), "answer", {"content": "", **told}))
        return answer.tool_calls or ()

    def _broke(self, reason: str) -> EndReason:
        self._error = reason
        return "environment_broke"

    def ended(self, end: EndReason) -> Played:
        """Score the state that the episode has reached, and put its answers together."""
        score: float | None = None
        if end != "environment_broke":
            try:
                score = self._process.score()
            except BrokenEnvironment as broken:
                end = self._broke(str(broken))
        given = [value for value in (*self._rewards, score) if value is not None]
        error = self._error if end == "environment_broke" else None
        if not given and end == "completed":  # one that the policy ended before it earned anything is worth 0
            error = "the environment ended the episode without any reward: give one in step, or define score"
        turn_rewards = [value or 0.0 for value in self._rewards]
        turn_rewards[-1] += score or 0.0
        order = self._transcript.order
        course = Course(
            end=end,
            messages=tuple(self._messages[self._num_asked :]),
            turn_rewards=tuple(turn_rewards[number] for number in order),
            reward=math.fsum(given) if error is None else None,
            error=error,
            metrics=self._metrics,
            num_kept=self._transcript.num_kept,
        )
        return self._transcript.played(course)


def _num_prompt(one: DrawnSequence) -> int:
    return next(place for place, logprob in enumerate(one.logprobs) if logprob is not None)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.function.name, "arguments": json.loads(call.function.arguments)}
