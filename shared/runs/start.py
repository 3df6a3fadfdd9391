"""Start of a run's workflow: its name and its input, for the service and for schedules."""

import hashlib
import secrets
from typing import Any

from pydantic import Field

from longshore.fields import Artifact, Frozen
from longshore.layout import EngineName, Layout
from longshore.training import DtypeChoice, Lora, SessionRun
from shared.errors import InvalidInput, NotFound
from shared.jobs.layout import check_ranks
from shared.models.shape import ModelShape
from shared.runs.requests import (
    FIRST_TENANT,
    DatasetRun,
    DPORun,
    Precision,
    RLRun,
    Run,
    RunId,
    RunRecord,
    SFTRun,
    Tenant,
)
from shared.runs.rollouts import Rollouts
from shared.runs.sessions import SessionState
from shared.runs.status import RLState
from shared.settings import QuotaSettings, Settings
from shared.storage.host_states import read_fast_bf16
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

SFT_WORKFLOW = "SFTWorkflow"
RL_WORKFLOW = "RLWorkflow"
SESSION_WORKFLOW = "SessionWorkflow"
_VLLM_MAX_RANK = 512
# A living host takes a job at once. One that has not after so many heartbeat timeouts is considered dead.
_PICKUP_PER_HEARTBEAT = 1.5


class RunTiming(Frozen):
    """Timeouts of the control plane for this run; workflows may not read settings, so they travel with the run."""

    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    host_pickup_timeout_s: float = Field(default=15.0, gt=0, description="until a leased host must take its job")
    cancel_grace_s: float = Field(default=60.0, gt=0, description="from a cancel to the kill of the process group")
    max_losses: int = Field(default=5, ge=1, description="workers lost in a row without a new checkpoint")


class Start(Frozen):
    """The input of every run's workflow."""

    run_id: RunId
    tenant: Tenant = FIRST_TENANT
    timing: RunTiming = RunTiming()
    threads_per_rank: int = Field(default=1, ge=1)
    shape: str = Field(default="cpu", description="hosts of this shape are asked: the lease queue is gpu-<shape>")
    start_id: str = Field(default="", pattern=r"^[0-9a-f]*$", description="this start's own: good for one workflow")
    resumed: bool = False
    goes_on_from: str | None = Field(default=None, description="of a resumed run: its result's SHA-256, if it has one")
    is_tracked: bool = Field(default=True, description="W&B gets the run's metrics")
    shares_with: str | None = Field(
        default=None, description="the group of runs that its adapters may be trained beside, on one worker"
    )
    tenant_weight: float = Field(default=1.0, gt=0, description="the tenant's part of a shared worker's time")


class RunStart(Start):
    """The input of the workflow of a run on a dataset."""

    run: DatasetRun


class RLStart(Start):
    """The input of an RL run's workflow."""

    run: RLRun
    serves_sampler: bool = Field(
        default=False, description="the installation has a sampling server: no sampler is leased where none is named"
    )
    state: RLState | None = None


class SessionStart(Start):
    """The input of a session's workflow."""

    run: SessionRun
    state: SessionState | None = None


AnyStart = RunStart | RLStart | SessionStart


def workflow_of(
    record: RunRecord,
    settings: Settings,
    quotas: QuotaSettings,
    *,
    start_id: str | None = None,
    resumed: bool = False,
    goes_on_from: str | None = None,
) -> tuple[str, AnyStart]:
    """The name and input of the workflow that does a run.

    Args:
        quotas: the tenant's: whose adapters may be trained beside the run's, and its part of a worker's time.
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
        "shares_with": {"all": "", "tenant": record.tenant, "none": None}[quotas.worker_sharing or "tenant"],
        "tenant_weight": quotas.worker_weight or 1.0,
    }
    match record.run:
        case SFTRun() | DPORun() as run:
            return SFT_WORKFLOW, RunStart(run=run, **given)
        case SessionRun() as run:
            return SESSION_WORKFLOW, SessionStart(run=run, **given)
        case RLRun() as run:
            return RL_WORKFLOW, RLStart(run=run, serves_sampler=settings.sampling.url is not None, **given)


def result_sha256(store: ObjectStore, run_id: str) -> str | None:
    """Return the SHA-256 of the run's result in the store; None while it has not ended."""
    try:
        return hashlib.sha256(store.get_bytes(RunKeys(run_id).result)).hexdigest()
    except NotFound:
        return None


def check_startable(run: Run, settings: Settings, below: str = "") -> None:
    """Refuse what no host could start, data-parallel ranks that would never have anything to do, and what one server
    behind a URL does not do where it samples: full training, several samplers, to sleep, or to be a host's vLLM.

    Args:
        below: where the run's fields stand in the request, such as `run.`.

    Raises:
        InvalidInput: names the field and the rule.
    """
    check_ranks(run.layout, settings.max_ranks, below)
    match run:
        case SFTRun(batch_size=int(examples)) | DPORun(batch_size=int(examples)):
            examples_named = f"batch_size {examples}"
        case RLRun(rollouts=Rollouts() as rollouts):
            if run.trainable.kind == "full" and settings.sampling.url is not None:
                rule = "this installation's sampler is a server behind a URL, which does not take whole weights"
                raise InvalidInput(f"{rule}: train a lora", f"{below}trainable")
            if (rollouts.samplers > 1 or rollouts.colocate) and settings.sampling.url is not None:
                rule = "this installation's sampler is a server behind a URL"
                if rollouts.colocate:
                    raise InvalidInput(f"{rule}, which does not sleep", f"{below}rollouts.colocate")
                raise InvalidInput(f"{rule}: samplers may be 1 at most", f"{below}rollouts.samplers")
            if rollouts.weight_sync.in_flight == "continue" and settings.sampling.url is not None:
                rule = "this installation's sampler is a server behind a URL: samples end on the weights they began on"
                raise InvalidInput(rule, f"{below}rollouts.weight_sync.in_flight")
            backend, is_served = rollouts.weight_sync.backend, rollouts.sampler_url or settings.sampling.url
            if backend not in ("auto", "store") and is_served is not None:
                rule = f"a sampler behind a URL loads weights from the store: {backend} needs one that a host leases"
                raise InvalidInput(f"{rule}; possible are auto and store", f"{below}rollouts.weight_sync.backend")
            if rollouts.sampler == "vllm" and (reason := _why_not_vllm(run, rollouts, settings)):
                raise InvalidInput(reason, f"{below}rollouts.sampler")
            examples = rollouts.prompts_per_step * rollouts.group_size
            examples_named = f"the {examples} samples of a step"
        case _:
            return
    if run.layout.dp > examples:
        rule = f"dp={run.layout.dp} ranks would share out {examples_named}: dp may be {examples} at most"
        raise InvalidInput(rule, f"{below}layout.dp")


def _why_not_vllm(run: RLRun, rollouts: Rollouts, settings: Settings) -> str | None:
    """Return why no host starts a vLLM for a run, if none does."""
    if rollouts.sampler_url is not None:
        return "vllm is started by a sampler host: drop it, or sampler_url"
    if settings.sampling.url is not None:
        return "this installation's sampler is a server behind a URL, and no host starts another: leave it out"
    if isinstance(run.trainable, Lora) and run.trainable.rank > _VLLM_MAX_RANK:
        return f"vllm serves adapters of a rank up to {_VLLM_MAX_RANK}: lower trainable.rank"
    if rollouts.colocate:
        return "vllm for CPUs does not sleep, and its sleep on GPUs was not tried: drop colocate, or sample with own"
    if rollouts.weight_sync.backend not in ("auto", "store"):
        return "vllm loads from the store: weight_sync.backend may be auto or store"
    return None


def timing_of(settings: Settings) -> RunTiming:
    """Return the timeouts of an installation for its hosts and workers."""
    return RunTiming(
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        host_pickup_timeout_s=_PICKUP_PER_HEARTBEAT * settings.heartbeat_timeout_s,
        cancel_grace_s=settings.cancel_grace_s,
    )


def threads_per_rank(run: Run, settings: Settings) -> int:
    """Return the CPU threads of each rank, which a run keeps for good: they are part of a bit-identical result."""
    return max(1, settings.cpu_threads // run.layout.world_size)


def precision_of(asked: DtypeChoice, settings: Settings, store: ObjectStore) -> Precision:
    """Return the precision of a run that is accepted now: what it asks for, else by what the GPU hosts have said."""
    if asked == "auto" and settings.dtype != "auto":
        return Precision(dtype=settings.dtype, reason="it is this installation's LONGSHORE_DTYPE")
    is_fast = read_fast_bf16(store, settings.shape)
    if asked == "auto" and is_fast:
        return Precision(dtype="bfloat16", reason="it is fast on the GPU hosts")
    if asked == "auto":
        slow, unknown = "bfloat16 is slow on the GPU hosts", "no GPU host has said yet whether bfloat16 is fast there"
        return Precision(dtype="float32", reason=unknown if is_fast is None else slow)
    notice = None
    if asked == "bfloat16" and is_fast is False:
        notice = "bfloat16 is slow on the GPU hosts: on CPUs it takes up to 100 times as long as float32"
    if asked == "float32" and is_fast:
        notice = "bfloat16 is fast on the GPU hosts, and takes half of the memory for weights: float32 was asked for"
    return Precision(dtype=asked, notice=notice)


class ModelRequest(Frozen):
    """A model as a tenant's user names it, and the layout and engine that are to hold it.

    `run_id`: the run that uses the model. Its later executions must find the same files as its first one.
    """

    uri: str
    tenant: Tenant
    run_id: RunId | None = None
    layout: Layout = Layout()
    engine: EngineName = "megatron"


class ResolvedModel(Frozen):
    """The model's files: config, safetensors, tokenizer, chat template, generation config."""

    model: Artifact
    shape: ModelShape
