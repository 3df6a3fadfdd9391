"""A web server for tests: ranges, ETags, redirects, and transfers that break where a test wants them to."""

import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

from tests.served import ANY_PORT, Quiet, served


@dataclass
class Page:
    """What is behind a path. `breaks`: how many bytes each next answer sends before the connection is cut."""

    body: bytes = b""
    etag: str | None = '"v1"'
    status: int = 200
    location: str | None = None
    breaks: list[int] = field(default_factory=list)
    ranges: bool = True
    length: bool = True
    trickles: bool = False
    drips_headers: bool = False


@dataclass
class WebServer:
    """The pages by path, and what was asked: `(path, Range header)`."""

    uri: str
    pages: dict[str, Page]
    asked: list[tuple[str, str | None]]


class _Answer(Quiet):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        page = self.server.pages.get(self.path.partition("?")[0], Page(b"nothing here", status=404))
        start = self._start(page, wanted)
        self.close_connection = True
        if page.drips_headers:
            self._drip()
            return
        self.send_response(206 if start else page.status)
        body = page.body[start:]
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(page.body) - 1}/{len(page.body)}")
        if page.length:
            self.send_header("Content-Length", str(len(body)))
        if page.etag:
            self.send_header("ETag", page.etag)
        if page.location:
            self.send_header("Location", page.location)
        self.end_headers()
        if page.trickles:
            self._trickle(page, body)
        else:
            self.wfile.write(body[: page.breaks.pop(0)] if page.breaks else body)

    def _trickle(self, page: Page, body: bytes) -> None:
        """A hundred bytes every hundredth of a second, for as long as anybody listens, or until the page is let go."""
        with suppress(OSError):
            for start in range(0, len(body), 100):
                if not page.trickles:
                    self.wfile.write(body[start:])
                    return
                self.wfile.write(body[start : start + 100])
                time.sleep(0.01)

    def _drip(self) -> None:
        """Headers that never end."""
        with suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nx-long: ")
            while True:
                self.wfile.write(b"a")
                time.sleep(0.01)

    def _start(self, page: Page, wanted: str | None) -> int:
        if not wanted or not page.ranges or self.headers.get("If-Range") != page.etag:
            return 0
        return int(wanted.removeprefix("bytes=").rstrip("-"))


class _Server(ThreadingHTTPServer):
    """A client that hangs up, or refuses our certificate, is no error here."""

    def handle_error(self, request, client_address) -> None: ...

    pages: dict[str, Page]
    asked: list[tuple[str, str | None]]


@contextmanager
def serve_pages(tls: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    server = _Server(ANY_PORT, _Answer)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.pages, server.asked = {}, []
    with served(server):
        scheme = "https" if tls else "http"
        yield WebServer(f"{scheme}://127.0.0.1:{server.server_port}", server.pages, server.asked)
