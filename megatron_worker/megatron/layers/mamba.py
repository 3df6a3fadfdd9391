"""A Mamba-2 mixer in place of attention, its groups of heads split over tensor-parallel ranks.

megatron-core's class (ssm/mamba_mixer.py) makes its weights on CUDA, requires the kernels of mamba-ssm and
causal-conv1d, supports no branches, and has no setting for the published models' least step.

Shape suffixes: T tokens of a bin; of this rank H heads, P the size of each, I their values; J channels of its
convolution.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker.megatron.attention import BinPlan
from megatron_worker.megatron.lora import AdaptedColumnLinear, AdaptedRowLinear
from megatron_worker.mixers.delta_rule import convolve
from megatron_worker.mixers.mamba2 import gated_group_norm, scan, steps
from shared.families.architecture import Mamba2


class Mamba2Mixer(torch.nn.Module):
    """Takes the place of self-attention in megatron's spec."""

    def __init__(self, config: TransformerConfig, mamba: Mamba2, **_: object) -> None:
        super().__init__()
        tp, dtype = config.tensor_model_parallel_size, config.params_dtype
        self._mamba, self._num_groups, self._eps = mamba, mamba.num_groups // tp, config.layernorm_epsilon
        num_values, *mixed, num_heads = (size // tp for size in mamba.made_sizes)
        self._mixed, self._made = mixed, [num_values, sum(mixed), num_heads]
        # No weight is initialised: `init_method` is not called.
        linear = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
        self.in_proj = AdaptedColumnLinear(config.hidden_size, sum(mamba.made_sizes), gather_output=False, **linear)
        self.out_proj = AdaptedRowLinear(mamba.num_values, config.hidden_size, input_is_parallel=True, **linear)
        self.conv_weight = Parameter(torch.empty(sum(mixed), 1, mamba.conv_width, dtype=dtype))
        self.conv_bias = Parameter(torch.empty(sum(mixed), dtype=dtype)) if mamba.conv_bias else None
        self.A_log, self.D, self.dt_bias = (Parameter(torch.empty(num_heads, dtype=dtype)) for _ in range(3))
        self.output_scale = Parameter(torch.empty(num_values, dtype=dtype))  # of the norm of this rank's own groups

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, Tensor | None]:
        plan, a = attention_mask.recurrence, self._mamba
        assert plan is not None
        made_T1X, _bias = self.in_proj(hidden_states)
        gate_TI, mixed_TJ, step_TH = made_T1X[:, 0].split(self._made, dim=-1)
        mixed_TJ = convolve(mixed_TJ, self.conv_weight[:, 0], plan, self.conv_bias)
        value_TI, key, query = mixed_TJ.split(self._mixed, dim=-1)
        value_THP = value_TI.unflatten(-1, (-1, a.head_size))
        key_TGN, query_TGN = (x.unflatten(-1, (-1, a.state_size)) for x in (key, query))
        step_TH = steps(step_TH, self.dt_bias, a.least_step)
        log_decay_TH = -step_TH * self.A_log.to(step_TH.dtype).exp()
        output_THP = scan(value_THP, key_TGN, query_TGN, step_TH, log_decay_TH, plan)
        output_THP = output_THP + value_THP * self.D[:, None].to(output_THP.dtype)
        normed_TI = gated_group_norm(output_THP.flatten(1), gate_TI, self.output_scale, self._num_groups, self._eps)
        output, bias = self.out_proj(normed_TI[:, None].to(hidden_states.dtype))
        return output, bias
