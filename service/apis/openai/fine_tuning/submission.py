"""Accepting a fine-tuning job: its files and its model are looked up, its hyperparameters chosen, its run submitted."""

import asyncio
import re

from service.accounts.principals import Principal
from service.apis.openai.examples import count_examples
from service.apis.openai.fine_tuning.request import JobRequest
from service.apis.openai.fine_tuning.runs import Examples, StartingPoint, run_of, source_of
from service.apis.openai.retries import idempotency_key
from service.backend import Backend
from service.files.files import FileRecord
from service.inference.checkpoint_adapters import CheckpointName
from service.runs.views import RunView
from shared.errors import InvalidInput, NotFound
from shared.jobs.job import Lora

_FILE_ID = re.compile(r"file-[A-Za-z0-9-]+")
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
    if not _FILE_ID.fullmatch(given):
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
    """What a name stands for: something that the tenant has published, or else a model as runs name it."""
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
