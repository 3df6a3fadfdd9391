"""HTTP servers on loopback that tests and what they test ask."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import MappingProxyType
from typing import TypeVar

ServerT = TypeVar("ServerT", bound=ThreadingHTTPServer)
ANY_PORT = ("127.0.0.1", 0)
_NONE: Mapping[str, str] = MappingProxyType({})


class Quiet(BaseHTTPRequestHandler):
    """Writes no line of what it is asked."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] = _NONE) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(server: ServerT) -> Iterator[ServerT]:
    """Answer what the server is asked until the block ends. It waits for no answer that goes on."""
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
