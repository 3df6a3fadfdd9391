"""The process group of an engine's ranks, of the launcher or of one process; and a second group."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from longshore.layout import Layout
from shared.programs import INTERFACE_VARIABLE, NODE_VARIABLE, RENDEZVOUS_VARIABLE
from shared.storage.files import write_atomically

_LOOPBACK, _HOST = "lo" if sys.platform == "linux" else "lo0", "127.0.0.1"
_POLL_S = 0.02
_PATIENCE = timedelta(minutes=30)
_SIDE_PATIENCE = timedelta(
    hours=6
)  # the longest that a thread may wait for its next turn; a rank that dies ends the worker


def backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def start_group(backend: str) -> Store:
    """Join the other ranks of our launcher, or of torchrun; without either, be a group of one.

    Returns the ranks' common store.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # Other launchers, of several machines, may say nothing of their ranks on this one.
    if world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        _listen_on(_LOOPBACK)
    elif NODE_VARIABLE in os.environ:
        _listen_on(os.environ.get(INTERFACE_VARIABLE, _LOOPBACK))
    store = _meeting_place(rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    return store


def _listen_on(interface: str) -> None:
    """Make gloo and NCCL listen on an interface: by default they listen where the machine's name leads."""
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _meeting_place(rank: int, world_size: int) -> Store:
    if world_size == 1:
        return dist.HashStore()
    if (path := os.environ.get(RENDEZVOUS_VARIABLE)) is None:
        store: Store
        store, _, _ = next(dist.rendezvous("env://"))
        return store
    if NODE_VARIABLE in os.environ:
        return _store_of_machines(rank, Path(path))
    store = dist.FileStore(path, world_size)
    store.set_timeout(_PATIENCE)
    return store


def _store_of_machines(rank: int, port: Path) -> Store:
    """Rank 0 serves the store on loopback, and writes its port into a file. On other machines that port leads to it."""
    if rank == 0:
        listener = socket.create_server((_HOST, 0))  # the store's own would listen on every interface
        number = listener.getsockname()[1]
        store = dist.TCPStore(_HOST, number, None, True, _PATIENCE, False, master_listen_fd=listener.detach())
        write_atomically(port, str(number).encode(), is_durable=False)
        return store
    deadline = time.monotonic() + _PATIENCE.total_seconds()
    while not port.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no store of rank 0 within {_PATIENCE}")
        time.sleep(_POLL_S)
    return dist.TCPStore(_HOST, int(port.read_bytes()), timeout=_PATIENCE, wait_for_workers=False)


def join(layout: Layout, device: torch.device | None) -> torch.device:
    """Return this process's device. One process alone needs no group beforehand; several do."""
    if not dist.is_initialized():
        assert layout.world_size == 1, "a layout of several ranks needs torch.distributed to be initialised"
        _listen_on(_LOOPBACK)
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    if device is not None or not torch.cuda.is_available():
        return device or torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, eq=False)
class SideRanks:
    """This rank among all. One thread of each rank uses it at a time. Tensors of any device travel by the host."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor, and wait until the other rank has it."""
        if tensor.numel():
            dist.send(tensor.detach().cpu(), to, group=self.group)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what another rank sends."""
        if not tensor.numel():
            return
        here = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        dist.recv(here, source, group=self.group)
        if here is not tensor:
            tensor.copy_(here)


_made: list[tuple[dist.ProcessGroup | None, SideRanks]] = []


def join_side_ranks() -> SideRanks:
    """Take this process's place among all ranks. Collective; a group that was made before is used again."""
    everyone = dist.group.WORLD
    if not _made or _made[0][0] is not everyone:
        size = dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=_SIDE_PATIENCE) if size > 1 else None
        _made[:] = [(everyone, SideRanks(dist.get_rank(), size, group))]
    return _made[0][1]
