"""The native API's exports, `/api/v1/models/{id}/exports`: whole models in other programs' formats, and their files."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import StreamingResponse

from service.accounts.principals import Asking, reads_or_writes
from service.apis.file_answers import file_answer, tar_answer
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.native.models import ModelId
from service.backend import Backed, Backend
from service.files.files import PublishedFiles
from service.inference.exports import ExportView
from shared.errors import NotFound
from shared.runs.exports import EXPORTS, Export
from shared.storage.artifacts import FileEntry

router = APIRouter(route_class=JsonRoute, prefix="/models/{model_id}/exports", dependencies=[Depends(reads_or_writes)])


async def _export(
    label: Annotated[str, Path(max_length=32, description=", ".join(each.label for each in EXPORTS))],
) -> Export:
    if (export := Export.of_label(label)) is None:
        raise NotFound(f"there is no export {label}; these are: {', '.join(each.label for each in EXPORTS)}")
    return export


Labelled = Annotated[Export, Depends(_export)]


@router.post("", status_code=202)
async def start_export(model_id: ModelId, body: JsonBody[Export], backend: Backed, asking: Asking) -> ExportView:
    """Write a whole model in another program's format. It is kept beside the version, and goes with it."""
    return await backend.exports.start(asking.tenant, model_id, body)


@router.get("")
async def list_exports(model_id: ModelId, backend: Backed, asking: Asking) -> tuple[ExportView, ...]:
    """The exports of a version that are complete."""
    return await asyncio.to_thread(backend.exports.list, asking.tenant, model_id)


@router.get("/{label}")
async def get_export(model_id: ModelId, export: Labelled, backend: Backed, asking: Asking) -> ExportView:
    """How an export stands."""
    return await backend.exports.view(asking.tenant, model_id, export)


@router.delete("/{label}")
async def delete_export(model_id: ModelId, export: Labelled, backend: Backed, asking: Asking) -> ExportView:
    """Delete the files of an export. It can be asked for again."""
    return await backend.exports.delete(asking.tenant, model_id, export)


@router.get("/{label}/files")
async def export_files(model_id: ModelId, export: Labelled, backend: Backed, asking: Asking) -> tuple[FileEntry, ...]:
    """The files of an export: paths, sizes, hashes."""
    return (await asyncio.to_thread(_files, backend, asking.tenant, model_id, export)).entries


@router.get("/{label}/files/{path:path}", response_class=Response)
async def export_file(
    model_id: ModelId, export: Labelled, path: str, backend: Backed, asking: Asking
) -> StreamingResponse:
    """One file of an export."""
    return file_answer(await asyncio.to_thread(_files, backend, asking.tenant, model_id, export), path)


@router.get("/{label}/download", response_class=Response)
async def download_export(model_id: ModelId, export: Labelled, backend: Backed, asking: Asking) -> StreamingResponse:
    """All files of an export, as a tar."""
    files = await asyncio.to_thread(_files, backend, asking.tenant, model_id, export)
    return tar_answer(files, f"{model_id.replace(':', '-')}-{export.label}")


def _files(backend: Backend, tenant: str, model_id: str, export: Export) -> PublishedFiles:
    return PublishedFiles.of_artifact(backend.exports.artifact(tenant, model_id, export), backend.settings.s3)
