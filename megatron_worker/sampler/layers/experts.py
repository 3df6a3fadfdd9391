"""A mixture of experts in a layer of the decoder: a router, and an MLP for each expert.

**Why batching cannot change a result, and what that costs.** In a step, each expert that any slot chose computes all
slots, and the outputs for slots that did not choose it are dropped. So a slot's products have the same shapes, and the
slot the same row in them, whatever other slots choose. Each expert's weights are read at most once a step, and not at
all if no slot chose it; most of the arithmetic is wasted. Two alternatives are worse: products over only the slots that
chose an expert change their heights, and so their bits, with the choices of other slots; a product for each slot with
gathered weights reads an expert once for every slot that chose it. A prompt is read alone, so there each expert
computes only the tokens that chose it.

The formula is the trainer's: experts are chosen by the same functions (megatron_worker/families/routing.py), products
are in the weights' dtype, outputs added up in the order of the experts' numbers.

Shape suffixes: T tokens or slots, M those that chose one expert, H hidden size, E experts, K experts of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_worker.families import routing
from megatron_worker.sampler.layers.linears import FusedLinear, LoraFactors, Mlp, fuse_mlp
from shared.families.architecture import Mixture
from shared.families.tensor_slices import TensorSlice


@dataclass(frozen=True)
class SamplerExperts:
    """Takes the place of a layer's MLP. The router has no adapter: no trainer of ours trains one."""

    router_EH: Tensor
    mlps: tuple[Mlp, ...]
    mixture: Mixture

    @property
    def linears(self) -> list[FusedLinear]:
        return [linear for mlp in self.mlps for linear in mlp.linears]

    def __call__(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], chosen: list[Tensor], *, fixed_shapes: bool
    ) -> Tensor:
        """Return each token's weighted sum of its experts' outputs. Appends the experts, [T, K], to `chosen`.

        `fixed_shapes`: the shape of no product depends on what is chosen, as a step needs it.
        """
        weight_TK, expert_TK = self._route(x_TH)
        chosen.append(expert_TK)
        total_TH = torch.zeros_like(x_TH)
        for number in expert_TK.unique().tolist():
            token_M, choice_M = (expert_TK == number).nonzero(as_tuple=True)
            mlp = self.mlps[number]
            y_MH = mlp(x_TH, lora_weights)[token_M] if fixed_shapes else mlp(x_TH[token_M], lora_weights)
            total_TH.index_add_(0, token_M, y_MH * weight_TK[token_M, choice_M, None])
        return total_TH

    def _route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights in the tokens' dtype, and expert numbers: both [T, K]."""
        score_TE = routing.scores(x_TH, self.router_EH, self.mixture)
        expert_TK = routing.choose(score_TE, self.mixture)
        return routing.weights(score_TE, expert_TK, self.mixture).to(x_TH.dtype), expert_TK


def fuse_experts(
    module: str, mixture: Mixture, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> SamplerExperts:
    """Fuse the linears of each expert of the MLP with this Hugging Face name. The router stays in `weights`."""
    mlps = tuple(fuse_mlp(f"{module}.experts.{number}", weights, slices) for number in range(mixture.num_experts))
    return SamplerExperts(weights[f"{module}.gate.weight"], mlps, mixture)
