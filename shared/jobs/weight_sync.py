"""Weight sync in runs and jobs: how a trainer's weights come to the samplers of its run."""

from typing import Literal

from pydantic import Field

from shared.contract import Frozen, Sha256

SyncBackend = Literal["auto", "store", "shared_memory", "delta"]


class WeightSync(Frozen):
    """How a run's samplers get the weights of each step.

    `store`: they load what is published. `shared_memory`: the trainer's process hands them over on one machine, and
    the store is what a sampler falls back to. `delta`: the same, but only changed elements travel, at the cost of a
    copy of the weights beside the trainer. `auto`: shared_memory where trainer and sampler meet on one machine, else
    store.
    """

    backend: SyncBackend = Field(default="auto", description="how samplers get a step's weights")
    bucket_bytes: int = Field(
        default=512 << 20, ge=1 << 10, le=4 << 30, description="bytes that travel at a time; two such buffers are held"
    )
    in_flight: Literal["finish", "continue"] = Field(
        default="finish",
        description="samples under way when weights change: end on the old ones, or go on under the new ones",
    )


def newest_name(run_id: str) -> str:
    """Return what a sampler calls the newest version of a run's policy, where samples go on under it."""
    return f"{run_id}-newest"


class SyncTarget(Frozen):
    """In a job: whom its weights are sent to at its end. `sockets`: paths of samplers' sockets on this machine.

    `version`: the policy's, which only grows. `name`: what samplers call the run's newest version, where samples under
    way go on under it. `waits`: without a name, full weights wait for the samples of a step to end, and are not sent
    at all otherwise.
    """

    sockets: tuple[str, ...] = Field(min_length=1, max_length=64)
    version: int = Field(ge=0)
    backend: Literal["shared_memory", "delta"]
    bucket_bytes: int = Field(ge=1 << 10, le=4 << 30)
    name: str | None = Field(default=None, max_length=512)
    waits: bool = True


class SyncOutcome(Frozen):
    """What became of a sync. `digest` is of the weights that were sent, absent where no sampler took them; `problems`:
    by socket, who has not got them.

    `num_bytes` travelled to each sampler, of `weight_bytes`. `blocked_s`: seconds that the trainer waited for it;
    `duration_s`: until the last sampler had them.
    """

    version: int
    digest: Sha256 | None
    num_bytes: int
    weight_bytes: int
    blocked_s: float
    duration_s: float
    problems: dict[str, str] = Field(default_factory=dict)
