"""Qwen3 with a mixture of experts in every layer: attention as Qwen3's, no shared expert."""

import dataclasses

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import dense_architecture
from megatron_worker.families.tensor_slices import expert_slices
from shared.models.config import MixtureConfig

slices = expert_slices


def architecture(config: MixtureConfig) -> Architecture:
    dense = dense_architecture(config, qkv_bias=False, qk_norm=True)
    return dataclasses.replace(
        dense,
        num_experts=config.num_experts,
        expert_ffn_size=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        normalised_experts=config.norm_topk_prob,
    )
