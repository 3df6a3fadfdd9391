"""Requests and answers of `POST /v1/chat/completions`: the part of OpenAI's chat protocol that is supported.

A field that has no effect here is refused, unless it has the value that means "off" (such as a penalty of 0).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationInfo, field_validator, model_validator

from longshore.fields import Frozen
from shared.chat import completions

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOOLS = 128


class NamedFunction(completions.SamplerRequest):
    name: str


class NamedTool(completions.SamplerRequest):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _known_choice(value: object) -> object:
    match value:
        case None | "none" | "auto" | "required" | NamedTool():
            return value
        case {"type": "function", "function": {"name": str()}}:
            return value
    raise ValueError('"none", "auto", "required", or {"type": "function", "function": {"name": ...}}')


_ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_known_choice)]


class TemplateSettings(completions.SamplerRequest):
    """The settings that ART's clients send for every template. Templates here render earlier turns as by default."""

    preserve_thinking: bool | None = None


class MoreFields(completions.SamplerRequest):
    """Fields that ART's clients send to every server, although only some servers know them."""

    extra_fields: list[str] = Field(default_factory=list, max_length=64)


class ChatRequest(completions.SamplerRequest):
    """`messages` are the input of the model's chat template; choice j uses the seed `seed + j`."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[dict[str, JsonValue]] = Field(min_length=1, max_length=4096)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: str | list[str] | None = Field(default=None, max_length=MAX_STOPS)
    seed: int | None = Field(default=None, ge=0, lt=2**62)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=completions.MAX_TOP_LOGPROBS)
    stream: bool | None = None
    stream_options: completions.StreamOptions | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = Field(
        default=None, description="vLLM's field: ids of the prompt and of every choice"
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="vLLM's field: sampled tokens are named token_id:123 among the logprobs"
    )
    tools: list[dict[str, JsonValue]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: _ToolChoice = Field(default=None, description="none: the prompt has no tools")
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call if calls are forced")
    response_format: completions.ResponseFormat | None = None
    presence_penalty: completions.Penalty = None
    frequency_penalty: completions.Penalty = None
    top_k: completions.TopK = None
    min_p: completions.MinP = None
    logit_bias: completions.LogitBias = None

    # The client's own labels: they change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: TemplateSettings | None = Field(
        default=None, description="the only settings that are passed to a template"
    )
    nvext: MoreFields | None = Field(
        default=None, description="asks Dynamo's servers for fields that do not exist here"
    )

    # Clients send these; only values that change nothing are accepted.
    repetition_penalty: completions.Only1 = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tools")
    @classmethod
    def _functions(cls, tools: list[dict[str, JsonValue]] | None) -> list[dict[str, JsonValue]] | None:
        for i, tool in enumerate(tools or ()):
            match tool:
                case {"type": "function", "function": {"input_schema": _} | {"inputSchema": _}}:
                    raise ValueError(f"[{i}].function: the schema of arguments is `parameters`")
                case {"type": "function", "function": {"name": str(name)}} if name:
                    pass
                case _:
                    raise ValueError(f'[{i}]: a tool is {{"type": "function", "function": {{"name": ..., ...}}}}')
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _can_be_forced(cls, choice: Any, info: ValidationInfo) -> Any:
        if choice in (None, "none", "auto"):
            return choice
        forced = _forced(info.data.get("tools") or [], choice)
        if not forced:
            raise ValueError("there is no such tool" if isinstance(choice, NamedTool) else "there are no tools")
        if any(parameters_of(tool).get("type") != "object" for tool in forced):
            raise ValueError('the parameters of a tool whose call is forced are a schema of "type": "object"')
        if (size := len(json.dumps(forced))) > completions.MAX_SCHEMA_CHARACTERS:
            raise ValueError(
                f"tools of {completions.MAX_SCHEMA_CHARACTERS:,} characters can be forced, and these have {size:,}"
            )
        return choice

    @model_validator(mode="after")
    def _holds_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are two names of one thing: give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.offered_tools and self.response_format is not None and self.response_format.wanted is not None:
            raise ValueError('response_format and tools do not go together: with JSON, give tool_choice "none"')
        return self

    @property
    def offered_tools(self) -> list[dict[str, JsonValue]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[dict[str, JsonValue]]:
        """The model must call one of these tools; empty if it may answer in text."""
        return [] if self.tool_choice in (None, "none", "auto") else _forced(self.tools or [], self.tool_choice)

    @property
    def has_forced_form(self) -> bool:
        """True if the model alone does not draw the answer: a call of a tool is forced, or JSON."""
        form = self.response_format
        return bool(self.forced_tools) or (form is not None and form.type != "text")

    @property
    def may_call_once(self) -> bool:
        """True if at most one call may be made when calls are forced."""
        return isinstance(self.tool_choice, NamedTool) or self.parallel_tool_calls is False

    @property
    def most_tokens(self) -> int | None:
        """The limit of one choice's tokens; None: as many as fit the model's context."""
        return self.max_completion_tokens or self.max_tokens


def parameters_of(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the schema of a tool's arguments; if the tool has none, the schema of any object."""
    match tool:
        case {"function": {"parameters": dict(schema)}} if schema:
            return schema
    return {"type": "object"}


def name_of(tool: dict[str, JsonValue]) -> str:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    raise AssertionError("ChatRequest has checked its tools")


def _forced(tools: list[dict[str, JsonValue]], choice: Any) -> list[dict[str, JsonValue]]:
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    return [tool for tool in tools if wanted in (None, name_of(tool))]


class TopLogprob(completions.SamplerAnswer):
    """A likely token: its text, its logprob in nats, and its bytes if they are known."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """The sampled token, and the likeliest ones at its position."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(completions.SamplerAnswer):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(completions.SamplerAnswer):
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(completions.SamplerAnswer):
    """A tool that the model wants called."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatAnswer(completions.SamplerAnswer):
    """The model's message: text, calls of the tools that were offered, or both."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: tuple[ToolCall, ...] | None = None


class ChatChoice(completions.SamplerAnswer):
    """One answer of a completion. `token_ids`: the sampled ids with the end token, if the request asked for them.

    `answer_id`: the completion's id, under which its token ids are kept. A client that trains on this choice sends it
    back in a trajectory. `stop_reason`: vLLM's field, the stop string or token that ended it; None for the model's own.
    """

    index: int
    message: ChatAnswer
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    answer_id: str | None = None


class ChatCompletion(completions.SamplerAnswer):
    """The answer to a ChatRequest: its choices in order."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: completions.Usage
    prompt_token_ids: list[int] | None = None


class ChunkChoice(completions.SamplerAnswer):
    """A piece of a choice. Only the last one has a finish_reason. `answer_id`: as a ChatChoice has it."""

    index: int
    delta: dict[str, Any]
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    answer_id: str | None = None


class ChatChunk(completions.SamplerAnswer):
    """An event of a stream. If requested, `usage` comes in the last one, which has no choices.

    Only the first one has `prompt_token_ids`, if ids were asked for.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: completions.Usage | None = None
    prompt_token_ids: list[int] | None = None


class ServedModel(Frozen):
    """One entry of `GET /v1/models`: a published adapter or model of a tenant that answers completions.

    `id`: the name, meaning its newest version, or `name:v3`. `parent`: an adapter's base model.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None
    root: str
    version: int
