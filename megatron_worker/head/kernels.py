"""The logprob head's kernels: a tile of logits is made and used in registers, and never stored.

A program makes one tile, [targets, rows of the output embedding], as any matrix product does, and stores only what a
softmax needs (Milakov & Gimelshein 2018, arXiv:1805.02867): maximum, sum of exponentials, the target's logit, the sum
of exponential times logit, the k greatest. A second kernel merges the tiles of a target. If the gradient's rows,
sum_v exp_v W_v, are wanted, a chunk of targets also stores its exponentials, in the dtype of the weights, for a matrix
product by torch: the one buffer that is as wide as the vocabulary, bounded by WORKSPACE_BYTES (as are the candidates
for the k greatest), though never less than one tile of targets. The factor of the weight's gradient is made in the same
way, from recomputed logits.

The reference is logprobs.py, which does the same with torch alone. Unlike there, logits are not rounded to bfloat16.
There are no atomic sums, and no block size is found by timing: the same inputs give the same bits. A target's numbers
do not depend on the number of other targets; its gradient's row, from torch's product, may.

Shape suffixes: N targets, H hidden size, V rows of this rank's shard without padding, C targets of a chunk, K greatest
logits kept, L tiles of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_worker.engine import Outputs
from megatron_worker.head.torch_tiles import LocalSums, greatest, pack_keys, rows_of_labels, shifted, slices
from megatron_worker.head.triton_tiles import logit_gradient_tile, merge_tiles, rescale, scan_tile

# --- Block sizes of the head's kernels and the memory that they take: numbers, without Triton ---

WORKSPACE_BYTES = 256 << 20
# For each of a tile's greatest logits while the tiles are merged: value, id, and temporary keys.
CANDIDATE_BYTES = 36
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


def blocks_for(dtype: torch.dtype) -> Blocks:
    """Return blocks for tensor cores in half precision; float32 is exact, and does without them."""
    if dtype == torch.float32:
        return Blocks(targets=64, rows=64, hidden=32, num_warps=4, num_stages=2)
    return Blocks(targets=128, rows=128, hidden=64, num_warps=8, num_stages=3)


def padded(num_rows: int) -> int:
    return -(-num_rows // _ALIGNED) * _ALIGNED


def chunk_targets(num_targets: int, target_bytes: int, blocks: Blocks, workspace_bytes: int) -> int:
    """Return the targets of a chunk: as many whole tiles as the workspace holds, and one tile at least."""
    most = workspace_bytes // target_bytes // blocks.targets * blocks.targets if target_bytes else _MOST_TARGETS
    return min(max(most, blocks.targets), _MOST_TARGETS, num_targets)


def scan(
    sums: LocalSums,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    label_N: Tensor,
    outputs: Outputs,
    first: int,
    *,
    blocks: Blocks | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Compute the logits of all targets once, and write their sums. N and V are 1 or more.

    Args:
        sums: float32; overwritten, except `label_rows_NH`. Its rows of the gradient are computed if it has them.
        hidden_NH, weight_VH: bfloat16, float16 or float32, both the same; each row of the weight contiguous.
        first: the id of the first row.
    """
    hidden_NH, weight_VH, row_N = _operands(hidden_NH, weight_VH, label_N, first)
    blocks = blocks or blocks_for(hidden_NH.dtype)
    (num_targets, top_k), num_rows = sums.top_NK.shape, len(weight_VH)
    rows_NH, logit_rows_NH = sums.weighted_rows_NH, sums.logit_rows_NH
    num_buffers = (rows_NH is not None) + (logit_rows_NH is not None)
    space = _make_space(hidden_NH, num_rows, num_buffers, min(top_k, num_rows), blocks, workspace_bytes)
    result_4N = torch.zeros(4, num_targets, dtype=torch.float32, device=hidden_NH.device)
    for chunk in slices(num_targets, space.size):
        length = chunk.stop - chunk.start
        _scan_chunk(hidden_NH[chunk], weight_VH, row_N[chunk], outputs, space, blocks)
        with torch.cuda.device_of(hidden_NH):
            merge_tiles[(triton.cdiv(length, 32),)](
                *(space.tiles_4LC, result_4N, chunk.start, length, num_targets, space.num_tiles, space.size),
                BLOCK_N=32,
                BLOCK_L=64,
            )
        if top_k:
            keys_LCK = pack_keys(space.top_LCK[:, :length], space.id_LCK[:, :length])
            sums.top_NK[chunk] = shifted(greatest(keys_LCK.transpose(0, 1).flatten(1), top_k), first)
        if space.exps_CV is not None and rows_NH is not None:
            _rescale_chunk(space, result_4N, chunk, blocks)
            rows_NH[chunk] = space.exps_CV[:length] @ weight_VH
        if space.below_CV is not None and logit_rows_NH is not None:
            logit_rows_NH[chunk] = space.below_CV[:length] @ weight_VH
    sums.max_N, sums.sum_exp_N, sums.target_N, sums.weighted_logit_N = result_4N


def _operands(hidden_NH: Tensor, weight_VH: Tensor, label_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what kernels read: for each label its row among these, -1 if it is not among them."""
    row_N, owned_N = rows_of_labels(label_N, first, len(weight_VH))
    return hidden_NH.detach().contiguous(), weight_VH.detach(), torch.where(owned_N, row_N, -1)


@dataclass(frozen=True)
class _Space:
    """Buffers for a chunk of `size` targets: for each tile four numbers and the k greatest logits; for each logit, if
    wanted, its exponential and its distance from the maximum.
    """

    size: int
    num_tiles: int
    tiles_4LC: Tensor
    top_LCK: Tensor
    id_LCK: Tensor
    exps_CV: Tensor | None
    below_CV: Tensor | None


def _make_space(
    hidden_NH: Tensor, num_rows: int, num_buffers: int, top_k: int, blocks: Blocks, workspace_bytes: int
) -> _Space:
    num_tiles, kept = triton.cdiv(num_rows, blocks.rows), min(top_k, blocks.rows)
    target_bytes = num_buffers * padded(num_rows) * hidden_NH.element_size() + num_tiles * kept * CANDIDATE_BYTES
    size = chunk_targets(len(hidden_NH), target_bytes, blocks, workspace_bytes)
    exps_CV, below_CV = (_workspace(hidden_NH, size, num_rows) if i < num_buffers else None for i in range(2))
    return _Space(
        size=size,
        num_tiles=num_tiles,
        tiles_4LC=hidden_NH.new_empty(4, num_tiles, size, dtype=torch.float32),
        top_LCK=hidden_NH.new_empty(num_tiles, size, kept, dtype=torch.float32),
        id_LCK=hidden_NH.new_empty(num_tiles, size, kept, dtype=torch.int32),
        exps_CV=exps_CV,
        below_CV=below_CV,
    )


def _scan_chunk(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    row_C: Tensor,
    outputs: Outputs,
    space: _Space,
    blocks: Blocks,
) -> None:
    exps_CV = space.exps_CV
    grid = (triton.cdiv(len(hidden_CH), blocks.targets) * space.num_tiles,)
    with torch.cuda.device_of(hidden_CH):
        scan_tile[grid](
            *(hidden_CH, weight_VH, row_C, space.tiles_4LC, exps_CV, space.below_CV, space.top_LCK, space.id_LCK),
            *(len(hidden_CH), len(weight_VH), hidden_CH.shape[1], space.size, space.num_tiles),
            *(hidden_CH.stride(0), weight_VH.stride(0), exps_CV.stride(0) if exps_CV is not None else 0),
            1 / outputs.temperature,
            ENTROPY=outputs.entropy,
            TOP_K=space.top_LCK.shape[2],
            **_shape(hidden_CH, blocks),
        )


def _rescale_chunk(space: _Space, result_4N: Tensor, chunk: slice, blocks: Blocks) -> None:
    exps_CV, length = space.exps_CV, chunk.stop - chunk.start
    assert exps_CV is not None
    with torch.cuda.device_of(exps_CV):
        rescale[(triton.cdiv(length, 16), space.num_tiles)](
            *(exps_CV, space.below_CV, space.tiles_4LC, result_4N, chunk.start),
            *(length, exps_CV.shape[1], space.size, exps_CV.stride(0)),
            BLOCK_N=16,
            BLOCK_V=blocks.rows,
        )


def add_weight_gradient(
    grad_VH: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    label_N: Tensor,
    lse_N: Tensor,
    by_logprob_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    first: int,
    *,
    blocks: Blocks | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Add d loss / d weight to `grad_VH`, float32, of as many last columns as it has.

    Args:
        lse_N: logsumexp over the whole vocabulary, float32.
        by_logprob_N: the gradient that came in, divided by the temperature, float32.
        entropy: expected logits, and the gradient by the entropy divided by the temperature, float32 [N] each.
    """
    hidden_NH, weight_VH, row_N = _operands(hidden_NH, weight_VH, label_N, first)
    blocks = blocks or blocks_for(hidden_NH.dtype)
    num_targets, num_rows = len(hidden_NH), len(weight_VH)
    size = chunk_targets(num_targets, padded(num_rows) * hidden_NH.element_size(), blocks, workspace_bytes)
    grad_CV = _workspace(hidden_NH, size, num_rows)
    mean_N, by_entropy_N = entropy or (lse_N, lse_N)  # the kernel does not read it
    by_logprob_N, by_entropy_N = by_logprob_N.contiguous(), by_entropy_N.contiguous()
    for chunk in slices(num_targets, size):
        hidden_CH, length = hidden_NH[chunk], chunk.stop - chunk.start
        grid = (triton.cdiv(length, blocks.targets) * triton.cdiv(num_rows, blocks.rows),)
        with torch.cuda.device_of(hidden_NH):
            logit_gradient_tile[grid](
                *(hidden_CH, weight_VH, row_N[chunk], lse_N[chunk], by_logprob_N[chunk]),
                *(mean_N[chunk], by_entropy_N[chunk], grad_CV, length, num_rows, hidden_NH.shape[1]),
                *(hidden_NH.stride(0), weight_VH.stride(0), grad_CV.stride(0), 1 / temperature),
                ENTROPY=entropy is not None,
                **_shape(hidden_NH, blocks),
            )
        seen_CH = hidden_CH[:, -grad_VH.shape[1] :]
        if hidden_NH.dtype == grad_VH.dtype:
            grad_VH.addmm_(grad_CV[:length].t(), seen_CH)
        else:
            grad_VH += grad_CV[:length].t() @ seen_CH


def _shape(hidden_NH: Tensor, blocks: Blocks) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if hidden_NH.dtype == torch.float32 else "tf32",  # has no effect on half precision
        "WIDEN": not hidden_NH.is_cuda,  # the interpreter multiplies the bits of bfloat16 as integers
        "EVEN_H": hidden_NH.shape[1] % blocks.hidden == 0,
        "BLOCK_N": blocks.targets,
        "BLOCK_V": blocks.rows,
        "BLOCK_H": blocks.hidden,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def _workspace(hidden_NH: Tensor, num_targets: int, num_rows: int) -> Tensor:
    workspace_CV = hidden_NH.new_empty(num_targets, padded(num_rows))
    workspace_CV[:, num_rows:] = 0  # torch's products of bfloat16 on the CPU read an odd row's neighbour too
    return workspace_CV[:, :num_rows]
