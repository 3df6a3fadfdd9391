"""Files between a host and its worker or sampler other than jobs: the process's identity, and its leases."""

from typing import Annotated, Literal, Self

from pydantic import Field

from longshore.fields import Artifact, Frozen
from longshore.layout import EngineName, Layout
from longshore.training import Dtype, OptimizerStates, Quantization
from shared.fence import Fence
from shared.field_rules import only
from shared.jobs.job import WorkerPlan
from shared.storage.host_states import HostAddress


class WorkerKey(Frozen):
    """Properties that a worker process has for life. A released worker may serve another run with an equal key."""

    model: Artifact
    layout: Layout
    dtype: Dtype
    quantize_base: Quantization | None = None
    optimizer_states: OptimizerStates = "float32"
    engine: EngineName = "megatron"
    threads_per_rank: int = 1

    @classmethod
    def of(cls, plan: WorkerPlan) -> Self:
        """Return the key of the worker that a plan needs."""
        return cls.model_validate(plan, from_attributes=True)


SamplerKind = Annotated[
    Literal["own", "vllm"],
    only("own", "vllm", words="a sampler is own or vllm; sglang, which needs a GPU here, was never tried"),
]
"""The program of a sampler that a host starts: Longshore's own, or a vLLM server."""


class SamplerKey(Frozen):
    """Properties that a sampler process has for life.

    On one machine, equal keys of Longshore's own sampler give bit-identical samples.
    """

    model: Artifact
    sampler: SamplerKind = "own"
    dtype: Dtype = "float32"
    threads: int = Field(default=1, ge=1, description="CPU threads")
    slots: int = Field(default=32, ge=1, description="sequences a step")
    max_model_len: int = Field(default=4096, ge=2, description="prompt and completion together, in tokens")
    max_lora_rank: int = Field(default=0, ge=0, description="of vLLM: the highest rank of its adapters")
    tells_routes: bool = Field(default=False, description="of vLLM: it returns the experts of each token")


ProcessKey = WorkerKey | SamplerKey


class WorkerRecord(Frozen):
    """`worker.json`, written by the host at launch. If a host is killed, the next one finds and ends its worker by it.

    A process is identified by pid and start time (seconds since 1970), since pids are reused. Every rank has the
    environment variable `LONGSHORE_WORKER_ID=<worker_id>`. `pid` is 0 until the worker has been started.
    """

    worker_id: str
    pid: int
    started_at: float
    host_pid: int
    host_started_at: float
    key: ProcessKey


class LeaseMark(Frozen):
    """`leases/<run>.json`: a lease that the worker serves. A job of this run with an older fence is refused."""

    run_id: str
    fence: Fence


WORKER_ID_VARIABLE = "LONGSHORE_WORKER_ID"


class GangLeader(Frozen):
    """Signal to the workflow: the first of several machines has started its ranks, which wait for the others'.

    `worker_id`: of the first machine's worker. `at`: its address for the other hosts.
    """

    fence: Fence
    worker_id: str
    at: HostAddress


class LeaseGrant(Frozen):
    """Signal to the workflow: the worker is up, and jobs for it go to the host's own queue.

    `joined`: the worker already trained other runs. A sampler also has addresses for weights: `weights_socket`, a
    path for trainers on its machine, and `weights_address`, `host:port` for trainers on other machines. `host_socket`
    and `host_address`: the addresses of the sampler's host for the web service; the latter uses mutual TLS.
    """

    fence: Fence
    host_queue: str
    worker_id: str
    joined: bool = False
    weights_socket: str | None = None
    weights_address: str | None = None
    host_socket: str | None = None
    host_address: str | None = None
