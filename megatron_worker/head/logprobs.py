"""The logprob head: scores of targets without ever holding [targets, vocabulary].

Chunks of targets meet tiles of the output embedding's rows one at a time, and only a tile of logits is held, small
enough for a core's cache. The softmax runs in float32 (float64 for float64). Since

    d logprob_n / d hidden_n = W[label_n] - sum_v p_nv W_v

does not depend on what comes from above, the forward keeps that one row for each target and the backward only scales
it: a frozen output embedding costs two matrix products, not three. A trained one gets its gradient by recomputing.
The entropy's gradient, if asked for, costs one product and one such row more: with z the logits and m = sum_v p_v z_v,

    d entropy_n / d hidden_n = -sum_v p_nv (z_nv - m_n) W_v

If logits are capped, each row W_v above is multiplied by the slope of its logit, 1 - (z_v / cap)^2.

At a temperature other than 1, z are the logits divided by it, in the softmax's dtype; so is every gradient above.

Under tensor parallelism the hidden states are replicated and the vocabulary is sharded; ranks merge maxima, sums of
exponentials, target logits and the rows above in the forward. **The gradient of the hidden states comes out summed over
the group; the caller must not sum it again.** The backward has no collective; the gradient of a shard is complete.

Torch (torch_tiles.py), or on CUDA kernels (kernels.py), compute each shard's part; `_scan` and `_weight_gradient`
choose.

Shape suffixes: N targets, H hidden size, V rows of this rank's shard, K greatest logits kept.
"""

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.engine import Outputs, Scores
from megatron_worker.head import torch_tiles
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.head.torch_tiles import LocalSums, TileSize, capped_slope, finite, rows_of_labels, tile_size
from shared.errors import InvalidInput
from shared.settings import KernelPolicy

# --- The choice between kernels and torch ---
# On CUDA kernels; if they cannot be used, that is a warning or an error.
#
# The policy holds for a whole process, like torch's switches: `auto` takes kernels on CUDA and warns once of each
# reason not to; `strict` raises an error without them, on the CPU too, where only Triton's interpreter runs them
# (TRITON_INTERPRET=1, for tests); `torch` never takes one.

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_CAPABILITY = (8, 0)

_policy: KernelPolicy = "auto"


def set_policy(policy: KernelPolicy) -> None:
    global _policy
    assert policy in get_args(KernelPolicy), policy
    _policy = policy


@contextmanager
def policy(policy: KernelPolicy) -> Iterator[None]:
    """Set another policy within the block."""
    before = _policy
    set_policy(policy)
    try:
        yield
    finally:
        set_policy(before)


def kernels_do(hidden_NH: Tensor, logit_cap: float | None = None) -> bool:
    """Return True if kernels are to be used on tensors of this one's device and dtype.

    Raises InvalidInput under `strict` if they cannot be used.
    """
    if _policy == "torch" or (_policy == "auto" and not hidden_NH.is_cuda):
        return False
    reason = _reason_against_kernels(hidden_NH.device, hidden_NH.dtype, logit_cap is not None)
    if reason is None:
        return True
    if _policy == "strict":
        raise InvalidInput(f"the kernel 'head' cannot be used, and kernels are strict: {reason}", "LONGSHORE_KERNELS")
    message = f"the kernel 'head' is not used, torch does its work: {reason}"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)
    return False


_warned = set[str]()


@functools.cache
def _reason_against_kernels(device: torch.device, dtype: torch.dtype, caps_logits: bool) -> str | None:
    """Look, once for each device and dtype, and run the kernels on a small tensor."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"it needs CUDA, and the tensors are on {device.type}"
    if dtype not in _DTYPES:
        return f"it knows no {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY}, and {torch.cuda.get_device_name(device)} has {found}"
    if caps_logits:
        return "it caps no logits"
    try:
        from megatron_worker.head import kernels

        one_NH = torch.ones(1, 256, device=device, dtype=dtype)  # some steps: it wants the memory that a real one wants
        label_N = torch.zeros(1, dtype=torch.int64, device=device)
        kernels.scan(sums := LocalSums.none(one_NH, Outputs(), keep_rows=True), one_NH, one_NH, label_N, Outputs(), 0)
        kernels.add_weight_gradient(one_NH.float(), one_NH, one_NH, label_N, sums.max_N, sums.max_N, None, 1.0, 0)
    except Exception as error:  # a compiler, a driver or a chip may refuse in many ways, and torch can do the work
        return f"{type(error).__name__}: {error}"
    return None


NO_LABEL = -1


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the output embedding: ids `first` to `first + size`, padding from `vocab_size` on.

    `logit_cap`: logits are cap * tanh(logit / cap) of the products with the rows; None: the products themselves.
    `logit_divisor`: they are divided by it then.
    """

    first: int
    size: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    logit_cap: float | None = None
    logit_divisor: float = 1.0

    def logits(self, product: Tensor) -> Tensor:
        """Return the logits of some products."""
        capped = product if self.logit_cap is None else self.logit_cap * (product / self.logit_cap).tanh()
        return capped if self.logit_divisor == 1 else capped / self.logit_divisor

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
    tile: TileSize | None = None,
    beside: LmHeadLora | None = None,
) -> Scores:
    """Return each label's log-probability, the entropy, and the `top_k` most likely ids; in nats, float32.

    They describe the softmax of the logits divided by `outputs.temperature`. The lower of equally likely ids is first.

    Args:
        hidden_NH: hidden states after the final norm, the same on every rank of the group.
        weight_VH: this rank's shard of the output embedding, in the dtype of `hidden_NH`.
        label_N: ids of the whole vocabulary, int64. `NO_LABEL` has a logit of 0: its "log-probability" is minus the
            logsumexp, and so is its gradient.
        tile: None for the device's.
        beside: an adapter of the output embedding, which then has no gradient itself.

    The log-probability is differentiable by hidden states and weight, once; the entropy with `entropy_gradient`; the
    `top_k` are constants.
    """
    assert weight_VH.shape[0] == shard.size, (weight_VH.shape, shard)
    assert outputs.entropy or not outputs.entropy_gradient
    assert 0 <= outputs.top_k <= shard.vocab_size, (outputs, shard)
    if not (outputs.logprob or outputs.entropy or outputs.top_k):
        return Scores()
    if beside is not None:
        hidden_NH, weight_VH = torch.cat([hidden_NH, beside.low_NR], dim=1), weight_VH.detach()
    outputs = replace(outputs, temperature=outputs.temperature * shard.logit_divisor)
    keep_rows = torch.is_grad_enabled() and hidden_NH.requires_grad
    last_VR = None if beside is None else beside.b_VR
    task = _Task(label_N, outputs, shard, tile or tile_size(hidden_NH.device), keep_rows)
    logprob_N, entropy_N, top_logprob_NK, top_id_NK = _Head.apply(hidden_NH, weight_VH, last_VR, task)
    return Scores(
        logprob_N=logprob_N if outputs.logprob else None,
        entropy_N=entropy_N if outputs.entropy else None,
        top_logprob_NK=top_logprob_NK if outputs.top_k else None,
        top_id_NK=top_id_NK if outputs.top_k else None,
    )


@dataclass(frozen=True)
class _Task:
    """The inputs of the scan, except the tensors that have gradients. `keep_rows`: for the hidden states' gradient."""

    label_N: Tensor
    outputs: Outputs
    shard: VocabShard
    tile: TileSize
    keep_rows: bool


class _Head(torch.autograd.Function):
    """`last_VR`: the last columns of the weight, after those of `weight_VH`, if they alone have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, last_VR: Tensor | None, task: _Task
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        local, group = _scan(hidden_NH, weight_VH, last_VR, task), task.shard.group
        lse_N, target_N, mean_logit_N, rows_NH, entropy_rows_NH = _merge(local, group)
        entropy_N = lse_N - mean_logit_N
        if not task.outputs.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(hidden_NH, weight_VH, last_VR, lse_N, mean_logit_N, rows_NH, entropy_rows_NH)
        ctx.task = task
        top_logit_NK, top_id_NK = torch_tiles.unpack_keys(torch_tiles.over_shards(local.top_NK, group))
        top_logprob_NK = (top_logit_NK - lse_N[:, None]).to(lse_N.dtype)
        ctx.mark_non_differentiable(top_logprob_NK, top_id_NK)
        return target_N - lse_N, entropy_N, top_logprob_NK, top_id_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, by_entropy_N: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, last_VR, lse_N, mean_logit_N, rows_NH, entropy_rows_NH = ctx.saved_tensors
        by_hidden, by_weight, by_last = ctx.needs_input_grad[:3]
        outputs = ctx.task.outputs
        if outputs.temperature != 1:
            grad_N, by_entropy_N = grad_N / outputs.temperature, by_entropy_N / outputs.temperature
        grad_NH = grad_VH = None
        if by_hidden:
            exact_NH = rows_NH * grad_N[:, None]
            if outputs.entropy_gradient:
                exact_NH.addcmul_(entropy_rows_NH, by_entropy_N[:, None])
            grad_NH = exact_NH.to(hidden_NH.dtype)
        if by_weight or by_last:
            entropy = (mean_logit_N, by_entropy_N) if outputs.entropy_gradient else None
            grad_VH = _weight_gradient(hidden_NH, weight_VH, last_VR, ctx.task, lse_N, grad_N, entropy)
        return grad_NH, *((None, grad_VH) if by_last else (grad_VH, None)), None


def _parts(
    weight_VH: Tensor, last_VR: Tensor | None, shard: VocabShard, num_joined: int
) -> Iterator[tuple[VocabShard, Tensor]]:
    """Yield a shard's real rows: all; with an adapter's columns some at a time, so that no copy of all is made."""
    if last_VR is None:
        yield shard, weight_VH[: shard.num_real]
        return
    for start in range(0, shard.num_real, num_joined):
        size = min(num_joined, shard.num_real - start)
        joined_PX = torch.cat([each[start : start + size].detach() for each in (weight_VH, last_VR)], dim=1)
        yield replace(shard, first=shard.first + start, size=size), joined_PX


def _scan(hidden_NH: Tensor, weight_VH: Tensor, last_VR: Tensor | None, task: _Task) -> LocalSums:
    label_N, outputs, shard = task.label_N, task.outputs, task.shard
    local = LocalSums.none(hidden_NH, outputs, task.keep_rows)
    if task.keep_rows:
        row_N, owned_N = rows_of_labels(label_N, shard.first, shard.num_real)
        columns_NH = weight_VH.detach()[row_N]
        if last_VR is not None:
            columns_NH = torch.cat([columns_NH, last_VR.detach()[row_N]], dim=1)
        local.label_rows_NH = columns_NH.to(local.max_N.dtype).mul_(owned_N[:, None])
    if len(label_N) and shard.num_real:
        for part, real_VH in _parts(weight_VH, last_VR, shard, task.tile.joined):
            arguments = hidden_NH, real_VH, label_N, outputs, part.first
            if not kernels_do(hidden_NH, shard.logit_cap):
                torch_tiles.scan(local, *arguments, task.tile, shard.logit_cap)
                continue
            from megatron_worker.head import kernels

            if part is shard:
                kernels.scan(local, *arguments)
            else:
                kernels.scan(found := LocalSums.none(hidden_NH, outputs, task.keep_rows), *arguments)
                torch_tiles.merge(local, found)
        slope_N = capped_slope(local.target_N, shard.logit_cap, outputs.temperature)
        if local.label_rows_NH is not None and slope_N is not None:
            local.label_rows_NH.mul_(slope_N[:, None])
    return local


def _merge(
    local: LocalSums, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the global logsumexp [N], target logit [N], expected logit [N] (0 unless scanned for), and the rows of the
    log-probability's and the entropy's gradient [N, H].
    """
    max_N = local.max_N.clone()
    sum_over(max_N, group, dist.ReduceOp.MAX)
    scale_N = (local.max_N - max_N).exp()
    sums_3N = torch.stack([local.sum_exp_N * scale_N, local.target_N, local.weighted_logit_N * scale_N])
    sum_over(sums_3N, group)
    sum_exp_N, target_N, weighted_logit_N = sums_3N
    rows_NH = entropy_rows_NH = None
    if local.weighted_rows_NH is not None and local.logit_rows_NH is not None:
        # p (z - m) of this shard, its logits known relative to its own maximum
        from_mean_N = local.max_N - weighted_logit_N / sum_exp_N
        entropy_rows_NH = local.logit_rows_NH.addcmul_(local.weighted_rows_NH, finite(from_mean_N)[:, None])
        entropy_rows_NH.mul_(-(scale_N / sum_exp_N)[:, None])
        sum_over(entropy_rows_NH, group)
    if local.weighted_rows_NH is not None and local.label_rows_NH is not None:
        rows_NH = local.label_rows_NH.addcmul_(local.weighted_rows_NH, (scale_N / sum_exp_N)[:, None], value=-1)
        sum_over(rows_NH, group)
    return max_N + sum_exp_N.log(), target_N, weighted_logit_N / sum_exp_N, rows_NH, entropy_rows_NH


def _weight_gradient(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    last_VR: Tensor | None,
    task: _Task,
    lse_N: Tensor,
    grad_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return d loss / d weight of this shard, or of its last columns, summed over chunks in the softmax's dtype.

    `entropy`: expected logits and the gradient by the entropy, both [N], if it has one. The incoming gradients are
    divided by the temperature already.
    """
    label_N, shard, temperature = task.label_N, task.shard, task.outputs.temperature
    grad_VH = lse_N.new_zeros((weight_VH if last_VR is None else last_VR).shape)
    for part, real_VH in _parts(weight_VH, last_VR, shard, task.tile.joined):
        grad_PH = grad_VH[part.first - shard.first :][: part.num_real]
        arguments = hidden_NH, real_VH, label_N, lse_N, grad_N, entropy, temperature, part.first
        if len(hidden_NH) and part.num_real and kernels_do(hidden_NH, shard.logit_cap):
            from megatron_worker.head import kernels

            kernels.add_weight_gradient(grad_PH, *arguments)
        else:
            torch_tiles.add_weight_gradient(grad_PH, *arguments, task.tile, shard.logit_cap)
    return grad_VH


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Sum over the ranks of a group, in place."""
    if group is not None and tensor.numel():
        dist.all_reduce(tensor, op=op, group=group)
