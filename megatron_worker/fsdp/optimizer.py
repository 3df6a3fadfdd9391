"""AdamW (optimizers.py) and Muon (optimizers.py) for shards of weights whose gradients come reduced, and for adapters
that every rank has whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from longshore.training import Layout, Muon, Optimizer
from megatron_worker.families import local_of, read_slice, write_slice
from megatron_worker.offload import Flat
from megatron_worker.optimizers import groups_of, rates_of, step_matrix, step_of, sum_of_squares, update
from megatron_worker.process.ranks import SideRanks, join, join_side_ranks
from megatron_worker.tensors.state_files import Held, SlotOptimizer, State, local_only
from shared.families.tensor_slices import TensorSlice

# --- The ranks of an FSDP engine ---
# They share the data, or linears of one model, and each holds a shard of every weight.


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
    def num_replicas(self) -> int:
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


def join_ranks(layout: Layout, device: torch.device | None = None) -> Ranks:
    """Take this process's place. Collective. One process alone needs no process group beforehand; several do."""
    device = join(layout, device)
    mesh = init_device_mesh(device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    return Ranks(dist.get_rank(), layout.world_size, device, mesh, join_side_ranks())


class FsdpOptimizer(SlotOptimizer):
    """Trains parameters. Gradients are accumulated in float32, whatever the weights' dtype.

    `working`: by name, this rank's shard of each parameter; the model computes with it.
    """

    def __init__(
        self,
        slices: Sequence[TensorSlice],
        parameters: Mapping[str, Parameter],
        working: Mapping[str, Tensor],
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._is_sharded = any(s.split is not None for s in slices)
        # Another rank counts what this one has as it has. None: all is this one's.
        self._counted = [s.parameter for s in slices if ranks.tp_rank and isinstance(s, SplitByTp)]
        # A rank that got none of a stack's experts holds an empty tensor, which no slice names.
        self._groups = {name: group for name, group in groups_of(slices).items() if name in working}
        self._matrices = [s for s in slices if s.parameter in self._groups and self._groups[s.parameter].is_layers]
        self._parameters = parameters
        self._working = working
        self.step_count = 0
        shapes = {name: tuple(tensor.shape) for name, tensor in working.items()}
        self.grad, self.exp_avg, self.exp_avg_sq = (Flat(shapes, torch.float32, ranks.device) for _ in range(3))
        self.is_exact = all(tensor.dtype == torch.float32 for tensor in working.values())
        self._masters = None if self.is_exact else Flat(shapes, torch.float32, ranks.device)
        if self._masters is not None:
            for name, view in self._masters.views.items():
                view.copy_(working[name])
        self._hooks = [self._attach(name, parameter) for name, parameter in parameters.items()]

    def _attach(self, name: str, parameter: Parameter) -> torch.utils.hooks.RemovableHandle:
        grad = self.grad.views[name]

        def accumulate(parameter: Parameter) -> None:
            found = parameter.grad
            assert found is not None
            grad.add_((found.to_local() if isinstance(found, DTensor) else found).view_as(grad))
            parameter.grad = None

        parameter.requires_grad_(True)
        return parameter.register_post_accumulate_grad_hook(accumulate)

    @property
    def master(self) -> Mapping[str, Tensor]:
        """The float32 weights that are updated: the working weights if those are float32, else masters of them."""
        return self._working if self._masters is None else self._masters.views

    def gathered(self, state: State) -> Mapping[str, Tensor]:
        """Return this rank's shards of a state, by name."""
        match state:
            case "master":
                return self.master
            case "exp_avg":
                return self.exp_avg.views
            case "exp_avg_sq":
                return self.exp_avg_sq.views

    @property
    def shares_masters(self) -> bool:
        """False: a rank has all masters of the parameters that it holds."""
        return False

    def masters_on(self, ranks: SideRanks) -> Held:
        """Return the function that gives the rank that holds a parameter its master weights."""
        return local_only(self.master, ranks.rank)

    def put(self, state: State, values: Flat) -> None:
        """Set this rank's shards of a state."""
        for name, tensor in self.gathered(state).items():
            tensor.copy_(values.views[name])

    def states(self) -> list[Flat]:
        return [*([] if self._masters is None else [self._masters]), self.exp_avg, self.exp_avg_sq]

    @torch.no_grad()
    def reduce(self, denominator: float) -> float:
        if not self._is_sharded:
            self._ranks.sum(self.grad.buffer)
        self.grad.buffer.div_(denominator)
        # The norm over all ranks: of all shards, or of a gradient that every rank has whole.
        views = [self.grad.views[name] for name in self._counted] or [self.grad.buffer]
        square = torch.stack([sum_of_squares(view) for view in views]).sum()
        if self._is_sharded:
            self._ranks.sum(square)
        return float(square.sqrt())

    def _reduced(self) -> list[Tensor]:
        return [self.grad.buffer]

    def _update(self, adam: Optimizer, learning_rate: float) -> None:
        for name, group in self._groups.items():
            grad, mean, square = (flat.views[name].view(-1) for flat in (self.grad, self.exp_avg, self.exp_avg_sq))
            rates = rates_of(group, adam, learning_rate)
            update(self.master[name].view(-1), grad, mean, square, adam, rates, self.step_count)
        if isinstance(adam, Muon):
            self._orthogonalise(adam)
            for name in {s.parameter: s for s in self._matrices}:
                step_matrix(self.master[name], self.grad.views[name], rates_of(self._groups[name], adam, learning_rate))

    def _orthogonalise(self, muon: Muon) -> None:
        """Put matrices' steps in the place of their directions, which `update` has left in the gradients.

        Every rank computes the whole step of a matrix that ranks share; of an expert's the one that has it.
        """
        directions = self.grad.views
        for s in self._matrices:
            parameter, dtype, place = (
                directions[s.parameter],
                self._working[s.parameter].dtype,
                self._ranks.splitting(s),
            )
            is_own = s.expert is not None
            whole = read_slice(s, parameter, s.shape[0]) if is_own else self._ranks.whole(s, directions, torch.float32)
            write_slice(s, parameter, local_of(s, step_of(whole, muon, dtype), place.rank, place.size))

    def refresh_working(self) -> None:
        if self._masters is not None:
            for name, view in self._masters.views.items():
                self._working[name].copy_(view)
