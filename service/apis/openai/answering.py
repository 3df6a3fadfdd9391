"""Answers to questions over HTTP: whole, or as a stream of server-sent events during sampling."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.requests import ClientDisconnect

from service.inference.questions import PartialAnswer, Reply
from shared.chat.completions import (
    Choice,
    CompletionChunk,
    CompletionResponse,
    ErrorDetail,
    ErrorResponse,
    SamplerAnswer,
    Usage,
)
from shared.chat.messages import ChatChoice, ChatChunk, ChatCompletion, ChunkChoice, ToolCall
from shared.errors import LongshoreError, SamplerUnavailable

# --- Answers as streams of chunks ---
# New text of each choice while it is sampled, then the rest of the finished answer.

DONE = "data: [DONE]\n\n"


class SentTexts:
    """The text that was sent of each choice."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def begins(self, index: int) -> bool:
        """Return True the first time that a choice is asked about."""
        is_new = index not in self._texts
        self._texts.setdefault(index, "")
        return is_new

    def new(self, index: int, text: str) -> str:
        """Return the part of a choice's current text that has not been sent.

        Raises SamplerUnavailable: the text does not begin with the part that was sent.
        """
        sent = self._texts.get(index, "")
        if not text.startswith(sent):
            sent = sent.lstrip()  # of an answer with tool calls the text is stripped
        if not text.startswith(sent):
            raise SamplerUnavailable("the sampler was lost, and another one's answer differs: ask again")
        self._texts[index] = text
        return text[len(sent) :]


def failure(message: str) -> ErrorResponse:
    """Return the event that ends a stream whose answer does not come."""
    return ErrorResponse(error=ErrorDetail(message=message, type="server_error"))


class ChatChunks:
    """The chunks of an answer to messages: each choice's role, text, tool calls and finish reason.

    If the answer is remembered, a choice's first and last chunks have `answer_id`: openai's client takes a choice's
    extra fields from its first chunk.
    """

    end: ClassVar[str] = DONE

    def __init__(self, draft: PartialAnswer, model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._head = ChatChunk(id=draft.answer_id, created=draft.created, model=model, choices=[])
        self._sent = SentTexts()

    def grown(self, texts: tuple[str, ...]) -> Iterator[ChatChunk]:
        """Return what is new in the texts of the choices."""
        for index, text in enumerate(texts):
            if self._sent.begins(index):
                yield self._opening(index)
            if new := self._sent.new(index, text):
                yield self._chunk(ChunkChoice(index=index, delta={"content": new}))

    def rest(self, answer: ChatCompletion) -> Iterator[ChatChunk]:
        """Return the rest of the answer. Log-probabilities and token ids come with the last of the text."""
        prompt_ids = answer.prompt_token_ids
        for choice in answer.choices:
            if self._sent.begins(choice.index):
                yield self._opening(choice.index).model_copy(update={"prompt_token_ids": prompt_ids})
                prompt_ids = None
            yield from self._end(choice)
        if self._include_usage:
            yield self._chunk(usage=answer.usage)

    def failed(self, message: str) -> ErrorResponse:
        return failure(message)

    def _end(self, choice: ChatChoice) -> Iterator[ChatChunk]:
        text = self._sent.new(choice.index, choice.message.content or "")
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

    end: ClassVar[str] = DONE

    def __init__(self, draft: PartialAnswer, model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        id = draft.answer_id.replace("chatcmpl", "cmpl")
        self._head = CompletionChunk(id=id, created=draft.created, model=model, choices=[])
        self._sent = SentTexts()

    def grown(self, texts: tuple[str, ...]) -> Iterator[CompletionChunk]:
        """Return what is new in the texts of the choices."""
        for index, text in enumerate(texts):
            if new := self._sent.new(index, text):
                yield self._chunk(Choice(index=index, text=new))

    def rest(self, answer: CompletionResponse) -> Iterator[CompletionChunk]:
        """Return the rest of the answer."""
        for choice in answer.choices:
            yield self._chunk(choice.model_copy(update={"text": self._sent.new(choice.index, choice.text)}))
        if self._include_usage:
            yield self._chunk(usage=answer.usage)

    def failed(self, message: str) -> ErrorResponse:
        return failure(message)

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


T = TypeVar("T", bound=BaseModel)
A = TypeVar("A", contravariant=True)
_LISTEN_S = 0.5
_KEEP_ALIVE_S = 15.0


class Chunks(Protocol[A]):
    """Makes the events of one streamed answer. `end`: the line behind the last of them."""

    @property
    def end(self) -> str: ...
    def grown(self, texts: tuple[str, ...]) -> Iterator[SamplerAnswer]: ...
    def rest(self, answer: A) -> Iterator[SamplerAnswer]: ...
    def failed(self, message: str) -> SamplerAnswer: ...


async def answered(
    request: Request,
    ask: Callable[[PartialAnswer | None], Coroutine[Any, Any, Reply[T]]],
    chunks: Callable[[PartialAnswer], Chunks[T]] | None,
    whole: Callable[[T], BaseModel] | None = None,
) -> Response:
    """Return an answer, or with `chunks` a stream of it. The stream begins with the first text, so that an early
    refusal still sets the HTTP status.

    `whole`: translates an answer that is not streamed; without it the answer is passed on unchanged.
    """
    draft = PartialAnswer() if chunks else None
    task = asyncio.ensure_future(ask(draft))
    if draft is None or chunks is None:
        reply = await _unless_gone(request, task)
        content = reply.content if whole is None else whole(reply.read()).model_dump_json().encode()
        return Response(content, media_type="application/json")
    with suppress(TimeoutError):
        await _unless_gone(request, task, _KEEP_ALIVE_S, draft.changed)
    events = _events(task, draft, chunks(draft))
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _unless_gone(
    request: Request,
    task: "asyncio.Future[Reply[T]]",
    patience_s: float = float("inf"),
    begun: asyncio.Event | None = None,
) -> Reply[T]:
    """Wait for a task, and cancel it when the client hangs up.

    Raises TimeoutError: the wait took too long, or `begun` is set; the task keeps running.
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
                raise ClientDisconnect
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        beginning.cancel()
    return task.result()


async def _either(first: "asyncio.Future[Any]", second: "asyncio.Future[Any]", timeout_s: float) -> None:
    await asyncio.wait({first, second}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _events(task: "asyncio.Future[Reply[T]]", draft: PartialAnswer, chunks: Chunks[T]) -> AsyncIterator[str]:
    """Server-sent events: new text, comments while there is none, then the rest of the answer."""
    try:
        while not task.done():
            growing = asyncio.ensure_future(draft.changed.wait())
            await _either(task, growing, _KEEP_ALIVE_S)
            growing.cancel()
            if draft.changed.is_set():
                draft.changed.clear()
                for chunk in chunks.grown(draft.texts):
                    yield _event(chunk)
            elif not task.done():
                yield ": the model is answering\n\n"
        for chunk in chunks.rest(task.result().read()):
            yield _event(chunk)
    except LongshoreError as error:  # the status has been sent, so the error is sent as an event
        yield _event(chunks.failed(str(error)))
    finally:
        task.cancel()
    yield chunks.end


def _event(chunk: SamplerAnswer) -> str:
    name = f"event: {chunk.type}\n" if isinstance(chunk, ResponseEvent) else ""
    return f"{name}data: {chunk.model_dump_json()}\n\n"
