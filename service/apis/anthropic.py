"""Anthropic's `/v1/messages`: a request is translated to a chat, and its answer back (docs/inference.md).

Both versions of the API are served, 2023-06-01 and 2026-10-21, since what they differ in is accepted of either: the key
as `x-api-key` or as a bearer, `temperature`, `top_p` and `top_k`, and messages of the role `system`.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag

from longshore.fields import only
from service.accounts.keys import Asking, require
from service.apis.bodies import JsonBody, JsonRoute
from service.apis.openai.chat import ForeignTool, answer_in_form, called, chat_of
from service.backend import Backed
from shared.chat.completions import SamplerRequest as ClientRequest
from shared.chat.completions import TopK
from shared.chat.messages import MAX_STOPS, MAX_TOOLS, ChatRequest
from shared.chat.streams import MessageObject, answered
from shared.errors import InvalidInput

router = APIRouter(
    route_class=JsonRoute, prefix="/v1", tags=["inference"], dependencies=[Depends(require("inference"))]
)

_MAX_MESSAGES = 4096
# A chat's fields by the names that they have here.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_NO_CONTAINER = "there are no containers here: leave this out"


class ClientTool(ClientRequest):
    """A tool that the client runs. The settings below its schema are for models and servers of the vendor's."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    cache_control: dict[str, JsonValue] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, JsonValue]] | None = None

    @property
    def of_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        return {"type": "function", "function": function}

    @property
    def unused(self) -> list[str]:
        return [name for name in ("defer_loading", "input_examples") if getattr(self, name)]


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom_tool" if kind in (None, "custom") else "foreign_tool"


class ToolChoice(ClientRequest):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def of_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class JsonForm(ClientRequest):
    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(ClientRequest):
    format: JsonForm | None = None
    effort: str | None = Field(default=None, max_length=16)


class CountRequest(ClientRequest):
    """`POST /v1/messages/count_tokens`: a conversation."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[dict[str, JsonValue]] = Field(min_length=1, max_length=_MAX_MESSAGES)
    system: str | list[JsonValue] | None = None
    tools: (
        list[
            Annotated[
                Annotated[ClientTool, Tag("custom_tool")] | Annotated[ForeignTool, Tag("foreign_tool")],
                Discriminator(_kind_of_tool),
            ]
        ]
        | None
    ) = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    # Hints and labels of the client's own: they change no answer.
    cache_control: dict[str, JsonValue] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    # Accepted without effect: the answer's header names them.
    thinking: dict[str, JsonValue] | None = None
    speed: str | None = None
    context_management: dict[str, JsonValue] | None = None

    @property
    def unused(self) -> list[str]:
        """The parts that have no effect."""
        found = [name for name in ("speed", "context_management", "diagnostics") if getattr(self, name, None)]
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            found.append("thinking")
        if self.output_config is not None and self.output_config.effort is not None:
            found.append("output_config.effort")
        for number, tool in enumerate(self.tools or ()):
            unused = [] if isinstance(tool, ForeignTool) else tool.unused
            found += [f"tools.{number}.{name}" for name in unused]
            found += [f"tools.{number}"] if isinstance(tool, ForeignTool) else []
        for number, message in enumerate(self.messages):
            for place, block in _blocks(message.get("content"), f"messages.{number}.content"):
                if block.get("type") in _THOUGHTS:
                    found.append(place)
        return found

    def chat(self) -> ChatRequest:
        """Return the chat that this asks for. Raises InvalidInput that names the field and the rule."""
        form = self.output_config.format if self.output_config else None
        named = {"name": "answer", "schema": form.schema_} if form else None
        fields = {
            "model": self.model,
            "messages": messages_of_blocks(self.system, self.messages),
            "tools": [tool.of_chat for tool in self.tools or () if isinstance(tool, ClientTool)] or None,
            "tool_choice": self.tool_choice.of_chat if self.tool_choice else None,
            "parallel_tool_calls": False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            "response_format": {"type": "json_schema", "json_schema": named} if named else None,
        }
        return chat_of(fields | self._sampling(), _named)

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    """`POST /v1/messages`: text and tools of the client's."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(default=None, max_length=MAX_STOPS)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: TopK = None
    stream: bool | None = None
    metadata: dict[str, JsonValue] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, JsonValue] | None = None
    container: Annotated[None, only(words=_NO_CONTAINER)] = None

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences or None}


class MessageTokensCount(BaseModel):
    """The tokens of a conversation as the model's template renders it, up to where the answer begins."""

    input_tokens: int


_THOUGHTS = ("thinking", "redacted_thinking")


def messages_of_blocks(
    system: str | list[JsonValue] | None, messages: list[dict[str, JsonValue]]
) -> list[dict[str, Any]]:
    """Return a conversation as a chat's messages. Raises InvalidInput: names the message or block."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _text_of(system, "system")})
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        match message:
            case {"role": "assistant", "content": str() | list() as content}:
                _assistant(found, content, f"{place}.content")
            case {"role": "user" | "system" as role, "content": str() | list() as content}:
                _user(found, str(role), content, f"{place}.content")
            case _:
                rule = "a message has a role, user, assistant or system, and content, a text or a list of blocks"
                raise InvalidInput(rule, place)
    return found


def _assistant(found: list[dict[str, Any]], content: JsonValue, place: str) -> None:
    turn: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for at, block in _blocks(content, place):
        match block:
            case {"type": "text", "text": str(text)}:
                turn[0]["content"] += text
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                called(turn, id, name, json.dumps(given, ensure_ascii=False))
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # of another model, as none is sent here; the answer's header names it
            case _:
                raise InvalidInput("a text or tool_use block", at)
    found += turn


def _user(found: list[dict[str, Any]], role: str, content: JsonValue, place: str) -> None:
    """Add a turn's messages: the results of tools each by itself, and the texts between them."""
    texts: dict[str, Any] | None = None
    for at, block in _blocks(content, place):
        match block:
            case {"type": "text", "text": str(text)}:
                if texts is None:
                    texts = {"role": role, "content": ""}
                    found.append(texts)
                texts["content"] += text
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                text, texts = _text_of(block.get("content") or "", f"{at}.content"), None
                if block.get("is_error") and not text.lower().startswith("error"):  # a chat has no such flag
                    text = f"Error: {text}"
                found.append({"role": "tool", "tool_call_id": id, "content": text})
            case _:
                raise InvalidInput("a text block, or of the user a tool_result; images and documents are refused", at)


def _text_of(content: JsonValue, place: str) -> str:
    texts = []
    for at, block in _blocks(content, place):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise InvalidInput("a text, or text blocks", at)
    return "".join(texts)


def _blocks(content: JsonValue, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the blocks of a content, each with its place. A text is one block; what is no block is an empty one."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        yield f"{place}.{number}", block if isinstance(block, dict) else {}


def _named(place: str) -> str:
    field, dot, rest = place.partition(".")
    return _NAMES.get(field, field) + dot + rest


@router.post("/messages", response_model=MessageObject)
async def create_message(
    body: JsonBody[MessagesRequest], request: Request, asking: Asking, backend: Backed
) -> Response:
    """Ask a published adapter or model, or a base model. `stream` sends events as the text is drawn."""
    asked = asking, body.chat(), backend

    def begun(answer_id: str, created: int) -> MessageObject:
        return MessageObject(id=f"msg_{answer_id.removeprefix('chatcmpl-')}", model=body.model)

    return await answer_in_form(request, asked, begun, answered, _named, body.unused)


@router.post("/messages/count_tokens")
async def count_tokens(
    body: JsonBody[CountRequest], request: Request, asking: Asking, backend: Backed
) -> MessageTokensCount:
    """Count a conversation's tokens."""
    chat = body.chat()
    try:
        if request.state.is_agent:
            return MessageTokensCount(input_tokens=await backend.episodes.count(asking, chat))
        return MessageTokensCount(input_tokens=await backend.inference.count(asking.tenant, chat))
    except InvalidInput as error:
        raise InvalidInput(error.message, error.place and _named(error.place)) from error
