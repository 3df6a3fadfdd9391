"""Attention in a forest of tokens: each token attends to itself and its ancestors.

Tokens are in depth-first order, so that the descendants of token k are an interval: token q sees k if and only if
`k <= q < end_T[k]`. Tokens between two branchings are a *node*. On the CPU a bin becomes a few calls of torch's flash
kernel: each node attends causally to itself, and everything below a node attends densely to the node. No prefix is
copied or computed twice, and masks are made only for small trees of many short nodes, as one masked call is cheaper
than many small ones. Calls over different keys are merged by their logsumexp, as Milakov & Gimelshein 2018
(arXiv:1805.02867) merge parts of a softmax. The softmax's gradient (Dao 2023, arXiv:2307.08691, algorithm 2) depends on
the other keys only through the whole logsumexp and output, so the backward makes the same calls again. On CUDA it is
flex_attention, with a block mask that is made from the intervals.

Within a *window* of W tokens a token attends to itself and the W - 1 ancestors nearest to it. Nodes then have at most W
tokens, so that within a node the window excludes nothing, and a descendant of a node sees all of it, none of it, or a
band. A *sink* is an additional score of each head in every softmax, with no value: it makes the logsumexp larger and
the output smaller, and the backward still makes the same calls.

Shape suffixes: T tokens of a bin, N nodes, H query heads of this rank, G key/value heads, D size of a head; of one
call, B blocks of L tokens; K blocks of a block mask.
"""

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

from megatron_worker.mixers.forest_calls import Call, Ints, depths, find_nodes, plan_calls, subtree_ends

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLEX_BLOCK = 128


@dataclass(frozen=True)
class Forest:
    """A bin's forest, planned for its device. Own calls cover each token once, and come before the others."""

    calls: tuple[Call, ...] = ()
    block_mask: BlockMask | None = None


def plan_forest(
    parent_T: Tensor, dtype: torch.dtype, chunks: Sequence[slice] = (), window: int | None = None
) -> Forest:
    """Plan a forest. Raises InvalidInput unless parents come first and each subtree's tokens are contiguous.

    Args:
        chunks: this rank's queries, in their order, if it does not have all of them. Keys are the whole bin's.
        window: tokens that a token attends to, itself among them; None: all.
    """
    parent = parent_T.cpu().numpy()
    edges = [edge for chunk in chunks for edge in (chunk.start, chunk.stop)]
    nodes = find_nodes(parent, edges)
    if window is not None and nodes.longest <= window:
        window = None
    if parent_T.device.type == "cuda":
        depth_T = None if window is None else depths(nodes)
        mask = block_mask(subtree_ends(nodes), parent_T.device, chunks=chunks, depth_T=depth_T, window=window)
        return Forest(block_mask=mask)
    if window is not None:
        nodes = find_nodes(parent, edges, window)
    return Forest(calls=tuple(plan_calls(nodes, dtype, chunks=chunks, window=window)))


def attend_forest(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, forest: Forest, sink_H: Tensor | None = None
) -> Tensor:
    """Attend from each token to itself and its ancestors: [T, H, D]; differentiable once. `sink_H`: each head's."""
    if forest.block_mask is not None:
        return _flex(query_THD, key_TGD, value_TGD, forest.block_mask, sink_H)
    attended: Tensor = _Attend.apply(query_THD, key_TGD, value_TGD, sink_H, forest.calls)
    return attended


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, sink_H: Tensor | None, calls: tuple[Call, ...]
    ) -> Tensor:
        num_sharing = query_THD.shape[1] // key_TGD.shape[1]  # query heads that use one key/value head
        key_THD, value_THD = (x.repeat_interleave(num_sharing, dim=1) for x in (key_TGD, value_TGD))
        exact = torch.promote_types(torch.float32, query_THD.dtype)
        output_THD = torch.empty_like(query_THD, dtype=exact, memory_format=torch.contiguous_format)
        lse_TH = output_THD.new_empty(output_THD.shape[:2])
        for call in calls:
            n = call.num_blocks
            query, key, value = _blocks(query_THD[call.query], n), _blocks(key_THD[call.key], n), value_THD[call.key]
            output, lse = _flash(query, key, _blocks(value, n), 0.0, call.causal, attn_mask=call.mask_LL)
            _merge(call, output, lse, _blocks(output_THD[call.query], n), _blocks(lse_TH[call.query], n))
        if sink_H is not None:
            sink = sink_H.to(exact)
            output_THD *= (lse_TH - sink).sigmoid_()[..., None]
            torch.logaddexp(lse_TH, sink, out=lse_TH)
        output_THD = output_THD.to(query_THD.dtype)
        ctx.save_for_backward(query_THD, key_THD, value_THD, output_THD, lse_TH, sink_H)
        ctx.calls, ctx.num_groups = calls, key_TGD.shape[1]
        return output_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_THD, value_THD, output_THD, lse_TH, sink_H = ctx.saved_tensors
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
        grad_sink_H = None
        if ctx.needs_input_grad[3]:
            lost_TH = (grad_THD.to(exact) * output_THD.to(exact)).sum(-1)
            grad_sink_H = -((sink_H - lse_TH).exp() * lost_TH).sum(0).to(sink_H.dtype)
        return sums[0].to(grad_THD.dtype), *(x.to(grad_THD.dtype) for x in groups), grad_sink_H, None


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


# On CUDA.


def block_mask(
    end_T: Ints,
    device: torch.device,
    block_size: int = _FLEX_BLOCK,
    chunks: Sequence[slice] = (),
    depth_T: Ints | None = None,
    window: int | None = None,
) -> BlockMask:
    """Make flex_attention's mask of a forest from the intervals: nothing of size [T, T] is made.

    A block of keys before a block of queries matters if one of its keys has descendants among the queries (then the
    first query is one); it needs no mask if all queries are descendants of all its keys. With a window, which needs the
    tokens' depths, blocks that are further apart are left out, and blocks that may be partly so have a mask.
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
    depth, nearest = None, window or 0
    if window is not None and depth_T is not None:
        padded_depth = np.pad(depth_T, (0, num_blocks * block_size - num_tokens), mode="edge").reshape(-1, block_size)
        least_K, most_K = padded_depth.min(axis=1), padded_depth.max(axis=1)
        partial_KK |= full_KK & (most_K[:, None] - least_K >= window)
        full_KK &= ~partial_KK
        partial_KK &= least_K[:, None] - most_K < window
        depth = torch.from_numpy(padded_depth.reshape(-1)).to(device)
    own_K, row = np.arange(num_blocks), torch.arange(num_blocks * block_size, device=device)
    if chunks:
        assert all(edge % block_size == 0 for chunk in chunks for edge in (chunk.start, chunk.stop))
        row_T = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        own_K, row = row_T[::block_size] // block_size, torch.from_numpy(row_T).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= row[query]) & (row[query] < end[key])
        return seen if depth is None else seen & (depth[row[query]] - depth[key] < nearest)

    return BlockMask.from_kv_blocks(
        *_as_lists(partial_KK[own_K], device),
        *_as_lists(full_KK[own_K], device),
        BLOCK_SIZE=block_size,
        mask_mod=sees,
        seq_lengths=(len(row) if chunks else num_tokens, num_tokens),
    )


def _as_lists(chosen_KK: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each query block its number of key blocks, [1, 1, K], and those, first in each row, [1, 1, K, K]."""
    order_KK = np.argsort(~chosen_KK, axis=1, kind="stable").astype(np.int32)
    count_K = chosen_KK.sum(axis=1).astype(np.int32)
    return torch.from_numpy(count_K).to(device)[None, None], torch.from_numpy(order_KK).to(device)[None, None]


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _flex(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, mask: BlockMask, sink_H: Tensor | None = None
) -> Tensor:
    run: Any = _compiled_flex() if query_THD.is_cuda else flex_attention
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THD, key_TGD, value_TGD))
    if sink_H is None:
        output: Tensor = run(query, key, value, block_mask=mask, enable_gqa=True)
        return output[0].transpose(0, 1)
    output, lse = run(query, key, value, block_mask=mask, enable_gqa=True, return_lse=True)
    kept_HT = (lse[0] - sink_H[:, None].to(lse.dtype)).sigmoid()
    return (output[0] * kept_HT[..., None].to(output.dtype)).transpose(0, 1)
