"""The action of a schedule: look at the data, and start a run if there is something new in it."""

import hashlib
from typing import Any

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from activities.sources.download import Download, DownloadRequest
    from shared.automation.schedules import ACTION_MEMO, AcceptRequest, Action, Decision, ScheduledAction, data_of
    from shared.runs.status import RunStatus
    from workflows import control, policies
    from workflows.outcomes import problem_of_error


@workflow.defn
class ScheduledRunWorkflow:
    """Starts one run of a schedule and waits for its end, so that Temporal's overlap policies apply to runs.

    The workflow's memo holds the outcome.
    """

    @workflow.run
    async def run(self, action: ScheduledAction) -> Action:
        run = action.scheduled.run
        run_id = _run_id(run.kind)
        self._show(Action())
        try:
            # Downloaded under the run's own key: the data that is compared is the data that is trained on.
            download = DownloadRequest(run_id=run_id, tenant=action.tenant, split="train", source=data_of(run))
            dataset = (await control.do(Download.download, download)).dataset
            decision = await _accepted(AcceptRequest(action=action, run_id=run_id, dataset=dataset))
        except Exception as error:
            self._show(Action(state="failed", reason=problem_of_error(error).message))
            raise
        if decision.start is None:
            return self._show(Action(state="skipped", reason=decision.reason))
        child = await _start(decision, run_id)
        shown = self._show(Action(state="started", run_id=run_id))
        if child is not None:
            await _end_of(child)
        return shown

    def _show(self, action: Action) -> Action:
        workflow.upsert_memo({ACTION_MEMO: action.model_dump(mode="json")})
        return action


async def _accepted(request: AcceptRequest) -> Decision:
    """Ask the web service to accept the run, by the rules for runs that users submit; wait while it is away."""
    decision: Decision = await workflow.execute_activity(
        "accept_scheduled",
        request,
        result_type=Decision,
        task_queue=policies.service_queue(workflow.info().task_queue),
        start_to_close_timeout=policies.RECORD_TIMEOUT,
        retry_policy=policies.PATIENT,
    )
    return decision


async def _start(decision: Decision, run_id: str) -> workflow.ChildWorkflowHandle[Any, Any] | None:
    """Start the run as a child that outlives this workflow. Returns None if the service has started it already."""
    try:
        return await workflow.start_child_workflow(
            decision.workflow,
            decision.start,
            id=run_id,
            result_type=RunStatus,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            cancellation_type=workflow.ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
    except WorkflowAlreadyStartedError:
        workflow.logger.info("%s was on record, and the service has started it already", run_id)
        return None


async def _end_of(child: workflow.ChildWorkflowHandle[Any, Any]) -> None:
    """Wait until the run has ended, in whatever way."""
    try:
        await child
    except ChildWorkflowError:
        if workflow.cancellation_reason() is not None:
            raise
        workflow.logger.info("%s did not succeed", child.id)


def _run_id(kind: str) -> str:
    """Make an id of the service's form, which sorts by time, and which is the same at every retry."""
    info = workflow.info()
    chance = hashlib.sha256(info.workflow_id.encode()).hexdigest()[:6]
    return f"{kind}-{int(info.start_time.timestamp() * 1000):011x}{chance}"
