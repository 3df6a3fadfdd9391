"""Whole runs on a real Temporal server, with stand-in workers: what survives, also a rotation of keys; what is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio.client import (
    ActivityFailureError,
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, CancelledError

from activities.hosts.lease import LeaseRecord
from activities.hosts.run_job import ProgressReport, RunJobRequest
from activities.hosts.workers import processes_of
from longshore.dataset_runs import DatasetSource
from longshore.events import Step
from longshore.fields import Fence
from longshore.training import Layout, Lora
from service.sealing import ENCRYPTED, key_of, seal_keys
from service.temporal import connect_temporal
from shared.runs.start import ModelRequest, RunTiming
from shared.storage.paths import RunKeys
from tests import forks
from tests.depth import drawn
from tests.waiting import eventually
from tests.workflows.stack import Stack, failure_of, has_checkpoint, num_events, num_failed_activities, started
from tests.workflows.stand_in import artifact, job_plan, read_events
from tests.workflows.stand_in_worker import SEEDS, adapter_bytes
from workflows.sft import SFTWorkflow


@pytest.fixture
async def stack(temporal_address: str, tmp_path: Path) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path) as stack:
        yield stack
    assert stack.worker_ids() == [], "no worker's folder outlives its host"


async def test_a_run_goes_from_dataset_to_adapter(stack: Stack) -> None:
    await stack.add_gpu_host()
    handle = await stack.start()
    status = await handle.result()
    assert (status.state, status.phase, status.step, status.num_steps) == ("succeeded", "done", 20, 20)
    assert (status.epoch, status.version, status.problem) == (1, 1, None)
    assert status.metrics["loss"] == pytest.approx(1 / 20)
    assert status.started_at is not None and 0 < (status.ended_at or 0) - status.started_at < 30
    assert stack.weights(status) == adapter_bytes(7, 20)
    assert status == await stack.result(handle.id)
    assert status == await handle.query(SFTWorkflow.status)
    assert await num_events(handle) < 130
    assert await stack.num_trackers(handle.id) == 1


async def test_files_that_were_left_are_a_notice_of_the_run(stack: Stack) -> None:
    await stack.add_gpu_host()
    result = await (await stack.start(dataset="file:///hub", steps=1)).result()
    assert result.notices == ("validation.jsonl was left",)


async def test_no_worker_lives_before_a_job_waits_and_none_after_its_idle_time(
    temporal_address: str, tmp_path: Path
) -> None:
    async with started(temporal_address, tmp_path, worker_idle_s=4.0) as stack:
        await stack.add_gpu_host()
        await asyncio.sleep(0.5)
        assert stack.worker_ids() == []
        handle = await stack.start(is_tracked=False)
        await handle.result()
        assert await stack.num_trackers(handle.id) == 0
        [worker_id] = stack.worker_ids()
        await eventually(lambda: not stack.worker_ids(), "the idle worker's end")
        assert processes_of(worker_id) == []


@pytest.mark.drawn
@pytest.mark.parametrize("victim", drawn(["worker", "host", "machine"], 1))
async def test_who_is_killed_is_replaced_and_the_run_ends_in_the_same_bits(stack: Stack, tmp_path: Path, victim: str):
    """A host's next one at its root tells of it: nobody waits for its silence. A machine never comes back."""
    waits = {"timing": RunTiming(heartbeat_timeout_s=3600, host_pickup_timeout_s=3600)} if victim == "host" else {}
    first = stack.spawn_gpu_host(step_s=0.03, root=tmp_path / "first" if victim == "machine" else None)
    handle = await stack.begun(steps=100, **waits)
    killed = stack.worker_ids()
    if victim == "worker":
        for process in processes_of(killed[0]):
            process.kill()
    else:
        first.kill()
        first.join()
        stack.spawn_gpu_host()
    status = await handle.result()
    assert (status.epoch, status.workers_lost) == (2, 1)
    assert stack.weights(status) == adapter_bytes(7, 100)
    steps = [event.step for event in read_events(stack.store, handle.id)[0] if isinstance(event, Step)]
    assert len(steps) < 120, "it went on from a checkpoint, not from the beginning"
    assert sorted(set(steps)) == list(range(1, 101))
    if victim == "host":
        assert processes_of(killed[0]) == [] and killed[0] not in stack.worker_ids()


async def test_a_job_that_a_killed_host_never_took_is_refused_by_the_next_one(stack: Stack) -> None:
    """It waits in a queue that nobody else looks at."""
    first = stack.spawn_gpu_host(step_s=0.03)
    handle = await stack.begun(steps=10_000, timing=RunTiming(heartbeat_timeout_s=3600, host_pickup_timeout_s=3600))
    lease = LeaseRecord.model_validate_json(stack.store.get_bytes(RunKeys(handle.id).lease(1)))
    first.kill()
    first.join()
    await handle.terminate()
    plan = job_plan(artifact(stack.store, stack.settings.root_path / "any", "any", a="b"))
    request = RunJobRequest(plan=plan, fence=lease.fence, worker_id=stack.worker_ids()[0], cancel_grace_s=1)
    late = await stack.client.start_activity(
        "run_job",
        request,
        id=f"late-{handle.id}",
        task_queue=lease.host_queue,
        schedule_to_start_timeout=timedelta(hours=1),
        start_to_close_timeout=timedelta(hours=1),
        retry_policy=RetryPolicy(maximum_attempts=1),
    )
    stack.spawn_gpu_host()
    with pytest.raises(ActivityFailureError) as caught:
        await late.result()
    assert "no longer serves this run's lease" in str(caught.value.cause)


@pytest.mark.drawn
@pytest.mark.parametrize("way", drawn(["cancelled", "paused"], 1))
async def test_a_run_that_was_stopped_frees_its_worker_and_resumes_to_the_same_bits(stack: Stack, way: str) -> None:
    await stack.add_gpu_host(step_s=0.05)
    held_out = DatasetSource(uri="file:///held_out.jsonl")
    handle = await stack.start(steps=160, checkpoint_every=20, eval_dataset=held_out)
    await eventually(lambda: _says_when_it_ends(handle), "steps enough for a pace")
    if way == "cancelled":
        await handle.cancel()
        assert isinstance(await failure_of(handle), CancelledError)
    else:
        await handle.signal(SFTWorkflow.pause_for_limit, "quota spending: enough")
        result = await handle.result()
        assert (result.state, result.paused_by) == ("paused", "quota spending: enough")
    ended = (await handle.describe()).status
    assert ended == {"cancelled": WorkflowExecutionStatus.CANCELED, "paused": WorkflowExecutionStatus.COMPLETED}[way]
    result = await stack.result(handle.id)
    assert (result.state, result.problem, result.workers_lost, result.estimated_end) == (way, None, 0, None)
    assert result.checkpoint is not None
    assert 2 <= result.checkpoint.step == result.step < 160
    assert result.metrics["eval_loss"] == 3.5
    [worker_id] = stack.worker_ids()

    resumed = await stack.start(run_id=handle.id, resumed=True, steps=160, checkpoint_every=20, eval_dataset=held_out)
    status = await resumed.result()
    assert (status.metrics["eval_loss"], status.metrics["loss"]) == (3.5, pytest.approx(1 / 160)), "until the next one"
    assert status.state == "succeeded"
    assert status.epoch == 2, "epochs go on where the execution before stopped"
    assert status.workers_lost == 0, "a worker that was given back is no lost one"
    assert status.started_at == result.started_at, "it is one run"
    assert await num_failed_activities(resumed) == 0
    assert stack.worker_ids() == [worker_id], "the free worker was warm"
    assert stack.weights(status) == adapter_bytes(7, 160)
    assert status.timeline[: len(result.timeline)] == result.timeline, "what was is not forgotten"
    trained = [span for span in status.timeline if span.phase == "training"]
    assert [span.lease for span in trained] == [1, 2]
    seconds = sum((span.ended or 0) - span.began for span in trained)
    assert 0 < seconds <= status.gpu_seconds < seconds + 5, "one rank; the lease outlasts the job by a little"
    steps = [event.step for event in read_events(stack.store, handle.id)[0] if isinstance(event, Step)]
    assert steps == list(range(1, 161)), "no step was done twice"


async def test_a_cancel_is_not_forgotten_when_the_host_dies_before_it_is_done(
    temporal_address: str, tmp_path: Path
) -> None:
    """Its worker does not hear the cancel, and the grace is long: the host's heartbeat goes missing first."""
    async with started(temporal_address, tmp_path, worker_idle_s=4.0) as stack:
        host = stack.spawn_gpu_host(step_s=0.05)
        handle = await stack.begun(steps=1000, seed=SEEDS["deaf"])
        await handle.cancel()
        await asyncio.sleep(1.0)
        host.kill()
        host.join()
        stack.spawn_gpu_host()
        assert isinstance(await asyncio.wait_for(failure_of(handle), 300), CancelledError)
        result = await stack.result(handle.id)
        assert (result.state, result.epoch) == ("cancelled", 1)
        assert result.checkpoint is not None
        # What it started for a run that did not come has the idle time of any worker.
        await eventually(lambda: not stack.worker_ids(), "the new host's tidying")


async def _says_when_it_ends(handle: WorkflowHandle) -> bool:
    """Which takes the ends of two steps: the workflow hears of the first at once, of later ones after a while.

    Both times are of Temporal's clock, which need not be this process's.
    """
    status = await handle.query(SFTWorkflow.status)
    return status.estimated_end is not None and status.estimated_end > status.started_at


async def test_a_run_that_waits_for_a_host_can_be_cancelled(stack: Stack) -> None:
    handle = await stack.start()
    await eventually(lambda: _is_in(handle, "waiting_for_worker"), "the lease")
    await handle.cancel()
    assert isinstance(await failure_of(handle), CancelledError)
    assert (await stack.result(handle.id)).state == "cancelled"


async def _is_in(handle: WorkflowHandle, phase: str) -> bool:
    return (await handle.query(SFTWorkflow.status)).phase == phase


async def test_a_users_mistake_is_told_at_once_and_asks_for_no_worker(stack: Stack) -> None:
    await stack.add_gpu_host()
    handle = await stack.start(dataset="file:///bad.jsonl", engine="fsdp", layout=Layout(dp=2))
    cause = await failure_of(handle)
    assert isinstance(cause, ApplicationError)
    of_run = {"trainable": Lora(), "max_tokens": 2048, "dtype": "float32"}
    asked = ModelRequest(run_id=handle.id, uri="tiny", tenant="default", engine="fsdp", layout=Layout(dp=2), **of_run)
    assert stack.data.models_asked_for == [asked]
    assert (cause.type, cause.message) == ("invalid_input", "rows.jsonl:3: the last message must be the assistant's")
    assert stack.data.num_tokenize_calls == 1
    result = await stack.result(handle.id)
    assert (result.state, result.phase) == ("failed", "tokenizing")
    assert result.problem is not None
    assert result.problem.message == cause.message
    assert stack.worker_ids() == []
    assert not list(stack.store.list(RunKeys(handle.id).leases))


async def test_a_mistake_that_the_worker_finds_ends_the_run_at_once(stack: Stack) -> None:
    await stack.add_gpu_host()
    handle = await stack.start(seed=SEEDS["invalid_input"])
    cause = await failure_of(handle)
    assert isinstance(cause, ApplicationError)
    assert cause.message == "layout.tp: tp=3 does not divide 4 heads"
    result = await stack.result(handle.id)
    assert (result.epoch, result.state) == (1, "failed")


@pytest.mark.parametrize(
    ("seed", "words"),
    drawn([("dies", "the stand-in dies of its seed"), ("error", "RuntimeError: the stand-in cannot")], 1),
)
async def test_nothing_is_tried_for_ever(stack: Stack, seed: str, words: str) -> None:
    await stack.add_gpu_host()
    timing = RunTiming(heartbeat_timeout_s=4, max_losses=2)
    handle = await stack.start(seed=SEEDS[seed], timing=timing)
    cause = await failure_of(handle)
    assert isinstance(cause, ApplicationError)
    assert "lost 2 times in a row without a new checkpoint" in cause.message
    assert words in cause.message
    result = await stack.result(handle.id)
    assert result.problem is not None
    assert (result.epoch, result.problem.kind) == (2, "worker_lost")
    assert len(list(stack.store.list(RunKeys(handle.id).leases))) == 2


@pytest.mark.deep
async def test_a_run_that_gets_ahead_outlives_any_number_of_losses(stack: Stack) -> None:
    """Its worker dies after every step, with a checkpoint each."""
    await stack.add_gpu_host()
    timing = RunTiming(heartbeat_timeout_s=4, max_losses=1)
    handle = await stack.start(seed=SEEDS["dies_saved"], steps=4, checkpoint_every=1, timing=timing)
    status = await handle.result()
    assert stack.weights(status) == adapter_bytes(SEEDS["dies_saved"], 4)
    assert status.epoch == 4


@pytest.mark.drawn
@pytest.mark.parametrize("way", drawn(["cancelled", "paused"], 1))
async def test_a_run_that_is_stopped_again_before_it_goes_on_is_what_it_was(stack: Stack, way: str) -> None:
    """What it used counts, and there is where to go on from."""
    await stack.add_gpu_host(step_s=0.02)
    handle = await stack.begun(steps=1000)
    await handle.signal(SFTWorkflow.pause)
    before = await handle.result()
    assert before.gpu_seconds > 0 and before.checkpoint is not None
    handle = await stack.start(run_id=handle.id, resumed=True, steps=1000)
    await (handle.cancel() if way == "cancelled" else handle.signal(SFTWorkflow.pause))
    with suppress(WorkflowFailureError):
        await handle.result()
    after = await stack.result(handle.id)
    assert after.state == way
    kept = (
        "step",
        "num_steps",
        "planned_tokens",
        "checkpoint",
        "metrics",
        "gpu_seconds",
        "started_at",
        "dataset_report",
    )
    assert {name: getattr(after, name) for name in kept} == {name: getattr(before, name) for name in kept}
    assert after.timeline[: len(before.timeline)] == before.timeline


async def test_a_terminated_run_gives_its_worker_back(stack: Stack) -> None:
    await stack.add_gpu_host(step_s=0.05)
    handle = await stack.begun(steps=1000)
    [worker_id] = stack.worker_ids()
    await handle.terminate()
    other = await stack.start()
    status = await other.result()
    assert status.state == "succeeded"
    assert stack.worker_ids() == [worker_id], "the same worker, warm"


async def test_signals_of_another_fence_change_nothing(stack: Stack) -> None:
    await stack.add_gpu_host(step_s=0.1)
    handle = await stack.start(steps=30)
    await eventually(lambda: _is_in(handle, "training"), "training")
    lie = ProgressReport(fence=Fence(epoch=9), step=29, num_steps=30, metrics={"loss": -1.0}, checkpoint=None)
    await handle.signal(SFTWorkflow.progress, lie)
    status = await handle.query(SFTWorkflow.status)
    assert status.step < 29
    assert status.metrics.get("loss") != -1.0
    await handle.cancel()
    await failure_of(handle)


OLD, NEW = "old-" * 8, "new-" * 8
STEPS = 60


@pytest.fixture
async def rotating(temporal_address: str, tmp_path: Path) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path, has_control=False, seal_key=OLD) as rotating:
        yield rotating


@asynccontextmanager
async def hosts(rotating: Stack, keys: str) -> AsyncIterator[None]:
    """A control host and a GPU host with these keys; and the service, which starts runs by them from now on."""
    rotating.client = await connect_temporal(rotating.settings.model_copy(update={"seal_key": SecretStr(keys)}))
    gpu = rotating.spawn_gpu_host(step_s=0.1, seal_key=keys)
    async with rotating.control_host(rotating.client):
        yield
        await asyncio.to_thread(forks.end, gpu)


async def sealed_by(rotating: Stack, run_id: str) -> set[str]:
    """The keys of all that Temporal has of a run; each payload of it is encrypted."""
    raw = await Client.connect(rotating.settings.temporal_address)
    found = set()
    async for event in raw.get_workflow_handle(run_id).fetch_history_events():
        for payloads in (
            event.workflow_execution_started_event_attributes.input,
            event.activity_task_scheduled_event_attributes.input,
            event.activity_task_completed_event_attributes.result,
            event.workflow_execution_signaled_event_attributes.input,
            event.workflow_execution_completed_event_attributes.result,
        ):
            assert all(each.metadata["encoding"] == ENCRYPTED for each in payloads.payloads)
            found |= {key_of(each) for each in payloads.payloads}
    return found


async def test_keys_are_rotated_while_runs_go_on(rotating: Stack) -> None:
    """Hosts of each step are up before those of the step before leave, as in a rolling restart."""
    before = await rotating.exits.enter_async_context(AsyncExitStack())
    await before.enter_async_context(hosts(rotating, OLD))
    handles: list[WorkflowHandle] = [await rotating.start(steps=STEPS, is_tracked=False)]
    await eventually(lambda: has_checkpoint(handles[0]), "the first run is under way")
    for keys in (f"{OLD} {NEW}", f"{NEW} {OLD}"):
        following = await rotating.exits.enter_async_context(AsyncExitStack())
        await following.enter_async_context(hosts(rotating, keys))
        await before.aclose()
        handles.append(await rotating.start(steps=STEPS, is_tracked=False))
        before = following
    for handle in handles:
        run = rotating.client.get_workflow_handle(handle.id)
        await run.result()
        status = await rotating.result(handle.id)
        assert (status.state, status.problem, status.step) == ("succeeded", None, STEPS)
        assert rotating.weights(status) == adapter_bytes(7, STEPS)
    old, new = (
        key.id for key in seal_keys(rotating.settings.model_copy(update={"seal_key": SecretStr(f"{OLD} {NEW}")}))
    )
    assert [await sealed_by(rotating, handle.id) for handle in (handles[0], handles[-1])] == [{old, new}, {new}]
