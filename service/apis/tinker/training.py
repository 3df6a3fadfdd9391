"""Tinker's models in training: each is a session, and each request to it one of the session's commands."""

import asyncio
import re
import time
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import ValidationError

from longshore import commands
from longshore.training import DELTA_NET, LATENT, MAMBA, TARGETS, Adam, Lora, SessionRun, Target
from service.accounts import audit
from service.accounts.principals import require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.tinker import sessions, translation
from service.apis.tinker.addresses import TINKER
from service.apis.tinker.gateway import AtGateway, Gateway, TrainingFuture
from service.apis.tinker.records import CheckpointKind, CheckpointRecord, ModelRecord, SamplerRecord
from service.apis.tinker.requests import (
    AdamParams,
    CreateModel,
    LoadWeights,
    LoraConfig,
    OfModel,
    OptimStepRequest,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from service.apis.tinker.wire import MAX_MESSAGE_BYTES, PROTOBUF
from shared.errors import InvalidInput
from shared.field_rules import first_error
from shared.runs.requests import Source

router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(require("write"))]
)
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", *DELTA_NET, *LATENT, *MAMBA)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ALPHA = 32.0  # Tinker's adapters are scaled by 32 / rank
Future = dict[str, Any]


@router.post("/create_model")
async def create_model(body: JsonBody[CreateModel], gateway: AtGateway) -> Future:
    """Open a session with a fresh adapter on a base model."""
    if body.lora_config is None:
        raise InvalidInput("give a LoRA's rank: whole models are trained by runs of our own", "lora_config")
    model = await opened(gateway, body, body.base_model, body.lora_config)
    return {"request_id": TrainingFuture(model.model_id, 0, "create").request_id, "model_id": model.model_id}


async def opened(
    gateway: Gateway, body: CreateModel | LoadWeights, base_model: str, lora: LoraConfig, before: int = 0
) -> ModelRecord:
    """Open a session for a model. The same request again gives the same model."""
    assert body.session_id is not None and body.model_seq_id is not None
    await gateway.read(gateway.records.session, body.session_id)
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
    record = ModelRecord.model_validate(
        {
            "session_id": body.session_id,
            "number": body.model_seq_id,
            "run_id": view.run_id,
            "published_as": name,
            "base_model": base_model,
            "rank": lora.rank,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
            "train_unembed": lora.train_unembed,
            "before": before,
            "user_metadata": body.user_metadata,
        }
    )
    await gateway.records.add(record)
    return record


@router.post("/get_info")
async def get_info(body: JsonBody[OfModel], gateway: AtGateway) -> dict[str, Any]:
    model = await gateway.model(body.model_id)
    uri = gateway.uri_of(model.base_model)
    tokenizer_id = uri if _HUB_ID.fullmatch(uri) else model.base_model  # a path is the operator's affair
    data = {"model_name": model.base_model, "tokenizer_id": tokenizer_id}
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_data": data,
        "is_lora": True,
        "lora_rank": model.rank,
        "model_name": model.base_model,
    }


@router.post("/unload_model")
async def unload_model(body: JsonBody[OfModel], gateway: AtGateway) -> dict[str, str]:
    """End a model's session. Its checkpoints stay."""
    await sessions.close(gateway, await gateway.model(body.model_id))
    return {"type": "unload_model", "model_id": body.model_id}


@router.post("/forward_backward")
async def forward_backward(request: Request, gateway: AtGateway) -> Future:
    """Score a chunk of data and, unless it is a forward, add the gradients of its loss's sum."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != PROTOBUF:
        raise HTTPException(415, f"data comes as {PROTOBUF}: clients since 0.30 send it so")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    decoding = gateway.backend.decoding
    async with decoding.received(request, MAX_MESSAGE_BYTES) as body, decoding.scratch() as made:
        is_small = await asyncio.to_thread(translation.is_small, body, encoding)
        sent = str(body.path), encoding
        head = await decoding.call(request, translation.head_of, *sent, is_small=is_small)
        model = await gateway.model(head.model_id)
        _check_seq(head.seq_id)
        await gateway.backend.quotas.admit_bytes(gateway.tenant, body.num_bytes)
        async with gateway.numbered(model, head.seq_id):
            asked = *sent, str(made), gateway.settings.stable_reinforce
            detail = await decoding.call(request, translation.make_command, *asked, is_small=is_small)
            command = await asyncio.to_thread(made.read_bytes)
            return await gateway.command(model, head.seq_id, command, "passes", detail)


def _check_seq(seq_id: int) -> None:
    if not 1 <= seq_id <= 9_000_000:
        raise InvalidInput("a model's requests have the numbers from 1 on", "seq_id")


@router.post("/optim_step")
async def optim_step(body: JsonBody[OptimStepRequest], gateway: AtGateway) -> Future:
    """Make an optimizer step with the gradients as they are: sums, which nothing divides."""
    model = await gateway.model(body.model_id)
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


@router.post("/save_weights")
async def save_weights(body: JsonBody[SaveWeights], gateway: AtGateway) -> Future:
    """Save weights and optimizer state under a name."""
    model = await gateway.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        checkpoint = _checkpoint(model, body, "weights")
        return await _named(gateway, model, body.seq_id, checkpoint, body.overwrite)


@router.post("/save_weights_external")
async def save_weights_external(body: JsonBody[SaveExternal], gateway: AtGateway) -> Future:
    """Publish the adapter, to be downloaded as PEFT's files."""
    model = await gateway.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        if body.age_encryption_recipients:
            raise InvalidInput("files are not encrypted here: leave it out", "age_encryption_recipients")
        checkpoint = _checkpoint(model, body, "external_weights")
        return await _named(gateway, model, body.seq_id, checkpoint, overwrite=False)


@router.post("/save_weights_for_sampler")
async def save_for_sampler(body: JsonBody[SaveForSampler], gateway: AtGateway) -> Future:
    """Save weights to sample from: under a name, or for one new sampling session."""
    model = await gateway.model(body.model_id)
    async with gateway.numbered(model, body.seq_id):
        if body.path is not None or body.sampling_session_seq_id is None:
            checkpoint = _checkpoint(model, body, "sampler_weights")
            return await _named(gateway, model, body.seq_id, checkpoint, overwrite=False)
        sampler = SamplerRecord(
            session_id=model.session_id,
            number=body.sampling_session_seq_id,
            base_model=model.base_model,
            model_id=model.model_id,
            command=body.seq_id + model.before,
            inflight=body.kind == "inflight",
        )
        future = await gateway.command(model, body.seq_id, commands.SaveState(), "sampler", sampler.sampler_id)
        await gateway.records.add(sampler)
        return future


def _checkpoint(
    model: ModelRecord, body: SaveWeights | SaveForSampler | SaveExternal, kind: CheckpointKind
) -> CheckpointRecord:
    return CheckpointRecord(
        model_id=model.model_id,
        kind=kind,
        name=body.path or f"{body.seq_id:06d}",
        command=body.seq_id + model.before,
        expires_at=expiry(body.ttl_seconds),
        user_metadata=None if isinstance(body, SaveExternal) else body.user_metadata,
    )


def expiry(ttl_seconds: int | None) -> float | None:
    """Return when a checkpoint expires. Raises InvalidInput for less than a minute, or more than ten years."""
    if ttl_seconds is None:
        return None
    if not 60 <= ttl_seconds <= 315_360_000:
        raise InvalidInput("from 60 seconds to ten years", "ttl_seconds")
    return time.time() + ttl_seconds


async def _named(
    gateway: Gateway, model: ModelRecord, seq_id: int, checkpoint: CheckpointRecord, overwrite: bool
) -> Future:
    """Save a state under a name. A state to sample from or to download is published, so that it is kept."""
    await gateway.records.claim(checkpoint, overwrite)
    audit.touched(checkpoint.path)
    save = commands.SaveState(publish=checkpoint.kind != "weights")
    return await gateway.command(model, seq_id, save, "save", checkpoint.path)


@router.post("/load_weights")
async def load_weights(body: JsonBody[LoadWeights], gateway: AtGateway) -> Future:
    """Go on from a checkpoint, as a model in training or as a new one."""
    if body.weights_access_token:
        raise InvalidInput("checkpoints of other accounts are not read here", "weights_access_token")
    if body.model_id is not None and body.seq_id is not None and body.session_id is None:
        model = await gateway.model(body.model_id)
        async with gateway.numbered(model, body.seq_id):
            _, state = await gateway.state_of(body.path)
            load = commands.LoadState(state=state, optimizer=body.optimizer)
            return await gateway.command(model, body.seq_id, load, "load", body.path)
    if body.session_id is None or body.model_seq_id is None or body.model_id is not None:
        raise InvalidInput("give model_id and seq_id, or session_id and model_seq_id", "model_id")
    source, state = await gateway.state_of(body.path)
    gateway.check_same(body.base_model, source.base_model)
    lora = LoraConfig.model_validate(source.model_dump(include=set(LoraConfig.model_fields)))
    model = await opened(gateway, body, source.base_model, lora, before=1)
    load = commands.LoadState(state=state, optimizer=body.optimizer)
    return await gateway.command(model, 0, load, "load", body.path)
