"""Gemma 3 and 4: some layers attend within a window, norms surround each block, and embeddings are scaled.

In Gemma 4 heads differ by layer, values are normed, keys may be values, the last layers may share keys and values of
earlier ones, and there may be an embedding per layer. A vision tower is copied unchanged, and so are a layer's scalar,
which is not trained, and keys and values that no layer uses.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shared.families.architecture import (
    Architecture,
    Attention,
    ExpertStacks,
    Mixture,
    Mlp,
    NormedBlock,
    RopeConfig,
    SharedAttention,
)
from shared.families.config import SCALINGS, LayerRopesConfig, Tower

_TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


class GemmaConfig(LayerRopesConfig):
    """The settings that Gemma 3 and 4 share."""

    trains_by_fsdp = False
    always_on = ("use_qk_norm",)
    has_windows = qk_norm = True

    hidden_size: int = Field(default=2304, ge=1, strict=True)
    intermediate_size: int = Field(default=9216, ge=1, strict=True)
    num_attention_heads: int = Field(default=8, ge=1, strict=True)
    num_key_value_heads: int | None = Field(default=4, ge=1, strict=True)
    head_dim: int | None = 256
    tie_word_embeddings: bool = Field(default=True, strict=True)
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    num_kv_shared_layers: int = Field(default=0, ge=0)
    attention_k_eq_v: bool = False
    hidden_size_per_layer_input: int = Field(default=0, ge=0)

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: the last of its kind that makes them."""
        makers, windows = range(min(layer + 1, self.num_hidden_layers - self.num_kv_shared_layers)), self.windows
        return max(number for number in makers if windows[number] == windows[layer])

    def mlp_of(self, layer: int) -> Mlp | Mixture | None:
        return Mlp(self.intermediate_size, "gelu_tanh")

    def completed(self, whole: Architecture) -> Architecture:
        cap = self.final_logit_softcapping
        return replace(whole, block=NormedBlock(), embedding_scale=self.hidden_size**0.5, logit_cap=cap)


class Gemma3Config(GemmaConfig):
    """The config of Gemma 3, whose norms are zero-centred."""

    family = "gemma3"
    tower = Tower("gemma3", "language_model.model", ("vision_tower.", "multi_modal_projector."))

    vocab_size: int = Field(default=262_208, ge=1, strict=True)
    num_hidden_layers: int = Field(default=26, ge=1, strict=True)
    sliding_window: int | None = Field(default=4096, ge=1)
    query_pre_attn_scalar: float = Field(default=256, gt=0)
    attn_logit_softcapping: None = None
    use_bidirectional_attention: Literal[False] | None = None
    num_kv_shared_layers: Literal[0] = 0
    attention_k_eq_v: Literal[False] = False
    hidden_size_per_layer_input: Literal[0] = 0
    rope_theta: float | None = 1_000_000.0
    rope_local_base_freq: float = 10_000.0

    def own_problem(self) -> str | None:
        if self.tensor_prefix != "model" and not self.tie_word_embeddings:
            return "an output layer that is not tied is not supported beside a tower of vision"
        if self.tensor_prefix != "model" and self.final_logit_softcapping is not None:
            return "final_logit_softcapping: transformers has none beside a tower of vision"
        return super().own_problem()

    def rope_of(self, layer: int) -> RopeConfig:
        rope = super().rope_of(layer)
        return rope.model_copy(update={"rope_theta": rope.rope_theta or self.rope_local_base_freq})

    def attention_of(self, layer: int) -> Attention:
        return replace(super().attention_of(layer), scale=self.query_pre_attn_scalar**-0.5)

    def completed(self, whole: Architecture) -> Architecture:
        return replace(super().completed(whole), zero_centred_norms=True)


_Number = Annotated[int, Field(ge=0), BeforeValidator(lambda value: value or 0)]  # transformers writes null


class LayerHeads(BaseModel):
    """Attention sizes of one layer of Gemma 4. None: the model's."""

    model_config = ConfigDict(extra="forbid")

    head_dim: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)


class Gemma4Config(GemmaConfig):
    """The config of Gemma 4. Versions of transformers write sizes of layers as `global_…`, or as `per_layer_config`."""

    family = "gemma4"
    tower = Tower("gemma4", "model.language_model", tuple(f"model.{part}." for part in _TOWERS))
    rope_types = (*SCALINGS, "proportional")

    vocab_size: int = Field(default=262_144, ge=1, strict=True)
    num_hidden_layers: int = Field(default=30, ge=1, strict=True)
    sliding_window: int | None = Field(default=512, ge=1)
    rope_scaling: None = None  # not read by transformers, which uses `rope_parameters`
    global_head_dim: int = Field(default=512, ge=1)
    num_global_key_value_heads: int | None = Field(default=None, ge=1)
    per_layer_config: dict[int, LayerHeads] | None = None
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = Field(default=256, ge=0)
    vocab_size_per_layer_input: int = Field(default=262_144, ge=1)
    enable_moe_block: bool = False  # each layer has experts in addition to its MLP
    num_experts: _Number = 0
    num_experts_per_tok: _Number = Field(default=0, validation_alias="top_k_experts")
    moe_intermediate_size: _Number = 0
    use_bidirectional_attention: Literal["vision"] | None = None  # only for the tokens of images

    @model_validator(mode="before")
    @classmethod
    def _default_ropes(cls, values: dict[str, Any]) -> dict[str, Any]:
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
        both = {"full_attention": full, "sliding_attention": {"rope_theta": 10_000.0}}
        return values if values.get("rope_parameters") else values | {"rope_parameters": both}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (*super().windows[:-1], None)  # as transformers forces it

    def heads_of(self, layer: int) -> tuple[int, int]:
        size, num_kv_heads = super().heads_of(layer)
        if self.per_layer_config is not None:
            own = self.per_layer_config.get(layer, LayerHeads())
            return own.head_dim or size, own.num_key_value_heads or num_kv_heads
        if self.windows[layer] is not None:
            return size, num_kv_heads
        own_num = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return self.global_head_dim, own_num or num_kv_heads

    def own_problem(self) -> str | None:
        if problem := super().own_problem():
            return problem
        if self.enable_moe_block and not (
            self.moe_intermediate_size and 0 < self.num_experts_per_tok <= self.num_experts
        ):
            return "enable_moe_block=true needs moe_intermediate_size, num_experts, and top_k_experts of no more"
        if not set(self.windows) <= set(self.windows[: self.num_hidden_layers - self.num_kv_shared_layers]):
            return f"num_kv_shared_layers={self.num_kv_shared_layers} leaves no layer that makes what they share"
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            return f"vocab_size_per_layer_input={self.vocab_size_per_layer_input} is less than the vocabulary's size"
        return None

    def mlp_of(self, layer: int) -> Mlp | Mixture:
        is_wide = self.use_double_wide_mlp and self.source_of(layer) != layer
        mlp = Mlp(self.intermediate_size * (2 if is_wide else 1), "gelu_tanh")
        if not self.enable_moe_block:
            return mlp
        return Mixture(
            num_experts=self.num_experts,
            ffn_size=self.moe_intermediate_size,
            experts_per_token=self.num_experts_per_tok,
            shared_ffn_size=mlp.ffn_size,
            shared_is_gated=False,
            activation=mlp.activation,
            stacks=ExpertStacks("router.proj", "experts.gate_up_proj", "experts.down_proj"),
            is_beside=True,
        )

    def attention_of(self, layer: int) -> SharedAttention:
        source, own = self.source_of(layer), vars(super().attention_of(layer)) | {"scale": 1.0}
        is_own = source == layer
        return SharedAttention(
            **own,
            source=None if is_own else source,
            is_source=any(self.source_of(after) == layer for after in range(layer + 1, self.num_hidden_layers)),
            keys_are_values=is_own and self.attention_k_eq_v and self.windows[layer] is None,
        )

    def completed(self, whole: Architecture) -> Architecture:
        size = self.hidden_size_per_layer_input
        vocab_size = self.vocab_size_per_layer_input if size else 0
        block = NormedBlock(per_layer_size=size, per_layer_vocab_size=vocab_size, has_scalar=True)
        return replace(super().completed(whole), block=block)

    def unused(self) -> tuple[str, ...]:
        start, takers = f"{self.tensor_prefix}.layers", (n for n in self._numbers if self.source_of(n) != n)
        return tuple(f"{start}.{layer}.self_attn.{name}" for layer in takers for name in _OF_KEYS)


class Gemma4UnifiedConfig(Gemma4Config):
    """The config of Gemma 4 12B, which has no towers, no embeddings per layer and no experts."""

    family = "gemma4_unified"
    tower = Tower(
        "gemma4_unified",
        "model.language_model",
        ("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),  # as published, and by transformers
    )

    sliding_window: int | None = Field(default=1024, ge=1)
    hidden_size_per_layer_input: Literal[0] = 0
    enable_moe_block: Literal[False] = False
    use_bidirectional_attention: Literal["vision"] | None = "vision"
