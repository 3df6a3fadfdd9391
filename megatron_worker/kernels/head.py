"""The logprob head's kernels: a tile of logits is made, used up in registers, and never written down.

A program makes one tile, [targets, rows of the output embedding], as any matrix product does, and leaves of it what a
softmax needs to know (Milakov & Gimelshein 2018, arXiv:1805.02867): maximum, sum of exponentials, the target's logit,
the sum of exponential times logit, the k greatest. A second kernel merges the tiles of a target. Where the gradient's
rows are wanted, sum_v exp_v W_v, a chunk of targets leaves its exponentials too, in the dtype of the weights, for a
matrix product of torch's own: the one buffer that is as wide as the vocabulary, bounded by WORKSPACE_BYTES. The
weight's gradient has its factor made in the same way, from logits computed anew.

The reference is megatron_worker/head.py, which does the same with torch alone. Against it, logits are not rounded to
bfloat16. Nothing is added up by atomics, and no block size is found by timing: the same inputs give the same bits, and
what a target's row gives does not depend on how many others stand beside it (its gradient's row, torch's own product, may).

Shape suffixes: N targets, H hidden size, V rows of this rank's shard without padding, C targets of a chunk, K greatest
logits kept, L tiles of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_worker.top_k import greatest, pack

WORKSPACE_BYTES = 256 << 20
_MOST_TARGETS = 4096  # of a chunk without workspace: their hidden states stay in the second-level cache
_ALIGNED = 64  # rows of the workspace begin where tensor cores like them to


@dataclass(frozen=True)
class Blocks:
    """A tile: `targets` by `rows`, the hidden size in steps of `hidden`. Powers of two, 16 or more."""

    targets: int
    rows: int
    hidden: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Scan:
    """What is known of each target from these rows alone, float32 [N]. Exponentials are relative to `max_N`.

    `target_N` is 0 where the label is another shard's. `weighted_logit_N` is 0 and `top_NK` None unless asked for;
    `top_NK` are keys of top_k.py, their ids counted from these rows.
    """

    max_N: Tensor
    sum_exp_N: Tensor
    target_N: Tensor
    weighted_logit_N: Tensor
    top_NK: Tensor | None


def blocks_for(dtype: torch.dtype) -> Blocks:
    """For tensor cores in half precision. float32 is exact, and therefore without them."""
    if dtype == torch.float32:
        return Blocks(targets=64, rows=64, hidden=32, num_warps=4, num_stages=2)
    return Blocks(targets=128, rows=128, hidden=64, num_warps=8, num_stages=3)


def scan(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    row_N: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    top_k: int = 0,
    rows_NH: Tensor | None = None,
    logit_rows_NH: Tensor | None = None,
    blocks: Blocks | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Scan:
    """Go over the logits of all targets once. N and V are 1 or more.

    Args:
        hidden_NH, weight_VH: bfloat16, float16 or float32, both the same; each row contiguous.
        row_N: the label's row, int64; -1 where it is another shard's.
        top_k: how many of the greatest logits to keep, up to V.
        rows_NH: float32, written: sums of exponential times row.
        logit_rows_NH: float32, written: sums of exponential times logit, relative to `max_N`, times row. With `rows_NH`.
    """
    blocks = blocks or blocks_for(hidden_NH.dtype)
    num_targets, num_rows = len(hidden_NH), len(weight_VH)
    num_tiles = triton.cdiv(num_rows, blocks.rows)
    result = torch.zeros(4, num_targets, device=hidden_NH.device)
    top_NK = torch.empty(num_targets, top_k, dtype=torch.int64, device=hidden_NH.device) if top_k else None
    num_buffers = (rows_NH is not None) + (logit_rows_NH is not None)
    size = _chunk_targets(hidden_NH, num_rows, num_buffers, blocks, workspace_bytes)
    exps_CV, scaled_CV = (_workspace(hidden_NH, size, num_rows) if i < num_buffers else None for i in range(2))
    tiles_4LC = hidden_NH.new_empty(4, num_tiles, size, dtype=torch.float32)
    kept = (num_tiles, size, top_k)
    top_LCK, id_LCK = (hidden_NH.new_empty(kept, dtype=dtype) for dtype in (torch.float32, torch.int32))
    for chunk in _chunks(num_targets, size):
        hidden_CH, length = hidden_NH[chunk], chunk.stop - chunk.start
        grid = (triton.cdiv(length, blocks.targets) * num_tiles,)
        _scan_tile[grid](
            *(hidden_CH, weight_VH, row_N[chunk], tiles_4LC, exps_CV, top_LCK, id_LCK),
            *(length, num_rows, hidden_NH.shape[1], size, num_tiles),
            *(hidden_NH.stride(0), weight_VH.stride(0), exps_CV.stride(0) if exps_CV is not None else 0),
            1 / temperature,
            ENTROPY=entropy,
            TOP_K=top_k,
            **_shape(hidden_NH, blocks),
        )
        _merge_tiles[(triton.cdiv(length, 32),)](
            *(tiles_4LC, result, chunk.start, length, num_targets, num_tiles, size), BLOCK_N=32, BLOCK_L=64
        )
        if top_NK is not None:
            keys = pack(top_LCK[:, :length], id_LCK[:, :length]).transpose(0, 1)
            top_NK[chunk] = greatest(keys.flatten(1), top_k)
        if exps_CV is not None and rows_NH is not None:
            _rescale[(triton.cdiv(length, 16), num_tiles)](
                *(exps_CV, scaled_CV, tiles_4LC, result, chunk.start, length, num_rows, size, exps_CV.stride(0)),
                BLOCK_N=16,
                BLOCK_V=blocks.rows,
            )
            rows_NH[chunk] = exps_CV[:length] @ weight_VH
        if scaled_CV is not None and logit_rows_NH is not None:
            logit_rows_NH[chunk] = scaled_CV[:length] @ weight_VH
    max_N, sum_exp_N, target_N, weighted_logit_N = result
    return Scan(max_N, sum_exp_N, target_N, weighted_logit_N, top_NK)


def add_weight_gradient(
    grad_VH: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    row_N: Tensor,
    lse_N: Tensor,
    by_logprob_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    *,
    blocks: Blocks | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Add d loss / d weight to `grad_VH`, float32.

    Args:
        lse_N: logsumexp over the whole vocabulary, float32.
        by_logprob_N: the gradient that came in, divided by the temperature, float32.
        entropy: expected logits, and the gradient by the entropy divided by the temperature, float32 [N] each.
    """
    blocks = blocks or blocks_for(hidden_NH.dtype)
    num_targets, num_rows = len(hidden_NH), len(weight_VH)
    size = _chunk_targets(hidden_NH, num_rows, 1, blocks, workspace_bytes)
    grad_CV = _workspace(hidden_NH, size, num_rows)
    mean_N, by_entropy_N = entropy or (lse_N, lse_N)  # the kernel does not look
    for chunk in _chunks(num_targets, size):
        hidden_CH, length = hidden_NH[chunk], chunk.stop - chunk.start
        grid = (triton.cdiv(length, blocks.targets) * triton.cdiv(num_rows, blocks.rows),)
        _logit_gradient_tile[grid](
            *(hidden_CH, weight_VH, row_N[chunk], lse_N[chunk], by_logprob_N[chunk]),
            *(mean_N[chunk], by_entropy_N[chunk], grad_CV, length, num_rows, hidden_NH.shape[1]),
            *(hidden_NH.stride(0), weight_VH.stride(0), grad_CV.stride(0), 1 / temperature),
            ENTROPY=entropy is not None,
            **_shape(hidden_NH, blocks),
        )
        if hidden_NH.dtype == grad_VH.dtype:
            grad_VH.addmm_(grad_CV[:length].t(), hidden_CH)
        else:
            grad_VH += grad_CV[:length].t() @ hidden_CH


def _shape(hidden_NH: Tensor, blocks: Blocks) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if hidden_NH.dtype == torch.float32 else "tf32",  # of half precision it says nothing
        "WIDEN": not hidden_NH.is_cuda,  # the interpreter's products of bfloat16 are of its bits
        "EVEN_H": hidden_NH.shape[1] % blocks.hidden == 0,
        "BLOCK_N": blocks.targets,
        "BLOCK_V": blocks.rows,
        "BLOCK_H": blocks.hidden,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def _chunk_targets(hidden_NH: Tensor, num_rows: int, num_buffers: int, blocks: Blocks, workspace_bytes: int) -> int:
    """How many targets go at once: as many as the workspace holds in whole tiles, and one tile at least."""
    most = _MOST_TARGETS
    if num_buffers:
        row_bytes = num_buffers * _padded(num_rows) * hidden_NH.element_size()
        most = max(1, workspace_bytes // row_bytes // blocks.targets) * blocks.targets
    return min(most, _MOST_TARGETS, len(hidden_NH))


def _workspace(hidden_NH: Tensor, num_targets: int, num_rows: int) -> Tensor:
    workspace_CV = hidden_NH.new_empty(num_targets, _padded(num_rows))
    workspace_CV[:, num_rows:] = 0  # torch's products of bfloat16 on the CPU read an odd row's neighbour too
    return workspace_CV[:, :num_rows]


def _padded(num_rows: int) -> int:
    return triton.cdiv(num_rows, _ALIGNED) * _ALIGNED


def _chunks(num_targets: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num_targets)) for start in range(0, num_targets, size))


@triton.jit
def _logits(
    hidden,
    weight,
    n,
    v,
    num_targets,
    num_rows,
    hidden_size,
    hidden_stride,
    weight_stride,
    inverse_temperature,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Logits of a tile, float32 [BLOCK_N, BLOCK_V]; -inf beyond the last row. Beyond the last target: of some other."""
    h = tl.arange(0, BLOCK_H)
    n = (n % num_targets).to(tl.int64)
    row = (v % num_rows).to(tl.int64)
    at_hidden = hidden + n[:, None] * hidden_stride + h[None, :]
    at_weight = weight + row[None, :] * weight_stride + h[:, None]
    logit = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        if EVEN_H:
            x, w = tl.load(at_hidden), tl.load(at_weight)
        else:
            within = h < hidden_size - start
            x = tl.load(at_hidden, mask=within[None, :], other=0.0)
            w = tl.load(at_weight, mask=within[:, None], other=0.0)
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logit = tl.dot(x, w, logit, input_precision=PRECISION)
        at_hidden += BLOCK_H
        at_weight += BLOCK_H
    return tl.where(v[None, :] < num_rows, logit * inverse_temperature, -float("inf"))


@triton.jit
def _scan_tile(
    hidden,
    weight,
    label,
    tiles,  # [4, L, size]: maximum, sum of exponentials, target, weighted logit
    exps,  # [C, V] or None
    top,  # [L, size, K]
    top_id,
    num_targets,
    num_rows,
    hidden_size,
    size,
    num_tiles,
    hidden_stride,
    weight_stride,
    exps_stride,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    TOP_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One tile. Programs that run side by side share the rows of the weight: targets come first."""
    blocks_of_targets = tl.cdiv(num_targets, BLOCK_N)
    tile = tl.program_id(0) // blocks_of_targets
    n = (tl.program_id(0) % blocks_of_targets) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    logit = _logits(
        hidden,
        weight,
        n,
        v,
        num_targets,
        num_rows,
        hidden_size,
        hidden_stride,
        weight_stride,
        inverse_temperature,
        PRECISION,
        WIDEN,
        EVEN_H,
        BLOCK_N,
        BLOCK_V,
        BLOCK_H,
    )
    real_n, real_v = n < num_targets, v[None, :] < num_rows
    to = tiles + tile * size + n
    plane = num_tiles * size
    label_n = tl.load(label + n, mask=real_n, other=-1)
    greatest_n = tl.max(logit, 1)
    exp = tl.exp(logit - greatest_n[:, None])
    tl.store(to, greatest_n, mask=real_n)
    tl.store(to + plane, tl.sum(exp, 1), mask=real_n)
    tl.store(to + 2 * plane, tl.sum(tl.where(v[None, :] == label_n[:, None], logit, 0.0), 1), mask=real_n)
    if ENTROPY:
        weighted = tl.sum(tl.where(real_v, exp * logit, 0.0), 1)
    else:
        weighted = tl.zeros_like(greatest_n)
    tl.store(to + 3 * plane, weighted, mask=real_n)
    if exps is not None:
        at = exps + n.to(tl.int64)[:, None] * exps_stride + v[None, :]
        tl.store(at, exp.to(exps.dtype.element_ty), mask=real_n[:, None] & real_v)
    if TOP_K > 0:
        at_top = (tile.to(tl.int64) * size + n) * TOP_K
        for rank in range(TOP_K):
            best_n, column_n = tl.max(logit, 1, return_indices=True)  # of equals, the first
            tl.store(top + at_top + rank, best_n, mask=real_n)
            tl.store(top_id + at_top + rank, tile * BLOCK_V + column_n, mask=real_n)
            logit = tl.where(tl.arange(0, BLOCK_V)[None, :] == column_n[:, None], -float("inf"), logit)


@triton.jit
def _merge_tiles(
    tiles,
    result,  # [4, N]
    first,
    num_targets,
    total_targets,
    num_tiles,
    size,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Tiles of a target in one, in an order that depends on nothing else."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_n = n < num_targets
    plane = num_tiles * size
    greatest_n = tl.full((BLOCK_N,), -float("inf"), dtype=tl.float32)
    sum_n = tl.zeros((BLOCK_N,), dtype=tl.float32)
    target_n = tl.zeros((BLOCK_N,), dtype=tl.float32)
    weighted_n = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, num_tiles, BLOCK_L):
        tile = start + tl.arange(0, BLOCK_L)
        real = (tile < num_tiles)[:, None] & real_n[None, :]
        at = tiles + tile[:, None] * size + n[None, :]
        tile_max = tl.load(at, mask=real, other=-float("inf"))
        # Rows of no target are all -inf: 0 in their place, lest they be subtracted from themselves.
        above_n = tl.where(real_n, tl.maximum(greatest_n, tl.max(tile_max, 0)), 0.0)
        before_n = tl.exp(greatest_n - above_n)
        scale = tl.exp(tile_max - above_n[None, :])
        sum_n = sum_n * before_n + tl.sum(tl.load(at + plane, mask=real, other=0.0) * scale, 0)
        target_n += tl.sum(tl.load(at + 2 * plane, mask=real, other=0.0), 0)
        weighted_n = weighted_n * before_n + tl.sum(tl.load(at + 3 * plane, mask=real, other=0.0) * scale, 0)
        greatest_n = above_n
    to = result + first + n
    tl.store(to, greatest_n, mask=real_n)
    tl.store(to + total_targets, sum_n, mask=real_n)
    tl.store(to + 2 * total_targets, target_n, mask=real_n)
    tl.store(to + 3 * total_targets, weighted_n, mask=real_n)


@triton.jit
def _rescale(
    exps,
    scaled,  # [C, V] or None: exponential times logit relative to the row's maximum
    tiles,
    result,
    first,
    num_targets,
    num_rows,
    size,
    exps_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Exponentials relative to their tile's maximum made relative to the row's, in place."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_n = n < num_targets
    real = real_n[:, None] & (v[None, :] < num_rows)
    tile_max = tl.load(tiles + tl.program_id(1) * size + n, mask=real_n, other=0.0)
    below = tile_max - tl.load(result + first + n, mask=real_n, other=0.0)
    offset = n.to(tl.int64)[:, None] * exps_stride + v[None, :]
    kept = tl.load(exps + offset, mask=real, other=0.0).to(tl.float32)
    exp = kept * tl.exp(below)[:, None]
    tl.store(exps + offset, exp.to(exps.dtype.element_ty), mask=real)
    if scaled is not None:
        # What has vanished weighs nothing, however far below it was.
        logit = tl.where(kept > 0, tl.log(tl.where(kept > 0, kept, 1.0)) + below[:, None], 0.0)
        tl.store(scaled + offset, (exp * logit).to(scaled.dtype.element_ty), mask=real)


@triton.jit
def _logit_gradient_tile(
    hidden,
    weight,
    label,
    lse,
    by_logprob,
    mean_logit,
    by_entropy,
    grad,  # [C, V]
    num_targets,
    num_rows,
    hidden_size,
    hidden_stride,
    weight_stride,
    grad_stride,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """d loss / d (undivided) logit of one tile, from logits computed anew."""
    blocks_of_targets = tl.cdiv(num_targets, BLOCK_N)
    tile = tl.program_id(0) // blocks_of_targets
    n = (tl.program_id(0) % blocks_of_targets) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    logit = _logits(
        hidden,
        weight,
        n,
        v,
        num_targets,
        num_rows,
        hidden_size,
        hidden_stride,
        weight_stride,
        inverse_temperature,
        PRECISION,
        WIDEN,
        EVEN_H,
        BLOCK_N,
        BLOCK_V,
        BLOCK_H,
    )
    real_n = n < num_targets
    real = real_n[:, None] & (v[None, :] < num_rows)
    label_n = tl.load(label + n, mask=real_n, other=-1)
    by_logprob_n = tl.load(by_logprob + n, mask=real_n, other=0.0)
    p = tl.exp(logit - tl.load(lse + n, mask=real_n, other=0.0)[:, None])
    pull = tl.where(v[None, :] == label_n[:, None], 1.0 - p, -p) * by_logprob_n[:, None]
    if ENTROPY:
        from_mean = logit - tl.load(mean_logit + n, mask=real_n, other=0.0)[:, None]
        pull -= p * from_mean * tl.load(by_entropy + n, mask=real_n, other=0.0)[:, None]
    at = grad + n.to(tl.int64)[:, None] * grad_stride + v[None, :]
    tl.store(at, pull.to(grad.dtype.element_ty), mask=real)
