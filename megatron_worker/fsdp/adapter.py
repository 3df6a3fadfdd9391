"""LoRA beside transformers' linears, as PEFT's matrices (Hu et al. 2021, arXiv:2106.09685): whole on every rank.

Shape suffixes: T tokens, I input features, O output features, R rank.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Lora
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.fsdp.optimizer import FsdpOptimizer
from megatron_worker.fsdp.ranks import Ranks
from megatron_worker.tensors.adapter_slots import kaiming_uniform
from megatron_worker.tensors.flat_buffer import Flat
from shared.models.peft import PREFIX


class FsdpAdapter:
    """One slot: an adapter's weights beside every linear it targets, in one buffer, under PEFT's names."""

    def __init__(self, lora: Lora, sizes: Mapping[str, tuple[int, int]], ranks: Ranks, dtype: torch.dtype) -> None:
        """`sizes`: outputs and inputs of the model's linears."""
        self.lora = lora
        self._ranks = ranks
        self.slices: list[TensorSlice] = []
        for linear, (num_outputs, num_inputs) in sizes.items():
            if linear.split(".")[-1] in lora.targets:
                self.slices += [_whole(_a(linear), lora.rank, num_inputs), _whole(_b(linear), num_outputs, lora.rank)]
        self.flat = Flat({s.name: s.shape for s in self.slices}, dtype, ranks.device)
        self.parameters = {name: Parameter(view, requires_grad=False) for name, view in self.flat.views.items()}

    def initialise(self, seed: int) -> None:
        """Initialise the weights as PEFT does: A Kaiming-uniform, B zero."""
        for s in self.slices:
            if ".lora_A." in s.name:
                self.flat.views[s.name].copy_(kaiming_uniform(s.name, s.shape, seed))

    def new_optimizer(self) -> FsdpOptimizer:
        """Return an optimizer that trains this adapter."""
        return FsdpOptimizer(self.slices, self.parameters, self.flat.views, self._ranks)


def add_adapter(adapter: FsdpAdapter, linear: str, input_1TI: Tensor, output_1TO: Tensor) -> Tensor:
    """Add the adapter's output to a linear's, if it has one: y + scale (x A^T) B^T."""
    a_RI = adapter.parameters.get(_a(linear))
    if a_RI is None:
        return output_1TO
    low_TR = F.linear(input_1TI[0], a_RI)
    return torch.addmm(output_1TO[0], low_TR, adapter.parameters[_b(linear)].t(), alpha=adapter.lora.scale)[None]


def factor_names(linear: str) -> tuple[str, str]:
    """Return what the factors of a linear's adapter are called."""
    return _a(linear), _b(linear)


def _a(linear: str) -> str:
    return f"{PREFIX}{linear}.lora_A.weight"


def _b(linear: str) -> str:
    return f"{PREFIX}{linear}.lora_B.weight"


def _whole(name: str, *shape: int) -> TensorSlice:
    return TensorSlice(name, name, shape, None, 0, shape[0])
