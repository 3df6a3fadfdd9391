"""`/v1/models` and completions in OpenAI's shape, from what the asking tenant has published."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from service.accounts import audit
from service.accounts.principals import Asking, require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.openai.streams import ChatChunks, TextChunks
from service.backend import Backed
from service.inference.so_far import AnswerSoFar
from shared.chat.completions import (
    Answer,
    CompletionRequest,
    CompletionResponse,
    ErrorDetail,
    ErrorResponse,
)
from shared.chat.messages import ChatCompletion, ChatRequest, ServedModel
from shared.contract import Frozen
from shared.errors import LongshoreError, NotFound

router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["inference"], dependencies=[Depends(require("inference"))]
)

T = TypeVar("T")
A = TypeVar("A", contravariant=True)
_LISTEN_S = 0.5
_KEEP_ALIVE_S = 15.0


class Chunks(Protocol[A]):
    """Makes the chunks of one streamed answer."""

    def grown(self, texts: tuple[str, ...]) -> Iterator[Answer]: ...
    def rest(self, answer: A, include_usage: bool) -> Iterator[Answer]: ...


class ServedModels(Frozen):
    """Published models, by name."""

    object: str = "list"
    data: tuple[ServedModel, ...]


class DeletedModel(Frozen):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


@router.get("/models")
async def list_models(asking: Asking, backend: Backed) -> ServedModels:
    """Adapters and models that your tenant has published, and the base models that the installation names."""
    published = await asyncio.to_thread(backend.published.list, asking.tenant)
    names = {model.id for model in published}
    bases = (model for model in backend.untrained.served() if model.id not in names)
    return ServedModels(data=(*published, *bases))


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, asking: Asking, backend: Backed) -> ServedModel:
    """Show what is published as `name`, its newest version, or as `name:v3`; or a base model."""
    try:
        return await asyncio.to_thread(backend.published.show, asking.tenant, model_id)
    except NotFound:
        bases = {model.id: model for model in backend.untrained.served()}
        if model_id not in bases:
            raise
        return bases[model_id]


@router.delete("/models/{model_id:path}", dependencies=[Depends(require("write"))])
async def delete_model(model_id: str, asking: Asking, backend: Backed) -> DeletedModel:
    """Delete what was published: `name:v3` one version, `name` all of them. Their numbers are not given again."""
    audit.touched(model_id)
    await asyncio.to_thread(backend.published.delete_model, asking.tenant, model_id)
    return DeletedModel(id=model_id)


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat(
    body: JsonBody[ChatRequest], request: Request, asking: Asking, backend: Backed
) -> Response | ChatCompletion:
    """Ask a published adapter or model, or a base model. `stream` sends the text as it is drawn."""
    return await _answered(request, body, partial(backend.inference.chat, asking.tenant, body), ChatChunks)


@router.post("/completions", response_model=CompletionResponse)
async def complete(
    body: JsonBody[CompletionRequest], request: Request, asking: Asking, backend: Backed
) -> Response | CompletionResponse:
    """Continue a text, or token ids, without a chat template. `stream` sends the text as it is drawn."""
    return await _answered(request, body, partial(backend.inference.complete, asking.tenant, body), TextChunks)


async def _answered(
    request: Request,
    body: ChatRequest | CompletionRequest,
    ask: Callable[[AnswerSoFar | None], Coroutine[Any, Any, T]],
    chunks: Callable[[AnswerSoFar, str], Chunks[T]],
) -> Response | T:
    """Return an answer, or a stream of it. The stream begins with the first text, so that an early refusal still has a
    status of its own.
    """
    so_far = AnswerSoFar() if body.stream else None
    task = asyncio.ensure_future(ask(so_far))
    if so_far is None:
        return await _unless_gone(request, task)
    with suppress(TimeoutError):
        await _unless_gone(request, task, _KEEP_ALIVE_S, so_far.changed)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(task, so_far, chunks(so_far, body.model), include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _unless_gone(
    request: Request,
    task: "asyncio.Future[T]",
    patience_s: float = float("inf"),
    begun: asyncio.Event | None = None,
) -> T:
    """Wait for a task, and cancel it when the client hangs up.

    Raises:
        TimeoutError: it is not there yet, and goes on: it took too long, or has `begun`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    beginning = asyncio.ensure_future((begun or asyncio.Event()).wait())
    try:
        while not task.done():
            if loop.time() > deadline or beginning.done():
                raise TimeoutError
            await _either(task, beginning, _LISTEN_S)
            if not task.done() and await request.is_disconnected():
                task.cancel()
                raise HTTPException(408, "the client hung up")
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        beginning.cancel()
    return task.result()


async def _either(first: "asyncio.Future[Any]", second: "asyncio.Future[Any]", timeout_s: float) -> None:
    await asyncio.wait({first, second}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _events(
    task: "asyncio.Future[T]", so_far: AnswerSoFar, chunks: Chunks[T], include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: what has been drawn, comments while nothing comes, then the rest of the answer."""
    try:
        while not task.done():
            growing = asyncio.ensure_future(so_far.changed.wait())
            await _either(task, growing, _KEEP_ALIVE_S)
            growing.cancel()
            if so_far.changed.is_set():
                so_far.changed.clear()
                for chunk in chunks.grown(so_far.texts):
                    yield f"data: {chunk.model_dump_json()}\n\n"
            elif not task.done():
                yield ": the model is answering\n\n"
        for chunk in chunks.rest(task.result(), include_usage):
            yield f"data: {chunk.model_dump_json()}\n\n"
    except LongshoreError as error:  # the status has been sent, so the error is sent as an event
        body = ErrorResponse(error=ErrorDetail(message=str(error), type="server_error"))
        yield f"data: {body.model_dump_json()}\n\n"
    finally:
        task.cancel()
    yield "data: [DONE]\n\n"
