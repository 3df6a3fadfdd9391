"""What a host answers to the web service: questions to its sampler, news of sessions' commands."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Protocol

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from activities.hosts.session import Bells
from activities.sampling.questions import OpenQuestion
from shared.errors import InvalidInput, LongshoreError, SamplerUnavailable, StoreUnavailable, WorkerLost
from shared.serving import AnswerLine, CompleteRequest, QuestionFailure
from shared.storage.host_states import BEAT_S, HostAddress, announce
from shared.storage.store import ObjectStore

# --- Answers questions of the web service with the samplers that a host reaches ---
#
#     POST /answers, a CompleteRequest ──► AnswerLines while text is drawn, then the answer's JSON
#
# An empty line is a sign of life. A client that hangs up stops its question at the sampler.


class Answerer(Protocol):
    """Answers questions, in several threads at once. Its errors are sent to the caller."""

    def answer(self, request: CompleteRequest, asking: OpenQuestion) -> BaseModel: ...
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
        drawn = _Drawn(lambda: loop.call_soon_threadsafe(news.set))
        asking = OpenQuestion(drawn.tell)
        answering = loop.run_in_executor(self._threads, self._answered, asked, asking)
        answering.add_done_callback(lambda _: news.set())
        try:
            while not answering.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _SIGN_OF_LIFE_S)
                news.clear()
                if not answering.done():
                    yield drawn.line()
                    await asyncio.sleep(_PAUSE_S)
            yield _last_line(answering.exception())
            if answering.exception() is None:
                yield answering.result()
        finally:
            asking.hang_up()
            answering.cancel()
            answering.add_done_callback(_forget)

    def _answered(self, asked: CompleteRequest, asking: OpenQuestion) -> bytes:
        return self._questions.answer(asked, asking).model_dump_json().encode()


class _Drawn:
    """The texts of an answer's choices so far, set by a thread, and how much of each has been sent."""

    def __init__(self, has_news: Callable[[], object]) -> None:
        self._has_news = has_news
        self._texts: tuple[str, ...] = ()
        self._sent: list[int] = []

    def tell(self, texts: tuple[str, ...]) -> None:
        """Take the texts so far. A repeated request to a sampler begins with shorter ones, which are ignored."""
        if sum(map(len, texts)) > sum(map(len, self._texts)):
            self._texts = texts
            self._has_news()

    def line(self) -> bytes:
        """Return a line with the new text; an empty line if there is none."""
        texts = self._texts
        self._sent += [0] * (len(texts) - len(self._sent))
        grown = tuple(text[sent:] for text, sent in zip(texts, self._sent, strict=True))
        if not any(grown):
            return b"\n"
        self._sent = [max(sent, len(text)) for text, sent in zip(texts, self._sent, strict=True)]
        return _line(AnswerLine(grown=grown))


def _last_line(error: BaseException | None) -> bytes:
    """Return the line before the answer, or the line with the reason why there is none."""
    match error:
        case None:
            return _line(AnswerLine(ends=True))
        case WorkerLost() | SamplerUnavailable() | StoreUnavailable():
            failure = QuestionFailure(kind="lost", message=str(error))
        case InvalidInput():
            failure = QuestionFailure(kind="refused", message=error.message, place=error.place)
        case LongshoreError():
            failure = QuestionFailure(kind="refused", message=str(error))
        case _:
            _log.error("a question failed", exc_info=error)
            failure = QuestionFailure(kind="failed", message="the host that was asked failed")
    return _line(AnswerLine(failure=failure, ends=True))


def _line(line: AnswerLine) -> bytes:
    return line.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _forget(answering: "asyncio.Future[bytes]") -> None:
    """Take the error of an answer that nobody waits for."""
    if not answering.cancelled():
        answering.exception()


# --- A host's endpoints for session notices ---
# Commands from the web service, results to it (activities/hosts/session.py).
#
# POST /sessions/RUN/bell?number=N ──► 204, or 404 if the session is not active here. Its body: command N, or empty
# GET /sessions/RUN/results ──► a line whenever results are stored: the number of the next command without a result,
# then the JSON of the result before that, if it is small

SIGN_OF_LIFE_S = 1.0


def bell_routes(bells: Bells) -> list[Route]:
    async def ring(request: Request) -> Response:
        if (session := bells.find(request.path_params["run_id"])) is None:
            return Response(status_code=404)
        if "number" in request.query_params and (command := await request.body()):
            session.bring(int(request.query_params["number"]), command)
        session.rung.set()
        return Response(status_code=204)

    async def results(request: Request) -> Response:
        if (session := bells.find(request.path_params["run_id"])) is None:
            return Response(status_code=404)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int | None, bytes | None]]()
        end = session.listen(lambda *told: loop.call_soon_threadsafe(news.put_nowait, told))
        return StreamingResponse(_lines(news, end), media_type="text/plain")

    return [
        Route("/sessions/{run_id}/bell", ring, methods=["POST"]),
        Route("/sessions/{run_id}/results", results, methods=["GET"]),
    ]


async def _lines(
    news: "asyncio.Queue[tuple[int | None, bytes | None]]", end: Callable[[], None]
) -> AsyncIterator[bytes]:
    try:
        while True:
            try:
                next, result = await asyncio.wait_for(news.get(), SIGN_OF_LIFE_S)
            except TimeoutError:
                yield b"\n"
                continue
            if next is None:
                return
            yield b"%d %b\n" % (next, result or b"")
    finally:
        end()
