"""LoRA on transformers' linears, as PEFT's matrices (Hu et al. 2021, arXiv:2106.09685): whole on every rank.

Shape suffixes: T tokens, I input features, O output features, R rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from longshore.training import Lora
from megatron_worker.fsdp.optimizer import FsdpOptimizer
from megatron_worker.fsdp.ranks import Ranks
from megatron_worker.head import scalar
from megatron_worker.head.beside import BesideHead
from megatron_worker.tensors.adapter_tensors import initial, norms_of_rows
from megatron_worker.tensors.dropout import Masks, dropped
from megatron_worker.tensors.flat_buffer import Flat
from shared.errors import InvalidInput
from shared.families.tensor_slices import TensorSlice
from shared.models.lora_modules import OUTPUT, AdaptedModules
from shared.models.peft import NORMS, PREFIX, factor_of

Sizes = Mapping[str, tuple[int, int]]


class FsdpAdapter:
    """One slot: an adapter's weights for every linear it targets, and its head, in one buffer."""

    def __init__(self, lora: Lora, sizes: Sizes, more: Sequence[TensorSlice], ranks: Ranks, dtype: torch.dtype) -> None:
        """`sizes`: outputs and inputs of the model's linears. `more`: the tensors that belong to no linear.

        Raises InvalidInput if DoRA's rows would be split.
        """
        if lora.dora and ranks.tp_size > 1:
            raise InvalidInput("the engine fsdp knows no norms of split rows: use megatron, or tp=1", "dora")
        self.lora, self.masks = lora, Masks(lora.dropout, seed=0)
        self._ranks = ranks
        self.slices: list[TensorSlice] = []
        self.scales: dict[str, float] = {}
        adapted = AdaptedModules(lora)
        for linear, (num_outputs, num_inputs) in sizes.items():
            if (size := adapted.of(linear)) is not None:
                self.slices += [_whole(_a(linear), size.rank, num_inputs), _whole(_b(linear), num_outputs, size.rank)]
                self.slices += [_whole(f"{PREFIX}{linear}{NORMS}", num_outputs)] if lora.dora else []
                self.scales[linear] = size.scale
        self.slices += more
        self.flat = Flat({s.parameter: s.shape for s in self.slices}, dtype, ranks.device)
        self.parameters = {name: Parameter(view, requires_grad=False) for name, view in self.flat.views.items()}

    def initialise(self, seed: int) -> None:
        """Initialise the weights by `initial`."""
        for s in self.slices:
            if (whole := initial(s, seed)) is not None:
                self.flat.views[s.parameter].copy_(whole)

    def factors(self, linear: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a linear's adapter."""
        return self.parameters[_a(linear)], self.parameters[_b(linear)]

    def counted_once(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a module that every tensor-parallel rank computes whole, with gradients on rank 0 only."""
        a, b = self.factors(module)
        return counted_by(self._ranks.tp_rank == 0, a), counted_by(self._ranks.tp_rank == 0, b)

    def low(self, linear: str, input_TI: Tensor, a_RI: Tensor) -> Tensor:
        """Return A applied to a linear's input, [T, R], with dropout on the input if masks are drawn."""
        return F.linear(self.kept(linear, input_TI), a_RI)

    def kept(self, linear: str, input_TI: Tensor) -> Tensor:
        return dropped(input_TI, self.masks.rate, self.masks.seed_of(linear, self._ranks.rank))

    def beside_head(self, hidden_NH: Tensor) -> BesideHead | None:
        """Return what the output layer's adapter adds to the logits of some targets, if there is such an adapter."""
        if OUTPUT not in self.scales:
            return None
        a_RH, b_VR = self.counted_once(OUTPUT)
        return BesideHead(self.low(OUTPUT, hidden_NH, a_RH) * self.scales[OUTPUT], b_VR)

    def scalar_head(self) -> scalar.HeadWeights | None:
        """Return the head of scalars, if it has one."""
        is_counted = self._ranks.tp_rank == 0
        own = {name: p for name, p in self.parameters.items() if name.startswith(scalar.MODULE)}
        return scalar.HeadWeights.among({name: counted_by(is_counted, p) for name, p in own.items()})

    def new_optimizer(self) -> FsdpOptimizer:
        """Return an optimizer that trains this adapter."""
        return FsdpOptimizer(self.slices, self.parameters, self.flat.views, self._ranks)


def add_adapter(
    adapter: FsdpAdapter,
    linear: str,
    input_1TI: Tensor,
    output_1TO: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
) -> Tensor:
    """Add the adapter's output to a linear's, if it has one: y + scale (x A^T) B^T, each row of DoRA's norm."""
    if linear not in adapter.scales:
        return output_1TO
    a_RI, b_OR = adapter.factors(linear)
    if adapter.lora.dora:
        norm_O = norms_of_rows(weight_OI, b_OR @ a_RI * adapter.scales[linear]).to(weight_OI.dtype)
        gain_O = adapter.parameters[f"{PREFIX}{linear}{NORMS}"] / norm_O
        alone_1TO = output_1TO if bias_O is None else output_1TO - bias_O
        if adapter.masks.rate:
            alone_1TO = F.linear(adapter.kept(linear, input_1TI[0]), weight_OI)[None]
        output_1TO, b_OR = output_1TO + alone_1TO * (gain_O - 1), b_OR * gain_O[:, None]
    return add_low(adapter, linear, adapter.low(linear, input_1TI[0], a_RI), b_OR, output_1TO)


def add_to_tokens(adapter: FsdpAdapter, module: str, table: Any, token_1T: Tensor, output_1TH: Tensor) -> Tensor:
    """Add the adapter's output to the embeddings of tokens, if these have one."""
    if module not in adapter.scales:
        return output_1TH
    a_RV, b_HR = adapter.counted_once(module)
    scale = adapter.scales[module] * getattr(table, "embed_scale", 1.0)
    return output_1TH + F.embedding(token_1T, a_RV.t()) * scale @ b_HR.t()


def add_low(adapter: FsdpAdapter, linear: str, low_TR: Tensor, b_OR: Tensor, output_1TO: Tensor) -> Tensor:
    """Add to a linear's output the product of B, or of this rank's part of it, with A's output `low_TR`."""
    return torch.addmm(output_1TO[0], low_TR, b_OR.t(), alpha=adapter.scales[linear])[None]


def counted_by(this_rank: bool, factor: Tensor) -> Tensor:
    """Return a factor whose gradient is of zeros on the other tensor-parallel ranks. They go backward all the same."""
    return factor if this_rank else factor.detach() + 0 * factor


def _a(linear: str) -> str:
    return factor_of(f"{linear}.weight", "A")


def _b(linear: str) -> str:
    return factor_of(f"{linear}.weight", "B")


def _whole(name: str, *shape: int) -> TensorSlice:
    return TensorSlice(name, name, shape, None, 0, shape[0])
