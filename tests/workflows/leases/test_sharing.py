"""Several runs on one worker, and workers of several machines: they join, leave, give way, and are lost together."""

import asyncio
import random
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.service import RPCError

from activities.hosts.workers import end_processes, processes_of
from longshore.fields import Artifact, Fence
from longshore.training import Layout
from longshore.views import PhaseSpan, RunStatus
from service.host import control_workers
from shared.jobs.job import LeaseGrant, WorkerKey
from shared.runs.start import RunTiming
from shared.storage.paths import HostPaths
from tests.depth import IS_DEEP, SEED
from tests.waiting import eventually
from tests.workflows.leases.gang_holder import GangHolder, Holding
from tests.workflows.stack import Stack, failure_of, started
from tests.workflows.stand_in_worker import SEEDS, adapter_bytes
from workflows import leases, policies
from workflows.leases import GangTurnsWorkflow, Turn
from workflows.sft import SFTWorkflow

SLOW_S = 0.02
"""Seconds of a stand-in's step. It does one job after another; the leases of those that wait are what is tested."""


@pytest.fixture
async def shared_stack(temporal_address: str, tmp_path: Path) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path, worker_idle_s=20.0) as shared_stack:
        await shared_stack.add_gpu_host(SLOW_S)
        yield shared_stack
    assert shared_stack.worker_ids() == []


async def is_leased(handle: WorkflowHandle) -> bool:
    return (await handle.query(SFTWorkflow.status)).phase == "training"


async def test_runs_join_a_worker_and_another_one_has_its_turn_after_them(shared_stack: Stack) -> None:
    first = await shared_stack.begun(steps=1_000_000, seed=1, shares_with="")  # until it is cancelled
    [worker_id] = shared_stack.worker_ids()
    others = {
        2: await shared_stack.start(steps=10, seed=2, shares_with="", threads_per_rank=2),
        3: await shared_stack.start(steps=10, seed=3, shares_with="tenant"),
        4: await shared_stack.start(steps=10, seed=4),
    }
    joined = await shared_stack.start(steps=50, seed=5, shares_with="")
    await eventually(lambda: is_leased(joined), "the joined run's lease")
    assert shared_stack.worker_ids() == [worker_id]
    again = LeaseGrant(fence=Fence(epoch=1), host_queue="nobody's", worker_id=worker_id, joined=True)
    for handle in (first, joined):  # a host that did not hear that its signal came sends it again
        await handle.signal("leased", again)
    await first.cancel()
    ended = await joined.result()
    cancelled = await shared_stack.result(first.id)
    assert cancelled.state == "cancelled"
    assert shared_stack.weights(ended) == adapter_bytes(5, 50)
    for seed, handle in others.items():
        status = await handle.result()
        assert (status.epoch, status.workers_lost) == (1, 0)
        assert shared_stack.weights(status) == adapter_bytes(seed, 10)
        assert training(status).began >= training(ended).ended, "the device has room for one worker"
    wall_s = training(ended).ended - training(cancelled).began
    assert 0 < cancelled.gpu_seconds + ended.gpu_seconds <= wall_s, "time that two share is counted once"


def training(status: RunStatus) -> PhaseSpan:
    """The last time that a run had a worker. It has ended."""
    span = [span for span in status.timeline if span.phase == "training"][-1]
    assert span.ended is not None
    return span


async def test_nobody_joins_a_worker_for_longer_than_its_window(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path, sharing_window_s=0.0) as shared_stack:
        await shared_stack.add_gpu_host(SLOW_S)
        first = await shared_stack.begun(steps=60, seed=1, shares_with="")
        late = await shared_stack.start(steps=10, seed=2, shares_with="")
        status, other = await first.result(), await late.result()
        assert training(other).began >= training(status).ended
        assert shared_stack.weights(other) == adapter_bytes(2, 10)


@pytest.mark.deep
async def test_a_worker_takes_as_many_runs_as_its_host_says(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path, runs_per_worker=2) as shared_stack:
        await shared_stack.add_gpu_host(SLOW_S)
        handles = [await shared_stack.start(steps=60, seed=seed, shares_with="") for seed in range(3)]
        await eventually(lambda: _num_leased(handles, 2), "two leases")
        await asyncio.sleep(0.5)
        assert await _num_leased(handles, 2) and not await _num_leased(handles, 3)
        for seed, handle in enumerate(handles):
            assert shared_stack.weights(await handle.result()) == adapter_bytes(seed, 60)


async def _num_leased(handles: list[WorkflowHandle], wanted: int) -> bool:
    return sum([await is_leased(handle) for handle in handles]) >= wanted


async def test_a_lost_worker_is_lost_to_all_and_each_goes_on_alone(shared_stack: Stack) -> None:
    """Whose doing it was is not known: it shall not be the others' again."""
    handles = [await shared_stack.start(steps=250, seed=seed, shares_with="") for seed in (1, 2)]
    await eventually(lambda: _num_leased(handles, 2), "both leases")
    [worker_id] = shared_stack.worker_ids()
    for process in processes_of(worker_id):
        process.kill()
    statuses = [await handle.result() for handle in handles]
    for seed, status in zip((1, 2), statuses, strict=True):
        assert (status.epoch, status.workers_lost) == (2, 1)
        assert shared_stack.weights(status) == adapter_bytes(seed, 250)
    early, late = sorted(map(training, statuses), key=lambda span: span.began)
    assert late.began >= early.ended


@pytest.mark.deep
async def test_runs_meet_again_when_their_host_was_killed(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path) as shared_stack:
        host = shared_stack.spawn_gpu_host(SLOW_S)
        handles = [await shared_stack.start(steps=1_000_000, seed=seed, shares_with="") for seed in (1, 2)]
        await eventually(lambda: _num_leased(handles, 2), "both leases")
        host.kill()
        host.join()
        shared_stack.spawn_gpu_host(SLOW_S)

        async def have_met_again() -> bool:
            found = [await handle.query(SFTWorkflow.status) for handle in handles]
            return all((status.phase, status.epoch) == ("training", 2) for status in found)

        await eventually(have_met_again, "both leases of the other host")
        for handle in handles:
            await handle.cancel()
        assert {(await ended(shared_stack, handle)).state for handle in handles} == {"cancelled"}


async def ended(shared_stack: Stack, handle: WorkflowHandle) -> RunStatus:
    await failure_of(handle)
    return await shared_stack.result(handle.id)


async def test_a_run_that_is_cancelled_leaves_the_worker_to_the_others(shared_stack: Stack) -> None:
    stays = await shared_stack.start(steps=100, seed=1, shares_with="")
    await eventually(lambda: is_leased(stays), "its lease")
    [worker_id] = shared_stack.worker_ids()
    leaves = await shared_stack.start(steps=100, seed=2, shares_with="", timing=RunTiming(cancel_grace_s=20))
    await eventually(lambda: is_leased(leaves), "the joined run's lease")
    await leaves.cancel()
    status = await stays.result()
    assert (status.epoch, status.workers_lost) == (1, 0)
    assert shared_stack.weights(status) == adapter_bytes(1, 100)
    await eventually(lambda: not list((shared_stack.workers / worker_id / "leases").glob("*.json")), "no lease is left")


async def test_a_run_that_is_crowded_out_has_the_next_worker_and_others_may_join_it(shared_stack: Stack) -> None:
    """It has lost nothing, and does not join the same worker again, which would refuse it again."""
    seed = SEEDS["crowded"]
    first = await shared_stack.begun(steps=1_000_000, seed=1, shares_with="")  # until the others have joined it
    crowded = await shared_stack.start(steps=100, seed=seed, shares_with="")
    await eventually(lambda: is_leased(crowded), "the joined run's lease")
    stays = await shared_stack.start(
        steps=1_000_000, seed=2, shares_with=""
    )  # until it is cancelled: it holds the worker
    await eventually(lambda: is_leased(stays), "another lease of the first worker")
    await first.cancel()
    await failure_of(first)

    async def has_left() -> bool:
        status = await crowded.query(SFTWorkflow.status)
        return (status.phase, status.epoch) == ("waiting_for_worker", 2)

    await eventually(has_left, "its next lease is asked for")
    await asyncio.sleep(0.5)
    assert await has_left(), "it does not join"
    await stays.cancel()
    await failure_of(stays)
    await eventually(lambda: is_leased(crowded), "a worker of its own")
    joined = await shared_stack.start(steps=10, seed=3, shares_with="")
    for handle, of, steps in ((crowded, seed, 100), (joined, 3, 10)):
        status = await handle.result()
        assert status.workers_lost == 0
        assert shared_stack.weights(status) == adapter_bytes(of, steps)
    left, found = await shared_stack.result(crowded.id), await shared_stack.result(joined.id)
    assert training(found).began < training(left).ended, "others join it"


TWO = Layout(dp=2, nodes=2)
NUM_HOSTS, NUM_GANGS, NUM_TRIALS = 6, 20, 200 if IS_DEEP else 1
TIMING = RunTiming(heartbeat_timeout_s=4, host_pickup_timeout_s=4, gather_patience_s=3600)


async def test_two_hosts_are_one_worker_and_are_lost_and_leased_together(temporal_address: str, tmp_path: Path) -> None:
    """A host of two dies in the middle of a job: the other one's part ends too, and with a third the run goes on."""
    async with started(temporal_address, tmp_path) as stack:
        hosts = [stack.spawn_gpu_host(0.05, tmp_path / f"machine-{number}") for number in range(2)]
        handle = await stack.begun(steps=200, layout=TWO)
        hosts[1].kill()
        await stack.add_gpu_host(root=tmp_path / "machine-3")
        status = await asyncio.wait_for(handle.result(), 300)
        assert status.state == "succeeded" and status.workers_lost == 1
        assert stack.weights(status) == adapter_bytes(7, 200)


@asynccontextmanager
async def holders(temporal_address: str, root: Path) -> AsyncIterator[Stack]:
    """A control host that runs `GangHolder`."""
    async with started(temporal_address, root, has_control=False, worker_idle_s=0) as stack:
        workflows = [GangHolder, GangTurnsWorkflow]
        async with control_workers(stack.client, stack.settings.control_queue, [], workflows):
            yield stack


async def hold(stack: Stack, nodes: int = 2, seconds: float = 0.0) -> WorkflowHandle:
    """Start a workflow that is to have a worker of so many machines for so many seconds."""
    nothing = Artifact(uri="file:///nothing", sha256="0" * 64)
    key = WorkerKey(model=nothing, layout=Layout(dp=nodes, nodes=nodes), dtype="float32")
    run_id, shape = f"gang-{uuid.uuid4().hex[:8]}", stack.settings.shape
    holding = Holding(run_id=run_id, shape=shape, key=key, timing=TIMING, seconds=seconds)
    return await stack.client.start_workflow(
        GangHolder.run, holding, id=run_id, task_queue=stack.settings.control_queue
    )


def line(stack: Stack) -> WorkflowHandle:
    """The workflow that gives turns."""
    return stack.client.get_workflow_handle(f"gangs-{policies.lease_queue(stack.settings.shape)}")


async def stands_in_line(stack: Stack) -> WorkflowHandle:
    """Start one that waits behind those that did so before: it is in the line when this returns."""
    handle = await hold(stack)
    await eventually(lambda: has(handle, "EXTERNAL_WORKFLOW_EXECUTION_SIGNALED"), "that it stands in line")
    return handle


async def has(handle: WorkflowHandle, event: str) -> bool:
    try:
        return any(
            [getattr(EventType, f"EVENT_TYPE_{event}") == e.event_type async for e in handle.fetch_history_events()]
        )
    except RPCError:  # it is not there, or not yet
        return False


async def test_a_run_stands_in_line_again_when_the_line_is_lost(
    temporal_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has terminated the workflow that gives turns, with all that stood in it."""
    monkeypatch.setattr(leases, "_ASK_AGAIN_S", 0.5)
    async with holders(temporal_address, tmp_path) as stack:
        first = await hold(stack)
        await eventually(lambda: has(first, "ACTIVITY_TASK_SCHEDULED"), "its turn")
        second = await stands_in_line(stack)
        await line(stack).terminate()
        await first.terminate()
        await eventually(lambda: has(second, "ACTIVITY_TASK_SCHEDULED"), "its turn")
        await second.terminate()


async def test_a_turn_that_a_run_does_not_wait_for_is_over_at_once(temporal_address: str, tmp_path: Path) -> None:
    """Its wish was withdrawn before it had arrived."""
    async with holders(temporal_address, tmp_path) as stack:
        first = await hold(stack)
        await eventually(lambda: has(first, "ACTIVITY_TASK_SCHEDULED"), "its turn")
        second = await stands_in_line(stack)
        late = Turn(workflow_id=second.id, turn_id="late", patience_s=3600)
        third = await stands_in_line(stack)
        await line(stack).signal(GangTurnsWorkflow.ask, late)
        fourth = await stands_in_line(stack)
        for handle in (first, second, third):
            await eventually(lambda handle=handle: has(handle, "ACTIVITY_TASK_SCHEDULED"), "its turn")
            await handle.cancel()
        await eventually(lambda: has(fourth, "ACTIVITY_TASK_SCHEDULED"), "its turn")
        await fourth.cancel()


async def test_a_run_that_is_cancelled_as_it_stands_in_line_ends_no_line(temporal_address: str, tmp_path: Path) -> None:
    async with holders(temporal_address, tmp_path) as stack:
        for delay_s in (0.01, 0.02, 0.03, 0.04, 0.05):
            handle = await hold(stack)
            await asyncio.sleep(delay_s)
            await handle.cancel()
            with suppress(WorkflowFailureError):
                await handle.result()
            assert not await has(line(stack), "WORKFLOW_EXECUTION_CANCEL_REQUESTED"), delay_s


class Fleet:
    """Hosts of a stack, each as on a machine of its own, whose workers do no jobs."""

    def __init__(self, stack: Stack, root: Path) -> None:
        self._stack, self._root, self._num_made = stack, root, 0
        self.hosts = [self._another() for _ in range(NUM_HOSTS)]

    def _another(self):
        self._num_made += 1
        root = self._root / f"machine-{self._num_made}"
        return root, self._stack.spawn_gpu_host(0.0, root)

    def kill_one(self, chance: random.Random) -> None:
        """A host dies, and its worker with it, as a real one does; another machine comes in its place."""
        place = chance.randrange(NUM_HOSTS)
        root, host = self.hosts[place]
        host.kill()
        host.join()
        for worker in HostPaths(root).workers.glob("*"):
            end_processes(worker.name, grace_s=0.1)
        shutil.rmtree(root)
        self.hosts[place] = self._another()


@pytest.mark.deep
@pytest.mark.drawn
@pytest.mark.timeout(7200)
async def test_gangs_never_wait_for_each_other(temporal_address: str, tmp_path: Path) -> None:
    """In random order, with hosts that die: each has all of its hosts at some time. Their patience has no end here, so
    two that each held half of what both need would wait until the test is given up.
    """
    async with holders(temporal_address, tmp_path) as stack:
        fleet = Fleet(stack, tmp_path)
        num_leases = 0
        for trial in range(NUM_TRIALS):
            chance = random.Random(SEED + trial)

            async def one(chance: random.Random = chance) -> int:
                nodes, seconds = chance.choice((1, 2, 2, 3, 4)), chance.uniform(0.0, 0.3)
                await asyncio.sleep(chance.uniform(0, 2))
                num: int = await (await hold(stack, nodes, seconds)).result()
                return num

            held = [asyncio.create_task(one()) for _ in range(NUM_GANGS)]
            for _ in range(2):
                await asyncio.sleep(chance.uniform(0.5, 3))
                await asyncio.to_thread(fleet.kill_one, chance)
            left = set(held)
            while left:
                done, left = await asyncio.wait(left, timeout=600, return_when=asyncio.FIRST_COMPLETED)
                assert done, f"{len(left)} wait for each other"
            num_leases += sum(each.result() for each in held)
            print(f"trial {trial}: {num_leases} leases so far", flush=True)
        assert num_leases >= NUM_TRIALS * NUM_GANGS
