"""A small Hugging Face hub over HTTP: a repository is made, and files are committed to it, by one token."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from tests.served import ANY_PORT, Quiet, served


class Hub:
    """What was sent: paths with their bytes. `url`: of HF_ENDPOINT. Another token than `token` is refused."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, object]] = []
        self.url = ""


@contextmanager
def serving(token: str) -> Iterator[Hub]:
    hub = Hub(token)

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = self.body()
            if self.headers["authorization"] != f"Bearer {hub.token}":
                return self._answer(401, {"error": "Invalid username or password."})
            if self.path == "/api/repos/create":
                hub.made.append(json.loads(body))
                return self._answer(200, {"url": f"{hub.url}/org/name"})
            if self.path == "/api/models/org/name/preupload/main":
                asked = json.loads(body)["files"]
                files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
                return self._answer(200, {"files": files})
            assert self.path == "/api/models/org/name/commit/main", self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{hub.url}/org/name/commit/{'0' * 40}", "commitOid": "0" * 40}
            return self._answer(200, {**answer, "hookOutput": "", "success": True})

        def _answer(self, status: int, content: object) -> None:
            self.answer(status, json.dumps(content).encode(), {"content-type": "application/json"})

    with served(ThreadingHTTPServer(ANY_PORT, Handler)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
