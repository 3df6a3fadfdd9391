"""Model families: what a model's `config.json` is read as. A family is a class of a module beside this one; no other
place names it.

Unsupported features are refused. If a file omits a setting, transformers' default applies.
"""

import json
import pkgutil
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from shared.errors import InvalidInput
from shared.families.architecture import Architecture
from shared.families.config import DenseConfig, GenericConfig
from shared.field_rules import refused_value

# The package is walked, so that a family is its module alone, and nobody can forget to name it in a list.
_MODULES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_CLASSES: dict[str, type[DenseConfig]] = {
    kind.family: kind
    for module in _MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, DenseConfig) and vars(kind).get("family")
}
FAMILIES = tuple(_CLASSES)
"""The `model_type` of each supported model family."""
_WITH_TOWERS = {kind.tower.model_type: kind for kind in _CLASSES.values() if kind.tower is not None}
_TEXT_ALONE = {f"{name}_text": kind for name, kind in _WITH_TOWERS.items() if name == kind.family}
_READ_AS = _CLASSES | _WITH_TOWERS | _TEXT_ALONE

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


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of a model folder; for an unknown family only the sizes. Raises as `read_config` does."""
    return read_config(folder, any_family=True).architecture()


def read_config(folder: Path, any_family: bool = False) -> DenseConfig:
    """Read a model folder's `config.json`. `any_family`: see `read_model_config`.

    Raises:
        InvalidInput: the file is missing or unreadable, the family is unknown, or a setting is not supported.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput("the model folder has no config.json", str(path)) from error
    except ValueError as error:
        raise InvalidInput(f"not valid JSON: {error}", str(path)) from error
    return read_model_config(values, str(path), any_family).named_as_in(_names_in(folder))


def _names_in(folder: Path) -> list[str]:
    """Return the names of a folder's tensors; none if they cannot be read: reading the weights reports the error."""
    index = folder / "model.safetensors.index.json"
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        if index.exists():
            return list(json.loads(index.read_bytes())["weight_map"])
        with safe_open(folder / "model.safetensors", framework="np") as file:
            return list(file.keys())
    return []


def read_model_config(values: dict[str, Any], place: str, any_family: bool = False) -> DenseConfig:
    """Parse a `config.json`: the settings of a model's decoder, of its family's class.

    A model that also reads images has them in `text_config`; its vision tower is copied unchanged.
    `any_family`: for other families, which the engine fsdp may train, return the sizes alone, as a GenericConfig.

    Raises InvalidInput: the family is unknown (then no other field has been read), a feature is not supported, or a
    size is missing.
    """
    named = values.get("model_type")
    kind = _READ_AS.get(named) if isinstance(named, str) else None
    if kind is not None:
        decoder = _decoder_settings(kind, values, place)
    elif any_family and isinstance(named, str):
        kind, decoder = GenericConfig, _generic_settings(values, place)
    else:
        rule = ", ".join(FAMILIES)
        if isinstance(named, str) and named in _UNKNOWN:
            needed, nearest = _UNKNOWN[named]
            rule = f"it needs {needed}; the nearest is {nearest}"
        raise InvalidInput(f"model_type {named!r} is not a known family: {rule}{_BY_FSDP}", place)
    try:
        config = kind.model_validate(decoder)
    except ValidationError as error:
        raise InvalidInput(refused_value(error), place) from error
    if problem := config.problem():
        raise InvalidInput(problem, place)
    _refuse_unknown_switches(decoder, kind, config.model_type, place)
    return config


def _decoder_settings(kind: type[DenseConfig], values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the decoder's settings of a `config.json`, with `model_type` its family's."""
    ours = {"model_type": kind.family, "tensor_prefix": kind.prefixes[0], "carried": kind.always_carried}
    ours |= kind.made_of(values, place)
    named, tower = values["model_type"], kind.tower
    if tower is None or named != tower.model_type:
        return values | ours
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise InvalidInput("text_config: this field is required: it has the sizes of the decoder", place)
    inner = text.get("model_type", kind.family)
    if inner not in (kind.family, f"{named}_text"):
        needed = f", which needs {_UNKNOWN[inner][0]}" if inner in _UNKNOWN else ""
        rule = f"a model of the type {named} is read with a decoder of the family {kind.family}"
        raise InvalidInput(f"text_config: its model_type is {inner!r:.40}{needed}; {rule}", place)
    of_whole = text if tower.is_tied_by_decoder else values
    by_default = False if tower.is_tied_by_decoder else kind.model_fields["tie_word_embeddings"].default
    is_tied = of_whole.get("tie_word_embeddings", by_default)
    if text.get("tie_word_embeddings", is_tied) != is_tied:
        raise InvalidInput("tie_word_embeddings is not the same in text_config: which of them holds?", place)
    ours |= {"tensor_prefix": tower.prefix, "carried": tower.carried, "tie_word_embeddings": is_tied}
    return text | {"quantization_config": values.get("quantization_config")} | ours


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
_SCALES = re.compile(
    r"soft_?cap|scale_(emb|depth)|clip_qkv|alibi|qk_norm"
    r"|(embeddings?|residual|attention|logits?)_(multiplier|scal(e|ing))(_factor)?$"
)


def _refuse_unknown_switches(settings: Mapping[str, Any], kind: type[DenseConfig], family: str, place: str) -> None:
    """Raise InvalidInput if a setting that a class does not read is switched on; names it."""
    known = _read_by(kind)
    for name, value in settings.items():
        if name in known or name in _WITHOUT_EFFECT or (value is True and name in kind.always_on):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is True or (_SCALES.search(name) and (value not in (0, 1) if is_number else value)):
            rule = f"it is not known in models of the family {family}, and what it asks for would be left out"
            raise InvalidInput(f"{name} = {value!r:.60} is not supported: {rule}", place)


def _read_by(kind: type[BaseModel]) -> set[str]:
    """Return the names in a file of the settings that a class reads."""
    names = set(kind.model_fields)
    for field in kind.model_fields.values():
        given = field.validation_alias
        choices = given.choices if isinstance(given, AliasChoices) else (given,)
        names |= {name for name in choices if isinstance(name, str)}
    return names


# --- Models of transformers outside our families: the engine fsdp trains them with transformers' own code ---
#
# Only the sizes of a `config.json` are read, by their common names. The rest is found when the model is loaded
# (megatron_worker/fsdp/model.py).

_READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "quantization_config"),
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _generic_settings(values: dict[str, Any], place: str) -> dict[str, Any]:
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
