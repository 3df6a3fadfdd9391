"""A store whose requests last: whoever waits for it keeps no other tenant waiting, and nothing is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from shared.settings import S3Settings, Settings
from tests.conftest import S3Server
from tests.depth import drawn
from tests.service.conftest import key_of_acme, serving

CONTENT = b'{"text": "a"}\n' * 100
HELD = "default"  # of which tenant requests are held
_PATIENCE_S = 300


class SlowStore(ThreadingHTTPServer):
    """What is in front of an S3 server and hands requests on, those about one tenant's files when they are let go."""

    daemon_threads = True

    def __init__(self, server: S3Server) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = server.endpoint_url
        self.held: SimpleQueue[threading.Event] | None = None

    @property
    def settings(self) -> S3Settings:
        return S3Settings(endpoint_url=f"http://127.0.0.1:{self.server_port}", region="us-east-1")


class _Passing(BaseHTTPRequestHandler):
    server: SlowStore
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.held is not None and f"/{HELD}/" in self.path:
            goes_on = threading.Event()
            self.server.held.put(goes_on)
            assert goes_on.wait(_PATIENCE_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        url = f"{self.server.behind}{self.path}"
        answer = httpx.request(self.command, url, content=body, headers=headers, trust_env=False)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = answer.headers.get("content-length", "0") if self.command == "HEAD" else str(len(answer.content))
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def slow_store(s3_server: S3Server) -> Iterator[SlowStore]:
    with SlowStore(s3_server) as store:
        thread = threading.Thread(target=store.serve_forever)
        thread.start()
        yield store
        store.shutdown()
        thread.join()


@pytest.mark.parametrize("seconds", drawn([1, 4, 18], 1))
def test_a_store_request_that_lasts_keeps_no_other_tenant_waiting(
    temporal_address: str, s3_server: S3Server, slow_store: SlowStore, tmp_path: Path, seconds: int
) -> None:
    """Longer than a writer waits for the database, too: each request is let go when the other tenant has its answers.

    Of what is uploaded and deleted meanwhile by either, the store, the quotas and the audit log say the same.
    """
    store = f"{s3_server.uri}/slow-{time.time_ns()}"
    settings = Settings(root=tmp_path, temporal_address=temporal_address, store_uri=store, s3=slow_store.settings)
    with serving(settings) as service, service.http() as ours, service.http(key_of_acme(service)) as theirs:
        before, others = stored(ours), list[tuple[str, str]]()

        def ask() -> None:
            number = len(others)
            made = theirs.post("/files", params={"name": f"{number}.jsonl"}, content=CONTENT)
            assert made.status_code in (200, 201), made.text
            gone = theirs.delete(f"/files/{made.json()['file_id']}")
            assert gone.is_success, gone.text
            others.extend((answer.headers["x-request-id"], answer.request.method) for answer in (made, gone))
            assert audited(theirs) == others, "of another tenant, while the store keeps one waiting"

        with held(slow_store, ask, seconds):
            made = ours.post("/files", params={"name": "a.jsonl"}, content=CONTENT)
        assert made.status_code in (200, 201), made.text
        file_id = made.json()["file_id"]
        assert ours.get(f"/files/{file_id}/content").content == CONTENT
        assert stored(ours) > before and others
        with held(slow_store, ask, seconds):
            gone = ours.delete(f"/files/{file_id}")
        assert gone.is_success, gone.text
        assert ours.get(f"/files/{file_id}").status_code == 404
        assert stored(ours) == before
        mine = [(answer.headers["x-request-id"], answer.request.method) for answer in (made, gone)]
        assert [each for each in audited(ours) if each in mine] == mine


@contextmanager
def held(store: SlowStore, meanwhile: Callable[[], None], seconds: float) -> Iterator[None]:
    """Hold each request of the block to the store until `meanwhile` is done, and the first one so many seconds."""
    store.held = waiting = SimpleQueue[threading.Event | None]()  # type: ignore[assignment]

    def let_go() -> None:
        until = None
        while (request := waiting.get(timeout=_PATIENCE_S)) is not None:
            until = until or time.monotonic() + seconds
            try:
                meanwhile()
                time.sleep(max(0.0, until - time.monotonic()))
            except BaseException:
                store.held = None  # the test has failed: nothing waits any more
                raise
            finally:
                request.set()

    with ThreadPoolExecutor(1) as thread:
        letting = thread.submit(let_go)
        try:
            yield
        finally:
            store.held = None
            waiting.put(None)
            letting.result()


def stored(api: httpx.Client) -> int:
    return int(api.get("/usage").json()["stored_bytes"])


def audited(api: httpx.Client) -> list[tuple[str, str]]:
    """The requests about files in the tenant's audit log, oldest first."""
    entries = api.get("/audit").json()["entries"]
    return [(each["request_id"], each["method"]) for each in entries[::-1] if each["path"].startswith("/api/v1/files")]
