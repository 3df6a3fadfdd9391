"""Model families: the engine's architecture for a Hugging Face config, and where each of its tensors lies."""

import dataclasses
import json
from pathlib import Path

from megatron_worker.families.architecture import Architecture, Llama3Scaling, Rope
from shared.errors import InvalidInput
from shared.models.config import DenseConfig, MixtureConfig, read_model_config

_DEFAULT_THETA = 10_000.0  # transformers' default for all families


def read_architecture(folder: Path) -> Architecture:
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
    return _architecture(read_model_config(values, str(path)))


def _architecture(config: DenseConfig) -> Architecture:
    """Return the architecture of a config, with the settings of its family, which are not in the config."""
    match config.model_type:
        case "llama":
            return _sized(config)
        case "qwen2":
            return _sized(config, qkv_bias=True)
        case "qwen3":
            return _sized(config, qk_norm=True)
        case "qwen3_moe":
            return _sized(config, qk_norm=True)
        case family:
            raise AssertionError(family)  # refused when the file was read


def _sized(config: DenseConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> Architecture:
    """Return the architecture of a config with the given settings of its family."""
    dense = Architecture(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.size_of_heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rope=_rope(config),
    )
    if not isinstance(config, MixtureConfig):
        return dense
    return dataclasses.replace(
        dense,
        num_experts=config.num_experts,
        expert_ffn_size=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        normalised_experts=config.norm_topk_prob,
    )


def _rope(config: DenseConfig) -> Rope:
    parameters = config.rope
    theta = parameters.rope_theta or _DEFAULT_THETA
    if parameters.rope_type != "llama3":
        return Rope(theta)
    assert parameters.factor is not None  # else the file was refused
    assert parameters.original_max_position_embeddings is not None
    scaling = Llama3Scaling(
        parameters.factor,
        parameters.low_freq_factor,
        parameters.high_freq_factor,
        parameters.original_max_position_embeddings,
    )
    return Rope(theta, scaling)
