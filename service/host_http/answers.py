"""What a host answers to the web service: questions to its sampler, sessions' commands."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Protocol

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from activities.hosts.session import ServedSessions
from activities.sampling.questions import OpenQuestion
from shared.chat.completions import CompletionResponse
from shared.chat.messages import ChatCompletion
from shared.chat.streams import KEEP_ALIVE, EventStream
from shared.errors import InvalidInput, LongshoreError, SamplerUnavailable, StoreUnavailable, WorkerLost
from shared.serving import LOST, AnswerHead, CompleteRequest, QuestionFailure
from shared.storage.host_states import BEAT_S, HostAddress, announce
from shared.storage.store import ObjectStore

# --- Answers questions of the web service with the samplers that a host reaches ---
#
#     POST /answers, a CompleteRequest ──► an AnswerHead, then the answer's JSON, or its events as they are sampled
#
# Empty lines before the head are signs of life. A client that hangs up stops its question at the sampler.


class Answerer(Protocol):
    """Answers questions, in several threads at once. Its errors are sent to the caller."""

    def answer(self, request: CompleteRequest, asking: OpenQuestion) -> ChatCompletion | CompletionResponse: ...
    def close(self) -> None: ...


_SIGN_OF_LIFE_S = 1.0
_PAUSE_S = 0.02  # between two lines of one answer
_AT_ONCE = 256  # questions; each waits for its sampler in a thread
_log = logging.getLogger(__name__)


@contextmanager
def answering(questions: Answerer) -> Iterator[list[Route]]:
    """Yield the routes of a host that answers questions, which are closed in the end."""
    with closing(questions), ThreadPoolExecutor(_AT_ONCE, "question") as threads:
        yield [Route("/answers", _Answers(questions, threads).ask, methods=["POST"])]


@asynccontextmanager
async def announced(store: ObjectStore, queue: str, at: HostAddress) -> AsyncIterator[None]:
    """Tell the web service in the store that this host asks the installation's own sampler."""

    async def again() -> None:
        while True:
            try:
                await asyncio.to_thread(announce, store, queue, at)
            except (StoreUnavailable, OSError) as error:
                _log.warning("the web service is not told where this host answers: %s", error)
            await asyncio.sleep(BEAT_S)

    telling = asyncio.create_task(again())
    try:
        yield
    finally:
        telling.cancel()
        with suppress(StoreUnavailable, OSError):
            await asyncio.to_thread(announce, store, queue, None)


class _Answers:
    def __init__(self, questions: Answerer, threads: ThreadPoolExecutor) -> None:
        self._questions = questions
        self._threads = threads

    async def ask(self, request: Request) -> Response:
        try:
            asked = CompleteRequest.model_validate_json(await request.body())
        except ValidationError:  # of another version of Longshore
            return PlainTextResponse("this is no question", 400)
        return StreamingResponse(self._reply(asked), media_type="application/octet-stream")

    async def _reply(self, asked: CompleteRequest) -> AsyncIterator[bytes]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        drawn = _Drawn(asked, lambda: loop.call_soon_threadsafe(news.set))
        asking = OpenQuestion(drawn.tell)
        answering = loop.run_in_executor(self._threads, self._answered, asked, asking, drawn)
        answering.add_done_callback(lambda _: news.set())
        is_begun = False
        try:
            while not answering.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _SIGN_OF_LIFE_S)
                news.clear()
                if data := drawn.take():
                    yield data if is_begun else _head() + data
                    is_begun = True
                    await asyncio.wait((answering,), timeout=_PAUSE_S)  # the end need not wait
                elif not answering.done():
                    yield KEEP_ALIVE if is_begun else b"\n"
            if (error := answering.exception()) is None:
                yield (b"" if is_begun else _head()) + drawn.take() + answering.result()
                return
            failure = _failure(error)
            if not is_begun:
                yield _head(failure)
            elif failure.kind == "lost":
                yield LOST + failure.message.encode()
            else:
                yield drawn.failed(failure.message)
        finally:
            asking.hang_up()
            answering.cancel()
            answering.add_done_callback(_forget)

    def _answered(self, asked: CompleteRequest, asking: OpenQuestion, drawn: "_Drawn") -> bytes:
        answer = self._questions.answer(asked, asking)
        return answer.model_dump_json().encode() if drawn.stream is None else drawn.stream.rest(answer)


class _Drawn:
    """The events of an answer that a thread has written, and that have not been sent yet."""

    def __init__(self, asked: CompleteRequest, has_news: Callable[[], object]) -> None:
        self.stream = EventStream(asked.stream, asked.asked) if asked.stream is not None else None
        self._has_news = has_news
        self._lock = threading.Lock()
        self._waiting = b""

    def tell(self, texts: tuple[str, ...]) -> None:
        """Take the texts so far. A repeated request to a sampler begins with shorter ones, which are ignored."""
        if self.stream is not None and (events := self.stream.grown(texts)):
            with self._lock:
                self._waiting += events
            self._has_news()

    def take(self) -> bytes:
        """Return the events since the last call."""
        with self._lock:
            data, self._waiting = self._waiting, b""
        return data

    def failed(self, message: str) -> bytes:
        """Return the rest of the events, and the end of a stream whose answer does not come."""
        assert self.stream is not None
        return self.take() + self.stream.failed(message)


def _failure(error: BaseException) -> QuestionFailure:
    match error:
        case WorkerLost() | SamplerUnavailable() | StoreUnavailable():
            return QuestionFailure(kind="lost", message=str(error))
        case InvalidInput():
            return QuestionFailure(kind="refused", message=error.message, place=error.place)
        case LongshoreError():
            return QuestionFailure(kind="refused", message=str(error))
        case _:
            _log.error("a question failed", exc_info=error)
            return QuestionFailure(kind="failed", message="the host that was asked failed")


def _head(failure: QuestionFailure | None = None) -> bytes:
    return AnswerHead(failure=failure).model_dump_json(exclude_defaults=True).encode() + b"\n"


def _forget(answering: "asyncio.Future[bytes]") -> None:
    """Take the error of an answer that nobody waits for."""
    if not answering.cancelled():
        answering.exception()


# --- A host's endpoint for sessions' commands (activities/hosts/session.py) ---
#
# POST /sessions/RUN/commands/N?wait_s=S, command N or nothing ──► 200 and its result; 202 if it is not done in time;
# 204 if the store has it, or the session has just left this host; 404 if it is not here


def session_routes(sessions: ServedSessions) -> list[Route]:
    async def ask(request: Request) -> Response:
        try:
            number, wait_s = int(request.path_params["number"]), float(request.query_params.get("wait_s", 0))
        except ValueError:  # of another version of Longshore
            return PlainTextResponse("this is no command", 400)
        command = await request.body()
        if (session := sessions.find(request.path_params["run_id"])) is None:
            return Response(status_code=404)
        waiting = session.ask(number, command)
        try:
            is_over = waiting.done()  # else a wait of no time would end first
            result = waiting.result() if is_over else await asyncio.wait_for(asyncio.wrap_future(waiting), wait_s)
        except TimeoutError:
            return Response(status_code=202)
        return Response(result, media_type="application/json") if result is not None else Response(status_code=204)

    return [Route("/sessions/{run_id}/commands/{number:int}", ask, methods=["POST"])]
