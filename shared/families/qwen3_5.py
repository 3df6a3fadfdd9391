"""Qwen3.5 and 3.6, dense and mixture: gated delta nets and, between them, attention layers with an output gate.

All norms except the delta net's are zero-centred, and attention rotates a part of each head. The checkpoints' other
tensors, of a vision tower and of multi-token prediction, are copied unchanged.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from shared.families.architecture import Architecture, DeltaNet, Mixer
from shared.families.config import MixtureConfig, PartRotatedConfig, Size, Tower

_BESIDE = ("mtp.", "model.visual.")


class HybridConfig(PartRotatedConfig):
    """The config of Qwen3.5."""

    family = "qwen3_5"
    tower = Tower("qwen3_5", "model.language_model", _BESIDE)
    always_carried = _BESIDE[:1]
    trains_by_fsdp = False
    always_on = ("use_qk_norm",)
    qk_norm = True

    head_dim: int | None = 256
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] | None = None
    full_attention_interval: int = Field(default=4, ge=1)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    linear_conv_kernel_dim: int = Field(default=4, ge=2)
    linear_key_head_dim: int = Field(default=128, ge=1)
    linear_value_head_dim: int = Field(default=128, ge=1)
    linear_num_key_heads: int = Field(default=16, ge=1)
    linear_num_value_heads: int = Field(default=32, ge=1)

    @property
    def is_recurrent(self) -> tuple[bool, ...]:
        """For each layer, whether it is a gated delta net."""
        if self.layer_types is not None:
            return tuple(kind == "linear_attention" for kind in self.layer_types)
        return tuple((layer + 1) % self.full_attention_interval > 0 for layer in range(self.num_hidden_layers))

    def layers_problem(self) -> str | None:
        found, num_layers = len(self.is_recurrent), self.num_hidden_layers
        return None if found == num_layers else f"layer_types names {found} layers, num_hidden_layers is {num_layers}"

    def own_problem(self) -> str | None:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            heads = f"{self.linear_num_key_heads} key heads do not divide {self.linear_num_value_heads} value heads"
            return f"linear attention: {heads}"
        return super().own_problem()

    def mixer_of(self, layer: int) -> Mixer:
        if not self.is_recurrent[layer]:
            return replace(self.attention_of(layer), is_gated=True)
        return DeltaNet(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_size=self.linear_key_head_dim,
            value_size=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
        )

    def completed(self, whole: Architecture) -> Architecture:
        return replace(whole, zero_centred_norms=True)


class HybridMixtureConfig(HybridConfig, MixtureConfig):
    """The config of Qwen3.5's mixtures, which have one more expert that every token goes to."""

    family = "qwen3_5_moe"
    tower = Tower("qwen3_5_moe", "model.language_model", _BESIDE)

    intermediate_size: int = 0
    norm_topk_prob: Literal[True] = True
    shared_expert_intermediate_size: int = Size

    @property
    def shared_ffn_size(self) -> int:
        return self.shared_expert_intermediate_size
