"""A server between a sampler and its clients, which counts what is asked of it, and can keep answers to itself."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


class SamplerProxy(ThreadingHTTPServer):
    """Passes every request on to `target`, and its answer back.

    Attributes:
        asked: path and body of every POST, in the order in which they came.
        answered: how many completions their clients were sent.
        hold_after: completions beyond this number are kept back until `released` is set.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passed)
        self.target = httpx.Client(base_url=target, timeout=300, trust_env=False)
        self.lock = threading.Lock()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answered = 0
        self.hold_after = 1 << 62
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def prompts(self) -> list[tuple[int, ...]]:
        """The prompts of all completions that were asked for."""
        return [tuple(body["prompt"]) for path, body in self.asked if path == "/v1/completions"]


class _Passed(BaseHTTPRequestHandler):
    server: SamplerProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.asked.append((self.path, json.loads(body)))
        self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        headers = {"Authorization": self.headers.get("Authorization", "")}
        answer = self.server.target.request(self.command, self.path, content=body, headers=headers)
        if self.path == "/v1/completions":
            with self.server.lock:
                self.server.answered += 1
                is_held = self.server.answered > self.server.hold_after
            if is_held:
                self.server.released.wait(300)
        try:
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)
        except OSError:
            self.close_connection = True  # the client has left

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def proxy_of(target: str) -> Iterator[SamplerProxy]:
    server = SamplerProxy(target)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
        server.target.close()
