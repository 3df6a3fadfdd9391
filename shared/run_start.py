"""How a run's workflow is started: its name and its input, the same whoever starts it."""

import hashlib
import secrets
from typing import Any

from shared.errors import InvalidInput, NotFound
from shared.layout import check_ranks
from shared.paths import RunKeys
from shared.runs import DPORun, RLRun, RLStart, Rollouts, Run, RunRecord, RunStart, RunTiming, SFTRun
from shared.settings import Settings
from shared.store import ObjectStore

SFT_WORKFLOW = "SFTWorkflow"
RL_WORKFLOW = "RLWorkflow"
# A host that lives takes a job at once; one that has not by so many heartbeat timeouts is taken for dead.
_PICKUP_PER_HEARTBEAT = 1.5


def workflow_of(
    record: RunRecord,
    settings: Settings,
    *,
    start_id: str | None = None,
    resumed: bool = False,
    goes_on_from: str | None = None,
) -> tuple[str, RunStart | RLStart]:
    """The name and input of the workflow that does a run.

    Args:
        start_id: one that nobody has used; a new one if absent.
        goes_on_from: of a resumed run, what `result_sha256` says.
    """
    given: dict[str, Any] = {
        "run_id": record.run_id,
        "tenant": record.tenant,
        "timing": timing_of(settings),
        "threads_per_rank": record.threads_per_rank,
        "shape": settings.shape,
        "start_id": start_id or secrets.token_hex(8),
        "resumed": resumed,
        "goes_on_from": goes_on_from,
        "is_tracked": settings.wandb_mode != "disabled",
    }
    match record.run:
        case SFTRun() | DPORun() as run:
            return SFT_WORKFLOW, RunStart(run=run, **given)
        case RLRun() as run:
            return RL_WORKFLOW, RLStart(run=run, serves_sampler=settings.sampling.url is not None, **given)


def result_sha256(store: ObjectStore, run_id: str) -> str | None:
    """Which of a run's ends stands in the store; None while it has not ended."""
    try:
        return hashlib.sha256(store.get_bytes(RunKeys(run_id).result)).hexdigest()
    except NotFound:
        return None


def check_parallelism(run: Run, settings: Settings, below: str = "") -> None:
    """Refuse what no host could start, and data-parallel ranks that would never have anything to do.

    Args:
        below: where the run's fields stand in the request, such as `run.`.

    Raises:
        InvalidInput: names the field of the layout and the rule.
    """
    check_ranks(run.layout, settings.max_ranks, below)
    match run:
        case SFTRun(batch_size=int(examples)) | DPORun(batch_size=int(examples)):
            told = f"batch_size {examples}"
        case RLRun(rollouts=Rollouts() as rollouts):
            examples = rollouts.prompts_per_step * rollouts.group_size
            told = f"the {examples} samples of a step"
        case _:
            return
    if run.layout.dp > examples:
        rule = f"dp={run.layout.dp} ranks would share out {told}: dp may be {examples} at most"
        raise InvalidInput(rule, f"{below}layout.dp")


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
