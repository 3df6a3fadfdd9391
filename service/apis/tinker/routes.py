"""Tinker's routes: sessions, training, checkpoints and their downloads."""

import asyncio
import json
import re
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from longshore import commands
from longshore.commands import CommandResult
from longshore.runs import Source
from longshore.training import DELTA_NET, LATENT, MAMBA, TARGETS, Adam, Lora, SessionRun, Target
from service.accounts import audit
from service.accounts.keys import Principal, reads_or_writes, require
from service.apis.bodies import JsonBody, JsonRoute, file_answer, tar_answer
from service.apis.tinker import translation
from service.apis.tinker.records import (
    AdamParams,
    AskedLoss,
    AtGateway,
    CheckpointKind,
    CheckpointRecord,
    ClientConfigRequest,
    CreateModel,
    CreateSession,
    FinishSession,
    Gateway,
    LoadWeights,
    LoraConfig,
    Metadata,
    ModelRecord,
    OfModel,
    OfSession,
    OptimStepRequest,
    SamplerRecord,
    SaveExternal,
    SaveForSampler,
    SaveRequest,
    SaveWeights,
    SearchSessions,
    SessionRecord,
    SetProject,
    SetTtl,
    TinkerPath,
    TinkerRecords,
    TrainingFuture,
)
from service.apis.tinker.samples import weights_of
from service.apis.tinker.wire import MAX_MESSAGE_BYTES, PROTOBUF, TINKER, TINKER_FILES
from service.backend import Backed, Backend
from service.decoding import small_body
from service.files import PublishedFiles
from service.inference.published_models import PublishedModel
from service.sealing import seal_keys
from shared.errors import Conflict, Forbidden, InvalidInput, NotFound
from shared.field_rules import first_error
from shared.settings import Settings
from shared.storage.artifacts import CheckpointName, checkpoint_of_step, read_manifest
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

# --- Tinker's sessions: the requests that a client sends before it trains or samples ---

sessions_router = APIRouter(route_class=JsonRoute, prefix=TINKER, include_in_schema=False)
TRAINS_OR_SAMPLES = [Depends(require("write", "inference"))]

# A chunk of a call's data is one command of a session, which is stored as JSON.
_CHUNK_BYTES, _CHUNK_DATA = 2_000_000, 1024


@sessions_router.get("/healthz")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@sessions_router.get("/get_server_capabilities")
async def capabilities(gateway: AtGateway) -> dict[str, Any]:
    """List the base models that the installation names. Others are taken by their own names."""
    length = min(gateway.settings.max_tokens, gateway.backend.settings.serving.max_model_len)
    return {
        "supported_models": [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in sorted(gateway.settings.models)
        ]
    }


@sessions_router.post("/client/config", dependencies=TRAINS_OR_SAMPLES)
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


@sessions_router.post("/client/dynamic_config", dependencies=TRAINS_OR_SAMPLES)
async def client_dynamic_config(_: JsonBody[ClientConfigRequest]) -> dict[str, Any]:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@sessions_router.post("/telemetry", dependencies=TRAINS_OR_SAMPLES)
async def telemetry(request: Request) -> dict[str, str]:
    """Accept the SDK's telemetry, and drop it."""
    async for _ in request.stream():
        pass
    return {"status": "accepted"}


ABOUT = "stable_reinforce is computed by a formula of Longshore's own (docs/tinker_api.md): Tinker's SDK has none"


@sessions_router.post("/create_session", dependencies=[Depends(require("write"))])
async def create_session(body: JsonBody[CreateSession], gateway: AtGateway) -> dict[str, Any]:
    session_id = f"tinker-{int(time.time() * 1000):011x}{secrets.token_hex(5)}"
    session = SessionRecord(session_id=session_id, **body.model_dump(exclude={"type"}))
    audit.touched(session.session_id)
    await gateway.records.add(session)
    return {"type": "create_session", "session_id": session.session_id, "info_message": ABOUT}


@sessions_router.post("/session_heartbeat", dependencies=TRAINS_OR_SAMPLES)
async def heartbeat(body: JsonBody[OfSession], gateway: AtGateway) -> dict[str, str]:
    await gateway.records.known(SessionRecord, body.session_id)
    return {"type": "session_heartbeat"}


@sessions_router.post("/sessions/{session_id}/finish", dependencies=[Depends(require("write"))])
async def finish_session(session_id: str, body: JsonBody[FinishSession], gateway: AtGateway) -> dict[str, str]:
    """End a client's session: its models take no more requests, and their checkpoints stay."""
    session = await gateway.records.find(SessionRecord, session_id)
    audit.touched(session_id)
    for model in await gateway.records.all(ModelRecord, f"{session_id}/"):
        await close(gateway, model)
    await gateway.records.change(session, finished=body.reason.type)
    return {"session_id": session_id}


async def close(gateway: Gateway, model: ModelRecord) -> None:
    """End a model's session, unless it has ended already."""
    try:
        await gateway.backend.sessions.close(gateway.tenant, model.run_id)
    except (Conflict, NotFound):
        return


# --- Tinker's models in training: each is a session, and each request to it one of the session's commands ---

training_router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(require("write"))]
)
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", *DELTA_NET, *LATENT, *MAMBA)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ALPHA = 32.0  # Tinker's adapters are scaled by 32 / rank
Future = dict[str, Any]


@training_router.post("/create_model")
async def create_model(body: JsonBody[CreateModel], gateway: AtGateway) -> Future:
    """Open a session with a fresh adapter on a base model."""
    if body.lora_config is None:
        raise InvalidInput("give a LoRA's rank: whole models are trained by runs of our own", "lora_config")
    model = await opened(gateway, body, body.base_model, body.lora_config)
    return {"request_id": TrainingFuture(model_id=model.id, command=0, kind="create").request_id, "model_id": model.id}


async def opened(
    gateway: Gateway, body: CreateModel | LoadWeights, base_model: str, lora: LoraConfig, before: Literal[0, 1] = 0
) -> ModelRecord:
    """Open a session for a model. The same request again gives the same model."""
    assert body.session_id is not None and body.model_seq_id is not None
    await gateway.records.find(SessionRecord, body.session_id)
    chosen = {"lm_head": lora.train_unembed, "embed_tokens": False} | dict.fromkeys(ATTENTION, lora.train_attn)
    targets = tuple(name for name in TARGETS if chosen.get(name, lora.train_mlp))
    if not targets:
        raise InvalidInput("nothing is left to train: one of train_attn, train_mlp and train_unembed", "lora_config")
    name = f"{body.session_id}-{body.model_seq_id}"
    run = SessionRun(
        name=name,
        model=gateway.uri_of(base_model),
        trainable=Lora(rank=lora.rank, alpha=ALPHA, targets=targets),
        seed=lora.seed or 0,
        max_tokens=gateway.settings.max_tokens,
        dtype=gateway.settings.dtype,
        keep_states=gateway.settings.keep_states,
    )
    source = Source(api="tinker", metadata={"tinker_model": f"{body.session_id}:train:{body.model_seq_id}"})
    view = await gateway.backend.runs.submit(gateway.asking, run, f"tinker {name}", source=source)
    record = ModelRecord(
        session_id=body.session_id,
        number=body.model_seq_id,
        run_id=view.run_id,
        published_as=name,
        base_model=base_model,
        before=before,
        user_metadata=body.user_metadata,
        **lora.model_dump(exclude={"seed"}),
    )
    await gateway.records.add(record)
    return record


@training_router.post("/get_info")
async def get_info(body: JsonBody[OfModel], gateway: AtGateway) -> dict[str, Any]:
    model = await gateway.records.model(body.model_id)
    uri = gateway.uri_of(model.base_model)
    tokenizer_id = uri if _HUB_ID.fullmatch(uri) else model.base_model  # a path is the operator's affair
    data = {"model_name": model.base_model, "tokenizer_id": tokenizer_id}
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_data": data,
        "is_lora": True,
        "lora_rank": model.rank,
        "model_name": model.base_model,
    }


@training_router.post("/unload_model")
async def unload_model(body: JsonBody[OfModel], gateway: AtGateway) -> dict[str, str]:
    """End a model's session. Its checkpoints stay."""
    await close(gateway, await gateway.records.model(body.model_id))
    return {"type": "unload_model", "model_id": body.model_id}


@training_router.post("/forward_backward")
async def forward_backward(request: Request, gateway: AtGateway) -> Future:
    """Score a chunk of data and, unless it is a forward, add the gradients of its loss's sum."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != PROTOBUF:
        raise HTTPException(415, f"data comes as {PROTOBUF}: clients since 0.30 send it so")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    decoding = gateway.backend.decoding
    small = await small_body(request)
    if small is not None and translation.is_small(small, encoding):
        made = partial(asyncio.to_thread, translation.loss_and_command, small, encoding)
        async with decoding.turn(gateway.tenant):
            return await _passes(gateway, translation.head_of(small, encoding), len(small), made)
    async with decoding.received(request, MAX_MESSAGE_BYTES) as body, decoding.scratch() as file:
        sent = str(body.path), encoding

        async def made_by_child() -> tuple[AskedLoss, bytes]:
            making = decoding.call(
                request, translation.make_command, *sent, str(file), reads=[body.path], writes=[file]
            )
            return await making, await asyncio.to_thread(file.read_bytes)

        head = await decoding.call(request, translation.head_in_file, *sent, reads=[body.path])
        return await _passes(gateway, head, body.num_bytes, made_by_child)


async def _passes(
    gateway: Gateway, head: translation.Head, num_bytes: int, made: Callable[[], Awaitable[tuple[AskedLoss, bytes]]]
) -> Future:
    """Accept a request for passes. `made`: returns its loss and its command."""
    model = await gateway.records.model(head.model_id)
    if not 1 <= head.seq_id <= 9_000_000:
        raise InvalidInput("a model's requests have the numbers from 1 on", "seq_id")
    await gateway.backend.quotas.admit_bytes(gateway.tenant, num_bytes)
    async with gateway.numbered(model, head.seq_id):
        loss, command = await made()
        return await gateway.command(model, head.seq_id, command, "passes", loss=loss)


@training_router.post("/optim_step")
async def optim_step(body: JsonBody[OptimStepRequest], gateway: AtGateway) -> Future:
    """Make an optimizer step with the gradients as they are: sums, which nothing divides."""
    model = await gateway.records.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        if body.adam_params is None:
            raise InvalidInput("AdamW is the optimizer here: give its settings", "adam_params")
        return await gateway.command(model, body.seq_id, _step(body.adam_params), "optim")


def _step(sent: AdamParams) -> commands.OptimStep:
    try:
        adam = Adam(
            beta1=sent.beta1,
            beta2=sent.beta2,
            eps=sent.eps,
            weight_decay=sent.weight_decay,
            clip_norm=sent.grad_clip_norm,
        )
        return commands.OptimStep(learning_rate=sent.learning_rate, optimizer=adam, denominator=1.0)
    except ValidationError as error:
        place, rule = first_error(error)
        raise InvalidInput(rule, f"adam_params.{place.replace('clip_norm', 'grad_clip_norm')}") from None


@training_router.post("/save_weights")
async def save_weights(body: JsonBody[SaveWeights], gateway: AtGateway) -> Future:
    """Save weights and optimizer state under a name."""
    model = await gateway.records.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        return await _saved(gateway, model, body, "weights", body.user_metadata, body.overwrite)


@training_router.post("/save_weights_external")
async def save_weights_external(body: JsonBody[SaveExternal], gateway: AtGateway) -> Future:
    """Publish the adapter, to be downloaded as PEFT's files."""
    model = await gateway.records.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        if body.age_encryption_recipients:
            raise InvalidInput("files are not encrypted here: leave it out", "age_encryption_recipients")
        return await _saved(gateway, model, body, "external_weights")


@training_router.post("/save_weights_for_sampler")
async def save_for_sampler(body: JsonBody[SaveForSampler], gateway: AtGateway) -> Future:
    """Save weights to sample from: under a name, or for one new sampling session."""
    model = await gateway.records.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        if body.path is not None or body.sampling_session_seq_id is None:
            return await _saved(gateway, model, body, "sampler_weights", body.user_metadata)
        sampler = SamplerRecord(
            session_id=model.session_id,
            number=body.sampling_session_seq_id,
            base_model=model.base_model,
            model_id=model.id,
            command=body.seq_id + model.before,
            inflight=body.kind == "inflight",
        )
        future = await gateway.command(model, body.seq_id, commands.SaveState(), "sampler", detail=sampler.id)
        await gateway.records.add(sampler)
        return future


async def _saved(
    gateway: Gateway,
    model: ModelRecord,
    body: SaveRequest,
    kind: CheckpointKind,
    user_metadata: Metadata | None = None,
    overwrite: bool = False,
) -> Future:
    """Save a state under a name. A state to sample from or to download is published, so that it is kept."""
    checkpoint = CheckpointRecord(
        model_id=model.id,
        kind=kind,
        name=body.path or f"{body.seq_id:06d}",
        command=body.seq_id + model.before,
        expires_at=expiry(body.ttl_seconds),
        user_metadata=user_metadata,
    )
    await gateway.records.claim(checkpoint, overwrite)
    audit.touched(checkpoint.id)
    save = commands.SaveState(publish=kind != "weights")
    return await gateway.command(model, body.seq_id, save, "save", detail=checkpoint.id)


def expiry(ttl_seconds: int | None) -> float | None:
    """Return when a checkpoint expires. Raises InvalidInput for less than a minute, or more than ten years."""
    if ttl_seconds is None:
        return None
    if not 60 <= ttl_seconds <= 315_360_000:
        raise InvalidInput("from 60 seconds to ten years", "ttl_seconds")
    return time.time() + ttl_seconds


@training_router.post("/load_weights")
async def load_weights(body: JsonBody[LoadWeights], gateway: AtGateway) -> Future:
    """Go on from a checkpoint, as a model in training or as a new one."""
    if body.weights_access_token:
        raise InvalidInput("checkpoints of other accounts are not read here", "weights_access_token")
    if body.model_id is not None and body.seq_id is not None and body.session_id is None:
        model = await gateway.records.model(body.model_id)
        async with gateway.numbered(model, body.seq_id):
            _, state = await gateway.state_of(body.path)
            load = commands.LoadState(state=state, optimizer=body.optimizer)
            return await gateway.command(model, body.seq_id, load, "load", detail=body.path)
    if body.session_id is None or body.model_seq_id is None or body.model_id is not None:
        raise InvalidInput("give model_id and seq_id, or session_id and model_seq_id", "model_id")
    source, state = await gateway.state_of(body.path)
    gateway.check_same(body.base_model, source.base_model)
    lora = LoraConfig.model_validate(source.model_dump(include=set(LoraConfig.model_fields)))
    model = await opened(gateway, body, source.base_model, lora, before=1)
    load = commands.LoadState(state=state, optimizer=body.optimizer)
    return await gateway.command(model, 0, load, "load", detail=body.path)


# --- Files of checkpoints, by signed URLs: whoever has one may read the file for an hour, without a key ---
#
# An address ends with the key that asked for it.

downloads_router = APIRouter(prefix=TINKER_FILES.rstrip("/"), include_in_schema=False)
ARCHIVE = "archive.tar"
_LASTS_S = 3600.0


async def files_of(gateway: Gateway, checkpoint: CheckpointRecord) -> PublishedFiles:
    """Open the adapter of a checkpoint, as PEFT's files. Raises NotFound."""
    target, _ = await weights_of(gateway, None, checkpoint.id)
    assert target.adapter is not None
    return await asyncio.to_thread(PublishedFiles.of_artifact, target.adapter, gateway.backend.settings.s3)


def signed(gateway: Gateway, checkpoint: CheckpointRecord, base_url: str) -> tuple[str, float]:
    """Return the address of a checkpoint's files, and when it ends."""
    told = json.dumps([gateway.tenant, checkpoint.id, gateway.asking.key_id])
    token = _tokens(gateway.backend.settings).encrypt(told.encode()).decode()
    return f"{base_url.rstrip('/')}{TINKER_FILES}{token}", time.time() + _LASTS_S


def _tokens(settings: Settings) -> MultiFernet:
    """Seals what addresses say, with the time: a key for each of the installation's, the current one first."""
    return MultiFernet([Fernet(urlsafe_b64encode(key.derived(b"tinker files"))) for key in seal_keys(settings)])


def _opened(backend: Backend, token: str) -> tuple[Gateway, str]:
    """Return the gateway and the checkpoint's path of a token. Raises Forbidden: it is not ours, or has ended."""
    tokens = _tokens(backend.settings)
    try:
        tenant, path, key_id = json.loads(tokens.decrypt(token.encode()))
        began = tokens.extract_timestamp(token.encode())
    except InvalidToken:
        raise Forbidden("this address is not signed here") from None
    if began + _LASTS_S < time.time():
        raise Forbidden("this address has ended: ask for a new one")
    principal = Principal(tenant=tenant, key_id=key_id, scopes=frozenset())
    return Gateway(backend, principal, TinkerRecords(backend.database, backend.quotas, tenant)), path


@downloads_router.get("/{token}/{path}")
async def download(token: str, path: str, backend: Backed) -> StreamingResponse:
    """Send one file of a checkpoint's adapter, or all of them as a tar."""
    gateway, checkpoint_path = await asyncio.to_thread(_opened, backend, token)
    if not await backend.keys.is_good(gateway.asking.key_id):
        raise Forbidden("the key that asked for this address is good no longer")
    checkpoint = await gateway.records.checkpoint(checkpoint_path)
    files = await files_of(gateway, checkpoint)
    return tar_answer(files, checkpoint.name) if path == ARCHIVE else file_answer(files, path)


# --- Tinker's REST client: lists sessions, models in training ("training runs") and checkpoints ---

rest_router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(reads_or_writes)]
)
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]
Scope = Annotated[Literal["owned", "accessible"], Query(description="the same here: a tenant's")]
_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
_MOST_SESSIONS = 10_000
T = TypeVar("T")


async def _checkpoint_of(gateway: AtGateway, model_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord:
    return await gateway.records.checkpoint(f"tinker://{model_id}/{kind}/{name}")


Named = Annotated[CheckpointRecord, Depends(_checkpoint_of)]


def _page(found: Sequence[T], limit: int, offset: int) -> tuple[Sequence[T], dict[str, int]]:
    """Return a page, newest first, and the cursor as the SDK reads it."""
    newest_first = found[::-1]
    return newest_first[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _view(checkpoint: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": _KINDS[checkpoint.kind],
        "time": _time(checkpoint.created_at),
        "tinker_path": checkpoint.id,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


# Training runs.


@rest_router.get("/training_runs")
async def list_runs(
    gateway: AtGateway,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Annotated[str | None, Query(max_length=256)] = None,
) -> dict[str, Any]:
    """Models in training, newest first; of a project those whose sessions name it."""
    models = await gateway.records.all(ModelRecord)
    if project_id is not None:
        sessions = await gateway.records.all(SessionRecord)
        of_project = {session.session_id for session in sessions if session.project_id == project_id}
        models = [model for model in models if model.session_id in of_project]
    page, cursor = _page(models, limit, offset)
    return {"training_runs": [await _run(gateway, model) for model in page], "cursor": cursor}


@rest_router.get("/training_runs/{model_id}")
async def get_run(model_id: str, gateway: AtGateway, access_scope: Scope = "owned") -> dict[str, Any]:
    return await _run(gateway, await gateway.records.model(model_id))


async def _run(gateway: Gateway, model: ModelRecord) -> dict[str, Any]:
    checkpoints = await gateway.records.checkpoints(f"{model.key}/")
    checkpoints.sort(key=lambda each: each.created_at)
    newest = {each.kind: _view(each) for each in checkpoints}
    view = await gateway.backend.runs.view(gateway.tenant, model.run_id)
    return {
        "training_run_id": model.id,
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


@rest_router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints(model_id: str, gateway: AtGateway) -> dict[str, Any]:
    model = await gateway.records.model(model_id)
    found = await gateway.records.checkpoints(f"{model.key}/")
    return {"checkpoints": [_view(each) for each in sorted(found, key=lambda each: each.command)]}


@rest_router.get("/checkpoints")
async def list_all_checkpoints(gateway: AtGateway, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Checkpoints of all models, those of the newest models first."""
    page, cursor = _page(await gateway.records.all(CheckpointRecord), limit, offset)
    return {"checkpoints": [_view(each) for each in page if each.is_there], "cursor": cursor}


@rest_router.delete(_CHECKPOINT)
async def delete_checkpoint(checkpoint: Named, gateway: AtGateway) -> None:
    """Delete a checkpoint's record and published version. Its state is deleted when the model keeps newer ones."""
    audit.touched(checkpoint.id)
    with suppress(NotFound):
        model, result = await gateway.saved(checkpoint)
        if result.version is not None:
            version = PublishedModel("adapters", model.published_as, result.version)
            await asyncio.to_thread(gateway.backend.published.delete, gateway.tenant, version)
            await gateway.backend.quotas.measure(gateway.tenant)
    await gateway.records.delete(checkpoint)


@rest_router.post(f"{_CHECKPOINT}/publish")
async def publish_checkpoint(checkpoint: Named, gateway: AtGateway) -> None:
    """Mark a checkpoint as public. It stays its tenant's: nobody else finds it."""
    await gateway.records.change(checkpoint, public=True)


@rest_router.delete(f"{_CHECKPOINT}/publish")
async def unpublish_checkpoint(checkpoint: Named, gateway: AtGateway) -> None:
    await gateway.records.change(checkpoint, public=False)


@rest_router.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(checkpoint: Named, body: JsonBody[SetTtl], gateway: AtGateway) -> None:
    """Say when a checkpoint expires, from now on; null: never."""
    await gateway.records.change(checkpoint, expires_at=expiry(body.ttl_seconds))


@rest_router.get(f"{_CHECKPOINT}/external_weights_urls")
async def external_urls(checkpoint: Named, request: Request, gateway: AtGateway) -> dict[str, Any]:
    """Addresses of an adapter's files, which need no key and last an hour."""
    files = await files_of(gateway, checkpoint)
    address, expires = signed(gateway, checkpoint, str(request.base_url))
    return {"urls": {entry.path: f"{address}/{entry.path}" for entry in files.entries}, "expires": _time(expires)}


@rest_router.get(f"{_CHECKPOINT}/archive")
async def archive_url(checkpoint: Named, request: Request, gateway: AtGateway) -> dict[str, Any]:
    """The address of a tar of an adapter's files, which needs no key and lasts an hour."""
    await files_of(gateway, checkpoint)
    address, expires = signed(gateway, checkpoint, str(request.base_url))
    return {"url": f"{address}/{ARCHIVE}", "expires": _time(expires)}


@rest_router.post("/weights_info")
async def weights_info(body: JsonBody[TinkerPath], gateway: AtGateway) -> dict[str, Any]:
    """Return a checkpoint's base model and shape, so that a model can be made for it."""
    checkpoint = await gateway.records.checkpoint(body.tinker_path)
    model = await gateway.records.model(checkpoint.model_id)
    told = model.model_dump(include={"base_model", "train_unembed", "train_mlp", "train_attn"})
    return told | {"is_lora": True, "lora_rank": model.rank}


@rest_router.get("/billing/usage/checkpoints/current")
async def storage_usage(
    gateway: AtGateway, project_id: Annotated[str | None, Query(max_length=256)] = None
) -> dict[str, Any]:
    """Count checkpoints and the bytes of their states, by the projects that sessions name."""
    project_of = {each.session_id: each.project_id for each in await gateway.records.all(SessionRecord)}
    run_of = {each.id: each.run_id for each in await gateway.records.all(ModelRecord)}
    found: dict[str | None, dict[str, Any]] = {}
    for checkpoint in await gateway.records.checkpoints():
        project = project_of.get(checkpoint.model_id.partition(":")[0])
        if project_id in (None, project):
            item = found.setdefault(project, {"project_id": project, "checkpoint_count": 0, "size_bytes": 0})
            item["checkpoint_count"] += 1
            if (run_id := run_of.get(checkpoint.model_id)) is not None:
                state = gateway.backend.store, run_id, checkpoint.command
                item["size_bytes"] += await asyncio.to_thread(_state_bytes, *state)
    return {"data": [{**each, "size_gigabytes": each["size_bytes"] / 1e9} for each in found.values()]}


def _state_bytes(store: ObjectStore, run_id: str, command: int) -> int:
    """Return the bytes of the state after a session's command; 0 if it is not there, or no longer."""
    with suppress(NotFound):
        result = CommandResult.model_validate_json(store.get_bytes(RunKeys(run_id).command_result(command)))
        if result.step is not None and (state := checkpoint_of_step(store, CheckpointName(run_id, result.step))):
            return sum(entry.size for entry in read_manifest(store, state[0], state[1].sha256).files)
    return 0


# Sessions.


@rest_router.get("/sessions")
async def list_sessions(
    gateway: AtGateway, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> dict[str, Any]:
    page, _ = _page(await gateway.records.keys(SessionRecord), limit, offset)
    return {"sessions": list(page)}


@rest_router.get("/sessions/{session_id}")
async def get_session(session_id: str, gateway: AtGateway, access_scope: Scope = "owned") -> dict[str, Any]:
    session = await gateway.records.find(SessionRecord, session_id)
    return {
        "training_run_ids": [each.id for each in await gateway.records.all(ModelRecord, f"{session_id}/")],
        "sampler_ids": [each.id for each in await gateway.records.all(SamplerRecord, f"{session_id}/")],
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


@rest_router.put("/sessions/{session_id}/project")
async def set_project(session_id: str, body: JsonBody[SetProject], gateway: AtGateway) -> None:
    """Name a session's project: a label here, which filters lists of its models."""
    session = await gateway.records.find(SessionRecord, session_id)
    await gateway.records.change(session, project_id=body.project_id)


@rest_router.post("/sessions/search")
async def search_sessions(body: JsonBody[SearchSessions], gateway: AtGateway) -> dict[str, Any]:
    """Find sessions by the tags and metadata that their client gave, newest first."""
    sessions = (await gateway.records.all(SessionRecord))[::-1][:_MOST_SESSIONS]
    begin, ids = 0, [each.id for each in sessions]
    if body.cursor is not None:
        if body.cursor.last_session_id not in ids:
            raise NotFound("there is no such page")
        begin = ids.index(body.cursor.last_session_id) + 1
    found: list[dict[str, Any]] = []
    for session in sessions[begin:]:
        if not body.matches(session):
            continue
        if len(found) == body.limit:
            last = found[-1]
            cursor = {"last_created_at": last["created_at"], "last_session_id": last["session_id"]}
            return {"sessions": found, "next_cursor": cursor}
        found.append(await _summary(gateway, session))
    return {"sessions": found}


async def _summary(gateway: Gateway, session: SessionRecord) -> dict[str, Any]:
    checkpoints = await gateway.records.keys(CheckpointRecord, f"{session.session_id}/")
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
