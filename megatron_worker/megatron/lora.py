"""LoRA on megatron's fused, sharded linears, as PEFT's separate matrices (Hu et al. 2021, arXiv:2106.09685).

The input of a fused linear (query, key and value; gate and up) meets the stacked A matrices in one product, and their
B matrices, each in its own rows and columns of an otherwise empty matrix, in another. Under tensor parallelism the B
of a column-parallel linear is sharded with its rows, the A of a row-parallel one with its columns; the other matrix is
whole on every rank, and its gradient is complete because the rank-r activations, the smallest tensors here, are summed
over tp.

If ranks have different tokens (sequence parallelism; experts) the adapter does not sum anything itself: its output, or
the gradient of its input, is summed together with the linear's when the tokens are brought together. The matrix that is
whole on every rank then has only its rank's part of the gradient.

Shape suffixes: T tokens, I input features, O output features of this rank, R ranks of all parts of a linear together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from longshore.training import Lora, OptimizerStates
from megatron_worker.families import local_of, write_slice
from megatron_worker.head import scalar
from megatron_worker.head.scalar import BesideHead
from megatron_worker.megatron.optimizer import MegatronOptimizer, arrange
from megatron_worker.megatron.parallel import Group, Mesh, Placement, gather_rows, holds, sum_rows
from megatron_worker.quantized import QuantizedTensor, quantized_linear, whole
from megatron_worker.tensors.adapter_tensors import Masks, dropped, initial, norms_of_rows, scale_of, targeted
from shared.families.tensor_slices import Linear, TensorSlice
from shared.models.peft import AdaptedModules, LoraSize, factor_of, norms_of

_OF_HEADS = ("output_layer.", scalar.MODULE, scalar.OWN)


@dataclass(frozen=True)
class LoraWeights:
    """An adapter's weights for one fused linear. Its parts have ranks one after another.

    `scale`: of the ranks, [R] if parts have different ones. `name`, `place`: what the mask of the parts' common
    input follows from; ranks of one place have the same inputs. `norm_parts`: DoRA's norms of each part's rows, if it
    has any; `columns`: the ranks that hold other columns of these rows.
    """

    name: str
    place: int
    masks: Masks
    ranks: tuple[int, ...]
    scale: float | Tensor
    parts: tuple[TensorSlice, ...]
    a_RI: Parameter
    b_parts: tuple[Parameter, ...]
    norm_parts: tuple[Parameter, ...] = ()
    columns: Group | None = None

    def gain_O(self, weight_OI: Tensor) -> Tensor:
        """Return DoRA's factor for each row of W + scale B A, which gives the row its trained norm."""
        change_OI = (self.b_OR(len(weight_OI)) * self.scale) @ self.a_RI.detach()
        square_O = norms_of_rows(weight_OI, change_OI).square()
        if self.columns is not None:
            self.columns.sum(square_O)
        norm_O = square_O.sqrt().to(weight_OI.dtype)  # rounded like the trained norm, which it equals before training
        trained_O = norm_O.clone()
        for part, own in zip(self.parts, self.norm_parts, strict=True):
            trained_O.view(part.groups, -1)[:, part.start : part.stop] = own.view(part.groups, -1)
        return trained_O / norm_O

    def b_OR(self, num_rows: int) -> Tensor:
        """Return all B matrices in one, each in its own rows and ranks."""
        if len(self.b_parts) == 1 and self.b_parts[0].shape[0] == num_rows:
            return self.b_parts[0].detach()
        dense_OR = self.a_RI.new_zeros(num_rows, sum(self.ranks))
        for target, source in zip(self.blocks(dense_OR), self.b_parts, strict=True):
            target.copy_(source.detach().view(target.shape))
        return dense_OR

    def of_tokens(self, token_id_t: Tensor) -> Tensor:
        """Return what the embeddings' adapter adds to those of some tokens, [t, H]."""
        return F.embedding(token_id_t, self.a_RI.t()) * self.scale @ self.b_parts[0].t()

    def beside_head(self, hidden_NH: Tensor) -> BesideHead:
        """Return what the output layer's adapter adds for some targets."""
        seed = self.masks.seed_of(self.name, self.place)
        low_NR = F.linear(dropped(hidden_NH, self.masks.rate, seed), self.a_RI) * self.scale
        return BesideHead(low_NR, self.b_parts[0])

    def blocks(self, dense_OR: Tensor) -> list[Tensor]:
        """Return the block of each part, [groups, rows, rank] views."""
        blocks, first = [], 0
        for rank, part in zip(self.ranks, self.parts, strict=True):
            columns = slice(first, first := first + rank)
            blocks.append(dense_OR.view(part.groups, -1, dense_OR.shape[1])[:, part.start : part.stop, columns])
        return blocks


class AdaptedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear with an adapter or without."""

    lora: LoraWeights | None = None
    sequence: Group | None = None  # under sequence parallelism, the ranks that share the tokens out

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.sequence is not None:
            return _linear(gather_rows(input_, self.sequence), self.weight, self.bias, self.lora), None
        if self.lora is None and isinstance(self.weight, Tensor):
            return super().forward(input_, *args, **kwargs)
        group = self.tp_group if self.tp_group.size() > 1 else None
        return _linear(input_, self.weight, self.bias, self.lora, backward_group=group), None


class AdaptedRowLinear(RowParallelLinear):
    """A row-parallel linear with an adapter or without. Its bias, if any, is added by the layer."""

    lora: LoraWeights | None = None
    sequence: Group | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.sequence is not None:
            return sum_rows(_linear(input_, self.weight, None, self.lora), self.sequence), self.bias
        if self.lora is None and isinstance(self.weight, Tensor):
            return super().forward(input_)
        group = self.tp_group if self.tp_group.size() > 1 else None
        return _linear(input_, self.weight, None, self.lora, forward_group=group), self.bias


class ExpertLinear(torch.nn.Module):
    """A linear of one expert, or this rank's slice of it, with an adapter or without.

    It has no collectives: the caller brings tokens together, and adds outputs up.
    """

    lora: LoraWeights | None = None

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(num_outputs, num_inputs, dtype=dtype))

    def forward(self, input_: Tensor) -> Tensor:
        return _linear(input_, self.weight, None, self.lora)


def _linear(
    input_: Tensor,
    weight_OI: Tensor | QuantizedTensor,
    bias_O: Tensor | None,
    lora: LoraWeights | None,
    forward_group: dist.ProcessGroup | None = None,
    backward_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Apply a linear with its adapter, if any. An adapter's output, or its input's gradient, is summed over a group."""
    if lora is None:
        if isinstance(weight_OI, Tensor):
            return F.linear(input_, weight_OI, bias_O)
        return quantized_linear(input_, weight_OI, bias_O, forward_group, backward_group)
    flat_TI = input_.reshape(-1, input_.shape[-1])
    groups = forward_group, backward_group
    own_bias_O = None if lora.norm_parts else bias_O
    output_TO = _LoraLinear.apply(flat_TI, weight_OI, own_bias_O, lora, *groups, lora.a_RI, *lora.b_parts)
    if lora.norm_parts:
        gain_O = lora.gain_O(whole(weight_OI))
        output_TO = output_TO * gain_O if bias_O is None else torch.addcmul(bias_O, output_TO, gain_O)
        if (seed := lora.masks.seed_of(lora.name, lora.place)) is not None:  # what a gain adds has the mask, too
            left_TI = dropped(flat_TI, lora.masks.rate, seed) - flat_TI
            output_TO = output_TO + quantized_linear(left_TI, weight_OI, None, *groups) * (gain_O - 1)
    return output_TO.view(*input_.shape[:-1], output_TO.shape[-1])


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + bias + scale (x A^T) B^T with W frozen; only x and the rank-r activations are kept.

    A quantized W is made whole for each of its two products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: Tensor,
        weight: Tensor | QuantizedTensor,
        bias_O: Tensor | None,
        lora: LoraWeights,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
        a_RI: Tensor,
        *b_parts: Tensor,
    ) -> Tensor:
        seed, rate = lora.masks.seed_of(lora.name, lora.place), lora.masks.rate
        low_TR = (dropped(input_TI, rate, seed) @ a_RI.t()).mul_(lora.scale)
        weight_OI = whole(weight)
        b_OR = lora.b_OR(weight_OI.shape[0])
        output_TO = input_TI @ weight_OI.t() if bias_O is None else torch.addmm(bias_O, input_TI, weight_OI.t())
        _sum(output_TO, forward_group)
        _sum(low_TR, forward_group)
        output_TO.addmm_(low_TR, b_OR.t())
        ctx.save_for_backward(input_TI, a_RI, b_OR, low_TR)
        ctx.weight, ctx.lora, ctx.group, ctx.seed = weight, lora, backward_group, seed
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        input_TI, a_RI, b_OR, low_TR = ctx.saved_tensors
        lora: LoraWeights = ctx.lora
        grad_low_TR = (grad_TO @ b_OR).mul_(lora.scale)
        _sum(grad_low_TR, ctx.group)
        grad_TI = None
        if ctx.needs_input_grad[0]:
            grad_TI = grad_TO @ whole(ctx.weight)
            _sum(grad_TI, ctx.group)
            if ctx.seed is None:
                grad_TI.addmm_(grad_low_TR, a_RI)
            else:
                grad_TI += dropped(grad_low_TR @ a_RI, lora.masks.rate, ctx.seed)
        grad_a_RI = grad_low_TR.t() @ dropped(input_TI, lora.masks.rate, ctx.seed) if ctx.needs_input_grad[6] else None
        grad_b: list[Tensor | None] = [None] * len(lora.b_parts)
        if any(ctx.needs_input_grad[7:]):
            blocks = lora.blocks(grad_TO.t() @ low_TR)
            grad_b = [block.reshape(p.shape) for block, p in zip(blocks, lora.b_parts, strict=True)]
        return (grad_TI, None, None, None, None, None, grad_a_RI, *grad_b)


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, group=group)


AdaptedLinear = AdaptedColumnLinear | AdaptedRowLinear | ExpertLinear


class MegatronAdapter:
    """One slot: an adapter's weights for every linear it targets, and its head; those of this rank in one buffer."""

    def __init__(
        self, lora: Lora, linears: Sequence[Linear], more: Sequence[TensorSlice], mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self.lora, self.masks = lora, Masks(lora.dropout, seed=0)
        self._mesh = mesh
        adapted = AdaptedModules(lora)
        chosen = [(linear, targeted(linear.slices, adapted)) for linear in linears]
        chosen = [(linear, parts) for linear, parts in chosen if parts]
        self.slices = [s for linear, parts in chosen for s in _lora_slices(linear, parts, lora.dora)]
        self.slices += more
        self._linears = [(linear, parts) for linear, parts in chosen if holds(mesh, next(iter(parts)))]
        held = [s for s in self.slices if holds(mesh, s)]
        placements = {s.parameter: _placement(s, mesh) for s in held}
        self.flat, self._regions = arrange(_local_shapes(held, mesh), placements, mesh, dtype)
        self.parameters = {name: Parameter(view, requires_grad=False) for name, view in self.flat.views.items()}

    def initialise(self, seed: int) -> None:
        """Initialise by `initial`: each tensor is made whole, then cut."""
        for s in self.slices:
            if holds(self._mesh, s) and (whole := initial(s, seed)) is not None:
                group = self._mesh.splitting(s)
                write_slice(s, self.flat.views[s.parameter], local_of(s, whole, group.rank, group.size))

    def new_optimizer(self, states: OptimizerStates = "float32") -> MegatronOptimizer:
        """Return an optimizer that trains this adapter."""
        return MegatronOptimizer(self.parameters, self.flat, self._regions, self._mesh, states, self.slices)

    def lora_weights(self) -> dict[str, LoraWeights]:
        """Return the weights by the name of their fused linear."""
        return {
            linear.name: LoraWeights(
                linear.name,
                _place(linear, self._mesh),
                self.masks,
                tuple(size.rank for size in parts.values()),
                scale_of(list(parts.values()), self._mesh.device),
                tuple(parts),
                self.parameters[f"{linear.name}.A"],
                tuple(self.parameters[f"{linear.name}.B{number}"] for number in range(len(parts))),
                tuple(self.parameters[f"{linear.name}.N{n}"] for n in range(len(parts) if self.lora.dora else 0)),
                self._mesh.splitting(linear.slices[0]) if linear.kind == "row" else None,
            )
            for linear, parts in self._linears
        }


def _place(linear: Linear, mesh: Mesh) -> int:
    """Ranks that a column-parallel linear is split over have the same inputs, and whole A: one mask.

    So have those that each compute all of a linear, unless (sp) their tokens differ.
    """
    is_alike = linear.kind == "column" or (linear.kind == "whole" and not mesh.layout.sp)
    return mesh.rank // mesh.splitting(linear.slices[0]).size if is_alike else mesh.rank


def _lora_slices(linear: Linear, parts: Mapping[TensorSlice, LoraSize], has_norms: bool) -> list[TensorSlice]:
    """Return A and B of every part, and DoRA's norms, under PEFT's names."""
    slices, start = [], 0
    for number, (part, size) in enumerate(parts.items()):
        num_outputs, num_inputs = part.shape
        split_a, split_b = {"column": (None, 0), "row": (1, None), "whole": (None, None)}[linear.kind]
        slice_a = replace(part, name=factor_of(part.name, "A"), parameter=f"{linear.name}.A", groups=1)
        slice_b = replace(part, name=factor_of(part.name, "B"), parameter=f"{linear.name}.B{number}", groups=1)
        stop = start + size.rank
        slices.append(replace(slice_a, shape=(size.rank, num_inputs), split=split_a, start=start, stop=stop))
        slices.append(replace(slice_b, shape=(num_outputs, size.rank), split=split_b, start=0, stop=num_outputs))
        if has_norms:
            norm = replace(slices[-1], name=norms_of(part.name), parameter=f"{linear.name}.N{number}")
            slices.append(replace(norm, shape=(num_outputs,)))
        start = stop
    return slices


def _placement(tensor_slice: TensorSlice, mesh: Mesh) -> Placement:
    if tensor_slice.expert is not None:
        return "expert" if tensor_slice.split is not None else "expert partial"
    if tensor_slice.split is not None:
        return "split"
    # Under sp ranks have different tokens, but at embeddings and heads, whose every rank has all.
    has_all = tensor_slice.parameter.startswith(("embedding.", *_OF_HEADS))
    return "partial" if mesh.layout.sp and not has_all else "whole"


def _local_shapes(slices: Sequence[TensorSlice], mesh: Mesh) -> dict[str, tuple[int, ...]]:
    rows: dict[str, int] = {}
    for s in slices:
        rows[s.parameter] = max(rows.get(s.parameter, 0), s.stop)
    shapes: dict[str, tuple[int, ...]] = {}
    for s in slices:
        size = mesh.splitting(s).size
        own_rows = -(-rows[s.parameter] // (size if s.split == 0 else 1))  # a vocabulary's last shard is padded
        shapes[s.parameter] = (own_rows, *(columns // (size if s.split == 1 else 1) for columns in s.shape[1:]))
    return shapes
