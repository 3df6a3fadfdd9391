"""A gated delta net in place of attention, its heads split over tensor-parallel ranks.

megatron-core's class (ssm/gated_delta_net.py) needs flash-linear-attention, which runs only on CUDA, supports neither
sequences of a bin nor branches, and applies its norm's gate in another dtype than the published models.

Shape suffixes: T tokens of a bin; G value heads of this rank and V the size of each; J channels of its convolution.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker.megatron.attention import BinPlan
from megatron_worker.megatron.lora import AdaptedColumnLinear, AdaptedRowLinear
from megatron_worker.mixers.delta_rule import convolve, gated_delta_rule, gated_norm, heads_of, log_decay
from shared.families.architecture import DeltaNet


class GatedNorm(torch.nn.Module):
    """The norm of each head's output, times the SiLU of its gate; in float32, except the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(x, gate, self.weight, self.eps)


class GatedDeltaNet(torch.nn.Module):
    """Takes the place of self-attention in megatron's spec."""

    def __init__(self, config: TransformerConfig, delta_net: DeltaNet, **_: object) -> None:
        super().__init__()
        tp, dtype = config.tensor_model_parallel_size, config.params_dtype
        self._delta_net, self._num_ranks = delta_net, tp
        self._sizes = [size // tp for size in delta_net.made_sizes]
        num_channels, _, num_heads, _ = self._sizes
        # No weight is initialised: `init_method` is not called.
        linear = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
        made, values = sum(delta_net.made_sizes), delta_net.num_values
        self.in_proj = AdaptedColumnLinear(config.hidden_size, made, gather_output=False, **linear)
        self.out_proj = AdaptedRowLinear(values, config.hidden_size, input_is_parallel=True, **linear)
        self.conv_weight = Parameter(torch.empty(num_channels, 1, delta_net.conv_width, dtype=dtype))
        self.A_log = Parameter(torch.empty(num_heads, dtype=dtype))
        self.dt_bias = Parameter(torch.empty(num_heads, dtype=dtype))
        self.norm = GatedNorm(delta_net.value_size, config.layernorm_epsilon, dtype)

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, Tensor | None]:
        plan, a = attention_mask.recurrence, self._delta_net
        assert plan is not None
        made_T1X, _bias = self.in_proj(hidden_states)
        mixed_TJ, gate_TX, step_TG, decay_TG = made_T1X[:, 0].split(self._sizes, dim=-1)
        output_TGV = gated_delta_rule(
            *heads_of(convolve(mixed_TJ, self.conv_weight[:, 0], plan), a, self._num_ranks),
            log_decay(decay_TG, self.A_log, self.dt_bias),
            step_TG.sigmoid(),
            plan,
        )
        normed_TGV = self.norm(output_TGV, gate_TX.unflatten(-1, (-1, a.value_size)))
        output, bias = self.out_proj(normed_TGV.flatten(1)[:, None])
        return output, bias
