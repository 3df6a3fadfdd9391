"""Answers of `/v1/responses` in OpenAI's shape: the whole object, or the events of a stream."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue

from service.apis.openai.streams import SentTexts
from shared.chat.completions import SamplerAnswer
from shared.chat.messages import ChatCompletion, ToolCall

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
    output: list[OutputMessage | OutputCall] = Field(default_factory=list)
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


class ResponseEvent(SamplerAnswer):
    """An event of a stream. `type` says which other fields it has."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    sequence_number: int


def response_id(completion_id: str) -> str:
    return f"resp_{completion_id.removeprefix('chatcmpl-')}"


def completed(asked: ResponseObject, answer: ChatCompletion) -> ResponseObject:
    """Return a response with its answer. `asked`: the response before it, with only the request's settings."""
    [choice] = answer.choices
    status: ResponseStatus = "incomplete" if choice.finish_reason == "length" else "completed"
    output: list[OutputMessage | OutputCall] = []
    if choice.message.content or not choice.message.tool_calls:
        output.append(_message(asked.id, choice.message.content or "", status))
    output += [_call(asked.id, number, call) for number, call in enumerate(choice.message.tool_calls or ())]
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


def _call(of_response: str, number: int, call: ToolCall) -> OutputCall:
    return OutputCall(
        id=f"{of_response.replace('resp_', 'fc_')}_{number}",
        call_id=call.id,
        name=call.function.name,
        arguments=call.function.arguments,
        status="completed",
    )


class ResponseEvents:
    """The events of a streamed response: new text while it is sampled, then the rest."""

    end: ClassVar[str] = ""

    def __init__(self, asked: ResponseObject) -> None:
        self._asked = asked
        self._sent = SentTexts()
        self._num_events = 0
        self._has_message = False

    def grown(self, texts: tuple[str, ...]) -> Iterator[ResponseEvent]:
        """Yield the events of the text since the last call."""
        yield from self._opening()
        yield from self._new_text(texts[0])

    def rest(self, answer: ChatCompletion) -> Iterator[ResponseEvent]:
        """Yield the events of the rest of the answer."""
        yield from self._opening()
        whole = completed(self._asked, answer)
        for number, item in enumerate(whole.output):
            if isinstance(item, OutputMessage):
                yield from self._end_of_message(item)
            else:
                yield from self._whole_call(number, item)
        yield self._event(f"response.{whole.status}", response=whole)

    def failed(self, message: str) -> ResponseEvent:
        """Return the event that ends a stream whose answer does not come."""
        problem = ResponseProblem(code="server_error", message=message)
        return self._event(
            "response.failed", response=self._asked.model_copy(update={"status": "failed", "error": problem})
        )

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(type=type, sequence_number=self._num_events - 1, **fields)

    def _opening(self) -> Iterator[ResponseEvent]:
        if not self._num_events:
            yield self._event("response.created", response=self._asked)
            yield self._event("response.in_progress", response=self._asked)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._asked.id.replace("resp_", "msg_"), "output_index": 0, "content_index": 0}

    def _new_text(self, text: str) -> Iterator[ResponseEvent]:
        new = self._sent.new(0, text)
        if new and not self._has_message:
            self._has_message = True
            begun = _message(self._asked.id, "", "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=begun)
            yield self._event("response.content_part.added", **self._place, part=OutputText(text=""))
        if new:
            yield self._event("response.output_text.delta", **self._place, delta=new, logprobs=[])

    def _end_of_message(self, item: OutputMessage) -> Iterator[ResponseEvent]:
        yield from self._new_text("".join(part.text for part in item.content))
        if not self._has_message:
            yield self._event("response.output_item.added", output_index=0, item=item)
        for part in item.content:
            yield self._event("response.output_text.done", **self._place, text=part.text, logprobs=[])
            yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _whole_call(self, number: int, item: OutputCall) -> Iterator[ResponseEvent]:
        place = {"item_id": item.id, "output_index": number}
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event("response.output_item.added", output_index=number, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item.arguments)
        yield self._event("response.function_call_arguments.done", **place, name=item.name, arguments=item.arguments)
        yield self._event("response.output_item.done", output_index=number, item=item)
