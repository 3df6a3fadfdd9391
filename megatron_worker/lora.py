"""LoRA beside megatron's fused, sharded linears, as PEFT's separate matrices (Hu et al. 2021, arXiv:2106.09685).

A fused linear (query, key and value; gate and up) meets the stacked A matrices of its parts in one product, and their
B matrices, each in its own rows and columns of an otherwise empty matrix, in another. Under tensor parallelism the B
of a column-parallel linear is sharded with its rows, the A of a row-parallel one with its columns; the other of the
two is whole on every rank, and its gradient is complete because the rank-r activations, the smallest thing there is,
are summed over tp.

Shape suffixes: T tokens, I input features, O output features of this rank, R ranks of all parts of a linear together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from megatron_worker.families.pieces import Linear, Piece
from megatron_worker.flat import Flat
from megatron_worker.fresh_adapter import kaiming_uniform
from megatron_worker.megatron.mesh import Mesh
from megatron_worker.optimizer import Optimizer
from shared.jobs import Lora
from shared.peft_format import PREFIX


@dataclass(frozen=True)
class Beside:
    """An adapter's weights beside one fused linear. Part p owns ranks `p * rank` to `(p + 1) * rank`."""

    rank: int
    scale: float
    parts: tuple[Piece, ...]
    a_RI: Parameter
    b_parts: tuple[Parameter, ...]

    def b_OR(self, num_rows: int) -> Tensor:
        """All B matrices in one, each in its own rows and ranks."""
        if len(self.b_parts) == 1 and self.b_parts[0].shape[0] == num_rows:
            return self.b_parts[0].detach()
        dense_OR = self.a_RI.new_zeros(num_rows, len(self.parts) * self.rank)
        for target, source in zip(self.blocks(dense_OR), self.b_parts, strict=True):
            target.copy_(source.detach().view(target.shape))
        return dense_OR

    def blocks(self, dense_OR: Tensor) -> list[Tensor]:
        """The block of each part, [groups, rows, rank] views."""
        blocks = []
        for number, part in enumerate(self.parts):
            columns = slice(number * self.rank, (number + 1) * self.rank)
            blocks.append(dense_OR.view(part.groups, -1, dense_OR.shape[1])[:, part.start : part.stop, columns])
        return blocks


class AdaptedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear with an adapter beside it, or none."""

    beside: Beside | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.beside is None:
            return super().forward(input_, *args, **kwargs)
        group = self.tp_group if self.tp_group.size() > 1 else None
        return _beside(input_, self.weight, self.bias, self.beside, None, group), None


class AdaptedRowLinear(RowParallelLinear):
    """A row-parallel linear with an adapter beside it, or none."""

    beside: Beside | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.beside is None:
            return super().forward(input_)
        group = self.tp_group if self.tp_group.size() > 1 else None
        return _beside(input_, self.weight, None, self.beside, group, None), None


def _beside(
    input_: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    beside: Beside,
    forward_group: dist.ProcessGroup | None,
    backward_group: dist.ProcessGroup | None,
) -> Tensor:
    flat_TI = input_.reshape(-1, input_.shape[-1])
    output_TO = _LoraLinear.apply(
        flat_TI, weight_OI, bias_O, beside, forward_group, backward_group, beside.a_RI, *beside.b_parts
    )
    return output_TO.view(*input_.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + bias + scale (x A^T) B^T with W frozen; only x and the rank-r activations are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        beside: Beside,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
        a_RI: Tensor,
        *b_parts: Tensor,
    ) -> Tensor:
        low_TR = (input_TI @ a_RI.t()).mul_(beside.scale)
        b_OR = beside.b_OR(weight_OI.shape[0])
        output_TO = input_TI @ weight_OI.t() if bias_O is None else torch.addmm(bias_O, input_TI, weight_OI.t())
        _sum(output_TO, forward_group)
        _sum(low_TR, forward_group)
        output_TO.addmm_(low_TR, b_OR.t())
        ctx.save_for_backward(input_TI, weight_OI, a_RI, b_OR, low_TR)
        ctx.beside, ctx.group = beside, backward_group
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        input_TI, weight_OI, a_RI, b_OR, low_TR = ctx.saved_tensors
        beside: Beside = ctx.beside
        grad_low_TR = (grad_TO @ b_OR).mul_(beside.scale)
        _sum(grad_low_TR, ctx.group)
        grad_TI = None
        if ctx.needs_input_grad[0]:
            grad_TI = grad_TO @ weight_OI
            _sum(grad_TI, ctx.group)
            grad_TI.addmm_(grad_low_TR, a_RI)
        grad_a_RI = grad_low_TR.t() @ input_TI if ctx.needs_input_grad[6] else None
        grad_b: list[Tensor | None] = [None] * len(beside.b_parts)
        if any(ctx.needs_input_grad[7:]):
            blocks = beside.blocks(grad_TO.t() @ low_TR)
            grad_b = [block.reshape(p.shape) for block, p in zip(blocks, beside.b_parts, strict=True)]
        return (grad_TI, None, None, None, None, None, grad_a_RI, *grad_b)


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, group=group)


AdaptedLinear = AdaptedColumnLinear | AdaptedRowLinear


class Adapter:
    """One slot: an adapter's weights beside every linear it targets, in one buffer, sharded tensors first."""

    def __init__(self, lora: Lora, linears: Sequence[Linear], mesh: Mesh, dtype: torch.dtype) -> None:
        self.lora = lora
        self._mesh = mesh
        chosen = [(linear, _targeted(linear, lora)) for linear in linears]
        self._linears = [(linear, parts) for linear, parts in chosen if parts]
        self.pieces = [p for linear, parts in self._linears for p in _pieces(linear, parts, lora.rank)]
        shapes = {p.parameter: _local_shape(p, self.pieces, mesh.tp_size) for p in self.pieces}
        sharded = {p.parameter for p in self.pieces if p.split is not None}
        self.flat = Flat(dict(sorted(shapes.items(), key=lambda item: item[0] not in sharded)), dtype, mesh.device)
        replicated = [self.flat.offsets[name] for name in shapes if name not in sharded]
        self.num_sharded = min(replicated, default=self.flat.num_elements)
        self.parameters = {name: Parameter(view, requires_grad=False) for name, view in self.flat.views.items()}

    def initialise(self, seed: int) -> None:
        """As PEFT: A Kaiming-uniform (a = sqrt 5), B zero. Each A from the seed and its own name, whole, then cut."""
        for piece in self.pieces:
            if ".lora_A." in piece.name:
                whole = kaiming_uniform(piece.name, piece.shape, seed)
                piece.write(
                    self.flat.views[piece.parameter], piece.local(whole, self._mesh.tp_rank, self._mesh.tp_size)
                )

    def new_optimizer(self) -> Optimizer:
        """Train this adapter."""
        return Optimizer(self.parameters, self.flat, self._mesh, self.num_sharded)

    def beside(self) -> dict[str, Beside]:
        """By the name of the fused linear."""
        return {
            linear.name: Beside(
                self.lora.rank,
                self.lora.scale,
                parts,
                self.parameters[f"{linear.name}.A"],
                tuple(self.parameters[f"{linear.name}.B{number}"] for number in range(len(parts))),
            )
            for linear, parts in self._linears
        }


def _targeted(linear: Linear, lora: Lora) -> tuple[Piece, ...]:
    return tuple(p for p in linear.pieces if p.name.split(".")[-2] in lora.targets)


def _pieces(linear: Linear, parts: tuple[Piece, ...], rank: int) -> list[Piece]:
    """The A and B of every part, under PEFT's names."""
    pieces = []
    for number, part in enumerate(parts):
        module, (num_outputs, num_inputs) = PREFIX + part.name.removesuffix(".weight"), part.shape
        split_a, split_b = (1, None) if linear.kind == "row" else (None, 0)
        start, stop = number * rank, (number + 1) * rank
        pieces.append(Piece(f"{module}.lora_A.weight", f"{linear.name}.A", (rank, num_inputs), split_a, start, stop))
        pieces.append(
            Piece(f"{module}.lora_B.weight", f"{linear.name}.B{number}", (num_outputs, rank), split_b, 0, num_outputs)
        )
    return pieces


def _local_shape(piece: Piece, pieces: Sequence[Piece], tp: int) -> tuple[int, ...]:
    rows, columns = max(p.stop for p in pieces if p.parameter == piece.parameter), piece.shape[1]
    return (rows // tp, columns) if piece.split == 0 else (rows, columns // tp if piece.split == 1 else columns)
