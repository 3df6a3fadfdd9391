"""Qwen3 (dense): query and key heads are normalised, no biases."""

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import DenseConfig
from megatron_worker.families.pieces import dense_pieces

pieces = dense_pieces  # its Hugging Face names are Llama's


def architecture(config: DenseConfig) -> Architecture:
    return config.architecture(qkv_bias=False, qk_norm=True, rope_theta=1_000_000.0, head_dim=128)
