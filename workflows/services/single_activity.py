"""Workflows of one activity each, for work that the web service must leave to a host, or cannot wait for."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grading.grade import Grade
    from activities.models.resolve import Resolve
    from activities.publishing.export import Exports
    from activities.retention.collect import CollectGarbage
    from activities.tokenizing.preview import PreviewDataset
    from activities.tracking.track import Track, Tracked, TrackRequest
    from longshore.fields import Artifact
    from shared.automation.garbage import GarbageReport, GarbageRequest
    from shared.grading.graders import GradeOneRequest, OneGrade
    from shared.runs.models import ExportRequest, ModelRequest, ResolvedModel
    from shared.runs.previews import Preview, PreviewStart
    from shared.runs.start import AnyStart
    from workflows import control, policies


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
    """Measures what tenants store, and deletes what retention policies expire, on a control host. Runs continue."""

    @workflow.run
    async def run(self, request: GarbageRequest) -> GarbageReport:
        return await control.do(CollectGarbage.collect, request)


@workflow.defn
class TrackWorkflow:
    """Writes a run's metrics to W&B until some time after its result is recorded. An outage of W&B delays no run."""

    @workflow.run
    async def run(self, request: TrackRequest) -> Tracked:
        return await workflow.execute_activity_method(
            Track.track,
            request,
            task_queue=policies.queue_of("track", workflow.info().task_queue),
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.DATA_HEARTBEAT,
            retry_policy=policies.PATIENT,
        )


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
