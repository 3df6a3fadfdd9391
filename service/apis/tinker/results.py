"""`retrieve_future`: the result of a pending request, or that it is not done yet."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from longshore.commands import CommandResult
from service.accounts.principals import require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.tinker import translation
from service.apis.tinker.addresses import TINKER
from service.apis.tinker.gateway import AtGateway, Gateway, TrainingFuture
from service.apis.tinker.records import ModelRecord
from service.apis.tinker.requests import CancelFuture, RetrieveFuture
from service.apis.tinker.samples import SAMPLE, Samples
from service.apis.tinker.translation import metrics_of_step
from service.apis.tinker.wire import PROTOBUF
from shared.errors import LongshoreError, NotFound
from shared.storage.paths import RunKeys

router = APIRouter(
    route_class=JsonRoute, prefix=TINKER, include_in_schema=False, dependencies=[Depends(require("write", "inference"))]
)
_SMALL_COMMAND_BYTES = 64 << 10  # of a command's file
_WAIT_S = 30.0  # the SDK gives up after 45
_OPEN_POLL_S = 0.1
_BEING_OPENED = ("queued", "checking")


@dataclass(frozen=True)
class FailedFuture:
    """Why a request came to nothing."""

    message: str
    category: str = "user"


DoneFuture = dict[str, Any] | bytes | FailedFuture


@router.post("/retrieve_future")
async def retrieve_future(body: JsonBody[RetrieveFuture], request: Request, gateway: AtGateway) -> Response:
    """Wait for a request's result for half a minute: 408 if it takes longer, so that the client asks again."""
    if body.request_id.startswith(SAMPLE):
        done = await _sample(gateway, request, body.request_id)
    else:
        done = await _trained(gateway, request, TrainingFuture.parse(body.request_id))
    match done:
        case None:
            pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(pending, status_code=408)
        case FailedFuture(message, category):
            return JSONResponse({"error": message, "category": category})
        case bytes():
            return Response(done, media_type=PROTOBUF)
        case _:
            return JSONResponse(done)


@router.post("/cancel_future")
async def cancel_future(body: JsonBody[CancelFuture], request: Request, gateway: AtGateway) -> dict[str, str]:
    """Cancel a sample that nobody waits for. Requests that train a model are never cancelled."""
    if body.request_id.startswith(SAMPLE):
        _samples(request).cancel(gateway.tenant, body.request_id)
    return {"request_id": body.request_id}


def _samples(request: Request) -> Samples:
    samples: Samples = request.app.state.tinker_samples
    return samples


async def _sample(gateway: Gateway, request: Request, request_id: str) -> DoneFuture | None:
    try:
        return await _samples(request).result(gateway, request_id, _WAIT_S)
    except NotFound:
        raise
    except LongshoreError as error:
        return FailedFuture(str(error))


async def _trained(gateway: Gateway, request: Request, future: TrainingFuture) -> DoneFuture | None:
    model = await gateway.model(future.model_id)
    if future.kind == "create":
        return await _created(gateway, model)
    view = await gateway.outcome(model, future.command, _WAIT_S)
    if view.state == "waiting":
        return None
    if view.result is None:
        return FailedFuture(view.message or "the request was dropped", "server")
    if (problem := view.result.problem) is not None:
        return FailedFuture(problem.message, "user" if problem.kind in ("invalid_input", "not_finite") else "server")
    if view.result.expired:
        return FailedFuture("the scores of this request are no longer kept")
    return await _answer(gateway, request, model, future, view.result)


async def _created(gateway: Gateway, model: ModelRecord) -> DoneFuture | None:
    """Wait until the session's model and adapter have been checked."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_S
    while True:
        view = await gateway.backend.runs.view(gateway.tenant, model.run_id)
        if view.problem is not None:
            return FailedFuture(view.problem.message)
        if view.phase not in _BEING_OPENED:
            return {"type": "create_model", "model_id": model.model_id}
        if loop.time() > end:
            return None
        await asyncio.sleep(_OPEN_POLL_S)


async def _answer(
    gateway: Gateway, request: Request, model: ModelRecord, future: TrainingFuture, result: CommandResult
) -> DoneFuture:
    """Say a command's result as the request's answer. Raises NotFound for a request of another kind."""
    match future.kind, result.kind:
        case "passes", "forward" | "forward_backward":
            return await _scores(gateway, request, RunKeys(model.run_id).command(future.command), future.detail, result)
        case "optim", "optim_step":
            return {"metrics": metrics_of_step(result)}
        case "save", "save_state":
            return {"path": future.detail}
        case "sampler", "save_state":
            return {"path": None, "sampling_session_id": future.detail}
        case "load", "load_state":
            return {"path": future.detail, "model_id": model.model_id}
    raise NotFound(f"there is no request {future.request_id[:120]}")


async def _scores(gateway: Gateway, request: Request, key: str, detail: str, result: CommandResult) -> bytes:
    """Return the answer to a command in the store; a child process converts large results."""
    decoding = gateway.backend.decoding
    async with decoding.scratch() as command, decoding.scratch() as made:
        size = await asyncio.to_thread(_copy, gateway, key, command)
        asked = str(command), detail, result, str(made)
        await decoding.call(request, translation.write_scores, *asked, is_small=size <= _SMALL_COMMAND_BYTES)
        return await asyncio.to_thread(made.read_bytes)


def _copy(gateway: Gateway, key: str, to: Path) -> int:
    return to.write_bytes(gateway.backend.store.get_bytes(key))
