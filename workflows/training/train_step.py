"""One train step of an RL run, from its groups to the policy that it makes, which is published if that is due."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories
    from shared.jobs.weight_sync import SyncOutcome, SyncTarget
    from shared.runs.start import RLStart
    from shared.runs.status import RLState, StepStatus
    from workflows import control
    from workflows.training import models
    from workflows.training.job_plan import replayed_routes, rl_job
    from workflows.training.run import ActiveRun


class GroupSource(Protocol):
    """The source of a run's own groups: samplers, which need each version of the policy."""

    def sync_target(self, version: int) -> SyncTarget | None:
        """Return where the trainer sends a version of the policy; None if samplers load it from the store."""

    async def prove_and_sample_next(self, step: StepStatus, logprobs: Sequence[float]) -> dict[str, float]:
        """Prove that samplers serve the policy that a step made, given the trainer's log-probabilities of the probe.

        Begins to sample the next step. Returns metrics.
        """


async def train_and_publish(
    run: ActiveRun, start: RLStart, state: RLState, step: StepStatus, source: GroupSource | None
) -> StepStatus:
    """Pack a step's groups, train on them, publish what is due.

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
        routes=replayed_routes(start.run, state.shape),
    )
    packed = await control.do(PackTrajectories.pack_trajectories, request)
    if (before := packed.trained_before) is not None:
        return before.model_copy(update={"step": step.step, "same_as": before.step})
    metrics = step.metrics | packed.metrics
    if packed.data is None or packed.report_uri is None:
        return unchanged(state, step.model_copy(update={"state": "skipped", "metrics": metrics}))
    run.show(phase="waiting_for_worker", dataset_report=packed.report_uri)
    began = workflow.time()
    target = source.sync_target(state.policy_version + 1) if source is not None else None
    result = await run.training.do(rl_job(start, state, step, packed.data, packed.num_steps, target))
    trained = workflow.time()
    done = step.model_copy(
        update={
            "state": "done",
            "policy_version": state.policy_version + 1,
            "optimizer_step": result.step,
            "checkpoint": result.checkpoint,
            "synced": result.sync.digest if result.sync else None,
            "metrics": metrics | (sync_metrics(result.sync) if result.sync is not None else {}),
        }
    )
    run.show(phase="publishing")
    about = packed.metrics | result.metrics
    publishing = (
        publish_policy(start, state, done, packed.report_uri, about)
        if is_due(start, state, done)
        else unpublished(done)
    )
    if source is None:
        done = await publishing
    else:
        done = await publish_while_sampling(publishing, source.prove_and_sample_next(done, result.probe))
    seconds = {"training_seconds": trained - began, "publishing_seconds": workflow.time() - trained}
    return done.model_copy(update={"metrics": done.metrics | result.metrics | seconds})


def is_due(start: RLStart, state: RLState, done: StepStatus) -> bool:
    """Return True if a step's policy is published: every `publish_every` versions, and the last step's."""
    assert done.policy_version is not None
    is_last = state.rollouts is not None and done.step == state.rollouts.num_steps
    return is_last or done.policy_version % start.run.publish_every == 0


async def publish_policy(
    start: RLStart, state: RLState, done: StepStatus, report_uri: str | None, metrics: dict[str, float]
) -> StepStatus:
    """Publish the policy that a step made. Returns the step with the name and version."""
    published = await models.publish_weights(start, state.model, done.checkpoint, report_uri, metrics, done.step)
    return done.model_copy(
        update={
            "adapter": published.uri,
            "adapter_sha256": published.sha256,
            "name": published.name,
            "version": published.version,
        }
    )


async def unpublished(done: StepStatus) -> StepStatus:
    return done


async def publish_while_sampling(
    publishing: Coroutine[Any, Any, StepStatus], taking_up: Coroutine[Any, Any, dict[str, float]]
) -> StepStatus:
    """Publish a step while samplers load its policy. If either fails the other is cancelled."""
    tasks = asyncio.create_task(publishing), asyncio.create_task(taking_up)
    try:
        done, proof = await asyncio.gather(*tasks)
    except (Exception, asyncio.CancelledError):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return done.model_copy(update={"metrics": done.metrics | proof})


def sync_metrics(sync: SyncOutcome) -> dict[str, float]:
    """Return the metrics of a step's weight sync."""
    return {
        "sync_bytes": float(sync.num_bytes),
        "sync_blocked_s": sync.blocked_s,
        "sync_s": sync.duration_s,
        "sync_failed": float(len(sync.problems)),
    }


def unchanged(state: RLState, step: StepStatus) -> StepStatus:
    """A step that does not change the policy."""
    policy = {"policy_version": state.policy_version, "optimizer_step": state.optimizer_step}
    return step.model_copy(update=policy)


def state_after(run: ActiveRun, state: RLState, done: StepStatus) -> RLState:
    """Show the policy that a step made, and return the state that the next step trains on."""
    assert done.policy_version is not None and done.optimizer_step is not None
    run.show(
        policy_version=done.policy_version, step=done.optimizer_step, metrics=done.metrics, checkpoint=done.checkpoint
    )
    if done.adapter is not None:
        run.show(adapter=done.adapter, adapter_sha256=done.adapter_sha256, name=done.name, version=done.version)
    return state.model_copy(
        update={
            "policy_version": done.policy_version,
            "optimizer_step": done.optimizer_step,
            "checkpoint": done.checkpoint,
            "unpublished": done if done.adapter is None else None,
        }
    )
