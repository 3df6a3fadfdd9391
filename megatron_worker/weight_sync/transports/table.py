"""Every transport by its name: its two ends, the devices that it works on, and the choice of one for a sync.

`store` is no transport: samplers load what is published. `delta` is none either: buckets.py makes the contents of
buckets smaller, whatever they travel by.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_worker.weight_sync.transports import pulled
from megatron_worker.weight_sync.transports.collective import CollectiveInbound, CollectiveOutbound
from megatron_worker.weight_sync.transports.protocol import Inbound, Outbound
from megatron_worker.weight_sync.transports.pulled import MakeEngine, PulledInbound, PulledOutbound
from megatron_worker.weight_sync.transports.same_machine import (
    CudaInbound,
    CudaOutbound,
    SharedMemoryInbound,
    SharedMemoryOutbound,
)
from shared.jobs.job import SyncTarget, Transport


@dataclass(frozen=True)
class Ends:
    """`is_missing`: says what cannot be imported."""

    outbound: Callable[[torch.device], Outbound]
    inbound: Callable[[torch.device], Inbound]
    devices: tuple[str, ...]
    is_missing: Callable[[], str | None] = lambda: None


def _pulled(make: MakeEngine, load: Callable[[], object]) -> Ends:
    return Ends(partial(PulledOutbound, make), partial(PulledInbound, make), ("cpu",), partial(_import_error, load))


def _import_error(load: Callable[[], object]) -> str | None:
    """Return why a package cannot be imported, in the words of the import."""
    try:
        load()
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


def ends_of(name: Transport) -> Ends:
    match name:
        case "shared_memory":
            return Ends(SharedMemoryOutbound, SharedMemoryInbound, ("cpu", "cuda"))
        case "cuda_ipc":
            return Ends(CudaOutbound, CudaInbound, ("cuda",))
        case "collective":
            return Ends(CollectiveOutbound, CollectiveInbound, ("cpu", "cuda"))
        case "nixl":
            return _pulled(pulled.NixlEngine, pulled.nixl_api)
        case "mooncake":
            return _pulled(pulled.MooncakeEngine, pulled.mooncake_api)


def choose(target: SyncTarget) -> Transport:
    """Return the transport of a sync: the named one; else shared_memory if all samplers are on this machine.

    `collective` is taken if one is not, and some have an address. Its group uses gloo or NCCL by the device.
    Experimental transports are taken only if named.
    """
    match target.backend:
        case "auto" | "delta":
            are_here = all(os.access(place.socket, os.W_OK) for place in target.places)
            return "collective" if not are_here and any(place.address for place in target.places) else "shared_memory"
        case named:
            return named


def why_not(name: Transport, device: torch.device) -> str | None:
    """Return why a transport does not work on a device."""
    ends = ends_of(name)
    if device.type not in ends.devices:
        return f"{name} needs {' or '.join(ends.devices)}, and this is {device.type}{_without_cuda()}"
    if name == "collective" and not (dist.is_nccl_available() if device.type == "cuda" else dist.is_gloo_available()):
        return f"this torch was built without {'NCCL' if device.type == 'cuda' else 'gloo'}"
    return ends.is_missing()


def _without_cuda() -> str:
    """Return torch's error about CUDA if there is none."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f" ({str(error).splitlines()[0]})"
    return ""
