"""The sampler's HTTP: a Unix socket or loopback, a bearer key, JSON in and out. Threads wait; one thread computes.

It uses the standard library. uvicorn would never close a connection that is silent before or within a request's head;
it would also need a higher limit of threads, a watcher for each client, and a hop to its loop for each streamed event.
"""

import hmac
import secrets
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

from pydantic import BaseModel

from megatron_worker.sampler.answers import Answers
from megatron_worker.sampler.models import RequestRefused, Sleep
from shared.chat.completions import ErrorDetail, ErrorResponse
from shared.storage.files import listen_privately

_MAX_BODY_BYTES = 32 << 20
_HOLD_PERIOD_S = 0.05
# Clients that wait to be let in: of a Unix socket, one more is refused at once.
_BACKLOG = 1024
Answer = BaseModel | str | Generator[BaseModel, None, None] | None


class Server(ThreadingHTTPServer):
    """An HTTP server for who connects to `listener`."""

    daemon_threads = True

    def __init__(self, answers: Answers, sleep: Sleep, api_key: str, listener: socket.socket) -> None:
        self.answers = answers
        self.sleep = sleep
        self.api_key = api_key
        super().__init__(("", 0), _Exchange, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hung up."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """The address; for a Unix socket, a placeholder."""
        if self.socket.family == socket.AF_UNIX:
            return "http://sampler"
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"


def listening(place: Path | int) -> socket.socket:
    """Listen at a Unix socket that only this user can open, or at a port of loopback; 0: a free one."""
    if isinstance(place, Path):
        return listen_privately(place, _BACKLOG)
    listener = socket.create_server(("127.0.0.1", place), backlog=_BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # for connections too, which a Unix socket's refuse
    return listener


class _Exchange(BaseHTTPRequestHandler):
    """One connection, any number of requests."""

    protocol_version = "HTTP/1.1"
    timeout = 120  # seconds until a silent connection is closed, not counting the time that an answer takes
    wbufsize = -1
    server: Server
    _body_is_unread = False

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        try:
            self._check_key()
            answer = self._route(method, self._body())
        except RequestRefused as error:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            detail = ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code)
            self._send(error.status, ErrorResponse(error=detail))
        except Exception:  # the client only gets an error; the reason is logged
            traceback.print_exc()
            detail = ErrorDetail(message="the sampler failed", type="server_error")
            self._send(500, ErrorResponse(error=detail))
        else:
            match answer:
                case Generator():
                    self._stream(answer)
                case BaseModel() | str():
                    self._send(200, answer)

    def _route(self, method: str, body: bytes) -> Answer:
        answers, models, sleep = self.server.answers, self.server.answers.models, self.server.sleep
        routes: dict[str, tuple[str, Callable[[], Answer]]] = {
            "/health": ("GET", lambda: ""),
            "/v1/models": ("GET", models.cards),
            "/v1/memory": ("GET", sleep.memory),
            "/v1/completions": ("POST", lambda: self._waited_for(answers.complete(body, self._is_gone))),
            "/v1/score": ("POST", lambda: self._waited_for(answers.score(body, self._is_gone))),
            "/v1/load_lora_adapter": ("POST", partial(models.load, body)),
            "/v1/unload_lora_adapter": ("POST", partial(models.unload, body)),
            "/v1/load_weights": ("POST", partial(models.load_weights, body)),
            "/v1/name_weights": ("POST", partial(models.name_weights, body)),
            "/v1/update_weights": ("POST", partial(models.update_weights, body)),
            "/v1/hold_weights": ("POST", self._hold),
            "/v1/sleep": ("POST", partial(sleep.sleep, body)),
            "/v1/wake": ("POST", sleep.wake),
        }
        path = self.path.partition("?")[0]
        if path not in routes:
            raise RequestRefused(404, f"there is no {path}")
        known, answer = routes[path]
        if method != known:
            raise RequestRefused(405, f"{path} is not asked with {method}")
        return answer()

    def _waited_for(self, answer: Answer) -> Answer:
        """Close the connection of a client that has not waited for its answer."""
        self.close_connection = self.close_connection or answer is None
        return answer

    def _check_key(self) -> None:
        if self.path.partition("?")[0] == "/health":
            return
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.api_key}".encode()):
            # The body of an unauthenticated request is not kept; without reading it the connection cannot be reused.
            self.close_connection = self._body_is_unread = True
            raise RequestRefused(401, "the bearer key is missing or wrong", code="invalid_api_key")

    def _body(self) -> bytes:
        """Read the body before anything is refused, so that the connection can be used again."""
        text = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not (text.isascii() and text.isdigit()):
            self.close_connection = self._body_is_unread = True
            raise RequestRefused(411, "a body needs a Content-Length")
        if int(text) > _MAX_BODY_BYTES:
            self.close_connection = self._body_is_unread = True
            raise RequestRefused(413, f"a body may have {_MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(text))

    def _hold(self) -> None:
        """Hold the weights until the client hangs up. The answer's head says that they are held."""
        self.close_connection = True
        with self.server.answers.models.held():
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.flush()
            while not self._is_gone():
                time.sleep(_HOLD_PERIOD_S)

    def _is_gone(self) -> bool:
        """Return True if the client has hung up."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _send(self, status: int, answer: BaseModel | str) -> None:
        is_text = isinstance(answer, str)
        body = (answer if isinstance(answer, str) else answer.model_dump_json()).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-request-id", secrets.token_hex(8))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if self._body_is_unread:
            self._drain()

    def _stream(self, events: Generator[BaseModel, None, None]) -> None:
        """Send server-sent events, each as one chunk of the body. A client that has hung up ends them."""
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")):
            self.send_header(name, value)
        self.end_headers()
        with closing(events):
            for event in chain((each.model_dump_json() for each in events), ("[DONE]",)):
                line = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _drain(self) -> None:
        """Read the rest: a connection that is closed with bytes unread is reset, and the client may miss the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        num_left = 2 * _MAX_BODY_BYTES
        while num_left > 0 and (chunk := self.rfile.read1(1 << 20)):
            num_left -= len(chunk)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses: an unknown method, or a malformed request line."""
        self.close_connection = True
        detail = ErrorDetail(message=message or "bad request", type="invalid_request_error")
        self._send(code, ErrorResponse(error=detail))

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests: prompts belong to their users."""
