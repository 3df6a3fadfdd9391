"""Short workflows: previews, graders, exports, webhooks, schedules, sweeps, tracking."""

import asyncio
import hashlib
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from activities.grading.grade import Grade
    from activities.models.resolve import Resolve
    from activities.publishing.export import Exports
    from activities.publishing.publish import Publish
    from activities.sources.download import Download, DownloadRequest
    from activities.tokenizing.tokenize import PreviewDataset
    from activities.tracking.track import Track, Tracked, TrackRequest
    from longshore.automation import Action, GarbageReport
    from longshore.fields import Artifact, Frozen
    from longshore.grading import GradeOneRequest, OneGrade
    from longshore.views import Preview, PreviewStart, RunStatus
    from shared import automation
    from shared.runs.start import AnyStart, ExportRequest, ModelRequest, ResolvedModel
    from shared.storage.stored_bytes import USE_WORKFLOW, UseRequest
    from workflows import control, policies
    from workflows.outcomes import problem_of_error, was_cancelled


# --- Workflows of one activity each, for work that the web service must leave to a host, or cannot wait for ---


@workflow.defn
class PreviewWorkflow:
    """Shows a dataset's rows as the model will see them: on a control host, which has tokenizers."""

    @workflow.run
    async def run(self, start: PreviewStart) -> Preview:
        return await control.do(PreviewDataset.preview, start, within=policies.PREVIEW_TIMEOUT)


@workflow.defn
class GraderWorkflow:
    """Tries a grader on one sample, before any run. The code is user-supplied and runs in a control host's sandbox."""

    @workflow.run
    async def run(self, request: GradeOneRequest) -> OneGrade:
        return await control.do(Grade.grade_one, request, within=policies.PREVIEW_TIMEOUT)


@workflow.defn
class UntrainedModelWorkflow:
    """Makes an artifact of a model that a user names, before any run trains it."""

    @workflow.run
    async def run(self, request: ModelRequest) -> ResolvedModel:
        return await control.do(Resolve.resolve_model, request)


@workflow.defn
class ExportWorkflow:
    """Exports a published adapter or model, on a control host. Large weights may take long."""

    @workflow.run
    async def run(self, request: ExportRequest) -> Artifact:
        return await control.do(Exports.export, request)


@workflow.defn
class GarbageWorkflow:
    """Measures what tenants store, and deletes what retention policies expire. Runs continue."""

    @workflow.run
    async def run(self, request: automation.GarbageRequest) -> GarbageReport:
        within, heartbeat = policies.DATA_TIMEOUT, policies.DATA_HEARTBEAT
        return await control.ask_service("collect_garbage", request, GarbageReport, policies.RETRY, within, heartbeat)


@workflow.defn(name=USE_WORKFLOW)
class UseWorkflow:
    """Has the service note what a run uses, for one of the run's activities, which waits for it."""

    @workflow.run
    async def run(self, request: UseRequest) -> None:
        retry = RetryPolicy(maximum_interval=timedelta(seconds=2))  # it waits while what it uses is being deleted
        await control.ask_service("note_use", request, retry=retry, within=policies.ROW_TIMEOUT)


@workflow.defn
class TrackWorkflow:
    """Writes a run's metrics to W&B until some time after its result is recorded. An outage of W&B delays no run."""

    @workflow.run
    async def run(self, request: TrackRequest) -> Tracked:
        # This one is a coroutine, as no other activity of control hosts is.
        return await control.do(Track.track, request, policies.PATIENT, policies.LEASE_TIMEOUT)  # type: ignore[arg-type]


async def track(start: AnyStart) -> None:
    """If the run's metrics go to W&B, start a workflow that writes them, and that outlives the run's own.

    Called when a run has its first worker: a run that never trains has no metrics.
    """
    if not start.is_tracked:
        return
    await workflow.start_child_workflow(
        TrackWorkflow.run,
        TrackRequest(run_id=start.run_id, run=start.run),
        id=f"{start.run_id}-track-{workflow.info().run_id}",
        parent_close_policy=workflow.ParentClosePolicy.ABANDON,
    )


# --- The action of a schedule: look at the data, and start a run if there is something new in it ---


@workflow.defn
class ScheduledRunWorkflow:
    """Starts one run of a schedule and waits for its end, so that Temporal's overlap policies apply to runs.

    The workflow's memo holds the outcome.
    """

    @workflow.run
    async def run(self, action: automation.ScheduledAction) -> Action:
        run = action.scheduled.run
        run_id = _run_id(run.kind)
        self._show(Action())
        try:
            # Downloaded under the run's own key: the data that is compared is the data that is trained on.
            found = []
            for split, source in automation.data_of(run).items():
                download = DownloadRequest(run_id=run_id, tenant=action.tenant, split=split, source=source)
                found.append((await control.do(Download.download, download)).dataset)
            request = automation.AcceptRequest(action=action, run_id=run_id, dataset=found[0], more=tuple(found[1:]))
            decision = await control.ask_service("accept_scheduled", request, automation.Decision, policies.PATIENT)
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
        workflow.upsert_memo({automation.ACTION_MEMO: action.model_dump(mode="json")})
        return action


async def _start(decision: automation.Decision, run_id: str) -> workflow.ChildWorkflowHandle[Any, Any] | None:
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


# --- A sweep ---
# The web service starts, follows and ends its trials; this workflow calls the service until the end.


@workflow.defn(versioning_behavior=policies.MOVES)
class SweepWorkflow:
    """Asks the service to advance a sweep until its trials have ended, publishes the best one and records the end.

    It holds no state of trials: the service accepts, counts, pauses and resumes runs, and a trial that a limit paused
    continues as another execution. So a killed service or host loses nothing.
    """

    @workflow.run
    async def run(self, ref: automation.SweepRef) -> None:
        while (end := (turn := await _advance("advance_sweep", ref, automation.SweepTurn)).end) is None:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(ref)
        if turn.best is not None:
            try:
                published = await control.do(Publish.publish_best, turn.best)
                found = {"adapter": published.uri, "version": published.version}
            except ActivityError as error:
                found = {"state": "failed", "problem": problem_of_error(error).message}
            end = end.model_copy(update=found)
        await _advance("end_sweep", automation.SweepEnding(**dict(ref), end=end), None)


async def _advance(activity: str, request: Frozen, answer: Any) -> Any:
    within, heartbeat = timedelta(minutes=5), timedelta(seconds=10)
    return await control.ask_service(activity, request, answer, within=within, heartbeat=heartbeat)


# --- Webhook ---
# Deliver one notice to a tenant's webhooks, trying each until it accepts the notice or 28 hours have passed.


@workflow.defn(versioning_behavior=policies.MOVES)
class WebhookWorkflow:
    """Asks the web service to deliver one notice. Its id is the notice's, so that no notice has two workflows."""

    @workflow.run
    async def run(self, request: automation.WebhookRequest) -> None:
        await asyncio.gather(*(self._deliver(request, webhook_id) for webhook_id in request.webhook_ids))

    async def _deliver(self, request: automation.WebhookRequest, webhook_id: str) -> None:
        delivery = automation.DeliverRequest(webhook_id=webhook_id, notice=request.notice)
        queue = policies.queue_of("deliver", workflow.info().task_queue)
        try:
            await workflow.execute_activity(
                "deliver",
                delivery,
                task_queue=queue,
                schedule_to_close_timeout=policies.WEBHOOK_PATIENCE,
                start_to_close_timeout=policies.WEBHOOK_TIMEOUT,
                retry_policy=policies.webhook_retry(request.first_retry_s),
            )
        except ActivityError as error:
            if was_cancelled(error):
                raise
            workflow.logger.warning("%s did not take %s: %s", webhook_id, request.notice.notice_id, error.cause)
            await workflow.execute_activity(
                "give_up_delivery",
                delivery,
                task_queue=queue,
                start_to_close_timeout=policies.RECORD_TIMEOUT,
                retry_policy=policies.RECORD_RETRY,
            )
