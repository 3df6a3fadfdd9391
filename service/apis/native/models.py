"""The native API's models: listed, downloaded, exported, verified."""

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import StreamingResponse

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.keys import Asking, reads_or_writes
from service.apis.bodies import JsonBody, JsonRoute, file_answer, tar_answer
from service.backend import Backed, Backend
from service.files import PublishedFiles
from service.inference.exports import ExportView
from service.inference.published_models import ModelView
from service.sealing import public_keys
from shared.errors import InvalidInput
from shared.provenance import Envelope, PublicKey
from shared.runs.acceptance import precision_of
from shared.runs.requests import Precision
from shared.runs.start import Export
from shared.storage.artifacts import FileEntry
from shared.storage.host_states import Devices, HostState, read_states

# --- The native API's published models and their files, `/api/v1/models`; and the hosts that poll ---

router = APIRouter()
ModelId = Annotated[str, Path(max_length=128, description="`name`, its newest version; `name:v3`; `run:step-30`")]


class HostView(Frozen):
    """A GPU or sampler host that is up. `id` tells hosts of one machine apart, and a restarted host keeps it.

    `name`: of its machine; only an operator's key sees it. `lease_since`: when it took the lease that it works on, in
    seconds since 1970, as `seen_at` is. `lacking`: why it takes no runs, if it does not.
    """

    id: str
    name: str | None
    shape: str
    max_ranks: int | None = None
    devices: Devices | None = None
    lease_since: float | None = None
    seen_at: float
    lacking: tuple[str, ...] = ()


class QueueHosts(Frozen):
    """The hosts of a role. `num_polling`: how many ask for work now; a host that has all the work it takes does not.

    `lacking`: why hosts take no runs, with their names if an operator's key asks. `precision`: on GPU hosts, of runs
    that name none. `hosts`: those that are up, without control hosts.
    """

    role: Literal["control", "gpu", "sampler"]
    queue: str
    num_polling: int
    lacking: tuple[str, ...] = ()
    precision: Precision | None = None
    hosts: tuple[HostView, ...] = ()


class DeletedVersions(Frozen):
    """What was deleted: one version, or a name with all of them."""

    id: str
    deleted: bool = True


@router.get("/hosts")
async def list_hosts(backend: Backed, asking: Asking) -> tuple[QueueHosts, ...]:
    """The hosts of each role: how many wait for work, what each of them is, and why some take no runs."""
    settings, now = backend.settings, time.time()
    states = await asyncio.to_thread(read_states, backend.store, settings.shape)
    precision = await asyncio.to_thread(precision_of, "auto", settings, backend.store)
    queues: tuple[tuple[Literal["control", "gpu", "sampler"], str], ...] = (
        ("control", settings.control_queue),
        ("gpu", settings.lease_queue),
        ("sampler", settings.sampler_queue),
    )
    counts = await asyncio.gather(*(backend.temporal.num_polling(queue) for _, queue in queues))
    return tuple(
        QueueHosts(
            role=role,
            queue=queue,
            num_polling=count,
            lacking=tuple(why for each in states if each.role == role for why in each.why_not(now, asking.is_operator)),
            precision=precision if role == "gpu" else None,
            hosts=tuple(_view(each, now, asking.is_operator) for each in states if each.role == role),
        )
        for (role, queue), count in zip(queues, counts, strict=True)
    )


def _view(host: HostState, now: float, by_name: bool) -> HostView:
    shown = host.model_dump(include={"shape", "max_ranks", "devices", "lease_since", "seen_at"})
    name = host.name if by_name else None
    return HostView(id=host.id, name=name, lacking=host.why_not(now, by_name=False), **shown)


@router.get("/models")
async def list_models(backend: Backed, asking: Asking) -> tuple[ModelView, ...]:
    """The tenant's published models: each name once, with its newest version."""
    return tuple(await asyncio.to_thread(backend.published.views, asking.tenant))


@router.get("/models/{model_id}")
async def get_model(model_id: ModelId, backend: Backed, asking: Asking) -> ModelView:
    """The published version of a name or id, with its size."""
    return await asyncio.to_thread(backend.published.view, asking.tenant, model_id)


@router.delete("/models/{model_id}")
async def delete_model(model_id: ModelId, backend: Backed, asking: Asking) -> DeletedVersions:
    """Delete a published model: `name:v3` deletes one version, `name` all. Their numbers are not used again."""
    audit.touched(model_id)
    await asyncio.to_thread(backend.published.delete_model, asking.tenant, model_id)
    return DeletedVersions(id=model_id)


@router.get("/models/{model_id}/files")
@router.get("/models/{model_id}/exports/{export}/files")
async def model_files(
    model_id: ModelId, backend: Backed, asking: Asking, export: str | None = None
) -> tuple[FileEntry, ...]:
    """The files of an adapter, in PEFT's format, or of a model, or of an export: paths, sizes, hashes."""
    return (await asyncio.to_thread(_files, backend, asking.tenant, model_id, export)).entries


@router.get("/models/{model_id}/files/{path:path}", response_class=Response)
@router.get("/models/{model_id}/exports/{export}/files/{path:path}", response_class=Response)
async def model_file(
    model_id: ModelId, path: str, backend: Backed, asking: Asking, export: str | None = None
) -> StreamingResponse:
    """One file of an adapter, of a model or of an export."""
    return file_answer(await asyncio.to_thread(_files, backend, asking.tenant, model_id, export), path)


@router.get("/models/{model_id}/provenance")
async def model_provenance(model_id: ModelId, backend: Backed, asking: Asking) -> Envelope:
    """The signed statement of a version's origin: in-toto with SLSA provenance, in a DSSE envelope."""
    return await asyncio.to_thread(backend.published.provenance, asking.tenant, model_id)


@router.get("/provenance/keys")
async def provenance_keys(backend: Backed, asking: Asking) -> tuple[PublicKey, ...]:
    """The public keys that verify statements of this installation. Keep a copy elsewhere to trust them."""
    return await asyncio.to_thread(public_keys, backend.settings)


@router.get("/models/{model_id}/download", response_class=Response)
@router.get("/models/{model_id}/exports/{export}/download", response_class=Response)
async def download_model(
    model_id: ModelId, backend: Backed, asking: Asking, export: str | None = None
) -> StreamingResponse:
    """All files of an adapter, of a model or of an export, as a tar."""
    files = await asyncio.to_thread(_files, backend, asking.tenant, model_id, export)
    return tar_answer(files, "-".join(filter(None, (model_id.replace(":", "-"), export))))


@router.get("/models/{model_id}/base")
async def base_files(model_id: ModelId, backend: Backed, asking: Asking) -> tuple[FileEntry, ...]:
    """The files of the model that an adapter was trained on: with them an adapter can be merged."""
    return (await asyncio.to_thread(_base, backend, asking.tenant, model_id)).entries


@router.get("/models/{model_id}/base/{path:path}", response_class=Response)
async def base_file(model_id: ModelId, path: str, backend: Backed, asking: Asking) -> StreamingResponse:
    """One file of the model that an adapter was trained on."""
    return file_answer(await asyncio.to_thread(_base, backend, asking.tenant, model_id), path)


def _files(backend: Backend, tenant: str, model_id: str, export: str | None) -> PublishedFiles:
    if export is not None:
        artifact = backend.exports.artifact(tenant, model_id, export)
    else:
        artifact = backend.published.artifact(tenant, backend.published.find(tenant, model_id))
    return PublishedFiles.of_artifact(artifact, backend.settings.s3)


def _base(backend: Backend, tenant: str, model_id: str) -> PublishedFiles:
    target = backend.published.target_of(tenant, model_id)
    if target.adapter is None:
        raise InvalidInput("this is a whole model, and no adapter on one", "model_id")
    return PublishedFiles.of_artifact(target.model, backend.settings.s3)


# --- The native API's exports, `/api/v1/models/{id}/exports`: whole models in other programs' formats ---

exports_router = APIRouter(
    route_class=JsonRoute, prefix="/models/{model_id}/exports", dependencies=[Depends(reads_or_writes)]
)


@exports_router.post("", status_code=202)
async def start_export(model_id: ModelId, body: JsonBody[Export], backend: Backed, asking: Asking) -> ExportView:
    """Write a whole model in another program's format. It is stored with the version, and deleted with it."""
    return await backend.exports.start(asking.tenant, model_id, body)


@exports_router.get("/{export}")
async def get_export(model_id: ModelId, export: str, backend: Backed, asking: Asking) -> ExportView:
    """The status of an export."""
    return await backend.exports.view(asking.tenant, model_id, export)


@exports_router.delete("/{export}")
async def delete_export(model_id: ModelId, export: str, backend: Backed, asking: Asking) -> ExportView:
    """Delete the files of an export. It can be asked for again."""
    return await backend.exports.delete(asking.tenant, model_id, export)
