"""The part of a Hugging Face `config.json` that says what a model computes. What we do not compute is refused.

A file that leaves a setting out means what transformers takes for it.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.models.switches import refuse_unknown_switches

FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen2", "llama", "mistral", "smollm3")
"""The `model_type` of each supported model family; megatron_worker/families holds their architectures."""

# What transformers takes for settings that a family's file leaves out, where families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {"head_dim": 256},
    "mistral": {"sliding_window": 4096},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
}
_READ_IMAGES = ("qwen3_5", "qwen3_5_moe")  # their decoder's settings are in `text_config`
_TEXT_ALONE = {f"{family}_text": family for family in _READ_IMAGES}  # the `model_type` of the decoder alone

Size = Field(ge=1)


class RopeConfig(BaseModel):
    """Rotary embedding settings: `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4)."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str = Field(default="default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)  # of hybrid models


# transformers takes an empty object for none.
_AnyRope = Annotated[RopeConfig | None, BeforeValidator(lambda value: value or None)]


class DenseConfig(BaseModel):
    """A decoder's settings.

    Attributes:
        tensor_prefix: what the names of its tensors begin with. It and `carried` are not taken from the file.
        carried: prefixes of tensors that belong to the model and are not computed: they are left as they are.
    """

    model_config = ConfigDict(extra="ignore")

    model_type: str
    tensor_prefix: str = "model"
    carried: tuple[str, ...] = ()
    vocab_size: int = Size
    hidden_size: int = Size
    intermediate_size: int = Size
    num_hidden_layers: int = Size
    num_attention_heads: int = Size
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rope_theta: float | None = None
    rope_scaling: _AnyRope = None
    rope_parameters: _AnyRope = None

    @property
    def rope(self) -> RopeConfig:
        return self._with_theta(self.rope_scaling or self.rope_parameters or RopeConfig())

    @property
    def ropes_disagree(self) -> bool:
        """True if both are given and say different things. Versions of transformers take one, or the other."""
        given = [self._with_theta(one) for one in (self.rope_scaling, self.rope_parameters) if one is not None]
        return len(given) == 2 and given[0] != given[1]

    @property
    def size_of_heads(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def _with_theta(self, rope: RopeConfig) -> RopeConfig:
        return rope.model_copy(update={"rope_theta": rope.rope_theta or self.rope_theta})


class SmolLM3Config(DenseConfig):
    """The config of SmolLM3, some of whose layers encode no positions."""

    no_rope_layers: tuple[int, ...] | None = None  # 1: the layer rotates, 0: it does not
    no_rope_layer_interval: int = Field(default=4, ge=1)

    @property
    def is_rotated(self) -> tuple[bool, ...]:
        """For each layer, whether it encodes positions."""
        if self.no_rope_layers is not None:
            return tuple(map(bool, self.no_rope_layers[: self.num_hidden_layers]))
        return tuple((layer + 1) % self.no_rope_layer_interval > 0 for layer in range(self.num_hidden_layers))


class MixtureConfig(DenseConfig):
    """The config of a mixture of experts. Transformers 4 writes `num_experts`, 5 writes `num_local_experts`."""

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Size
    moe_intermediate_size: int = Size
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None


class HybridConfig(DenseConfig):
    """The config of Qwen3.5: layers of gated delta nets among layers of attention with an output gate."""

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

    @property
    def rotary_size(self) -> int:
        """The part of a head that is rotated."""
        return int(self.size_of_heads * (self.rope.partial_rotary_factor or self.partial_rotary_factor))


class HybridMixtureConfig(HybridConfig, MixtureConfig):
    """The config of Qwen3.5's mixtures: one expert more, which every token goes to."""

    intermediate_size: int = 0
    norm_topk_prob: Literal[True] = True
    shared_expert_intermediate_size: int = Size


_KINDS: dict[str, type[DenseConfig]] = {
    "qwen3_moe": MixtureConfig,
    "qwen3_5": HybridConfig,
    "qwen3_5_moe": HybridMixtureConfig,
    "smollm3": SmolLM3Config,
}
# Of families that we do not compute: what they need, and the family that is nearest to them among ours.
_UNKNOWN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), ("a sparse indexer of attention", "qwen3_moe")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), ("multi-head latent attention", "qwen3_moe")),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "gemma4"), ("sliding windows and norms of its own", "qwen3")),
    **dict.fromkeys(("ministral", "ministral3", "olmo3"), ("sliding windows of attention", "mistral")),
    "gpt_oss": ("attention sinks and sliding windows", "qwen3_moe"),
    "granite": ("multipliers of its residual stream", "llama"),
    "kimi_linear": ("Kimi delta attention", "qwen3_5_moe"),
    "nemotron_h": ("Mamba-2 layers", "qwen3_5"),
    "qwen3_next": ("linears that are laid out otherwise", "qwen3_5_moe"),
    "qwen4_exp": ("hyper-connections", "qwen3_5_moe"),
}
_SCALINGS = ("default", "llama3", "linear", "yarn")


def with_decoder(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a `config.json` says; where it has a decoder among other parts, first of all what that says."""
    text = values.get("text_config")
    told = text.items() if isinstance(text, dict) else ()
    return values | {name: value for name, value in told if value is not None}


def decoder_settings(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return what a `config.json` says of the model's decoder, with `model_type` one of FAMILIES.

    That of a model which reads images too stands in `text_config`; its tower of vision is carried along.

    Raises:
        InvalidInput: the model is of no family that we know. No other field has been read then.
    """
    named = values.get("model_type")
    family = _TEXT_ALONE.get(named, named) if isinstance(named, str) else named
    if isinstance(named, str) and named in _UNKNOWN:
        needed, nearest = _UNKNOWN[named]
        rule = f"it needs {needed}; the nearest is {nearest}"
        raise InvalidInput(f"model_type {named!r} is not a known family: {rule}", place)
    if family not in FAMILIES:
        raise InvalidInput(f"model_type {named!r} is not a known family: {', '.join(FAMILIES)}", place)
    ours = {"model_type": family, "tensor_prefix": "model", "carried": ("mtp.",) if family in _READ_IMAGES else ()}
    if family not in _READ_IMAGES or named in _TEXT_ALONE:
        return _DEFAULTS.get(family, {}) | values | ours
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise InvalidInput("text_config: this field is required: it has the sizes of the decoder", place)
    is_tied = values.get("tie_word_embeddings", False)
    if text.get("tie_word_embeddings", is_tied) != is_tied:
        raise InvalidInput("tie_word_embeddings is not the same in text_config: which of them holds?", place)
    ours |= {"tensor_prefix": "model.language_model", "carried": ("mtp.", "model.visual.")}
    of_whole = {"tie_word_embeddings": is_tied, "quantization_config": values.get("quantization_config")}
    return _DEFAULTS.get(family, {}) | text | of_whole | ours


def read_model_config(values: dict[str, Any], place: str) -> DenseConfig:
    """Parse a `config.json`: a DenseConfig, or one of its classes for families with more settings.

    Raises:
        InvalidInput: it is of no family that we know, asks for what we do not compute, or lacks a size.
    """
    decoder = decoder_settings(values, place)
    try:
        config = _KINDS.get(decoder["model_type"], DenseConfig).model_validate(decoder)
    except ValidationError as error:
        raise InvalidInput(first_rule(error), place) from error
    if problem := _not_computed(config):
        raise InvalidInput(problem, place)
    refuse_unknown_switches(decoder, _read_by(type(config)), config.model_type, place)
    return config


def _read_by(kind: type[BaseModel]) -> set[str]:
    """Return the names in a file of the settings that a class reads."""
    names = set(kind.model_fields)
    for field in kind.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names |= {name for name in field.validation_alias.choices if isinstance(name, str)}
    return names


def _not_computed(config: DenseConfig) -> str | None:
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(config, name):
            return f"{name}=true is not supported for this family"
    if config.model_type == "mistral" and config.sliding_window is not None:
        rule = "set it to null if the model was trained without one"
        return f"a sliding_window, here of {config.sliding_window} tokens, is not supported: {rule}"
    others = [kind for kind in config.layer_types or () if kind != "full_attention"]
    if others and not isinstance(config, HybridConfig):
        return f"layer_types: {others[0]} is not supported"
    if config.ropes_disagree:
        return "rope_scaling and rope_parameters say different things, so which of them holds is not known: remove one"
    if problem := _rope_not_computed(config.rope):
        return problem
    if isinstance(config, SmolLM3Config) and len(config.is_rotated) != config.num_hidden_layers:
        return f"no_rope_layers names {len(config.is_rotated)} layers of {config.num_hidden_layers}"
    if isinstance(config, HybridConfig) and (problem := _not_hybrid(config)):
        return problem
    if not isinstance(config, MixtureConfig):
        return None
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        return "layers without experts among others with them are not supported"
    if config.num_experts_per_tok > config.num_experts:
        return f"a token goes to {config.num_experts_per_tok} experts of {config.num_experts}"
    return None


def _not_hybrid(config: HybridConfig) -> str | None:
    num_layers, found = config.num_hidden_layers, len(config.is_recurrent)
    if found != num_layers:
        return f"layer_types names {found} layers, num_hidden_layers is {num_layers}"
    if config.linear_num_value_heads % config.linear_num_key_heads:
        heads = f"{config.linear_num_key_heads} key heads do not divide {config.linear_num_value_heads} value heads"
        return f"linear attention: {heads}"
    if config.rotary_size < 2 or config.rotary_size % 2:
        return f"partial_rotary_factor rotates {config.rotary_size} of {config.size_of_heads} dimensions: not by pairs"
    return None


def _rope_not_computed(rope: RopeConfig) -> str | None:
    if rope.rope_type not in _SCALINGS:
        return f"rope scaling of type {rope.rope_type!r} is not supported; these are: {', '.join(_SCALINGS)}"
    if rope.rope_type != "default" and rope.factor is None:
        return f"{rope.rope_type} rope scaling needs factor"
    if rope.rope_type in ("llama3", "yarn") and rope.original_max_position_embeddings is None:
        return f"{rope.rope_type} rope scaling needs factor and original_max_position_embeddings"
    return None
