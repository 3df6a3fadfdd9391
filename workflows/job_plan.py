"""From what a user asked for to what a worker does: one pure function."""

import math

from shared.jobs import Adam, Artifact, Checkpointing, Evaluation, JobPlan, PackedData, Schedule
from shared.runs import RunStart

ONLY_JOB = "000001"


def sft_job(
    start: RunStart,
    *,
    model: Artifact,
    adapter: Artifact | None,
    data: PackedData,
    eval_data: PackedData | None,
    num_steps: int,
) -> JobPlan:
    """The one job of an SFT run. The same run gives the same plan, however often it is leased."""
    run = start.run
    return JobPlan(
        run_id=start.run_id,
        job_id=ONLY_JOB,
        model=model,
        layout=run.layout,
        dtype=run.dtype,
        threads_per_rank=start.threads_per_rank,
        trainable=run.trainable,
        initial_adapter=adapter,
        data=data,
        num_steps=num_steps,
        optimizer=Adam(weight_decay=run.weight_decay, clip_norm=run.clip_norm),
        schedule=Schedule(kind=run.schedule, learning_rate=run.learning_rate, warmup_steps=run.warmup_steps),
        evaluation=Evaluation(
            data=eval_data,
            every_steps=run.eval_every,
            num_samples=run.num_samples if eval_data else 0,
            sample_tokens=run.sample_tokens,
        ),
        checkpointing=Checkpointing(
            every_steps=run.checkpoint_every or max(1, math.ceil(num_steps / 10)), keep=run.keep_checkpoints
        ),
        seed=run.seed,
    )
