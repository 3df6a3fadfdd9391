"""Start of a run's workflow: its name and its input, for the service and for schedules."""

import hashlib
import secrets
from typing import Any

from pydantic import Field

from longshore.accounts import QuotaSettings, Room
from longshore.dataset_runs import DatasetRun, DistillRun, DPORun, RewardRun, SFTRun
from longshore.fields import Artifact, Frozen, added
from longshore.runs import FIRST_TENANT, RLRun, Run, RunId, RunRecord, Tenant
from longshore.training import Dtype, EngineName, Layout, SessionRun, Trainable
from longshore.views import _TYPES, Export, RunStatus
from shared.errors import NotFound
from shared.models.shape import ModelShape
from shared.runs.status import RLState
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

# --- Messages about a session between service, workflow and hosts ---
# Commands and results themselves are in the store.

MAX_WAITING = 256
"""The most commands of a session that may wait; further ones are refused, for the client to send again later."""
MAX_NUMBER = 99_999_999
MOST_TOLD_BYTES = 64 << 10
"""Larger commands are not sent to a session's host, which reads them from the store (activities/hosts/session.py)."""


class CommandArrived(Frozen):
    """Tells a session's workflow that the command of this number has been stored, and those of the others, too."""

    number: int = Field(ge=1, le=MAX_NUMBER)
    also: tuple[int, ...] = added(())


class SessionState(Frozen):
    """The state that a session's workflow passes to its next execution, whose history starts empty.

    Attributes:
        next: the number of the next command to execute, or a later one.
        waiting: the numbers of commands that are known to wait.
    """

    model: Artifact
    shape: ModelShape
    adapter: Artifact | None = None
    next: int = 1
    waiting: tuple[int, ...] = ()
    closing: bool = False
    epoch: int = 0
    status: RunStatus


# --- Models ---
# A run's model, as its user names it and as it was found; and the formats that published weights are exported to.


class ModelRequest(Frozen):
    """A model as a tenant's user names it, the layout and engine that hold it, and the longest sequence.

    `run_id`: the run that uses the model. Its later executions must find the same files as its first one. `trainable`:
    what it trains. `any_family`: also accept families that only the engine fsdp may train, if nothing is trained here.
    `dtype`: the precision of the weights on a worker; None: not the run's, or no worker holds them.
    """

    uri: str
    tenant: Tenant
    run_id: RunId | None = None
    layout: Layout = Layout()
    engine: EngineName = "megatron"
    trainable: Trainable | None = None
    max_tokens: int | None = None
    any_family: bool = False
    dtype: Dtype | None = None
    room: Room = Room()


class ResolvedModel(Frozen):
    """The model's files: config, safetensors, tokenizer, chat template, generation config."""

    model: Artifact
    shape: ModelShape


LABELS = ("merged", "fp8", *(f"{name}-{each}" for name, types in _TYPES.items() for each in types))


class ExportRequest(Frozen):
    """The work of an export. `key`: the artifact's key in the store; `name`: the exported name, with its version."""

    key: str
    name: str
    tenant: Tenant
    model: Artifact
    adapter: Artifact | None
    export: Export
    room: Room = Room()


SFT_WORKFLOW = "SFTWorkflow"
RL_WORKFLOW = "RLWorkflow"
SESSION_WORKFLOW = "SessionWorkflow"
# A living host takes a job at once. One that has not after this many heartbeat timeouts is considered dead.
_PICKUP_PER_HEARTBEAT = 1.5


class RunTiming(Frozen):
    """Timeouts of the control plane for this run. Workflows may not read settings, so the run's input has them."""

    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    host_pickup_timeout_s: float = Field(
        default=15.0, gt=0, description="seconds until a leased host must take its job"
    )
    cancel_grace_s: float = Field(
        default=60.0, gt=0, description="seconds from a cancel to the kill of the process group"
    )
    gather_patience_s: float = Field(default=600.0, gt=0, description="seconds to wait for enough free hosts")
    max_losses: int = Field(default=5, ge=1, description="workers lost in a row without a new checkpoint")


class Start(Frozen):
    """The input of every run's workflow."""

    run_id: RunId
    tenant: Tenant = FIRST_TENANT
    timing: RunTiming = RunTiming()
    threads_per_rank: int = Field(default=1, ge=1)
    shape: str = Field(default="cpu", description="the shape of the hosts to lease: the lease queue is gpu-<shape>")
    start_id: str = Field(
        default="", pattern=r"^[0-9a-f]*$", description="unique to this start: one workflow may use it"
    )
    resumed: bool = False
    goes_on_from: str | None = Field(default=None, description="of a resumed run: the SHA-256 of its result, if any")
    is_tracked: bool = Field(default=True, description="W&B gets the run's metrics")
    shares_with: str | None = Field(
        default=None, description="the group of runs that may train their adapters on the same worker"
    )
    tenant_weight: float = Field(default=1.0, gt=0, description="the tenant's weight for a shared worker's time")
    room: Room = Field(default=Room(), description="for what is written before the run's row tells it anew")


class RunStart(Start):
    """The input of the workflow of a run on a dataset. `serves_sampler`: as of an RL run."""

    run: DatasetRun
    serves_sampler: bool = added(False)


class RLStart(Start):
    """The input of an RL run's workflow."""

    run: RLRun
    serves_sampler: bool = Field(
        default=False, description="the installation has a sampling server: none is leased unless the run names one"
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
    room: Room,
    *,
    start_id: str | None = None,
    resumed: bool = False,
    goes_on_from: str | None = None,
) -> tuple[str, AnyStart]:
    """The name and input of the workflow that does a run.

    Args:
        quotas: the tenant's: which runs may share the run's worker, and the tenant's weight for a worker's time.
        start_id: an unused id; a new one if absent.
        goes_on_from: for a resumed run, its `result_sha256`.
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
        "room": room,
    }
    match record.run:
        case SFTRun() | DPORun() | DistillRun() | RewardRun() as run:
            return SFT_WORKFLOW, RunStart(run=run, serves_sampler=settings.sampling.url is not None, **given)
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


def timing_of(settings: Settings) -> RunTiming:
    """Return the timeouts of an installation for its hosts and workers."""
    return RunTiming(
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        host_pickup_timeout_s=_PICKUP_PER_HEARTBEAT * settings.heartbeat_timeout_s,
        cancel_grace_s=settings.cancel_grace_s,
        gather_patience_s=settings.gather_patience_s,
    )


def threads_per_rank(run: Run, settings: Settings) -> int:
    """Return the CPU threads of each rank, which never change for a run: bit-identical results depend on them."""
    return max(1, settings.cpu_threads // run.layout.ranks_per_node)
