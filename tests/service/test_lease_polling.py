"""A host that asks for leases stops asking before it leaves, and nothing is lost in between."""

import asyncio
import threading
import uuid
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import Worker

from activities.hosts.standing import Standing
from service.lease_polling import IdleExit, LeasePolling
from shared.storage.host_states import HostState
from shared.storage.store import LocalStore

IDLE_S = 0.3


class Closing(Standing):
    """A standing in which something happens at the moment that its host stops asking, before the poller knows."""

    def __init__(self, *arguments, then) -> None:
        self._then, self._closes = then, False
        super().__init__(*arguments)

    @property
    def is_closing(self) -> bool:
        return self._closes

    @is_closing.setter
    def is_closing(self, closes: bool) -> None:
        self._closes = closes
        if closes and self._then is not None:
            then, self._then = self._then, None
            then()


async def test_a_lease_that_is_given_as_an_idle_host_stops_asking_keeps_it(temporal_address: str, tmp_path) -> None:
    """Temporal has given it to the host before the host says that it asks no more: the host starts nothing for it,
    gives it back at once, and goes on asking."""
    queue, told, attempts = uuid.uuid4().hex, list[str](), list[int]()
    left = asyncio.Event()

    def lease_now() -> None:
        """In a thread, and waited for: this host's poll is at Temporal meanwhile."""
        thread = threading.Thread(target=lambda: asyncio.run(_start(temporal_address, queue)))
        thread.start()
        thread.join()

    state = HostState(role="gpu", shape="cpu", name="here", queue="own", seen_at=0.0)
    standing = Closing(LocalStore(tmp_path), state, tuple, then=lease_now)

    @activity.defn(name="lease")
    async def lease() -> None:
        attempts.append(activity.info().attempt)
        told.append("left" if left.is_set() else "there")
        with standing.offered("r1", ()):
            told.append("held")

    client = await Client.connect(temporal_address)

    made = 0

    def make() -> Worker:
        nonlocal made
        made += 1
        return Worker(client, task_queue=queue, activities=[lease], max_concurrent_activities=1)

    async with LeasePolling(standing, make, IdleExit(IDLE_S, left.set)):
        await asyncio.wait_for(left.wait(), 60)
    if not attempts:
        pytest.skip("its poll had ended: the lease stayed in the queue, for another host")
    assert attempts[0] == 1 and told[0] == "there" and "held" not in told[:2], "given back at once"
    assert made >= 2, "it went on asking: here the lease may come again before it leaves, or wait for another host"


async def _start(address: str, queue: str) -> None:
    client = await Client.connect(address)
    await client.start_activity(
        "lease",
        id=queue,
        task_queue=queue,
        start_to_close_timeout=timedelta(seconds=60),
        retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=10), maximum_attempts=3),
    )
    await asyncio.sleep(0.3)  # it is on its way to the poll by then
