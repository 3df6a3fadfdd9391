"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 mixer, attention without positions, an MLP, or experts.

MLPs have no gate; experts may work in fewer dimensions than the model. transformers writes `backbone` for `model`.
"""

from dataclasses import replace
from typing import Any, Literal

from pydantic import AliasChoices, Field

from shared.errors import InvalidInput
from shared.families.architecture import Mamba2, Mixer, Mixture, Mlp, TensorNames
from shared.families.config import GroupedMixtureConfig

Block = Literal["mamba", "attention", "mlp", "moe"]
_BLOCKS: dict[str, Block] = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"},
}


class NemotronHConfig(GroupedMixtureConfig):
    """The config of Nemotron-H: each layer is one block, a Mamba-2 mixer, attention, an MLP or experts."""

    family = "nemotron_h"
    prefixes = ("backbone", "model")
    always_carried = ("mtp.",)
    names = TensorNames(*("embeddings", "norm_f", "norm", "norm", "mixer", "mixer"), "shared_experts", "mixer")

    intermediate_size: int = Field(default=21504, ge=1, strict=True)
    num_key_value_heads: int | None = Field(default=8, ge=1, strict=True)
    head_dim: int | None = 128
    blocks: tuple[Block, ...]
    rms_norm_eps: float = Field(default=1e-5, validation_alias="layer_norm_epsilon")
    tie_word_embeddings: Literal[False] = False  # transformers would tie nothing
    mlp_hidden_act: Literal["relu2"] = "relu2"
    use_bias: Literal[False] = False
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_num_heads: int = Field(default=128, ge=1)
    mamba_head_dim: int = Field(default=64, ge=1)
    ssm_state_size: int = Field(default=128, ge=1)
    n_groups: int = Field(default=8, ge=1, validation_alias=AliasChoices("mamba_n_groups", "n_groups"))
    conv_kernel: int = Field(default=4, ge=2, validation_alias=AliasChoices("mamba_d_conv", "conv_kernel"))
    use_conv_bias: bool = Field(default=True, validation_alias=AliasChoices("mamba_conv_bias", "use_conv_bias"))
    time_step_min: float = Field(default=0.001, validation_alias=AliasChoices("mamba_dt_min", "time_step_min"))
    num_experts: int = Field(default=8, ge=2, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: int = Field(default=2, ge=1)
    moe_intermediate_size: int = Field(default=7688, ge=1)
    moe_shared_expert_intermediate_size: int = Field(default=7688, ge=1)
    moe_latent_size: int | None = Field(default=None, ge=1)
    n_group: int = Field(default=1, ge=1)
    topk_group: int = Field(default=1, ge=1)
    routed_scaling_factor: float = 1.0

    @property
    def shared_ffn_size(self) -> int:
        return self.moe_shared_expert_intermediate_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return tuple(block == "moe" for block in self.blocks)

    def own_problem(self) -> str | None:
        if self.sliding_window is not None:
            return f"a sliding_window, here of {self.sliding_window} tokens, is not supported"
        if "attention" not in self.blocks:
            return "layers_block_type: at least one layer of attention is needed"
        if self.mamba_num_heads % self.n_groups:
            return f"n_groups: {self.n_groups} groups do not divide {self.mamba_num_heads} heads of Mamba layers"
        return self.groups_problem()

    @classmethod
    def made_of(cls, values: dict[str, Any], place: str) -> dict[str, Any]:
        """Return each layer's block. transformers lists words; published files have one letter per layer."""
        words, letters = values.get("layers_block_type"), values.get("hybrid_override_pattern")
        found = letters if words is None else words
        if not isinstance(found, list if words is not None else str) or not found:
            raise InvalidInput("layers_block_type or hybrid_override_pattern has to say what each layer is", place)
        for kind in found:
            if not isinstance(kind, str) or kind not in _BLOCKS:
                raise InvalidInput(f"layers_block_type: a layer of the kind {kind!r:.40} is not known", place)
        blocks = [_BLOCKS[kind] for kind in found]
        return {"blocks": blocks, "num_hidden_layers": len(blocks), "layer_types": None}

    def mixer_of(self, layer: int) -> Mixer | None:
        match self.blocks[layer]:
            case "attention":
                return replace(self.attention_of(layer), rope=None)
            case "mamba":
                return Mamba2(
                    num_heads=self.mamba_num_heads,
                    head_size=self.mamba_head_dim,
                    state_size=self.ssm_state_size,
                    num_groups=self.n_groups,
                    conv_width=self.conv_kernel,
                    conv_bias=self.use_conv_bias,
                    least_step=self.time_step_min,
                )
        return None

    def mlp_of(self, layer: int) -> Mlp | Mixture | None:
        match self.blocks[layer]:
            case "mlp":
                return Mlp(self.intermediate_size, "relu2", is_gated=False)
            case "moe":
                latent_size = self.moe_latent_size or 0
                return replace(self.mixture(), activation="relu2", is_gated=False, latent_size=latent_size)
        return None
