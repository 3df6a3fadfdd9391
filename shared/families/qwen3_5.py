"""Qwen3.5 and 3.6, dense and mixture: gated delta nets and, between them, attention layers with an output gate.

All norms except the delta net's are zero-centred, and attention rotates a part of each head. The checkpoints' other
tensors, of a vision tower and of multi-token prediction, are copied unchanged.
"""

import dataclasses

from shared.families.architecture import Architecture, DeltaNet
from shared.families.tensor_slices import TensorSlice
from shared.models.families import HybridConfig

IN_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # in the order of `DeltaNet.made_sizes`


def architecture(alike: Architecture, config: HybridConfig) -> Architecture:
    """Return the architecture, given one whose layers are all attention."""
    delta_net = DeltaNet(
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )
    attention = dataclasses.replace(alike.attention, is_gated=True)
    mixers = tuple(delta_net if recurrent else attention for recurrent in config.is_recurrent)
    return dataclasses.replace(alike, mixers=mixers, zero_centred_norms=True)


def delta_net_slices(delta: DeltaNet, hidden_size: int, tp: int, theirs: str, ours: str) -> list[TensorSlice]:
    """Return the tensors of a gated delta net: one linear makes all inputs, and each rank has some of the heads."""
    mixed, values, heads = delta.mixed_sizes, delta.num_values, delta.num_value_heads
    slices, start = [], 0
    for name, num_rows in zip(IN_PROJECTIONS, delta.made_sizes, strict=True):
        sections = mixed if name == "in_proj_qkv" else ()
        stop, shape = start + num_rows // tp, (num_rows, hidden_size)
        parameter = f"{ours}.in_proj.weight"
        slices.append(TensorSlice(f"{theirs}.{name}.weight", parameter, shape, 0, start, stop, sections=sections))
        start = stop
    kernel = (sum(mixed), 1, delta.conv_width)
    conv = f"{theirs}.conv1d.weight", f"{ours}.conv_weight", kernel, 0, 0, sum(mixed) // tp
    return [
        *slices,
        TensorSlice(*conv, sections=mixed),
        TensorSlice(f"{theirs}.A_log", f"{ours}.A_log", (heads,), 0, 0, heads // tp),
        TensorSlice(f"{theirs}.dt_bias", f"{ours}.dt_bias", (heads,), 0, 0, heads // tp),
        TensorSlice(f"{theirs}.norm.weight", f"{ours}.norm.weight", (delta.value_size,), None, 0, delta.value_size),
        TensorSlice(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", (hidden_size, values), 1, 0, hidden_size),
    ]
