"""The native API's exports, `/api/v1/models/{id}/exports`: whole models in other programs' formats."""

from fastapi import APIRouter, Depends

from service.accounts.principals import Asking, reads_or_writes
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.native.models import ModelId
from service.backend import Backed
from service.inference.exports import ExportView
from shared.runs.models import Export

router = APIRouter(route_class=JsonRoute, prefix="/models/{model_id}/exports", dependencies=[Depends(reads_or_writes)])


@router.post("", status_code=202)
async def start_export(model_id: ModelId, body: JsonBody[Export], backend: Backed, asking: Asking) -> ExportView:
    """Write a whole model in another program's format. It is stored with the version, and deleted with it."""
    return await backend.exports.start(asking.tenant, model_id, body)


@router.get("/{export}")
async def get_export(model_id: ModelId, export: str, backend: Backed, asking: Asking) -> ExportView:
    """The status of an export."""
    return await backend.exports.view(asking.tenant, model_id, export)


@router.delete("/{export}")
async def delete_export(model_id: ModelId, export: str, backend: Backed, asking: Asking) -> ExportView:
    """Delete the files of an export. It can be asked for again."""
    return await backend.exports.delete(asking.tenant, model_id, export)
