"""LFM2: most layers mix tokens by a short gated convolution, the others by attention with norms of queries and keys."""

from dataclasses import replace
from typing import Literal

from pydantic import AliasChoices, Field

from shared.families.architecture import Attention, Mlp, ShortConv, TensorNames
from shared.families.config import DenseConfig


class Lfm2Config(DenseConfig):
    """The config of LFM2. Older names of fields count before newer ones, as in transformers."""

    family = "lfm2"
    names = TensorNames(
        **{"final_norm": "embedding_norm", "mixer_norm": "operator_norm", "mlp_norm": "ffn_norm"},
        **{"mlp": "feed_forward", "recurrent": "conv"},
    )
    always_on = ("block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init", "use_pos_enc")
    qk_norm = True

    intermediate_size: int = Field(
        default=12288, ge=1, strict=True, validation_alias=AliasChoices("block_ff_dim", "intermediate_size")
    )
    num_key_value_heads: int | None = Field(default=8, ge=1, strict=True)
    rms_norm_eps: float = Field(default=1e-5, validation_alias="norm_eps")
    rope_theta: float | None = 1_000_000.0
    tie_word_embeddings: bool = Field(
        default=True, strict=True, validation_alias=AliasChoices("tie_embedding", "tie_word_embeddings")
    )
    layer_types: tuple[Literal["conv", "full_attention"], ...] | None = None
    full_attn_idxs: tuple[int, ...] | None = None
    conv_L_cache: int = Field(default=3, ge=2)
    conv_bias: Literal[False] = False
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = Field(default=1.0, gt=0)
    block_multiple_of: int = Field(default=256, ge=1)

    @property
    def ffn_size(self) -> int:
        """The size of MLPs: with `block_auto_adjust_ff_dim` 2/3 of the configured size, scaled and rounded up."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size = int(2 * self.intermediate_size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        return -(-int(self.block_ffn_dim_multiplier * size) // self.block_multiple_of) * self.block_multiple_of

    @property
    def attends(self) -> tuple[bool, ...]:
        """For each layer, whether it has attention."""
        if self.layer_types is not None:
            return tuple(kind != "conv" for kind in self.layer_types)
        return tuple(self.full_attn_idxs is None or layer in self.full_attn_idxs for layer in self._numbers)

    def layers_problem(self) -> str | None:
        if len(self.attends) != self.num_hidden_layers:
            return f"layer_types names {len(self.attends)} layers, num_hidden_layers is {self.num_hidden_layers}"
        return None if any(self.attends) else "layer_types: at least one layer of attention is needed"

    def mixer_of(self, layer: int) -> Attention | ShortConv:
        if self.attends[layer]:
            return replace(self.attention_of(layer), names=("q_layernorm", "k_layernorm", "out_proj"))
        return ShortConv(self.hidden_size, self.conv_L_cache)

    def mlp_of(self, layer: int) -> Mlp:
        return Mlp(self.ffn_size, linears=("w1", "w3", "w2"))
