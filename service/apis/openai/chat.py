"""OpenAI's `/v1/chat/completions`, `/v1/completions` and `/v1/responses`, and Anthropic's `/v1/messages`.

The header `longshore-unused` of an answer names the settings of its request that have no effect.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.keys import Asking, Principal, require
from service.apis.bodies import JsonBody, JsonRoute
from service.backend import Backed, Backend
from service.inference.questions import Reply, StreamedAnswer
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.dialects import UNUSED, CountRequest, MessagesRequest, ResponseRequest, named, unused_names
from shared.chat.episodes import overridden
from shared.chat.messages import ChatCompletion, ChatRequest, ServedModel
from shared.chat.streams import KEEP_ALIVE, MessageObject, ResponseObject
from shared.errors import LongshoreError, NotFound

# --- Answers over HTTP: whole, or as a stream of server-sent events during sampling ---

T = TypeVar("T", bound=BaseModel)
_LISTEN_S = 0.5
_KEEP_ALIVE_S = 15.0


async def _answer_in_form(
    body: ResponseRequest | MessagesRequest, request: Request, asking: Principal, backend: Backend
) -> Response:
    """Answer a request of another API's form, whole or streamed: as a chat, and the answer in the form."""
    question = body.chat()
    draft = StreamedAnswer(question, body.begun) if question.stream else None

    async def ask() -> Reply[ChatCompletion]:
        with named(body.NAMES):
            return await _asked(request, asking, backend, question, draft)

    response = await _answered(request, ask(), draft, body.whole)
    return _naming(response, [*body.unused, *_overridden(request, question)])


async def _asked(
    request: Request, asking: Principal, backend: Backend, chat: ChatRequest, draft: StreamedAnswer | None
) -> Reply[ChatCompletion]:
    """Have a chat answered: of an agent at its episode's address, as a turn of the episode."""
    if request.state.is_agent:
        return await backend.episodes.answer(asking, chat, draft)
    return await backend.inference.chat(asking.tenant, chat, draft)


def _overridden(request: Request, chat: ChatRequest) -> list[str]:
    return overridden(chat) if request.state.is_agent else []


def _naming(response: Response, unused: Sequence[str]) -> Response:
    """Name the parts of a request that have no effect."""
    if unused:
        response.headers[UNUSED] = unused_names(unused)
    return response


async def _answered(
    request: Request,
    answer: Coroutine[Any, Any, Reply[T]],
    draft: StreamedAnswer | None,
    whole: Callable[[T], BaseModel] | None = None,
) -> Response:
    """Return an answer, or with `draft` a stream of it. The stream begins with the first text, so that an early refusal
    still sets the HTTP status.

    `whole`: translates an answer that is not streamed; without it the answer is passed on unchanged.
    """
    task, until = asyncio.ensure_future(answer), time.monotonic() + (math.inf if draft is None else _KEEP_ALIVE_S)
    first: set[asyncio.Future[Any]] = {task}
    if draft is not None:
        first.add(asyncio.ensure_future(draft.changed.wait()))
    try:
        while not any(each.done() for each in first) and time.monotonic() < until:
            await asyncio.wait(first, timeout=_LISTEN_S, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and await request.is_disconnected():
                raise ClientDisconnect
        reply = task.result() if draft is None or task.done() else None
    except BaseException:
        task.cancel()
        raise
    finally:
        for waiting in first - {task}:
            waiting.cancel()
    if draft is not None:
        headers = {"cache-control": "no-store"}
        return StreamingResponse(_events(task, draft), media_type="text/event-stream", headers=headers)
    assert reply is not None
    content = reply.content if whole is None else whole(reply.read()).model_dump_json().encode()
    return Response(content, media_type="application/json")


async def _events(task: "asyncio.Future[Any]", draft: StreamedAnswer) -> AsyncIterator[bytes]:
    """Pass on the events of an answer as they come from its host, and comments while there are none."""
    try:
        while not task.done():
            grows: asyncio.Future[Any] = asyncio.ensure_future(draft.changed.wait())
            await asyncio.wait({task, grows}, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            grows.cancel()
            yield draft.take() or (b"" if task.done() else KEEP_ALIVE)
        yield draft.take()
        task.result()
    except LongshoreError as error:  # the status has been sent, so the error is sent as an event
        yield draft.failed(str(error))
    finally:
        task.cancel()


# --- `/v1/models` and completions in OpenAI's format, for the tenant's published models ---

router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["inference"], dependencies=[Depends(require("inference"))]
)


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
    published = await asyncio.to_thread(backend.published.served, asking.tenant)
    names = {model.id for model in published}
    bases = (model for model in backend.untrained.served() if model.id not in names)
    return ServedModels(data=(*published, *bases))


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, asking: Asking, backend: Backed) -> ServedModel:
    """Show a published model, by `name` its newest version or by `name:v3`; or a base model."""
    try:
        return await asyncio.to_thread(backend.published.show, asking.tenant, model_id)
    except NotFound:
        bases = {model.id: model for model in backend.untrained.served()}
        if model_id not in bases:
            raise
        return bases[model_id]


@router.delete("/models/{model_id:path}", dependencies=[Depends(require("write"))])
async def delete_model(model_id: str, asking: Asking, backend: Backed) -> DeletedModel:
    """Delete a published model: `name:v3` deletes one version, `name` all. Their numbers are not used again."""
    audit.touched(model_id)
    await asyncio.to_thread(backend.published.delete_model, asking.tenant, model_id)
    await backend.quotas.measure(asking.tenant)
    return DeletedModel(id=model_id)


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat(body: JsonBody[ChatRequest], request: Request, asking: Asking, backend: Backed) -> Response:
    """Ask a published adapter or model, or a base model. `stream` sends text while it is sampled."""
    draft = StreamedAnswer(body) if body.stream else None
    response = await _answered(request, _asked(request, asking, backend, body, draft), draft)
    return _naming(response, _overridden(request, body))


@router.post("/completions", response_model=CompletionResponse)
async def complete(body: JsonBody[CompletionRequest], request: Request, asking: Asking, backend: Backed) -> Response:
    """Continue a text, or token ids, without a chat template. `stream` sends text while it is sampled."""
    draft = StreamedAnswer(body) if body.stream else None
    return await _answered(request, backend.inference.complete(asking.tenant, body, draft), draft)


@router.post("/responses", response_model=ResponseObject)
async def respond(body: JsonBody[ResponseRequest], request: Request, asking: Asking, backend: Backed) -> Response:
    """Ask a published adapter or model, or a base model. `stream` sends events as the text is drawn."""
    return await _answer_in_form(body, request, asking, backend)


messages_router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["inference"], dependencies=[Depends(require("inference"))]
)


class MessageTokensCount(BaseModel):
    """The tokens of a conversation as the model's template renders it, up to where the answer begins."""

    input_tokens: int


@messages_router.post("/messages", response_model=MessageObject)
async def create_message(
    body: JsonBody[MessagesRequest], request: Request, asking: Asking, backend: Backed
) -> Response:
    """Ask a published adapter or model, or a base model. `stream` sends events as the text is drawn."""
    return await _answer_in_form(body, request, asking, backend)


@messages_router.post("/messages/count_tokens")
async def count_tokens(
    body: JsonBody[CountRequest], request: Request, asking: Asking, backend: Backed
) -> MessageTokensCount:
    """Count a conversation's tokens."""
    chat = body.chat()
    with named(body.NAMES):
        if request.state.is_agent:
            return MessageTokensCount(input_tokens=await backend.episodes.count(asking, chat))
        return MessageTokensCount(input_tokens=await backend.inference.count(asking.tenant, chat))
