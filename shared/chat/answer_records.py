"""Records of chat answers with their sampled token ids, kept in the store for a while so that they can be trained on:
tokenizing an answer's text again may give other ids.

Keys consist of the tenant, the hour of the answer (which its id contains), and the answer's id. An answer is also found
by its content, the prompt's ids and the logprobs, because some clients keep these but lose the id.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from pydantic import Field, ValidationError, model_validator

from longshore.fields import Frozen, Sha256
from shared.chat.messages import ToolCall
from shared.errors import NotFound
from shared.storage import paths
from shared.storage.store import ObjectStore

_ID = re.compile(r"chatcmpl-(?P<time>[0-9a-f]{8})[0-9a-f]{24}")
_HOUR_S = 3600
LOOKUP_AT_ONCE = 16  # answers; also the most with equal content


class DrawnChoice(Frozen):
    """A choice of an answer: the message that the client got, its token ids with the end token, and their logprobs."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = Field(description="the sampler's, in nats")

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
