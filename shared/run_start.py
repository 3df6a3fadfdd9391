"""How a run's workflow is started: its name and its input, the same whoever starts it."""

from typing import Any

from shared.runs import DPORun, RLRun, RLStart, Run, RunRecord, RunStart, RunTiming, SFTRun
from shared.settings import Settings

SFT_WORKFLOW = "SFTWorkflow"
RL_WORKFLOW = "RLWorkflow"
# A host that lives takes a job at once; one that has not by so many heartbeat timeouts is taken for dead.
_PICKUP_PER_HEARTBEAT = 1.5


def workflow_of(record: RunRecord, settings: Settings, *, resumed: bool = False) -> tuple[str, RunStart | RLStart]:
    """The name and input of the workflow that does a run."""
    given: dict[str, Any] = {
        "run_id": record.run_id,
        "tenant": record.tenant,
        "timing": timing_of(settings),
        "threads_per_rank": record.threads_per_rank,
        "shape": settings.shape,
        "resumed": resumed,
        "is_tracked": settings.wandb_mode != "disabled",
    }
    match record.run:
        case SFTRun() | DPORun() as run:
            return SFT_WORKFLOW, RunStart(run=run, **given)
        case RLRun() as run:
            return RL_WORKFLOW, RLStart(run=run, serves_sampler=settings.sampling.url is not None, **given)


def timing_of(settings: Settings) -> RunTiming:
    """How patient an installation is with its hosts and workers."""
    return RunTiming(
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        host_pickup_timeout_s=_PICKUP_PER_HEARTBEAT * settings.heartbeat_timeout_s,
        cancel_grace_s=settings.cancel_grace_s,
    )


def threads_per_rank(run: Run, settings: Settings) -> int:
    """What a run that is accepted now keeps for good: CPU threads are part of a bit-identical result."""
    return max(1, settings.cpu_threads // run.layout.world_size)
