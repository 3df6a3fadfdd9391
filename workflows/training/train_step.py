"""One train step of an RL run, from its groups to its published adapter, and the policy that it leaves."""

from collections.abc import Awaitable, Callable, Sequence

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.records.run_records import policy_of
    from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories
    from shared.jobs.weight_sync import SyncOutcome, SyncTarget
    from shared.runs.start import RLStart
    from shared.runs.status import Policy, RLState, StepStatus
    from workflows import control
    from workflows.training import models
    from workflows.training.job_plan import rl_job
    from workflows.training.run import ActiveRun

FindSync = Callable[[int], SyncTarget | None]
"""Returns where the trainer sends a version of the policy; None where samplers load it from the store."""
Prove = Callable[[Policy, Sequence[float]], Awaitable[dict[str, float]]]
"""Proves that a sampler serves a policy, given the trainer's log-probabilities of the probe; returns metrics."""


async def train_and_publish(
    run: ActiveRun, start: RLStart, state: RLState, step: StepStatus, prove: Prove | None, sync: FindSync | None
) -> StepStatus:
    """Pack a step's groups, train on them, publish the adapter.

    Args:
        sync: finds where the trainer sends the policy's next version itself.

    Returns:
        The step: done; or skipped, if there is nothing to learn from; or the earlier step that had the same key.
    """
    run.show(phase="packing")
    request = GroupsRequest(
        run_id=start.run_id,
        tenant=start.tenant,
        run=start.run,
        step=step.model_copy(update={"metrics": {}}),
        policy_version=state.policy_version,
        vocab_size=state.shape.vocab_size,
        model=state.model,
        name=run.status.name,
        version=run.status.version,
    )
    packed = await control.do(PackTrajectories.pack_trajectories, request)
    if (before := packed.trained_before) is not None:
        return before.model_copy(update={"step": step.step, "same_as": before.step})
    metrics = step.metrics | packed.metrics
    if packed.data is None or packed.report_uri is None:
        return unchanged(state, step.model_copy(update={"state": "skipped", "metrics": metrics}))
    run.show(phase="waiting_for_worker", dataset_report=packed.report_uri)
    began = workflow.time()
    target = sync(state.policy_version + 1) if sync is not None else None
    result = await run.training.do(rl_job(start, state, step, packed.data, packed.num_steps, target))
    trained = workflow.time()
    run.show(phase="publishing")
    published = await models.publish(
        start, state.model, result.checkpoint, packed.report_uri, packed.metrics | result.metrics, step.step
    )
    done = step.model_copy(
        update={
            "state": "done",
            "policy_version": state.policy_version + 1,
            "optimizer_step": result.step,
            "adapter": published.uri,
            "adapter_sha256": published.sha256,
            "name": published.name,
            "version": published.version,
            "checkpoint": result.checkpoint,
            "synced": result.sync.digest if result.sync else None,
        }
    )
    if result.sync is not None:
        metrics |= sync_metrics(result.sync)
    if prove is not None:
        metrics |= await prove(policy_of(done), result.probe)
    seconds = {"training_seconds": trained - began, "publishing_seconds": workflow.time() - trained}
    return done.model_copy(update={"metrics": metrics | result.metrics | seconds})


def sync_metrics(sync: SyncOutcome) -> dict[str, float]:
    """Return what a step's metrics say of its weight sync."""
    return {
        "sync_bytes": float(sync.num_bytes),
        "sync_blocked_s": sync.blocked_s,
        "sync_s": sync.duration_s,
        "sync_failed": float(len(sync.problems)),
    }


def unchanged(state: RLState, step: StepStatus) -> StepStatus:
    """A step that leaves the policy as it is."""
    policy = {"policy_version": state.policy_version, "optimizer_step": state.optimizer_step}
    return step.model_copy(update=policy)


def after(run: ActiveRun, state: RLState, done: StepStatus) -> RLState:
    """Show the policy that a step made, and return the state that the next step trains on."""
    assert done.policy_version is not None and done.optimizer_step is not None
    run.show(
        policy_version=done.policy_version,
        step=done.optimizer_step,
        metrics=done.metrics,
        adapter=done.adapter,
        adapter_sha256=done.adapter_sha256,
        name=done.name,
        version=done.version,
        checkpoint=done.checkpoint,
    )
    return state.model_copy(
        update={
            "policy_version": done.policy_version,
            "optimizer_step": done.optimizer_step,
            "checkpoint": done.checkpoint,
        }
    )
