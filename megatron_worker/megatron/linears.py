"""Megatron's fused, sharded linears with adapters (lora.py), and where its ranks hold an adapter's weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Lora
from megatron_worker.head import scalar
from megatron_worker.lora import Adapter, LinearLora, lora_linear
from megatron_worker.megatron.optimizer import arrange
from megatron_worker.megatron.parallel import Group, Mesh, Placement, gather_rows, holds, sum_rows
from megatron_worker.tensors.offload import Flat
from shared.families.tensor_slices import Linear, TensorSlice

_OF_HEADS = ("output_layer.", scalar.MODULE, scalar.OWN)


class AdaptedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear with an adapter or without."""

    lora: LinearLora | None = None
    sequence: Group | None = None  # under sequence parallelism, the ranks that share the tokens out

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.sequence is not None:
            return lora_linear(gather_rows(input_, self.sequence), self.weight, self.bias, self.lora), None
        if self.lora is None and isinstance(self.weight, Tensor):
            return super().forward(input_, *args, **kwargs)
        group = self.tp_group if self.tp_group.size() > 1 else None
        return lora_linear(input_, self.weight, self.bias, self.lora, backward_group=group), None


class AdaptedRowLinear(RowParallelLinear):
    """A row-parallel linear with an adapter or without. Its bias, if any, is added by the layer."""

    lora: LinearLora | None = None
    sequence: Group | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.sequence is not None:
            return sum_rows(lora_linear(input_, self.weight, None, self.lora), self.sequence), self.bias
        if self.lora is None and isinstance(self.weight, Tensor):
            return super().forward(input_)
        group = self.tp_group if self.tp_group.size() > 1 else None
        return lora_linear(input_, self.weight, None, self.lora, forward_group=group), self.bias


class ExpertLinear(torch.nn.Module):
    """A linear of one expert, or this rank's slice of it, with an adapter or without.

    It has no collectives: the caller brings tokens together, and adds outputs up.
    """

    lora: LinearLora | None = None

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(num_outputs, num_inputs, dtype=dtype))

    def forward(self, input_: Tensor) -> Tensor:
        return lora_linear(input_, self.weight, None, self.lora)


AdaptedLinear = AdaptedColumnLinear | AdaptedRowLinear | ExpertLinear


class MegatronAdapter(Adapter):
    """The part of an adapter that this rank holds, in one buffer, which `regions` cover."""

    def __init__(
        self, lora: Lora, linears: Sequence[Linear], more: Sequence[TensorSlice], mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self._mesh = mesh
        super().__init__(lora, linears, more, dtype, mesh.device)

    def _holds(self, s: TensorSlice) -> bool:
        return holds(self._mesh, s)

    def _split(self, s: TensorSlice) -> tuple[int, int]:
        group = self._mesh.splitting(s)
        return group.rank, group.size

    def _arrange(
        self, shapes: dict[str, tuple[int, ...]], held: Sequence[TensorSlice], dtype: torch.dtype, device: torch.device
    ) -> Flat:
        placements = {s.parameter: _placement(s, self._mesh) for s in held}
        flat, self.regions = arrange(shapes, placements, self._mesh, dtype)
        return flat

    def _place(self, linear: Linear) -> tuple[int, Callable[[Tensor], None] | None]:
        """Ranks that a column-parallel linear is split over have the same inputs, and whole A: one mask.

        So have those that each compute all of a linear, unless (sp) their tokens differ.
        """
        mesh, splitting = self._mesh, self._mesh.splitting(linear.slices[0])
        is_alike = linear.kind == "column" or (linear.kind == "whole" and not mesh.layout.sp)
        return mesh.rank // splitting.size if is_alike else mesh.rank, splitting.sum if linear.kind == "row" else None


def _placement(tensor_slice: TensorSlice, mesh: Mesh) -> Placement:
    if tensor_slice.expert is not None:
        return "expert" if tensor_slice.split is not None else "expert partial"
    if tensor_slice.split is not None:
        return "split"
    # Under sp ranks have different tokens, but at embeddings and heads, whose every rank has all.
    has_all = tensor_slice.parameter.startswith(("embedding.", *_OF_HEADS))
    return "partial" if mesh.layout.sp and not has_all else "whole"
