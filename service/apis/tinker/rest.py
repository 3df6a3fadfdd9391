"""Tinker's REST client: lists sessions, models in training ("training runs") and checkpoints."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from longshore.commands import CommandResult
from service.accounts import audit
from service.accounts.principals import reads_or_writes
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.tinker import downloads
from service.apis.tinker.addresses import TINKER
from service.apis.tinker.gateway import AtGateway, Gateway
from service.apis.tinker.records import CheckpointKind, CheckpointRecord, ModelRecord, SamplerRecord, SessionRecord
from service.apis.tinker.requests import SearchSessions, SetProject, SetTtl, TinkerPath
from service.apis.tinker.training import expiry
from shared.errors import NotFound
from shared.storage.artifacts import read_manifest
from shared.storage.checkpoints import CheckpointName, checkpoint_of_step
from shared.storage.paths import RunKeys

router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(reads_or_writes)]
)
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]
Scope = Annotated[Literal["owned", "accessible"], Query(description="the same here: a tenant's")]
_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
_MOST_SESSIONS = 10_000


async def _checkpoint(gateway: AtGateway, model_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord:
    return await gateway.read(gateway.records.checkpoint, f"tinker://{model_id}/{kind}/{name}")


Named = Annotated[CheckpointRecord, Depends(_checkpoint)]


def _page(places: Sequence[str], limit: int, offset: int) -> tuple[Sequence[str], dict[str, int]]:
    """Return a page of records' places, newest first, and the cursor as the SDK reads it."""
    newest_first = places[::-1]
    return newest_first[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(places)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _view(checkpoint: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": _KINDS[checkpoint.kind],
        "time": _time(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


# Training runs.


@router.get("/training_runs")
async def list_runs(
    gateway: AtGateway,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Annotated[str | None, Query(max_length=256)] = None,
) -> dict[str, Any]:
    """Models in training, newest first; of a project those whose sessions name it."""
    places = await gateway.read(gateway.records.places, ModelRecord)
    if project_id is not None:
        sessions = await gateway.read(gateway.records.all, SessionRecord)
        of_project = {session.session_id for session in sessions if session.project_id == project_id}
        places = [place for place in places if place.partition("/")[0] in of_project]
    page, cursor = _page(places, limit, offset)
    models = [await gateway.read(gateway.records.find, ModelRecord, place) for place in page]
    return {"training_runs": [await _run(gateway, model) for model in models], "cursor": cursor}


@router.get("/training_runs/{model_id}")
async def get_run(model_id: str, gateway: AtGateway, access_scope: Scope = "owned") -> dict[str, Any]:
    return await _run(gateway, await gateway.model(model_id))


async def _run(gateway: Gateway, model: ModelRecord) -> dict[str, Any]:
    checkpoints = await gateway.read(gateway.records.checkpoints, f"{model.place}/")
    checkpoints.sort(key=lambda each: each.created_at)
    newest = {each.kind: _view(each) for each in checkpoints}
    view = await gateway.backend.runs.view(gateway.tenant, model.run_id)
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": gateway.tenant,
        "is_lora": True,
        "lora_rank": model.rank,
        "corrupted": view.state == "failed",
        "last_request_time": _time(checkpoints[-1].created_at if checkpoints else model.created_at),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": model.user_metadata,
    }


# Checkpoints.


@router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints(model_id: str, gateway: AtGateway) -> dict[str, Any]:
    model = await gateway.model(model_id)
    found = await gateway.read(gateway.records.checkpoints, f"{model.place}/")
    return {"checkpoints": [_view(each) for each in sorted(found, key=lambda each: each.command)]}


@router.get("/checkpoints")
async def list_all_checkpoints(gateway: AtGateway, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Checkpoints of all models, those of the newest models first."""
    places = await gateway.read(gateway.records.places, CheckpointRecord)
    page, cursor = _page(places, limit, offset)
    found = [await gateway.read(gateway.records.find, CheckpointRecord, place) for place in page]
    return {"checkpoints": [_view(each) for each in found if each.is_there], "cursor": cursor}


@router.delete(_CHECKPOINT)
async def delete_checkpoint(checkpoint: Named, gateway: AtGateway) -> None:
    """Delete a checkpoint's record and published version. Its state is deleted when the model keeps newer ones."""
    audit.touched(checkpoint.path)
    await downloads.unpublish(gateway, checkpoint)
    await gateway.read(gateway.records.delete, checkpoint)


@router.post(f"{_CHECKPOINT}/publish")
async def publish_checkpoint(checkpoint: Named, gateway: AtGateway) -> None:
    """Mark a checkpoint as public. It stays its tenant's: nobody else finds it."""
    await gateway.records.put(checkpoint.model_copy(update={"public": True}))


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish_checkpoint(checkpoint: Named, gateway: AtGateway) -> None:
    await gateway.records.put(checkpoint.model_copy(update={"public": False}))


@router.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(checkpoint: Named, body: JsonBody[SetTtl], gateway: AtGateway) -> None:
    """Say when a checkpoint expires, from now on; null: never."""
    await gateway.records.put(checkpoint.model_copy(update={"expires_at": expiry(body.ttl_seconds)}))


@router.get(f"{_CHECKPOINT}/external_weights_urls")
async def external_urls(checkpoint: Named, request: Request, gateway: AtGateway) -> dict[str, Any]:
    """Addresses of an adapter's files, which need no key and last an hour."""
    files = await downloads.files_of(gateway, checkpoint)
    address, expires = downloads.signed(gateway, checkpoint, str(request.base_url))
    return {"urls": {entry.path: f"{address}/{entry.path}" for entry in files.entries}, "expires": _time(expires)}


@router.get(f"{_CHECKPOINT}/archive")
async def archive_url(checkpoint: Named, request: Request, gateway: AtGateway) -> dict[str, Any]:
    """The address of a tar of an adapter's files, which needs no key and lasts an hour."""
    await downloads.files_of(gateway, checkpoint)
    address, expires = downloads.signed(gateway, checkpoint, str(request.base_url))
    return {"url": f"{address}/{downloads.ARCHIVE}", "expires": _time(expires)}


@router.post("/weights_info")
async def weights_info(body: JsonBody[TinkerPath], gateway: AtGateway) -> dict[str, Any]:
    """Return a checkpoint's base model and shape, so that a model can be made for it."""
    checkpoint = await gateway.read(gateway.records.checkpoint, body.tinker_path)
    model = await gateway.model(checkpoint.model_id)
    return {
        "base_model": model.base_model,
        "is_lora": True,
        "lora_rank": model.rank,
        "train_unembed": model.train_unembed,
        "train_mlp": model.train_mlp,
        "train_attn": model.train_attn,
    }


@router.get("/billing/usage/checkpoints/current")
async def storage_usage(
    gateway: AtGateway, project_id: Annotated[str | None, Query(max_length=256)] = None
) -> dict[str, Any]:
    """Count checkpoints and the bytes of their states, by the projects that sessions name."""
    data = await gateway.read(_usage, gateway, project_id)
    return {"data": [{**each, "size_gigabytes": each["size_bytes"] / 1e9} for each in data]}


def _usage(gateway: Gateway, project_id: str | None) -> list[dict[str, Any]]:
    project_of = {each.session_id: each.project_id for each in gateway.records.all(SessionRecord)}
    found: dict[str | None, dict[str, Any]] = {}
    for checkpoint in gateway.records.checkpoints():
        project = project_of.get(checkpoint.model_id.partition(":")[0])
        if project_id in (None, project):
            item = found.setdefault(project, {"project_id": project, "checkpoint_count": 0, "size_bytes": 0})
            item["checkpoint_count"] += 1
            item["size_bytes"] += _state_bytes(gateway, checkpoint)
    return list(found.values())


def _state_bytes(gateway: Gateway, checkpoint: CheckpointRecord) -> int:
    """Return the bytes of the state that a checkpoint names; 0 if it is not there, or no longer."""
    store = gateway.backend.store
    with suppress(NotFound):
        run_id = gateway.records.model(checkpoint.model_id).run_id
        result = CommandResult.model_validate_json(store.get_bytes(RunKeys(run_id).command_result(checkpoint.command)))
        if result.step is not None and (state := checkpoint_of_step(store, CheckpointName(run_id, result.step))):
            return sum(entry.size for entry in read_manifest(store, state[0], state[1].sha256).files)
    return 0


# Sessions.


@router.get("/sessions")
async def list_sessions(
    gateway: AtGateway, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> dict[str, Any]:
    page, _ = _page(await gateway.read(gateway.records.places, SessionRecord), limit, offset)
    return {"sessions": list(page)}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, gateway: AtGateway, access_scope: Scope = "owned") -> dict[str, Any]:
    session = await gateway.read(gateway.records.session, session_id)
    models = await gateway.read(gateway.records.places, ModelRecord, f"{session_id}/")
    samplers = await gateway.read(gateway.records.places, SamplerRecord, f"{session_id}/")
    return {
        "training_run_ids": [f"{session_id}:train:{_number(place)}" for place in models],
        "sampler_ids": [f"{session_id}:sample:{_number(place)}" for place in samplers],
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def _number(place: str) -> int:
    return int(place.rpartition("/")[2])


@router.put("/sessions/{session_id}/project")
async def set_project(session_id: str, body: JsonBody[SetProject], gateway: AtGateway) -> None:
    """Name a session's project: a label here, which filters lists of its models."""
    session = await gateway.read(gateway.records.session, session_id)
    await gateway.records.put(session.model_copy(update={"project_id": body.project_id}))


@router.post("/sessions/search")
async def search_sessions(body: JsonBody[SearchSessions], gateway: AtGateway) -> dict[str, Any]:
    """Find sessions by the tags and metadata that their client gave, newest first."""
    places = (await gateway.read(gateway.records.places, SessionRecord))[::-1][:_MOST_SESSIONS]
    begin = 0 if body.cursor is None else _after(places, body.cursor.last_session_id)
    found: list[dict[str, Any]] = []
    for place in places[begin:]:
        session = await gateway.read(gateway.records.find, SessionRecord, place)
        if not body.matches(session):
            continue
        if len(found) == body.limit:
            last = found[-1]
            cursor = {"last_created_at": last["created_at"], "last_session_id": last["session_id"]}
            return {"sessions": found, "next_cursor": cursor}
        found.append(await _summary(gateway, session))
    return {"sessions": found}


def _after(places: Sequence[str], session_id: str) -> int:
    try:
        return places.index(session_id) + 1
    except ValueError:
        raise NotFound("there is no such page") from None


async def _summary(gateway: Gateway, session: SessionRecord) -> dict[str, Any]:
    checkpoints = await gateway.read(gateway.records.places, CheckpointRecord, f"{session.session_id}/")
    status: dict[str, Any] = {"type": "active"}
    if session.finished is not None:
        status = {"type": "client_finished", "reason": {"type": session.finished}}
    return {
        "session_id": session.session_id,
        "created_at": _time(session.created_at),
        "owner": gateway.tenant,
        "project_id": session.project_id or "",
        "status": status,
        "checkpoints_count": len(checkpoints),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
    }
