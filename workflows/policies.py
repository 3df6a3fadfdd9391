"""Every queue, timeout and retry of the workflows, in one place."""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from temporalio.common import Priority, RetryPolicy, VersioningBehavior

from shared.jobs.job import WorkerKey
from shared.programs import is_of_a_build
from shared.runs.start import RunTiming

# How Temporal versions long-lived workflows: they move to the current build (service/temporal.py). A worker that was
# started without a build id may not set a behavior.
MOVES = VersioningBehavior.AUTO_UPGRADE if is_of_a_build() else VersioningBehavior.UNSPECIFIED
# Types of errors, by the names that Temporal carries, that are never retried: they would only fail again.
FINAL_ERRORS = ("InvalidInput", "CorruptArtifact", "DiskFull", "SamplerMismatch")
# Kinds of a job's `failed` event that would repeat on another worker.
FINAL_KINDS = frozenset({"invalid_input", "corrupt_artifact", "not_finite", "disk_full"})
# The kind of failure of a job or session that found too little memory, since other runs' slots were using it.
NO_MEMORY_FOR_SLOT = "crowded"
# The kind of failure of a lease of several hosts that were not all free at the same time.
NOT_GATHERED = "not_gathered"
MAX_GATHERINGS = 500
"""Turns that a run may have in vain to lease several hosts; it can be resumed then."""
# Kinds that fail one train step of an RL run but not the run: other groups may be trainable.
STEP_KINDS = frozenset({"invalid_input", "not_finite"})

RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=30),
    maximum_attempts=5,
    non_retryable_error_types=FINAL_ERRORS,
)
ONCE = RetryPolicy(maximum_attempts=1)

# Data activities may take hours for a terabyte. While they work they send a heartbeat each second. After DATA_HEARTBEAT
# without one their host is considered dead, and the activity is retried.
DATA_TIMEOUT = timedelta(hours=24)
DATA_HEARTBEAT = timedelta(seconds=30)
# For the results of training and their metrics for W&B: retried for an hour while the store is away.
PATIENT = RetryPolicy(
    maximum_interval=timedelta(minutes=1), maximum_attempts=60, non_retryable_error_types=FINAL_ERRORS
)
# For a sweep's calls to the web service: retried until the service is back, however long that takes.
ENDLESS = RetryPolicy(maximum_interval=timedelta(minutes=1), non_retryable_error_types=FINAL_ERRORS)
# The largest difference, in nats, between a sampler's log-probabilities of the probe and the trainer's. Measured in
# float32: 1e-5.
PROBE_BOUND = {"float32": 1e-4, "bfloat16": 0.3}
# For records in the store. Without its result a run is lost, so even a full disk is retried.
RECORD_RETRY = RetryPolicy(
    maximum_interval=timedelta(minutes=1),
    maximum_attempts=60,
    non_retryable_error_types=("InvalidInput", "CorruptArtifact"),
)
# Small reads and writes of the store.
RECORD_TIMEOUT = timedelta(minutes=2)
# A row of the database. If the service is killed at it, a run's end waits for this long.
ROW_TIMEOUT = timedelta(seconds=15)
# A lease may wait for a host without limit, and is held until the run ends.
LEASE_TIMEOUT = timedelta(days=365)
WORKER_READY_TIMEOUT_S = 300.0
# vLLM compiles a model, and starts three processes that each import it: minutes on a busy machine.
VLLM_READY_TIMEOUT_S = 1800.0
PREVIEW_TIMEOUT = timedelta(minutes=5)
# A webhook's receiver that does not answer is tried for 28 hours.
WEBHOOK_PATIENCE = timedelta(hours=28)
WEBHOOK_TIMEOUT = timedelta(minutes=2)

MOST_DRAWN = 16
"""With `rollouts.carry_over`, the most steps whose prompts are sampled at a time, each by an activity of its own."""
_LONGEST_PAUSE_S = 60


def lease_queue(shape: str) -> str:
    return f"gpu-{shape}"


def join_queue(shape: str, key: WorkerKey, group: str) -> str:
    """Return the queue on which a host waits for runs to share its worker: of one `WorkerKey` and group of tenants."""
    name = hashlib.sha256(f"{group}\n{key.model_dump_json()}".encode()).hexdigest()
    return f"{lease_queue(shape)}-{name[:32]}"


def sampler_queue(shape: str) -> str:
    return f"sampler-{shape}"


# A control host's activities are divided into pools, depending on what they wait for. Each pool has its own threads and
# queue. Activities that are not listed work on tenants' data, which may take long, on the control queue itself. Those
# of `records` wait only for the store, and no run can end without them: nothing else may ever queue before them.
Pool = Literal["records", "publishing", "exports", "models", "steps", "looks", "sampling", "webhooks", "tracking"]
_MEMBERS: dict[Pool, str] = {
    "records": "record_result begin record_step record_command find_commands drop_commands pass_over recover_steps "
    "find_checkpoint",
    "publishing": "publish publish_best",
    "exports": "export",
    "models": "resolve_model resolve_adapter",
    "steps": "pack_trajectories group_samples grade",
    "looks": "preview grade_one",
    "sampling": "sample draw_share prove_adapter score_samples sleep_sampler wake_sampler admit_groups",
    "webhooks": "deliver give_up_delivery",
    "tracking": "track",
}
_POOLS = {activity: pool for pool, members in _MEMBERS.items() for activity in members.split()}


# On the control queue, runs that are further along go first; otherwise many runs submitted together would all wait
# until the last one is prepared. Lower numbers run sooner (Temporal has 1 to 5, by default 3); tenants with activities
# of equal priority take turns.
_TURNS = {"tokenize": 2, "mix": 2, "mix_prompts": 2, "ask_teacher": 2, "pack": 1}


def turn_of(activity: str) -> Priority:
    """Return the priority of an activity in its queue. Fields that it leaves unset are the workflow's."""
    return Priority(priority_key=_TURNS.get(activity))


def pool_of(activity: str) -> Pool | None:
    """Return the pool of a control host that runs an activity; None for those on the control queue itself."""
    return _POOLS.get(activity)


def activity_name(activity: Callable[..., Any]) -> str:
    """The name under which an activity is registered."""
    return str(getattr(activity, "__temporal_activity_definition").name)


def queue_of(activity: str, control_queue: str) -> str:
    """The queue that control hosts poll for an activity."""
    return pool_queue(pool_of(activity), control_queue)


def pool_queue(pool: Pool | None, control_queue: str) -> str:
    return control_queue if pool is None else f"{control_queue}-{pool}"


def service_queue(control_queue: str) -> str:
    """The web service's own queue: only the service counts tenants' usage."""
    return f"{control_queue}-service"


def webhook_retry(first_s: float) -> RetryPolicy:
    return RetryPolicy(
        initial_interval=timedelta(seconds=first_s),
        backoff_coefficient=4.0,
        maximum_interval=timedelta(hours=6),
        non_retryable_error_types=("InvalidInput",),
    )


def heartbeat_timeout(timing: RunTiming) -> timedelta:
    return timedelta(seconds=timing.heartbeat_timeout_s)


def pickup_timeout(timing: RunTiming) -> timedelta:
    return timedelta(seconds=timing.host_pickup_timeout_s)


def pause_before_lease(num_losses: int) -> timedelta:
    """Back off: no pause before the first two leases, then 2 s, 4 s, ... up to a minute."""
    return timedelta(seconds=min(_LONGEST_PAUSE_S, 2 ** (num_losses - 1)) if num_losses > 1 else 0)
