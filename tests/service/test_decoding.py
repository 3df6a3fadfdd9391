"""Large bodies: received in turn, and read in children for as long as their clients wait, in their tenant's share."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from service.accounts.keys import Principal
from service.decoding import Decoding, _server
from service.errors import Busy
from service.files import Incoming
from shared.limits import TenantLimits
from shared.settings import Settings
from tests.activities import confined_work as work
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
