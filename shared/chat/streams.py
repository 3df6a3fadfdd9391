"""Answers in the forms of OpenAI's and Anthropic's APIs, whole and streamed.

The events of a stream are written once, where the text is sampled, and passed on unchanged.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from longshore.fields import Frozen, added
from shared.chat.completions import (
    Choice,
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
    ErrorDetail,
    ErrorResponse,
    SamplerAnswer,
    Usage,
)
from shared.chat.messages import ChatChoice, ChatChunk, ChatCompletion, ChatRequest, ChunkChoice, ToolCall
from shared.errors import LongshoreError

# --- The events of an answer: new text of each choice while it is sampled, then the rest of the finished answer ---
#
# Each form has `grown`, the new text; `rest`, the rest of the finished answer; `failed`, the event in its place;
# and `note`, which takes an event that an earlier host has sent, so that the stream continues from there.

_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": the model is answering\n\n"


class AnswerDiffers(LongshoreError):
    """A stream cannot be continued by the answer of another sampler."""


class SentTexts:
    """The text that was sent of each choice. `ended`: choices whose end was sent."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self.ended: set[int] = set()

    def add(self, index: int, text: str, has_ended: bool = False) -> None:
        """Take note of an event that an earlier host has sent."""
        self._texts[index] = self._texts.get(index, "") + text
        if has_ended:
            self.ended.add(index)

    def begins(self, index: int) -> bool:
        """Return True the first time that a choice is asked about."""
        is_new = index not in self._texts
        self._texts.setdefault(index, "")
        return is_new

    def new(self, index: int, text: str, is_whole: bool = False) -> str:
        """Return the part of a choice's current text that has not been sent.

        A sampler that takes the place of a lost one begins with shorter texts, which are not sent.

        Raises AnswerDiffers: the text does not begin with the part that was sent.
        """
        sent = self._texts.get(index, "")
        if not text.startswith(sent):
            if not is_whole and sent.startswith(text):
                return ""
            sent = sent.lstrip()  # of an answer with tool calls the text is stripped
        if not text.startswith(sent):
            raise AnswerDiffers("the sampler was lost, and another one's answer differs: ask again")
        self._texts[index] = text
        return text[len(sent) :]


def _failure(message: str) -> ErrorResponse:
    return ErrorResponse(error=ErrorDetail(message=message, type="server_error"))


class ChatChunks:
    """The chunks of an answer to messages: each choice's role, text, tool calls and finish reason.

    If the answer is remembered, a choice's first and last chunks have `answer_id`: openai's client takes a choice's
    extra fields from its first chunk.
    """

    end = _DONE

    def __init__(self, start: "StreamStart", model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._head = ChatChunk(id=start.answer_id, created=start.created, model=model, choices=[])
        self._sent = SentTexts()

    def grown(self, texts: tuple[str, ...]) -> Iterator[ChatChunk]:
        for index, text in enumerate(texts):
            if self._sent.begins(index):
                yield self._opening(index)
            if new := self._sent.new(index, text):
                yield self._chunk(ChunkChoice(index=index, delta={"content": new}))

    def rest(self, answer: ChatCompletion) -> Iterator[ChatChunk]:
        """Yield the rest of the answer. Log-probabilities and token ids come with the last of the text."""
        prompt_ids = answer.prompt_token_ids
        for choice in answer.choices:
            if choice.index in self._sent.ended:
                continue
            if self._sent.begins(choice.index):
                yield self._opening(choice.index).model_copy(update={"prompt_token_ids": prompt_ids})
                prompt_ids = None
            yield from self._end(choice)
        if self._include_usage:
            yield self._chunk(usage=answer.usage)

    def failed(self, message: str) -> ErrorResponse:
        return _failure(message)

    def note(self, sent: dict[str, Any]) -> None:
        for choice in sent.get("choices", ()):
            self._sent.add(choice["index"], choice["delta"].get("content") or "", bool(choice.get("finish_reason")))

    def _end(self, choice: ChatChoice) -> Iterator[ChatChunk]:
        text = self._sent.new(choice.index, choice.message.content or "", is_whole=True)
        if text or choice.logprobs is not None or choice.token_ids is not None:
            piece = {"delta": {"content": text}, "logprobs": choice.logprobs, "token_ids": choice.token_ids}
            yield self._chunk(ChunkChoice.model_validate({"index": choice.index, **piece}))
        if calls := choice.message.tool_calls:
            deltas = [{"index": i, **call.model_dump()} for i, call in enumerate(calls)]
            yield self._chunk(ChunkChoice(index=choice.index, delta={"tool_calls": deltas}))
        ended = {"finish_reason": choice.finish_reason, "answer_id": choice.answer_id}
        yield self._chunk(ChunkChoice.model_validate({"index": choice.index, "delta": {}, **ended}))

    def _opening(self, index: int) -> ChatChunk:
        delta = {"role": "assistant", "content": ""}
        return self._chunk(ChunkChoice(index=index, delta=delta, answer_id=self._head.id))

    def _chunk(self, *choices: ChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return self._head.model_copy(update={"choices": [*choices], "usage": usage})


class TextChunks:
    """The chunks of a continued text: of each choice its text, then why it ended with all else that was asked for."""

    end = _DONE

    def __init__(self, start: "StreamStart", model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        id = start.answer_id.replace("chatcmpl", "cmpl")
        self._head = CompletionChunk(id=id, created=start.created, model=model, choices=[])
        self._sent = SentTexts()

    def grown(self, texts: tuple[str, ...]) -> Iterator[CompletionChunk]:
        for index, text in enumerate(texts):
            if new := self._sent.new(index, text):
                yield self._chunk(Choice(index=index, text=new))

    def rest(self, answer: CompletionResponse) -> Iterator[CompletionChunk]:
        for choice in answer.choices:
            if choice.index not in self._sent.ended:
                text = self._sent.new(choice.index, choice.text, is_whole=True)
                yield self._chunk(choice.model_copy(update={"text": text}))
        if self._include_usage:
            yield self._chunk(usage=answer.usage)

    def failed(self, message: str) -> ErrorResponse:
        return _failure(message)

    def note(self, sent: dict[str, Any]) -> None:
        for choice in sent.get("choices", ()):
            self._sent.add(choice["index"], choice["text"], bool(choice.get("finish_reason")))

    def _chunk(self, *choices: Choice, usage: Usage | None = None) -> CompletionChunk:
        return self._head.model_copy(update={"choices": [*choices], "usage": usage})


# --- Answers of `/v1/responses` in OpenAI's shape: the whole object, or the events of a stream ---

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(SamplerAnswer):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[JsonValue] = Field(default_factory=list, max_length=0)
    logprobs: list[JsonValue] = Field(default_factory=list, max_length=0)


class OutputMessage(SamplerAnswer):
    """The model's text."""

    type: Literal["message"] = "message"
    id: str
    status: ResponseStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(SamplerAnswer):
    """A function that the model wants called. `arguments`: a JSON object, as text."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: ResponseStatus


class OutputCustomCall(SamplerAnswer):
    """A tool that takes a text, `input`, and that the model wants called."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    input: str
    status: ResponseStatus


CUSTOM_INPUT = "input"
"""The only argument of the function that stands for a `custom` tool. Its value is the tool's text."""


class Incomplete(SamplerAnswer):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseProblem(SamplerAnswer):
    code: str
    message: str


class InputDetails(SamplerAnswer):
    cached_tokens: int = 0


class OutputDetails(SamplerAnswer):
    reasoning_tokens: int = 0


class ResponseUsage(SamplerAnswer):
    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class ResponseObject(SamplerAnswer):
    """An answer, and the settings that it was asked with. Nothing of it is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    error: ResponseProblem | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | OutputCustomCall] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, JsonValue]
    tool_choice: str | dict[str, JsonValue]
    tools: list[dict[str, JsonValue]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class NamedEvent(SamplerAnswer):
    """An event of a stream. `type` is its name, and says which other fields it has."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str


def response_id(completion_id: str) -> str:
    return f"resp_{completion_id.removeprefix('chatcmpl-')}"


def completed(asked: ResponseObject, answer: ChatCompletion) -> ResponseObject:
    """Return a response with its answer. `asked`: the response before it, with only the request's settings."""
    [choice] = answer.choices
    status: ResponseStatus = "incomplete" if choice.finish_reason == "length" else "completed"
    output: list[OutputMessage | OutputCall | OutputCustomCall] = []
    if choice.message.content or not choice.message.tool_calls:
        output.append(_message(asked.id, choice.message.content or "", status))
    custom = {tool["name"] for tool in asked.tools if tool["type"] == "custom"}
    for number, call in enumerate(choice.message.tool_calls or ()):
        output.append(_call(asked.id, number, call, is_custom=call.function.name in custom))
    usage = ResponseUsage(
        input_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens,
        total_tokens=answer.usage.total_tokens,
    )
    told = {
        "status": status,
        "output": output,
        "usage": usage,
        "incomplete_details": Incomplete() if status == "incomplete" else None,
    }
    return asked.model_copy(update=told)


def _message(of_response: str, text: str, status: ResponseStatus) -> OutputMessage:
    return OutputMessage(
        id=of_response.replace("resp_", "msg_"), status=status, content=[OutputText(text=text)] if text else []
    )


def _call(of_response: str, number: int, call: ToolCall, *, is_custom: bool) -> OutputCall | OutputCustomCall:
    name, arguments = call.function.name, call.function.arguments
    if not is_custom:
        id = f"{of_response.replace('resp_', 'fc_')}_{number}"
        return OutputCall(id=id, call_id=call.id, name=name, arguments=arguments, status="completed")
    match json.loads(arguments):
        case {"input": str(text)}:
            arguments = text  # else the model has not kept to the form, and the tool gets what it wrote
    id = f"{of_response.replace('resp_', 'ctc_')}_{number}"
    return OutputCustomCall(id=id, call_id=call.id, name=name, input=arguments, status="completed")


class NamedEvents:
    """The events of an answer in a form that gives each a name: new text while it is sampled, then the rest.

    Every event is sent once for each part of the answer, except those of new text. So a host that continues a stream
    sends the events that the lost one has not sent, whichever was the last.
    """

    end = b""

    def __init__(self) -> None:
        self._sent = SentTexts()
        self._told = set[tuple[str, int | None]]()

    def note(self, sent: dict[str, Any]) -> None:
        match sent:
            case {"type": "response.output_text.delta", "delta": str(text)}:
                self._sent.add(0, text)
            case {"type": "content_block_delta", "delta": {"text": str(text)}}:
                self._sent.add(0, text)
            case _:
                self._told.add(self._key(sent["type"], sent))

    def _once(self, type: str, **fields: Any) -> Iterator[NamedEvent]:
        """Yield an event, unless it was sent."""
        if (key := self._key(type, fields)) not in self._told:
            self._told.add(key)
            yield self._event(type, **fields)

    def _event(self, type: str, **fields: Any) -> NamedEvent:
        return NamedEvent(type=type, **fields)

    @staticmethod
    def _key(type: str, fields: dict[str, Any]) -> tuple[str, int | None]:
        return type, fields.get("output_index", fields.get("index"))


class ResponseEvents(NamedEvents):
    """The events of a streamed response."""

    def __init__(self, asked: ResponseObject) -> None:
        super().__init__()
        self._asked = asked
        self._num_events = 0

    def grown(self, texts: tuple[str, ...]) -> Iterator[NamedEvent]:
        yield from self._opening()
        yield from self._new_text(texts[0])

    def rest(self, answer: ChatCompletion) -> Iterator[NamedEvent]:
        yield from self._opening()
        whole = completed(self._asked, answer)
        for number, item in enumerate(whole.output):
            if isinstance(item, OutputMessage):
                yield from self._end_of_message(item)
            else:
                yield from self._whole_call(number, item)
        yield from self._once(f"response.{whole.status}", response=whole)

    def note(self, sent: dict[str, Any]) -> None:
        self._num_events = sent["sequence_number"] + 1
        super().note(sent)

    def failed(self, message: str) -> NamedEvent:
        problem = ResponseProblem(code="server_error", message=message)
        return self._event(
            "response.failed", response=self._asked.model_copy(update={"status": "failed", "error": problem})
        )

    def _event(self, type: str, **fields: Any) -> NamedEvent:
        self._num_events += 1
        return NamedEvent(type=type, sequence_number=self._num_events - 1, **fields)

    def _opening(self) -> Iterator[NamedEvent]:
        yield from self._once("response.created", response=self._asked)
        yield from self._once("response.in_progress", response=self._asked)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._asked.id.replace("resp_", "msg_"), "output_index": 0, "content_index": 0}

    def _new_text(self, text: str, is_whole: bool = False) -> Iterator[NamedEvent]:
        if new := self._sent.new(0, text, is_whole):
            begun = _message(self._asked.id, "", "in_progress")
            yield from self._once("response.output_item.added", output_index=0, item=begun)
            yield from self._once("response.content_part.added", **self._place, part=OutputText(text=""))
            yield self._event("response.output_text.delta", **self._place, delta=new, logprobs=[])

    def _end_of_message(self, item: OutputMessage) -> Iterator[NamedEvent]:
        yield from self._new_text("".join(part.text for part in item.content), is_whole=True)
        yield from self._once("response.output_item.added", output_index=0, item=item)
        for part in item.content:
            yield from self._once("response.output_text.done", **self._place, text=part.text, logprobs=[])
            yield from self._once("response.content_part.done", **self._place, part=part)
        yield from self._once("response.output_item.done", output_index=0, item=item)

    def _whole_call(self, number: int, item: OutputCall | OutputCustomCall) -> Iterator[NamedEvent]:
        place = {"item_id": item.id, "output_index": number}
        field, kind, told = "arguments", "function_call_arguments", {"name": item.name}
        if isinstance(item, OutputCustomCall):
            field, kind, told = CUSTOM_INPUT, "custom_tool_call_input", {}
        content = getattr(item, field)
        begun = item.model_copy(update={field: "", "status": "in_progress"})
        yield from self._once("response.output_item.added", output_index=number, item=begun)
        yield from self._once(f"response.{kind}.delta", **place, delta=content)
        yield from self._once(f"response.{kind}.done", **place, **told, **{field: content})
        yield from self._once("response.output_item.done", output_index=number, item=item)


# --- Answers of `/v1/messages` in Anthropic's shape: the whole object, or the events of a stream ---

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(SamplerAnswer):
    type: Literal["text"] = "text"
    text: str


class ToolUseBlock(SamplerAnswer):
    """A tool that the model wants called."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, JsonValue]


class MessageUsage(SamplerAnswer):
    input_tokens: int = 0
    output_tokens: int = 0


class MessageObject(SamplerAnswer):
    """An answer. As a stream begins it has no content and no stop reason.

    `stop_sequence`: the one of the request that ended the text.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock] = Field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = MessageUsage()


_STOPS: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def answered(asked: MessageObject, answer: ChatCompletion) -> MessageObject:
    """Return a message with its answer. `asked`: the message before it."""
    [choice] = answer.choices
    content: list[TextBlock | ToolUseBlock] = []
    if choice.message.content:
        content.append(TextBlock(text=choice.message.content))
    for call in choice.message.tool_calls or ():
        given = json.loads(call.function.arguments)
        content.append(ToolUseBlock(id=call.id, name=call.function.name, input=given))
    reason, stopped_by = _STOPS[choice.finish_reason], choice.stop_reason
    is_by_text = reason == "end_turn" and isinstance(stopped_by, str)
    told = {
        "content": content,
        "stop_reason": "stop_sequence" if is_by_text else reason,
        "stop_sequence": stopped_by if is_by_text else None,
        "usage": MessageUsage(input_tokens=answer.usage.prompt_tokens, output_tokens=answer.usage.completion_tokens),
    }
    return asked.model_copy(update=told)


class MessageEvents(NamedEvents):
    """The events of a streamed message."""

    def __init__(self, asked: MessageObject) -> None:
        super().__init__()
        self._asked = asked

    def grown(self, texts: tuple[str, ...]) -> Iterator[NamedEvent]:
        yield from self._once("message_start", message=self._asked)
        yield from self._new_text(texts[0])

    def rest(self, answer: ChatCompletion) -> Iterator[NamedEvent]:
        yield from self._once("message_start", message=self._asked)
        whole = answered(self._asked, answer)
        for index, block in enumerate(whole.content):
            if isinstance(block, TextBlock):
                yield from self._new_text(block.text, is_whole=True)
            else:
                begun = block.model_copy(update={"input": {}})
                yield from self._once("content_block_start", index=index, content_block=begun)
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block.input, ensure_ascii=False)}
                yield from self._once("content_block_delta", index=index, delta=delta)
            yield from self._once("content_block_stop", index=index)
        ended = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
        yield from self._once("message_delta", delta=ended, usage=whole.usage)
        yield from self._once("message_stop")

    def failed(self, message: str) -> NamedEvent:
        return NamedEvent(type="error", error={"type": "api_error", "message": message})

    def _new_text(self, text: str, is_whole: bool = False) -> Iterator[NamedEvent]:
        if new := self._sent.new(0, text, is_whole):
            yield from self._once("content_block_start", index=0, content_block=TextBlock(text=""))
            yield NamedEvent(type="content_block_delta", index=0, delta={"type": "text_delta", "text": new})


# --- The stream of one answer, as its bytes ---


class StreamStart(Frozen):
    """How the stream of an answer begins, or continues after its host was lost.

    `answer_id`, `created`: of the answer. `response`, `message`: the object without its answer, for `/v1/responses` and
    `/v1/messages`. `sent`: whole events that the client has already.
    """

    answer_id: str
    created: int
    response: ResponseObject | None = None
    message: MessageObject | None = added(None)
    sent: str = ""

    @classmethod
    def of(cls, answer_id: str, created: int, form: ResponseObject | MessageObject | None) -> "StreamStart":
        """Begin the stream of an answer in another API's form, or with None of a chat's or a text's."""
        of_form = {"message" if isinstance(form, MessageObject) else "response": form}
        return cls.model_validate({"answer_id": answer_id, "created": created, **of_form})


class EventStream:
    """The bytes of a streamed answer."""

    def __init__(self, start: StreamStart, asked: ChatRequest | CompletionRequest) -> None:
        tells_usage = asked.stream_options is not None and asked.stream_options.include_usage
        if start.response is not None:
            self._events: Any = ResponseEvents(start.response)
        elif start.message is not None:
            self._events = MessageEvents(start.message)
        elif isinstance(asked, ChatRequest):
            self._events = ChatChunks(start, asked.model, tells_usage)
        else:
            self._events = TextChunks(start, asked.model, tells_usage)
        for line in start.sent.split("\n"):
            if line.startswith("data: {"):
                self._events.note(json.loads(line.removeprefix("data: ")))

    def grown(self, texts: tuple[str, ...]) -> bytes:
        """Return the events of new text. Raises AnswerDiffers: another text was sent before."""
        return b"".join(map(_event, self._events.grown(texts)))

    def rest(self, answer: ChatCompletion | CompletionResponse) -> bytes:
        """Return the rest of the stream. Raises as `grown` does."""
        return b"".join(map(_event, self._events.rest(answer))) + self._events.end

    def failed(self, message: str) -> bytes:
        """Return the end of a stream whose answer does not come."""
        return _event(self._events.failed(message)) + self._events.end


def _event(event: SamplerAnswer) -> bytes:
    name = f"event: {event.type}\n" if isinstance(event, NamedEvent) else ""
    return f"{name}data: {event.model_dump_json()}\n\n".encode()
