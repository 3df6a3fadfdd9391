"""The Megatron engine's parallel dimensions: the mesh of ranks, collectives, experts' dispatch, pipeline stages."""

import dataclasses
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.training import Layout
from megatron_worker.families import parts_of, read_slice
from megatron_worker.process.ranks import SideRanks, join, join_side_ranks
from shared.families.architecture import Architecture
from shared.families.tensor_slices import TensorSlice

# --- The mesh: this process's place in every dimension of a layout, and its groups of ranks ---
#
# Ranks are numbered with tensor parallelism fastest, then context, data, pipeline. Experts see the ranks of a pipeline
# stage anew: expert tensor parallelism fastest, then expert parallelism, then copies.

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
    def num_replicas(self) -> int:
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


# --- Collectives ---
# Collectives over rows (the first dimension) as differentiable linear maps, whose gradients are their transposes.
#
# In groups of one they cost nothing. Their backwards are collectives, too: every rank of the group must take part.


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[..., Tensor], transpose: Callable[..., Tensor], *constants: Tensor
    ) -> Tensor:
        ctx.transpose = transpose
        ctx.save_for_backward(*constants)
        return forward(x, *constants)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        constants = ctx.saved_tensors  # read once: under recomputation, a checkpoint gives them only once
        return ctx.transpose(grad, *constants), None, None, *(None for _ in constants)


def linear_map(
    x: Tensor, forward: Callable[..., Tensor], transpose: Callable[..., Tensor], *constants: Tensor
) -> Tensor:
    """Return `forward(x, *constants)`, whose gradient is `transpose(grad, *constants)`; differentiable once."""
    result: Tensor = _LinearMap.apply(x, forward, transpose, *constants)
    return result


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Gather every rank's rows. Ranks may use them differently, so gradients are summed over ranks."""
    return x if group.size == 1 else linear_map(x, group.join_shares, group.sum_shares)


def sum_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's equal share of the rows, summed over the group."""
    return x if group.size == 1 else linear_map(x, group.sum_shares, group.join_shares)


def own_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's equal share of rows that all ranks have; other rows' gradients come from other ranks."""
    return x if group.size == 1 else linear_map(x, lambda x: _share(x, group).clone(), group.join_shares)


def gather_alike(x: Tensor, group: Group) -> Tensor:
    """Gather every rank's rows. All ranks must compute the same with them, as equal gradients are not summed."""
    return x if group.size == 1 else linear_map(x, group.join_shares, lambda grad: _share(grad, group))


def sum_replicated(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the group. All ranks must compute the same with it, as equal gradients are not summed."""

    def total(x: Tensor) -> Tensor:
        x = x.clone()
        group.sum(x)
        return x

    return x if group.size == 1 else linear_map(x, total, lambda grad: grad)


def replicated_over(weight: Tensor, group: Group) -> Tensor:
    """Return a weight whose gradient is equal on all ranks of the group, and is summed over them later."""
    return weight if group.size == 1 else linear_map(weight, lambda x: x.view_as(x), lambda grad: grad / group.size)


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send rows to each rank and return the received rows, in the order of ranks. Gradients go the way back."""
    if group.size == 1:
        return x
    return linear_map(x, lambda x: group.exchange(x, sent, received), lambda grad: group.exchange(grad, received, sent))


def _share(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size)[group.rank]


# --- Exchange of tokens with the ranks that hold their experts (all-to-all) ---
#
# A token is sent once to each of those ranks, with its choices, however many of the rank's experts it chose. Each rank
# returns the weighted sum over its experts. So no rank receives more than if all tokens were gathered, and with many
# ranks far less. Under etp the token is sent to each rank that has a slice of an expert, and their results are added
# up.
#
# An index that repeats rows consists of blocks; within a block each row occurs once, so that sums have the same order
# on any device.
#
# Shape suffixes: s tokens of this rank, C rows that it sends, R rows that it receives, K experts of a token, G ranks
# that share experts, E ranks of ep, B rows of all blocks, X any width.


@dataclass(frozen=True)
class Dispatch:
    """Rows that this rank sends and receives. `token_C`: the token of each sent row, sorted by the receiving rank.

    `sent` and `received`: numbers of rows by rank.
    """

    group: Group
    num_tokens: int
    token_C: Tensor
    sent: list[int]
    received: list[int]

    def out(self, x_sX: Tensor) -> Tensor:
        """Send rows of tokens to their ranks. Returns the received rows, [R, X]. Collective, its backward too."""
        return exchange_rows(copied(x_sX, self.token_C, self.sent), self.sent, self.received, self.group)

    def back(self, x_RX: Tensor) -> Tensor:
        """Return rows to their ranks, summed for each token: [s, X]. Collective, its backward too."""
        x_CX = exchange_rows(x_RX, self.received, self.sent, self.group)
        return added(x_CX, self.token_C, self.sent, self.num_tokens)


def dispatch(expert_sK: Tensor, experts_per_rank: int, mesh: Mesh) -> Dispatch:
    """Exchange how many rows each rank sends to each. Collective."""
    chosen_sE = torch.zeros(len(expert_sK), mesh.ep.size, dtype=torch.bool, device=expert_sK.device)
    chosen_sE.scatter_(1, expert_sK // experts_per_rank, True)
    chosen_Gs = chosen_sE.t().repeat_interleave(mesh.etp.size, dim=0)  # etp is the dimension that varies fastest
    sent_G = chosen_Gs.sum(1)
    ones = [1] * mesh.experts.size
    received_G = mesh.experts.exchange(sent_G, ones, ones)
    sent, received = torch.stack([sent_G, received_G]).tolist()
    return Dispatch(mesh.experts, len(expert_sK), chosen_Gs.nonzero()[:, 1], sent, received)


def copied(x: Tensor, index_B: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of `x` at `index_B`, which consists of blocks of `counts` rows."""
    num_rows = len(x)
    return linear_map(x, _rows_at, lambda grad, index_B: _sum_rows(grad, index_B, counts, num_rows), index_B)


def added(x_BX: Tensor, index_B: Tensor, counts: Sequence[int], num_rows: int) -> Tensor:
    """Return the sum of rows for each of `num_rows` indices, in the order of the blocks: the transpose of `copied`."""
    return linear_map(x_BX, lambda x_BX, index_B: _sum_rows(x_BX, index_B, counts, num_rows), _rows_at, index_B)


def _rows_at(x: Tensor, index_B: Tensor) -> Tensor:
    return x.index_select(0, index_B)


def _sum_rows(x_BX: Tensor, index_B: Tensor, counts: Sequence[int], num_rows: int) -> Tensor:
    total = x_BX.new_zeros(num_rows, *x_BX.shape[1:])
    for rows, index in zip(x_BX.split(counts), index_B.split(counts), strict=True):
        total.index_add_(0, index, rows)
    return total


# --- Pipeline stages: their layers, and the stage and ranks that hold a Hugging Face tensor ---

LAYERS = "decoder.layers."


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of a stage: equal shares, or one layer more in the first stages."""
    share, rest = divmod(num_layers, num_stages)
    first = stage * share + min(stage, rest)
    return range(first, first + share + (stage < rest))


def placed(slices: Sequence[TensorSlice], architecture: Architecture, layout: Layout) -> list[TensorSlice]:
    """Return the slices with the stage and the expert-parallel rank that hold them."""
    of_layer = [stage for stage in range(layout.pp) for _ in layers_of(stage, layout.pp, architecture.num_layers)]
    per_rank = max(1, architecture.num_experts // layout.ep)

    def place(tensor_slice: TensorSlice) -> TensorSlice:
        if tensor_slice.parameter.startswith(LAYERS):
            stage = of_layer[int(tensor_slice.parameter.removeprefix(LAYERS).split(".")[0])]
        else:
            stage = 0 if tensor_slice.parameter.startswith("embedding.") else layout.pp - 1
        ep_rank = 0 if tensor_slice.expert is None else tensor_slice.expert // per_rank
        return dataclasses.replace(tensor_slice, stage=stage, ep_rank=ep_rank)

    return [place(tensor_slice) for tensor_slice in slices]


def holds(mesh: Mesh, tensor_slice: TensorSlice) -> bool:
    """Return True if this rank holds a part of the tensor."""
    return tensor_slice.stage == mesh.pp.rank and (tensor_slice.expert is None or tensor_slice.ep_rank == mesh.ep.rank)


# --- Pipeline parallelism: hidden states and their gradients pass between stages in the order 1F1B ---
#
# Each stage first does as many forwards as there are stages after it, then alternates one forward and one backward
# (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1), which bounds the bins that are alive on it. Every stage has
# every bin, and so knows the shape of what it receives.
#
# Shape suffixes: s tokens of a bin that a rank has between layers, H hidden size.


@dataclass(frozen=True)
class Link:
    """This stage's connections. The first stage receives None as hidden states, the last one as gradient."""

    mesh: Mesh
    hidden_size: int
    dtype: torch.dtype

    def exchange(
        self,
        *,
        forward: Tensor | None = None,
        backward: Tensor | None = None,
        rows_forward: int | None = None,
        rows_backward: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send hidden states on and a gradient back; receive hidden states and a gradient of the given rows."""
        pp = self.mesh.pp
        before, behind = pp.ranks[pp.rank - 1], pp.ranks[(pp.rank + 1) % pp.size]
        sends = [
            *([] if forward is None or self.mesh.is_last_stage else [(forward.detach(), behind)]),
            *([] if backward is None or self.mesh.is_first_stage else [(backward, before)]),
        ]
        received = None if rows_forward is None or self.mesh.is_first_stage else self._room(rows_forward)
        gradient = None if rows_backward is None or self.mesh.is_last_stage else self._room(rows_backward)
        receives = [(room, rank) for room, rank in ((received, before), (gradient, behind)) if room is not None]
        operations = [dist.P2POp(dist.isend, x.contiguous(), rank, pp.group) for x, rank in sends]
        operations += [dist.P2POp(dist.irecv, x, rank, pp.group) for x, rank in receives]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received, gradient

    def _room(self, rows: int) -> Tensor:
        return torch.empty(rows, self.hidden_size, dtype=self.dtype, device=self.mesh.device)


# A bin's forward on this stage: its number, the received and the sent hidden states, or, on the last stage, the loss.
StageForward = Callable[[int, Tensor | None], Tensor]


def one_forward_one_backward(link: Link, rows: Sequence[int], forward: StageForward) -> None:
    """Run forward and backward of all bins; gradients accumulate. `rows`: each bin's, between layers on this rank."""
    mesh, num_bins = link.mesh, len(rows)
    alive: deque[tuple[int, Tensor | None, Tensor]] = deque()

    def go(number: int, received: Tensor | None) -> Tensor:
        if received is not None:
            received.requires_grad_(True)
        output = forward(number, received)
        alive.append((number, received, output))
        return output

    def go_back(gradient: Tensor | None) -> Tensor | None:
        _number, received, output = alive.popleft()
        if output.requires_grad:  # which it does not if the first stages have no trained parameters
            torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    num_ahead = min(mesh.pp.size - mesh.pp.rank - 1, num_bins)
    for number in range(num_ahead):
        received, _ = link.exchange(rows_forward=rows[number])
        link.exchange(forward=go(number, received))
    if num_ahead < num_bins:
        received, _ = link.exchange(rows_forward=rows[num_ahead])
    for number in range(num_ahead, num_bins):
        output = go(number, received)
        _, gradient = link.exchange(forward=output, rows_backward=rows[alive[0][0]])
        returned = go_back(gradient)
        following = rows[number + 1] if number + 1 < num_bins else None
        received, _ = link.exchange(backward=returned, rows_forward=following)
    while alive:
        _, gradient = link.exchange(rows_backward=rows[alive[0][0]])
        link.exchange(backward=go_back(gradient))
