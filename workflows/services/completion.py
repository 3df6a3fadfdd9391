"""One question to what was published, and its answer."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from shared.runs.serving import Completed, CompletionStart
    from workflows import policies


@workflow.defn
class CompletionWorkflow:
    """One activity, tried once: who asked is still there to ask again. A cancellation hangs up on the sampler."""

    @workflow.run
    async def run(self, start: CompletionStart) -> Completed:
        completed: Completed = await workflow.execute_activity(
            "complete",
            start.request,
            result_type=Completed,
            task_queue=start.queue,
            schedule_to_start_timeout=policies.pickup_timeout(start.timing),
            start_to_close_timeout=policies.COMPLETION_TIMEOUT,
            heartbeat_timeout=policies.heartbeat_timeout(start.timing),
            retry_policy=policies.ONCE,
        )
        return completed
