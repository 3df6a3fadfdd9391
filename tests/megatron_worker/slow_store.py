"""A store of S3's kind whose objects come when a test lets them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longshore.fields import Artifact
from shared.settings import S3Settings

_BUCKET = "slow"


class SlowStore(ThreadingHTTPServer):
    """The files below a folder. Of what lies below `held`, a few bytes a second come until it is let go.

    `asked`: the paths below `held` that were asked for, one for each transfer. `refuses`: no object is given.
    """

    daemon_threads = True

    def __init__(self, folder: Path, held: str) -> None:
        super().__init__(("127.0.0.1", 0), _Object)
        self.folder, self.held = folder, held
        self.asked: list[str] = []
        self.let_go = threading.Event()
        self.refuses = False

    @property
    def settings(self) -> S3Settings:
        return S3Settings(endpoint_url=f"http://127.0.0.1:{self.server_port}", region="us-east-1")

    def artifact(self, local: Artifact) -> Artifact:
        """A sealed folder as it lies in this store."""
        return Artifact(uri=local.uri.replace(f"file://{self.folder}", f"s3://{_BUCKET}"), sha256=local.sha256)

    def handle_error(self, *_) -> None: ...  # a client that hangs up is none


class _Object(BaseHTTPRequestHandler):
    server: SlowStore

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        key = self.path.partition("?")[0].removeprefix(f"/{_BUCKET}/")
        path, is_held = self.server.folder / key, key.startswith(f"{self.server.held}/") and "manifest" not in key
        if with_body and is_held:
            self.server.asked.append(key)
        body = path.read_bytes() if path.is_file() else b""
        self.send_response(404 if not path.is_file() else 403 if is_held and self.server.refuses else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{len(body)}"')
        self.end_headers()
        if with_body:
            with suppress(OSError):
                self._send(body, is_held and not self.server.refuses)

    def _send(self, body: bytes, is_held: bool) -> None:
        while is_held and len(body) > 1 and not self.server.let_go.wait(0.1):
            self.wfile.write(body[:1])
            self.wfile.flush()
            body = body[1:]
        self.wfile.write(body)

    def log_message(self, *_) -> None: ...


@contextmanager
def slow_store(folder: Path, held: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with SlowStore(folder, held) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        try:
            yield server
        finally:
            server.let_go.set()
            server.shutdown()
            serving.join()
