"""The part of a Hugging Face `config.json` that says what a model computes. What we do not compute is refused.

A file that leaves a setting out means what transformers takes for it.
"""

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.models import gemma
from shared.models.dense import SLIDING, WINDOWED, DenseConfig, RopeConfig, Size, rope_problem

FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gpt_oss",
    "qwen2",
    "llama",
    "mistral",
    "ministral",
    "smollm3",
    "gemma3",
    "gemma4",
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
}
_ALIKE = ("mistral", "qwen3_moe")  # a window is of all layers
_TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
# Of models whose decoder's settings are in `text_config`: what the decoder's tensors begin with, and what the others.
_READ_IMAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("model.language_model", ("mtp.", "model.visual."))),
    "gemma3": ("language_model.model", ("vision_tower.", "multi_modal_projector.")),
    "gemma4": ("model.language_model", tuple(f"model.{part}." for part in _TOWERS)),
}
_TEXT_ALONE = {f"{family}_text": family for family in _READ_IMAGES}  # the `model_type` of the decoder alone


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
        return tuple("full_attention" if layer % 2 else SLIDING for layer in self._numbers)


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
    "gpt_oss": GptOssConfig,
    "qwen3_moe": MixtureConfig,
    "qwen3_5": HybridConfig,
    "qwen3_5_moe": HybridMixtureConfig,
    "smollm3": SmolLM3Config,
}
# Of families that we do not compute: what they need, and the family that is nearest to them among ours.
_UNKNOWN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), ("a sparse indexer of attention", "qwen3_moe")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), ("multi-head latent attention", "qwen3_moe")),
    "gemma2": ("a soft cap of attention's scores", "gemma3"),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), ("a residual stream in several parts", "gemma4")),
    "ministral3": ("queries whose scale grows with their position", "ministral"),
    "olmo3": ("norms behind its blocks", "mistral"),
    "granite": ("multipliers of its residual stream", "llama"),
    "kimi_linear": ("Kimi delta attention", "qwen3_5_moe"),
    "nemotron_h": ("Mamba-2 layers", "qwen3_5"),
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
    is_qwen = family in ("qwen3_5", "qwen3_5_moe")
    ours = {"model_type": family, "tensor_prefix": "model", "carried": ("mtp.",) if is_qwen else ()}
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
    return (_KINDS | gemma.KINDS).get(family, DenseConfig), (_DEFAULTS | gemma.DEFAULTS).get(family, {})


def _not_computed(config: DenseConfig) -> str | None:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name) and not isinstance(config, GptOssConfig):
            return f"{name}=true is not supported for this family"
    if problem := _windows_not_computed(config) or config.own_problem():
        return problem
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
    if not isinstance(config, MixtureConfig):
        return None
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        return "layers without experts among others with them are not supported"
    if config.num_experts_per_tok > config.num_experts:
        return f"a token goes to {config.num_experts_per_tok} experts of {config.num_experts}"
    return None


def _windows_not_computed(config: DenseConfig) -> str | None:
    if isinstance(config, HybridConfig):
        return None
    kinds = config.layer_types or ()
    others = [kind for kind in kinds if kind not in (SLIDING, "full_attention")]
    if others:
        return f"layer_types: {others[0]} is not supported"
    if SLIDING in kinds and config.model_type not in WINDOWED:
        return f"layer_types: {SLIDING} is not of this family"
    if SLIDING in kinds and config.window is None:
        return f"layer_types names layers of {SLIDING}, and there is no sliding_window"
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
