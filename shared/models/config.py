"""The part of a Hugging Face `config.json` that defines a model's computation. Unsupported features are refused.

If a file omits a setting, transformers' default applies.
"""

import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from longshore.fields import Frozen
from shared.errors import CorruptArtifact, InvalidInput
from shared.field_rules import first_rule, refused_value
from shared.models import gemma
from shared.models.families import (
    BLOCKS,
    SLIDING,
    WINDOWED,
    DenseConfig,
    GptOssConfig,
    GraniteConfig,
    HybridConfig,
    HybridMixtureConfig,
    LatentConfig,
    LayerRopesConfig,
    MixtureConfig,
    NemotronHConfig,
    Olmo3Config,
    Phi3Config,
    SmolLM3Config,
    rope_problem,
)

# --- Refuses features of a `config.json` that we do not read, since the model would be computed without them ---
#
# Such files also have many fields that change nothing (names, dates, settings of training or of serving), so only
# fields that are switched on are checked, and numbers whose names say that they scale or cap something.

# These do not change the computation, or every model of their families has them on.
_WITHOUT_EFFECT = frozenset(
    {
        *("use_cache", "return_dict", "return_dict_in_generate", "use_return_dict", "is_decoder", "torchscript"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "do_sample"),
        *("early_stopping", "gradient_checkpointing", "use_flash_attn", "use_flash_attention", "use_kernels"),
        *("is_llama_config", "unsloth_fixed", "_attn_implementation_autoset", "_flash_attn_2_enabled"),
        *("_from_model_config", "trust_remote_code", "add_bos_token", "add_eos_token", "rescale_prenorm_residual"),
        *("moe_shared_expert_overlap", "use_mamba_kernels", "attn_output_gate"),
        *("seq_aux", "use_aux_loss"),  # for losses that balance experts, which we do not compute
    }
)
# These families always do what the switch asks for.
_ALWAYS = {
    "use_qk_norm": ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "olmo3", "gemma3", "gemma4"),
    "qkv_bias": ("qwen2",),
}
_SCALES = re.compile(
    r"soft_?cap|scale_(emb|depth)|clip_qkv|alibi|qk_norm"
    r"|(embeddings?|residual|attention|logits?)_(multiplier|scal(e|ing))(_factor)?$"
)


def refuse_unknown_switches(settings: Mapping[str, Any], known: Container[str], family: str, place: str) -> None:
    """Check the settings of a model's decoder.

    `known`: the settings that are read, for this family.

    Raises InvalidInput: another setting is switched on; names it.
    """
    for name, value in settings.items():
        if name in known or name in _WITHOUT_EFFECT or (value is True and family in _ALWAYS.get(name, ())):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is True or (_SCALES.search(name) and (value not in (0, 1) if is_number else value)):
            rule = f"it is not known in models of the family {family}, and what it asks for would be left out"
            raise InvalidInput(f"{name} = {value!r:.60} is not supported: {rule}", place)


# --- Models of transformers outside our families: the engine fsdp trains them with transformers' own code ---
#
# Only the sizes of a `config.json` are read, by their common names. The rest is found when the model is loaded
# (megatron_worker/fsdp/model.py).

_READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "quantization_config"),
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class GenericConfig(DenseConfig):
    """The sizes of a dense decoder."""

    intermediate_size: int = Field(default=0, ge=0)


def generic_settings(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the sizes in a `config.json`. Raises InvalidInput if the model is no dense decoder."""
    reason = None
    if any(values.get(name) for name in _NUM_EXPERTS):
        reason = "it has experts; the nearest is qwen3_moe"
    elif isinstance(values.get("text_config"), dict) or values.get("is_encoder_decoder"):
        reason = "it has other parts: take a folder of its decoder"
    elif missing := [name for name in _READ[:6] if name != "intermediate_size" and values.get(name) is None]:
        reason = f"its config.json has no {missing[0]}"
    if reason is not None:
        rule = "of families that are not known the engine fsdp takes dense decoders alone"
        raise InvalidInput(f"model_type {values['model_type']!r}: {rule}, and {reason}", place)
    return {name: values[name] for name in _READ if values.get(name) is not None}


ConfigT = TypeVar("ConfigT", bound=DenseConfig)
Family = Literal[
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma3", "gemma4", "deepseek_v3", "glm4_moe_lite",
    "nemotron_h", "qwen2", "llama", "mistral", "ministral", "smollm3", "granite", "olmo3",
    "phi3",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = get_args(Family)
"""The `model_type` of each supported model family; shared/families holds their architectures."""

# transformers' defaults for settings that a family's file omits, if families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {"head_dim": 256},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5},
    **{family: {"sliding_window": 4096} for family in ("mistral", "ministral", "qwen2", "qwen3_moe")},
    "olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "glm4_moe_lite": {"rms_norm_eps": 1e-5},
    "nemotron_h": {"intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128},
}
_ALIKE = ("mistral", "qwen3_moe", "phi3")  # all layers have the window
_TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
# For models whose decoder's settings are in `text_config`: prefixes of the decoder's tensors, and of the others.
_READ_IMAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("model.language_model", ("mtp.", "model.visual."))),
    "gemma3": ("language_model.model", ("vision_tower.", "multi_modal_projector.")),
    "gemma4": ("model.language_model", tuple(f"model.{part}." for part in _TOWERS)),
    "mistral3": ("language_model.model", ("vision_tower.", "multi_modal_projector.")),
}
_WITHIN = {"mistral3": "mistral"}  # the family of the decoder, if its name differs from the whole model's
_TEXT_ALONE = {f"{family}_text": family for family in _READ_IMAGES}  # the `model_type` of decoders on their own
_PREDICT_MORE = ("qwen3_5", "qwen3_5_moe", "nemotron_h")  # their files may hold layers of multi-token prediction


_KINDS: dict[str, type[DenseConfig]] = {
    "gpt_oss": GptOssConfig,
    "qwen3_moe": MixtureConfig,
    "qwen3_5": HybridConfig,
    "qwen3_5_moe": HybridMixtureConfig,
    "smollm3": SmolLM3Config,
    "granite": GraniteConfig,
    "olmo3": Olmo3Config,
    "phi3": Phi3Config,
    "deepseek_v3": LatentConfig,
    "glm4_moe_lite": LatentConfig,
    "nemotron_h": NemotronHConfig,
}
# Unsupported families: the feature that they need, and the nearest supported family.
_UNKNOWN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), ("a sparse indexer of attention", "deepseek_v3")),
    "deepseek_v2": ("experts that a softmax chooses among groups", "deepseek_v3"),
    "gemma2": ("a soft cap of attention's scores", "gemma3"),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), ("a residual stream in several parts", "gemma4")),
    "ministral3": ("queries whose scale grows with their position", "ministral"),
    "kimi_linear": ("Kimi delta attention", "qwen3_5_moe"),
    "qwen3_next": ("linears that are laid out otherwise", "qwen3_5_moe"),
    "qwen4_exp": ("hyper-connections", "qwen3_5_moe"),
}

_BY_FSDP = "; the engine fsdp takes dense models of transformers that pass its probe"


def with_decoder(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json`; those of `text_config`, if there is one, override the others."""
    text = values.get("text_config")
    told = text.items() if isinstance(text, dict) else ()
    return values | {name: value for name, value in told if value is not None}


def decoder_settings(values: dict[str, Any], place: str, any_family: bool = False) -> dict[str, Any]:
    """Return the decoder's settings of a `config.json`, with `model_type` one of FAMILIES.

    A model that also reads images has them in `text_config`; its vision tower is copied unchanged.
    `any_family`: for other families, which the engine fsdp may train, return only the sizes.

    Raises InvalidInput: the model's family is unknown (then no other field has been read), or the kinds of its layers
    are missing.
    """
    named = values.get("model_type")
    family = (_TEXT_ALONE | _WITHIN).get(named, named) if isinstance(named, str) else named
    if any_family and isinstance(named, str) and family not in FAMILIES:
        return generic_settings(values, place)
    if isinstance(named, str) and named in _UNKNOWN:
        needed, nearest = _UNKNOWN[named]
        rule = f"it needs {needed}; the nearest is {nearest}{_BY_FSDP}"
        raise InvalidInput(f"model_type {named!r} is not a known family: {rule}", place)
    if family not in FAMILIES:
        raise InvalidInput(f"model_type {named!r} is not a known family: {', '.join(FAMILIES)}{_BY_FSDP}", place)
    ours = {"model_type": family, "tensor_prefix": "model", "carried": ("mtp.",) if family in _PREDICT_MORE else ()}
    if family == "nemotron_h":
        ours |= {"tensor_prefix": "backbone", **_named_blocks(values, place)}
    if named not in _READ_IMAGES:
        return _of_family(family)[1] | values | ours
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise InvalidInput("text_config: this field is required: it has the sizes of the decoder", place)
    inner = text.get("model_type", family)
    if inner not in (family, f"{named}_text"):
        needed = f", which needs {_UNKNOWN[inner][0]}" if inner in _UNKNOWN else ""
        rule = f"a model of the type {named} is read with a decoder of the family {family}"
        raise InvalidInput(f"text_config: its model_type is {inner!r:.40}{needed}; {rule}", place)
    defaults = _of_family(family)[1]
    is_tied = values.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False))
    if named in _WITHIN:  # transformers writes true for the whole model, which has its own output layer
        is_tied = text.get("tie_word_embeddings", False)
    if text.get("tie_word_embeddings", is_tied) != is_tied:
        raise InvalidInput("tie_word_embeddings is not the same in text_config: which of them holds?", place)
    prefix, others = _READ_IMAGES[named]
    ours |= {"tensor_prefix": prefix, "carried": others}
    of_whole = {"tie_word_embeddings": is_tied, "quantization_config": values.get("quantization_config")}
    return defaults | text | of_whole | ours


def _named_blocks(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return each layer's block. transformers lists words; published files have one letter per layer."""
    words, letters = values.get("layers_block_type"), values.get("hybrid_override_pattern")
    found = letters if words is None else words
    if not isinstance(found, list if words is not None else str) or not found:
        raise InvalidInput("layers_block_type or hybrid_override_pattern has to say what each layer is", place)
    for kind in found:
        if not isinstance(kind, str) or kind not in BLOCKS:
            raise InvalidInput(f"layers_block_type: a layer of the kind {kind!r:.40} is not known", place)
    blocks = [BLOCKS[kind] for kind in found]
    return {"blocks": blocks, "num_hidden_layers": len(blocks), "layer_types": None}


def named_as_in(config: ConfigT, names: Iterable[str]) -> ConfigT:
    """Return a config with the prefix of these tensor names. transformers reads `backbone` as `model`."""
    is_other = config.tensor_prefix == "backbone" and any(name.startswith("model.") for name in names)
    return config.model_copy(update={"tensor_prefix": "model"}) if is_other else config


def read_model_config(values: dict[str, Any], place: str, any_family: bool = False) -> DenseConfig:
    """Parse a `config.json`: a DenseConfig, or one of its classes for families with more settings.

    `any_family`: also of a family that only the engine fsdp may train, a GenericConfig.

    Raises InvalidInput: the family is unknown, a feature is not supported, or a size is missing.
    """
    decoder = decoder_settings(values, place, any_family)
    try:
        config = _of_family(decoder["model_type"])[0].model_validate(decoder)
    except ValidationError as error:
        raise InvalidInput(refused_value(error), place) from error
    if problem := _not_computed(config):
        raise InvalidInput(problem, place)
    refuse_unknown_switches(decoder, _read_by(type(config)), config.model_type, place)
    return config


def _of_family(family: str) -> tuple[type[DenseConfig], dict[str, Any]]:
    """Return the class of a family's settings, and transformers' defaults for them."""
    ordinary = DenseConfig if family in FAMILIES else GenericConfig
    return (_KINDS | gemma.KINDS).get(family, ordinary), (_DEFAULTS | gemma.DEFAULTS).get(family, {})


def _read_by(kind: type[BaseModel]) -> set[str]:
    """Return the names in a file of the settings that a class reads."""
    names = set(kind.model_fields)
    for field in kind.model_fields.values():
        given = field.validation_alias
        choices = given.choices if isinstance(given, AliasChoices) else (given,)
        names |= {name for name in choices if isinstance(name, str)}
    return names


def _not_computed(config: DenseConfig) -> str | None:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name) and not isinstance(config, GptOssConfig):
            return f"{name}=true is not supported for this family"
    if problem := _windows_not_computed(config) or config.own_problem():
        return problem
    if isinstance(quantized := config.quantization_config, dict):
        method = quantized.get("quant_method", "a method that it does not name")
        rule = "FP8 is in blocks of 128 by 128, of e4m3, with dynamic activations; or take a checkpoint in bfloat16"
        return f"quantization_config: weights that {method} has quantized so are not read: {rule}"
    if config.ropes_disagree:
        return "rope_scaling and rope_parameters say different things, so which of them holds is not known: remove one"
    if isinstance(config, LayerRopesConfig):  # its own check covers each layer's
        return None
    return rope_problem(config.rope, config.rope_types, config.rotary_size)


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


# --- End tokens as a model's folder names them: `eos_token_id` of `generation_config.json` and `config.json` ---

GENERATION = "generation_config.json"
_CONFIG = "config.json"
_KEPT = ("bos_token_id", "pad_token_id")  # libraries read these from config.json if there is no generation_config.json


class _Ends(Frozen, extra="ignore"):
    eos_token_id: int | list[int] | None = None


_ends: TypeAdapter[_Ends] = TypeAdapter(_Ends)


def read_end_ids(model: Path) -> tuple[int, ...]:
    """Return every end token that the files of a model's folder name. Raises CorruptArtifact for a damaged file."""
    found = [*_end_ids(model / GENERATION), *_end_ids(model / _CONFIG)]
    return tuple(dict.fromkeys(found))


def with_end_ids(model: Path, end_ids: Iterable[int]) -> dict[str, Any] | None:
    """Return the content of a `generation_config.json` that makes libraries end answers with these ids.

    Returns None if the file names them all already. Their order in the file is kept: some libraries take the first.
    """
    named, wanted = _end_ids(model / GENERATION), dict.fromkeys([*read_end_ids(model), *end_ids])
    if set(wanted) <= set(named):
        return None
    config = _object(model / _CONFIG)
    began = _object(model / GENERATION) or {name: config[name] for name in _KEPT if config.get(name) is not None}
    return began | {"eos_token_id": list(wanted)}


def end_ids_in(values: dict[str, Any], place: str) -> list[int]:
    """Return the end tokens that a file of this content names. Raises CorruptArtifact for a damaged one."""
    try:
        found = _ends.validate_python(values).eos_token_id
    except ValidationError as error:
        raise CorruptArtifact(first_rule(error), place) from error
    return [found] if isinstance(found, int) else found or []


def _end_ids(path: Path) -> list[int]:
    return end_ids_in(_object(path), str(path))


def _object(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise CorruptArtifact(f"no JSON: {error}", str(path)) from error
    return with_decoder(value)
