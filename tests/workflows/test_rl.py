"""Client-driven RL runs on a real Temporal server; the stand-in workers' weights name what they were trained on."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner

from activities.host_context import HostContext
from activities.hosts.workers import processes_of
from activities.publishing.publish import Publish
from activities.records import FindCheckpoint, RunRecords
from activities.trajectories.pack_trajectories import PackTrajectories
from longshore.accounts import QuotaSettings
from longshore.events import Started, Step
from longshore.runs import RunRecord
from longshore.views import StepStatus
from service.accounts.tenants import Quotas
from service.database import engine
from service.database.engine import Database
from service.inference.questions import IdleEviction
from service.runs.rows import RunRows, run_row
from service.runs.runs import queued
from service.temporal import Temporal
from shared.runs.start import RLStart, RunTiming
from shared.runs.status import StepRequest
from shared.settings import DownloadSettings
from shared.storage.artifacts import read_record
from shared.storage.paths import HostPaths, RunKeys
from shared.storage.store import open_uri
from tests.activities.groups import group, random_groups, rl_run, write_groups
from tests.depth import drawn
from tests.waiting import eventually
from tests.workflows import stack as stacks
from tests.workflows.stack import Stack
from tests.workflows.stand_in import read_events
from tests.workflows.stand_in_worker import SEEDS
from workflows import rl
from workflows.rl import RLWorkflow
from workflows.services import TrackWorkflow


class RLStack(Stack):
    """A control host for RL runs; files of groups in a folder."""

    workflows: ClassVar[list[type]] = [RLWorkflow, TrackWorkflow]

    @property
    def activities(self) -> list[Callable[..., Any]]:
        host, data = HostContext(self.settings), self.data
        pack, find_checkpoint = PackTrajectories(host).pack_trajectories, FindCheckpoint(host).find_checkpoint
        record = RunRecords(host)
        records = [record.record_result, record.begin, record.record_step, record.recover_steps]
        return [data.resolve_model, data.track, pack, find_checkpoint, Publish(host).publish, *records]

    async def start_rl(self, run_id: str | None = None, resumed: bool = False, **run: Any) -> WorkflowHandle:
        run_id = run_id or f"run-{uuid.uuid4().hex[:8]}"
        start = RLStart(
            run_id=run_id,
            run=rl_run(**{"idle_s": 60, "mini_batches": 2, **run}),
            timing=RunTiming(heartbeat_timeout_s=4, host_pickup_timeout_s=4, cancel_grace_s=20),
            shape=self.settings.shape,
            **self.start_of(run_id, resumed),
        )
        return await self.client.start_workflow(
            RLWorkflow.run, start, id=run_id, task_queue=self.settings.control_queue
        )

    def groups(self, number: int) -> str:
        """The groups of a step: others for every number."""
        path = self.settings.root_path / "data" / f"{number}.jsonl"
        # Once: it may be read while it is asked for again.
        return path.as_uri() if path.exists() else write_groups(path, *random_groups(seed=number))

    async def train(self, handle: WorkflowHandle, number: int, key: str | None = None, wait: bool = True) -> StepStatus:
        request = StepRequest(key=key or f"key-{number}", groups=self.groups(number), wait=wait)
        while True:
            step = await handle.execute_update(RLWorkflow.train_step, request)
            if step.is_final or not wait:
                return step

    def broken(self) -> StepRequest:
        """A step whose groups cannot be trained."""
        bad = write_groups(self.settings.root_path / "data" / "bad.jsonl", group(0.0, float("nan")))
        return StepRequest(key="bad", groups=bad, wait=True)

    def adapter(self, step: StepStatus) -> bytes:
        assert step.adapter is not None
        store, key = open_uri(step.adapter, self.settings.s3)
        return store.get_bytes(f"{key}/adapter_model.safetensors")

    def jobs(self, handle: WorkflowHandle) -> list[str]:
        return [event.job_id for event in read_events(self.store, handle.id)[0] if isinstance(event, Started)]


@asynccontextmanager
async def started(temporal_address: str, root: Path, **changes: Any) -> AsyncIterator[RLStack]:
    changes["download"] = DownloadSettings(file_roots=(root / "data",))
    async with stacks.started(temporal_address, root, kind=RLStack, **changes) as stack:
        yield stack


@pytest.fixture
async def stack(temporal_address: str, tmp_path: Path) -> AsyncIterator[RLStack]:
    async with started(temporal_address, tmp_path) as stack:
        yield stack
    assert stack.worker_ids() == [], "no worker's folder outlives its host"


_UNDISTURBED: list[bytes] = []


@pytest.fixture
async def undisturbed(stack: RLStack) -> list[bytes]:
    """The adapters of four steps in one run that nothing happens to: the same on every stack, so trained once."""
    await stack.add_gpu_host()
    if _UNDISTURBED:
        return _UNDISTURBED
    handle = await stack.start_rl()
    adapters = [stack.adapter(await stack.train(handle, number)) for number in range(1, 5)]
    await handle.execute_update(RLWorkflow.finish)
    assert (await handle.result()).state == "succeeded"
    assert len(set(adapters)) == 4
    _UNDISTURBED.extend(adapters)
    return adapters


async def test_every_step_publishes_the_policys_next_version(stack: RLStack) -> None:
    await stack.add_gpu_host()
    handle = await stack.start_rl(name="harbour")
    steps = [await stack.train(handle, number) for number in (1, 2, 3)]
    assert [(s.step, s.state, s.policy_version, s.optimizer_step, s.version) for s in steps] == [
        (1, "done", 1, 2, 1),
        (2, "done", 2, 4, 2),
        (3, "done", 3, 6, 3),
    ]
    assert len({stack.adapter(step) for step in steps}) == 3
    assert steps[0].metrics["loss"] == pytest.approx((1 + 1 / 2) / 2)  # of both its optimizer steps
    assert "reward_mean" in steps[0].metrics
    status = await handle.query(RLWorkflow.status)
    assert (status.phase, status.policy_version, status.step, status.epoch) == ("waiting_for_groups", 3, 6, 1)
    assert status.adapter == steps[-1].adapter
    await handle.execute_update(RLWorkflow.finish)
    result = await handle.result()
    assert (result.state, result.phase, result.adapter) == ("succeeded", "done", steps[-1].adapter)
    assert result == await stack.result(handle.id)
    events = [event for event in read_events(stack.store, handle.id)[0] if isinstance(event, Step)]
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]


async def test_every_other_version_is_published_and_the_last(stack: RLStack, undisturbed: list[bytes]) -> None:
    """A step between them is as durable: the next one trains on from it, after a kill too."""
    handle = await stack.start_rl(name="harbour", publish_every=3)
    steps = []
    for number in range(1, 5):
        training = asyncio.create_task(stack.train(handle, number))
        if number == 2:
            await asyncio.sleep(0.05)
            for process in processes_of(stack.worker_ids()[0]):
                process.kill()
        steps.append(await training)
    assert [(step.policy_version, step.version, step.adapter is None) for step in steps] == [
        *((1, None, True), (2, None, True), (3, 1, False), (4, None, True))
    ]
    status = await handle.query(RLWorkflow.status)
    assert (status.policy_version, status.version, status.adapter) == (4, 1, steps[2].adapter)
    await handle.execute_update(RLWorkflow.finish)
    result = await handle.result()
    assert (result.state, result.version, result.policy_version) == ("succeeded", 2, 4)
    last = read_record(stack.store, RunKeys(handle.id).step(4), StepStatus)
    assert last == read_record(stack.store, RunKeys(handle.id).step_key("key-4"), StepStatus)
    assert last.adapter == result.adapter
    assert [stack.adapter(steps[2]), stack.adapter(last)] == undisturbed[2:]


async def test_the_same_key_trains_once_whenever_it_comes_again(stack: RLStack) -> None:
    await stack.add_gpu_host(step_s=0.1)
    handle = await stack.start_rl()
    twins = await asyncio.gather(*(stack.train(handle, 1) for _ in range(3)))
    assert twins[0] == twins[1] == twins[2]
    await stack.train(handle, 2)
    assert await stack.train(handle, 1) == twins[0]
    assert stack.jobs(handle) == ["000001", "000002"]
    assert (await handle.query(RLWorkflow.status)).policy_version == 2
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await stack.train(handle, 3, key="key-1")
    assert isinstance(caught.value.cause, ApplicationError)
    assert "this key was used for" in caught.value.cause.message
    await handle.cancel()


async def test_steps_that_come_early_wait_their_turn(stack: RLStack) -> None:
    handle = await stack.start_rl(engine="fsdp")
    early = [await stack.train(handle, number, wait=False) for number in (1, 2, 3, 4)]
    assert [(step.step, step.is_final) for step in early] == [(1, False), (2, False), (3, False), (4, False)]
    await handle.execute_update(RLWorkflow.finish)
    with pytest.raises(WorkflowUpdateFailedError):
        await stack.train(handle, 5, wait=False)
    await stack.add_gpu_host()
    assert (await handle.result()).policy_version == 4
    assert stack.data.models_asked_for[-1].engine == "fsdp"
    assert stack.jobs(handle) == ["000001", "000002", "000003", "000004"]
    last = await handle.query(RLWorkflow.step, 4)
    assert last is not None and last.policy_version == 4


async def test_groups_that_cannot_be_trained_leave_the_policy_as_it_was(stack: RLStack, undisturbed: Any) -> None:
    handle = await stack.start_rl()
    assert stack.adapter(await stack.train(handle, 1)) == undisturbed[0]
    failed = await handle.execute_update(RLWorkflow.train_step, stack.broken())
    assert (failed.state, failed.policy_version) == ("failed", 1)
    assert failed.problem is not None
    assert failed.problem.message.startswith("bad.jsonl:1: trajectories.1.reward: it is nan")
    equal = write_groups(stack.settings.root_path / "data" / "equal.jsonl", group(1.0, 1.0))
    skipped = await handle.execute_update(RLWorkflow.train_step, StepRequest(key="equal", groups=equal, wait=True))
    assert (skipped.state, skipped.policy_version, skipped.adapter) == ("skipped", 1, None)
    assert (await stack.train(handle, 2)).policy_version == 2
    await handle.cancel()


async def test_a_run_of_which_every_step_failed_fails_and_says_why(stack: RLStack, undisturbed: Any) -> None:
    handle = await stack.start_rl()
    await handle.execute_update(RLWorkflow.train_step, stack.broken())
    await handle.execute_update(RLWorkflow.finish)
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    status = await handle.query(RLWorkflow.status)
    assert (status.state, status.problem.kind, status.failed_steps) == ("failed", "invalid_input", 1)
    assert status.problem.message.startswith("no step was trained, and 1 failed; the last one: bad.jsonl:1: ")
    resumed = await stack.start_rl(handle.id, resumed=True)
    assert (await stack.train(resumed, 1)).policy_version == 1
    await resumed.execute_update(RLWorkflow.finish)
    status = await resumed.result()
    assert status.state == "succeeded" and status.notices == (
        "1 step was not trained: each has the reason in its own record",
    )


async def test_steps_of_equal_rewards_and_steps_without_a_gradient_are_counted_in_a_notice(stack: RLStack) -> None:
    await stack.add_gpu_host()
    handle = await stack.start_rl(seed=SEEDS["flat"], equal_rewards="keep")
    equal = write_groups(stack.settings.root_path / "data" / "equal.jsonl", group(0.1, 0.1, 0.1), group(0.1, 0.1))
    await stack.train(handle, 1)
    step = await handle.execute_update(RLWorkflow.train_step, StepRequest(key="equal", groups=equal, wait=True))
    assert (step.state, step.policy_version) == ("done", 2)
    await handle.execute_update(RLWorkflow.finish)
    status = await handle.result()
    assert (status.state, status.equal_reward_steps, status.zero_gradient_steps) == ("succeeded", 1, 2)
    assert [notice.partition(":")[0] for notice in status.notices] == [
        "1 step was of equal rewards",
        "2 steps were without any gradient",
    ]


async def test_an_idle_worker_is_given_back_and_the_next_step_leases_again(stack: RLStack, undisturbed: Any) -> None:
    handle = await stack.start_rl(idle_s=0.2)
    other = await stack.start_rl(idle_s=0.2)
    for number in (1, 2):
        assert stack.adapter(await stack.train(handle, number)) == undisturbed[number - 1]
        assert (await stack.train(other, number)).policy_version == number, "one host serves both, in turns"
    assert (await handle.query(RLWorkflow.status)).epoch == 2
    await handle.cancel()
    await other.cancel()


async def test_an_idle_run_gives_the_only_worker_to_one_that_waits(
    stack: RLStack, undisturbed: list[bytes], tmp_path: Path
) -> None:
    """Its client may have crashed. It is asked once, when a lease waits and no sooner; who trains is not asked."""
    idle = await stack.start_rl(idle_s=3600)
    assert stack.adapter(await stack.train(idle, 1)) == undisturbed[0]
    waiting = await stack.start_rl(idle_s=3600)
    database = Database(f"sqlite:///{tmp_path}/longshore.db")
    engine.upgrade(database)
    rows = RunRows(database, Quotas(QuotaSettings(), stack.store, database))
    eviction = IdleEviction(stack.settings, rows, Temporal(stack.settings), frozenset)
    for handle, phase in ((idle, "waiting_for_groups"), (waiting, "waiting_for_worker")):
        record = RunRecord(run_id=handle.id, run=rl_run(), created_at=1.0)
        row = run_row(record, queued(record).model_copy(update={"phase": phase, "epoch": 1}))
        database.write(lambda session, row=row: session.add(row))
    try:
        await eviction.evict()
        assert await _num_asked(idle) == 0, "the other has no step yet: no lease waits"
        await stack.train(waiting, 1, wait=False)

        async def has_trained() -> bool:
            await eviction.evict()
            step = await waiting.query(RLWorkflow.step, 1)
            return step is not None and step.state == "done"

        await eventually(has_trained, "the other's step, on the only host")
    finally:
        database.close()
    assert (await _num_asked(idle), await _num_asked(waiting)) == (1, 0)
    await waiting.execute_update(RLWorkflow.finish)
    assert stack.adapter(await stack.train(idle, 2)) == undisturbed[1], "it leases again, and goes on"
    await idle.cancel()


async def test_a_worker_that_keeps_the_device_leaves_it_with_its_lease(stack: RLStack) -> None:
    """And stays, for whoever wants its base next."""
    await stack.add_gpu_host()
    handle = await stack.start_rl(between_steps="keep")
    await stack.train(handle, 1)
    [worker_id] = stack.worker_ids()
    await stack.train(handle, 2)
    assert stack.worker_ids() == [worker_id], "between steps it stays"
    await handle.execute_update(RLWorkflow.finish)
    await handle.result()
    paths = HostPaths(stack.settings.root_path).worker(worker_id)
    await eventually(paths.offloaded.exists, "the worker has left the device")
    assert stack.worker_ids() == [worker_id]


async def test_a_long_run_goes_on_in_new_executions(
    stack: RLStack, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step an execution: everything that the next step needs is handed on, and so is who waits."""
    monkeypatch.setattr(rl, "_STEPS_AN_EXECUTION", 1)
    queue = f"{stack.settings.control_queue}-open"
    stack.settings = stack.settings.model_copy(update={"control_queue": queue})
    # Whose workflows see this process's modules, and so the constant.
    async with stack.control_host(runner=UnsandboxedWorkflowRunner()):
        handle = await stack.start_rl()
        for number in range(1, 5):  # one behind the other: they count as they come
            await stack.train(handle, number, wait=False)
        steps = await asyncio.gather(*(stack.train(handle, number) for number in range(1, 5)))
        assert [step.step for step in steps] == [1, 2, 3, 4]
        assert await stack.train(handle, 1) == steps[0], "it is remembered"
        await handle.execute_update(RLWorkflow.finish)
        assert (await handle.result()).policy_version == 4
        assert stack.jobs(handle) == ["000001", "000002", "000003", "000004"]
        assert [stack.adapter(step) for step in steps] == undisturbed
        executions = [e async for e in stack.client.list_workflows(f'WorkflowId = "{handle.id}"')]
        assert len(executions) >= 4


@pytest.mark.drawn
@pytest.mark.parametrize("way", drawn(["cancelled", "paused"], 1))
async def test_a_run_that_was_stopped_resumes_where_its_last_done_step_left_it(
    stack: RLStack, undisturbed: list[bytes], way: str
) -> None:
    """A step that was cut in two is trained anew: from what the step before left, not from its own half."""
    address, root = stack.settings.temporal_address, stack.settings.root_path / way
    async with started(address, root) as slow:
        await slow.add_gpu_host(step_s=2.0)  # a cancel takes a beat, about a second, to arrive
        handle = await slow.start_rl()
        first = await slow.train(handle, 1)
        cut = asyncio.create_task(slow.train(handle, 2))
        await eventually(lambda: _is_training(handle), "the first half of step 2")
        await (handle.cancel() if way == "cancelled" else handle.signal(RLWorkflow.pause))
        with pytest.raises(WorkflowUpdateFailedError):
            await cut
        if way == "cancelled":
            with pytest.raises(WorkflowFailureError) as caught:
                await handle.result()
            assert isinstance(caught.value.cause, CancelledError)
            assert (await handle.describe()).status == WorkflowExecutionStatus.CANCELED
        else:
            assert (await handle.result()).state == "paused"
        assert (await slow.result(handle.id)).state == way
    async with started(address, root) as quick:
        await quick.add_gpu_host()
        resumed = await quick.start_rl(run_id=handle.id, resumed=True)
        again = await quick.train(resumed, 1)
        assert (again.state, again.same_as, again.adapter) == ("done", 1, first.adapter), "the store remembers its key"
        adapters = [quick.adapter(await quick.train(resumed, number)) for number in (2, 3, 4)]
        await resumed.execute_update(RLWorkflow.finish)
        result = await resumed.result()
        assert (result.state, result.policy_version) == ("succeeded", 4)
        assert [quick.adapter(first), *adapters] == undisturbed


async def test_a_step_that_comes_to_a_run_that_ends_is_refused_or_told_so(stack: RLStack) -> None:
    """It is never taken under a number that the store gives to another, and nobody waits for it for ever."""
    await stack.add_gpu_host(step_s=0.2)
    handle = await stack.start_rl()
    await stack.train(handle, 1)
    assert [(await stack.train(handle, number, wait=False)).step for number in (2, 3)] == [2, 3]
    await handle.signal(RLWorkflow.pause)
    assert (await handle.result()).state == "paused"
    told = await handle.query(RLWorkflow.step, 3)
    assert told is not None and told.problem is not None
    assert (told.state, told.problem.kind) == ("failed", "run_ended") and "send it again" in told.problem.message

    resumed = await stack.start_rl(run_id=handle.id, resumed=True)
    await resumed.signal(RLWorkflow.pause)  # before it knows how many steps there were
    with pytest.raises((WorkflowUpdateFailedError, RPCError)):
        await stack.train(resumed, 7, wait=False)
    assert (await resumed.result()).state == "paused"
    assert (await stack.result(handle.id)).policy_version == 1


async def _num_asked(handle: WorkflowHandle) -> int:
    events = [event async for event in handle.fetch_history_events()]
    return [e.workflow_execution_signaled_event_attributes.signal_name for e in events].count("make_room")


async def _is_training(handle: WorkflowHandle) -> bool:
    return (await handle.query(RLWorkflow.status)).phase == "training"
