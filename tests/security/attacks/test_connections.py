"""What connections hold, and for how long: slow headers and bodies, streams of keys that are gone, forged addresses."""

import hashlib
import json
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from service.apis import edge
from service.host_http import connections as server
from service.host_http.connections import Trust, served
from service.telemetry import REQUESTS
from shared.settings import RateLimitSettings, Settings
from tests.security.belongings import Belongings, Operation
from tests.security.conftest import client
from tests.service.conftest import Service, serving
from tests.waiting import wait_until

_SOON_S = 0.4
_PATIENCE_S = 20.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's own deadlines, made short."""
    monkeypatch.setattr(server, "HEADERS_S", _SOON_S)
    monkeypatch.setattr(edge, "_BODY_S", _SOON_S)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        # A whole request, and then half of another on the same connection.
        b"GET /static/page.css HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        # A body that nobody reads, because its sender is not known.
        b"POST /api/v1/files?name=a HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n",
    ],
    ids=["nothing", "half a header", "half a header after a request", "half a body without a key"],
)
def test_a_client_that_drips_is_hung_up_on(service: Service, before: bytes) -> None:
    assert _hung_up(service, before)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/api/v1/runs/sft", "/api/v1/files?name=slow.jsonl", "/v1/chat/completions"])
def test_a_body_that_drips_is_answered_and_hung_up_on(service: Service, belongings: Belongings, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {belongings.key}\r\n"
    body = "content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    answer = _hung_up(service, (head + body).encode())
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert b"the body did not come" in answer


def test_bodies_come_whole_however_they_are_cut_and_one_behind_the_other(
    service: Service, belongings: Belongings, chance: random.Random
) -> None:
    """Several requests on one connection, in pieces that end anywhere."""
    head = f"POST /api/v1/files?name=a HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {belongings.key}\r\n"
    bodies = [chance.randbytes(size) for size in (1, 5000, 3 << 20, 100_000)]
    ways = [b"content-length: %d\r\n\r\n%s" % (len(each), each) for each in bodies]
    ways[1] = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(bodies[1]), bodies[1])
    sent = b"".join(head.encode() + way for way in ways)
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
        answers = connection.makefile("rb")
        at = 0
        while at < len(sent):
            size = chance.choice((1, 100, 5000, 70_000, 1 << 20))
            connection.sendall(sent[at : at + size])
            at += size
        found = []
        for _ in bodies:
            assert answers.readline().split()[1] in (b"200", b"201")
            headers = dict(line.split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            found.append(json.loads(answers.read(int(headers[b"content-length"])))["sha256"])
    assert found == [hashlib.sha256(each).hexdigest() for each in bodies]


@pytest.mark.parametrize(
    "head",
    [
        "POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n",
        "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n",
        "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n",
        *(f"POST / HTTP/1.1\r\ncontent-length: {length}\r\n" for length in ("5\r\ncontent-length: 6", "-1", "1e3")),
        "POST / HTTP/1.1\r\ntransfer-encoding: xchunked\r\n",
    ],
    ids=["length, chunks", "chunks, length", "chunks of HTTP/1.0", "two lengths", "negative", "a float", "no coding"],
)
@pytest.mark.parametrize("port_of", ["the web service", "a host"])
def test_a_request_of_two_lengths_is_refused_and_ends_its_connection(
    service: Service, head: str, port_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RFC 9112, 6.3: what a proxy in front reads as its body, we may read as another's request."""
    smuggled = "host: 127.0.0.1\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with listened(3) as host_port:
        port = host_port if port_of == "a host" else int(service.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as connection:
            connection.sendall((head + smuggled).encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # to the end: it is closed
    assert answer.startswith(b"HTTP/1.1 400") and b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1, "the second request was answered, too"
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio" and record.exc_info]


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_of_ours(
    service: Service, belongings: Belongings, walk: tuple[Operation, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """At every operation that takes a body: no 5xx is counted, of which the alert is, and no stack trace is logged."""

    def counted(status: str) -> float:
        samples = [sample for metric in REQUESTS.collect() for sample in metric.samples]
        return sum(one.value for one in samples if one.name.endswith("_total") and one.labels["status"][:1] in status)

    uploads = [each for each in walk if each.path.endswith(("/files", "/parts")) and each.method == "POST"]
    taking = [each for each in walk if each.takes or each in uploads]
    assert len(taking) > 30
    failed, refused = counted("5"), counted("4")
    for operation in taking:
        path = operation.path.replace("{", "{0[").replace("}", "]}").format(belongings.ids_for(operation))
        query, kind = "?name=a.jsonl" if path == "/api/v1/files" else "", operation.takes or "application/json"
        kind += "; boundary=b" if kind.startswith("multipart") else ""
        head = f"{operation.method} {path}{query} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
        head += f"authorization: Bearer {belongings.key}\r\ncontent-length: 9000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
            connection.sendall(
                head.encode() + b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            )
            connection.sendall(b"x" * 5000)
    wait_until(lambda: counted("45") - refused - failed >= len(taking), "all are counted")
    assert counted("5") == failed
    ours = [record for record in caplog.records if record.name.startswith(("longshore", "uvicorn"))]
    traces = [record.getMessage() for record in ours if record.exc_info]
    assert not traces, traces


def _hung_up(service: Service, before: bytes) -> bytes:
    """What is answered to a client that goes on byte by byte, until nobody listens any more."""
    found = b""
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=0.05) as connection:
        connection.sendall(before)
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            try:
                if before and not found:  # sent behind the answer, it could cost the rest of the answer
                    connection.sendall(b"x")
                if not (piece := connection.recv(1 << 16)):
                    return found or b"closed"
                found += piece
            except TimeoutError:
                continue
            except OSError:
                return found or b"closed"
    pytest.fail(f"the connection is open after {_PATIENCE_S:g} s; it was answered {found[:200]!r}")


@contextmanager
def listened(most: int, trust: Trust | None = None) -> Iterator[int]:
    """Serve as hosts do, so many connections at most; yields the port."""
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("here"))])
    listener = server.listen_at(ip_address("127.0.0.1"), most=most)
    port = listener.getsockname()[1]
    with served(app, listener, trust):
        yield port


def _is_open(connection: socket.socket) -> bool:
    connection.settimeout(_SOON_S / 2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_who_only_connects_takes_a_share_of_the_connections_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """Neither a request nor, where TLS is spoken, a handshake: what a process has open stays bounded."""
    trust = Trust.of(Settings(root=tmp_path, seal_key=SecretStr("k" * 64))) if tls else None
    monkeypatch.setattr(server, "HEADERS_S", 3600)
    with listened(3, trust) as port, ExitStack() as opened:
        connect = lambda: opened.enter_context(socket.create_connection(("127.0.0.1", port)))  # noqa: E731
        silent = [connect() for _ in range(3)]
        late = [connect() for _ in range(20)]
        assert not any(map(_is_open, late)) and all(map(_is_open, silent))
        silent.pop().close()
        wait_until(lambda: _is_open(connect()), "one more")


@pytest.mark.usefixtures("impatient")
def test_who_only_connects_keeps_nobody_from_a_host_or_its_metrics_for_long() -> None:
    with listened(3) as port, ExitStack() as opened:

        def answers() -> bool:
            with suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).is_success
            return False

        assert answers()
        for _ in range(3):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_until(answers, "an answer")


def test_a_stream_ends_with_its_key(service: Service, belongings: Belongings, owner: httpx.Client) -> None:
    made = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()
    lines, opened = [], threading.Event()

    def listen() -> None:
        path = f"/api/v1/runs/{belongings.ids['run_id']}/events"
        with (
            suppress(httpx.HTTPError),
            client(service, made["key"]) as asking,
            asking.stream("GET", path, headers={"accept": "text/event-stream"}) as answer,
        ):
            for line in answer.iter_lines():
                lines.append(line)
                opened.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert opened.wait(_PATIENCE_S)
    assert owner.delete(f"/api/v1/keys/{made['key_id']}").status_code == 200
    heard = len(lines)
    listener.join(_PATIENCE_S)
    assert not listener.is_alive(), "the stream goes on"
    assert lines[heard + 2 :] == []  # one may have been on its way, and it has an empty line behind it


def test_what_is_waited_for_is_not_told_to_a_key_that_is_gone(
    service: Service, belongings: Belongings, owner: httpx.Client
) -> None:
    made = owner.post("/api/v1/keys", json={"scopes": ["read"]}).json()
    answers: list[httpx.Response] = []

    def ask() -> None:
        with client(service, made["key"]) as asking:
            path = f"/api/v1/runs/{belongings.ids['run_id']}/events"
            answers.append(asking.get(path, params={"wait_s": 15}))

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    # Used: the service has let it in.
    wait_until(lambda: _last_used(owner, made["key_id"]), "the key is used")
    owner.delete(f"/api/v1/keys/{made['key_id']}")
    asker.join(_PATIENCE_S)
    assert [answer.status_code for answer in answers] == [401]


def _last_used(owner: httpx.Client, key_id: str) -> float | None:
    return next(key["last_used_at"] for key in owner.get("/api/v1/keys").json() if key["key_id"] == key_id)


@pytest.mark.parametrize("trusted", [(), ("127.0.0.1",)], ids=["no proxy is named", "the proxy is named"])
def test_a_forged_address_buys_no_further_tries(
    temporal_address: str, tmp_path: Path, trusted: tuple[str, ...]
) -> None:
    limits = RateLimitSettings(sign_ins_per_min=0.001, sign_in_burst=3)
    settings = Settings(
        root=tmp_path, temporal_address=temporal_address, rate_limit=limits, trusted_proxies=list(trusted)
    )
    with serving(settings) as service, httpx.Client(base_url=service.url, trust_env=False) as stranger:
        seen = [
            stranger.post(
                "/login", data={"key": f"ls-{i:012x}-guess"}, headers={"x-forwarded-for": f"9.9.9.{i}"}
            ).status_code
            for i in range(5)
        ]
    assert seen == ([401] * 5 if trusted else [401] * 3 + [429] * 2)


@pytest.mark.parametrize("command", [("service.app", "--port", "0"), ("service.host", "--role", "control")])
def test_a_root_that_others_may_look_into_is_closed(tmp_path: Path, command: tuple[str, ...]) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    environment = {**os.environ, "LONGSHORE_ROOT": str(root), "LONGSHORE_TEMPORAL_ADDRESS": "127.0.0.1:1"}
    process = subprocess.Popen([sys.executable, "-m", *command], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: stat.S_IMODE(root.stat().st_mode) == 0o700, "the root is closed", timeout_s=300)
    finally:
        process.kill()
        process.wait()
