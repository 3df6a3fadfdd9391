"""A mixture of experts in a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538), its experts spread over ranks.

The ranks of `mesh.experts` hold one copy of all experts. Each routes the tokens that it has and sends them to the ranks
whose experts they chose (dispatch.py). Each applies its experts (under etp its slices of them) to the tokens that it
received, one expert after another, and sends the sums back. No token is dropped, and no loss for load balance is added,
so results do not depend on the layout.

A bin may say the experts of its tokens, as a sampler chose them (routing replay: Ma et al. 2025, arXiv:2510.11370).
Then the router's scores give their weights alone, and have its gradients, whatever function makes them.

Shape suffixes: s tokens of this rank, R tokens that came to it; K experts of a token, E experts, H hidden size; B
choices of this rank's experts, M those of one of them; F feed-forward size of an expert on this rank.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker.families.architecture import Mixture
from megatron_worker.megatron.lora import ExpertLinear
from megatron_worker.megatron.parallel.dispatch import added, copied, dispatch
from megatron_worker.megatron.parallel.mesh import Mesh


class Router(torch.nn.Module):
    """Chooses the experts of each token, and their weights."""

    def __init__(self, mixture: Mixture, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(mixture.num_experts, hidden_size, dtype=dtype))
        self._num_chosen, self._normalised = mixture.experts_per_token, mixture.is_normalised

    def forward(self, hidden_sH: Tensor, route_sK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights in the hidden states' dtype, and expert numbers: both [s, K]. The softmax is in float32.

        Args:
            route_sK: the experts to take in place of the likeliest, as any kind of integers.
        """
        logit_sE = F.linear(hidden_sH, self.weight)
        probability_sE = logit_sE.softmax(dim=-1, dtype=torch.promote_types(torch.float32, logit_sE.dtype))
        if route_sK is None:
            route_sK = probability_sE.detach().topk(self._num_chosen, dim=-1).indices
        expert_sK = route_sK.long()
        weight_sK = probability_sE.gather(-1, expert_sK)
        if self._normalised:
            weight_sK = weight_sK / weight_sK.sum(dim=-1, keepdim=True)
        return weight_sK.to(hidden_sH.dtype), expert_sK


class Expert(torch.nn.Module):
    """A SwiGLU MLP, or this rank's slice of it: its output is then to be added up over etp."""

    def __init__(self, hidden_size: int, ffn_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = ExpertLinear(hidden_size, 2 * ffn_size, dtype)
        self.linear_fc2 = ExpertLinear(ffn_size, hidden_size, dtype)

    def forward(self, hidden_MH: Tensor) -> Tensor:
        gate_MF, up_MF = self.linear_fc1(hidden_MH).chunk(2, dim=-1)
        output_MH: Tensor = self.linear_fc2(F.silu(gate_MF) * up_MF)
        return output_MH


class SharedGate(torch.nn.Module):
    """How much each token takes of the shared expert: [s, 1]."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(1, hidden_size, dtype=dtype))

    def forward(self, hidden_sH: Tensor) -> Tensor:
        return F.linear(hidden_sH, self.weight).sigmoid()


class MegatronExperts(torch.nn.Module):
    """Takes the place of an MLP in megatron's spec. `shared`: the MLP of the expert that all tokens go to, if any.

    `place`: its number among the model's layers with experts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mixture: Mixture,
        mesh: Mesh,
        shared: Callable[[TransformerConfig], torch.nn.Module],
        **_: object,
    ) -> None:
        super().__init__()
        hidden_size, dtype = config.hidden_size, config.params_dtype
        self._per_rank = mixture.num_experts // mesh.ep.size
        self._first = mesh.ep.rank * self._per_rank
        own = range(self._first, self._first + self._per_rank)
        self.router = Router(mixture, hidden_size, dtype)
        self.experts = torch.nn.ModuleDict(
            {str(number): Expert(hidden_size, mixture.ffn_size // mesh.etp.size, dtype) for number in own}
        )
        self.shared_expert = shared(config) if mixture.shared_ffn_size else None
        self.shared_gate = SharedGate(hidden_size, dtype) if mixture.shared_ffn_size else None
        self._mesh = mesh
        self.place = 0

    def forward(
        self, hidden_states: Tensor, *_: object, padding_mask: Tensor | None = None, **__: object
    ) -> tuple[Tensor, None]:
        """`padding_mask`: in the place of megatron's, the experts of each of its layers: [layers, s, K]."""
        hidden_sH = hidden_states.reshape(-1, hidden_states.shape[-1])
        output_sH = self._routed(hidden_sH, None if padding_mask is None else padding_mask[self.place])
        if self.shared_expert is not None and self.shared_gate is not None:
            shared_s1H, _bias = self.shared_expert(hidden_states)
            output_sH = output_sH + self.shared_gate(hidden_sH) * shared_s1H.reshape(output_sH.shape)
        return output_sH.view(hidden_states.shape), None

    def _routed(self, hidden_sH: Tensor, route_sK: Tensor | None) -> Tensor:
        weight_sK, expert_sK = self.router(hidden_sH, route_sK)
        if self._mesh.experts.size == 1:
            return self._computed(hidden_sH, weight_sK, expert_sK)
        way = dispatch(expert_sK, self._per_rank, self._mesh)
        expert_RK = way.out(expert_sK)
        both = way.out(torch.cat([hidden_sH, weight_sK], dim=1))  # in one message
        hidden_RH, weight_RK = both.split([hidden_sH.shape[1], weight_sK.shape[1]], dim=1)
        return way.back(self._computed(hidden_RH, weight_RK, expert_RK))

    def _computed(self, hidden_RH: Tensor, weight_RK: Tensor, expert_RK: Tensor) -> Tensor:
        """Return each token's weighted sum of the outputs of this rank's experts."""
        local = expert_RK.flatten() - self._first
        local[(local < 0) | (local >= self._per_rank)] = self._per_rank  # other ranks': sorted last
        counts = local.bincount(minlength=self._per_rank + 1)[: self._per_rank].tolist()
        choice_B = local.argsort(stable=True)[: sum(counts)]
        token_B = choice_B // expert_RK.shape[1]
        blocks = copied(hidden_RH, token_B, counts).split(counts)
        made = [expert(hidden_MH) for expert, hidden_MH in zip(self.experts.values(), blocks, strict=True)]
        output_BH = torch.cat(made) * weight_RK.flatten()[choice_B, None]
        return added(output_BH, token_B, counts, len(hidden_RH))
