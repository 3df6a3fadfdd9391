"""A host's HTTP server, at which the web service asks the samplers that the host reaches.

    POST /answers, a CompleteRequest ──► AnswerLines while text is drawn, then the answer's JSON

It listens at a Unix socket that only this user can open and, where the operator names an address, there by mutual TLS
(service/trust.py). An empty line is a sign of life. A client that hangs up stops its question at the sampler.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from activities.sampling.questions import Asking
from service.trust import Trust
from shared.errors import InvalidInput, LongshoreError, SamplerUnavailable, StoreUnavailable, WorkerLost
from shared.runs.serving import ANNOUNCE_S, AnswerLine, AnswersAt, CompleteRequest, QuestionFailure, announce
from shared.settings import Settings
from shared.storage.files import listen_privately, private_folder
from shared.storage.paths import HostPaths
from shared.storage.store import ObjectStore

Answer = Callable[[CompleteRequest, Asking], BaseModel]

_SIGN_OF_LIFE_S = 1.0
_PAUSE_S = 0.02  # between two lines of one answer
_AT_ONCE = 256  # questions; each waits for its sampler in a thread
_GRACE_S = 10
_log = logging.getLogger(__name__)


@contextmanager
def answering(settings: Settings, queue: str, answer: Answer) -> Iterator[AnswersAt]:
    """Answer questions for a `with` block; yields where.

    Args:
        queue: names the host among those of its root.
        answer: called in threads; what it raises is told to the asker.

    Raises:
        OSError: the operator's address is not one of this machine.
    """
    path, address = HostPaths(settings.root_path).answers(queue), settings.sampling.answers_address
    with ThreadPoolExecutor(_AT_ONCE, "question") as threads:
        app = Starlette(routes=[Route("/answers", _Answers(answer, threads).ask, methods=["POST"])])
        private_folder(path.parent)
        with _served(app, listen_privately(path, _AT_ONCE)):
            if address is None:
                yield AnswersAt(socket=str(path))
                return
            is_v6 = address.version == 6
            listener = socket.create_server((str(address), 0), family=socket.AF_INET6 if is_v6 else socket.AF_INET)
            with _served(app, listener, Trust.of(settings)):
                named = f"[{address}]" if is_v6 else str(address)
                yield AnswersAt(socket=str(path), address=f"{named}:{listener.getsockname()[1]}")


@asynccontextmanager
async def announced(store: ObjectStore, queue: str, at: AnswersAt) -> AsyncIterator[None]:
    """Tell the web service in the store that this host asks the installation's own sampler."""

    async def again() -> None:
        while True:
            try:
                await asyncio.to_thread(announce, store, queue, at)
            except (StoreUnavailable, OSError) as error:
                _log.warning("the web service is not told where this host answers: %s", error)
            await asyncio.sleep(ANNOUNCE_S)

    telling = asyncio.create_task(again())
    try:
        yield
    finally:
        telling.cancel()
        with suppress(StoreUnavailable, OSError):
            await asyncio.to_thread(announce, store, queue, None)


class _Answers:
    def __init__(self, answer: Answer, threads: ThreadPoolExecutor) -> None:
        self._answer = answer
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
        asking = Asking(drawn.tell)
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

    def _answered(self, asked: CompleteRequest, asking: Asking) -> bytes:
        return self._answer(asked, asking).model_dump_json().encode()


class _Drawn:
    """The texts of an answer's choices, as a thread tells them, and how much of each has been sent."""

    def __init__(self, has_news: Callable[[], object]) -> None:
        self._has_news = has_news
        self._texts: tuple[str, ...] = ()
        self._sent: list[int] = []

    def tell(self, texts: tuple[str, ...]) -> None:
        """Take the texts so far. A sampler that was asked again begins with shorter ones, which are passed over."""
        if sum(map(len, texts)) > sum(map(len, self._texts)):
            self._texts = texts
            self._has_news()

    def line(self) -> bytes:
        """Return the line that tells what is new; an empty one, where nothing is."""
        texts = self._texts
        self._sent += [0] * (len(texts) - len(self._sent))
        grown = tuple(text[sent:] for text, sent in zip(texts, self._sent, strict=True))
        if not any(grown):
            return b"\n"
        self._sent = [max(sent, len(text)) for text, sent in zip(texts, self._sent, strict=True)]
        return _line(AnswerLine(grown=grown))


def _last_line(error: BaseException | None) -> bytes:
    """Return the line behind which the answer stands, or which says why there is none."""
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


# Serving.


@contextmanager
def _served(app: Starlette, listener: socket.socket, trust: Trust | None = None) -> Iterator[None]:
    """Serve an application in a thread with a loop of its own, so that streams do not wait for Temporal's work."""
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S)
    config.load()
    config.ssl = trust.server_context() if trust is not None else None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="answers", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise OSError(f"no server of answers could be started at {listener.getsockname()}")
        yield
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
