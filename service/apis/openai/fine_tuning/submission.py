"""Accepting a fine-tuning job: its files and its model are looked up, its hyperparameters chosen, its run submitted."""

import asyncio
import hashlib
import secrets
import time

from service.accounts.principals import Principal
from service.apis.openai.fine_tuning.automatic import count_examples
from service.apis.openai.fine_tuning.request import JobRequest
from service.apis.openai.fine_tuning.results import FILE_ID
from service.apis.openai.fine_tuning.runs import Examples, StartingPoint, run_of, source_of
from service.backend import Backend
from service.files.files import FileRecord
from service.inference.published_models import CheckpointName
from service.runs.views import RunView
from shared.contract import Frozen
from shared.errors import InvalidInput, NotFound
from shared.jobs.job import Lora
from shared.storage import paths
from shared.storage.store import ObjectStore

_TRAINING_PURPOSE = "fine-tune"


async def submit_job(
    backend: Backend, asking: Principal, request: JobRequest, given_key: str | None, retry_count: str | None
) -> RunView:
    """Start a job; or find the one that a key, or a client's first attempt, has started.

    Args:
        given_key: an Idempotency-Key.
        retry_count: how often the client has sent this before, as it says.

    Raises:
        InvalidInput: names the field and the rule that it breaks.
        QuotaExceeded
    """
    if request.integrations and backend.settings.wandb_mode == "disabled":
        raise InvalidInput("W&B is switched off in this installation", "integrations")
    training = await _examples(backend, asking.tenant, request.training_file, "training_file")
    validation = None
    if request.validation_file is not None:
        validation = await _examples(backend, asking.tenant, request.validation_file, "validation_file")
    start = await asyncio.to_thread(_starting_point, backend, asking.tenant, request.model)
    run, hyperparameters = run_of(request, start, training, validation)
    key = given_key or await idempotency_key(backend.store, asking, request, retry_count)
    return await backend.runs.submit(asking, run, key, source_of(request, hyperparameters), asked=request)


async def _examples(backend: Backend, tenant: str, given: str, place: str) -> Examples:
    """Raises InvalidInput for a file that is not there, or is no training data."""
    if not FILE_ID.fullmatch(given):
        if "/" in given:
            return Examples(given)
        raise InvalidInput("this is neither the id of a file, nor a URI", place)
    try:
        record = await backend.files.show(tenant, given)
    except NotFound as error:
        raise InvalidInput(str(error), place) from None
    if record.purpose != _TRAINING_PURPOSE:
        raise InvalidInput(f"{given} has the purpose {record.purpose}: jobs read files of {_TRAINING_PURPOSE}", place)
    return Examples(record.uri, await asyncio.to_thread(_count, backend, record))


def _count(backend: Backend, record: FileRecord) -> int | None:
    return count_examples(backend.files.content(record), record.size)


def _starting_point(backend: Backend, tenant: str, model: str) -> StartingPoint:
    """Resolve a job's model: a published name of the tenant's, or else a model as runs name it."""
    try:
        found = backend.published.find(tenant, model)
    except NotFound as error:
        if CheckpointName.parse(model):
            raise InvalidInput(str(error), "model") from None
        if "/" not in model:
            rule = "you have published nothing of this name, and it is no folder, URI or hub id (organisation/name)"
            raise InvalidInput(rule, "model") from None
        return StartingPoint(model)
    artifact = backend.published.artifact(tenant, found)
    if found.kind == "models":
        return StartingPoint(artifact.uri)
    run = backend.published.record(tenant, found).run
    return StartingPoint(run.model, artifact.uri, run.trainable if isinstance(run.trainable, Lora) else None)


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
    for item in list(store.list(paths.SENT_REQUESTS)):
        try:
            sent = _Sent.model_validate_json(store.get_bytes(item.key))
        except NotFound:  # another service was faster
            continue
        # The same request may have come anew meanwhile, and its mark is another.
        if time.time() - sent.at >= WINDOW_S and store.head(item.key) == item:
            store.delete(item.key)
