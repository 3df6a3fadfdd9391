"""A mixture of experts in a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538), its experts spread over ranks.

The ranks of `mesh.experts` hold one copy of all experts. Each routes the tokens that it has and sends them to the ranks
whose experts they chose (dispatch.py). Each applies its experts (under etp its slices of them) to the tokens that it
received, one expert after another, and sends the sums back. No token is dropped, and no loss for load balance is added,
so results do not depend on the layout.

A bin may give the experts of its tokens, as a sampler chose them (routing replay: Ma et al. 2025, arXiv:2510.11370).
Then the router's scores only give the experts' weights, with gradients for the router.

Shape suffixes: s tokens of this rank, R tokens that came to it; K experts of a token, E experts, H hidden size; B
choices of this rank's experts, M those of one of them; F feed-forward size of an expert on this rank.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker import families
from megatron_worker.families import activate, clamped_gate
from megatron_worker.megatron.linears import ExpertLinear
from megatron_worker.megatron.parallel import Mesh, added, copied, dispatch
from megatron_worker.quantized import quantized_product
from shared.families.architecture import Mixture


class Router(torch.nn.Module):
    """Chooses the experts of each token, and their weights."""

    correction: Tensor | None

    def __init__(self, mixture: Mixture, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(mixture.num_experts, hidden_size, dtype=dtype))
        self.bias = Parameter(torch.empty(mixture.num_experts, dtype=dtype)) if mixture.stacked else None
        is_corrected = mixture.scoring == "sigmoid"  # in float32 whatever is computed in, and never trained
        self.register_buffer("correction", torch.zeros(mixture.num_experts) if is_corrected else None)
        self._mixture = mixture

    def forward(self, hidden_sH: Tensor, route_sK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights in the hidden states' dtype, and expert numbers: both [s, K].

        `route_sK`: the experts to take in place of those that the scores choose, as any kind of integers.
        """
        score_sE = families.scores(hidden_sH, self.weight, self._mixture, self.bias)
        expert_sK = families.choose(score_sE, self._mixture, self.correction) if route_sK is None else route_sK.long()
        return families.weights(score_sE, expert_sK, self._mixture).to(hidden_sH.dtype), expert_sK


class Expert(torch.nn.Module):
    """An MLP, or this rank's slice of it, with `ffn_size` channels: its output is then to be added up over etp."""

    def __init__(self, mixture: Mixture, hidden_size: int, ffn_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = ExpertLinear(hidden_size, (2 if mixture.is_gated else 1) * ffn_size, dtype)
        self.linear_fc2 = ExpertLinear(ffn_size, hidden_size, dtype)
        self._mixture = mixture

    def forward(self, hidden_MH: Tensor) -> Tensor:
        made_MF = self.linear_fc1(hidden_MH)
        output_MH: Tensor = self.linear_fc2(activate(made_MF, self._mixture.activation, self._mixture.is_gated))
        return output_MH


class NormedRouter(Router):
    """Norms and scales its input itself, and scales the weights of each expert's outputs."""

    def __init__(self, mixture: Mixture, hidden_size: int, dtype: torch.dtype, eps: float) -> None:
        super().__init__(mixture, hidden_size, dtype)
        self.scale = Parameter(torch.empty(hidden_size, dtype=dtype))
        self.expert_scale = Parameter(torch.empty(mixture.num_experts, dtype=dtype))
        self._eps = eps

    def forward(self, hidden_sH: Tensor, route_sK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        size = hidden_sH.shape[-1]
        normed_sH = F.rms_norm(hidden_sH, (size,), eps=self._eps) * self.scale * size**-0.5
        weight_sK, expert_sK = super().forward(normed_sH, route_sK)
        return weight_sK * self.expert_scale[expert_sK], expert_sK


class PlainStack(torch.nn.Module):
    """This rank's experts, each an MLP, as they are stored: [experts, outputs, inputs]."""

    def __init__(self, mixture: Mixture, num_experts: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._activation = mixture.activation
        self.gate_up_proj = Parameter(torch.empty(num_experts, 2 * mixture.ffn_size, hidden_size, dtype=dtype))
        self.down_proj = Parameter(torch.empty(num_experts, hidden_size, mixture.ffn_size, dtype=dtype))

    def forward(self, number: int, hidden_MH: Tensor) -> Tensor:
        made_MF = F.linear(hidden_MH, self.gate_up_proj[number])
        return F.linear(activate(made_MF, self._activation, True), self.down_proj[number])


class StackedExperts(torch.nn.Module):
    """This rank's experts, each a MLP with biases, as they are stored: [experts, inputs, outputs]. See ClampedGate.

    Gates and ups are interleaved.
    """

    def __init__(self, mixture: Mixture, num_experts: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert mixture.stacked is not None
        size, self._gate = mixture.ffn_size, mixture.stacked
        self.gate_up_proj = Parameter(torch.empty(num_experts, hidden_size, 2 * size, dtype=dtype))
        self.gate_up_proj_bias = Parameter(torch.empty(num_experts, 2 * size, dtype=dtype))
        self.down_proj = Parameter(torch.empty(num_experts, size, hidden_size, dtype=dtype))
        self.down_proj_bias = Parameter(torch.empty(num_experts, hidden_size, dtype=dtype))

    def forward(self, number: int, hidden_MH: Tensor) -> Tensor:
        product: Callable[..., Tensor] = torch.addmm if isinstance(self.down_proj, Tensor) else quantized_product
        made_MF = product(self.gate_up_proj_bias[number], hidden_MH, self.gate_up_proj[number])
        gated_MF = clamped_gate(self._gate, made_MF[:, ::2], made_MF[:, 1::2])
        return product(self.down_proj_bias[number], gated_MF, self.down_proj[number])


class SharedGate(torch.nn.Module):
    """The gate of the shared expert: a factor for each token, [s, 1]."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(1, hidden_size, dtype=dtype))

    def forward(self, hidden_sH: Tensor) -> Tensor:
        return F.linear(hidden_sH, self.weight).sigmoid()


class MegatronExperts(torch.nn.Module):
    """Replaces an MLP in megatron's spec.

    Args:
        shared: the MLP of the expert that all tokens go to, if any.
        norm: makes the norms of the experts' inputs and outputs, if they have any.
        place: the layer's number among the model's layers with experts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mixture: Mixture,
        mesh: Mesh,
        shared: Callable[[TransformerConfig], torch.nn.Module],
        norm: Callable[..., torch.nn.Module] | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        hidden_size, dtype = config.hidden_size, config.params_dtype
        self._per_rank = mixture.num_experts // mesh.ep.size
        self._first = mesh.ep.rank * self._per_rank
        own = range(self._first, self._first + self._per_rank)
        eps = config.layernorm_epsilon
        self.router = NormedRouter(mixture, hidden_size, dtype, eps) if norm else Router(mixture, hidden_size, dtype)
        self.experts: torch.nn.ModuleDict | StackedExperts | PlainStack
        if mixture.stacked is not None:
            self.experts = StackedExperts(mixture, self._per_rank, hidden_size, dtype)
        elif mixture.stacks is not None:
            self.experts = PlainStack(mixture, self._per_rank, hidden_size, dtype)
        else:
            sizes = mixture.latent_size or hidden_size, mixture.ffn_size // mesh.etp.size
            self.experts = torch.nn.ModuleDict({str(number): Expert(mixture, *sizes, dtype) for number in own})
        latent = mixture.latent_size
        self.latent_in: torch.nn.Module | None = ExpertLinear(hidden_size, latent, dtype) if latent else None
        self.latent_out: torch.nn.Module | None = ExpertLinear(latent, hidden_size, dtype) if latent else None
        if norm is not None:
            self.latent_in, self.latent_out = (norm(config, hidden_size, eps) for _ in range(2))
        self.shared_expert = shared(config) if mixture.shared_ffn_size else None
        is_gated = mixture.shared_ffn_size > 0 and mixture.shared_is_gated
        self.shared_gate = SharedGate(hidden_size, dtype) if is_gated else None
        self._mesh = mesh
        self.place = 0

    def forward(
        self, hidden_states: Tensor, *_: object, padding_mask: Tensor | None = None, **__: object
    ) -> tuple[Tensor, None]:
        """`padding_mask`: not a mask, but the experts of each of the model's layers, [layers, s, K]."""
        hidden_sH = hidden_states.reshape(-1, hidden_states.shape[-1])
        output_sH = self._routed(hidden_sH, None if padding_mask is None else padding_mask[self.place])
        if self.shared_expert is not None:
            shared_sH = self.shared_expert(hidden_states)[0].reshape(output_sH.shape)
            output_sH = output_sH + (shared_sH if self.shared_gate is None else self.shared_gate(hidden_sH) * shared_sH)
        return output_sH.view(hidden_states.shape), None

    def _routed(self, hidden_sH: Tensor, route_sK: Tensor | None) -> Tensor:
        weight_sK, expert_sK = self.router(hidden_sH, route_sK)
        if self.latent_in is None or self.latent_out is None:
            return self._exchanged(hidden_sH, weight_sK, expert_sK)
        output_sH: Tensor = self.latent_out(self._exchanged(self.latent_in(hidden_sH), weight_sK, expert_sK))
        return output_sH

    def _exchanged(self, hidden_sH: Tensor, weight_sK: Tensor, expert_sK: Tensor) -> Tensor:
        """Run each token's experts on it, on whichever ranks they are. H: the latent size, if there is one."""
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
        if isinstance(self.experts, StackedExperts | PlainStack):
            made = [self.experts(number, hidden_MH) for number, hidden_MH in enumerate(blocks)]
        else:
            made = [expert(hidden_MH) for expert, hidden_MH in zip(self.experts.values(), blocks, strict=True)]
        output_BH = torch.cat(made) * weight_RK.flatten()[choice_B, None]
        return added(output_BH, token_B, counts, len(hidden_RH))
