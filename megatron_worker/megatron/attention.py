"""Attention within the sequences of a bin, without masks: no token sees another sequence.

A bin's `BinPlan` is made once and used by all layers: where its sequences begin, the rotary tables of its positions,
and the chunks of its recurrences. Trees of sequences that share prefixes are computed in tree_attention.py.

Shape suffixes: T tokens of a bin, S sequences, H query heads of this rank, G key/value heads, X either, D size of a
head, E half of it.
"""

import itertools
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_worker.families.rope import rope_tables
from megatron_worker.megatron.parallel.collectives import gather_rows, linear_map
from megatron_worker.megatron.parallel.mesh import Group
from megatron_worker.mixers.delta_rule import RecurrentPlan, plan_recurrence
from megatron_worker.mixers.tree_attention import Forest, attend_forest, plan_forest
from shared.families.architecture import Architecture, Attention
from shared.families.rope import Rope


@dataclass(frozen=True)
class Context:
    """The two chunks of a bin on this context-parallel rank. `order_T`: the bin's order among all ranks' tokens."""

    group: Group
    chunks: tuple[slice, slice]
    order_T: Tensor

    def rows(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the places in the bin of the chunks' tokens: [t]."""
        index_T = torch.arange(num_tokens, device=device)
        return torch.cat([index_T[chunk] for chunk in self.chunks])


@dataclass(frozen=True)
class BinPlan:
    """The plan of a bin's attention. Tables are in the compute dtype.

    A bin of chains has their lengths, which add up to T. A bin with branches has a forest for each window of the
    model's layers; so has every bin that is cut over context-parallel ranks, where T counts this rank's tokens.
    A bin of chains also has a forest if a window excludes something, or if layers have sinks.
    """

    lengths: tuple[int, ...]
    forests: Mapping[int | None, Forest]
    start_S1: Tensor | None  # cumulative lengths, int32 [sequences + 1], for a variable-length kernel
    rotary: Mapping[Rope, tuple[Tensor, Tensor]]  # cosines and sines, [T, 1, D] each
    context: Context | None = None
    recurrence: RecurrentPlan | None = None  # for models with recurrent layers


def plan_bin(
    position_T: Tensor,
    parent_T: Tensor,
    a: Architecture,
    frequencies: Mapping[Rope, Tensor],
    dtype: torch.dtype,
    context: Context | None = None,
) -> BinPlan:
    """Plan a bin for a model's layers. Raises InvalidInput if a tree's tokens are not in depth-first order.

    Args:
        position_T: of this rank's tokens; `parent_T` is the whole bin's.
        frequencies: see Architecture.
    """
    lengths = chain_lengths(parent_T) if context is None else None
    forests = {
        window: plan_forest(parent_T, dtype, context.chunks if context else (), window)
        for window in a.windows
        if lengths is None or a.has_sinks or (window is not None and max(lengths, default=0) > window)
    }
    rotary = {rope: rope_tables(rope, position_T, frequency_D2, dtype) for rope, frequency_D2 in frequencies.items()}
    recurrence = None if a.conv_width is None else plan_recurrence(parent_T, a.conv_width)
    start_S1 = None
    if lengths is not None and position_T.is_cuda and dtype == torch.bfloat16:  # torch has a kernel for these
        start_S1 = F.pad(torch.tensor(lengths, device=position_T.device).cumsum(0), (1, 0)).int()
    return BinPlan(lengths or (), forests, start_S1, rotary, context, recurrence)


def chain_lengths(parent_T: Tensor) -> tuple[int, ...] | None:
    """Return the lengths of a bin's sequences if every parent is the token before, or -1 at a start; else None."""
    index_T = torch.arange(len(parent_T), device=parent_T.device)
    starts_T = parent_T == -1
    if not bool((starts_T | (parent_T == index_T - 1)).all()) or (len(parent_T) and not bool(starts_T[0])):
        return None
    bounds = [*starts_T.nonzero()[:, 0].tolist(), len(parent_T)]
    return tuple(b - a for a, b in itertools.pairwise(bounds))


class PackedSelfAttention(SelfAttention):
    """Megatron's projections and head norms around our rotation and attention.

    `forward` takes a `BinPlan` in place of the attention mask. Megatron's `forward` would build rotary tables in every
    layer, and supports packed sequences only with Transformer Engine. A head's gate follows its query.
    """

    def __init__(self, config: TransformerConfig, *args: Any, attention: Attention, **kwargs: Any) -> None:
        own = copy(config)
        own.num_attention_heads, own.num_query_groups = attention.num_heads, attention.num_kv_heads
        own.kv_channels, own.attention_output_gate = attention.head_dim, attention.is_gated
        own.add_qkv_bias, own.add_bias_linear = attention.qkv_bias, attention.output_bias
        own.qk_layernorm = attention.qk_norm
        super().__init__(own, *args, **kwargs)
        self._attention = attention
        heads = attention.num_heads // config.tensor_model_parallel_size
        self.sinks = Parameter(torch.empty(heads, dtype=config.params_dtype)) if attention.has_sinks else None

    def forward(self, hidden_states: Tensor, attention_mask: BinPlan, **_: object) -> tuple[Tensor, Tensor | None]:
        plan, a = attention_mask, self._attention
        mixed_T1X, _bias = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, a.head_dim
        num_queries = a.heads_per_group * a.rows_per_head // size
        if a.is_fused:
            mixed_TXD = mixed_T1X.view(len(mixed_T1X), -1, 1, size)
            query, key, value_TGD = mixed_TXD.split([groups * num_queries, groups, groups], dim=1)
        else:
            mixed_TGXD = mixed_T1X.view(len(mixed_T1X), groups, num_queries + 2, size)
            query, key, value_TGD = mixed_TGXD.split([num_queries, 1, 1], dim=2)
        gate_THD = None
        if a.is_gated:
            query, gate = query.unflatten(2, (-1, 2)).unbind(3)
            gate_THD = gate.flatten(1, 2)
        query_THD, key_TGD = query.flatten(1, 2), key.flatten(1, 2)
        if a.qk_norm:
            query_THD, key_TGD = self.q_layernorm(query_THD), self.k_layernorm(key_TGD)
        if a.rope is not None:
            query_THD, key_TGD = (rotate(x, *plan.rotary[a.rope]) for x in (query_THD, key_TGD))
        if a.scale is not None:
            query_THD = query_THD * (a.scale * size**0.5)
        key_TGD, value_TGD = whole_context(key_TGD, value_TGD.flatten(1, 2), plan.context)
        attended_THD = attend(query_THD, key_TGD, value_TGD, plan, a.window, self.sinks)
        if gate_THD is not None:
            attended_THD = attended_THD * gate_THD.sigmoid()
        output, bias = self.linear_proj(attended_THD.reshape(len(mixed_T1X), 1, -1))
        return output, bias


def whole_context(key_TGD: Tensor, value_TGD: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the whole bin, in its order."""
    if context is None:
        return key_TGD, value_TGD
    both = gather_rows(torch.stack([key_TGD, value_TGD], dim=1), context.group).index_select(0, context.order_T)
    return both[:, 0], both[:, 1]


class CoreAttention(torch.nn.Module):
    """A placeholder for the core attention in megatron's spec; `PackedSelfAttention` calls `attend` itself."""

    def __init__(self, **_: object) -> None:
        super().__init__()


def attend(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    plan: BinPlan,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attend from each token to itself and those before it in its sequence, or above it in its tree: [T, H, D]."""
    if (forest := plan.forests.get(window)) is not None:
        return attend_forest(query_THD, key_TGD, value_TGD, forest, sink_H)
    if plan.start_S1 is not None:
        return _varlen(query_THD, key_TGD, value_TGD, plan)
    parts = zip(*(_split(x, plan.lengths) for x in (query_THD, key_TGD, value_TGD)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
    if len(outputs) == 1:
        return outputs[0][0].transpose(0, 1)
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


def _split(heads_TXD: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return one [1, heads, S, D] view for each sequence."""
    return [part.transpose(0, 1)[None] for part in heads_TXD.split(list(lengths))]


def _varlen(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, plan: BinPlan) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA only

    longest, starts = max(plan.lengths), plan.start_S1
    assert starts is not None
    output = varlen_attn(
        query_THD, key_TGD, value_TGD, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(output, Tensor)
    return output


def rotate(heads_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate each head's first half against its second by the angle of its token's position. If a head is larger than
    the tables, only the dimensions of the tables are rotated.

    It costs one product and two fused multiply-adds; the backward is the rotation by the opposite angle.
    """
    size = cos_T1D.shape[-1]
    if size < heads_TXD.shape[-1]:
        first, rest = heads_TXD[..., :size].contiguous(), heads_TXD[..., size:]
        return torch.cat([rotate(first, cos_T1D, sin_T1D), rest], dim=-1)
    return linear_map(heads_TXD, partial(_rotated, sign=1), partial(_rotated, sign=-1), cos_T1D, sin_T1D)


def _rotated(heads_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, sign: int) -> Tensor:
    output = heads_TXD * cos_T1D
    first, second = heads_TXD.chunk(2, dim=-1)
    output_first, output_second = output.chunk(2, dim=-1)
    sin_T1E = sin_T1D.chunk(2, dim=-1)[0]
    output_first.addcmul_(second, sin_T1E, value=-sign)
    output_second.addcmul_(first, sin_T1E, value=sign)
    return output
