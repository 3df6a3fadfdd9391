"""The logprob head: scores of targets without ever holding [targets, vocabulary].

Chunks of targets meet the output embedding one at a time. The softmax runs in float32 (float64 for float64). Since

    d logprob_n / d hidden_n = W[label_n] - sum_v p_nv W_v

does not depend on what comes from above, the forward keeps that one row for each target and the backward only scales
it: a frozen output embedding costs two matrix products, not three. A trained one gets its gradient by recomputing.
The entropy's gradient, if asked for, costs one product and one such row more: with z the logits and m = sum_v p_v z_v,

    d entropy_n / d hidden_n = -sum_v p_nv (z_nv - m_n) W_v

At a temperature other than 1, z are the logits divided by it, in the softmax's dtype; so is every gradient above.

Under tensor parallelism the hidden states are replicated and the vocabulary is sharded; ranks merge maxima, sums of
exponentials, target logits and the rows above in the forward. **The gradient of the hidden states comes out summed over
the group; the caller must not sum it again.** The backward has no collective; the gradient of a shard is complete.

What one shard knows of its targets is found by torch, below, or on CUDA by the kernels beside it (kernels.py);
`_scan` and `_weight_gradient` choose.

Shape suffixes: N targets, H hidden size, V rows of this rank's shard, C targets of a chunk, K greatest logits kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.engine import Outputs, Scores
from megatron_worker.head import top_k
from megatron_worker.head.kernel_choice import use_kernel

NO_LABEL = -1
CHUNK_TARGETS = 256  # of torch's way: their logits fit where it counts, and products are large enough


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the output embedding: ids `first` to `first + size`. Ids from `vocab_size` on are padding."""

    first: int
    size: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    @property
    def num_real(self) -> int:
        return max(0, min(self.size, self.vocab_size - self.first))


def whole_vocabulary(vocab_size: int) -> VocabShard:
    return VocabShard(first=0, size=vocab_size, vocab_size=vocab_size)


def score_targets(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    label_N: Tensor,
    outputs: Outputs,
    shard: VocabShard,
    chunk_tokens: int = CHUNK_TARGETS,
) -> Scores:
    """Log-probability of each label, the entropy of its distribution and its `top_k` most likely ids, in nats, float32.

    All are of the softmax of the logits divided by `outputs.temperature`. Of equally likely ids the lower comes first.

    Args:
        hidden_NH: hidden states after the final norm, the same on every rank of the group.
        weight_VH: this rank's shard of the output embedding, in the dtype of `hidden_NH`.
        label_N: ids of the whole vocabulary, int64. `NO_LABEL` has a logit of 0: its "log-probability" is minus the
            logsumexp, and so is its gradient.
        chunk_tokens: targets whose logits live at a time, where no kernel is used.

    The log-probability is differentiable by hidden states and weight, once; the entropy where `outputs` asks for it;
    the `top_k` are constants.
    """
    assert weight_VH.shape[0] == shard.size, (weight_VH.shape, shard)
    assert outputs.entropy or not outputs.entropy_gradient
    assert 0 <= outputs.top_k <= shard.vocab_size, (outputs, shard)
    if not (outputs.logprob or outputs.entropy or outputs.top_k):
        return Scores()
    keep_rows = torch.is_grad_enabled() and hidden_NH.requires_grad
    scored = _Head.apply(hidden_NH, weight_VH, label_N, outputs, shard, chunk_tokens, keep_rows)
    logprob_N, entropy_N, top_logprob_NK, top_id_NK = scored
    return Scores(
        logprob_N=logprob_N if outputs.logprob else None,
        entropy_N=entropy_N if outputs.entropy else None,
        top_logprob_NK=top_logprob_NK if outputs.top_k else None,
        top_id_NK=top_id_NK if outputs.top_k else None,
    )


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        label_N: Tensor,
        outputs: Outputs,
        shard: VocabShard,
        chunk_tokens: int,
        keep_rows: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        local = _scan(hidden_NH, weight_VH, label_N, outputs, shard, chunk_tokens, keep_rows)
        lse_N, target_N, mean_logit_N, rows_NH, entropy_rows_NH = _merge(local, shard.group)
        entropy_N = lse_N - mean_logit_N
        ctx.by_entropy, ctx.temperature = outputs.entropy_gradient, outputs.temperature
        if not ctx.by_entropy:
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(hidden_NH, weight_VH, label_N, lse_N, mean_logit_N, rows_NH, entropy_rows_NH)
        ctx.shard, ctx.chunk_tokens = shard, chunk_tokens
        top_logit_NK, top_id_NK = top_k.unpack(top_k.over_shards(local.top_NK, shard.group))
        top_logprob_NK = (top_logit_NK - lse_N[:, None]).to(lse_N.dtype)
        ctx.mark_non_differentiable(top_logprob_NK, top_id_NK)
        return target_N - lse_N, entropy_N, top_logprob_NK, top_id_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, by_entropy_N: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, label_N, lse_N, mean_logit_N, rows_NH, entropy_rows_NH = ctx.saved_tensors
        by_hidden, by_weight = ctx.needs_input_grad[:2]
        if ctx.temperature != 1:
            grad_N, by_entropy_N = grad_N / ctx.temperature, by_entropy_N / ctx.temperature
        grad_NH = grad_VH = None
        if by_hidden:
            exact_NH = rows_NH * grad_N[:, None]
            if ctx.by_entropy:
                exact_NH.addcmul_(entropy_rows_NH, by_entropy_N[:, None])
            grad_NH = exact_NH.to(hidden_NH.dtype)
        if by_weight:
            entropy = (mean_logit_N, by_entropy_N) if ctx.by_entropy else None
            grad_VH = _weight_gradient(
                hidden_NH, weight_VH, label_N, lse_N, grad_N, entropy, ctx.temperature, ctx.shard, ctx.chunk_tokens
            )
        return grad_NH, grad_VH, None, None, None, None, None


@dataclass
class _Local:
    """What one shard knows of its targets. Exponentials are relative to `max_N`; labels of other shards count 0.

    `logit_rows_NH` are sums of exponential times logit, relative to `max_N`, times row. `top_NK` are keys of top_k.py.
    """

    max_N: Tensor
    sum_exp_N: Tensor
    target_N: Tensor
    weighted_logit_N: Tensor
    weighted_rows_NH: Tensor | None
    label_rows_NH: Tensor | None
    logit_rows_NH: Tensor | None
    top_NK: Tensor


def _scan(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    label_N: Tensor,
    outputs: Outputs,
    shard: VocabShard,
    chunk_tokens: int,
    keep_rows: bool,
) -> _Local:
    dtype, num_targets = _softmax_dtype(hidden_NH), len(label_N)
    zeros_N = hidden_NH.new_zeros(num_targets, dtype=dtype)
    rows_NH = label_rows_NH = logit_rows_NH = None
    if keep_rows:
        rows_NH = hidden_NH.new_zeros(hidden_NH.shape, dtype=dtype)
        label_rows_NH = _label_rows(weight_VH, label_N, shard, dtype)
        logit_rows_NH = torch.zeros_like(rows_NH) if outputs.entropy_gradient else None
    max_N = torch.full_like(zeros_N, -torch.inf)
    top_NK = label_N.new_full((num_targets, outputs.top_k), top_k.NONE)
    local = _Local(max_N, zeros_N, zeros_N.clone(), zeros_N.clone(), rows_NH, label_rows_NH, logit_rows_NH, top_NK)
    real_VH = weight_VH[: shard.num_real]
    if num_targets and shard.num_real:
        if kernels_do(hidden_NH):
            _scan_by_kernels(local, hidden_NH, real_VH, label_N, outputs, shard)
        else:
            _scan_by_torch(local, hidden_NH, real_VH, label_N, outputs, shard, chunk_tokens)
        local.top_NK = top_k.shifted(local.top_NK, shard.first)
    return local


def _scan_by_torch(
    local: _Local,
    hidden_NH: Tensor,
    real_VH: Tensor,
    label_N: Tensor,
    outputs: Outputs,
    shard: VocabShard,
    chunk_tokens: int,
) -> None:
    rows_NH, logit_rows_NH = local.weighted_rows_NH, local.logit_rows_NH
    column_N, owned_N = _own_labels(label_N, shard)
    for chunk, logit_CV in _chunks_of_logits(hidden_NH, real_VH, outputs.temperature, chunk_tokens):
        target_C = logit_CV.gather(1, column_N[chunk, None])[:, 0]
        local.target_N[chunk] = torch.where(owned_N[chunk], target_C, 0.0)
        max_C = logit_CV.amax(dim=1)
        local.max_N[chunk] = max_C
        if outputs.top_k:
            local.top_NK[chunk] = top_k.of_logits(logit_CV, outputs.top_k)
        kept_CV = logit_CV.clone() if outputs.entropy else None
        below_CV = logit_CV - max_C[:, None] if logit_rows_NH is not None else None
        exp_CV = logit_CV.sub_(max_C[:, None]).exp_()
        local.sum_exp_N[chunk] = exp_CV.sum(dim=1)
        if kept_CV is not None:
            local.weighted_logit_N[chunk] = kept_CV.mul_(exp_CV).sum(dim=1)
        if rows_NH is not None:
            rows_NH[chunk] = exp_CV.to(real_VH.dtype) @ real_VH
        if below_CV is not None and logit_rows_NH is not None:
            logit_rows_NH[chunk] = below_CV.mul_(exp_CV).to(real_VH.dtype) @ real_VH


def _scan_by_kernels(
    local: _Local, hidden_NH: Tensor, real_VH: Tensor, label_N: Tensor, outputs: Outputs, shard: VocabShard
) -> None:
    from megatron_worker.head import kernels as kernels

    found = kernels.scan(
        hidden_NH.detach().contiguous(),
        real_VH.detach(),
        _row_or_none(label_N, shard),
        outputs.temperature,
        entropy=outputs.entropy,
        top_k=min(outputs.top_k, shard.num_real),
        rows_NH=local.weighted_rows_NH,
        logit_rows_NH=local.logit_rows_NH,
    )
    local.max_N, local.sum_exp_N, local.target_N = found.max_N, found.sum_exp_N, found.target_N
    local.weighted_logit_N = found.weighted_logit_N
    if found.top_NK is not None:
        local.top_NK = top_k.greatest(found.top_NK, outputs.top_k)


def _merge(
    local: _Local, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Global logsumexp [N], target logit [N], expected logit [N] (0 unless scanned for), and the rows of the
    log-probability's and the entropy's gradient [N, H].
    """
    max_N = local.max_N.clone()
    _all_reduce(max_N, dist.ReduceOp.MAX, group)
    scale_N = (local.max_N - max_N).exp()
    sums_3N = torch.stack([local.sum_exp_N * scale_N, local.target_N, local.weighted_logit_N * scale_N])
    _all_reduce(sums_3N, dist.ReduceOp.SUM, group)
    sum_exp_N, target_N, weighted_logit_N = sums_3N
    rows_NH = entropy_rows_NH = None
    if local.weighted_rows_NH is not None and local.logit_rows_NH is not None:
        # p (z - m) of this shard, its logits known relative to its own maximum
        from_mean_N = local.max_N - weighted_logit_N / sum_exp_N
        entropy_rows_NH = local.logit_rows_NH.addcmul_(local.weighted_rows_NH, _finite(from_mean_N)[:, None])
        entropy_rows_NH.mul_(-(scale_N / sum_exp_N)[:, None])
        _all_reduce(entropy_rows_NH, dist.ReduceOp.SUM, group)
    if local.weighted_rows_NH is not None and local.label_rows_NH is not None:
        rows_NH = local.label_rows_NH.addcmul_(local.weighted_rows_NH, (scale_N / sum_exp_N)[:, None], value=-1)
        _all_reduce(rows_NH, dist.ReduceOp.SUM, group)
    return max_N + sum_exp_N.log(), target_N, weighted_logit_N / sum_exp_N, rows_NH, entropy_rows_NH


def _weight_gradient(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    label_N: Tensor,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    shard: VocabShard,
    chunk_tokens: int,
) -> Tensor:
    """d loss / d weight of this shard, [V, H], summed over chunks in the softmax's dtype.

    `entropy`: expected logits and the gradient by the entropy, both [N], where it has one. The gradients that come in
    are divided by the temperature already.
    """
    grad_VH = torch.zeros_like(weight_VH, dtype=lse_N.dtype)
    real_VH = weight_VH[: shard.num_real]
    if len(hidden_NH) and shard.num_real and kernels_do(hidden_NH):
        from megatron_worker.head import kernels as kernels

        kernels.add_weight_gradient(
            grad_VH[: shard.num_real],
            hidden_NH.detach().contiguous(),
            real_VH.detach(),
            _row_or_none(label_N, shard),
            lse_N,
            grad_N.contiguous(),
            entropy and (entropy[0], entropy[1].contiguous()),
            temperature,
        )
        return grad_VH
    column_N, owned_N = _own_labels(label_N, shard)
    for chunk, logit_CV in _chunks_of_logits(hidden_NH, real_VH, temperature, chunk_tokens):
        grad_C = grad_N[chunk]
        pull_CV = -grad_C[:, None]
        if entropy is not None:
            mean_logit_N, by_entropy_N = entropy
            pull_CV = pull_CV - by_entropy_N[chunk, None] * (logit_CV - mean_logit_N[chunk, None])
        grad_CV = logit_CV.sub_(lse_N[chunk, None]).exp_().mul_(pull_CV)
        grad_CV.scatter_add_(1, column_N[chunk, None], torch.where(owned_N[chunk], grad_C, 0.0)[:, None])
        hidden_CH = hidden_NH[chunk]
        if hidden_CH.dtype == grad_VH.dtype:
            grad_VH[: shard.num_real].addmm_(grad_CV.t(), hidden_CH)
        else:
            grad_VH[: shard.num_real] += grad_CV.to(hidden_CH.dtype).t() @ hidden_CH
    return grad_VH


def _chunks_of_logits(
    hidden_NH: Tensor, real_VH: Tensor, temperature: float, chunk_tokens: int
) -> Iterator[tuple[slice, Tensor]]:
    """Logits of a chunk at a time, in the softmax's dtype, divided by the temperature.

    Always the same buffer: use it up before going on.
    """
    num_targets, num_rows = len(hidden_NH), len(real_VH)
    if not (num_targets and num_rows):
        return
    size = (min(chunk_tokens, num_targets), num_rows)
    product_CV = hidden_NH.new_empty(size)
    dtype = _softmax_dtype(hidden_NH)
    logit_CV = product_CV if product_CV.dtype == dtype else product_CV.new_empty(size, dtype=dtype)
    for start in range(0, num_targets, chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, num_targets))
        length = chunk.stop - chunk.start
        torch.mm(hidden_NH[chunk].detach(), real_VH.detach().t(), out=product_CV[:length])
        if logit_CV is not product_CV:
            logit_CV[:length].copy_(product_CV[:length])
        if temperature != 1:
            logit_CV[:length].div_(temperature)
        yield chunk, logit_CV[:length]


def _own_labels(label_N: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The row of each label in this shard (0 where another shard owns it), and whether it is ours."""
    row_N = label_N - shard.first
    owned_N = (row_N >= 0) & (row_N < shard.num_real)
    return torch.where(owned_N, row_N, 0), owned_N


def _row_or_none(label_N: Tensor, shard: VocabShard) -> Tensor:
    """The row of each label in this shard, -1 where another shard owns it."""
    row_N, owned_N = _own_labels(label_N, shard)
    return torch.where(owned_N, row_N, -1)


def kernels_do(hidden_NH: Tensor) -> bool:
    return use_kernel("head", hidden_NH, _probe_kernels)


def _probe_kernels(one_NH: Tensor) -> None:
    from megatron_worker.head import kernels as kernels

    one_NH = one_NH.expand(1, 256).contiguous()  # some steps, so that it wants the memory that a real one wants
    exact_NH, row_N = one_NH.float(), torch.zeros(1, dtype=torch.int64, device=one_NH.device)
    found = kernels.scan(one_NH, one_NH, row_N, temperature=1.0, rows_NH=exact_NH.clone())
    kernels.add_weight_gradient(exact_NH, one_NH, one_NH, row_N, found.max_N, found.max_N, None, temperature=1.0)


def _label_rows(weight_VH: Tensor, label_N: Tensor, shard: VocabShard, dtype: torch.dtype) -> Tensor:
    row_N, owned_N = _own_labels(label_N, shard)
    return weight_VH.detach()[row_N].to(dtype).mul_(owned_N[:, None])


def _finite(value_N: Tensor) -> Tensor:
    """A shard that is all padding has no maximum, and nothing to weigh by it."""
    return value_N.masked_fill(value_N == -torch.inf, 0.0)


def _softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and tensor.numel():
        dist.all_reduce(tensor, op=op, group=group)
