"""Large bodies: received in turn, read in children while their clients wait; what of a session's commands is stored."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from longshore.commands import Datum, Forward, ForwardBackward, SaveState
from service.accounts.keys import Principal
from service.apis.bodies import judged
from service.apis.native import runs
from service.decoding import Decoding, _server
from service.files import Incoming
from shared.errors import Busy
from shared.jobs.commands import stored_form
from shared.settings import Settings, TenantLimits
from shared.storage.paths import RunKeys
from tests.activities import confined_work as work
from tests.service.conftest import Service
from tests.waiting import wait_until


def request_of(tenant: str, hangs_up: asyncio.Event) -> Request:
    async def receive() -> dict[str, str]:
        await hangs_up.wait()
        return {"type": "http.disconnect"}

    principal = Principal(tenant=tenant, key_id="key-000000000000", scopes=frozenset())
    return Request({"type": "http", "method": "POST", "headers": [], "state": {"principal": principal}}, receive)


async def test_a_child_ends_with_its_client_and_leaves_its_place(tmp_path: Path) -> None:
    limits = TenantLimits(bodies=1, patience_s=0.0)
    decoding, gone, stays = Decoding(Settings(root=tmp_path, tenant_limits=limits)), asyncio.Event(), asyncio.Event()
    note = tmp_path / "note"
    reading = asyncio.create_task(decoding.call(request_of("acme", gone), work.wait, str(note), writes=[tmp_path]))
    await asyncio.to_thread(wait_until, note.exists, "a body is being read")
    assert _server._process is not None
    *_, child = psutil.Process(_server._process.pid).children(recursive=True)
    with pytest.raises(Busy, match="large bodies"):
        await decoding.call(request_of("acme", stays), work.echo, "more of the same tenant's")
    assert await decoding.call(request_of("other", stays), work.echo, "another's") == "another's"
    gone.set()
    with pytest.raises(ClientDisconnect):
        await reading
    await asyncio.to_thread(wait_until, lambda: not child.is_running(), "the child has ended")
    assert await decoding.call(request_of("acme", stays), work.echo, "again") == "again"


class HeldDigest:
    """A digest whose bytes are hashed when they may be."""

    def __init__(self) -> None:
        self.is_held, self.goes_on, self._of = threading.Event(), threading.Event(), hashlib.sha256()

    def update(self, data: bytes) -> None:
        self.is_held.set()
        assert self.goes_on.wait(120)
        self._of.update(data)

    def hexdigest(self) -> str:
        return self._of.hexdigest()


async def test_of_one_tenants_bodies_one_is_read_on_at_a_time(tmp_path: Path) -> None:
    """While a piece of one is written, each of the others is read up to its first piece. Other tenants' go on."""
    incoming, digest, num_read, piece = Incoming(tmp_path), HeldDigest(), [0] * 10, b"x" * (1 << 20)

    async def chunks(number: int) -> AsyncIterator[bytes]:
        for _ in range(3):
            num_read[number] += 1
            yield piece

    async def allowed(_: int) -> None:
        pass

    async def receive(tenant: str, number: int) -> int:
        of = digest if number == 0 else None
        async with incoming.received(tenant, chunks(number), allowed, of) as body:  # type: ignore[arg-type]
            return body.path.stat().st_size

    ours = [asyncio.create_task(receive("acme", 0))]
    assert await asyncio.to_thread(digest.is_held.wait, 120)
    ours += [asyncio.create_task(receive("acme", number)) for number in range(1, 9)]
    assert await receive("other", 9) == 3 << 20
    await asyncio.to_thread(wait_until, lambda: 0 not in num_read, "all are read up to a piece")
    assert num_read[:9] == [1] * 9
    digest.goes_on.set()
    assert await asyncio.gather(*ours) == [3 << 20] * 9
    assert digest.hexdigest() == hashlib.sha256(3 * piece).hexdigest()
    assert not await asyncio.to_thread(lambda: [*tmp_path.iterdir()])


SEND = f"{runs.__name__}:{runs.send_command.__name__}"
SMALL = Forward(data=(Datum(tokens=(5, 6, 7), weights=(0.1, 0.2)),))
LARGE = ForwardBackward(data=tuple(Datum(tokens=tuple(range(n, n + 500)), weights=(0.5,) * 499) for n in range(1, 20)))


@pytest.fixture(scope="module")
def session(service: Service, tiny_model: Path) -> str:
    body = {"model": str(tiny_model), "trainable": {"kind": "lora", "rank": 4}}
    with service.http() as api:
        opened = api.post("/sessions", json=body)
    assert opened.status_code == 201, opened.text
    return opened.json()["run_id"]


def put(service: Service, session: str, number: int, asked: Forward | ForwardBackward | SaveState) -> httpx.Response:
    with service.http() as api:
        path, headers = f"/sessions/{session}/commands/{number}", {"content-type": "application/json"}
        return api.put(path, content=asked.model_dump_json(), headers=headers)


@pytest.mark.parametrize(("number", "asked"), [(1, SMALL), (2, LARGE)], ids=["small", "large"])
def test_a_command_is_stored_with_its_data_as_arrays(
    service: Service, session: str, number: int, asked: Forward | ForwardBackward
) -> None:
    """Whether the service's own process reads it or a child does, and however often it is sent."""
    for _ in range(2):
        assert put(service, session, number, asked).status_code == 202
    assert service.store.get_bytes(RunKeys(session).command(number)) == stored_form(asked)
    refused = put(service, session, number, asked.model_copy(update={"temperature": 0.5}))
    assert refused.status_code == 422 and "was another one" in refused.text


def test_steps_are_in_the_audit_log_once_a_minute(service: Service, session: str) -> None:
    """As a session has many of them a second. Saves and refusals are there each time."""
    for number in range(11, 15):
        assert put(service, session, number, SMALL).status_code == 202
    assert put(service, session, 14, LARGE).status_code == 422
    for number in (15, 16):
        assert put(service, session, number, SaveState()).status_code == 202
    with service.http() as api:
        entries = api.get("/audit", params={"limit": 500}).json()["entries"]
    about = [each for each in reversed(entries) if each["path"].startswith(f"/api/v1/sessions/{session}/commands/")]
    noted = {(each["path"].rsplit("/", 1)[1], each["status"]) for each in about}
    assert {("14", 422), ("15", 202), ("16", 202)} <= noted
    assert len([number for number, status in noted if status == 202 and number not in ("15", "16")]) == 1, noted
    assert all(each["target"] == session for each in about)


def test_what_is_wrong_with_a_large_command_is_said(service: Service, session: str) -> None:
    short = LARGE.data[3].model_copy(update={"weights": (0.5,)})
    refused = put(service, session, 4, LARGE.model_copy(update={"data": (*LARGE.data, short)}))
    assert refused.status_code == 422
    assert "weights has 1 entries" in refused.text and "data" in refused.json()["error"]["place"]
    assert service.store.head(RunKeys(session).command(4)) is None


def test_a_child_hands_on_the_file_and_no_text() -> None:
    found = judged(SEND, LARGE.model_dump_json())
    assert found.packed == stored_form(LARGE) and found.text is None
    assert judged(SEND, SaveState().model_dump_json()).text is not None
