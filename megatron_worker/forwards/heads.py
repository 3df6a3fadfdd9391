"""Heads on the backbone's hidden states, for several labels a position, top-k and whole logits.

All probabilities come from the scan of `head.logprobs`: Triton's kernels on CUDA, chunks of torch elsewhere, merged
over the shards of the vocabulary. One label a position uses that head directly. Several labels, and the top ids, use
one scan without a label, which gives minus the logsumexp (and keeps its gradient, one row a target, [N, H] in float32),
and the logits of their ids, from rows of the output embedding that are gathered for some targets at a time:

    logprob_nk = h_n . W[id_nk] / t - lse_n

The gradient of the hidden states comes out summed over the group, as in head/logprobs.py; that of a trained embedding's
shard is complete.

Shape suffixes: N rows, H hidden size, V rows of this rank's shard, C rows of a chunk, K ids a row.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.engine import Outputs
from megatron_worker.head.logprobs import NO_LABEL, VocabShard, score_targets
from megatron_worker.head.torch_tiles import rows_of_labels

CHUNK_ROWS = 256


def ranked(
    hidden_NH: Tensor, weight_VH: Tensor, label_NK: Tensor, k: int, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of labels, [N, K], and of the `k` most probable ids, [N, k], with those: float32 (float64).

    Top ids are sorted, the most probable first, and of equals the lower id; int64. `NO_LABEL` pads shorter rows.
    """
    none_N = label_NK.new_full((len(label_NK),), NO_LABEL)
    outputs = Outputs(temperature=temperature, top_k=k)
    found = score_targets(hidden_NH, weight_VH, none_N, outputs, shard)
    assert found.logprob_N is not None
    top_id_NK = label_NK[:, :0] if found.top_id_NK is None else found.top_id_NK
    logit_NK: Tensor = _LogitsAt.apply(hidden_NH, weight_VH, torch.cat([label_NK, top_id_NK], dim=1), shard)
    logprob_NK = shard.logits(logit_NK) / temperature + found.logprob_N[:, None]
    label_logprob_NK, top_logprob_NK = logprob_NK.split([label_NK.shape[1], k], dim=1)
    if found.top_logprob_NK is not None:
        # The values of the scan, which decided the order, with the gradient of those computed here.
        top_logprob_NK = found.top_logprob_NK + (top_logprob_NK - top_logprob_NK.detach())
    return label_logprob_NK, top_id_NK, top_logprob_NK


def logits_of(hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """All logits of the whole vocabulary, [N, vocabulary], float32 (float64 for float64)."""
    return shard.logits(_Logits.apply(hidden_NH, weight_VH, shard))


class _LogitsAt(torch.autograd.Function):
    """Products with some ids' rows, [N, K], float32 (float64 for float64); 0 of `NO_LABEL`."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, id_NK: Tensor, shard: VocabShard) -> Tensor:
        logit_NK = hidden_NH.new_empty(id_NK.shape, dtype=_dtype(hidden_NH))
        for chunk in _chunks(id_NK, shard, hidden_NH.shape[1]):
            rows_CKH = _gathered(weight_VH, id_NK[chunk], shard)
            hidden_CH = hidden_NH[chunk].to(rows_CKH.dtype)
            torch.bmm(rows_CKH, hidden_CH[:, :, None], out=logit_NK[chunk][:, :, None])
            del rows_CKH  # before the next chunk's come
        _sum(logit_NK, shard.group)
        ctx.save_for_backward(weight_VH, id_NK, hidden_NH if ctx.needs_input_grad[1] else None)
        ctx.shard, ctx.hidden = shard, (hidden_NH.shape, hidden_NH.dtype)
        return logit_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, id_NK, hidden_NH = ctx.saved_tensors
        shape, dtype = ctx.hidden
        grad_NH, grad_VH = grad_NK.new_empty(shape, dtype=dtype), None
        if hidden_NH is not None:
            grad_VH = torch.zeros_like(weight_VH, dtype=grad_NK.dtype)
        for chunk in _chunks(id_NK, ctx.shard, weight_VH.shape[1]):
            rows_CKH = _gathered(weight_VH, id_NK[chunk], ctx.shard)
            grad_NH[chunk] = torch.bmm(grad_NK[chunk][:, None], rows_CKH)[:, 0].to(dtype)
            if grad_VH is not None:
                column_CK, owned_CK = rows_of_labels(id_NK[chunk], ctx.shard.first, ctx.shard.num_real)
                torch.mul((grad_NK[chunk] * owned_CK)[:, :, None], hidden_NH[chunk][:, None], out=rows_CKH)
                grad_VH.index_add_(0, column_CK.flatten(), rows_CKH.flatten(0, 1))
            del rows_CKH
        _sum(grad_NH, ctx.shard.group)
        return grad_NH, grad_VH, None, None


def _chunks(id_NK: Tensor, shard: VocabShard, hidden_size: int) -> Iterator[slice]:
    """Yield rows whose ids' rows of the embedding take no more than the logits of CHUNK_ROWS rows do."""
    num_rows, num_ids = id_NK.shape
    step = max(1, CHUNK_ROWS * shard.size // max(1, num_ids * hidden_size))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _gathered(weight_VH: Tensor, id_CK: Tensor, shard: VocabShard) -> Tensor:
    """Return the embedding's rows of ids, zeros of those of other shards, [C, K, H] in the softmax's dtype."""
    column_CK, owned_CK = rows_of_labels(id_CK, shard.first, shard.num_real)
    return weight_VH[column_CK].to(_dtype(weight_VH)).mul_(owned_CK[:, :, None])


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(weight_VH, hidden_NH if ctx.needs_input_grad[1] else None)
        ctx.shard, ctx.dtype = shard, hidden_NH.dtype
        own_NV = (hidden_NH @ weight_VH.t()).to(_dtype(hidden_NH))
        if shard.group is None:
            return own_NV[:, : shard.vocab_size]
        shards = [torch.empty_like(own_NV) for _ in range(shard.group.size())]
        dist.all_gather(shards, own_NV, group=shard.group)
        return torch.cat(shards, dim=1)[:, : shard.vocab_size].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:
        weight_VH, hidden_NH = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        own_NV = grad_NV[:, shard.first : shard.first + shard.num_real].to(ctx.dtype)
        grad_NH, grad_VH = own_NV @ weight_VH[: shard.num_real], None
        if hidden_NH is not None:
            grad_VH = torch.zeros_like(weight_VH)
            torch.mm(own_NV.t(), hidden_NH, out=grad_VH[: shard.num_real])
        _sum(grad_NH, shard.group)
        return grad_NH, grad_VH, None


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None and tensor.numel():
        dist.all_reduce(tensor, group=group)


def _dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
