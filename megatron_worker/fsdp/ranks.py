"""The ranks of an FSDP engine: all of them share the data, and each holds a shard of every weight."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshore.layout import Layout
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.process.agreement import agreement
from megatron_worker.process.process_group import SideRanks, join, join_side_ranks


@dataclass(frozen=True)
class Ranks:
    """This process's place. With one rank, every method is local."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    side: SideRanks

    def sum(self, tensor: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(tensor)

    def any(self, here: bool) -> bool:
        """Return True if `here` is true on one rank at least."""
        flag = torch.tensor(float(here), device=self.device)
        self.sum(flag)
        return bool(flag)

    def first_holder(self, tensor_slice: TensorSlice, part: int) -> int:
        """Return the rank that holds a part of a tensor; the first, of what all hold; an expert's own."""
        return part if tensor_slice.expert is None else tensor_slice.ep_rank

    def splitting(self, _tensor_slice: TensorSlice) -> "Ranks":
        """Return this rank's place among those that a tensor is split over: all of them."""
        return self

    def whole(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Gather a whole tensor on every rank from the shard of each. Collective where they differ."""
        if tensor_slice.expert is not None:
            return self._from_holder(tensor_slice, parameters, dtype)
        local = parameters[tensor_slice.name]
        if tensor_slice.split is None or self.size == 1:
            return local
        share = -(-tensor_slice.shape[0] // self.size)
        padded = local
        if len(local) < share:
            padded = local.new_zeros(share, *tensor_slice.shape[1:])
            padded[: len(local)] = local
        everyone = local.new_empty(self.size * share, *tensor_slice.shape[1:])
        dist.all_gather_into_tensor(everyone, padded)
        return everyone[: tensor_slice.shape[0]]

    def _from_holder(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(tensor_slice.shape, dtype=dtype, device=self.device)
        if self.rank == tensor_slice.ep_rank:
            whole.copy_(tensor_slice.read(parameters[tensor_slice.parameter], tensor_slice.shape[0]))
        if self.size > 1:
            dist.broadcast(whole, tensor_slice.ep_rank)
        return whole

    def agreement(self) -> AbstractContextManager[None]:
        """If one rank raises in the block, all do. No collective of the block may be skipped by raising."""
        return agreement(self.size, self.device)


def join_ranks(layout: Layout, device: torch.device | None = None) -> Ranks:
    """Take this process's place. Collective. One process alone needs no process group beforehand; several do."""
    device = join(layout, device)
    return Ranks(dist.get_rank(), layout.dp, device, init_device_mesh(device.type, (layout.dp,)), join_side_ranks())
