"""Megatron's fused, sharded linears with adapters (lora.py), and what a rank holds of a model and of an adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Lora, Quantization
from megatron_worker.head import scalar
from megatron_worker.layers import LayerTensors, Norm, unchanged
from megatron_worker.lora import Adapter, LinearLora, lora_linear
from megatron_worker.megatron.optimizer import arrange
from megatron_worker.megatron.parallel import Group, Mesh, Placement, gather_rows, holds, sum_rows
from megatron_worker.offload import Flat
from megatron_worker.quantized import CODES, QuantizedTensor, QuantizedTensors
from shared.families.architecture import Architecture, Attention
from shared.families.tensor_slices import Linear, TensorSlice

_OF_HEADS = ("output_layer.", scalar.MODULE, scalar.OWN)


class AdaptedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear with an adapter or without."""

    lora: LinearLora | None = None
    sequence: Group | None = None  # under sequence parallelism, the ranks that share the tokens out

    def forward(self, input_: Tensor, *_: object) -> Tensor:
        if self.sequence is not None:
            return lora_linear(gather_rows(input_, self.sequence), self.weight, self.bias, self.lora)
        if self.lora is None and isinstance(self.weight, Tensor):
            output: Tensor = super().forward(input_)[0]
            return output
        group = self.tp_group if self.tp_group.size() > 1 else None
        return lora_linear(input_, self.weight, self.bias, self.lora, backward_group=group)


class AdaptedRowLinear(RowParallelLinear):
    """A row-parallel linear with an adapter or without."""

    lora: LinearLora | None = None
    sequence: Group | None = None

    def forward(self, input_: Tensor, *_: object) -> Tensor:
        if self.sequence is not None:
            output = sum_rows(lora_linear(input_, self.weight, None, self.lora), self.sequence)
        elif self.lora is None and isinstance(self.weight, Tensor):
            output, _bias = super().forward(input_)
        else:
            group = self.tp_group if self.tp_group.size() > 1 else None
            output = lora_linear(input_, self.weight, None, self.lora, forward_group=group)
        return output if self.bias is None else output + self.bias


class ExpertLinear(torch.nn.Module):
    """A linear of one expert, or this rank's slice of it, with an adapter or without.

    It has no collectives: the caller brings tokens together, and adds outputs up.
    """

    lora: LinearLora | None = None

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(shape, dtype=dtype))

    def forward(self, input_: Tensor, *_: object) -> Tensor:
        return lora_linear(input_, self.weight, None, self.lora)


AdaptedLinear = AdaptedColumnLinear | AdaptedRowLinear | ExpertLinear


@dataclass(frozen=True)
class NormOverRanks(Norm):
    """A norm over all heads of a token together, which tensor-parallel ranks share out."""

    tp: Group

    def __call__(self, x: Tensor) -> Tensor:
        own_TX, tp = x.flatten(1), self.tp
        wide_TX = own_TX.to(torch.promote_types(torch.float32, x.dtype))
        square_T = gather_rows(wide_TX.square().mean(dim=-1), tp).view(tp.size, -1).mean(dim=0)
        normed_TX = wide_TX * (square_T + self.eps).rsqrt()[:, None] * self.weight
        return normed_TX.to(x.dtype).view_as(x)


class TrainedTensors(LayerTensors):
    """Makes this rank's parameters, their values undefined, as they are asked for.

    Attributes:
        parameters: by the names of slices, on the CPU, in the order of their making.
        constants: what is never trained, on the rank's device: float32 in any dtype.
        linears: by their names.
        stacked: the stacks of experts, by the names of what they are in.
    """

    def __init__(self, a: Architecture, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__(a.slices(mesh.layout.tp, mesh.layout.etp), a.constants)
        self.num_ranks = mesh.tp.size
        self.parameters, self.constants = dict[str, Parameter](), dict[str, Tensor]()
        self.linears, self.stacked = dict[str, AdaptedLinear](), dict[str, dict[str, Tensor | QuantizedTensor]]()
        self._mesh, self._dtype, self._is_zero_centred = mesh, dtype, a.zero_centred_norms
        config = ModelParallelConfig(
            tensor_model_parallel_size=mesh.tp.size,
            params_dtype=dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        self._how = {"config": config, "init_method": torch.nn.init.normal_}  # which is not called

    def __getitem__(self, parameter: str) -> Tensor:
        if (constant := self._constants.get(parameter)) is not None:
            self.constants[parameter] = torch.zeros(constant.shape, device=self._mesh.device)
            return self.constants[parameter]
        self.parameters[parameter] = Parameter(torch.empty(self._shape(parameter), dtype=self._dtype))
        return self.parameters[parameter]

    def linear(self, module: str, brings_tokens: bool = True) -> AdaptedLinear:
        weight, bias = f"{module}.weight", f"{module}.bias"
        s, made = self._slices[weight][0], self.linears
        if s.split is None or s.expert is not None or not brings_tokens:
            made[module] = ExpertLinear(self._shape(weight), self._dtype)
        else:
            num_outputs, num_inputs = self._whole_shape(weight)
            sizes, how = (num_inputs, num_outputs), {**self._how, "bias": bias in self._slices}
            if s.split == 0:
                made[module] = AdaptedColumnLinear(*sizes, **how)
            else:
                made[module] = AdaptedRowLinear(*sizes, input_is_parallel=True, skip_bias_add=True, **how)
            made[module].sequence = self._mesh.tp if self._mesh.layout.sp else None
        self.parameters |= {f"{module}.{name}": p for name, p in made[module].named_parameters()}
        return made[module]

    def embedding(self, parameter: str) -> Callable[[Tensor], Tensor]:
        """Return a function from tokens' ids, [T], to their rows."""
        num_rows, size = self._shape(parameter)
        table = VocabParallelEmbedding(num_rows * self.num_ranks, size, **self._how)
        self.parameters[parameter] = table.weight
        return lambda token_id_T: table(token_id_T[None])[0]

    def norm(self, module: str, eps: float) -> Callable[[Tensor], Tensor]:
        if (weight := self.get(f"{module}.weight")) is None:
            return unchanged
        if self._slices[f"{module}.weight"][0].split is None or self.num_ranks == 1:
            return Norm(weight, eps, self._is_zero_centred)
        return NormOverRanks(weight, eps, self._is_zero_centred, self._mesh.tp)

    def stacks(self, module: str) -> dict[str, Tensor | QuantizedTensor]:
        self.stacked[module] = super().stacks(module)
        return self.stacked[module]

    def own_experts(self, num_experts: int) -> range:
        per_rank = num_experts // self._mesh.ep.size
        return range(self._mesh.ep.rank * per_rank, (self._mesh.ep.rank + 1) * per_rank)

    def groups_of(self, a: Attention) -> int:
        return 1 if a.is_fused else a.num_kv_heads // self.num_ranks

    def quantized(self, code: Quantization, device: torch.device) -> QuantizedTensors:
        """Put quantized weights in the places of those of linears, and of stacks with biases; they hold nothing yet."""
        places: dict[str, tuple[Any, str]] = {
            f"{module}.weight": (vars(x), "weight") for module, x in self.linears.items()
        }
        for module, held in self.stacked.items():
            places |= {f"{module}.{kind}": (held, kind) for kind in held if f"{kind}_bias" in held}
        shapes = {name: tuple(self.parameters.pop(name).shape) for name in places}
        made = QuantizedTensors(CODES[code], shapes, self._dtype, device)
        for linear in self.linears.values():
            del linear.weight
        for name, (owner, key) in places.items():
            owner[key] = made[name]
        return made

    def _whole_shape(self, parameter: str) -> tuple[int, ...]:
        parts = self._slices[parameter]
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def _shape(self, parameter: str) -> list[int]:
        """Return the shape on this rank."""
        shape, s = list(self._whole_shape(parameter)), self._slices[parameter][0]
        if s.split is not None:
            shape[s.split] = -(-shape[s.split] // self._mesh.splitting(s).size)  # a vocabulary's last shard is padded
        return shape


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
