"""Hosts that come while runs wait, leave when none do or in the middle of a job; and those that lose every worker."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from temporalio.client import WorkflowHandle

from activities.hosts.lease import LeaseRecord
from longshore.events import Step
from service.launching import Launching, waiting
from shared.runs.start import RunTiming
from shared.storage.artifacts import is_job
from shared.storage.host_states import is_bf16_fast, read_fast_bf16, read_states
from shared.storage.paths import RunKeys
from tests.depth import drawn
from tests.waiting import eventually
from tests.workflows.stack import Stack, started
from tests.workflows.stand_in import read_events
from tests.workflows.stand_in_worker import adapter_bytes

STEP_S, NUM_STEPS = 0.05, 20
PATIENT = RunTiming(heartbeat_timeout_s=60, host_pickup_timeout_s=60)  # no host dies: a busy machine's must not seem to
IDLE_S = 8.0  # longer than what Temporal says of a queue may be old
TRIALS = 100


class ForkedHosts:
    """A launcher of stand-in hosts, each as on a machine of its own."""

    def __init__(self, stack: Stack, root: Path, idle_s: float = IDLE_S) -> None:
        self.stack, self.root, self.idle_s = stack, root, idle_s
        self.hosts: dict[str, BaseProcess] = {}

    def launched(self) -> frozenset[str]:
        return frozenset(name for name, host in self.hosts.items() if host.exitcode is None)

    def launch(self, name: str) -> None:
        root = self.root / name
        self.hosts[name] = self.stack.spawn_gpu_host(STEP_S, root, self.idle_s, name)


@asynccontextmanager
async def launching(stack: Stack, launcher: ForkedHosts, most: int) -> AsyncIterator[None]:
    """Look for what waits every tenth of a second, which is often: each look could start a host too many."""
    stopped = asyncio.Event()
    loop = Launching(stack.client, stack.store, stack.settings, "gpu", most)
    looking = asyncio.create_task(loop.look_each(0.1, launcher, stopped))
    try:
        yield
    finally:
        stopped.set()
        await looking


def leases(stack: Stack, run_id: str) -> list[str]:
    """The hosts that leased a worker to a run, in order."""
    found = [stack.store.get_bytes(info.key) for info in stack.store.list(f"{RunKeys(run_id).leases}/")]
    return [LeaseRecord.model_validate_json(lease).host_queue for lease in found]


def steps(stack: Stack, run_id: str) -> list[int]:
    return [event.step for event in read_events(stack.store, run_id)[0] if isinstance(event, Step)]


async def is_at(stack: Stack, run_id: str, step: int) -> bool:
    return step in await asyncio.to_thread(steps, stack, run_id)


async def never(condition: Callable[[], Awaitable[int]], num_looks: int = 10) -> bool:
    return not any([await condition() for _ in range(num_looks)])


async def at_rest(stack: Stack, launcher: ForkedHosts) -> bool:
    """Nothing waits and no host is up: asked in this order, as what waits may start one in between."""
    return not await waiting(stack.client, stack.settings.lease_queue) and not launcher.launched()


def is_alone(stack: Stack) -> bool:
    return not read_states(stack.store, stack.settings.shape)


@pytest.mark.drawn
@pytest.mark.parametrize("trial", drawn(range(TRIALS), 1))
async def test_hosts_come_for_runs_that_wait_and_a_scale_down_in_the_middle_loses_nothing(
    trial: int, temporal_address: str, tmp_path: Path
) -> None:
    """No lease is killed, and no step and no host started twice: by the query of KEDA's scaler."""
    chance = random.Random(trial)
    num_runs, most = chance.randint(1, 3), 2
    async with started(temporal_address, tmp_path, runs_per_worker=1) as stack:
        launcher = ForkedHosts(stack, tmp_path / "machines")
        queue = stack.settings.lease_queue
        assert await waiting(stack.client, queue) == 0
        async with launching(stack, launcher, most):
            assert await never(lambda: asyncio.sleep(0.02, len(launcher.hosts))), "zero hosts at rest"
            handles = [
                await stack.start(steps=NUM_STEPS, checkpoint_every=1000, seed=trial + place, timing=PATIENT)
                for place in range(num_runs)
            ]
            at = chance.randint(1, NUM_STEPS - 2)
            await eventually(lambda: is_at(stack, handles[0].id, at), "a step")
            # Its first lease's host, or another one, which may be on its way, busy or idle.
            name = chance.choice(sorted(launcher.launched()))
            launcher.hosts[name].terminate()
            statuses = [await asyncio.wait_for(handle.result(), 120) for handle in handles]
            # What Temporal says is up to 5 s old: a lease that was taken as late may start one more host, for nothing.
            await eventually(lambda: at_rest(stack, launcher), "zero hosts, and nothing that waits")
        await eventually(lambda: not launcher.launched(), "one that was about to start leaves")
        for place, status in enumerate(statuses):
            assert stack.weights(status) == adapter_bytes(trial + place, NUM_STEPS)
            assert status.workers_lost == 0
            assert steps(stack, handles[place].id) == [*range(1, NUM_STEPS + 1)], "none twice, none left out"
        assert all(host.exitcode == 0 for host in launcher.hosts.values())
        num_leases = Counter(queue for handle in handles for queue in leases(stack, handle.id))
        assert len(launcher.hosts) <= min(num_runs, most) + 1, "one in place of the one that was told to leave"
        assert sum(num_leases.values()) <= num_runs + 1
        assert await asyncio.to_thread(is_alone, stack), "hosts take their states off the store"


async def test_a_drain_may_take_longer_than_a_silent_host_is_waited_for(temporal_address: str, tmp_path: Path) -> None:
    """The host's heartbeats go on while its job finishes a long step. Here a file tells it to leave, as of a spot
    notice that another container hears of.
    """
    async with started(temporal_address, tmp_path) as stack:
        long_s = 3 * (given := RunTiming(heartbeat_timeout_s=2, host_pickup_timeout_s=2)).heartbeat_timeout_s
        host = stack.spawn_gpu_host(long_s)
        handle = await stack.start(steps=3, checkpoint_every=1000, timing=given)
        await eventually(lambda: is_at(stack, handle.id, 1), "a step")
        (stack.settings.root_path / "notice").touch()
        await asyncio.to_thread(host.join, 120)
        assert host.exitcode == 0
        await stack.add_gpu_host()
        status = await asyncio.wait_for(handle.result(), 120)
        assert status.workers_lost == 0 and steps(stack, handle.id) == [1, 2, 3]
        assert stack.weights(status) == adapter_bytes(7, 3)


async def _at_once(stack: Stack, run_id: str) -> bool:
    return True


async def _is_leased(stack: Stack, run_id: str) -> bool:
    return bool(await asyncio.to_thread(leases, stack, run_id))


async def _has_a_job(stack: Stack, run_id: str) -> bool:
    return any(is_job(info.key) for info in stack.store.list(f"{RunKeys(run_id).logs}/"))


async def _is_in_its_middle(stack: Stack, run_id: str) -> bool:
    return await is_at(stack, run_id, LONG // 2)


async def _has_done_its_steps(stack: Stack, run_id: str) -> bool:
    return await is_at(stack, run_id, LONG)


LONG = 100  # steps: the job goes on for longer than a host takes to see a notice
PHASES = (_at_once, _is_leased, _has_a_job, _is_in_its_middle, _has_done_its_steps)


@pytest.mark.drawn
@pytest.mark.parametrize("phase", drawn(PHASES, 1))
async def test_a_notice_in_any_phase_of_a_job_loses_nothing(
    phase: Callable[[Stack, str], Awaitable[bool]], temporal_address: str, tmp_path: Path
) -> None:
    """Before its lease, as its worker starts, before its first step, among its steps, and after its last one."""
    async with started(temporal_address, tmp_path) as stack:
        first = stack.spawn_gpu_host(STEP_S, tmp_path / "first")
        handle = await stack.start(steps=LONG, checkpoint_every=1000, timing=PATIENT)
        await eventually(lambda: phase(stack, handle.id), "the phase")
        (tmp_path / "first" / "notice").touch()
        await stack.add_gpu_host(root=tmp_path / "second")
        status = await asyncio.wait_for(handle.result(), 120)
        await asyncio.to_thread(first.join, 60)
        assert first.exitcode == 0
        assert (status.state, status.workers_lost) == ("succeeded", 0)
        assert steps(stack, handle.id) == [*range(1, LONG + 1)], "none twice, none left out"
        assert stack.weights(status) == adapter_bytes(7, LONG)


async def test_a_host_that_was_started_for_nothing_leaves_by_itself(temporal_address: str, tmp_path: Path) -> None:
    """A lease whose run was cancelled still counts as waiting, until a host has asked for it."""
    async with started(temporal_address, tmp_path) as stack:
        launcher = ForkedHosts(stack, tmp_path / "machines")
        handle = await stack.start(steps=1)
        queue = stack.settings.lease_queue
        await eventually(lambda: waiting(stack.client, queue), "a lease that waits")
        await handle.cancel()
        await eventually(lambda: _has_ended(handle), "its end")
        assert await eventually(lambda: waiting(stack.client, queue), "what waits") == 1, "the scaler lies"
        async with launching(stack, launcher, most=3):
            await eventually(lambda: launcher.hosts, "a host")
            await eventually(lambda: not launcher.launched(), "that leaves")
        assert len(launcher.hosts) == 1 and not leases(stack, handle.id)
        assert await never(lambda: waiting(stack.client, queue)), "the host has taken it off the queue"


async def _has_ended(handle: WorkflowHandle) -> bool:
    return (await handle.describe()).close_time is not None


BREAKS = [sys.executable, "-c", "raise SystemExit('device-side assert triggered')"]


async def test_a_run_whose_worker_was_lost_at_its_start_goes_to_another_host(
    temporal_address: str, tmp_path: Path
) -> None:
    """The broken one passes its checks, and rests."""
    async with started(temporal_address, tmp_path) as stack:
        broken = await stack.add_gpu_host(command=lambda folder, key: BREAKS, check=tuple)
        handles = [await stack.start(steps=5, seed=seed) for seed in range(2)]
        good = await stack.add_gpu_host(check=tuple)
        for handle in handles:
            status = await handle.result()
            assert status.state == "succeeded"
            assert leases(stack, handle.id) in ([broken, good], [good]), "never twice"
        assert read_fast_bf16(stack.store, stack.settings.shape) is is_bf16_fast(), "as they said when they came"
