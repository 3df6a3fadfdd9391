"""Qwen3 (dense): query and key heads are normalised, no biases."""

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import dense_architecture
from megatron_worker.families.tensor_slices import dense_slices
from shared.models.config import DenseConfig

slices = dense_slices  # its Hugging Face names are Llama's


def architecture(config: DenseConfig) -> Architecture:
    return dense_architecture(config, qkv_bias=False, qk_norm=True, head_dim=128)
