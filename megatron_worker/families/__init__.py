"""Model families: the engine's architecture for a Hugging Face config, and where each of its tensors lies."""

import dataclasses
import json
import math
from pathlib import Path
from typing import cast

from megatron_worker.families import deepseek_v3, gemma, gpt_oss, nemotron_h, qwen3_5
from megatron_worker.families.architecture import (
    Architecture,
    Attention,
    LinearScaling,
    Llama3Scaling,
    Mixture,
    Mlp,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from shared.errors import InvalidInput
from shared.models.config import Family, read_model_config
from shared.models.dense import DenseConfig, RopeConfig
from shared.models.families import (
    GptOssConfig,
    HybridConfig,
    LatentConfig,
    MixtureConfig,
    NemotronHConfig,
    SmolLM3Config,
)
from shared.models.gemma import GemmaConfig

_DEFAULT_THETA = 10_000.0  # transformers' default for all families


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of a model folder. Raises as `read_config` does."""
    return architecture_of(read_config(folder))


def read_config(folder: Path) -> DenseConfig:
    """Read a model folder's `config.json`.

    Raises:
        InvalidInput: the file is missing or unreadable, the family unknown, or a setting is one that we do not compute.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput("the model folder has no config.json", str(path)) from error
    except ValueError as error:
        raise InvalidInput(f"not valid JSON: {error}", str(path)) from error
    config = read_model_config(values, str(path))
    if isinstance(config, NemotronHConfig):
        return nemotron_h.named_as_in(folder, config)
    return config


def architecture_of(config: DenseConfig) -> Architecture:
    """Return the architecture of a config, with the settings of its family, which are not in the config."""
    match cast(Family, config.model_type):  # others were refused when the file was read
        case "llama" | "mistral" | "ministral":
            return _windowed(_sized(config, _attention(config)), config)
        case "gpt_oss":
            assert isinstance(config, GptOssConfig)
            return gpt_oss.architecture(_sized(config, _attention(config)), config)
        case "smollm3":
            assert isinstance(config, SmolLM3Config)
            attention = _attention(config)
            still = dataclasses.replace(attention, rope=None)
            mixers = tuple(attention if rotated else still for rotated in config.is_rotated)
            return dataclasses.replace(_sized(config, attention), mixers=mixers)
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
            heads = [config.heads_of(layer)[0] for layer in range(config.num_hidden_layers)]
            ropes = [_rope_with(config.rope_of(layer), size) for layer, size in enumerate(heads)]
            return gemma.architecture(_sized(config, attention), config, ropes)


def _windowed(alike: Architecture, config: DenseConfig) -> Architecture:
    """Return an architecture of attention with the window of each layer."""
    mixers = tuple(dataclasses.replace(alike.attention, window=window) for window in config.windows)
    return dataclasses.replace(alike, mixers=mixers)


def _attention(config: DenseConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> Attention:
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.size_of_heads,
        rope=_rope(config),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _sized(config: DenseConfig, attention: Attention) -> Architecture:
    """Return an architecture whose layers are all alike."""
    return Architecture(
        family=config.model_type,
        mixers=(attention,) * config.num_hidden_layers,
        mlps=(_mixture(config) if isinstance(config, MixtureConfig) else Mlp(config.intermediate_size),)
        * config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        tensor_prefix=config.tensor_prefix,
        carried=config.carried,
    )


def _mixture(config: MixtureConfig) -> Mixture:
    return Mixture(
        num_experts=config.num_experts,
        ffn_size=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        is_normalised=config.norm_topk_prob,
        shared_ffn_size=config.shared_ffn_size,
    )


def _rope(config: DenseConfig) -> Rope:
    return _rope_with(config.rope, config.rotary_size)


def _rope_with(parameters: RopeConfig, size: int) -> Rope:
    theta = parameters.rope_theta or _DEFAULT_THETA
    if parameters.rope_type == "default":
        return Rope(theta, size)
    if parameters.rope_type == "proportional":
        num_turning = int((parameters.partial_rotary_factor or 1.0) * size // 2)
        return Rope(theta, size, ProportionalScaling(num_turning, parameters.factor or 1.0))
    factor, original = parameters.factor, parameters.original_max_position_embeddings
    assert factor is not None  # else the file was refused
    if parameters.rope_type == "linear":
        return Rope(theta, size, LinearScaling(factor))
    assert original is not None
    if parameters.rope_type == "yarn":
        bounds = parameters.beta_fast or 32.0, parameters.beta_slow or 1.0, parameters.truncate
        return Rope(theta, size, YarnScaling(factor, original, *bounds, _yarn_magnitude(parameters, factor)))
    return Rope(theta, size, Llama3Scaling(factor, parameters.low_freq_factor, parameters.high_freq_factor, original))


def _yarn_magnitude(parameters: RopeConfig, factor: float) -> float:
    """Return the paper's magnitude, 0.1 ln(factor) + 1, unless the file has one, or scales of its own."""
    if parameters.attention_factor is not None:
        return parameters.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.mscale and parameters.mscale_all_dim:
        return magnitude(parameters.mscale) / magnitude(parameters.mscale_all_dim)
    return magnitude(1.0)
