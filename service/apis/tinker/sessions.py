"""Tinker's sessions: the requests that a client sends before it trains or samples."""

import secrets
import time
from typing import Any

from fastapi import APIRouter, Depends, Request

from service.accounts import audit
from service.accounts.principals import require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.tinker.addresses import TINKER
from service.apis.tinker.gateway import AtGateway, Gateway
from service.apis.tinker.records import ModelRecord, SessionRecord
from service.apis.tinker.requests import ClientConfigRequest, CreateSession, FinishSession, OfSession
from service.errors import Conflict
from shared.errors import NotFound
from shared.settings import TinkerSettings

router = APIRouter(route_class=JsonRoute, prefix=TINKER, include_in_schema=False)
TRAINS_OR_SAMPLES = [Depends(require("write", "inference"))]

# A chunk of a call's data is one command of a session, which is stored as JSON.
_CHUNK_BYTES, _CHUNK_DATA = 2_000_000, 1024


@router.get("/healthz")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(gateway: AtGateway) -> dict[str, Any]:
    """List the base models that the installation names. Others are taken by their own names."""
    length = min(gateway.settings.max_tokens, gateway.backend.settings.serving.max_model_len)
    return {
        "supported_models": [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in sorted(gateway.settings.models)
        ]
    }


@router.post("/client/config", dependencies=TRAINS_OR_SAMPLES)
async def client_config(_: JsonBody[ClientConfigRequest]) -> dict[str, Any]:
    """Say how the SDK is to send: keys as they are, bodies under zstd, chunks that a session takes as one command."""
    return {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "fwdbwd_max_chunk_len": _CHUNK_DATA,
        "fwdbwd_max_chunk_bytes_count": _CHUNK_BYTES,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,
    }


@router.post("/client/dynamic_config", dependencies=TRAINS_OR_SAMPLES)
async def client_dynamic_config(_: JsonBody[ClientConfigRequest]) -> dict[str, Any]:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@router.post("/telemetry", dependencies=TRAINS_OR_SAMPLES)
async def telemetry(request: Request) -> dict[str, str]:
    """Accept the SDK's telemetry, and drop it."""
    async for _ in request.stream():
        pass
    return {"status": "accepted"}


@router.post("/create_session", dependencies=[Depends(require("write"))])
async def create_session(body: JsonBody[CreateSession], gateway: AtGateway) -> dict[str, Any]:
    session = SessionRecord(
        session_id=f"tinker-{int(time.time() * 1000):011x}{secrets.token_hex(5)}",
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=body.user_metadata,
        display_name=body.display_name,
        project_id=body.project_id,
    )
    audit.touched(session.session_id)
    await gateway.records.put(session)
    return {"type": "create_session", "session_id": session.session_id, "info_message": about_session(gateway.settings)}


def about_session(settings: TinkerSettings) -> str | None:
    """The message for a client whose session begins, if any."""
    if settings.stable_reinforce is None:
        return None
    return f"stable_reinforce is not computed here: {settings.stable_reinforce} is, in its place"


@router.post("/session_heartbeat", dependencies=TRAINS_OR_SAMPLES)
async def heartbeat(body: JsonBody[OfSession], gateway: AtGateway) -> dict[str, str]:
    await gateway.read(gateway.records.session, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", dependencies=[Depends(require("write"))])
async def finish_session(session_id: str, body: JsonBody[FinishSession], gateway: AtGateway) -> dict[str, str]:
    """End a client's session: its models take no more requests, and their checkpoints stay."""
    session = await gateway.read(gateway.records.session, session_id)
    audit.touched(session_id)
    for model in await gateway.read(gateway.records.all, ModelRecord, f"{session_id}/"):
        await close(gateway, model)
    await gateway.records.put(session.model_copy(update={"finished": body.reason.type}))
    return {"session_id": session_id}


async def close(gateway: Gateway, model: ModelRecord) -> None:
    """End a model's session, unless it has ended already."""
    try:
        await gateway.backend.sessions.close(gateway.tenant, model.run_id)
    except (Conflict, NotFound):
        return
