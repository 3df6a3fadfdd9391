"""A sweep: the web service starts, follows and ends its trials; this workflow calls the service until the end."""

from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.publishing.publish import Publish
    from longshore.fields import Frozen
    from shared.automation.sweeps import SweepEnding, SweepRef, SweepTurn
    from workflows import control, policies
    from workflows.outcomes import problem_of_error


@workflow.defn(versioning_behavior=policies.MOVES)
class SweepWorkflow:
    """Asks the service to advance a sweep until its trials have ended, publishes the best one and records the end.

    It holds no state of trials: the service accepts, counts, pauses and resumes runs, and a trial that a limit paused
    continues as another execution. So a killed service or host loses nothing.
    """

    @workflow.run
    async def run(self, ref: SweepRef) -> None:
        while (end := (turn := await _ask_service("advance_sweep", ref, SweepTurn)).end) is None:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(ref)
        if turn.best is not None:
            try:
                published = await control.do(Publish.publish_best, turn.best)
                found = {"adapter": published.uri, "version": published.version}
            except ActivityError as error:
                found = {"state": "failed", "problem": problem_of_error(error).message}
            end = end.model_copy(update=found)
        await _ask_service("end_sweep", SweepEnding(**dict(ref), end=end), None)


async def _ask_service(activity: str, request: Frozen, answer: Any) -> Any:
    """Execute an activity of the web service; wait while that is away."""
    return await workflow.execute_activity(
        activity,
        request,
        result_type=answer,
        task_queue=policies.service_queue(workflow.info().task_queue),
        start_to_close_timeout=timedelta(minutes=5),
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=policies.ENDLESS,
    )
