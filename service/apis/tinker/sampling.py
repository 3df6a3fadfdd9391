"""Tinker's sampling sessions and samples."""

from typing import Any

from fastapi import APIRouter, Depends, Request

from service.accounts.principals import require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.tinker.addresses import TINKER
from service.apis.tinker.door import AtDoor
from service.apis.tinker.records import SamplerRecord
from service.apis.tinker.requests import CreateSampler, Sample
from service.apis.tinker.samples import Samples
from shared.errors import InvalidInput

router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(require("inference"))]
)


@router.post("/create_sampling_session")
async def create_sampler(body: JsonBody[CreateSampler], door: AtDoor) -> dict[str, str]:
    """Make a sampling session of a checkpoint, or of a base model."""
    await door.read(door.records.session, body.session_id)
    base_model = body.base_model
    if body.model_path is not None:
        checkpoint = await door.read(door.records.checkpoint, body.model_path)
        of_path = (await door.model(checkpoint.model_id)).base_model
        if base_model not in (None, of_path):
            raise InvalidInput(f"the checkpoint is of {of_path}", "base_model")
        base_model = of_path
    if base_model is None:
        raise InvalidInput("give model_path or base_model", "model_path")
    sampler = SamplerRecord(
        session_id=body.session_id,
        number=body.sampling_session_seq_id,
        base_model=base_model,
        model_path=body.model_path,
    )
    await door.read(door.records.add, sampler)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, door: AtDoor) -> dict[str, Any]:
    sampler = await door.read(door.records.sampler, sampler_id)
    return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}


@router.post("/asample")
async def sample(body: JsonBody[Sample], request: Request, door: AtDoor) -> dict[str, Any]:
    """Begin to draw samples."""
    body.check()
    samples: Samples = request.app.state.tinker_samples
    sampler = await door.read(door.records.sampler, body.sampling_session_id or "")
    request_id = await samples.ask(door, sampler, body)
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}/{n}" for n in range(body.num_samples)]}
