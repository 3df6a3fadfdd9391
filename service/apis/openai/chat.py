"""`/v1/models` and completions in OpenAI's shape, from what the asking tenant has published."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Literal, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from service.accounts import audit
from service.accounts.principals import Asking, require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.backend import Backed
from shared.chat.completions import CompletionRequest, CompletionResponse, ErrorDetail, ErrorResponse, Usage
from shared.chat.messages import ChatChoice, ChatChunk, ChatCompletion, ChatRequest, ChunkChoice, ServedModel
from shared.contract import Frozen
from shared.errors import LongshoreError

router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["inference"], dependencies=[Depends(require("inference"))]
)

T = TypeVar("T")
_LISTEN_S = 0.5
_KEEP_ALIVE_S = 15.0
_PIECE_CHARACTERS = 64


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
    """Adapters and models that your tenant has published."""
    return ServedModels(data=tuple(await asyncio.to_thread(backend.published.list, asking.tenant)))


@router.get("/models/{model_id}")
async def get_model(model_id: str, asking: Asking, backend: Backed) -> ServedModel:
    """Show what is published as `name`, its newest version, or as `name:v3`."""
    return await asyncio.to_thread(backend.published.show, asking.tenant, model_id)


@router.delete("/models/{model_id}", dependencies=[Depends(require("write"))])
async def delete_model(model_id: str, asking: Asking, backend: Backed) -> DeletedModel:
    """Delete what was published: `name:v3` one version, `name` all of them. Their numbers are not given again."""
    audit.touched(model_id)
    await asyncio.to_thread(backend.published.delete_model, asking.tenant, model_id)
    return DeletedModel(id=model_id)


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat(
    body: JsonBody[ChatRequest], request: Request, asking: Asking, backend: Backed
) -> Response | ChatCompletion:
    """Ask a published adapter or model. `stream` sends the finished answer in pieces."""
    task = asyncio.ensure_future(backend.inference.chat(asking.tenant, body))
    if not body.stream:
        return await _unless_gone(request, task)
    with suppress(TimeoutError):  # an early refusal can still have its own status
        await _unless_gone(request, task, _KEEP_ALIVE_S)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    headers = {"cache-control": "no-store"}
    return StreamingResponse(_events(task, include_usage), media_type="text/event-stream", headers=headers)


@router.post("/completions")
async def complete(
    body: JsonBody[CompletionRequest], request: Request, asking: Asking, backend: Backed
) -> CompletionResponse:
    """Continue a text, or token ids, without a chat template."""
    return await _unless_gone(request, asyncio.ensure_future(backend.inference.complete(asking.tenant, body)))


async def _unless_gone(request: Request, task: "asyncio.Future[T]", patience_s: float = float("inf")) -> T:
    """Wait for a task, and cancel it when the client hangs up.

    Raises:
        TimeoutError: it is not there yet, and goes on.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    try:
        while not task.done():
            if loop.time() > deadline:
                raise TimeoutError
            await asyncio.wait({task}, timeout=_LISTEN_S)
            if not task.done() and await request.is_disconnected():
                task.cancel()
                raise HTTPException(408, "the client hung up")
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task.result()


async def _events(task: "asyncio.Future[ChatCompletion]", include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: comments while the answer is made, then its pieces."""
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_KEEP_ALIVE_S)
            if not task.done():
                yield ": the model is answering\n\n"
        for chunk in chunks_of(task.result(), include_usage):
            yield f"data: {chunk.model_dump_json()}\n\n"
    except LongshoreError as error:  # the status has been sent, so the error is sent as an event
        body = ErrorResponse(error=ErrorDetail(message=str(error), type="server_error"))
        yield f"data: {body.model_dump_json()}\n\n"
    finally:
        task.cancel()
    yield "data: [DONE]\n\n"


def chunks_of(answer: ChatCompletion, include_usage: bool) -> Iterator[ChatChunk]:
    """An answer in pieces, choice after choice: its role, its text, why it ended."""

    def chunk(*choices: ChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(id=answer.id, created=answer.created, model=answer.model, choices=[*choices], usage=usage)

    for at, choice in enumerate(answer.choices):
        first = chunk(ChunkChoice(index=choice.index, delta={"role": "assistant", "content": ""}))
        yield first if at else first.model_copy(update={"prompt_token_ids": answer.prompt_token_ids})
        for text in _pieces(choice):
            piece = {"delta": {"content": text}, "logprobs": choice.logprobs, "token_ids": choice.token_ids}
            yield chunk(ChunkChoice.model_validate({"index": choice.index, **piece}))
        if calls := choice.message.tool_calls:
            deltas = [{"index": i, **call.model_dump()} for i, call in enumerate(calls)]
            yield chunk(ChunkChoice(index=choice.index, delta={"tool_calls": deltas}))
        yield chunk(ChunkChoice(index=choice.index, delta={}, finish_reason=choice.finish_reason))
    if include_usage:
        yield chunk(usage=answer.usage)


def _pieces(choice: ChatChoice) -> list[str]:
    """The text in pieces; in one with log-probabilities or token ids, as tokens may end within a character."""
    text = choice.message.content or ""
    if choice.logprobs is not None or choice.token_ids is not None:
        return [text]
    return [text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS)]
