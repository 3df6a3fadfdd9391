"""A gated delta net in a layer of the decoder: a prompt is read in chunks, and a step is the rule for one token.

A step is products of one token's own numbers and sums of them, so that no slot's result depends on another's.

Shape suffixes: B slots, T tokens of a prompt, H hidden size, J channels of the convolution, W its width, G value heads,
K size of a key, V size of a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.families.architecture import DeltaNet
from megatron_worker.families.qwen3_5 import IN_PROJECTIONS
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.mixers.delta_rule import (
    RecurrentPlan,
    convolve,
    gated_delta_rule,
    gated_norm,
    heads_of,
    log_decay,
    unit_length,
)
from megatron_worker.sampler.layers.linears import FusedLinear, LoraFactors, fuse


@dataclass(frozen=True)
class RecurrentState:
    """What a delta net keeps of tokens that were read: the last W - 1 of its channels' inputs, [..., J, W - 1], and its
    states, [..., G, K, V] float32. In a cache the first dimension is the slots."""

    inputs: Tensor
    states: Tensor

    @classmethod
    def zeros(cls, a: DeltaNet, num_slots: int, dtype: torch.dtype, device: torch.device) -> "RecurrentState":
        return cls(
            torch.zeros(num_slots, sum(a.mixed_sizes), a.conv_width - 1, dtype=dtype, device=device),
            torch.zeros(num_slots, a.num_value_heads, a.key_size, a.value_size, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes + self.states.nbytes

    def fill(self, slot: int, read: "RecurrentState") -> None:
        self.inputs[slot], self.states[slot] = read.inputs, read.states


@dataclass(frozen=True)
class SamplerDeltaNet:
    """Takes the place of a layer's attention."""

    delta_net: DeltaNet
    made: FusedLinear
    output: FusedLinear
    conv_JW: Tensor
    log_rate_G: Tensor
    bias_G: Tensor
    norm_V: Tensor
    norm_eps: float

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.made, self.output]

    def read(
        self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors], plan: RecurrentPlan
    ) -> tuple[Tensor, RecurrentState]:
        """Read a prompt. Returns the layer's output, [T, H], and the state behind it."""
        mixed_TJ, gate_TX, step_TG, decay_TG = self._made(x_TH, lora_weights)
        mixed = convolve(mixed_TJ, self.conv_JW, plan)
        found, states = gated_delta_rule(
            *heads_of(mixed, self.delta_net), log_decay(decay_TG, self.log_rate_G, self.bias_G), step_TG.sigmoid(), plan
        )
        width = self.conv_JW.shape[1] - 1
        last_JW = F.pad(mixed_TJ, (0, 0, width, 0))[-width:].t()
        return self._gated(found, gate_TX, lora_weights), RecurrentState(last_JW, states[0])

    def step(self, x_BH: Tensor, lora_weights: Mapping[str, LoraFactors], state: RecurrentState) -> Tensor:
        """Compute one token of every slot, and change the state to that behind it. Returns [B, H]."""
        mixed_BJ, gate_BX, step_BG, decay_BG = self._made(x_BH, lora_weights)
        seen_BJW = torch.cat([state.inputs, mixed_BJ[..., None]], dim=-1)
        state.inputs.copy_(seen_BJW[..., 1:])
        query, key, value = (x.float() for x in heads_of(F.silu((seen_BJW * self.conv_JW).sum(-1)), self.delta_net))
        per_key_head = value.shape[1] // key.shape[1]
        query, key = (unit_length(x).repeat_interleave(per_key_head, dim=1) for x in (query, key))
        decay_BG11 = log_decay(decay_BG, self.log_rate_G, self.bias_G).exp()[..., None, None]
        kept_BGKV = state.states * decay_BG11
        change_BGV = (value - (kept_BGKV * key[..., None]).sum(-2)) * step_BG.sigmoid().float()[..., None]
        state.states.copy_(kept_BGKV + key[..., None] * change_BGV[..., None, :])
        found_BGV = (state.states * (query * query.shape[-1] ** -0.5)[..., None]).sum(-2)
        return self._gated(found_BGV.to(x_BH.dtype), gate_BX, lora_weights)

    def _made(self, x_TH: Tensor, lora_weights: Mapping[str, LoraFactors]) -> tuple[Tensor, ...]:
        return self.made(x_TH, lora_weights).split(list(self.delta_net.made_sizes), dim=-1)

    def _gated(self, found_TGV: Tensor, gate_TX: Tensor, lora_weights: Mapping[str, LoraFactors]) -> Tensor:
        gate_TGV = gate_TX.unflatten(-1, (-1, self.delta_net.value_size))
        normed_TGV = gated_norm(found_TGV, gate_TGV, self.norm_V, self.norm_eps)
        return self.output(normed_TGV.flatten(1), lora_weights)


def fuse_delta_net(
    module: str, a: DeltaNet, norm_eps: float, weights: dict[str, Tensor], slices: Mapping[str, TensorSlice]
) -> SamplerDeltaNet:
    """Fuse the linears of the delta net with this Hugging Face name. What is no linear stays in `weights`."""
    made = [f"{module}.{name}" for name in IN_PROJECTIONS]
    return SamplerDeltaNet(
        delta_net=a,
        made=fuse(f"{module}.made", made, weights, slices),
        output=fuse(f"{module}.output", [f"{module}.out_proj"], weights, slices),
        conv_JW=weights[f"{module}.conv1d.weight"][:, 0],
        log_rate_G=weights[f"{module}.A_log"],
        bias_G=weights[f"{module}.dt_bias"],
        norm_V=weights[f"{module}.norm.weight"],
        norm_eps=norm_eps,
    )
