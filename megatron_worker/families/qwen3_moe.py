"""Qwen3 with a mixture of experts in every layer: attention as Qwen3's, no shared expert."""

import dataclasses

from pydantic import AliasChoices, Field

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.dense_config import DenseConfig, Size
from megatron_worker.families.pieces import expert_pieces
from shared.errors import InvalidInput

pieces = expert_pieces


class MixtureConfig(DenseConfig):
    """`num_experts` in files of transformers 4, `num_local_experts` in those of 5."""

    num_experts: int = Field(ge=1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Size
    moe_intermediate_size: int = Size
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None


def architecture(config: MixtureConfig) -> Architecture:
    """Raises InvalidInput when some layers have no experts, or a token more of them than there are."""
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise InvalidInput("layers without experts among others with them are not supported", "config.json")
    if config.num_experts_per_tok > config.num_experts:
        raise InvalidInput(
            f"a token goes to {config.num_experts_per_tok} experts of {config.num_experts}", "config.json"
        )
    dense = config.architecture(qkv_bias=False, qk_norm=True, rope_theta=1_000_000.0, head_dim=128)
    return dataclasses.replace(
        dense,
        num_experts=config.num_experts,
        expert_ffn_size=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_tok,
        normalised_experts=config.norm_topk_prob,
    )
