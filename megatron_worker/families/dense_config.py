"""From the part of a Hugging Face `config.json` that the dense families share to an architecture."""

from megatron_worker.families.architecture import Architecture, Llama3Scaling, Rope
from shared.models.config import DenseConfig, RopeConfig

# What transformers takes for a file that names none, of every family.
_DEFAULT_THETA = 10_000.0


def dense_architecture(
    config: DenseConfig, *, qkv_bias: bool, qk_norm: bool, head_dim: int | None = None
) -> Architecture:
    """The sizes of a file with the switches of its family.

    Args:
        head_dim: the family's own, for a file that names none. Without either, heads share the hidden size.
    """
    return Architecture(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rope=_rope(config),
    )


def _rope(config: DenseConfig) -> Rope:
    parameters = config.rope
    theta = parameters.rope_theta or config.rope_theta or _DEFAULT_THETA
    return Rope(theta, _llama3(parameters) if parameters.rope_type == "llama3" else None)


def _llama3(parameters: RopeConfig) -> Llama3Scaling:
    assert parameters.factor is not None  # else the file was refused
    assert parameters.original_max_position_embeddings is not None
    return Llama3Scaling(
        parameters.factor,
        parameters.low_freq_factor,
        parameters.high_freq_factor,
        parameters.original_max_position_embeddings,
    )
