"""Following a run for W&B, beside it: a slow or dead W&B is no affair of the run's."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.tracking.track import Tracked, TrackRequest
    from shared.runs.start import RLStart, RunStart
    from workflows import control, policies


@workflow.defn
class TrackWorkflow:
    """Started by a run's workflow; ends some time after the run's result stands."""

    @workflow.run
    async def run(self, request: TrackRequest) -> Tracked:
        return await control.do("track", request, Tracked, policies.PATIENT, policies.LEASE_TIMEOUT)


async def track(start: RunStart | RLStart) -> None:
    """Let a run that W&B is to hear of be followed by a workflow that outlives its own: nothing there waits for it.

    Called when a run has its first worker: of one that never trains there is nothing to say.
    """
    if not start.is_tracked:
        return
    await workflow.start_child_workflow(
        TrackWorkflow.run,
        TrackRequest(run_id=start.run_id, run=start.run),
        id=f"{start.run_id}-track-{workflow.info().run_id}",
        parent_close_policy=workflow.ParentClosePolicy.ABANDON,
    )
