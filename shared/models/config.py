"""The part of a Hugging Face `config.json` that says what a model computes. What we do not compute is refused.

A file that leaves a setting out means what transformers takes for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.field_rules import first_rule

FAMILIES = (
    *("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma3", "gemma4"),
    *("deepseek_v3", "glm4_moe_lite", "nemotron_h"),
    *("qwen2", "llama", "mistral", "ministral", "smollm3"),
)
"""The `model_type` of each supported model family; megatron_worker/families holds their architectures."""

# What transformers takes for settings that a family's file leaves out, where families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {"head_dim": 256},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5},
    **{family: {"sliding_window": 4096} for family in ("mistral", "ministral", "qwen2", "qwen3_moe")},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "glm4_moe_lite": {"rms_norm_eps": 1e-5},
    "nemotron_h": {"intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128},
}
_SLIDING = "sliding_attention"
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")  # a window holds with `use_sliding_window` alone
_ALIKE = ("mistral", "qwen3_moe")  # a window is of all layers
_WINDOWED = ("gpt_oss", "mistral", "ministral", "gemma3", "gemma4", *_SWITCHED)
_TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
# Of models whose decoder's settings are in `text_config`: what the decoder's tensors begin with, and what the others.
_READ_IMAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("model.language_model", ("mtp.", "model.visual."))),
    "gemma3": ("language_model.model", ("vision_tower.", "multi_modal_projector.")),
    "gemma4": ("model.language_model", tuple(f"model.{part}." for part in _TOWERS)),
}
_TEXT_ALONE = {f"{family}_text": family for family in _READ_IMAGES}  # the `model_type` of the decoder alone
_PREDICT_MORE = (*_READ_IMAGES, "nemotron_h")  # their files may hold layers of multi-token prediction

Size = Field(ge=1)
SCALINGS = ("default", "llama3", "linear", "yarn")


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
    rope_types: ClassVar[tuple[str, ...]] = SCALINGS

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
    sliding_window: int | None = Field(default=None, ge=1)
    max_window_layers: int = Field(default=28, ge=0)
    layer_types: tuple[str, ...] | None = None
    rope_theta: float | None = None
    rope_scaling: _AnyRope = None
    rope_parameters: _AnyRope = None
    quantization_config: dict[str, Any] | None = None

    @property
    def rope(self) -> RopeConfig:
        return self._with_theta(self.rope_scaling or self.rope_parameters or RopeConfig())

    @property
    def ropes_disagree(self) -> bool:
        """True if both are given and say different things. Versions of transformers take one, or the other."""
        given = [self._with_theta(one) for one in (self.rope_scaling, self.rope_parameters) if one is not None]
        return len(given) == 2 and given[0] != given[1]

    @property
    def window(self) -> int | None:
        """The window of layers that have one; None: none has."""
        is_on = self.use_sliding_window or self.model_type not in _SWITCHED
        return self.sliding_window if is_on and self.model_type in _WINDOWED else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the tokens that one attends to, itself among them; None: all before it."""
        kinds = self.layer_types or self.default_kinds()
        return tuple(self.window if kind == _SLIDING else None for kind in kinds)

    def default_kinds(self) -> tuple[str, ...]:
        """Return the layers' kinds where the file leaves them out: the first `max_window_layers` have no window."""
        first = self.max_window_layers if self.model_type in ("qwen2", "qwen3") else 0
        kinds = ("full_attention" if self.window is None or layer < first else _SLIDING for layer in self._numbers)
        return tuple(kinds)

    def own_problem(self) -> str | None:
        """Return what of a family's own settings is not computed; None: nothing."""
        return None

    @property
    def _numbers(self) -> range:
        return range(self.num_hidden_layers)

    @property
    def size_of_heads(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """The part of a head that is rotated."""
        return self.size_of_heads

    @property
    def layer_kinds(self) -> tuple[object, ...]:
        """For each layer, its kind: those of one kind have tensors of the same names."""
        return (None,) * self.num_hidden_layers

    def _with_theta(self, rope: RopeConfig) -> RopeConfig:
        return rope.model_copy(update={"rope_theta": rope.rope_theta or self.rope_theta})


class Mxfp4(BaseModel):
    """The one quantization that is read."""

    model_config = ConfigDict(extra="ignore")

    quant_method: Literal["mxfp4"]


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

    @property
    def shared_ffn_size(self) -> int:
        """Of an expert that every token goes to; 0: there is none."""
        return 0


class GptOssConfig(DenseConfig):
    """The config of gpt-oss. `quantization_config`: of MXFP4, which is read (tensors/mxfp4.py); no other is."""

    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Field(default=4, ge=1)
    swiglu_alpha: float = 1.702
    swiglu_limit: float = Field(default=7.0, gt=0)
    quantization_config: Mxfp4 | None = None  # type: ignore[assignment]

    @property
    def rope(self) -> RopeConfig:
        if self.rope_scaling is None and self.rope_parameters is None:
            theta = self.rope_theta or 150_000.0
            sizes = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
            return RopeConfig(rope_type="yarn", rope_theta=theta, **sizes)
        return super().rope

    def default_kinds(self) -> tuple[str, ...]:
        return tuple("full_attention" if layer % 2 else _SLIDING for layer in self._numbers)


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
    def layer_kinds(self) -> tuple[object, ...]:
        return self.is_recurrent

    @property
    def rotary_size(self) -> int:
        return int(self.size_of_heads * (self.rope.partial_rotary_factor or self.partial_rotary_factor))


class HybridMixtureConfig(HybridConfig, MixtureConfig):
    """The config of Qwen3.5's mixtures: one expert more, which every token goes to."""

    intermediate_size: int = 0
    norm_topk_prob: Literal[True] = True
    shared_expert_intermediate_size: int = Size

    @property
    def shared_ffn_size(self) -> int:
        return self.shared_expert_intermediate_size


class LatentConfig(MixtureConfig):
    """The config of DeepSeek-V3, and of GLM-4's models that are built like it: multi-head latent attention, and experts
    that are chosen among groups by scores with a correction, in all layers but the first ones."""

    names: ClassVar[TensorNames] = TensorNames(shared_expert="shared_experts")

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Literal[1] = 1
    n_shared_experts: int = Size
    n_group: int = Size
    topk_group: int = Size
    routed_scaling_factor: float
    first_k_dense_replace: int | None = Field(default=None, ge=0)  # of deepseek_v3
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None  # of glm4_moe_lite
    q_lora_rank: int | None = Field(ge=1)
    kv_lora_rank: int = Size
    qk_nope_head_dim: int = Size
    qk_rope_head_dim: int = Size
    v_head_dim: int = Size
    rope_interleave: bool = True
    partial_rotary_factor: float = 1.0
    num_predicting_layers: int = Field(
        default=0, ge=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    @property
    def size_of_heads(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def shared_ffn_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def is_dense(self) -> tuple[bool, ...]:
        """For each layer, whether it has an MLP in the place of experts."""
        if self.mlp_layer_types is not None:
            return tuple(kind == "dense" for kind in self.mlp_layer_types)
        first = self.first_k_dense_replace if self.model_type == "deepseek_v3" else 1
        return tuple(layer < (first or 0) for layer in range(self.num_hidden_layers))

    @property
    def layer_kinds(self) -> tuple[object, ...]:
        return self.is_dense


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
    def layer_kinds(self) -> tuple[object, ...]:
        return self.blocks


_KINDS: dict[str, type[DenseConfig]] = {
    "gpt_oss": GptOssConfig,
    "qwen3_moe": MixtureConfig,
    "qwen3_5": HybridConfig,
    "qwen3_5_moe": HybridMixtureConfig,
    "smollm3": SmolLM3Config,
    "deepseek_v3": LatentConfig,
    "glm4_moe_lite": LatentConfig,
    "nemotron_h": NemotronHConfig,
}
# Of families that we do not compute: what they need, and the family that is nearest to them among ours.
_UNKNOWN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), ("a sparse indexer of attention", "deepseek_v3")),
    "deepseek_v2": ("experts that a softmax chooses among groups", "deepseek_v3"),
    "gemma2": ("a soft cap of attention's scores", "gemma3"),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), ("a residual stream in several parts", "gemma4")),
    "ministral3": ("queries whose scale grows with their position", "ministral"),
    "olmo3": ("norms behind its blocks", "mistral"),
    "granite": ("multipliers of its residual stream", "llama"),
    "kimi_linear": ("Kimi delta attention", "qwen3_5_moe"),
    "qwen3_next": ("linears that are laid out otherwise", "qwen3_5_moe"),
    "qwen4_exp": ("hyper-connections", "qwen3_5_moe"),
}


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
        return _of_family(family)[1] | values | ours
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise InvalidInput("text_config: this field is required: it has the sizes of the decoder", place)
    defaults = _of_family(family)[1]
    is_tied = values.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False))
    if text.get("tie_word_embeddings", is_tied) != is_tied:
        raise InvalidInput("tie_word_embeddings is not the same in text_config: which of them holds?", place)
    prefix, others = _READ_IMAGES[family]
    ours |= {"tensor_prefix": prefix, "carried": others}
    of_whole = {"tie_word_embeddings": is_tied, "quantization_config": values.get("quantization_config")}
    return defaults | text | of_whole | ours


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
        config = _of_family(decoder["model_type"])[0].model_validate(decoder)
    except ValidationError as error:
        raise InvalidInput(first_rule(error), place) from error
    if problem := _not_computed(config):
        raise InvalidInput(problem, place)
    return config


def _of_family(family: str) -> tuple[type[DenseConfig], dict[str, Any]]:
    """Return the class of a family's settings, and what transformers takes for those that a file leaves out."""
    from shared.models import gemma  # its classes are made from those above

    return (_KINDS | gemma.KINDS).get(family, DenseConfig), (_DEFAULTS | gemma.DEFAULTS).get(family, {})


def _not_computed(config: DenseConfig) -> str | None:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name) and not isinstance(config, GptOssConfig):
            return f"{name}=true is not supported for this family"
    if problem := _windows_not_computed(config) or config.own_problem():
        return problem
    if isinstance(quantized := config.quantization_config, dict):
        method = quantized.get("quant_method", "a method that it does not name")
        return f"quantization_config: weights that {method} has quantized are not read: take a checkpoint in bfloat16"
    if config.ropes_disagree:
        return "rope_scaling and rope_parameters say different things, so which of them holds is not known: remove one"
    if problem := rope_problem(config.rope, config.rope_types):
        return problem
    if isinstance(config, SmolLM3Config) and len(config.is_rotated) != config.num_hidden_layers:
        return f"no_rope_layers names {len(config.is_rotated)} layers of {config.num_hidden_layers}"
    if isinstance(config, HybridConfig) and (problem := _not_hybrid(config)):
        return problem
    if isinstance(config, GptOssConfig) and config.num_experts_per_tok > config.num_experts:
        return f"a token goes to {config.num_experts_per_tok} experts of {config.num_experts}"
    if isinstance(config, NemotronHConfig):
        return _not_nemotron(config)
    if not isinstance(config, MixtureConfig):
        return None
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        return "layers without experts among others with them are not supported"
    if config.num_experts_per_tok > config.num_experts:
        return f"a token goes to {config.num_experts_per_tok} experts of {config.num_experts}"
    return _not_latent(config) if isinstance(config, LatentConfig) else None


def _not_latent(config: LatentConfig) -> str | None:
    num_layers, first = config.num_hidden_layers, config.first_k_dense_replace
    if len(config.is_dense) != num_layers:
        return f"mlp_layer_types names {len(config.is_dense)} layers of {num_layers}"
    if first is not None and config.is_dense != tuple(layer < first for layer in range(num_layers)):
        return f"first_k_dense_replace is {first}, and another part of the layers is dense by mlp_layer_types"
    if config.num_key_value_heads not in (None, config.num_attention_heads):
        return f"num_key_value_heads is {config.num_key_value_heads}: with latents each head has keys of its own"
    if config.qk_rope_head_dim % 2 or {config.partial_rotary_factor, config.rope.partial_rotary_factor or 1} != {1}:
        return f"qk_rope_head_dim is {config.qk_rope_head_dim}: all of it must be rotated, by pairs"
    size, rest = divmod(config.num_experts, config.n_group)
    if rest or size < 2:
        return (
            f"n_group is {config.n_group}, which does not cut {config.num_experts} experts into groups of two or more"
        )
    if config.topk_group > config.n_group or config.num_experts_per_tok > config.topk_group * size:
        return f"topk_group is {config.topk_group} of {config.n_group} groups, for {config.num_experts_per_tok} experts"
    return None


def _windows_not_computed(config: DenseConfig) -> str | None:
    if isinstance(config, HybridConfig):
        return None
    kinds = config.layer_types or ()
    others = [kind for kind in kinds if kind not in (_SLIDING, "full_attention")]
    if others:
        return f"layer_types: {others[0]} is not supported"
    if _SLIDING in kinds and config.model_type not in _WINDOWED:
        return f"layer_types: {_SLIDING} is not of this family"
    if _SLIDING in kinds and config.window is None:
        return f"layer_types names layers of {_SLIDING}, and there is no sliding_window"
    if kinds and config.model_type in _ALIKE and kinds != config.default_kinds():
        return "layer_types: in this family a window is of all layers, or of none"
    if kinds and len(kinds) != config.num_hidden_layers:
        return f"layer_types names {len(kinds)} layers, num_hidden_layers is {config.num_hidden_layers}"
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


def rope_problem(rope: RopeConfig, known: tuple[str, ...]) -> str | None:
    """Return what of rotary settings is not computed; None: nothing."""
    if rope.rope_type not in known:
        return f"rope scaling of type {rope.rope_type!r} is not supported; these are: {', '.join(known)}"
    if rope.rope_type not in ("default", "proportional") and rope.factor is None:
        return f"{rope.rope_type} rope scaling needs factor"
    if rope.rope_type in ("llama3", "yarn") and rope.original_max_position_embeddings is None:
        return f"{rope.rope_type} rope scaling needs factor and original_max_position_embeddings"
    return None
