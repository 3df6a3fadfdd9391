"""The head's kernels in Triton; kernels.py launches them.

Suffixes as there; n and v are the targets and rows of a tile. Absent tensors are None, known when a kernel is compiled.
Numbers that change from bin to bin are not specialised: nothing is compiled anew in the midst of training.
"""

import triton
import triton.language as tl


@triton.jit
def tile_logits(
    hidden,
    weight,
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
    """Return this program's tile, its targets and rows, and their logits, float32 [BLOCK_N, BLOCK_V].

    Logits are -inf beyond the last row; beyond the last target, those of some other. Programs that run side by side
    share the rows of the weight: targets come first.
    """
    blocks_of_targets = tl.cdiv(num_targets, BLOCK_N)
    tile = tl.program_id(0) // blocks_of_targets
    n = (tl.program_id(0) % blocks_of_targets) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.arange(0, BLOCK_H)
    target = (n % num_targets).to(tl.int64)
    row = (v % num_rows).to(tl.int64)
    at_hidden = hidden + target[:, None] * hidden_stride + h[None, :]
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
    return tile, n, v, tl.where(v[None, :] < num_rows, logit * inverse_temperature, -float("inf"))


@triton.jit(do_not_specialize=["num_targets", "size"])
def scan_tile(
    hidden,
    weight,
    label,
    tiles,  # [4, L, size]: maximum, sum of exponentials, target, weighted logit
    exps,  # [C, V] or None
    below,  # [C, V] or None: logits relative to their tile's maximum
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
    """Compute one tile's logits, and write what `merge_tiles` needs of them: sums, and the greatest logits."""
    tile, n, v, logit = tile_logits(
        hidden,
        weight,
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
        offset = n.to(tl.int64)[:, None] * exps_stride + v[None, :]
        tl.store(exps + offset, exp.to(exps.dtype.element_ty), mask=real_n[:, None] & real_v)
        if below is not None:
            tl.store(
                below + offset, (logit - greatest_n[:, None]).to(below.dtype.element_ty), mask=real_n[:, None] & real_v
            )
    if TOP_K > 0:
        at_top = (tile.to(tl.int64) * size + n) * TOP_K
        for rank in range(TOP_K):
            best_n, column_n = tl.max(logit, 1, return_indices=True)  # of equals, the first
            tl.store(top + at_top + rank, best_n, mask=real_n)
            tl.store(top_id + at_top + rank, tile * BLOCK_V + column_n, mask=real_n)
            logit = tl.where(tl.arange(0, BLOCK_V)[None, :] == column_n[:, None], -float("inf"), logit)


@triton.jit(do_not_specialize=["first", "num_targets", "total_targets", "size"])
def merge_tiles(
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
    """Merge the tiles of a target, in an order that depends on nothing else."""
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
        # Rows beyond the last target are all -inf: replaced by 0, as -inf minus -inf is no number.
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


@triton.jit(do_not_specialize=["first", "num_targets", "size"])
def rescale(
    exps,
    below,  # [C, V] or None
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
    """Make exponentials relative to the row's maximum, which were relative to their tile's, in place.

    `below` becomes exponential times logit, both relative to the row's maximum.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_n = n < num_targets
    real = real_n[:, None] & (v[None, :] < num_rows)
    tile_max = tl.load(tiles + tl.program_id(1) * size + n, mask=real_n, other=0.0)
    shift = tile_max - tl.load(result + first + n, mask=real_n, other=0.0)
    offset = n.to(tl.int64)[:, None] * exps_stride + v[None, :]
    exp = tl.load(exps + offset, mask=real, other=0.0).to(tl.float32) * tl.exp(shift)[:, None]
    tl.store(exps + offset, exp.to(exps.dtype.element_ty), mask=real)
    if below is not None:
        logit = tl.load(below + offset, mask=real, other=0.0).to(tl.float32) + shift[:, None]
        tl.store(below + offset, (exp * logit).to(below.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_targets"])
def logit_gradient_tile(
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
    """Compute d loss / d (undivided) logit of one tile, from logits computed anew."""
    _, n, v, logit = tile_logits(
        hidden,
        weight,
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
