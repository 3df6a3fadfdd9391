"""Attention over a bin's forest, the part of a bin that a rank holds, and a layer's pass over it."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_worker.engine import Batch
from megatron_worker.families import check_lengths, rope_tables, rotated
from megatron_worker.layers import Experts, LayerPass, Rows, attention_operands
from megatron_worker.megatron.parallel import (
    Group,
    Mesh,
    added,
    copied,
    dispatch,
    gather_rows,
    linear_map,
    sum_replicated,
    sum_rows,
)
from megatron_worker.mixers.linear_attention import (
    RecurrentPlan,
    Share,
    convolve,
    gated_delta_rule,
    plan_recurrence,
    scan,
    with_ancestors,
)
from megatron_worker.mixers.tree_attention import Forest, attend_forest, plan_forest
from shared.families.architecture import Architecture, Attention, DeltaNet, Mamba2, Mixture, Rope, SharedAttention

# --- Attention within the sequences of a bin, without masks: no token sees another sequence ---
#
# A bin's `BinPlan` is made once and used by all layers: the beginnings of its sequences, the rotary tables of its
# positions, and the chunks of its recurrences. Trees of sequences that share prefixes are computed in
# tree_attention.py.
#
# Shape suffixes: T tokens of a bin, S sequences, H query heads of this rank, G key/value heads, X either, D size of a
# head, E half of it.


@dataclass(frozen=True)
class Context:
    """The two chunks of a bin on each context-parallel rank. `order_T`: the bin's order among all ranks' tokens."""

    group: Group
    parts: tuple[tuple[slice, slice], ...]
    order_T: Tensor

    @property
    def chunks(self) -> tuple[slice, slice]:
        """This rank's."""
        return self.parts[self.group.rank]

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
    share = None
    if context is not None:
        share = Share(context.group.rank, context.parts, partial(gather_rows, group=context.group))
    recurrence = None if a.conv_width is None else plan_recurrence(parent_T, a.conv_width, share)
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
    lengths = list(plan.lengths)
    of_sequences = ([part.transpose(0, 1)[None] for part in x.split(lengths)] for x in (query_THD, key_TGD, value_TGD))
    parts = zip(*of_sequences, strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
    if len(outputs) == 1:
        return outputs[0][0].transpose(0, 1)
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


def _varlen(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, plan: BinPlan) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA only

    longest, starts = max(plan.lengths), plan.start_S1
    assert starts is not None
    output = varlen_attn(
        query_THD, key_TGD, value_TGD, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(output, Tensor)
    return output


# --- A bin on one rank: padded to a length that the layout divides, and cut over context-parallel ranks ---
#
# A bin is cut into twice as many chunks as there are context-parallel ranks; rank r has chunk r and the r-th from the
# end, so that a long sequence costs all ranks the same.
#
# Shape suffixes: T tokens of a padded bin, t those of this rank, s those that it has between layers, N targets of the
# bin, M those whose hidden states are this rank's; L layers with experts, K experts of a token.

_CUDA_CHUNK = 128  # tokens: a chunk is whole blocks of flex_attention's mask


@dataclass(frozen=True)
class LocalBin:
    """A bin on this rank. `rows`: hidden states between layers. `route_LsK`: their experts, if the bin says them."""

    token_id_t: Tensor
    plan: BinPlan
    rows: int
    hidden_index_M: Tensor
    target_M: Tensor | None  # which of the bin's targets; None: all
    num_targets: int
    context: Context | None
    route_LsK: Tensor | None = None

    def of_all_targets(self, values_M: Tensor) -> Tensor:
        """Gather values of all context-parallel ranks' targets, in the order of the bin, on every rank: [N, ...].

        All ranks must compute the same with the result, since gradients are not summed over ranks.
        """
        if self.target_M is None or self.context is None:
            return values_M
        zeros_N = values_M.new_zeros(self.num_targets, *values_M.shape[1:])
        return sum_replicated(zeros_N.index_copy(0, self.target_M, values_M), self.context.group)


def shard_bin(
    batch: Batch, mesh: Mesh, a: Architecture, frequencies: Mapping[Rope, Tensor], dtype: torch.dtype
) -> LocalBin:
    """Make a rank's bin. All ranks of a bin raise the same error.

    Raises InvalidInput: a tree's tokens are not in depth-first order, or a sequence is too long.
    """
    check_lengths(batch.position_T, a.max_positions)
    token_id_T, position_T, parent_T = _padded(batch, _multiple(mesh))
    context, token_id_t, position_t = None, token_id_T, position_T
    hidden_index_M, target_M = batch.hidden_index_N, None
    if mesh.cp.size > 1:
        context = _context(len(token_id_T), mesh)
        rows_t = context.rows(len(token_id_T), token_id_T.device)
        token_id_t, position_t = token_id_T[rows_t], position_T[rows_t]
        local_T = torch.full_like(token_id_T, -1)
        local_T[rows_t] = torch.arange(len(rows_t), device=rows_t.device)
        target_M = (local_T[hidden_index_M] >= 0).nonzero()[:, 0]
        hidden_index_M = local_T[hidden_index_M[target_M]]
    rows = len(token_id_t) // (mesh.tp.size if mesh.layout.sp else 1)
    return LocalBin(
        token_id_t=token_id_t,
        plan=plan_bin(position_t, parent_T, a, frequencies, dtype, context),
        rows=rows,
        hidden_index_M=hidden_index_M,
        target_M=target_M,
        num_targets=len(batch.label_N),
        context=context,
        route_LsK=_routes(batch, len(token_id_T), context, mesh),
    )


def _routes(batch: Batch, num_tokens: int, context: Context | None, mesh: Mesh) -> Tensor | None:
    """Return the experts of this rank's tokens. Tokens that pad a bin take the first ones."""
    if batch.route_TLK is None:
        return None
    padding = num_tokens - len(batch.route_TLK), batch.route_TLK.shape[1], 1
    first_K = torch.arange(batch.route_TLK.shape[2], dtype=batch.route_TLK.dtype, device=batch.route_TLK.device)
    route_sLK = torch.cat([batch.route_TLK, first_K.repeat(padding)])
    if context is not None:
        route_sLK = route_sLK[context.rows(num_tokens, route_sLK.device)]
    if mesh.layout.sp:
        route_sLK = route_sLK.tensor_split(mesh.tp.size)[mesh.tp.rank]
    return route_sLK.transpose(0, 1).contiguous()


def _multiple(mesh: Mesh) -> int:
    multiple = mesh.tp.size if mesh.layout.sp else 1
    if mesh.cp.size > 1:
        multiple *= 2 * mesh.cp.size * (_CUDA_CHUNK if mesh.device.type == "cuda" else 1)
    return multiple


def _padded(batch: Batch, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and parents, padded with a sequence of zeros; an empty bin is padded to one token."""
    num_tokens = len(batch.token_id_T)
    num_missing = -max(num_tokens, 1) % multiple + (num_tokens == 0)
    if not num_missing:
        return batch.token_id_T, batch.position_T, batch.parent_T
    position = torch.arange(num_missing, device=batch.position_T.device)
    parent = torch.where(position == 0, -1, position - 1 + num_tokens)
    return (
        F.pad(batch.token_id_T, (0, num_missing)),
        torch.cat([batch.position_T, position]),
        torch.cat([batch.parent_T, parent]),
    )


def _context(num_tokens: int, mesh: Mesh) -> Context:
    size = num_tokens // (2 * mesh.cp.size)

    def chunk(number: int) -> slice:
        return slice(number * size, (number + 1) * size)

    parts = tuple((chunk(rank), chunk(2 * mesh.cp.size - 1 - rank)) for rank in range(mesh.cp.size))
    gathered_T = torch.cat([torch.arange(part.start, part.stop) for own in parts for part in own])
    return Context(mesh.cp, parts, gathered_T.argsort().to(mesh.device))


# --- A pass of a bin through layers: what is before its tokens, and the other ranks' tokens and experts ---
#
# The ranks of `mesh.experts` hold one copy of all experts. Each routes its tokens and sends them to the ranks whose
# experts they chose (`dispatch`). Each applies its experts (under etp its slices of them) to the tokens that came to
# it, one expert after another, and sends the sums back. So results do not depend on the layout.
#
# Shape suffixes: s tokens of this rank between layers, R tokens that came to it; K experts of a token; B choices of
# this rank's experts; J channels of a convolution, W its width; T, Q, G and D as in layers.py.


class BinPass(LayerPass):
    """One forward of a bin on this rank, with the rotary tables that all of its layers use."""

    def __init__(self, part: LocalBin, mesh: Mesh, a: Architecture) -> None:
        self.rotary = part.plan.rotary
        self._plan, self._route_LsK, self._mesh, self._architecture = part.plan, part.route_LsK, mesh, a
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values that later layers share

    def attend(
        self, layer: int, query_TQD: Tensor, made: tuple[Tensor, Tensor] | None, a: Attention, sink_Q: Tensor | None
    ) -> Tensor:
        if isinstance(a, SharedAttention):
            if made is None:
                assert a.source is not None
                made = self._kept[a.source]
            elif a.is_source:
                self._kept[layer] = made
        assert made is not None
        operands = attention_operands(query_TQD, *made, a.scale)
        attended = attend(*operands, self._plan, a.window, sink_Q)
        size = made[1].shape[-1]
        return attended if attended.shape[-1] == size else attended[..., :size]

    def convolve(self, layer: int, input_TJ: Tensor, weight_JW: Tensor, bias_J: Tensor | None = None) -> Tensor:
        assert self._plan.recurrence is not None
        return convolve(with_ancestors(input_TJ, self._plan.recurrence), weight_JW, bias_J)

    def recur(self, layer: int, a: DeltaNet | Mamba2, rows: Rows) -> Tensor:
        assert self._plan.recurrence is not None
        output, _states = (gated_delta_rule if isinstance(a, DeltaNet) else scan)(*rows, self._plan.recurrence)
        return output

    def route(self, layer: int) -> Tensor | None:
        if self._route_LsK is None:
            return None
        return self._route_LsK[sum(isinstance(mlp, Mixture) for mlp in self._architecture.mlps[:layer])]

    def rotate(self, heads_TXD: Tensor, rope: Rope | None) -> Tensor:
        if rope is None:
            return heads_TXD
        # The backward is the rotation by the opposite angle.
        return linear_map(heads_TXD, partial(rotated, sign=1), partial(rotated, sign=-1), *self.rotary[rope])

    def gathered(self, *parts: Tensor) -> tuple[Tensor, ...]:
        if self._mesh.tp.size == 1:
            return parts
        return gather_rows(torch.cat(parts, dim=-1), self._mesh.tp).split([x.shape[-1] for x in parts], dim=-1)

    def summed(self, x: Tensor) -> Tensor:
        return sum_rows(x, self._mesh.tp)

    def whole_context(self, *parts: Tensor) -> tuple[Tensor, ...]:
        if (context := self._plan.context) is None:
            return parts
        flat = [x.flatten(1) for x in parts]
        whole = gather_rows(torch.cat(flat, dim=1), context.group).index_select(0, context.order_T)
        wholes = whole.split([x.shape[1] for x in flat], dim=1)
        return tuple(x.view(-1, *part.shape[1:]) for x, part in zip(wholes, parts, strict=True))

    def sum_of_experts(self, x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, experts: Experts) -> Tensor:
        """Run each token's experts on it, on whichever ranks they are."""
        if self._mesh.experts.size == 1:
            return self._computed(x_TH, weight_TK, expert_TK, experts)
        way = dispatch(expert_TK, len(experts.own), self._mesh)
        expert_RK = way.out(expert_TK)
        both = way.out(torch.cat([x_TH, weight_TK], dim=1))  # in one message
        x_RH, weight_RK = both.split([x_TH.shape[1], weight_TK.shape[1]], dim=1)
        return way.back(self._computed(x_RH, weight_RK, expert_RK, experts))

    def _computed(self, x_RH: Tensor, weight_RK: Tensor, expert_RK: Tensor, experts: Experts) -> Tensor:
        """Return each token's weighted sum of the outputs of this rank's experts."""
        local, num_own = expert_RK.flatten() - experts.own.start, len(experts.own)
        local[(local < 0) | (local >= num_own)] = num_own  # other ranks': sorted last
        counts = local.bincount(minlength=num_own + 1)[:num_own].tolist()
        choice_B = local.argsort(stable=True)[: sum(counts)]
        token_B = choice_B // expert_RK.shape[1]
        blocks = copied(x_RH, token_B, counts).split(counts)
        made = [experts.output(number, x_MH, self) for number, x_MH in zip(experts.own, blocks, strict=True)]
        output_BH = torch.cat(made) * weight_RK.flatten()[choice_B, None]
        return added(output_BH, token_B, counts, len(x_RH))
