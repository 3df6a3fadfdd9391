"""Which models a run trains and publishes, and the jobs that it plans for them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.models.resolve import AdapterRequest, Resolve
    from activities.publishing.publish import Publish, Published, PublishRequest
    from longshore.dataset_runs import DatasetRun, DistillRun, DPORun, RewardRun, SFTRun
    from longshore.fields import Artifact
    from longshore.losses import (
        BradleyTerry,
        CrossEntropy,
        Distillation,
        DistillationSettings,
        Loss,
        Reference,
        SquaredError,
        with_reference,
    )
    from longshore.runs import CRITIC, RLRun, dtype_of
    from longshore.training import Lora
    from longshore.views import CheckpointRef, StepStatus
    from shared.jobs.job import (
        ONLY_JOB,
        Checkpointing,
        Evaluation,
        JobCritic,
        JobPlan,
        PackedData,
        Schedule,
        SyncTarget,
    )
    from shared.jobs.packed import RouteShape
    from shared.models.shape import ModelShape
    from shared.runs.start import AnyStart, ModelRequest, ResolvedModel, RLStart, RunStart
    from shared.runs.status import RLState
    from workflows import control, policies


# --- Job plans for a worker, made from a run's request: pure functions ---

# Checkpoints kept: the newest, the one of the job before, and one for a copy of either by a host of an earlier lease.
_KEPT_BETWEEN_JOBS = 3


def worker_plan(start: AnyStart, model: Artifact) -> dict[str, Any]:
    """Return the fields that the plans of all jobs and of sessions have of their run."""
    run, same = start.run, ("engine", "layout", "quantize_base", "optimizer_states", "recompute", "trainable", "seed")
    own = {"run_id": start.run_id, "dtype": dtype_of(run), "threads_per_rank": start.threads_per_rank, "model": model}
    return own | {name: getattr(run, name) for name in same}


def _updates(run: DatasetRun | RLRun, **schedule: Any) -> dict[str, Any]:
    """Return how the jobs of a run update weights: the optimizer, its rates, and micro-batches.

    `schedule`: what only this kind of run says of its rates. A critic has the same, except the learning rate.
    """
    rates = {"kind": run.schedule, "learning_rate": run.learning_rate, "warmup_steps": run.warmup_steps}
    return {
        "optimizer": run.settings_of_optimizer,
        "schedule": Schedule.model_validate(rates | schedule),
        "memory_budget_bytes": run.memory_budget_bytes,
        "max_micro_batch_tokens": run.bin_tokens if run.memory_budget_bytes else None,
    }


def dataset_job(
    start: RunStart,
    *,
    model: Artifact,
    adapter: Artifact | None,
    data: PackedData,
    eval_data: Mapping[str, PackedData],
    num_steps: int,
    reference: Reference = "base",
    more_teachers: Sequence[Reference] = (),
    probe: tuple[int, ...] = (),
) -> JobPlan:
    """The one job of a run on a dataset. The same run gives the same plan, however often it is leased.

    `probe`: token ids whose scores prove that samplers have the job's weights, if they answer held-out prompts.
    """
    run, early_stop = start.run, start.run.early_stop
    return JobPlan(
        **worker_plan(start, model),
        job_id=ONLY_JOB,
        initial_adapter=adapter,
        data=data,
        num_steps=num_steps,
        loss=_loss_of(run, reference, more_teachers),
        temperature=run.temperature if isinstance(run, DistillRun) else 1.0,
        **_updates(run, rates=run.learning_rates or () if isinstance(run, SFTRun) else ()),
        evaluation=Evaluation(
            data=eval_data.get(""),
            sets={name: data for name, data in eval_data.items() if name},
            every_steps=run.eval_every,
            num_samples=run.num_samples,
            sample_tokens=run.sample_tokens,
            graded_every=run.rollouts.held_out.every_steps if run.rollouts is not None else None,
            keep=run.keep,
            best_by=run.keeps_by,
            early_stop=early_stop and early_stop.model_copy(update={"metric": run.stops_by}),
        ),
        probe=probe,
        checkpointing=Checkpointing(
            every_steps=run.checkpoint_every or max(1, math.ceil(num_steps / 10)), keep=run.keep_checkpoints
        ),
    )


def _loss_of(run: DatasetRun, reference: Reference, more_teachers: Sequence[Reference]) -> Loss:
    match run:
        case SFTRun():
            return CrossEntropy()
        case DPORun():
            return run.loss(reference)
        case RewardRun():
            return BradleyTerry(center=run.center) if run.reads_pairs else SquaredError(scalar=None)
        case DistillRun():
            settings = run.model_dump(include=set(DistillationSettings.model_fields))
            if run.teacher_url is not None:  # its scores are stored with the data
                settings |= {"tokens": "top_k", "top_k": run.top_k or 1}
            return Distillation(teacher=reference, more_teachers=tuple(more_teachers), **settings)


def replayed_routes(run: RLRun, shape: ModelShape) -> RouteShape | None:
    """Return the shape of the expert routes that the trainer replays from the sampler; None if it routes itself."""
    return shape.routes if run.rollouts is not None and run.rollouts.routing_replay == "on" else None


def _critic_of(run: RLRun, state: RLState) -> JobCritic | None:
    """Return the critic of the step after this state."""
    if run.critic is None or not isinstance(run.trainable, Lora):
        return None
    settled = {
        "trainable": run.critic.trained_beside(run.trainable),
        "learning_rate": run.critic.learning_rate or run.learning_rate,
        "alone": state.policy_version < run.critic.warmup_steps,
        "checkpoint": state.critic_checkpoint.artifact if state.critic_checkpoint else None,
    }
    return JobCritic.model_validate(run.critic.model_dump() | settled)


def rl_job(
    start: RLStart, state: RLState, step: StepStatus, data: PackedData, num_steps: int, sync: SyncTarget | None = None
) -> JobPlan:
    """The job of one train step. It starts from the checkpoint of the step before, and saves one at its own end.

    The job's number is the step's.
    """
    run = start.run
    # Later steps may be sampled from an older policy, and a sampler that has lost it reads it from its checkpoint.
    num_ahead = run.rollouts.off_policy_steps if run.rollouts else 0
    if step.carried is not None:
        num_ahead += max(0, step.step + 1 - step.carried.oldest)
    return JobPlan(
        **worker_plan(start, state.model),
        job_id=f"{step.step:06d}",
        initial_adapter=state.adapter if state.checkpoint is None else None,
        initial_checkpoint=state.checkpoint.artifact if state.checkpoint else None,
        first_step=state.optimizer_step,
        data=data,
        num_steps=num_steps,
        loss=with_reference(run.loss, state.reference),
        critic=_critic_of(run, state),
        temperature=run.temperature,
        **_updates(run, num_steps=run.planned_steps if run.schedule != "constant" else None),
        checkpointing=Checkpointing(keep=_KEPT_BETWEEN_JOBS + 2 * num_ahead),
        after=run.between_steps,
        probe=state.rollouts.probe if state.rollouts else (),
        sync=sync,
    )


def beside(plan: JobPlan) -> tuple[JobPlan, JobPlan]:
    """Divide a step's job in two that need nothing of each other: the policy's, and its critic's on another worker."""
    assert plan.critic is not None
    of_policy = plan.critic.model_copy(update={"part": "policy"})
    of_critic = plan.critic.model_copy(update={"part": "critic", "alone": True})
    its_own = {"run_id": plan.run_id + CRITIC, "critic": of_critic, "sync": None, "probe": ()}
    return plan.model_copy(update={"critic": of_policy}), plan.model_copy(update=its_own)


# --- The model and adapters that a run begins with, and what it publishes ---


def model_request(start: AnyStart) -> ModelRequest:
    """Return the request that checks a run's model against its engine and layout."""
    run = start.run
    return ModelRequest(
        run_id=start.run_id,
        tenant=start.tenant,
        uri=run.model,
        layout=run.layout,
        engine=run.engine,
        trainable=run.trainable,
        max_tokens=run.max_tokens,
        dtype=dtype_of(run) if run.quantize_base is None else None,
        room=start.room,
    )


async def resolve_model(start: AnyStart) -> ResolvedModel:
    """Check the run's model against its engine and layout."""
    return await control.do(Resolve.resolve_model, model_request(start))


async def resolve_initial_adapter(start: AnyStart, model: ResolvedModel) -> Artifact | None:
    """Check the adapter that the run begins with, if it names one."""
    run = start.run
    if run.initial_adapter is None:
        return None
    assert isinstance(run.trainable, Lora)  # the request's validation has checked this
    request = adapter_request(start, run.initial_adapter, model, lora=run.trainable)
    return (await control.do(Resolve.resolve_adapter, request)).adapter


def adapter_request(start: AnyStart, uri: str, model: ResolvedModel, /, **more: Any) -> AdapterRequest:
    """Return the request for an adapter that a run puts on a model: its own, unless `more` names another."""
    who = {"run_id": start.run_id, "tenant": start.tenant, "room": start.room}
    on = {"shape": model.shape, "base": model.model, "model": start.run.model}
    on |= {"allow_other_base": start.run.allow_other_base}
    return AdapterRequest(uri=uri, **{**who, **on, **more})


async def resolve_reference(start: AnyStart, uri: str, model: ResolvedModel) -> Artifact:
    """Check the adapter that the run's loss has as its reference."""
    return (await control.do(Resolve.resolve_adapter, adapter_request(start, uri, model, role="reference"))).adapter


def publish_request(
    start: AnyStart,
    model: Artifact,
    checkpoint: CheckpointRef | None,
    report_uri: str | None,
    metrics: dict[str, float],
    step: int | None = None,
) -> PublishRequest:
    """Return the request that publishes the checkpoint of a job. `step`: for a run that publishes several versions."""
    assert checkpoint is not None
    return PublishRequest(
        run_id=start.run_id,
        tenant=start.tenant,
        run=start.run,
        step=step,
        model=model,
        checkpoint=checkpoint,
        report_uri=report_uri,
        metrics=metrics,
    )


async def publish_weights(request: PublishRequest) -> Published:
    """Publish the checkpoint that a job left."""
    return await control.do(Publish.publish, request, policies.PATIENT)
