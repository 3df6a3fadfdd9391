"""Following a run for W&B, beside it: a slow or dead W&B is no affair of the run's."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.track import Tracked, TrackRequest
    from shared.runs import RLStart, RunStart
    from workflows import policies


@workflow.defn
class TrackWorkflow:
    """Started by a run's workflow; ends some time after the run's result stands."""

    @workflow.run
    async def run(self, request: TrackRequest) -> Tracked:
        tracked: Tracked = await workflow.execute_activity(
            "track",
            request,
            result_type=Tracked,
            start_to_close_timeout=policies.LEASE_TIMEOUT,
            heartbeat_timeout=policies.DATA_HEARTBEAT,
            retry_policy=policies.PATIENT,
        )
        return tracked


async def track(start: RunStart | RLStart) -> None:
    """Let a run that W&B is to hear of be followed by a workflow that outlives its own: nothing there waits for it."""
    if not start.is_tracked:
        return
    await workflow.start_child_workflow(
        TrackWorkflow.run,
        TrackRequest(run_id=start.run_id, run=start.run),
        id=f"{start.run_id}-track-{workflow.info().run_id}",
        parent_close_policy=workflow.ParentClosePolicy.ABANDON,
    )
