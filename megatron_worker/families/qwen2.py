"""Qwen2 and Qwen2.5: biases on query, key and value."""

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import dense_architecture
from megatron_worker.families.tensor_slices import dense_slices
from shared.models.config import DenseConfig

slices = dense_slices  # its Hugging Face names are Llama's


def architecture(config: DenseConfig) -> Architecture:
    return dense_architecture(config, qkv_bias=True, qk_norm=False)
