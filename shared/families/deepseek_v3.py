"""DeepSeek-V3, and GLM-4's models that are built like it (glm4_moe_lite): multi-head latent attention, and experts."""

import math
from typing import Literal

from pydantic import AliasChoices, Field

from shared.families.architecture import LatentAttention, TensorNames, yarn_magnitude
from shared.families.config import GroupedMixtureConfig, Size


class SparseConfig(GroupedMixtureConfig):
    """The config of experts in all layers but the first, and perhaps of layers of multi-token prediction, which follow
    the decoder's and are copied unchanged."""

    names = TensorNames(shared_expert="shared_experts")

    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    first_k_dense_replace: int | None = Field(default=None, ge=0)
    num_predicting_layers: int = Field(
        default=0, ge=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    @property
    def shared_ffn_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return tuple(layer >= (self.first_k_dense_replace or 0) for layer in self._numbers)

    def own_problem(self) -> str | None:
        return super().own_problem() or self.groups_problem()

    def unused(self) -> tuple[str, ...]:
        first = self.num_hidden_layers
        return tuple(f"{self.tensor_prefix}.layers.{first + n}." for n in range(self.num_predicting_layers))


class LatentConfig(SparseConfig):
    """The config of multi-head latent attention."""

    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    q_lora_rank: int | None = Field(ge=1)
    kv_lora_rank: int = Size
    qk_nope_head_dim: int = Size
    qk_rope_head_dim: int = Size
    v_head_dim: int = Size
    rope_interleave: bool = True
    partial_rotary_factor: float = 1.0

    @property
    def size_of_heads(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def has_experts(self) -> tuple[bool, ...]:
        if self.mlp_layer_types is not None:
            return tuple(kind == "sparse" for kind in self.mlp_layer_types)
        return super().has_experts

    def own_problem(self) -> str | None:
        if problem := super().own_problem():
            return problem
        num_layers, first = self.num_hidden_layers, self.first_k_dense_replace
        if len(self.has_experts) != num_layers:
            return f"mlp_layer_types names {len(self.has_experts)} layers of {num_layers}"
        if first is not None and self.has_experts != tuple(layer >= first for layer in self._numbers):
            return f"first_k_dense_replace is {first}, and another part of the layers is dense by mlp_layer_types"
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            return f"num_key_value_heads is {self.num_key_value_heads}: with latents each head has keys of its own"
        if self.qk_rope_head_dim % 2 or {self.partial_rotary_factor, self.rope.partial_rotary_factor or 1} != {1}:
            return f"qk_rope_head_dim is {self.qk_rope_head_dim}: all of it must be rotated, by pairs"
        return None

    def attention_of(self, layer: int) -> LatentAttention:
        own, rope = vars(super().attention_of(layer)) | {"num_kv_heads": self.num_attention_heads}, self.rope
        if rope.rope_type != "default" and rope.mscale_all_dim and rope.factor is not None:  # YaRN's magnitude, squared
            own["scale"] = yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2 / math.sqrt(self.size_of_heads)
        return LatentAttention(
            **own,
            query_rank=self.q_lora_rank,
            latent_size=self.kv_lora_rank,
            value_size=self.v_head_dim,
            is_interleaved=self.rope_interleave,
        )


class DeepseekV3Config(LatentConfig):
    """The config of DeepSeek-V3."""

    family = "deepseek_v3"

    first_k_dense_replace: int | None = Field(default=3, ge=0)


class Glm4MoeLiteConfig(LatentConfig):
    """The config of GLM-4.7-Flash. The first layer is dense, if the file does not list them."""

    family = "glm4_moe_lite"

    rms_norm_eps: float = 1e-5

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return super().has_experts if self.mlp_layer_types else tuple(layer > 0 for layer in self._numbers)
