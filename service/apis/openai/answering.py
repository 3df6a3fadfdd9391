"""Answers to questions over HTTP: whole, or as a stream of server-sent events during sampling."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from service.apis.openai.response_objects import ResponseEvent
from service.inference.asking import PartialAnswer, Reply
from shared.chat.completions import SamplerAnswer
from shared.errors import LongshoreError

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
