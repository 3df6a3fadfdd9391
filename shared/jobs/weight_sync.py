"""Weight sync in runs and jobs: sends a trainer's weights to the samplers of its run."""

import hmac
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from longshore.fields import Frozen, Sha256, pattern
from shared.settings import ExperimentalTransport

Transport = Literal["shared_memory", "collective", "cuda_ipc", ExperimentalTransport]
EXPERIMENTAL: tuple[ExperimentalTransport, ...] = get_args(ExperimentalTransport)
"""Transports that a host takes part in only where its operator has allowed them (`experimental_transports`)."""
OVER_TCP: tuple[Transport, ...] = ("collective", *EXPERIMENTAL)
"""Transports whose samplers are reached at an address: both ends then listen where the other one reaches them."""
_Backend = Literal["auto", "store", "delta", Transport]
_OTHERS = {"hccl": "torch_npu"}
"""Engines of transport that other trainers have, and the packages that bring them."""


def _possible(value: object) -> object:
    """Refuse an unknown backend, and name the known ones."""
    names = get_args(_Backend)
    if value in names:
        return value
    why = "no such backend"
    if isinstance(value, str) and value in _OTHERS:
        is_here = find_spec(_OTHERS[value]) is not None
        why = f"{value} is not supported" + ("" if is_here else f" (No module named '{_OTHERS[value]}')")
    raise PydanticCustomError("not_possible", "{why}: possible are {names}", {"why": why, "names": ", ".join(names)})


SyncBackend = Annotated[_Backend, BeforeValidator(_possible)]
PROFILE_PATH = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,3}$"


class WeightSync(Frozen):
    """How a run's samplers get the weights of each step.

    `store`: samplers load the published weights; every other backend falls back to this. `shared_memory`: the trainer's
    process hands the weights over on one machine. `collective`: it broadcasts them to samplers on other machines whose
    hosts have an address for it; gloo on the CPU, NCCL on CUDA. `cuda_ipc`: from one CUDA device's memory, on one
    machine. `nixl`, `mooncake`: samplers read the trainer's memory through these engines; experimental, tried only on
    CPUs, and only if the operators of both hosts allow them. `delta`: like auto, but only changed elements are sent;
    each trainer rank keeps a copy of its weights for that. `auto`: shared_memory if trainer and samplers are on one
    machine, else collective if there is an address, else store.
    """

    backend: SyncBackend = Field(default="auto", description="how samplers get a step's weights")
    bucket_bytes: int = Field(
        default=512 << 20, ge=1 << 10, le=4 << 30, description="bytes sent at a time; two such buffers are allocated"
    )
    in_flight: Literal["finish", "continue"] = Field(
        default="finish",
        description="samples in progress when weights change: finish with the old ones, or continue with the new ones",
    )

    profile_path: str | None = pattern(
        PROFILE_PATH,
        "a relative path of letters, digits and ._-, of at most four parts, none of which begins with a dot or a dash",
        default=None,
        description="a trace of each sync's phases, in `profiles/<run>/` below the root of the trainer's host",
    )


def newest_name(run_id: str) -> str:
    """Return the name under which a sampler serves the newest version of a run's policy."""
    return f"{run_id}-newest"


class SyncPlace(Frozen):
    """A sampler's address for a trainer: a socket's path on its own machine, and `host:port` for other machines."""

    socket: str
    address: str | None = None


class SyncTarget(Frozen):
    """The samplers that a job sends its weights to at its end. `sockets`: paths of their sockets on their machines.

    `addresses`: the same samplers' addresses for other machines, if they have one. `version`: the policy's, which only
    grows. `name`: the samplers' name for the run's newest version, if samples in progress continue with it. `waits`:
    without a name, full weights wait for samples in progress to end; if false, they are not sent while there are any.
    """

    sockets: tuple[str, ...] = Field(min_length=1, max_length=64)
    addresses: tuple[str | None, ...] = Field(default=(), max_length=64)
    version: int = Field(ge=0)
    backend: Literal["auto", "delta", Transport]
    bucket_bytes: int = Field(ge=1 << 10, le=4 << 30)
    name: str | None = Field(default=None, max_length=512)
    waits: bool = True
    profile_path: str | None = Field(default=None, pattern=PROFILE_PATH)

    @property
    def places(self) -> tuple[SyncPlace, ...]:
        addresses = self.addresses or (None,) * len(self.sockets)
        return tuple(SyncPlace(socket=s, address=a) for s, a in zip(self.sockets, addresses, strict=True))


class SyncAccess(Frozen):
    """A file next to a job's log that the trainer's host writes for its worker only: the run's secret, in hexadecimal,
    and the file that traces are appended to.

    `target`: where weights are sent if the plan names no target: the sampler that answers users' questions. The host
    rewrites the file when that changes.
    """

    secret: Sha256 | None = None
    profile: str | None = None
    target: SyncTarget | None = None

    @staticmethod
    def path(log: str) -> Path:
        return Path(log).with_name("sync_access.json")

    @classmethod
    def read(cls, log: str) -> "SyncAccess":
        """Read the file next to a log. It is absent if a worker is started by hand: then all fields are empty."""
        path = cls.path(log)
        return cls.model_validate_json(path.read_bytes()) if path.exists() else cls()


class SyncOutcome(Frozen):
    """The result of a sync. `digest`: of the weights that were sent, absent if no sampler took them. `problems`: the
    errors of samplers that did not get them, by socket. `transport`: the one used. `profile_problem`: why there is no
    trace.

    `num_bytes` were sent to each sampler, of `weight_bytes`. `blocked_s`: seconds that the trainer waited;
    `duration_s`: until the last sampler had the weights.
    """

    version: int
    digest: Sha256 | None
    num_bytes: int
    weight_bytes: int
    blocked_s: float
    duration_s: float
    problems: dict[str, str] = Field(default_factory=dict)
    transport: Transport | None = None
    profile_problem: str | None = None


def secret_of_run(key: bytes, run_id: str) -> bytes:
    """Return the secret that a run's trainer uses to authenticate to a sampler that knows `key`."""
    return hmac.digest(key, b"run " + run_id.encode(), "sha256")
