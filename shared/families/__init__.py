"""Model families: the engine's architecture for a Hugging Face config, and the location of each of its tensors."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open

from shared.errors import InvalidInput
from shared.families import deepseek_v3, gemma, gpt_oss, nemotron_h, qwen3_5
from shared.families.architecture import Architecture, Attention, Mixture, Mlp, NormedBlock, Rope, read_rope
from shared.models.config import Family, GenericConfig, named_as_in, read_model_config
from shared.models.families import (
    DenseConfig,
    GptOssConfig,
    GraniteConfig,
    HybridConfig,
    LatentConfig,
    LayerRopesConfig,
    MixtureConfig,
    NemotronHConfig,
    Olmo3Config,
    SmolLM3Config,
)
from shared.models.gemma import GemmaConfig


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of a model folder; for an unknown family only the sizes. Raises as `read_config` does."""
    return architecture_of(read_config(folder, any_family=True))


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
    return named_as_in(read_model_config(values, str(path), any_family), _names_in(folder))


def _names_in(folder: Path) -> list[str]:
    """Return the names of a folder's tensors; none if they cannot be read: reading the weights reports the error."""
    index = folder / "model.safetensors.index.json"
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        if index.exists():
            return list(json.loads(index.read_bytes())["weight_map"])
        with safe_open(folder / "model.safetensors", framework="np") as file:
            return list(file.keys())
    return []


def architecture_of(config: DenseConfig) -> Architecture:
    """Return the architecture of a config, including its family's settings that are not in the config."""
    if isinstance(config, GenericConfig):
        return _without_layers(config)
    match cast(Family, config.model_type):  # others were refused when the file was read
        case "llama" | "mistral" | "ministral":
            return _windowed(_sized(config, _attention(config)), config)
        case "gpt_oss":
            assert isinstance(config, GptOssConfig)
            return gpt_oss.architecture(_sized(config, _attention(config)), config)
        case "phi3":
            fused = _sized(config, dataclasses.replace(_attention(config), is_fused=True))
            mlp = Mlp(config.intermediate_size, is_fused=True)
            return _windowed(dataclasses.replace(fused, mlps=(mlp,) * fused.num_layers), config)
        case "smollm3":
            assert isinstance(config, SmolLM3Config)
            attention = _attention(config)
            still = dataclasses.replace(attention, rope=None)
            mixers = tuple(attention if rotated else still for rotated in config.is_rotated)
            return dataclasses.replace(_sized(config, attention), mixers=mixers)
        case "granite":
            assert isinstance(config, GraniteConfig)
            attention = dataclasses.replace(_attention(config), scale=config.attention_multiplier)
            return dataclasses.replace(
                _sized(config, attention),
                embedding_scale=config.embedding_multiplier,
                residual_scale=config.residual_multiplier,
                logit_divisor=config.logits_scaling,
            )
        case "olmo3":
            assert isinstance(config, Olmo3Config)
            attention = dataclasses.replace(_attention(config, qk_norm=True), norms_all_heads=config.norms_all_heads)
            alike = _windowed(_sized(config, attention), config, _ropes(config))
            return dataclasses.replace(alike, block=NormedBlock(norms_inputs=False))
        case "qwen2":
            return _windowed(_sized(config, _attention(config, qkv_bias=True)), config)
        case "qwen3" | "qwen3_moe":
            return _windowed(_sized(config, _attention(config, qk_norm=True)), config)
        case "qwen3_5" | "qwen3_5_moe":
            assert isinstance(config, HybridConfig)
            return qwen3_5.architecture(_sized(config, _attention(config, qk_norm=True)), config)
        case "deepseek_v3" | "glm4_moe_lite":
            assert isinstance(config, LatentConfig)
            return deepseek_v3.architecture(_sized(config, _attention(config)), config)
        case "nemotron_h":
            assert isinstance(config, NemotronHConfig)
            return nemotron_h.architecture(_sized(config, _attention(config)), config)
        case "gemma3" | "gemma4":
            assert isinstance(config, GemmaConfig)
            attention = _attention(config, qk_norm=True)
            return gemma.architecture(_sized(config, attention), config, _ropes(config))


def _without_layers(config: GenericConfig) -> Architecture:
    nothing, sizes = (None,) * config.num_hidden_layers, (config.hidden_size, config.vocab_size)
    return Architecture(config.model_type, nothing, nothing, *sizes, norm_eps=0.0, tied=config.tie_word_embeddings)


def is_generic(a: Architecture) -> bool:
    """Return True if the family is none of ours: only transformers' model knows the contents of a layer."""
    return not any(a.mixers) and not any(a.mlps)


def _windowed(alike: Architecture, config: DenseConfig, ropes: Sequence[Rope] = ()) -> Architecture:
    """Return an architecture with each layer's attention window, and its rotary embedding if layers differ."""
    layers = zip(config.windows, ropes or (alike.attention.rope,) * alike.num_layers, strict=True)
    mixers = tuple(dataclasses.replace(alike.attention, window=window, rope=rope) for window, rope in layers)
    return dataclasses.replace(alike, mixers=mixers)


def _ropes(config: LayerRopesConfig) -> list[Rope]:
    layers = range(config.num_hidden_layers)
    return [read_rope(config.rope_of(layer), config.heads_of(layer)[0]) for layer in layers]


def _attention(config: DenseConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> Attention:
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.size_of_heads,
        rope=read_rope(config.rope, config.rotary_size),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _sized(config: DenseConfig, attention: Attention) -> Architecture:
    """Return an architecture whose layers all have this attention, and experts in the layers that the config names."""
    mixture = _mixture(config) if isinstance(config, MixtureConfig) else None
    return Architecture(
        family=config.model_type,
        mixers=(attention,) * config.num_hidden_layers,
        mlps=tuple(mixture if has_experts else Mlp(config.intermediate_size) for has_experts in config.has_experts),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        tensor_prefix=config.tensor_prefix,
        carried=config.carried,
        names=config.names,
        max_positions=config.max_positions,
    )


def _mixture(config: MixtureConfig) -> Mixture:
    grouped = config if isinstance(config, LatentConfig | NemotronHConfig) else None
    return Mixture(
        num_experts=config.num_experts,
        ffn_size=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        is_normalised=config.norm_topk_prob,
        shared_ffn_size=config.shared_ffn_size,
        shared_is_gated=grouped is None,
        scoring="sigmoid" if grouped else "softmax",
        num_groups=grouped.n_group if grouped else 1,
        chosen_groups=grouped.topk_group if grouped else 1,
        scale=grouped.routed_scaling_factor if grouped else 1.0,
    )
