"""Attention in a forest of tokens: each token attends to itself and its ancestors.

Tokens stand depth first, so that what descends from token k is an interval: token q sees k just when
`k <= q < end_T[k]`. Tokens between two branchings are a *node*. On the CPU a bin becomes a few calls of torch's flash
kernel: each node causally over itself, and everything below a node densely over the node. No prefix is copied or met
twice, and no mask is made but for small trees of many short nodes, where one masked call is cheaper than many small
ones. Calls over different keys are merged by their logsumexp, as Milakov & Gimelshein 2018 (arXiv:1805.02867) merge
parts of a softmax; since the softmax's gradient (Dao 2023, arXiv:2307.08691, algorithm 2) needs of the other
keys nothing but the whole logsumexp and output, the backward is the same calls once more. On CUDA it is
flex_attention, with a block mask that is made from the intervals.

Shape suffixes: T tokens of a bin, N nodes, H query heads of this rank, G key/value heads, D size of a head; of one
call, B blocks of L tokens; K blocks of a block mask.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shared.errors import InvalidInput

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# What calling the kernel costs beside its work, in pairs of a query and a key that it could have met meanwhile.
_CALL_PAIRS = 2048
_FLEX_BLOCK = 128

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Call:
    """One call of the kernel: `num_blocks` blocks of equal length, each of queries over its own block of keys.

    `query` and `key` are ranges of the bin's tokens (`query`, of this rank's own). Calls over a block itself are causal
    or have a mask, [L, L], 0 where seen and -inf where not; the others, of descendants over an ancestor, see every key.
    """

    query: slice
    key: slice
    num_blocks: int = 1
    causal: bool = False
    mask_LL: Tensor | None = None

    @property
    def is_own(self) -> bool:
        return self.causal or self.mask_LL is not None


@dataclass(frozen=True)
class Forest:
    """A bin's forest, planned for its device. Own calls cover each token once, and come before the others."""

    calls: tuple[Call, ...] = ()
    block_mask: BlockMask | None = None


@dataclass(frozen=True)
class Nodes:
    """Nodes in the order of their tokens: the begin and end of each, and the end of its last descendant. int64 [N]."""

    begin_N: Ints
    end_N: Ints
    subtree_end_N: Ints
    parent_N: Ints


def plan_forest(parent_T: Tensor, dtype: torch.dtype, chunks: Sequence[slice] = ()) -> Forest:
    """Plan a forest. Raises InvalidInput unless parents come first and each subtree's tokens stand together.

    Args:
        chunks: this rank's queries, in their order, where it has not all of them. Keys are always the whole bin's.
    """
    nodes = find_nodes(parent_T.cpu().numpy(), [edge for chunk in chunks for edge in (chunk.start, chunk.stop)])
    if parent_T.device.type == "cuda":
        return Forest(block_mask=block_mask(_subtree_end(nodes), parent_T.device, chunks=chunks))
    return Forest(calls=tuple(plan_calls(nodes, dtype, chunks=chunks)))


def find_nodes(parent_T: Ints, cuts: Sequence[int] = ()) -> Nodes:
    """Cut a forest where it branches, and before each token of `cuts`. Raises InvalidInput as `plan_forest` does."""
    index_T = np.arange(len(parent_T))
    if not ((parent_T >= -1) & (parent_T < index_T)).all():
        raise InvalidInput("a token's parent must come before it", "parent")
    num_children_T = np.bincount(parent_T[parent_T >= 0], minlength=len(parent_T))
    continues_T = (parent_T == index_T - 1) & (parent_T >= 0)
    continues_T[continues_T] = num_children_T[parent_T[continues_T]] == 1
    continues_T[[cut for cut in cuts if cut < len(parent_T)]] = False
    begin_N = np.flatnonzero(~continues_T)
    end_N = np.append(begin_N[1:], len(parent_T))
    # A node ends where it branches, so that the parent of its first token is the last one of its parent.
    parent_N = np.searchsorted(begin_N, parent_T[begin_N], side="right") - 1
    size_N, subtree_end_N = end_N - begin_N, end_N.copy()
    for node in range(len(begin_N) - 1, -1, -1):
        if (above := parent_N[node]) >= 0:
            size_N[above] += size_N[node]
            subtree_end_N[above] = max(subtree_end_N[above], subtree_end_N[node])
    if not (subtree_end_N == begin_N + size_N).all():
        raise InvalidInput("what descends from a token must stand right behind it (depth first)", "parent")
    return Nodes(begin_N, end_N, subtree_end_N, parent_N)


def _subtree_end(nodes: Nodes) -> Ints:
    """Return for each token the end of its last descendant: [T]. Equal for the tokens of a node."""
    return np.repeat(nodes.subtree_end_N, nodes.end_N - nodes.begin_N)


# On the CPU.


def plan_calls(
    nodes: Nodes, dtype: torch.dtype, call_pairs: int = _CALL_PAIRS, chunks: Sequence[slice] = ()
) -> list[Call]:
    """Return the cheapest calls for a forest, at `call_pairs` a call and one for each pair of a query and a key.

    With chunks, at whose edges nodes must end: of their queries alone, which are counted from the first chunk's first.
    """
    own: list[Call] = []
    over_ancestors: list[Call] = []
    wanted = list(chunks) or [slice(0, int(nodes.end_N[-1]) if len(nodes.end_N) else 0)]
    is_masked_N = _choose_masked(nodes, call_pairs, wanted)
    node = 0
    while node < len(nodes.begin_N):
        begin, end, subtree_end = (int(x[node]) for x in (nodes.begin_N, nodes.end_N, nodes.subtree_end_N))
        if is_masked_N[node]:
            own.append(_masked_call(nodes, node, dtype))
            node = int(np.searchsorted(nodes.begin_N, subtree_end))
            continue
        if any(chunk.start <= begin < chunk.stop for chunk in wanted):
            own.append(Call(slice(begin, end), slice(begin, end), causal=True))
        for chunk in wanted:
            below = slice(max(end, chunk.start), min(subtree_end, chunk.stop))
            if below.start < below.stop:
                over_ancestors.append(Call(below, slice(begin, end)))
        node += 1
    return [_of_chunks(call, wanted) for call in (*_batched(own), *over_ancestors)]


def _of_chunks(call: Call, chunks: Sequence[slice]) -> Call:
    """Return the call with its queries counted from the first chunk's first."""
    before = 0
    for chunk in chunks:
        if chunk.start <= call.query.start < chunk.stop:
            shift = before - chunk.start
            return dataclasses.replace(call, query=slice(call.query.start + shift, call.query.stop + shift))
        before += chunk.stop - chunk.start
    raise AssertionError(call)


def _choose_masked(nodes: Nodes, call_pairs: int, chunks: Sequence[slice]) -> list[bool]:
    """Return for each node True if one masked call for its subtree is cheaper than the best calls for its parts."""
    length_N, size_N = nodes.end_N - nodes.begin_N, nodes.subtree_end_N - nodes.begin_N
    is_whole_N = np.zeros(len(length_N), dtype=bool)  # the subtree lies in one chunk
    for chunk in chunks:
        is_whole_N |= (nodes.begin_N >= chunk.start) & (nodes.subtree_end_N <= chunk.stop)
    below_N, is_masked_N = [0] * len(length_N), [False] * len(length_N)
    for node in range(len(length_N) - 1, -1, -1):
        length, below = int(length_N[node]), int(size_N[node] - length_N[node])
        split = call_pairs + length * length // 2 + below_N[node]
        split += call_pairs + below * length if below else 0
        masked = call_pairs + int(size_N[node]) ** 2
        is_masked_N[node] = masked < split and bool(is_whole_N[node])
        if (above := nodes.parent_N[node]) >= 0:
            below_N[above] += masked if is_masked_N[node] else split
    return is_masked_N


def mask_lengths(parent_T: Ints) -> list[int]:
    """Return L of each mask, [L, L], of a forest that is not cut into chunks."""
    nodes = find_nodes(parent_T)
    is_masked_N = _choose_masked(nodes, _CALL_PAIRS, [slice(0, len(parent_T))])
    lengths, end = [], 0
    for begin, subtree_end, is_masked in zip(nodes.begin_N, nodes.subtree_end_N, is_masked_N, strict=True):
        if is_masked and begin >= end:
            end = int(subtree_end)
            lengths.append(end - int(begin))
    return lengths


def _masked_call(nodes: Nodes, node: int, dtype: torch.dtype) -> Call:
    begin, subtree_end = int(nodes.begin_N[node]), int(nodes.subtree_end_N[node])
    index_L = torch.arange(begin, subtree_end)
    end_L = torch.from_numpy(_subtree_end(nodes)[begin:subtree_end])
    seen_LL = (index_L <= index_L[:, None]) & (index_L[:, None] < end_L)
    mask_LL = torch.zeros(seen_LL.shape, dtype=dtype).masked_fill_(~seen_LL, -torch.inf)
    return Call(slice(begin, subtree_end), slice(begin, subtree_end), mask_LL=mask_LL)


def _batched(calls: list[Call]) -> list[Call]:
    """Merge neighbouring causal calls of one length into one call."""
    merged: list[Call] = []
    for call in calls:
        before = merged[-1] if merged else None
        length = call.query.stop - call.query.start
        if (
            before
            and before.causal
            and call.causal
            and before.query.stop == call.query.start
            and before.query.stop - before.query.start == (length * before.num_blocks)
        ):
            both = slice(before.query.start, call.query.stop)
            merged[-1] = Call(both, both, before.num_blocks + 1, causal=True)
        else:
            merged.append(call)
    return merged


def attend_forest(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, forest: Forest) -> Tensor:
    """Attend from each token to itself and its ancestors: [T, H, D]; differentiable once."""
    if forest.block_mask is not None:
        return _flex(query_THD, key_TGD, value_TGD, forest.block_mask)
    attended: Tensor = _Attend.apply(query_THD, key_TGD, value_TGD, forest.calls)
    return attended


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, calls: tuple[Call, ...]) -> Tensor:
        key_THD, value_THD = (_repeat(x, query_THD.shape[1]) for x in (key_TGD, value_TGD))
        exact = torch.promote_types(torch.float32, query_THD.dtype)
        output_THD = torch.empty_like(query_THD, dtype=exact, memory_format=torch.contiguous_format)
        lse_TH = output_THD.new_empty(output_THD.shape[:2])
        for call in calls:
            n = call.num_blocks
            query, key, value = _blocks(query_THD[call.query], n), _blocks(key_THD[call.key], n), value_THD[call.key]
            output, lse = _flash(query, key, _blocks(value, n), 0.0, call.causal, attn_mask=call.mask_LL)
            _merge(call, output, lse, _blocks(output_THD[call.query], n), _blocks(lse_TH[call.query], n))
        output_THD = output_THD.to(query_THD.dtype)
        ctx.save_for_backward(query_THD, key_THD, value_THD, output_THD, lse_TH)
        ctx.calls, ctx.num_groups = calls, key_TGD.shape[1]
        return output_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_THD, value_THD, output_THD, lse_TH = ctx.saved_tensors
        exact = torch.promote_types(torch.float32, query_THD.dtype)
        sums = [torch.zeros_like(x, dtype=exact) for x in (query_THD, key_THD, value_THD)]
        for call in ctx.calls:
            n, rows = call.num_blocks, (call.query, call.key, call.key)
            of_queries = [_blocks(x[call.query], n) for x in (grad_THD, query_THD, output_THD, lse_TH)]
            grad, query, output, lse = of_queries
            key, value = _blocks(key_THD[call.key], n), _blocks(value_THD[call.key], n)
            grads = _flash_backward(grad, query, key, value, output, lse, 0.0, call.causal, attn_mask=call.mask_LL)
            for total, part, row in zip(sums, grads, rows, strict=True):
                _blocks(total[row], n).add_(part)
        groups = [x.unflatten(1, (ctx.num_groups, -1)).sum(2) for x in sums[1:]]
        return sums[0].to(grad_THD.dtype), *(x.to(grad_THD.dtype) for x in groups), None


def _merge(call: Call, output: Tensor, lse: Tensor, output_BHLD: Tensor, lse_BHL: Tensor) -> None:
    """Merge a call's part of the softmax into its queries' output: a mean, weighted by the sums of exponentials."""
    if call.is_own:
        output_BHLD.copy_(output)
        lse_BHL.copy_(lse)
        return
    output_BHLD.lerp_(output.to(output_BHLD.dtype), (lse - lse_BHL).sigmoid_()[..., None])
    torch.logaddexp(lse_BHL, lse, out=lse_BHL)


def _blocks(rows: Tensor, num_blocks: int) -> Tensor:
    """View [blocks * L, H, ...] as [blocks, H, L, ...]."""
    return rows.unflatten(0, (num_blocks, -1)).transpose(1, 2)


def _repeat(heads_TGD: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for the query heads that use it: [T, H, D]."""
    return heads_TGD.repeat_interleave(num_heads // heads_TGD.shape[1], dim=1)


# On CUDA.


def block_mask(
    end_T: Ints, device: torch.device, block_size: int = _FLEX_BLOCK, chunks: Sequence[slice] = ()
) -> BlockMask:
    """Make flex_attention's mask of a forest from the intervals: nothing of size [T, T] is made.

    A block of keys before a block of queries matters when one of its keys has descendants among them, which then are
    the first of them; it needs no mask when all its keys have all of them.
    """
    num_tokens = len(end_T)
    num_blocks = -(-num_tokens // block_size)
    padded = np.pad(end_T, (0, num_blocks * block_size - num_tokens), constant_values=0).reshape(-1, block_size)
    last_K, first_K = padded.max(axis=1), padded.min(axis=1)
    start_K = np.arange(num_blocks) * block_size
    before_KK = start_K < start_K[:, None]
    full_KK = before_KK & (first_K >= start_K[:, None] + block_size)
    partial_KK = (before_KK & (last_K > start_K[:, None]) & ~full_KK) | np.eye(num_blocks, dtype=bool)
    end = torch.from_numpy(padded.reshape(-1)).to(device)
    if not chunks:
        return BlockMask.from_kv_blocks(
            *_as_lists(partial_KK, device),
            *_as_lists(full_KK, device),
            BLOCK_SIZE=block_size,
            mask_mod=lambda _batch, _head, query, key: (key <= query) & (query < end[key]),
            seq_lengths=(num_tokens, num_tokens),
        )
    assert all(edge % block_size == 0 for chunk in chunks for edge in (chunk.start, chunk.stop))
    row_T = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    own_K, row = row_T[::block_size] // block_size, torch.from_numpy(row_T).to(device)
    return BlockMask.from_kv_blocks(
        *_as_lists(partial_KK[own_K], device),
        *_as_lists(full_KK[own_K], device),
        BLOCK_SIZE=block_size,
        mask_mod=lambda _batch, _head, query, key: (key <= row[query]) & (row[query] < end[key]),
        seq_lengths=(len(row_T), num_tokens),
    )


def _as_lists(chosen_KK: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each query block its number of key blocks, [1, 1, K], and those, first in each row, [1, 1, K, K]."""
    order_KK = np.argsort(~chosen_KK, axis=1, kind="stable").astype(np.int32)
    count_K = chosen_KK.sum(axis=1).astype(np.int32)
    return torch.from_numpy(count_K).to(device)[None, None], torch.from_numpy(order_KK).to(device)[None, None]


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _flex(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, mask: BlockMask) -> Tensor:
    run: Any = _compiled_flex() if query_THD.is_cuda else flex_attention
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THD, key_TGD, value_TGD))
    output: Tensor = run(query, key, value, block_mask=mask, enable_gqa=True)
    return output[0].transpose(0, 1)
