"""Tensors from rank to rank beside the passes, over a group of its own that no collective of the passes meets."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = timedelta(hours=6)  # as long as a thread may wait to be told to go on; a rank that dies ends the worker


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
        group = dist.new_group(backend="gloo", timeout=_PATIENCE) if size > 1 else None
        _made[:] = [(everyone, SideRanks(dist.get_rank(), size, group))]
    return _made[0][1]
