"""One question to what was published, and its answer."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.hosts.lease import LeaseGrant
    from activities.sampling.complete import Completed, CompleteRequest
    from activities.sampling.samplers import LeasedSampler, SamplerPlace, ServedSampler
    from shared.contract import Frozen
    from shared.runs.start import RunTiming
    from workflows import policies


class CompletionStart(Frozen):
    """`queue`: of the hosts that reach the sampler."""

    request: CompleteRequest
    queue: str
    timing: RunTiming = RunTiming()


def served() -> SamplerPlace:
    """The installation's own server."""
    return ServedSampler()


def leased(serving_id: str, grant: LeaseGrant) -> SamplerPlace:
    """The sampler of a grant."""
    return LeasedSampler(run_id=serving_id, fence=grant.fence, worker_id=grant.worker_id)


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
