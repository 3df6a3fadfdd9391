"""A client that got no answer sends its request again, without a key: then it means the same job, and not another.

OpenAI's clients count in a header how often they have sent a request. What is sent the first time is a new job, always.
What is sent again is the job that the same API key made of the same request before, within half an hour: so long do
three attempts of ten minutes take. Where none is on record, the first attempt never came here, and it is a new one.
"""

import asyncio
import hashlib
import secrets
import time

from service.accounts.principals import Principal
from shared.contract import Frozen
from shared.errors import NotFound
from shared.storage import paths
from shared.storage.store import ObjectStore

WINDOW_S = 1800.0


class _Sent(Frozen):
    """The Idempotency-Key that a request was given, and when."""

    key: str
    at: float


async def idempotency_key(store: ObjectStore, asking: Principal, request: Frozen, retry_count: str | None) -> str:
    """The key under which a request that has none of its own is accepted. On record before it is used."""
    digest = hashlib.sha256(f"{asking.key_id} {request.model_dump_json()}".encode()).hexdigest()
    place = paths.sent_request(asking.tenant, digest)
    if retry_count is not None and retry_count.isdecimal() and retry_count.strip("0"):
        try:
            before = _Sent.model_validate_json(await asyncio.to_thread(store.get_bytes, place))
        except NotFound:
            pass
        else:
            if time.time() - before.at < WINDOW_S:
                return before.key
    sent = _Sent(key=f"sent-{secrets.token_hex(16)}", at=time.time())
    await asyncio.to_thread(store.put_bytes, place, sent.model_dump_json().encode())
    return sent.key


async def prune(store: ObjectStore) -> None:
    """Drop what is on record of requests that nobody sends again any more."""
    await asyncio.to_thread(_prune, store)


def _prune(store: ObjectStore) -> None:
    for item in list(store.list(paths.sent_requests())):
        try:
            sent = _Sent.model_validate_json(store.get_bytes(item.key))
        except NotFound:  # another service was faster
            continue
        # The same request may have come anew meanwhile, and its mark is another.
        if time.time() - sent.at >= WINDOW_S and store.head(item.key) == item:
            store.delete(item.key)
