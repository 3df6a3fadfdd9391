"""Every transport by its name: its two ends, the devices that it works on, and the choice of one for a sync.

`store` is no transport: samplers load what is published. `delta` is none either: buckets.py makes the contents of
buckets smaller, whatever they travel by. `external` is what an installed package brings (docs/weight_sync.md).
"""

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import NamedTuple

import torch
import torch.distributed as dist

from longshore.training import Transport
from megatron_worker.weight_sync.transports.collective import CollectiveInbound, CollectiveOutbound
from megatron_worker.weight_sync.transports.protocol import Inbound, Outbound, TcpInbound, TcpOutbound
from megatron_worker.weight_sync.transports.same_machine import (
    CudaInbound,
    CudaOutbound,
    SharedMemoryInbound,
    SharedMemoryOutbound,
)
from shared.jobs.job import SyncTarget

ENTRY_POINTS = "longshore.weight_sync"


class Ends(NamedTuple):
    outbound: Callable[[torch.device], Outbound]
    inbound: Callable[[torch.device, int], Inbound]
    devices: tuple[str, ...] = ("cpu", "cuda")


def ends_of(name: Transport) -> Ends:
    """Return a transport's ends. Raises ImportError: there is not one external transport, or it cannot be imported."""
    match name:
        case "shared_memory":
            return Ends(SharedMemoryOutbound, SharedMemoryInbound)
        case "tcp":
            return Ends(TcpOutbound, TcpInbound)
        case "collective":
            return Ends(CollectiveOutbound, CollectiveInbound)
        case "cuda_ipc":
            return Ends(CudaOutbound, CudaInbound, ("cuda",))
        case "external":
            found = tuple(entry_points(group=ENTRY_POINTS))
            if len(found) != 1:
                raise ImportError(f"{len(found)} packages have an entry point in {ENTRY_POINTS}, and one is wanted")
            return Ends(*found[0].load())


def choose(target: SyncTarget) -> Transport:
    """Return the transport of a sync: the named one; else shared_memory if all samplers are on this machine.

    `tcp` is taken if one is not, and some have an address.
    """
    match target.backend:
        case "auto" | "delta":
            are_here = all(os.access(place.socket, os.W_OK) for place in target.places)
            return "tcp" if not are_here and any(place.address for place in target.places) else "shared_memory"
        case named:
            return named


def why_not(name: Transport, device: torch.device) -> str | None:
    """Return why a transport does not work on a device."""
    try:
        ends = ends_of(name)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    if device.type not in ends.devices:
        reason = f"{name} needs {' or '.join(ends.devices)}, and this is {device.type}"
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # torch's own, if there is no CUDA
            return f"{reason} ({str(error).splitlines()[0]})"
        return reason
    if name == "collective" and not (dist.is_nccl_available() if device.type == "cuda" else dist.is_gloo_available()):
        return f"this torch was built without {'NCCL' if device.type == 'cuda' else 'gloo'}"
    return None
