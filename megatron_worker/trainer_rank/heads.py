"""The light heads on hidden states that the trunk has made once: several labels a position, top-k, whole logits.

One label a position goes through `megatron_worker.head`. Here too the vocabulary is met a chunk of rows at a time and
may be sharded: ranks of the group merge maxima and sums of exponentials (the softmax, as in head.py), and the gradient
of the hidden states comes out summed over the group. The output embedding is frozen. The backward makes a chunk's
logits again instead of keeping them. With p the softmax of the logits divided by the temperature t, and g the
gradient by the log-probabilities of ids k:

    d loss / d z_nv = (sum_k g_nk [v = id_nk] - p_nv sum_k g_nk) / t

Shape suffixes: N rows, H hidden size, V rows of this rank's shard, C rows of a chunk, K ids a row.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.head import VocabShard

CHUNK_ROWS = 256


def logprobs_of(hidden_NH: Tensor, weight_VH: Tensor, id_NK: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Log-probabilities of K ids a row, [N, K], float32 (float64 for float64)."""
    scored: Tensor = _Labels.apply(hidden_NH, weight_VH.detach(), id_NK, shard, temperature)
    return scored


@torch.no_grad()
def top_ids(hidden_NH: Tensor, weight_VH: Tensor, k: int, shard: VocabShard) -> Tensor:
    """The ids of the k greatest logits a row, the greatest first, the lower id before its equal: int64 [N, k]."""
    found = hidden_NH.new_zeros(len(hidden_NH), k, dtype=torch.int64)
    for chunk, logit_CV in _chunks(hidden_NH, weight_VH, shard, 1.0):
        values_CK, ids_CK = _best(logit_CV, torch.arange(logit_CV.shape[1], device=logit_CV.device), k)
        values_CK, ids_CK = _gathered(values_CK, -torch.inf, k, shard), _gathered(ids_CK + shard.first, 0, k, shard)
        best_CK = values_CK.sort(dim=1, descending=True, stable=True).indices[:, :k]
        found[chunk] = ids_CK.gather(1, best_CK)
    return found


def logits_of(hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
    """All logits of the whole vocabulary, [N, vocabulary], float32 (float64 for float64)."""
    logits: Tensor = _Logits.apply(hidden_NH, weight_VH.detach(), shard)
    return logits


class _Labels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, id_NK: Tensor, shard: VocabShard, temperature: float
    ) -> Tensor:
        num_rows = len(hidden_NH)
        max_N = hidden_NH.new_full((num_rows,), -torch.inf, dtype=_dtype(hidden_NH))
        sum_N, label_NK = torch.zeros_like(max_N), max_N.new_zeros(id_NK.shape)
        column_NK, owned_NK = _own(id_NK, shard)
        for chunk, logit_CV in _chunks(hidden_NH, weight_VH, shard, temperature):
            label_NK[chunk] = logit_CV.gather(1, column_NK[chunk]).masked_fill_(~owned_NK[chunk], 0.0)
            max_N[chunk] = logit_CV.amax(dim=1)
            sum_N[chunk] = logit_CV.sub_(max_N[chunk, None]).exp_().sum(dim=1)
        lse_N = _merged_lse(max_N, sum_N, shard.group)
        _sum(label_NK, shard.group)
        ctx.save_for_backward(hidden_NH, weight_VH, id_NK, lse_N)
        ctx.shard, ctx.temperature = shard, temperature
        return label_NK.sub_(lse_N[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, id_NK, lse_N = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        real_VH, grad_NK = weight_VH[: shard.num_real], grad_NK / ctx.temperature
        column_NK, owned_NK = _own(id_NK, shard)
        grad_NH = torch.zeros_like(hidden_NH)
        chunks = _chunks(hidden_NH, weight_VH, shard, ctx.temperature) if shard.num_real else ()
        for chunk, logit_CV in chunks:
            pull_C1 = -grad_NK[chunk].sum(dim=1, keepdim=True)
            grad_CV = logit_CV.sub_(lse_N[chunk, None]).exp_().mul_(pull_C1)
            grad_CV.scatter_add_(1, column_NK[chunk], grad_NK[chunk].masked_fill(~owned_NK[chunk], 0.0))
            grad_NH[chunk] = grad_CV.to(real_VH.dtype) @ real_VH
        _sum(grad_NH, shard.group)
        return grad_NH, None, None, None, None


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(weight_VH)
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
        (weight_VH,) = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        own_NV = grad_NV[:, shard.first : shard.first + shard.num_real]
        grad_NH = own_NV.to(ctx.dtype) @ weight_VH[: shard.num_real]
        _sum(grad_NH, shard.group)
        return grad_NH, None, None


def _chunks(
    hidden_NH: Tensor, weight_VH: Tensor, shard: VocabShard, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """Logits of this shard's real ids over the temperature, a chunk of rows at a time, to be written over."""
    real_VH = weight_VH[: max(1, shard.num_real)].detach()
    for start in range(0, len(hidden_NH), CHUNK_ROWS):
        chunk = slice(start, min(start + CHUNK_ROWS, len(hidden_NH)))
        logit_CV = (hidden_NH[chunk].detach() @ real_VH.t()).to(_dtype(hidden_NH))
        if not shard.num_real:
            logit_CV.fill_(-torch.inf)  # a shard of nothing but padding: one column that never counts
        if temperature != 1:
            logit_CV.div_(temperature)
        yield chunk, logit_CV


def _best(logit_CV: Tensor, id_V: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of this shard, or all of fewer; of equal ones those of lower ids, as far as a shard is sorted."""
    values_CK, places_CK = logit_CV.topk(min(k, logit_CV.shape[1]), dim=1)
    lower = places_CK.argsort(dim=1)
    values_CK, places_CK = values_CK.gather(1, lower), places_CK.gather(1, lower)
    order = values_CK.argsort(dim=1, descending=True, stable=True)
    return values_CK.gather(1, order), id_V[places_CK.gather(1, order)]


def _gathered(own_CK: Tensor, padding: float, k: int, shard: VocabShard) -> Tensor:
    """Every shard's columns beside each other, in the order of ids; each padded to k."""
    if shard.group is None:
        return own_CK
    padded_CK = torch.nn.functional.pad(own_CK, (0, k - own_CK.shape[1]), value=padding).contiguous()
    shards = [torch.empty_like(padded_CK) for _ in range(shard.group.size())]
    dist.all_gather(shards, padded_CK, group=shard.group)
    return torch.cat(shards, dim=1)


def _merged_lse(max_N: Tensor, sum_N: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return max_N + sum_N.log()
    greatest_N = max_N.clone()
    dist.all_reduce(greatest_N, dist.ReduceOp.MAX, group=group)
    total_N = sum_N.nan_to_num_(0.0).mul_((max_N - greatest_N).exp())
    dist.all_reduce(total_N, group=group)
    return greatest_N + total_N.log()


def _own(id_NK: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The column of each id in this shard (0 where another owns it), and whether it is ours."""
    column_NK = id_NK - shard.first
    owned_NK = (column_NK >= 0) & (column_NK < shard.num_real)
    return torch.where(owned_NK, column_NK, 0), owned_NK


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None and tensor.numel():
        dist.all_reduce(tensor, group=group)


def _dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
