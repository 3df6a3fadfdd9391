"""AdamW (optimizers.py) and Muon (optimizers.py) on float32 masters: flat buffers for weights, gradients and both
moments.

If several ranks hold a tensor, each rank updates a share of it, and keeps masters and moments of that share only
(Rajbhandari et al. 2020, arXiv:1910.02054, stage 1): gradients are summed into shares, and weights gathered from them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Muon, Optimizer, OptimizerStates
from megatron_worker.families import local_of, read_slice, write_slice
from megatron_worker.megatron.parallel import Group as RankGroup
from megatron_worker.megatron.parallel import Mesh, Placement
from megatron_worker.offload import Flat
from megatron_worker.optimizers import Group, Rates, groups_of, rates_of, step_matrix, step_of, sum_of_squares, update
from megatron_worker.process.ranks import SideRanks
from megatron_worker.quantized import CodedMoment, update_coded
from megatron_worker.tensors.state_files import Held, SlotOptimizer, State, local_only
from shared.families.tensor_slices import TensorSlice

# --- Regions of a flat buffer ---
# Tensors that the same ranks hold. Those ranks sum the gradients; each updates a share.

_SHARE_ALIGNMENT = 64  # elements


@dataclass(frozen=True)
class Region:
    """Elements `start` to `stop`, which all ranks of `copies` hold. `counts`: this rank's share counts in a norm."""

    start: int
    stop: int
    copies: RankGroup
    counts: bool

    @property
    def all(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def own(self) -> slice:
        """This rank's share."""
        return self.share_of(self.copies.rank)

    def share_of(self, rank: int) -> slice:
        """Return the share of a rank of `copies`."""
        size = (self.stop - self.start) // self.copies.size
        return slice(self.start + rank * size, self.start + (rank + 1) * size)


def arrange(
    shapes: Mapping[str, tuple[int, ...]], placements: Mapping[str, Placement], mesh: Mesh, dtype: torch.dtype
) -> tuple[Flat, list[Region]]:
    """Make a flat buffer of zeros for these tensors, and the regions that cover it."""
    sections: dict[tuple[RankGroup, bool], list[str]] = {}
    for name in shapes:
        key = mesh.copies[placements[name]], mesh.counts(placements[name])
        sections.setdefault(key, []).append(name)
    names = [name for section in sections.values() for name in section]
    multiples = {section[0]: _SHARE_ALIGNMENT * copies.size for (copies, _), section in sections.items()}
    flat = Flat({name: shapes[name] for name in names}, dtype, mesh.device, multiples)
    starts = [flat.offsets[section[0]] for section in sections.values()]
    stops = [*starts[1:], flat.num_elements][: len(starts)]  # a stage may hold nothing
    return flat, [Region(a, b, *key) for a, b, key in zip(starts, stops, sections, strict=True)]


class MegatronOptimizer(SlotOptimizer):
    """Trains parameters that are views of one `Flat`, which `regions` cover.

    Gradients are accumulated in float32, whatever the weights' dtype. `master` is the working buffer itself if that
    is float32; else, as the moments, this rank's shares one after another. `states`: how the moments are held.
    `slices`: the tensors that the parameters hold; weights outside of them are not updated as matrices.
    """

    def __init__(
        self,
        parameters: dict[str, Parameter],
        working: Flat,
        regions: list[Region],
        mesh: Mesh,
        states: OptimizerStates = "float32",
        slices: Sequence[TensorSlice] = (),
    ) -> None:
        self._mesh = mesh
        groups = dict.fromkeys(working.shapes, Group()) | groups_of(slices)
        self._pieces = list(_pieces(working, regions, groups))
        self._matrices: dict[str, list[TensorSlice]] = {n: [] for n in working.shapes if groups[n].is_layers}
        for s in slices:
            self._matrices.get(s.parameter, []).append(s)
        self._parameters = parameters
        self._regions = regions
        self._working = working
        self.step_count = 0
        self.is_exact = working.buffer.dtype == torch.float32
        self.grad = working.like(torch.float32)
        self.master = working if self.is_exact else self._new_shares()
        self.exp_avg, self.exp_avg_sq = self._new_moment(states, False), self._new_moment(states, True)
        if not self.is_exact:
            self.put("master", working)
        self._hooks = [self._attach(name, parameter) for name, parameter in parameters.items()]

    @property
    def _num_own(self) -> int:
        return sum(region.own.stop - region.own.start for region in self._regions)

    def _new_shares(self) -> Flat:
        return Flat({"shares": (self._num_own,)}, torch.float32, self._working.buffer.device)

    def _new_moment(self, states: OptimizerStates, is_square: bool) -> Flat | CodedMoment:
        if states == "float32":
            return self._new_shares()
        return CodedMoment(self._num_own, is_square, self._working.buffer.device)

    def _attach(self, name: str, parameter: Parameter) -> torch.utils.hooks.RemovableHandle:
        grad = self.grad.views[name]
        parameter.requires_grad_(True)
        if parameter.dtype == torch.float32:
            parameter.grad = grad  # autograd adds in place

        def accumulate(parameter: Parameter) -> None:
            if parameter.grad is not None and parameter.grad is not grad:
                grad.add_(parameter.grad)
                parameter.grad = None

        return parameter.register_post_accumulate_grad_hook(accumulate)

    def states(self) -> list[Flat]:
        masters = [] if self.is_exact else [self.master]
        moments = [(m,) if isinstance(m, Flat) else m.flats for m in (self.exp_avg, self.exp_avg_sq)]
        return [*masters, *chain.from_iterable(moments)]

    # State for all of this rank's parameters, gathered from the shares.

    def put(self, state: State, values: Flat) -> None:
        """Set a state from a buffer with the layout of the working weights."""
        if self._is_working(state):
            self._working.buffer.copy_(values.buffer)
            return
        if isinstance(held := self._held(state), CodedMoment):
            held.write(torch.cat(self._owned(values.buffer)))
            return
        for own, share in zip(self._owned(values.buffer), self._shares(state), strict=True):
            share.copy_(own)

    def gathered(self, state: State) -> Mapping[str, Tensor]:
        """Return a state in float32 by the parameters' names; for masters possibly the working weights.

        Looking a parameter up is collective.
        """
        if self._is_working(state):
            return self._working.views
        return Gathered(self._working, self._regions, self._shares(state))

    @property
    def shares_masters(self) -> bool:
        return not self.is_exact

    def masters_on(self, ranks: SideRanks) -> Held:
        """Return a function that gives the first rank that holds a parameter its master, during the passes.

        Its other holders have to ask for it, too, and get None.
        """
        if self.is_exact:
            return local_only(self._working.views, ranks.rank)
        return partial(Gathered(self._working, self._regions, self._shares("master")).collected, ranks)

    def refresh_working(self) -> None:
        if not self.is_exact:
            for own, share in zip(self._owned(self._working.buffer), self._shares("master"), strict=True):
                own.copy_(share)
        for region in self._regions:
            if region.copies.size > 1:
                own = self._working.buffer[region.own].clone()
                self._working.buffer[region.all] = region.copies.join_shares(own)

    def _is_working(self, state: State) -> bool:
        return state == "master" and self.is_exact

    def _shares(self, state: State) -> list[Tensor]:
        """This rank's share of each region, as views."""
        if self._is_working(state):
            return self._owned(self._working.buffer)
        held = self._held(state)
        sizes = [region.own.stop - region.own.start for region in self._regions]
        numbers = held.read() if isinstance(held, CodedMoment) else held.buffer[: sum(sizes)]
        return list(numbers.split(sizes))

    def _held(self, state: State) -> Flat | CodedMoment:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[state]

    def _owned(self, buffer: Tensor) -> list[Tensor]:
        return [buffer[region.own] for region in self._regions]

    # A step.

    @torch.no_grad()
    def reduce(self, denominator: float) -> float:
        """Sum the gradients over all ranks and divide them. Returns their norm; `apply` or `zero_grad` comes next.

        Afterwards only this rank's shares of the gradients are valid.
        """
        for region in self._regions:
            if region.copies.size > 1:
                self.grad.buffer[region.own] = region.copies.sum_shares(self.grad.buffer[region.all])
        for grad in self._owned(self.grad.buffer):
            grad.div_(denominator)
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for region in self._regions:
            if region.counts:  # shares do not overlap, so tensors on several ranks count once
                total += sum_of_squares(self.grad.buffer[region.own])
        self._mesh.world.sum(total)
        return float(total.sqrt())

    def _reduced(self) -> list[Tensor]:
        return self._owned(self.grad.buffer)

    def _update(self, adam: Optimizer, learning_rate: float) -> None:
        weights, grads = self._shares("master"), self._owned(self.grad.buffer)
        parts = [(weights[n][cut], grads[n][cut], rates) for n, cut, rates in self._cuts(adam, learning_rate)]
        mean, square = self.exp_avg, self.exp_avg_sq
        if isinstance(mean, CodedMoment) and isinstance(square, CodedMoment):
            update_coded(parts, mean, square, adam, self.step_count)
        elif isinstance(mean, Flat) and isinstance(square, Flat):
            start = 0
            for weight, grad, rates in parts:
                own = slice(start, start := start + len(weight))
                update(weight, grad, mean.buffer[own], square.buffer[own], adam, rates, self.step_count)
        if isinstance(adam, Muon):
            self._orthogonalise(adam, grads)
            for weight, made, rates in parts:
                if rates.by_muon:
                    step_matrix(weight, made, rates)

    def _cuts(self, adam: Optimizer, learning_rate: float) -> Iterator[tuple[int, slice, Rates]]:
        """Yield what has the same rates: the number of a region, and a part of this rank's share of it."""

        def key(piece: tuple[int, slice, Group]) -> tuple[int, Rates]:
            return piece[0], rates_of(piece[2], adam, learning_rate)

        for (number, rates), alike in groupby(self._pieces, key):
            cuts = [cut for _, cut, _ in alike]
            yield number, slice(cuts[0].start, cuts[-1].stop), rates

    def _orthogonalise(self, muon: Muon, grads: Sequence[Tensor]) -> None:
        """Put matrices' steps in the place of their directions, which `update` has left in the gradients' shares.

        Ranks that hold a parameter bring its matrices together, one by one, and each computes their whole steps.
        """
        directions, dtype = Gathered(self._working, self._regions, grads), self._working.buffer.dtype
        for name, slices in self._matrices.items():
            parameter = directions[name]
            for s in slices:
                if s.is_stack:  # of this rank's own experts, each whole
                    write_slice(s, parameter, step_of(read_slice(s, parameter, len(parameter)), muon, dtype))
                else:
                    place, whole = self._mesh.splitting(s), self._mesh.gathered(s, parameter)
                    write_slice(s, parameter, local_of(s, step_of(whole, muon, dtype), place.rank, place.size))
            self.grad.views[name].copy_(parameter)


def _pieces(
    working: Flat, regions: Sequence[Region], groups: Mapping[str, Group]
) -> Iterator[tuple[int, slice, Group]]:
    """Yield for each parameter the number of its region, its part of this rank's share there, and its group."""
    ends = [*working.offsets.values(), working.num_elements][1:]
    for (name, start), stop in zip(working.offsets.items(), ends, strict=True):
        number = next(n for n, region in enumerate(regions) if region.start <= start < region.stop)
        own = regions[number].own
        first, last = max(start, own.start), min(stop, own.stop)
        if first < last:
            yield number, slice(first - own.start, last - own.start), groups[name]


class Gathered(Mapping[str, Tensor]):
    """A state in float32 by the parameters' names. Each is gathered from the ranks' shares when it is looked up.

    Looking up is collective: all ranks that hold a parameter ask for it, in the same order. Only the last one is kept,
    for several tensors of one parameter.
    """

    def __init__(self, working: Flat, regions: Sequence[Region], shares: Sequence[Tensor]) -> None:
        self._working = working
        self._shares = list(zip(regions, shares, strict=True))
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # it is freed before the next one takes memory
            self._last = name, self._gathered(name)
        return self._last[1]

    def _gathered(self, name: str) -> Tensor:
        shape, start = self._working.shapes[name], self._working.offsets[name]
        region, share = self._share_of(name)
        if region.copies.size == 1:
            return share[start - region.start :][: math.prod(shape)].view(shape)
        whole = share.new_empty(math.prod(shape))
        for rank, of_whole, of_share in self._parts(name, region):
            part = whole[of_whole]
            if rank == region.copies.rank:
                part.copy_(share[of_share])
            region.copies.broadcast(part, rank)
        return whole.view(shape)

    def collected(self, ranks: SideRanks, name: str, first: int) -> Tensor | None:
        """Return a parameter on rank `first`, if that is the first of those that hold it; the others send it theirs."""
        if name not in self or (copies := self._share_of(name)[0].copies).ranks[0] != first:
            return None
        region, share = self._share_of(name)
        whole = share.new_empty(math.prod(self._working.shapes[name]) if copies.rank == 0 else 0)
        for rank, of_whole, of_share in self._parts(name, region):
            if copies.rank == 0 == rank:
                whole[of_whole] = share[of_share]
            elif copies.rank == 0:
                ranks.receive(whole[of_whole], copies.ranks[rank])
            elif copies.rank == rank:
                ranks.send(share[of_share], first)
        return whole.view(self._working.shapes[name]) if copies.rank == 0 else None

    def _share_of(self, name: str) -> tuple[Region, Tensor]:
        start = self._working.offsets[name]
        return next((r, share) for r, share in self._shares if r.start <= start < r.stop)

    def _parts(self, name: str, region: Region) -> Iterator[tuple[int, slice, slice]]:
        """Yield the ranks of `region.copies` that have elements of a parameter: which of it, and of their share."""
        start, stop = self._working.offsets[name], self._working.offsets[name] + math.prod(self._working.shapes[name])
        for rank in range(region.copies.size):
            held = region.share_of(rank)
            first, last = max(start, held.start), min(stop, held.stop)
            if first < last:
                yield rank, slice(first - start, last - start), slice(first - held.start, last - held.start)

    def __contains__(self, name: object) -> bool:
        return name in self._working.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._working.shapes)

    def __len__(self) -> int:
        return len(self._working.shapes)
