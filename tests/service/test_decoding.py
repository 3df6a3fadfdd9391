"""Large bodies are read in children: for as long as their clients wait, and in their tenant's share."""

import asyncio
from pathlib import Path

import psutil
import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from service.accounts.principals import Principal
from service.decoding import Decoding
from service.errors import Busy
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
    reading = asyncio.create_task(decoding.call(request_of("acme", gone), work.wait, str(note)))
    await asyncio.to_thread(wait_until, lambda: note.exists() and note.read_text(), "a body is being read")
    with pytest.raises(Busy, match="large bodies"):
        await decoding.call(request_of("acme", stays), work.echo, "more of the same tenant's")
    assert await decoding.call(request_of("other", stays), work.echo, "another's") == "another's"
    gone.set()
    with pytest.raises(ClientDisconnect):
        await reading
    child = int(note.read_text())
    await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(child), "the child has ended")
    assert await decoding.call(request_of("acme", stays), work.echo, "again") == "again"
