"""DeepSeek-V3, and GLM-4's models that are built like it (glm4_moe_lite): multi-head latent attention, and experts.

Other tensors of a checkpoint are copied unchanged: the layers of multi-token prediction, which follow the decoder's,
and the routers' corrections, which are used in float32 and not trained.
"""

import dataclasses
import math

from shared.families.architecture import Architecture, LatentAttention, Mixture, yarn_magnitude
from shared.families.tensor_slices import TensorSlice
from shared.models.families import LatentConfig


def architecture(alike: Architecture, config: LatentConfig) -> Architecture:
    """Return the architecture, given one whose layers are plain attention."""
    attention = alike.attention
    latent = LatentAttention(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rope=attention.rope,
        scale=_scale(config),
        query_rank=config.q_lora_rank,
        latent_size=config.kv_lora_rank,
        value_size=config.v_head_dim,
        is_interleaved=config.rope_interleave,
    )
    first = config.num_hidden_layers
    behind = tuple(f"{alike.tensor_prefix}.layers.{first + n}." for n in range(config.num_predicting_layers))
    return dataclasses.replace(
        alike, mixers=(latent,) * first, carried=(*alike.carried, *behind, *(s.name for s in corrections(alike)))
    )


def _scale(config: LatentConfig) -> float | None:
    """Return the scale of the scores if the file asks for YaRN's: multiplied by the square of its magnitude."""
    rope = config.rope
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor is None:
        return None
    return yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2 / math.sqrt(config.size_of_heads)


def latent_slices(a: LatentAttention, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
    """Return the tensors of latent attention: projections to latents are whole on every rank, others split by heads."""

    def whole(name: str, parameter: str, *shape: int) -> TensorSlice:
        return TensorSlice(f"{theirs}.{name}.weight", f"{ours}.{parameter}.weight", shape, None, 0, shape[0])

    def by_heads(name: str, parameter: str, num_rows: int, num_columns: int) -> TensorSlice:
        names = f"{theirs}.{name}.weight", f"{ours}.{parameter}.weight"
        return TensorSlice(*names, (num_rows, num_columns), 0, 0, num_rows // tp)

    keys, values, (own, rotated) = a.num_heads * a.head_dim, a.num_heads * a.value_size, a.key_sizes
    if a.query_rank is None:
        queries = [by_heads("q_proj", "query_up", keys, hidden_size)]
    else:
        queries = [
            whole("q_a_proj", "query_down", a.query_rank, hidden_size),
            whole("q_a_layernorm", "query_norm", a.query_rank),
            by_heads("q_b_proj", "query_up", keys, a.query_rank),
        ]
    output = f"{theirs}.o_proj.weight", f"{ours}.output.weight"
    return [
        *queries,
        whole("kv_a_proj_with_mqa", "latent_down", a.latent_size + rotated, hidden_size),
        whole("kv_a_layernorm", "latent_norm", a.latent_size),
        by_heads("kv_b_proj", "latent_up", a.num_heads * own + values, a.latent_size),
        TensorSlice(*output, (hidden_size, values), 1, 0, hidden_size),
    ]


def corrections(a: Architecture) -> list[TensorSlice]:
    """Return the bias that routers add to experts' scores when they choose: float32, whole on every rank."""
    return [
        TensorSlice(
            f"{a.tensor_prefix}.layers.{layer}.{a.names.mlp}.gate.e_score_correction_bias",
            f"decoder.layers.{layer}.mlp.router.correction",
            (mlp.num_experts,),
            None,
            0,
            mlp.num_experts,
        )
        for layer, mlp in enumerate(a.mlps)
        if isinstance(mlp, Mixture) and mlp.scoring == "sigmoid"
    ]
