"""A scoring model's server on loopback, which remembers what it was asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge(ThreadingHTTPServer):
    """Answers what `replies` holds, one after another, or the length of the last message as a score."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Asked)
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.replies: list[tuple[int, dict[str, str], bytes]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Asked(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        with self.server.lock:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.path, dict(self.headers), body))
            score = json.dumps({"result": len(body["messages"][-1]["content"])})
            reply = self.server.replies.pop(0) if self.server.replies else (200, {}, completion(score))
        status, headers, data = reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def completion(text: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def scoring_server() -> Iterator[Judge]:
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
