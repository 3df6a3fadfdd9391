"""OpenAI's `/v1/chat/completions`, `/v1/completions` and `/v1/responses`.

Some settings have no effect here and change nothing about the answer's form: of thinking, or a tool of somebody's
server. The answer's header `longshore-unused` names them. All others are used or refused.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
)
from starlette.requests import ClientDisconnect

from longshore.fields import Frozen, only
from service.accounts import audit
from service.accounts.keys import Asking, Principal, require
from service.apis.bodies import JsonBody, JsonRoute
from service.backend import Backed, Backend
from service.inference.episodes import overridden
from service.inference.questions import Reply, StreamedAnswer
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.completions import SamplerRequest as ClientRequest
from shared.chat.messages import MAX_TOOLS, ChatCompletion, ChatRequest, ServedModel
from shared.chat.streams import CUSTOM_INPUT, KEEP_ALIVE, MessageObject, ResponseObject, completed, response_id
from shared.errors import InvalidInput, LongshoreError, NotFound
from shared.field_rules import first_error

# --- Answers over HTTP: whole, or as a stream of server-sent events during sampling ---

T = TypeVar("T", bound=BaseModel)
_LISTEN_S = 0.5
_KEEP_ALIVE_S = 15.0
_MOST_NAMED = 32

FormT = TypeVar("FormT", ResponseObject, MessageObject)


async def answer_in_form(
    request: Request,
    asked: tuple[Principal, ChatRequest, Backend],
    begun: Callable[[str, int], FormT],
    whole: Callable[[FormT, ChatCompletion], FormT],
    named: Callable[[str], str],
    unused: Sequence[str],
) -> Response:
    """Answer a request that another API's form was translated from, whole or streamed.

    Args:
        asked: who asks, the chat, and what answers it.
        begun: makes the form's object without its answer, from the completion's id and time.
        whole: puts the answer into that object.
        named: returns the form's name of a chat's field.
        unused: the parts of the request that have no effect.
    """
    question: ChatRequest = asked[1]
    draft = StreamedAnswer(question, begun) if question.stream else None

    async def ask() -> Reply[ChatCompletion]:
        try:
            return await _asked(request, asked[0], asked[2], question, draft)
        except InvalidInput as error:
            raise InvalidInput(error.message, error.place and named(error.place)) from error

    response = await _answered(request, ask(), draft, lambda told: whole(begun(told.id, told.created), told))
    return _naming(response, [*unused, *_overridden(request, question)])


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
        more = f", and {len(unused) - _MOST_NAMED:,} more" if len(unused) > _MOST_NAMED else ""
        response.headers["longshore-unused"] = ", ".join(unused[:_MOST_NAMED]) + more
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


# --- `/v1/responses`: OpenAI's newer form of chats. A request is translated to a chat, and its answer back ---
#
# Nothing is stored: a client sends the whole conversation each time.

responses_router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["inference"], dependencies=[Depends(require("inference"))]
)

_MAX_ITEMS = 4096
# A chat's fields by the names that they have here.
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
_STATELESS = "nothing is stored here: send the whole conversation as input"


class FunctionTool(ClientRequest):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None

    @property
    def of_chat(self) -> dict[str, JsonValue]:
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class CustomTool(ClientRequest):
    """A tool that takes a text. The model sees a function with that text as its only argument.

    `format`: a grammar of the text, which is described to the model and not enforced.
    """

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    format: dict[str, JsonValue] | None = None

    @property
    def of_chat(self) -> dict[str, Any]:
        description = self.description or ""
        match self.format:
            case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
                description += f"\n\nThe input follows this {syntax} grammar:\n{definition}"
        text = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
        return {"type": "function", "function": {"name": self.name, "description": description, "parameters": text}}


class ForeignTool(ClientRequest):
    """A tool of somebody's server, such as `web_search`: the model is not offered it."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return f"{kind}_tool" if kind in ("function", "custom") else "foreign_tool"


_Tool = Annotated[
    Annotated[FunctionTool, Tag("function_tool")]
    | Annotated[CustomTool, Tag("custom_tool")]
    | Annotated[ForeignTool, Tag("foreign_tool")],
    Discriminator(_kind_of_tool),
]


class ToolByName(ClientRequest):
    type: Literal["function", "custom"]
    name: str


class TextFormat(ClientRequest):
    """The form of the answer. A schema is always followed, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def of_chat(self) -> dict[str, Any]:
        named = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, **({"json_schema": named} if named else {})}


class TextSettings(ClientRequest):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(ClientRequest):
    """Settings of thinking, which templates of open models do not have: they have no effect."""

    effort: str | None = Field(default=None, max_length=16)
    summary: str | None = Field(default=None, max_length=16)
    generate_summary: str | None = Field(default=None, max_length=16)


class EventOptions(ClientRequest):
    include_obfuscation: bool | None = None


def _not_stored(given: object) -> object:
    if given is True:
        raise ValueError(f"{_STATELESS}, and store: false")
    return given


def _whole(given: str | list[dict[str, JsonValue]]) -> str | list[dict[str, JsonValue]]:
    if not given:
        raise ValueError("there is nothing to answer")
    return given


class ResponseRequest(ClientRequest):
    """`POST /v1/responses`: text, function and custom tools, and the form of the answer."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[str | Annotated[list[dict[str, JsonValue]], Field(max_length=_MAX_ITEMS)], AfterValidator(_whole)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    stream_options: EventOptions | None = None
    tools: list[_Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolByName | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None

    # Labels of the client's own: they change no answer.
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None

    # Known to clients; only at the values that change nothing.
    store: Annotated[Literal[False] | None, BeforeValidator(_not_stored)] = None
    previous_response_id: Annotated[None, only(words=_STATELESS)] = None
    conversation: Annotated[None, only(words=_STATELESS)] = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(default=None, max_length=8)
    top_logprobs: Literal[0] | None = None

    # Accepted without effect: the answer's header names it.
    reasoning: Reasoning | None = None

    @property
    def unused(self) -> list[str]:
        """The parts that have no effect."""
        found = [f"tools.{n}" for n, tool in enumerate(self.tools or ()) if isinstance(tool, ForeignTool)]
        if isinstance(self.input, list):
            found += [f"input.{n}" for n, item in enumerate(self.input) if item.get("type") == "reasoning"]
        if self.reasoning is not None and self.reasoning.effort != "none":
            found += [f"reasoning.{name}" for name in self.reasoning.model_dump(exclude_none=True)]
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found.append("text.verbosity")
        return found

    def chat(self) -> ChatRequest:
        """Return the chat that this asks for. Raises InvalidInput that names the field and the rule."""
        match self.input:
            case str(text):
                given: list[dict[str, JsonValue]] = [{"role": "user", "content": text}]
            case items:
                given = items
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice: Any = self.tool_choice
        if isinstance(choice, ToolByName):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields = {
            "model": self.model,
            "messages": [*messages, *messages_of_items(given)],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [tool.of_chat for tool in self.tools or () if not isinstance(tool, ForeignTool)] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.of_chat if self.text and self.text.format else None,
        }
        return chat_of(fields, _named)

    def asked(self, id: str, created: int) -> ResponseObject:
        """Return the response as it begins: its settings."""
        form = self.text.format if self.text and self.text.format else TextFormat(type="text")
        choice = self.tool_choice or "auto"
        return ResponseObject(
            id=id,
            created_at=created,
            status="in_progress",
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            metadata=self.metadata or {},
            model=self.model,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            temperature=1.0 if self.temperature is None else self.temperature,
            text={"format": form.model_dump(exclude_none=True, by_alias=True)},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in self.tools or ()],
            top_p=1.0 if self.top_p is None else self.top_p,
        )


def chat_of(fields: dict[str, Any], named: Callable[[str], str]) -> ChatRequest:
    """Return the chat that has these fields. Raises InvalidInput, by the name that the request's form has for one."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        place, rule = first_error(error)
        raise InvalidInput(rule, named(place)) from None


def called(messages: list[dict[str, Any]], id: str, name: str, arguments: str) -> None:
    """Add a call to the assistant's message at the end, or to a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def messages_of_items(items: list[dict[str, JsonValue]]) -> list[dict[str, JsonValue]]:
    """Return the items of a conversation as messages. Calls that follow each other, or a text, are one message's.

    Raises InvalidInput: names the item.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        place = f"input.{number}"
        match item:
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                called(messages, id, name, arguments)
            case {"type": "custom_tool_call", "call_id": str(id), "name": str(name), "input": str(text)}:
                called(messages, id, name, json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False))
            case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(id), "output": output}:
                messages.append({"role": "tool", "tool_call_id": id, "content": _text_of(output, f"{place}.output")})
            case {"type": "reasoning"}:
                pass  # of another model, as none is sent here; the answer's header names it
            case {"role": "user" | "assistant" | "system" | "developer" as role, "content": content} if (
                item.get("type", "message") == "message"
            ):
                role = "system" if role == "developer" else role
                messages.append({"role": role, "content": _text_of(content, f"{place}.content")})
            case _:
                rule = "a message with role and content, a call of a function or custom tool, or the output of one"
                raise InvalidInput(rule, place)
    return messages


def _text_of(content: JsonValue, place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        match part:
            case {"type": "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case _:
                raise InvalidInput("a text, or parts of the types input_text and output_text", f"{place}.{number}")
    return "".join(texts)


def _named(place: str) -> str:
    field, dot, rest = place.partition(".")
    return _NAMES.get(field, field) + dot + rest


@responses_router.post("/responses", response_model=ResponseObject)
async def respond(body: JsonBody[ResponseRequest], request: Request, asking: Asking, backend: Backed) -> Response:
    """Ask a published adapter or model, or a base model. `stream` sends events as the text is drawn."""
    asked = asking, body.chat(), backend

    def begun(answer_id: str, created: int) -> ResponseObject:
        return body.asked(response_id(answer_id), created)

    return await answer_in_form(request, asked, begun, completed, _named, body.unused)
