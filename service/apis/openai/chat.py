"""`/v1/models` and completions in OpenAI's format, for the tenant's published models."""

import asyncio
from functools import partial
from typing import Literal

from fastapi import APIRouter, Depends, Request, Response

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.principals import Asking, require
from service.apis.json_bodies import JsonBody, JsonRoute
from service.apis.openai.answering import answered
from service.apis.openai.streams import ChatChunks, TextChunks
from service.backend import Backed
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest, ServedModel
from shared.errors import NotFound

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
    published = await asyncio.to_thread(backend.published.list, asking.tenant)
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
    return DeletedModel(id=model_id)


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat(body: JsonBody[ChatRequest], request: Request, asking: Asking, backend: Backed) -> Response:
    """Ask a published adapter or model, or a base model. `stream` sends text while it is sampled."""
    chunks = partial(ChatChunks, model=body.model, include_usage=_tells_usage(body)) if body.stream else None
    return await answered(request, partial(backend.inference.chat, asking.tenant, body), chunks)


@router.post("/completions", response_model=CompletionResponse)
async def complete(body: JsonBody[CompletionRequest], request: Request, asking: Asking, backend: Backed) -> Response:
    """Continue a text, or token ids, without a chat template. `stream` sends text while it is sampled."""
    chunks = partial(TextChunks, model=body.model, include_usage=_tells_usage(body)) if body.stream else None
    return await answered(request, partial(backend.inference.complete, asking.tenant, body), chunks)


def _tells_usage(body: ChatRequest | CompletionRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage
