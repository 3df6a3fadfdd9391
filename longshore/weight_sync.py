"""Weight sync of runs and jobs: how a trainer's weights get to the samplers of its run."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from longshore.fields import Frozen, Sha256, only, pattern

Transport = Literal["shared_memory", "tcp", "collective", "cuda_ipc", "external"]
OVER_TCP: tuple[Transport, ...] = ("tcp", "collective", "external")
"""Transports whose samplers are reached at an address."""
_Backend = Literal["auto", "store", "delta", Transport]


def _possible(value: object) -> object:
    """Refuse an unknown backend, and name the known ones."""
    if (names := get_args(_Backend)) and value in names:
        return value
    raise PydanticCustomError("not_possible", "no such backend: possible are {names}", {"names": ", ".join(names)})


SyncBackend = Annotated[_Backend, BeforeValidator(_possible)]
PROFILE_PATH = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){0,3}$"


class WeightSync(Frozen):
    """How a run's samplers get the weights of each step.

    `store`: samplers load the published weights; every other backend falls back to this. `shared_memory`: the trainer's
    process hands the weights over on one machine. `tcp`: it sends them to samplers on other machines whose hosts have
    an address for it. `collective`: it broadcasts them to those; by NCCL on CUDA, by gloo on the CPU. `cuda_ipc`: from
    one CUDA device's memory, on one machine. `external`: by a package that is installed on both hosts, if their
    operators allow it. `delta`: like auto, but only changed elements are sent; each trainer rank keeps a copy of its
    weights for that. `auto`: shared_memory if trainer and samplers are on one machine, else tcp if there is an address,
    else store.
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


SamplerKind = Annotated[
    Literal["own", "vllm"],
    only("own", "vllm", words="a sampler is own or vllm; sglang, which needs a GPU here, was never tried"),
]
"""The program of a sampler that a host starts: Longshore's own, or a vLLM server."""
