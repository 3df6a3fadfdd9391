"""The part of a Hugging Face `config.json` that says what a model computes. What we do not compute is refused.

A file that leaves a setting out means what transformers takes for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.field_rules import first_rule

FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen2", "llama", "mistral", "smollm3", "nemotron_h")
"""The `model_type` of each supported model family; megatron_worker/families holds their architectures."""

# What transformers takes for settings that a family's file leaves out, where families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {"head_dim": 256},
    "mistral": {"sliding_window": 4096},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "nemotron_h": {"intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128},
}
_READ_IMAGES = ("qwen3_5", "qwen3_5_moe")  # their decoder's settings are in `text_config`
_TEXT_ALONE = {f"{family}_text": family for family in _READ_IMAGES}  # the `model_type` of the decoder alone
_PREDICT_MORE = (*_READ_IMAGES, "nemotron_h")  # their files may hold layers of multi-token prediction

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


@dataclass(frozen=True)
class TensorNames:
    """What Hugging Face calls the parts of a model, and of a layer, where families differ."""

    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    mlp: str = "mlp"
    shared_expert: str = "shared_expert"


class DenseConfig(BaseModel):
    """A decoder's settings.

    Attributes:
        tensor_prefix: what the names of its tensors begin with. It and `carried` are not taken from the file.
        carried: prefixes of tensors that belong to the model and are not computed: they are left as they are.
    """

    model_config = ConfigDict(extra="ignore")
    names: ClassVar[TensorNames] = TensorNames()

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
    def layer_kinds(self) -> tuple[str | bool, ...]:
        """For each layer a word for what it is: those of one word have the same tensors."""
        return ("",) * self.num_hidden_layers

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
    def layer_kinds(self) -> tuple[str | bool, ...]:
        return self.is_recurrent

    @property
    def rotary_size(self) -> int:
        """The part of a head that is rotated."""
        return int(self.size_of_heads * (self.rope.partial_rotary_factor or self.partial_rotary_factor))


class HybridMixtureConfig(HybridConfig, MixtureConfig):
    """The config of Qwen3.5's mixtures: one expert more, which every token goes to."""

    intermediate_size: int = 0
    norm_topk_prob: Literal[True] = True
    shared_expert_intermediate_size: int = Size


Block = Literal["mamba", "attention", "mlp", "moe"]
_BLOCKS: dict[str, Block] = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"},
}


class NemotronHConfig(MixtureConfig):
    """The config of Nemotron-H: each layer is one block, a Mamba-2 mixer, attention, an MLP or experts."""

    names: ClassVar[TensorNames] = TensorNames(
        *("embeddings", "norm_f", "norm", "norm", "mixer", "mixer"), shared_expert="shared_experts"
    )

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
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def layer_kinds(self) -> tuple[str | bool, ...]:
        return self.blocks


_KINDS: dict[str, type[DenseConfig]] = {
    "qwen3_moe": MixtureConfig,
    "qwen3_5": HybridConfig,
    "qwen3_5_moe": HybridMixtureConfig,
    "smollm3": SmolLM3Config,
    "nemotron_h": NemotronHConfig,
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
        InvalidInput: the model is of no family that we know (no other field has been read then), or it does not say of
            which kinds its layers are.
    """
    named = values.get("model_type")
    family = _TEXT_ALONE.get(named, named) if isinstance(named, str) else named
    if isinstance(named, str) and named in _UNKNOWN:
        needed, nearest = _UNKNOWN[named]
        rule = f"it needs {needed}; the nearest is {nearest}"
        raise InvalidInput(f"model_type {named!r} is not a known family: {rule}", place)
    if family not in FAMILIES:
        raise InvalidInput(f"model_type {named!r} is not a known family: {', '.join(FAMILIES)}", place)
    ours = {"model_type": family, "tensor_prefix": "model", "carried": ("mtp.",) if family in _PREDICT_MORE else ()}
    if family == "nemotron_h":
        ours |= {"tensor_prefix": "backbone", **_named_blocks(values, place)}
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


def _named_blocks(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return each layer's block: transformers lists words, published files have a letter for each."""
    words, letters = values.get("layers_block_type"), values.get("hybrid_override_pattern")
    found = letters if words is None else words
    if not isinstance(found, list if words is not None else str) or not found:
        raise InvalidInput("layers_block_type or hybrid_override_pattern has to say what each layer is", place)
    for kind in found:
        if not isinstance(kind, str) or kind not in _BLOCKS:
            raise InvalidInput(f"layers_block_type: a layer of the kind {kind!r:.40} is not known", place)
    blocks = [_BLOCKS[kind] for kind in found]
    return {"blocks": blocks, "num_hidden_layers": len(blocks), "layer_types": None}


def prefix_of(config: DenseConfig, names: Iterable[str]) -> str:
    """Return what the names of a model's tensors begin with. transformers reads `backbone` as `model`."""
    is_other = config.tensor_prefix == "backbone" and any(name.startswith("model.") for name in names)
    return "model" if is_other else config.tensor_prefix


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
    return config


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
    if isinstance(config, NemotronHConfig):
        return _not_nemotron(config)
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


def _not_nemotron(config: NemotronHConfig) -> str | None:
    size, rest = divmod(config.num_experts, config.n_group)
    if config.sliding_window is not None:
        return f"a sliding_window, here of {config.sliding_window} tokens, is not supported"
    if "attention" not in config.blocks:
        return "layers_block_type: at least one layer of attention is needed"
    if config.mamba_num_heads % config.n_groups:
        return f"n_groups: {config.n_groups} groups do not divide {config.mamba_num_heads} heads of Mamba layers"
    if rest or size < 2:
        return (
            f"n_group: {config.num_experts} experts in {config.n_group} groups, which have to be equal, of two at least"
        )
    if config.topk_group > config.n_group or config.num_experts_per_tok > config.topk_group * size:
        return f"topk_group is {config.topk_group} of {config.n_group} groups, for {config.num_experts_per_tok} experts"
    return None


def _rope_not_computed(rope: RopeConfig) -> str | None:
    if rope.rope_type not in _SCALINGS:
        return f"rope scaling of type {rope.rope_type!r} is not supported; these are: {', '.join(_SCALINGS)}"
    if rope.rope_type != "default" and rope.factor is None:
        return f"{rope.rope_type} rope scaling needs factor"
    if rope.rope_type in ("llama3", "yarn") and rope.original_max_position_embeddings is None:
        return f"{rope.rope_type} rope scaling needs factor and original_max_position_embeddings"
    return None
