"""The settings of Gemma 3 and 4, and which of them are not supported."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from longshore.training import Linear
from shared.models.families import SCALINGS, DenseConfig, LayerRopesConfig, RopeConfig

_SIZES = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
_SIZES |= {"head_dim": 256, "tie_word_embeddings": True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {**_SIZES, "vocab_size": 262_208, "num_hidden_layers": 26, "sliding_window": 4096},
    "gemma4": {**_SIZES, "vocab_size": 262_144, "num_hidden_layers": 30, "sliding_window": 512},
}


class GemmaConfig(LayerRopesConfig):
    """The settings that Gemma 3 and 4 share."""

    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    num_kv_shared_layers: int = Field(default=0, ge=0)
    attention_k_eq_v: bool = False
    hidden_size_per_layer_input: int = Field(default=0, ge=0)

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: the last of its kind that makes them."""
        makers = range(min(layer + 1, self.num_hidden_layers - self.num_kv_shared_layers))
        return max(number for number in makers if self.windows[number] == self.windows[layer])

    def missing_in(self, layer: int) -> tuple[Linear, ...]:
        """Return the linears that a layer lacks: its keys may also be its values, or both may be another layer's."""
        if self.source_of(layer) != layer:
            return "k_proj", "v_proj"
        return ("v_proj",) if self.attention_k_eq_v and self.windows[layer] is None else ()


class Gemma3Config(GemmaConfig):
    """The config of Gemma 3."""

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


_Number = Annotated[int, Field(ge=0), BeforeValidator(lambda value: value or 0)]  # transformers writes null


class LayerHeads(BaseModel):
    """Attention sizes of one layer of Gemma 4. None: the model's."""

    model_config = ConfigDict(extra="forbid")

    head_dim: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)


class Gemma4Config(GemmaConfig):
    """The config of Gemma 4. Versions of transformers write sizes of layers as `global_…`, or as `per_layer_config`."""

    rope_types: ClassVar[tuple[str, ...]] = (*SCALINGS, "proportional")
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

    @property
    def has_experts(self) -> tuple[bool, ...]:
        return (self.enable_moe_block,) * self.num_hidden_layers

    def ffn_size_of(self, layer: int) -> int:
        is_wide = self.use_double_wide_mlp and self.source_of(layer) != layer
        return self.intermediate_size * (2 if is_wide else 1)

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


KINDS: dict[str, type[DenseConfig]] = {"gemma3": Gemma3Config, "gemma4": Gemma4Config}
