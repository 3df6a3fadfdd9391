"""Episodes: an agent's questions at its own address, and the answers. Trajectories are made of them.

Each turn is in the store before its answer is sent, by the digest of the question: the same question gets the same
answer. It is also there by the digest of the conversation that it makes: a later question that begins with that is
drawn after the same ids. The end names the answers that count, and is written once, so that a step that is tried again
trains the same. Their token ids are in the records of answers (shared/chat/trajectories.py).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from longshore.fields import Frozen, Sha256
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.chat.trajectories import LOOKUP_AT_ONCE, AnswerLookup, AnswerRecord, look_up, parse_record
from shared.errors import InvalidInput, NotFound
from shared.storage import paths
from shared.storage.store import ObjectInfo, ObjectStore

EPISODE_ID = re.compile(r"ep-(?P<time>[0-9a-f]{8})[0-9a-f]{16}")
# Fields of a question that do not change what is drawn for it.
_BESIDE = {"stream", "stream_options", "user", "metadata", "store", "safety_identifier", "service_tier"}
_BESIDE |= {"prompt_cache_key", "prompt_cache_retention"}


IMPOSED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop")
"""Settings of a question that the run decides, whatever the agent sends."""


class TurnPlace(Frozen):
    """The place of a turn in the store. `is_side`: it is answered, and never trained."""

    episode: str
    digest: Sha256
    is_side: bool
    max_turns: int


class EpisodeTurn(Frozen):
    """A turn: the answer as the agent gets it, and when it was drawn, in seconds since 1970.

    `after`: the id of the answer that ends the beginning of its question; None of a first turn. `messages`: those of
    the question behind that. `continues`: its prompt begins with the ids of that answer, as they were drawn.
    """

    answer: ChatCompletion
    at: float
    is_side: bool
    after: str | None = None
    messages: tuple[dict[str, JsonValue], ...] = ()
    continues: bool = False


class EpisodeEnd(Frozen):
    """The part of an episode that counts: the ids of its answers, in order."""

    answer_ids: tuple[str, ...] = ()
    num_side_turns: int = Field(default=0, ge=0)
    num_later_turns: int = Field(default=0, ge=0, description="those that have answers of the episode before them")
    num_continuing: int = Field(default=0, ge=0, description="the later ones whose prompts begin with their ids")


def digest_of(asked: ChatRequest) -> str:
    """Return the digest of a question, apart from the fields that change nothing about its answer."""
    return hashlib.sha256(asked.model_dump_json(exclude=_BESIDE, exclude_none=True).encode()).hexdigest()


def overridden(asked: ChatRequest) -> list[str]:
    """Return the settings of a question that an episode replaces."""
    return [name for name in (*IMPOSED, "seed", "ignore_eos", "stop_token_ids") if getattr(asked, name) is not None]


def answered_turn(store: ObjectStore, tenant: str, place: TurnPlace) -> ChatCompletion | None:
    """Return the answer to a question of this digest, if there is one. Raises StoreUnavailable."""
    try:
        return EpisodeTurn.model_validate_json(store.get_bytes(_turn(tenant, place.episode, place.digest))).answer
    except NotFound:
        return None


def check_turns(store: ObjectStore, tenant: str, place: TurnPlace) -> None:
    """Raises InvalidInput: the episode has as many turns as it may. Raises StoreUnavailable."""
    if sum(1 for _ in store.list(_turns(tenant, place.episode))) >= place.max_turns:
        raise InvalidInput(f"this episode has had its {place.max_turns:,} turns", "messages")


def record_turn(
    store: ObjectStore, tenant: str, place: TurnPlace, turn: EpisodeTurn, conversation: str
) -> ChatCompletion:
    """Keep a turn. Returns the answer that counts: if the question was answered meanwhile, that answer.

    `conversation`: the digest of the question's messages and the answer. Raises StoreUnavailable.
    """
    store.put_if_absent(_after(tenant, place.episode, conversation), turn.answer.id.encode())
    body = turn.model_dump_json(exclude_defaults=True).encode()
    if store.put_if_absent(_turn(tenant, place.episode, place.digest), body):
        return turn.answer
    return answered_turn(store, tenant, place) or turn.answer


def answer_before(store: ObjectStore, tenant: str, episode: str, conversation: str) -> AnswerRecord | None:
    """Return the answer that ends a conversation of this digest, if the episode has one. Raises StoreUnavailable."""
    try:
        answer_id = store.get_bytes(_after(tenant, episode, conversation)).decode()
    except NotFound:
        return None
    [text] = look_up(store, tenant, AnswerLookup(ids=(answer_id,)))
    return parse_record(text)


def conversation_digest(messages: Sequence[dict[str, Any]], tools: Any) -> str:
    """Return the digest of a conversation: its texts and calls, without the calls' ids."""
    said = [
        [
            message["role"],
            message.get("content") or "",
            [[call["function"]["name"], call["function"].get("arguments")] for call in message.get("tool_calls") or ()],
        ]
        for message in messages
    ]
    return hashlib.sha256(json.dumps([said, tools], sort_keys=True).encode()).hexdigest()


def turns_of(store: ObjectStore, tenant: str, episode: str) -> list[EpisodeTurn]:
    """Read an episode's turns, in order. Raises StoreUnavailable."""
    keys = [info.key for info in store.list(_turns(tenant, episode))]
    with ThreadPoolExecutor(LOOKUP_AT_ONCE) as threads:
        turns = [EpisodeTurn.model_validate_json(body) for body in threads.map(store.get_bytes, keys)]
    return sorted(turns, key=lambda turn: (turn.at, turn.answer.id))


def end_episode(store: ObjectStore, tenant: str, episode: str) -> EpisodeEnd:
    """Write which turns count, unless that is written. Returns what is. Raises StoreUnavailable."""
    turns = turns_of(store, tenant, episode)
    counted = [turn for turn in turns if not turn.is_side]
    end = EpisodeEnd(
        answer_ids=tuple(turn.answer.id for turn in counted),
        num_side_turns=len(turns) - len(counted),
        num_later_turns=sum(turn.after is not None for turn in counted),
        num_continuing=sum(turn.continues for turn in counted),
    )
    if store.put_if_absent(_end(tenant, episode), end.model_dump_json().encode()):
        return end
    return EpisodeEnd.model_validate_json(store.get_bytes(_end(tenant, episode)))


def read_end(store: ObjectStore, tenant: str, episode: str) -> EpisodeEnd | None:
    """Return what counts of an episode; None if it has not ended, or is none of this tenant's."""
    try:
        return EpisodeEnd.model_validate_json(store.get_bytes(_end(tenant, episode)))
    except (NotFound, ValidationError):
        return None


def look_up_either(store: ObjectStore, tenant: str, wanted: AnswerLookup) -> list[str | None]:
    """Read answers as `look_up` does; or what counts of an episode, as JSON. Raises StoreUnavailable."""
    if wanted.episode is None:
        return look_up(store, tenant, wanted)
    end = read_end(store, tenant, wanted.episode) if EPISODE_ID.fullmatch(wanted.episode) else None
    return [None if end is None else end.model_dump_json()]


def begun_at(episode: str) -> int:
    """Return when an episode began, in seconds since 1970, by its id."""
    match = EPISODE_ID.fullmatch(episode)
    assert match is not None
    return int(match["time"], 16)


def expired_keys(store: ObjectStore, before: float, max_bytes: int) -> Iterator[str]:
    """Yield the keys of everything of episodes that began before a time, and of each tenant's oldest ones beyond
    `max_bytes` in total.
    """
    found: dict[tuple[int, str, str], list[ObjectInfo]] = {}
    for info in store.list(paths.EPISODES):
        match info.key.removeprefix(paths.EPISODES).split("/"):
            case [tenant, episode, *_] if EPISODE_ID.fullmatch(episode):
                found.setdefault((begun_at(episode), tenant, episode), []).append(info)
    sizes: dict[str, int] = {}
    for began, tenant, episode in sorted(found, reverse=True):
        infos = found[began, tenant, episode]
        sizes[tenant] = sizes.get(tenant, 0) + sum(info.size for info in infos)
        if began < before or sizes[tenant] > max_bytes:
            yield from (info.key for info in infos)


def _turns(tenant: str, episode: str) -> str:
    return f"{paths.EPISODES}{tenant}/{episode}/turns/"


def _turn(tenant: str, episode: str, digest: str) -> str:
    return f"{_turns(tenant, episode)}{digest}.json"


def _after(tenant: str, episode: str, conversation: str) -> str:
    return f"{paths.EPISODES}{tenant}/{episode}/after/{conversation}"


def _end(tenant: str, episode: str) -> str:
    return f"{paths.EPISODES}{tenant}/{episode}/end.json"
