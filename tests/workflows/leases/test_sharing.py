"""Several runs on one worker: they join it, leave it, are billed their share, and give way to others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import WorkflowHandle

from activities.hosts.workers import processes_of
from longshore.fields import Fence
from longshore.views import PhaseSpan, RunStatus
from shared.jobs.job import LeaseGrant
from shared.runs.start import RunTiming
from tests.waiting import eventually
from tests.workflows.stack import Stack, failure_of, started
from tests.workflows.stand_in_worker import SEEDS, adapter_bytes
from workflows.sft import SFTWorkflow

SLOW_S = 0.02
"""Seconds of a stand-in's step. It does one job after another; the leases of those that wait are what is tested."""


@pytest.fixture
async def stack(temporal_address: str, tmp_path: Path) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path, worker_idle_s=20.0) as stack:
        await stack.add_gpu_host(SLOW_S)
        yield stack
    assert stack.worker_ids() == []


async def is_leased(handle: WorkflowHandle) -> bool:
    return (await handle.query(SFTWorkflow.status)).phase == "training"


async def test_runs_join_a_worker_and_another_one_has_its_turn_after_them(stack: Stack) -> None:
    first = await stack.begun(steps=1_000_000, seed=1, shares_with="")  # until it is cancelled
    [worker_id] = stack.worker_ids()
    others = {
        2: await stack.start(steps=10, seed=2, shares_with="", threads_per_rank=2),
        3: await stack.start(steps=10, seed=3, shares_with="tenant"),
        4: await stack.start(steps=10, seed=4),
    }
    joined = await stack.start(steps=50, seed=5, shares_with="")
    await eventually(lambda: is_leased(joined), "the joined run's lease")
    assert stack.worker_ids() == [worker_id]
    again = LeaseGrant(fence=Fence(epoch=1), host_queue="nobody's", worker_id=worker_id, joined=True)
    for handle in (first, joined):  # a host that did not hear that its signal came sends it again
        await handle.signal("leased", again)
    await first.cancel()
    ended = await joined.result()
    cancelled = await stack.result(first.id)
    assert cancelled.state == "cancelled"
    assert stack.weights(ended) == adapter_bytes(5, 50)
    for seed, handle in others.items():
        status = await handle.result()
        assert (status.epoch, status.workers_lost) == (1, 0)
        assert stack.weights(status) == adapter_bytes(seed, 10)
        assert training(status).began >= training(ended).ended, "the device has room for one worker"
    wall_s = training(ended).ended - training(cancelled).began
    assert 0 < cancelled.gpu_seconds + ended.gpu_seconds <= wall_s, "time that two share is counted once"


def training(status: RunStatus) -> PhaseSpan:
    """The last time that a run had a worker. It has ended."""
    span = [span for span in status.timeline if span.phase == "training"][-1]
    assert span.ended is not None
    return span


async def test_nobody_joins_a_worker_for_longer_than_its_window(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path, sharing_window_s=0.0) as stack:
        await stack.add_gpu_host(SLOW_S)
        first = await stack.begun(steps=60, seed=1, shares_with="")
        late = await stack.start(steps=10, seed=2, shares_with="")
        status, other = await first.result(), await late.result()
        assert training(other).began >= training(status).ended
        assert stack.weights(other) == adapter_bytes(2, 10)


@pytest.mark.deep
async def test_a_worker_takes_as_many_runs_as_its_host_says(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path, runs_per_worker=2) as stack:
        await stack.add_gpu_host(SLOW_S)
        handles = [await stack.start(steps=60, seed=seed, shares_with="") for seed in range(3)]
        await eventually(lambda: _num_leased(handles, 2), "two leases")
        await asyncio.sleep(0.5)
        assert await _num_leased(handles, 2) and not await _num_leased(handles, 3)
        for seed, handle in enumerate(handles):
            assert stack.weights(await handle.result()) == adapter_bytes(seed, 60)


async def _num_leased(handles: list[WorkflowHandle], wanted: int) -> bool:
    return sum([await is_leased(handle) for handle in handles]) >= wanted


async def test_a_lost_worker_is_lost_to_all_and_each_goes_on_alone(stack: Stack) -> None:
    """Whose doing it was is not known: it shall not be the others' again."""
    handles = [await stack.start(steps=250, seed=seed, shares_with="") for seed in (1, 2)]
    await eventually(lambda: _num_leased(handles, 2), "both leases")
    [worker_id] = stack.worker_ids()
    for process in processes_of(worker_id):
        process.kill()
    statuses = [await handle.result() for handle in handles]
    for seed, status in zip((1, 2), statuses, strict=True):
        assert (status.epoch, status.workers_lost) == (2, 1)
        assert stack.weights(status) == adapter_bytes(seed, 250)
    early, late = sorted(map(training, statuses), key=lambda span: span.began)
    assert late.began >= early.ended


@pytest.mark.deep
async def test_runs_meet_again_when_their_host_was_killed(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path) as stack:
        host = stack.spawn_gpu_host(SLOW_S)
        handles = [await stack.start(steps=1_000_000, seed=seed, shares_with="") for seed in (1, 2)]
        await eventually(lambda: _num_leased(handles, 2), "both leases")
        host.kill()
        host.join()
        stack.spawn_gpu_host(SLOW_S)

        async def have_met_again() -> bool:
            found = [await handle.query(SFTWorkflow.status) for handle in handles]
            return all((status.phase, status.epoch) == ("training", 2) for status in found)

        await eventually(have_met_again, "both leases of the other host")
        for handle in handles:
            await handle.cancel()
        assert {(await ended(stack, handle)).state for handle in handles} == {"cancelled"}


async def ended(stack: Stack, handle: WorkflowHandle) -> RunStatus:
    await failure_of(handle)
    return await stack.result(handle.id)


async def test_a_run_that_is_cancelled_leaves_the_worker_to_the_others(stack: Stack) -> None:
    stays = await stack.start(steps=100, seed=1, shares_with="")
    await eventually(lambda: is_leased(stays), "its lease")
    [worker_id] = stack.worker_ids()
    leaves = await stack.start(steps=100, seed=2, shares_with="", timing=RunTiming(cancel_grace_s=20))
    await eventually(lambda: is_leased(leaves), "the joined run's lease")
    await leaves.cancel()
    status = await stays.result()
    assert (status.epoch, status.workers_lost) == (1, 0)
    assert stack.weights(status) == adapter_bytes(1, 100)
    await eventually(lambda: not list((stack.workers / worker_id / "leases").glob("*.json")), "no lease is left")


async def test_a_run_that_is_crowded_out_has_the_next_worker_and_others_may_join_it(stack: Stack) -> None:
    """It has lost nothing, and does not join the same worker again, which would refuse it again."""
    seed = SEEDS["crowded"]
    first = await stack.begun(steps=1_000_000, seed=1, shares_with="")  # until the others have joined it
    crowded = await stack.start(steps=100, seed=seed, shares_with="")
    await eventually(lambda: is_leased(crowded), "the joined run's lease")
    stays = await stack.start(steps=1_000_000, seed=2, shares_with="")  # until it is cancelled: it holds the worker
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
    joined = await stack.start(steps=10, seed=3, shares_with="")
    for handle, of, steps in ((crowded, seed, 100), (joined, 3, 10)):
        status = await handle.result()
        assert status.workers_lost == 0
        assert stack.weights(status) == adapter_bytes(of, steps)
    left, found = await stack.result(crowded.id), await stack.result(joined.id)
    assert training(found).began < training(left).ended, "others join it"
