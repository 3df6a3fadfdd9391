"""Requests of OpenAI's `/v1/responses` and Anthropic's `/v1/messages` as chats. Answers go back by streams.py.

Some settings have no effect here and change nothing about the answer's form: of thinking, or a tool of somebody's
server. `unused` names them. All others are used or refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, Tag

from longshore.fields import only
from shared.chat.completions import SamplerRequest as ClientRequest
from shared.chat.completions import TopK
from shared.chat.messages import MAX_STOPS, MAX_TOOLS, ChatCompletion, ChatRequest
from shared.chat.streams import CUSTOM_INPUT, MessageObject, ResponseObject, answered, completed, response_id
from shared.errors import InvalidInput
from shared.field_rules import refused_in_words

UNUSED = "longshore-unused"
"""The header of an answer that names the settings of its request that have no effect."""
_MOST_NAMED = 32


def unused_names(names: Sequence[str]) -> str:
    """Return the header's value."""
    more = f", and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


# --- `/v1/responses`: nothing is stored, so a client sends the whole conversation each time ---

_MAX_ITEMS = 4096
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

    NAMES: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    """A chat's fields by the names that they have here."""

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
        return chat_of(fields, self.NAMES)

    def begun(self, answer_id: str, created: int) -> ResponseObject:
        """Return the response as it begins: its settings."""
        form = self.text.format if self.text and self.text.format else TextFormat(type="text")
        choice = self.tool_choice or "auto"
        return ResponseObject(
            id=response_id(answer_id),
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

    def whole(self, answer: ChatCompletion) -> ResponseObject:
        """Return the response with its answer."""
        return completed(self.begun(answer.id, answer.created), answer)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InvalidInput of the block name its field as the form does: `names` has the names that differ."""
    try:
        yield
    except InvalidInput as error:
        field, dot, rest = (error.place or "").partition(".")
        raise type(error)(error.message, error.place and names.get(field, field) + dot + rest) from error


def chat_of(fields: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Return the chat that has these fields. Raises InvalidInput, by the name that the request's form has for one."""
    with named(names), refused_in_words():
        return ChatRequest.model_validate(fields)


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
    rule = "a text, or parts of the types input_text and output_text"
    return text_of(content, place, ("input_text", "output_text"), rule)


def text_of(content: JsonValue, place: str, kinds: Sequence[str], rule: str) -> str:
    """Return the text of a content: a text, or parts of these types. Raises InvalidInput with the rule for others."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in kinds:
                texts.append(text)
            case _:
                raise InvalidInput(rule, f"{place}.{number}")
    return "".join(texts)


# --- `/v1/messages` ---
#
# Both versions of the API are served, 2023-06-01 and 2026-10-21: what they differ in is accepted of either.

_MAX_MESSAGES = 4096
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


def _kind_of_client_tool(tool: Any) -> str:
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
                Discriminator(_kind_of_client_tool),
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

    NAMES: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences", "response_format": "output_config.format"}
    """As of `ResponseRequest`."""

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
        schema = {"name": "answer", "schema": form.schema_} if form else None
        fields = {
            "model": self.model,
            "messages": messages_of_blocks(self.system, self.messages),
            "tools": [tool.of_chat for tool in self.tools or () if isinstance(tool, ClientTool)] or None,
            "tool_choice": self.tool_choice.of_chat if self.tool_choice else None,
            "parallel_tool_calls": False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
        }
        return chat_of(fields | self._sampling(), self.NAMES)

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

    def begun(self, answer_id: str, created: int) -> MessageObject:
        """Return the message as it begins."""
        return MessageObject(id=f"msg_{answer_id.removeprefix('chatcmpl-')}", model=self.model)

    def whole(self, answer: ChatCompletion) -> MessageObject:
        """Return the message with its answer."""
        return answered(self.begun(answer.id, answer.created), answer)

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences or None}


_THOUGHTS = ("thinking", "redacted_thinking")


def messages_of_blocks(
    system: str | list[JsonValue] | None, messages: list[dict[str, JsonValue]]
) -> list[dict[str, Any]]:
    """Return a conversation as a chat's messages. Raises InvalidInput: names the message or block."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _text_of_blocks(system, "system")})
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
                text, texts = _text_of_blocks(block.get("content") or "", f"{at}.content"), None
                if block.get("is_error") and not text.lower().startswith("error"):  # a chat has no such flag
                    text = f"Error: {text}"
                found.append({"role": "tool", "tool_call_id": id, "content": text})
            case _:
                raise InvalidInput("a text block, or of the user a tool_result; images and documents are refused", at)


def _text_of_blocks(content: JsonValue, place: str) -> str:
    return text_of(content, place, ("text",), "a text, or text blocks")


def _blocks(content: JsonValue, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the blocks of a content, each with its place. A text is one block; what is no block is an empty one."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        yield f"{place}.{number}", block if isinstance(block, dict) else {}
