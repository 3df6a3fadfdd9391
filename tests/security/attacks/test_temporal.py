"""Temporal as a door: a stranger reaches its server, without any key of the installation, and speaks its protocol."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.common.v1 import Payloads, WorkflowExecution, WorkflowType
from temporalio.api.enums.v1 import EventType, UpdateWorkflowExecutionLifecycleStage
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.update.v1 import Input, Meta, WaitPolicy
from temporalio.api.update.v1 import Request as Update
from temporalio.api.workflowservice.v1 import (
    SignalWorkflowExecutionRequest,
    StartWorkflowExecutionRequest,
    UpdateWorkflowExecutionRequest,
)
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.common import RetryPolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.hosts.lease import LeaseRequest
from longshore.fields import Artifact
from longshore.training import Layout
from longshore.views import RunStatus
from service.sealing import UNSEALED
from shared.jobs.job import WorkerKey
from shared.runs.status import StepRequest
from tests.end_to_end.stack import Stack, wait_until
from tests.security.attacks.tenants import Tenant
from workflows.control import NOT_STARTED
from workflows.policies import queue_of

CONTROL = "control"
COMPLETED = UpdateWorkflowExecutionLifecycleStage.UPDATE_WORKFLOW_EXECUTION_LIFECYCLE_STAGE_COMPLETED
WORKFLOWS = [
    *("SFTWorkflow", "RLWorkflow", "PreviewWorkflow", "GraderWorkflow", "UntrainedModelWorkflow", "ExportWorkflow"),
    *("TrackWorkflow", "ScheduledRunWorkflow", "WebhookWorkflow", "ServingWorkflow", "GarbageWorkflow"),
]


@pytest.fixture
async def stranger(stack: Stack) -> AsyncIterator[Client]:
    connection = stack.connection
    yield await Client.connect(connection.temporal_address, data_converter=pydantic_data_converter)


@pytest.fixture
def rows(open_folder: Path) -> str:
    path = open_folder / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 4)
    return path.as_uri()


@pytest.fixture
def run(tiny_model: Path, rows: str) -> dict[str, Any]:
    return {"model": tiny_model.as_uri(), "dataset": {"uri": rows}, "steps": 1, "batch_size": 2, "max_tokens": 64}


async def events_of(handle: WorkflowHandle) -> list[HistoryEvent]:
    return [event async for event in handle.fetch_history_events()]


def is_of_an_activity(event: HistoryEvent) -> bool:
    return event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED


async def refused(client: Client, id: str) -> None:
    """The workflow has failed at once, of not being sealed, and has done nothing."""
    handle = client.get_workflow_handle(id)
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(handle.result(), 300)
    assert UNSEALED in repr(failed.value.cause.__dict__), failed.value.cause
    assert not any(is_of_an_activity(event) for event in await events_of(handle))


async def start_raw(client: Client, kind: str, id: str, given: Payloads) -> None:
    """Start a workflow with payloads as they are, seals and all."""
    await client.workflow_service.start_workflow_execution(
        StartWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_id=id,
            workflow_type=WorkflowType(name=kind),
            task_queue=TaskQueue(name=CONTROL),
            input=given,
            request_id=uuid.uuid4().hex,
        )
    )


async def test_a_strangers_workflow_hides_no_runs(
    stranger: Client, stack: Stack, victim: Tenant, run: dict[str, Any]
) -> None:
    """It is of a run's type; nobody works for it, so that it is listed on and on."""
    id = "sft-0196f0000000000009"
    handle = await stranger.start_workflow("SFTWorkflow", id=id, task_queue="nobody")
    try:
        sent = await asyncio.to_thread(victim.http.post, "/api/v1/runs/sft", json=run)
        assert sent.status_code == 201, sent.text
        address = "/api/v1/runs?state=succeeded&limit=100"
        run_id = sent.json()["run_id"]

        def is_listed() -> bool:
            return run_id in {row["run_id"] for row in victim.http.get(address).json()["runs"]}

        await asyncio.to_thread(wait_until, is_listed, "the list shows the run's end")
    finally:
        await handle.terminate()


@pytest.mark.parametrize("kind", WORKFLOWS)
async def test_no_workflow_takes_what_the_service_did_not_seal(stranger: Client, kind: str) -> None:
    id = f"forged-{kind}-{uuid.uuid4().hex}"
    await stranger.start_workflow(kind, {"anything": "at all"}, id=id, task_queue=CONTROL)
    await refused(stranger, id)


@pytest.mark.parametrize("kind", ["SFTWorkflow", "RLWorkflow", "ServingWorkflow"])
async def test_nor_one_without_any_input(stranger: Client, kind: str) -> None:
    id = f"empty-{kind}-{uuid.uuid4().hex}"
    await stranger.start_workflow(kind, id=id, task_queue=CONTROL)
    await refused(stranger, id)


async def test_a_sealed_input_is_good_for_one_workflow(stranger: Client, victim: Tenant, run: dict[str, Any]) -> None:
    """Copied, bit for bit, from the history of a run that the service has started."""
    run_id = victim.submit("sft", **run).json()["run_id"]
    first = (await events_of(stranger.get_workflow_handle(run_id)))[0]
    given = first.workflow_execution_started_event_attributes.input
    for id in (f"copy-of-{run_id}", f"schedule/{run_id}-2026-01-01T00:00:00Z"):
        await start_raw(stranger, "SFTWorkflow", id, given)
        await refused(stranger, id)
    await asyncio.to_thread(victim.ended, run_id)


async def started_with(client: Client, run_id: str) -> list[Payloads]:
    """The inputs of all workflows that a run has had so far, the oldest first."""
    executions = [each async for each in client.list_workflows(f'WorkflowId = "{run_id}"')]
    found = []
    for each in sorted(executions, key=lambda each: each.start_time):
        first = (await events_of(client.get_workflow_handle(run_id, run_id=each.run_id)))[0]
        found.append(first.workflow_execution_started_event_attributes.input)
    return found


async def started_in_vain(client: Client, run_id: str, given: Payloads) -> None:
    """A run's own input begins a workflow under the run's own id that fails, and has done nothing else than look."""
    handle = client.get_workflow_handle(run_id)
    # A run is shown as ended a moment before its workflow has.
    while (await handle.describe()).status == WorkflowExecutionStatus.RUNNING:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await start_raw(client, "SFTWorkflow", run_id, given)
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(handle.result(), 120)
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == NOT_STARTED, failed.value.cause
    scheduled = [event for event in await events_of(handle) if is_of_an_activity(event)]
    done = [event.activity_task_scheduled_event_attributes.activity_type.name for event in scheduled]
    assert done == ["begin"]


def belongings_of(stack: Stack, run_id: str) -> dict[str, bytes]:
    """What the store holds of a run, and what is published under its id."""
    store = stack.root / "store"
    found = [*(store / "runs" / run_id).rglob("*"), *store.glob(f"tenants/*/adapters/{run_id}/**/*")]
    return {str(path): path.read_bytes() for path in found if path.is_file()}


async def test_a_run_that_has_ended_is_not_started_again(
    stranger: Client, stack: Stack, victim: Tenant, run: dict[str, Any]
) -> None:
    run_id = victim.submit("sft", **run).json()["run_id"]
    view = await asyncio.to_thread(victim.ended, run_id)
    assert (view["state"], view["version"]) == ("succeeded", 1), view
    before = belongings_of(stack, run_id)
    for given in await started_with(stranger, run_id):
        await started_in_vain(stranger, run_id, given)
    assert victim.http.get(f"/api/v1/runs/{run_id}").json() == view
    assert belongings_of(stack, run_id) == before


async def test_nor_is_one_that_was_resumed_and_has_ended(
    stranger: Client, stack: Stack, victim: Tenant, run: dict[str, Any], open_folder: Path
) -> None:
    """Its second input says that it goes on from its first end; a third start of the service's is none of these."""
    (open_folder / "none.jsonl").write_text("{}\n")
    bad = run | {"dataset": {"uri": (open_folder / "none.jsonl").as_uri()}}
    run_id = victim.submit("sft", **bad).json()["run_id"]
    await asyncio.to_thread(victim.ended, run_id)

    async def resume() -> dict[str, Any]:
        assert victim.http.post(f"/api/v1/runs/{run_id}/resume").status_code == 202
        return await asyncio.to_thread(victim.ended, run_id)

    view = await resume()
    before = belongings_of(stack, run_id)
    inputs = await started_with(stranger, run_id)
    assert len(inputs) == 2
    for given in inputs:
        await started_in_vain(stranger, run_id, given)
    assert victim.http.get(f"/api/v1/runs/{run_id}").json() == view
    assert belongings_of(stack, run_id) == before
    assert (await resume())["problem"]["kind"] == view["problem"]["kind"] == "invalid_input"
    executions = [each async for each in stranger.list_workflows(f'WorkflowId = "{run_id}"')]
    assert len(executions) == 5, "the service's own start is none that was refused"


@pytest.fixture
async def waiting_run(victim: Tenant, tiny_model: Path) -> AsyncIterator[str]:
    """An RL run that waits for its client's groups."""
    body = {"model": tiny_model.as_uri(), "max_tokens": 64}
    answer = victim.submit("rl", **body)
    assert answer.status_code == 201, answer.text
    run_id = answer.json()["run_id"]

    def is_waiting() -> bool:
        return victim.http.get(f"/api/v1/runs/{run_id}").json().get("phase") == "waiting_for_groups"

    await asyncio.to_thread(wait_until, is_waiting, "an RL run that waits", 120)
    yield run_id
    victim.http.post(f"/api/v1/runs/{run_id}/cancel")
    await asyncio.to_thread(victim.ended, run_id)


async def test_a_running_run_trains_nothing_that_its_client_did_not_send(
    stranger: Client, victim: Tenant, waiting_run: str
) -> None:
    handle = stranger.get_workflow_handle(waiting_run)
    with pytest.raises((WorkflowUpdateFailedError, RPCError)):
        await asyncio.wait_for(handle.execute_update("train_step", StepRequest(key="mine", groups="file:///x")), 300)
    await handle.signal("progress", {"phase": "training", "step": 7})
    await stranger.workflow_service.signal_workflow_execution(
        SignalWorkflowExecutionRequest(
            namespace=stranger.namespace,
            workflow_execution=WorkflowExecution(workflow_id=waiting_run),
            signal_name="leased",
            request_id=uuid.uuid4().hex,
        )
    )
    view = await asyncio.to_thread(lambda: victim.http.get(f"/api/v1/runs/{waiting_run}").json())
    assert (view["state"], view["phase"]) == ("running", "waiting_for_groups"), view
    steps = await asyncio.to_thread(lambda: victim.http.get(f"/api/v1/runs/{waiting_run}/steps").json())
    assert "mine" not in str(steps)


async def test_what_is_sealed_for_one_message_is_no_other(stranger: Client, victim: Tenant, waiting_run: str) -> None:
    """The run's own input and the results of its activities, sent to it as an update and as a signal."""
    events = await events_of(stranger.get_workflow_handle(waiting_run))
    results = [event.activity_task_completed_event_attributes.result for event in events]
    taken = [events[0].workflow_execution_started_event_attributes.input, *(each for each in results if each.payloads)]
    assert len(taken) >= 3
    execution = WorkflowExecution(workflow_id=waiting_run)
    for given in taken:
        update = Update(meta=Meta(update_id=uuid.uuid4().hex), input=Input(name="train_step", args=given))
        told = await stranger.workflow_service.update_workflow_execution(
            UpdateWorkflowExecutionRequest(
                namespace=stranger.namespace,
                workflow_execution=execution,
                request=update,
                wait_policy=WaitPolicy(lifecycle_stage=COMPLETED),
            )
        )
        assert told.outcome.HasField("failure"), told
        assert (given is taken[0]) or UNSEALED in str(told.outcome.failure), told.outcome.failure
        await stranger.workflow_service.signal_workflow_execution(
            SignalWorkflowExecutionRequest(
                namespace=stranger.namespace,
                workflow_execution=execution,
                signal_name="progress",
                input=given,
                request_id=uuid.uuid4().hex,
            )
        )
    view = await asyncio.to_thread(lambda: victim.http.get(f"/api/v1/runs/{waiting_run}").json())
    assert (view["state"], view["phase"], view["step"]) == ("running", "waiting_for_groups", 0), view
    events = await events_of(stranger.get_workflow_handle(waiting_run))
    assert not any(event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED for event in events)


@workflow.defn(name="Forged")
class Forged:
    """A workflow of the stranger's own, which asks the installation's hosts for work."""

    @workflow.run
    async def run(self, activity: str, queue: str, request: dict[str, Any]) -> None:
        await workflow.execute_activity(
            activity,
            request,
            task_queue=queue,
            schedule_to_close_timeout=timedelta(seconds=30),
            retry_policy=RetryPolicy(maximum_attempts=2),
        )


def end_of_a_run(run_id: str) -> dict[str, Any]:
    return RunStatus(run_id=run_id, kind="sft", name="x").model_dump(mode="json")


def a_lease(run_id: str) -> dict[str, Any]:
    model = Artifact(uri="file:///nowhere", sha256="0" * 64)
    key = WorkerKey(model=model, layout=Layout(), dtype="float32")
    return LeaseRequest(run_id=run_id, epoch=1, key=key, ready_timeout_s=5).model_dump(mode="json")


def a_beginning(run_id: str) -> dict[str, Any]:
    return {"run_id": run_id, "start_id": "a", "execution": "x", "resumed": True, "goes_on_from": None}


FORGED: list[tuple[str, str, Callable[[str], dict[str, Any]]]] = [
    ("record_result", queue_of("record_result", CONTROL), end_of_a_run),
    ("begin", queue_of("begin", CONTROL), a_beginning),
    ("lease", "gpu-cpu", a_lease),
]


@pytest.mark.parametrize(("activity", "queue", "request_of"), FORGED, ids=[name for name, *_ in FORGED])
async def test_no_host_works_for_a_workflow_of_a_strangers(
    stranger: Client, stack: Stack, activity: str, queue: str, request_of: Callable[[str], dict[str, Any]]
) -> None:
    run_id, own_queue = f"sft-{uuid.uuid4().hex[:18]}", f"stranger-{uuid.uuid4().hex}"
    forging = Worker(stranger, task_queue=own_queue, workflows=[Forged], workflow_runner=UnsandboxedWorkflowRunner())
    async with forging:
        with pytest.raises(WorkflowFailureError) as failed:
            arguments = [activity, queue, request_of(run_id)]
            await stranger.execute_workflow("Forged", args=arguments, id=run_id, task_queue=own_queue)
    assert isinstance(failed.value.cause, ActivityError)
    refusal = failed.value.cause.cause
    assert isinstance(refusal, ApplicationError) and isinstance(refusal.cause, ApplicationError)
    assert (refusal.message, refusal.cause.type) == ("Encoded failure", UNSEALED), "the stranger is not told more"
    assert not (stack.root / "store" / "runs" / run_id).exists()
