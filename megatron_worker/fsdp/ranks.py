"""The ranks of an FSDP engine: they share the data, or linears of one model, and each holds a shard of every weight."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshore.layout import Layout
from megatron_worker.families.tensor_slices import read_slice
from megatron_worker.process.agreement import agreement
from megatron_worker.process.process_group import SideRanks, join, join_side_ranks
from shared.families.tensor_slices import TensorSlice


@dataclass(frozen=True)
class SplitByTp(TensorSlice):
    """A tensor that tensor parallelism splits, and whose shares data-parallel ranks split along the same dimension."""


@dataclass(frozen=True)
class Place:
    rank: int
    size: int


@dataclass(frozen=True)
class Ranks:
    """This process's place. With one rank, every method is local. Ranks of one tensor-parallel group are neighbours."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    side: SideRanks

    @property
    def dp_size(self) -> int:
        return self.mesh.shape[0]

    @property
    def tp_size(self) -> int:
        return self.mesh.shape[1]

    @property
    def num_alike(self) -> int:
        return self.tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    def sum(self, tensor: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(tensor)

    def sum_over_dp(self, tensor: Tensor) -> None:
        """Sum a tensor over data-parallel ranks; it must be equal on all tensor-parallel ranks."""
        if self.tp_rank:
            tensor.zero_()
        self.sum(tensor)

    def any(self, here: bool) -> bool:
        """Return True if `here` is true on one rank at least."""
        flag = torch.tensor(float(here), device=self.device)
        self.sum(flag)
        return bool(flag)

    def first_holder(self, tensor_slice: TensorSlice, part: int) -> int:
        """Return the first rank that holds a part of a tensor, or the rank of the tensor's expert."""
        if tensor_slice.expert is not None:
            return tensor_slice.ep_rank
        if not isinstance(tensor_slice, SplitByTp):
            return part * self.tp_size
        tp_rank, dp_rank = divmod(part, self.dp_size)
        return dp_rank * self.tp_size + tp_rank

    def splitting(self, tensor_slice: TensorSlice) -> Place:
        """Return this rank's place among those that a tensor is split over."""
        if isinstance(tensor_slice, SplitByTp):
            return Place(self.tp_rank * self.dp_size + self.dp_rank, self.size)
        return Place(self.dp_rank, self.dp_size)

    def whole(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Gather a whole tensor on every rank from all shards. Collective if they differ."""
        if tensor_slice.expert is not None:
            return self._from_holder(tensor_slice, parameters, dtype)
        split, size = tensor_slice.split, self.splitting(tensor_slice).size
        local = parameters[tensor_slice.parameter]
        if split is None or size == 1:
            return local
        share = -(-tensor_slice.shape[split] // size)
        padded = local
        if local.shape[split] < share:
            padded = local.new_zeros(share, *tensor_slice.shape[1:])
            padded[: len(local)] = local
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded.contiguous())
        parts = [everyone[self.first_holder(tensor_slice, part)] for part in range(size)]
        return torch.cat(parts, dim=split).narrow(split, 0, tensor_slice.shape[split])

    def _from_holder(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(tensor_slice.shape, dtype=dtype, device=self.device)
        if self.rank == tensor_slice.ep_rank:
            whole.copy_(read_slice(tensor_slice, parameters[tensor_slice.parameter], tensor_slice.shape[0]))
        if self.size > 1:
            dist.broadcast(whole, tensor_slice.ep_rank)
        return whole

    def agreement(self) -> AbstractContextManager[None]:
        """If one rank raises in the block, all do. No collective of the block may be skipped by raising."""
        return agreement(self.size, self.device)


def join_ranks(layout: Layout, device: torch.device | None = None) -> Ranks:
    """Take this process's place. Collective. One process alone needs no process group beforehand; several do."""
    device = join(layout, device)
    mesh = init_device_mesh(device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    return Ranks(dist.get_rank(), layout.world_size, device, mesh, join_side_ranks())
