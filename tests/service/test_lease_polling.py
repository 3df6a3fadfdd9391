"""A host that asks for leases stops asking before it leaves, and nothing is lost in between."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import activity
from temporalio.client import Client, PendingActivityState
from temporalio.common import RetryPolicy
from temporalio.worker import Worker

from activities.hosts.health import HostHealth
from service.host import LeasePolling
from service.temporal import described
from shared.errors import WorkerLost
from shared.storage.host_states import HostState, read_states
from shared.storage.store import LocalStore
from tests.waiting import eventually

IDLE_S = 0.3


class Watched(HostHealth):
    """A host's health that is idle once it `may_be`, and in which something happens at the moment that its host stops
    asking, before the poller knows.
    """

    def __init__(self, folder: Path, then: Callable[[], object] = lambda: None) -> None:
        self._then, self._closes, self.may_be = then, False, False
        state = HostState(role="gpu", shape="cpu", name="here", queue="own", seen_at=0.0)
        super().__init__(LocalStore(folder), state, tuple)

    def is_idle(self, after_s: float, close: bool = False) -> bool:
        return self.may_be and super().is_idle(after_s, close)

    @property
    def is_closing(self) -> bool:
        return self._closes

    @is_closing.setter
    def is_closing(self, closes: bool) -> None:
        self._closes = closes
        if closes:
            then, self._then = self._then, lambda: None
            then()


@pytest.fixture
async def client(temporal_address: str) -> Client:
    return await Client.connect(temporal_address)


class Leases:
    """A host of one lease at a time, and what becomes of a lease that Temporal gives it at a moment of its choice."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client, self.queue = client, uuid.uuid4().hex
        self.health = Watched(folder, then=self._lease_now)
        self.held, self.num_workers = list[bool](), 0  # by attempt

    def worker(self) -> Worker:
        self.num_workers += 1
        return Worker(self.client, task_queue=self.queue, activities=[self.lease], max_concurrent_activities=1)

    @activity.defn(name="lease")
    async def lease(self) -> None:
        self.held.append(False)
        with self.health.offered():
            self.held[-1] = True

    async def polls(self) -> bool:
        return bool((await described(self.client, self.queue)).pollers)

    async def was_given_back(self) -> bool:
        return (await self.client.get_activity_handle(self.queue).describe()).attempt > 1

    def _lease_now(self) -> None:
        """In a thread, and waited for: this host's poll is at Temporal meanwhile."""
        address = self.client.service_client.config.target_host
        thread = threading.Thread(target=lambda: asyncio.run(_give(address, self.queue)))
        thread.start()
        thread.join()


async def test_a_lease_that_is_given_as_an_idle_host_stops_asking_keeps_it(client: Client, tmp_path: Path) -> None:
    """Temporal has given it to the host before the host says that it asks no more: the host starts nothing for it,
    gives it back at once, and goes on asking."""
    host, left = Leases(client, tmp_path), asyncio.Event()
    async with LeasePolling(host.health, host.worker, left.set, IDLE_S):
        await eventually(host.polls, "its poll is at Temporal")
        host.health.may_be = True
        await asyncio.wait_for(left.wait(), 120)
    assert host.held[:1] == [False] and await host.was_given_back(), "nothing was started for it"
    assert host.num_workers >= 2, "it went on asking: here the lease may come again, or wait for another host"


async def test_a_lease_that_is_given_as_a_host_is_told_to_leave_is_given_back(client: Client, tmp_path: Path) -> None:
    host = Leases(client, tmp_path)
    async with LeasePolling(host.health, host.worker):
        await eventually(host.polls, "its poll is at Temporal")
    assert host.held == [False]
    assert await host.was_given_back(), "Temporal need not wait for its end"


async def _give(address: str, queue: str) -> None:
    """Start a lease, and wait until Temporal has given it to whoever asks."""
    client = await Client.connect(address)
    lease = await client.start_activity(
        "lease",
        id=queue,
        task_queue=queue,
        start_to_close_timeout=timedelta(seconds=120),
        retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=10), maximum_attempts=3),
    )

    async def is_given() -> bool:
        return (await lease.describe()).run_state == PendingActivityState.STARTED

    await eventually(is_given, "the lease is given")


async def test_a_host_is_idle_from_when_it_asks(client: Client, tmp_path: Path) -> None:
    """Its first worker takes longer to make than it may be idle: the SDK reads all modules for that."""
    asks_at, left = list[float](), asyncio.Event()
    health = Watched(tmp_path)
    health.may_be = True

    def make() -> Worker:
        time.sleep(2 * IDLE_S)
        return Worker(client, task_queue=uuid.uuid4().hex, activities=[_none], max_concurrent_activities=1)

    async with LeasePolling(health, make, left.set, IDLE_S, lambda: asks_at.append(time.monotonic())):
        await asyncio.wait_for(left.wait(), 120)
        left_at = time.monotonic()
    assert left_at - asks_at[0] >= IDLE_S


async def test_a_host_that_lost_a_worker_is_checked_before_it_takes_another_lease(
    client: Client, tmp_path: Path
) -> None:
    """If the check finds something, the host leaves."""
    left, held = asyncio.Event(), list[str]()
    state = HostState(role="gpu", shape="cpu", name="here", queue="own", seen_at=0.0)
    health, queue = HostHealth(LocalStore(tmp_path), state, lambda: ("cuda:1 fails",)), uuid.uuid4().hex

    @activity.defn(name="lease")
    def lease() -> None:
        with health.offered():
            held.append(activity.info().activity_id)
            health.lost(error := WorkerLost("it died"), at_start=True)
            raise error

    def make() -> Worker:
        threads = ThreadPoolExecutor(2)
        return Worker(
            client, task_queue=queue, activities=[lease], max_concurrent_activities=1, activity_executor=threads
        )

    async with LeasePolling(health, make, left.set):
        for number in range(2):
            await client.start_activity(
                "lease",
                id=f"{queue}-{number}",
                task_queue=queue,
                start_to_close_timeout=timedelta(seconds=120),
                retry_policy=RetryPolicy(maximum_attempts=1),
            )
        await asyncio.wait_for(left.wait(), 120)
    assert len(held) == 1
    assert [state.lacks for state in read_states(LocalStore(tmp_path), "cpu")] == [("cuda:1 fails",)]


@activity.defn(name="lease")
async def _none() -> None:
    """Never asked for."""
