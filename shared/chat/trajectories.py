"""Trajectories: the tokens sampled for a prompt, and their reward. One group per line of JSONL.

Token ids are trained as they were sampled. Chat messages can be given instead if rendering them gives exactly the
sampled ids, which is checked.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, JsonValue, Tag, ValidationError, model_validator

from longshore.fields import Frozen, Sha256, added
from shared.chat.completions import SamplerAnswer
from shared.chat.messages import ToolCall
from shared.errors import NotFound
from shared.storage import paths
from shared.storage.store import ObjectStore

# --- Answer records ---
# Records of chat answers with their sampled token ids, kept in the store for a while so that they can be trained on:
# tokenizing an answer's text again may give other ids.
#
# Keys consist of the tenant, the hour of the answer (which its id contains), and the answer's id. An answer is also
# found by its content, the prompt's ids and the logprobs, because some clients keep these but lose the id.

_ID = re.compile(r"chatcmpl-(?P<time>[0-9a-f]{8})[0-9a-f]{24}")
_HOUR_S = 3600
LOOKUP_AT_ONCE = 16  # answers; also the most with equal content


class DrawnChoice(Frozen):
    """A choice of an answer: the message that the client got, its token ids with the end token, and their logprobs."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = Field(description="the sampler's log-probabilities, in nats")
    finish_reason: Literal["stop", "length"] | None = added(None)

    @model_validator(mode="after")
    def _one_length(self) -> "DrawnChoice":
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError("there is a logprob for every id")
        return self


class AnswerRecord(Frozen):
    """An answer and its token ids. `name` and `version`: of the published adapter or model that made it.

    `model_sha256` identifies the base model, whose vocabulary the ids belong to.
    """

    answer_id: str
    model_sha256: str
    name: str | None = None
    version: int | None = None
    prompt_ids: tuple[int, ...]
    choices: tuple[DrawnChoice, ...]


class AnswerLookup(Frozen):
    """A query for answers: by ids, or with `alike` by the digest of their content (`content_digest`)."""

    ids: tuple[str, ...] = Field(default=(), max_length=LOOKUP_AT_ONCE)
    alike: Sha256 | None = None
    episode: str | None = added(None, description="instead: what counts of this episode")


def new_answer_id(now: float) -> str:
    """Return an id made of the time in seconds (8 hex digits) and 96 random bits, so that it cannot be guessed."""
    return f"chatcmpl-{int(now):08x}{secrets.token_hex(12)}"


def remember(store: ObjectStore, tenant: str, record: AnswerRecord) -> None:
    """Keep an answer. Raises StoreUnavailable."""
    store.put_bytes(_key(tenant, record.answer_id), record.model_dump_json(exclude_defaults=True).encode())
    for digest in {content_digest(record.prompt_ids, choice.logprobs) for choice in record.choices}:
        store.put_bytes(_alike(tenant, digest) + record.answer_id, b"")


def look_up(store: ObjectStore, tenant: str, wanted: AnswerLookup) -> list[str | None]:
    """Read a tenant's records as JSON, in the order of the ids. Not parsed here: users supplied parts of the contents.

    None for an id that is malformed or another tenant's, or whose record was deleted. Raises StoreUnavailable.
    """
    ids: Sequence[str] = wanted.ids
    if wanted.alike is not None:
        prefix = _alike(tenant, wanted.alike)
        ids = [info.key.removeprefix(prefix) for info in islice(store.list(prefix), LOOKUP_AT_ONCE)]
    with ThreadPoolExecutor(LOOKUP_AT_ONCE) as threads:
        return list(threads.map(lambda answer_id: _read(store, tenant, answer_id), ids))


def _read(store: ObjectStore, tenant: str, answer_id: str) -> str | None:
    try:
        return store.get_bytes(_key(tenant, answer_id)).decode() if _ID.fullmatch(answer_id) else None
    except (NotFound, UnicodeDecodeError):
        return None


def parse_record(text: str | None) -> AnswerRecord | None:
    """Parse a record from JSON. Returns None without a text, or if the text is no record."""
    try:
        return None if text is None else AnswerRecord.model_validate_json(text)
    except ValidationError:
        return None


def content_digest(prompt_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return the key of answers with exactly these token ids and bit-identical logprobs."""
    content = [list(prompt_ids), [value.hex() for value in logprobs]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def prune_answers(store: ObjectStore, now: float, kept_s: float, max_bytes: int) -> None:
    """Delete answers older than `kept_s` seconds, and each tenant's oldest ones beyond `max_bytes` in total."""
    sizes: dict[str, int] = {}
    for tenant, answer_id, key, size in sorted(_all(store), key=lambda found: found[1], reverse=True):
        sizes[tenant] = sizes.get(tenant, 0) + size
        if _given_at(answer_id) < now - kept_s or sizes[tenant] > max_bytes:
            store.delete(key)
    for info in store.list(paths.ANSWER_RECORDS):
        match info.key.removeprefix(paths.ANSWER_RECORDS).split("/"):
            case [_, "alike", _, answer_id] if _ID.fullmatch(answer_id) and _given_at(answer_id) < now - kept_s:
                store.delete(info.key)


def _all(store: ObjectStore) -> Iterator[tuple[str, str, str, int]]:
    """Yield (tenant, answer id, key, size in bytes) of every record."""
    for info in store.list(paths.ANSWER_RECORDS):
        match info.key.removeprefix(paths.ANSWER_RECORDS).split("/"):
            case [tenant, _, name] if _ID.fullmatch(answer_id := name.removesuffix(".json")):
                yield tenant, answer_id, info.key, info.size


def _given_at(answer_id: str) -> int:
    match = _ID.fullmatch(answer_id)
    assert match is not None
    return int(match["time"], 16)


def _key(tenant: str, answer_id: str) -> str:
    return paths.answer_record(tenant, _given_at(answer_id) // _HOUR_S, answer_id)


def _alike(tenant: str, digest: str) -> str:
    """Return the prefix of empty objects whose names are the ids of answers with this content."""
    return f"{paths.ANSWER_RECORDS}{tenant}/alike/{digest}/"


# --- Answers put together: the sequences that are trained ---


@dataclass(frozen=True)
class DrawnTurn:
    """An answer as it was drawn: its prompt's ids, its own, their logprobs in nats, and who drew each.

    `routes`: the experts of all ids except the last one, of `token_bytes` each; or empty.
    """

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"] | None
    versions: Sequence[int | None] = ()
    routes: bytes = b""


@dataclass
class DrawnSequence:
    """Ids in the order that the model saw them, with the logprobs and versions of drawn ones.

    `turns`: the numbers of the answers in it. `routes`: of all ids except the last one.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    turns: list[int] = field(default_factory=list)
    routes: bytes = b""

    def is_begun_by(self, turn: DrawnTurn) -> bool:
        """Return True if the turn's prompt continues these ids."""
        return list(turn.prompt_ids[: len(self.ids)]) == self.ids

    def extend(self, number: int, turn: DrawnTurn) -> None:
        context = turn.prompt_ids[len(self.ids) :]
        self.ids += [*context, *turn.ids]
        self.logprobs += [*[None] * len(context), *turn.logprobs]
        self.versions += [*[None] * len(context), *(turn.versions or [None] * len(turn.ids))]
        self.finish_reason = turn.finish_reason
        self.turns.append(number)
        self.routes += turn.routes[len(self.routes) :]  # what was drawn keeps the experts that it was drawn with


def add_turn(sequences: list[DrawnSequence], number: int, turn: DrawnTurn) -> None:
    """Extend the longest sequence that begins the answer's prompt; without one begin another."""
    begun = [one for one in sequences if one.is_begun_by(turn)]
    if not begun:
        sequences.append(DrawnSequence())
    max(begun or sequences[-1:], key=lambda one: len(one.ids)).extend(number, turn)


def sequences_of_turns(turns: Iterable[DrawnTurn]) -> list[DrawnSequence]:
    """Put answers into as few sequences as there can be."""
    sequences: list[DrawnSequence] = []
    for number, turn in enumerate(turns):
        add_turn(sequences, number, turn)
    return sequences


class TokenSequence(Frozen):
    """Ids in the order that the model saw them: prompt, answers and tool results.

    `sampled`, `logprobs`, `token_ids` and `policy_versions` have one length L. `logprobs` are the sampler's, in nats;
    they are read only where `sampled` is true. `routes`: for a run's own samples, the positions of the prompt's and the
    other tokens' experts in the routes file (activities/sampling/completions.py).
    """

    token_ids: tuple[int, ...] = Field(min_length=1, description="L ids, including the prompt")
    sampled: tuple[bool, ...] = Field(description="which of the ids the policy sampled: only those are trained")
    logprobs: tuple[float | None, ...] = Field(description="null for ids that were not sampled")
    policy_versions: tuple[Annotated[int, Field(ge=0)] | None, ...] | None = Field(
        default=None, description="per id, null for ids that were not sampled; if absent, policy_version for all"
    )
    finish_reason: Literal["stop", "length"] | None = Field(default=None, description="length: it was cut off")
    routes: tuple[int, int] | None = None


class Trajectory(TokenSequence):
    """One sampled sequence and its reward; or several, if what the model saw later does not begin with the first."""

    reward: float
    advantage: float | None = Field(default=None, description="only with advantages `given`")
    token_rewards: tuple[float, ...] | None = Field(
        default=None, description="a reward per id, besides `reward` at the end; only with a critic"
    )
    policy_version: int | None = Field(
        default=None, ge=0, description="version of the adapter that sampled it; 0: the run's beginning; null: unknown"
    )
    turn_rewards: tuple[float, ...] | None = added(
        None, description="the part of `reward` that each answer earned, a run of sampled ids; the rest is the last's"
    )
    branches: tuple[TokenSequence, ...] = added((), description="further sequences, trained for the same reward")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="stored with it, not used")

    @property
    def token_versions(self) -> list[int | None]:
        """The version of the policy that sampled each sampled id; None if it is unknown."""
        if self.policy_versions is None:
            return [self.policy_version] * sum(self.sampled)
        return [one for one, is_sampled in zip(self.policy_versions, self.sampled, strict=True) if is_sampled]


class SentTokenLogprob(SamplerAnswer):
    """A token as in chat completions: its text, its bytes if the server knows them, and its logprob in nats.

    A text `token_id:123` gives the id itself; vLLM writes that on request.
    """

    token: str
    logprob: float
    bytes: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = None


class SentChoiceLogprobs(SamplerAnswer):
    """The tokens of an answer in order: in `content`, or in `refusal` if the model refused to answer."""

    content: tuple[SentTokenLogprob, ...] | None = None
    refusal: tuple[SentTokenLogprob, ...] | None = None

    @property
    def tokens(self) -> tuple[SentTokenLogprob, ...]:
        return self.content or self.refusal or ()


class SampledTurn(SamplerAnswer):
    """How an assistant's turn was sampled: the fields of a chat completion's choice other than the message.

    `answer_id`: the id of this installation's completion in which the turn was choice number `index`. The store keeps
    the token ids of that completion.
    """

    logprobs: SentChoiceLogprobs | None = None
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    finish_reason: str | None = None
    answer_id: str | None = None
    index: int = Field(default=0, ge=0)


class ChatHistory(Frozen):
    """A conversation of a trajectory that has several."""

    messages: tuple[dict[str, JsonValue], ...] = Field(
        min_length=1, validation_alias=AliasChoices("messages", "messages_and_choices")
    )
    tools: tuple[dict[str, JsonValue], ...] | None = Field(default=None, description="the tools in the model's prompt")


class ChatTrajectory(ChatHistory):
    """One sampled conversation, as a client of chat completions has it.

    Assistant turns with `logprobs` or an `answer_id` count as sampled: messages that also have those fields (and
    `token_ids`), or whole choices as the server returned them. All other messages are context. Before training the
    conversation is converted to token ids: sampled ids, each after the ids of the prompt it was sampled with.
    """

    additional_histories: tuple[ChatHistory, ...] = Field(
        default=(), description="further conversations with the same reward: a sub-agent's, or after a summary"
    )
    own_answers: bool = Field(
        default=False, description="train only stored answers of the run's own policy; others are context"
    )
    reward: float
    advantage: float | None = Field(default=None, description="only with advantages `given`")
    policy_version: int | None = Field(
        default=None,
        ge=0,
        validation_alias=AliasChoices("policy_version", "initial_policy_version"),
        description="version of the adapter that sampled its first turn; a stored answer's version overrides it",
    )
    model_version: int | None = Field(
        default=None, ge=0, description="the published adapter's version, if there is no policy_version"
    )
    final_policy_version: int | None = Field(default=None, description="not used: the first turn's version counts")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="stored with it, not used")
    logs: tuple[str, ...] = Field(default=(), description="not used")

    @property
    def histories(self) -> tuple[ChatHistory, ...]:
        """All of its conversations, the first one first."""
        return ChatHistory(messages=self.messages, tools=self.tools), *self.additional_histories


class EpisodeTrajectory(Frozen):
    """What an agent did in an episode: every answer that counts, after the prompt that it was drawn for."""

    episode: str = Field(max_length=64, description="the id of an episode that has ended")
    reward: float
    advantage: float | None = Field(default=None, description="only with advantages `given`")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="stored with it, not used")


def _form_of(trajectory: Any) -> str:
    names = trajectory if isinstance(trajectory, dict) else ()
    if isinstance(trajectory, EpisodeTrajectory) or "episode" in names:
        return "episode"
    is_chat = isinstance(trajectory, ChatTrajectory) or "messages" in names or "messages_and_choices" in names
    return "chat" if is_chat else "tokens"


FORMS = ("tokens", "chat", "episode")
"""Tags of the kinds of trajectories. They occur in the locations of pydantic's errors."""
SentTrajectory = Annotated[
    Annotated[Trajectory, Tag("tokens")]
    | Annotated[ChatTrajectory, Tag("chat")]
    | Annotated[EpisodeTrajectory, Tag("episode")],
    Discriminator(_form_of),
]


class SentGroup(Frozen):
    """A group as a client sends it; `TrajectoryGroup` is one."""

    trajectories: tuple[SentTrajectory, ...] = Field(min_length=1)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    exceptions: tuple[JsonValue, ...] = Field(default=(), description="failed rollouts; not used")
    metrics: dict[str, JsonValue] = Field(default_factory=dict, description="metrics of the whole group; not used")
    logs: tuple[str, ...] = Field(default=(), description="not used")


class TrajectoryGroup(Frozen):
    """The trajectories of one prompt; their rewards are compared with each other."""

    trajectories: tuple[Trajectory, ...] = Field(min_length=1)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
