"""The mesh: this process's place in every dimension of a layout, and its groups of ranks.

Ranks are numbered with tensor parallelism fastest, then context, data, pipeline. Experts see the ranks of a pipeline
stage anew: expert tensor parallelism fastest, then expert parallelism, then copies.
"""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from longshore.layout import Layout
from megatron_worker.families.tensor_slices import parts_of, read_slice
from megatron_worker.process.agreement import agreement
from megatron_worker.process.process_group import SideRanks, join, join_side_ranks
from shared.families.tensor_slices import TensorSlice

# How ranks hold a tensor: "split" over tp; "whole" on each tp rank, with the same gradient; "partial", whole with a
# gradient to be added up over tp; "tied", split over tp and held by the first and last pipeline stage; of one
# expert, split over etp; of one expert, whole with a gradient to be added up over etp.
Placement = Literal["split", "whole", "partial", "tied", "expert", "expert partial"]

RankGrid = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """A group of ranks with this one in it. In a group of one every method is local."""

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = field(compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor) -> None:
        if self.group is not None and tensor.numel():
            dist.all_reduce(tensor, group=self.group)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of every rank of the group; shapes are equal."""
        if self.group is None:
            return [tensor]
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill the tensor with that of rank `source` of the group."""
        if self.group is not None and tensor.numel():
            dist.broadcast(tensor, self.ranks[source], group=self.group)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to each rank of the group, in the order of ranks. Returns the received rows, in the same order.

        `sent` and `received`: numbers of rows by rank.
        """
        if self.group is None:
            return rows
        theirs = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(theirs, rows.contiguous(), list(received), list(sent), group=self.group)
        return theirs

    def sum_shares(self, tensor: Tensor) -> Tensor:
        """Return the group's sum of this rank's equal share of the first dimension."""
        share = tensor.chunk(self.size)[self.rank] if tensor.numel() else tensor
        if self.group is not None and tensor.numel():
            share = torch.empty_like(share, memory_format=torch.contiguous_format)
            dist.reduce_scatter_tensor(share, tensor.contiguous(), group=self.group)
        return share

    def join_shares(self, share: Tensor) -> Tensor:
        """Join every rank's share along the first dimension."""
        if self.group is None or not share.numel():
            return share
        whole = share.new_empty(self.size * share.shape[0], *share.shape[1:])
        dist.all_gather_into_tensor(whole, share.contiguous(), group=self.group)
        return whole


@dataclass(frozen=True, eq=False)
class Mesh:
    """This process's place, by dimension. `experts`: the ranks that hold one copy of all experts of a stage.

    `copies[placement]`: for each placement of a tensor, the ranks over which its gradients are added up.
    """

    layout: Layout
    device: torch.device
    world: Group
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    ep: Group
    etp: Group
    experts: Group
    copies: dict[Placement, Group]
    side: SideRanks

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def num_alike(self) -> int:
        return self.cp.size

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    def splitting(self, tensor_slice: TensorSlice) -> Group:
        """Return the ranks that a tensor is split over."""
        if tensor_slice.is_stack:
            return self.ep
        return self.tp if tensor_slice.expert is None else self.etp

    def first_holder(self, tensor_slice: TensorSlice, part: int) -> int:
        """Return the first of the ranks that hold a part of a tensor: of copies, the first."""
        first_of_stage = tensor_slice.stage * self.world.size // self.pp.size
        if tensor_slice.is_stack:
            return first_of_stage + part * self.etp.size
        return first_of_stage + tensor_slice.ep_rank * self.etp.size + part

    def whole(self, tensor_slice: TensorSlice, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Gather a whole tensor on every rank from those that hold it; a view if this rank holds it. Collective.

        `parameters`: this rank's, all of `dtype`. Only those that the tensor is in are looked up.
        """
        if tensor_slice.parameter in parameters:
            whole = self.gathered(tensor_slice, parameters[tensor_slice.parameter].detach())
        else:
            whole = torch.empty(tensor_slice.shape, dtype=dtype, device=self.device)
        if tensor_slice.expert is not None and tensor_slice.stage == self.pp.rank:
            self.ep.broadcast(whole, tensor_slice.ep_rank)
        self.pp.broadcast(whole, tensor_slice.stage)
        return whole

    def gathered(self, tensor_slice: TensorSlice, parameter: Tensor) -> Tensor:
        """Gather a whole tensor on the ranks that hold some of it; perhaps a view. Collective over these."""
        group = self.splitting(tensor_slice)
        share = tensor_slice.shape[0] if tensor_slice.split != 0 else -(-tensor_slice.shape[0] // group.size)
        local, split = read_slice(tensor_slice, parameter, share), tensor_slice.split
        if split is None:
            return local
        if group.size == 1 or (split == 0 and not tensor_slice.sections):
            return group.join_shares(local)[: tensor_slice.shape[0]]
        whole, theirs = local.new_empty(tensor_slice.shape), torch.empty_like(local)  # not all ranks' parts beside it
        for rank in range(group.size):
            sent = local if rank == group.rank else theirs
            group.broadcast(sent, rank)
            parts = parts_of(tensor_slice, whole, rank, group.size)
            for part, received in zip(parts, sent.split([x.shape[split] for x in parts], dim=split), strict=True):
                part.copy_(received)
        return whole

    def counts(self, placement: Placement) -> bool:
        """Return True if a norm counts this rank's tensors. A gradient that several ranks have is counted on one."""
        return placement != "whole" or self.tp.rank == 0

    def agreement(self) -> AbstractContextManager[None]:
        """If one rank raises in the block, all do. No collective of the block may be skipped by raising."""
        return agreement(self.world.size, self.device)


def join_mesh(layout: Layout, device: torch.device | None = None) -> Mesh:
    """Take this process's place. Collective. One process alone needs no process group beforehand; several do."""
    device = join(layout, device)
    _initialise_megatron(layout)
    ranks = np.arange(layout.world_size)
    dense = ranks.reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    expert = ranks.reshape(layout.pp, -1, layout.ep, layout.etp)
    data = _group_of(_groups_along(dense, 1, 2))
    copies: dict[Placement, Group] = {
        "split": data,
        "whole": data,
        "partial": _group_of(_groups_along(dense, 1, 2, 3)),
        "tied": _group_of(_tied(dense)),
        "expert": _group_of(_groups_along(expert, 1)),
        "expert partial": _group_of(_groups_along(expert, 1, 3)),
    }
    pp = _group_of(_groups_along(dense, 0))
    # NCCL needs all ranks of a group at its first communication.
    pp.sum(torch.zeros(1, device=device))
    return Mesh(
        layout=layout,
        device=device,
        world=_group_of(_groups_along(ranks, 0)),
        tp=_group_of(_groups_along(dense, 3)),
        cp=_group_of(_groups_along(dense, 2)),
        dp=_group_of(_groups_along(dense, 1)),
        pp=pp,
        ep=_group_of(_groups_along(expert, 2)),
        etp=_group_of(_groups_along(expert, 3)),
        experts=_group_of(_groups_along(expert, 2, 3)),
        copies=copies,
        side=join_side_ranks(),
    )


def _groups_along(ranks: RankGrid, *axes: int) -> list[tuple[int, ...]]:
    """Return all ranks of a grid, in groups that differ in their places along these axes (rising) alone."""
    size = math.prod(ranks.shape[axis] for axis in axes)
    last = np.moveaxis(ranks, axes, range(-len(axes), 0))
    return [tuple(group) for group in last.reshape(-1, size).tolist()]


def _tied(dense: RankGrid) -> list[tuple[int, ...]]:
    """Return, for each tp rank, the ranks of first and last stage together, and those of each stage between alone."""
    if len(dense) < 3:
        return _groups_along(dense, 0, 1, 2)
    return _groups_along(dense[[0, -1]], 0, 1, 2) + _groups_along(dense[1:-1], 1, 2)


_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
_groups_of: list[dist.ProcessGroup | None] = [None]


def _group_of(groups: Sequence[tuple[int, ...]]) -> Group:
    """Return the group, of several, that this rank is in. Collective; groups that were made before are used again."""
    if _groups_of[0] is not dist.group.WORLD:
        _groups.clear()
        _groups_of[0] = dist.group.WORLD
    for ranks in groups:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return Group(own, own.index(dist.get_rank()), _groups[own])


def _initialise_megatron(layout: Layout) -> None:
    """Make megatron's tensor-parallel group, which its linears find in module state. It knows no other dimension."""
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == layout.tp:
            return
        parallel_state.destroy_model_parallel()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron's ordering of collectives and kernels
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, create_gloo_process_groups=not torch.cuda.is_available()
    )
