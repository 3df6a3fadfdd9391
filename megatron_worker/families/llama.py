"""Llama 3 and its relatives: no biases, optional llama3 rope scaling."""

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import DenseConfig
from megatron_worker.families.pieces import dense_pieces

pieces = dense_pieces  # its Hugging Face names are Llama's


def architecture(config: DenseConfig) -> Architecture:
    return config.architecture(qkv_bias=False, qk_norm=False, rope_theta=10_000.0)
