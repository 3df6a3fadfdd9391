"""Llama 3 and its relatives: no biases, optional llama3 rope scaling."""

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import DenseConfig
from megatron_worker.families.pieces import Piece, dense_pieces


def architecture(config: DenseConfig) -> Architecture:
    config.refuse_unsupported()
    return Architecture(
        family="llama",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_size(),
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=False,
        qk_norm=False,
        rope=config.rope(default_theta=10000.0),
    )


def pieces(architecture: Architecture, tp: int) -> list[Piece]:
    """Its Hugging Face names are Llama's."""
    return dense_pieces(architecture, tp)
