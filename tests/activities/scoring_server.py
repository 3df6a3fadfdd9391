"""A scoring model's server on loopback, which remembers what it was asked."""

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from tests.served import ANY_PORT, Quiet, served


class Judge(ThreadingHTTPServer):
    """Answers what `replies` holds, one after another, or the length of the last message as a score."""

    def __init__(self) -> None:
        super().__init__(ANY_PORT, _Asked)
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.replies: list[tuple[int, dict[str, str], bytes]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Asked(Quiet):
    server: Judge

    def do_POST(self) -> None:
        with self.server.lock:
            body = json.loads(self.body())
            self.server.asked.append((self.path, dict(self.headers), body))
            score = json.dumps({"result": len(body["messages"][-1]["content"])})
            reply = self.server.replies.pop(0) if self.server.replies else (200, {}, completion(score))
        status, headers, data = reply
        self.answer(status, data, headers)


def completion(text: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def scoring_server() -> Iterator[Judge]:
    with served(Judge()) as server:
        yield server
