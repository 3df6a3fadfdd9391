"""Records of chat answers with their sampled token ids, kept in the store for a while so that they can be trained on:
tokenizing an answer's text again may give other ids.

Keys consist of the tenant, the hour of the answer (which its id contains), and the answer's id.
"""

import re
import secrets
from collections.abc import Iterator

from pydantic import Field, ValidationError, model_validator

from shared.chat.messages import ToolCall
from shared.contract import Frozen
from shared.errors import NotFound
from shared.storage import paths
from shared.storage.store import ObjectStore

_ID = re.compile(r"chatcmpl-(?P<time>[0-9a-f]{8})[0-9a-f]{24}")
_HOUR_S = 3600


class DrawnChoice(Frozen):
    """A choice of an answer: the message that the client got, its ids with the end token, and each one's logprob."""

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
    """An answer and its token ids. `name` and `version` are those of the published adapter or model that gave it.

    `model_sha256` identifies the base model, whose vocabulary the ids are of.
    """

    answer_id: str
    model_sha256: str
    name: str | None = None
    version: int | None = None
    prompt_ids: tuple[int, ...]
    choices: tuple[DrawnChoice, ...]


def new_answer_id(now: float) -> str:
    """Return an id of the time in seconds (8 hex digits) and 96 random bits, so that it cannot be guessed."""
    return f"chatcmpl-{int(now):08x}{secrets.token_hex(12)}"


def remember(store: ObjectStore, tenant: str, record: AnswerRecord) -> None:
    """Keep an answer. Raises StoreUnavailable."""
    store.put_bytes(_key(tenant, record.answer_id), record.model_dump_json(exclude_defaults=True).encode())


def recall(store: ObjectStore, tenant: str, answer_id: str) -> AnswerRecord | None:
    """Read a tenant's answer. Returns None if the id is malformed or another tenant's, or the record was deleted."""
    if not _ID.fullmatch(answer_id):
        return None
    try:
        return AnswerRecord.model_validate_json(store.get_bytes(_key(tenant, answer_id)))
    except (NotFound, ValidationError):
        return None


def prune(store: ObjectStore, now: float, kept_s: float, max_bytes: int) -> None:
    """Delete answers older than `kept_s` seconds, and each tenant's oldest ones beyond `max_bytes` in total."""
    sizes: dict[str, int] = {}
    for tenant, answer_id, key, size in sorted(_all(store), key=lambda found: found[1], reverse=True):
        sizes[tenant] = sizes.get(tenant, 0) + size
        if _given_at(answer_id) < now - kept_s or sizes[tenant] > max_bytes:
            store.delete(key)


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
