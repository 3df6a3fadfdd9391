"""Cancellations, by a real Temporal server; calls on threads; scratch folders that are gone with their block."""

import asyncio
import importlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import ActivityFailureError, ActivityHandle, Client
from temporalio.common import RetryPolicy
from temporalio.exceptions import CancelledError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.grading.open_grader import ModelServer
from activities.heartbeats import (
    _beside,
    cancellation_check,
    host_is_leaving,
    in_parallel,
    on_thread,
    pause,
    stop_if_cancelled,
)
from activities.host_context import scratch_folder
from activities.sampling.samplers import Samplers, WeightsInUse
from activities.sandbox import calls as confined
from activities.sources.http import Allowance, HttpSource, fetch
from shared.serving import ServedSampler
from shared.settings import ConfinedSettings, DownloadSettings, GradingSettings, SamplingSettings, Settings
from shared.storage.artifacts import manifest_of, sha256_file, upload_files
from shared.storage.files import go_on
from shared.storage.store import Check, LocalStore
from tests.activities import confined_work as work
from tests.waiting import eventually
from tests.workflows.stand_in import REPOSITORY

PRIVATE = DownloadSettings(allow_private_addresses=True, timeout_s=3600)


def test_no_activity_on_a_thread_has_cancellations_raised_there() -> None:
    """They could be raised within a lock's code. Whoever defines an activity has to say so each time."""
    found: dict[str, Any] = {}
    paths = [path for package in ("activities", "service") for path in (REPOSITORY / package).rglob("*.py")]
    for path in paths:
        if re.search("activity.defn|on_thread", path.read_text()):
            module = importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
            for holder in vars(module).values():
                for each in (holder, *(vars(holder).values() if isinstance(holder, type) else ())):
                    if (definition := getattr(each, "__temporal_activity_definition", None)) is not None:
                        found[definition.name] = definition
    on_threads = [definition for definition in found.values() if not definition.is_async]
    assert {"tokenize", "lease", "publish"} <= {definition.name for definition in on_threads}
    assert not [definition.name for definition in on_threads if not definition.no_thread_cancel_exception]


class SlowStore(LocalStore):
    def put_file(self, key: str, path: Path, check: Check = go_on) -> None:
        time.sleep(1)
        super().put_file(key, path, check)


class Waiting:
    """An activity that waits in the way that its argument names, for hours unless something ends the wait."""

    def __init__(self, folder: Path, silent: str) -> None:
        """`silent`: the address of a server that never answers."""
        self._folder, self._silent = folder, silent
        self._limits = ConfinedSettings(memory_bytes=512 << 20)
        self.begun, self.over = threading.Event(), threading.Event()
        self.has_left: bool | None = None

    @on_thread("wait")
    def wait(self, way: str) -> None:
        self.begun.set()
        try:
            getattr(self, way)()
        except CancelledError:
            self.has_left = host_is_leaving()
            raise

    def sleeps(self) -> None:
        pause(3600)

    def has_calls_on_threads(self) -> None:
        list(in_parallel(lambda _: self.over.wait(), range(2), 1))

    def has_pauses_on_threads(self) -> None:
        list(in_parallel(lambda _: pause(3600), range(2), 2))

    def needs_a_place(self) -> None:
        with confined._places.one(1, 1, "dataset"):  # one place is always left to others
            pass

    def asks_a_child(self) -> None:
        confined.call(self._limits, work.wait, str(self._folder / "begun"), writes=[self._folder])

    def answers_a_child_that_does_not_read(self) -> None:
        confined.call(self._limits, work.send, "q", answer=lambda _: bytes(64 << 20))

    def needs_weights(self) -> None:
        in_use = WeightsInUse()
        with in_use.hold("sampler", "one"), in_use.hold("sampler", "another"):
            pass

    def asks_a_sampler(self) -> None:
        settings = Settings(root=self._folder, sampling=SamplingSettings(url=self._silent))
        with Samplers(settings).open(ServedSampler()):
            pass

    def asks_a_grader(self) -> None:
        grading = GradingSettings(score_model_url=self._silent, score_model_timeout_s=3600)
        ModelServer(None, grading, True, "grader").answers("/completions", [b"{}"] * 3)

    def downloads(self) -> None:
        fetch(HttpSource(self._silent, PRIVATE), self._folder / "parts", Allowance(PRIVATE, None))

    def hashes(self) -> None:
        sha256_file(Path("/dev/zero"), cancellation_check())

    def uploads(self) -> None:
        for number in range(8 * 60):
            (self._folder / f"file-{number}").touch()
        store, manifest = SlowStore(self._folder.parent / "store"), manifest_of(self._folder)
        upload_files(store, "key", self._folder, manifest, cancellation_check())


WAYS = [name for name in vars(Waiting) if not name.startswith("_") and name != "wait"]


@pytest.fixture
async def client(temporal_address: str) -> Client:
    return await Client.connect(temporal_address)


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@asynccontextmanager
async def hosting(client: Client, queue: str, run: Callable[..., None], num_threads: int) -> AsyncIterator[Worker]:
    with ThreadPoolExecutor(num_threads) as threads:
        worker = Worker(
            client,
            task_queue=queue,
            activities=[run],
            activity_executor=threads,
            max_concurrent_activities=num_threads,
            max_heartbeat_throttle_interval=timedelta(milliseconds=100),
        )
        async with worker:
            yield worker


async def begin(client: Client, queue: str, name: str, argument: object) -> ActivityHandle[Any]:
    return await client.start_activity(
        name,
        argument,
        id=uuid.uuid4().hex,
        task_queue=queue,
        start_to_close_timeout=timedelta(hours=1),
        heartbeat_timeout=timedelta(minutes=2),
        retry_policy=RetryPolicy(maximum_attempts=1),
    )


@pytest.mark.parametrize("way", WAYS)
async def test_whatever_an_activity_waits_for_its_cancellation_ends_it(
    client: Client, tmp_path: Path, silent: str, way: str
) -> None:
    (tmp_path / "folder").mkdir()
    waiting, queue = Waiting(tmp_path / "folder", silent), uuid.uuid4().hex
    async with hosting(client, queue, waiting.wait, 1):
        handle = await begin(client, queue, "wait", way)
        await eventually(waiting.begun.is_set, "the activity runs")
        await asyncio.sleep(0.5)  # so that it waits, or fails
        await handle.cancel()
        with pytest.raises(ActivityFailureError) as failed:
            await asyncio.wait_for(handle.result(), 60)
        waiting.over.set()
    assert isinstance(failed.value.cause, CancelledError), failed.value.cause
    assert waiting.has_left is False


async def test_an_activity_of_a_host_that_leaves_is_cancelled_too(client: Client, tmp_path: Path) -> None:
    waiting, queue = Waiting(tmp_path, ""), uuid.uuid4().hex
    async with hosting(client, queue, waiting.wait, 1):
        await begin(client, queue, "wait", "sleeps")
        await eventually(waiting.begun.is_set, "the activity runs")
    assert waiting.has_left is True


class Locking:
    """Activities that take one lock each, again and again, which others hold most of the time. `locks`: by activity."""

    def __init__(self) -> None:
        self.locks: dict[str, threading.Condition] = {}

    @on_thread("lock")
    def lock(self, _: None) -> None:
        lock = self.locks[activity.info().activity_id] = threading.Condition()
        with _beside(lambda ended: self._hold(lock, ended), "holder"):
            while True:
                for _ in range(20):  # seldom looks, so that an exception from outside would come before
                    with lock:
                        pass
                stop_if_cancelled()

    def _hold(self, lock: threading.Condition, ended: threading.Event) -> None:
        while not ended.wait(0.001):
            if lock.acquire(timeout=1):
                time.sleep(0.02)
                lock.release()


async def test_no_lock_stays_held_after_many_cancellations(client: Client) -> None:
    locking, queue = Locking(), uuid.uuid4().hex

    async def cancel_one() -> None:
        handle = await begin(client, queue, "lock", None)
        await eventually(lambda: handle.id in locking.locks, "the activity runs")
        await handle.cancel()
        with pytest.raises(ActivityFailureError) as failed:
            await handle.result()
        assert isinstance(failed.value.cause, CancelledError), failed.value.cause

    async with hosting(client, queue, locking.lock, 8):
        for _ in range(8):
            await asyncio.gather(*(cancel_one() for _ in range(8)))
    assert len(locking.locks) == 64
    assert not [id for id, lock in locking.locks.items() if not lock.acquire(timeout=1)]


def test_heartbeats_go_on_beside_work_and_end_with_it() -> None:
    told = list[tuple[object, ...]]()

    @on_thread("work")
    def work_on() -> None:
        while len(told) < 4:
            pause(0.01)

    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: told.append(details)
    environment.run(work_on)
    assert told == [()] * 4
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_every_call_is_made_once_by_several_threads() -> None:
    meeting = threading.Barrier(4)  # that four calls are under way at once is the only way through

    def call(number: int) -> int:
        if number < 4:
            meeting.wait(60)
        return number * number

    assert sorted(in_parallel(call, range(100), 4)) == [number * number for number in range(100)]
    assert list(in_parallel(call, [], 4)) == []


@pytest.mark.parametrize("where", ["call", "arguments"])
def test_an_error_is_raised_and_no_new_call_begins(where: str) -> None:
    begun: list[int] = []

    def arguments() -> Iterator[int]:
        for number in range(1000):
            if where == "arguments" and number == 5:
                raise ValueError("five")
            yield number

    def call(number: int) -> int:
        begun.append(number)
        if number == 5:
            raise ValueError("five")
        return number

    with pytest.raises(ValueError, match="five"):
        list(in_parallel(call, arguments(), 1))
    assert begun == list(range(6 if where == "call" else 5))


def test_who_stops_listening_waits_for_nobody() -> None:
    release, taken = threading.Event(), list[int]()

    def call(number: int) -> int:
        taken.append(number)
        if number:
            release.wait(60)
        return number

    results = in_parallel(call, range(100), 3)
    assert next(results) == 0
    results.close()
    num_taken = len(taken)
    assert num_taken <= 4, "three under way, and the one that ended"
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("call"):
            thread.join(60)
    assert len(taken) <= num_taken + 1, "a thread may have taken one when it was told"


def test_a_folder_goes_with_its_block_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), scratch_folder(tmp_path, "pack") as folder:
        (folder / "file").write_text("x")
        raise ValueError("x")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from activities.host_context import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1]), 'pack'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, check=False).returncode == -9
    [left] = tmp_path.iterdir()
    with scratch_folder(tmp_path, "pack") as used:
        assert left.exists(), "too new to judge"
        for folder in (left, used):
            os.utime(folder, (0, 0))
        with scratch_folder(tmp_path, "pack"):
            assert not left.exists()
            assert used.exists()
