"""Divergences of a student's distributions from a teacher's, over the whole vocabulary, some targets at a time.

With t and s the teacher's and the student's probabilities and a the skew, a target's divergence is sum_v f(t_v, s_v):

    forward_kl       KL(t, s)
    reverse_kl       KL(s, t)
    jsd              a KL(t, m) + (1 - a) KL(s, m), m = a t + (1 - a) s    Agarwal et al. 2024, arXiv:2306.13649
    skew_kl          KL(t, a t + (1 - a) s)                                Ko et al. 2024, arXiv:2402.03898
    skew_reverse_kl  KL(s, (1 - a) t + a s)                                ibid.

and with f'_v = s_v df/ds_v its gradient by the student's logit of v, which the temperature divides, is

    (f'_v - s_v sum_u f'_u) / temperature

As f' may gain any multiple of s without changing that, summands s_v are left out of it. Logits of a chunk of targets
are held whole; the forward keeps a row of the hidden state's gradient for each target, as logprobs.py does, and the
backward recomputes the logits for the gradient of a trained embedding, or of an adapter on it. Under tensor parallelism
ranks merge logsumexps, sums and rows; the gradient of the hidden states comes out summed.

If only a teacher's K likeliest ids are known, all other ids are one outcome: they share the rest of the teacher's mass
in the student's proportions. This gives the divergence of both over K + 1 outcomes, and its gradient. It is never above
the divergence of the whole distributions. The token of the row itself is the case K = 1.

Shape suffixes: N targets, X hidden channels followed by an adapter's, V rows of this rank's shard, C targets of a
chunk, K ids that a teacher names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.engine import Batch, Divergence, LikeliestIds, Outputs, Scores, TeacherStates
from megatron_worker.head import torch_tiles
from megatron_worker.head.logprobs import VocabShard, score_targets
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.head.torch_tiles import capped_slope, rows_of_labels

_WORKSPACE_BYTES = 256 << 20
_LOGITS_HELD = 8  # of a chunk, in tensors as wide as the shard
_LEAST_MASS = torch.finfo(torch.float32).eps  # that numbers of a server, told in float32, can leave to others


def score_with_divergence(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    batch: Batch,
    outputs: Outputs,
    shard: VocabShard,
    beside: LmHeadLora | None,
    target_N: Tensor | None = None,
    chunk: int | None = None,
) -> Scores:
    """Score targets as `score_targets` does; with `outputs.divergence` also against the batch's teacher.

    Then the log-probability is a constant, and nothing else is computed. `outputs.rest` is computed
    here, too, as it takes whole logits. It has no gradient.

    Args:
        hidden_NH: of the batch's targets, or of those of `target_N`.
        chunk: targets whose logits are held at a time; None: what the workspace has room for.
    """
    label_N = batch.label_N if target_N is None else batch.label_N[target_N]
    if outputs.divergence is None and not outputs.rest:
        return score_targets(hidden_NH, weight_VH, label_N, outputs, shard, beside=beside)
    if beside is not None:
        hidden_NH, weight_VH = torch.cat([hidden_NH, beside.low_NR], dim=1), weight_VH.detach()
    softmax = _Softmax(shard, outputs.temperature * shard.logit_divisor)
    if chunk is None:
        width = max(1, shard.num_real) * torch.promote_types(torch.float32, hidden_NH.dtype).itemsize
        chunk = max(1, _WORKSPACE_BYTES // (width * _LOGITS_HELD))
    last_VR = None if beside is None else beside.b_VR
    if outputs.divergence is None:
        named = [
            softmax.named(softmax.logits(hidden_CX, weight_VH, last_VR), label_C, outputs.top_k)
            for hidden_CX, label_C in zip(hidden_NH.split(chunk), label_N.split(chunk), strict=True)
        ]
        id_NK, logprob_NK = (torch.cat(each) for each in zip(*named, strict=True))
        return Scores(top_id_NK=id_NK, top_logprob_NK=logprob_NK)
    teacher = batch.teacher
    assert teacher is not None, "the teacher has not computed this bin"
    if target_N is not None and isinstance(teacher, LikeliestIds):
        teacher = LikeliestIds(teacher.id_NK[target_N], teacher.logprob_NK[target_N])
    keep_rows = torch.is_grad_enabled() and hidden_NH.requires_grad
    task = _Task(label_N, teacher, outputs.divergence, softmax, chunk, keep_rows)
    divergence_N, logprob_N = _Diverged.apply(hidden_NH, weight_VH, last_VR, task)
    return Scores(logprob_N=logprob_N, divergence_N=divergence_N)


@dataclass(frozen=True)
class _Softmax:
    """Log-probabilities of this rank's real ids. `temperature`: what capped products are divided by."""

    shard: VocabShard
    temperature: float

    def logits(self, hidden_CX: Tensor, weight_VH: Tensor, last_VR: Tensor | None) -> Tensor:
        """Return logits [C, V] in the softmax's dtype: products of half precision are not rounded to it on CUDA."""
        parts_CX = hidden_CX.split([weight_VH.shape[1], hidden_CX.shape[1] - weight_VH.shape[1]], dim=1)
        logit_CV = self._product(parts_CX[0], weight_VH)
        if last_VR is not None:
            logit_CV += self._product(parts_CX[1], last_VR)
        if (cap := self.shard.logit_cap) is not None:
            logit_CV.div_(cap).tanh_().mul_(cap)
        return logit_CV.div_(self.temperature)

    def _product(self, hidden_CX: Tensor, weight_VX: Tensor) -> Tensor:
        real_VX, dtype = weight_VX[: self.shard.num_real], torch.promote_types(torch.float32, hidden_CX.dtype)
        if hidden_CX.dtype != dtype and hidden_CX.is_cuda:
            return torch.mm(hidden_CX, real_VX.t(), out_dtype=dtype)
        return hidden_CX.to(dtype) @ real_VX.to(dtype).t()

    def logprobs(self, logit_CV: Tensor) -> Tensor:
        return logit_CV - self.over_shards(logit_CV)[:, None]

    def named(self, logit_CV: Tensor, label_C: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Return the `num` likeliest ids, or the label, [C, K + 1], and log-probabilities; the last is all others'."""
        shard, own_CV = self.shard, self.logprobs(logit_CV)
        id_CK = label_C[:, None]
        if num:
            keys_CK = torch_tiles.shifted(torch_tiles.of_logits(logit_CV, num), shard.first)
            _, id_CK = torch_tiles.unpack_keys(torch_tiles.over_shards(keys_CK, shard.group))
        row_CK, owned_CK = rows_of_labels(id_CK, shard.first, shard.num_real)
        padded_CV = torch.nn.functional.pad(own_CV, (0, 1))
        logprob_CK = self.summed(padded_CV.gather(1, row_CK).where(owned_CK, 0.0))
        rest_C = self.over_shards(self.others(padded_CV, row_CK, owned_CK))
        return torch.cat([id_CK, id_CK.new_full((len(id_CK), 1), -1)], 1), torch.cat([logprob_CK, rest_C[:, None]], 1)

    def others(self, padded_CV: Tensor, row_CK: Tensor, owned_CK: Tensor) -> Tensor:
        """Return log-probabilities, which have a column more than the shard, with -inf in the place of named rows."""
        num_rows = padded_CV.shape[1] - 1
        return padded_CV.scatter(1, row_CK.where(owned_CK, num_rows), -torch.inf)[:, :num_rows]

    def over_shards(self, value_CV: Tensor) -> Tensor:
        """Return the logsumexp over the whole vocabulary, [C]."""
        lse_C = value_CV.logsumexp(dim=1)
        if self.shard.group is None:
            return lse_C
        max_C = lse_C.clone()
        dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=self.shard.group)
        max_C.clamp_(min=torch.finfo(max_C.dtype).min)  # -inf if no shard has anything
        return max_C + self.summed((lse_C - max_C).exp()).log()

    def summed(self, value: Tensor) -> Tensor:
        """Sum over all shards, in place."""
        if self.shard.group is not None and value.numel():
            dist.all_reduce(value, group=self.shard.group)
        return value


@dataclass(frozen=True)
class _Task:
    """The inputs of a divergence, except the tensors that have gradients."""

    label_N: Tensor
    teacher: TeacherStates | LikeliestIds
    divergence: Divergence
    softmax: _Softmax
    chunk: int
    keep_rows: bool

    def chunks(
        self, hidden_NX: Tensor, weight_VH: Tensor, last_VR: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield slices of targets with their divergences [C], labels' log-probabilities [C], and by logit [C, V]."""
        softmax = self.softmax
        for start in range(0, len(hidden_NX), self.chunk):
            some = slice(start, min(start + self.chunk, len(hidden_NX)))
            logit_CV = softmax.logits(hidden_NX[some], weight_VH, last_VR)
            slope_CV = capped_slope(logit_CV, softmax.shard.logit_cap, softmax.temperature)
            own_CV = softmax.logprobs(logit_CV)
            row_C, owned_C = rows_of_labels(self.label_N[some], softmax.shard.first, softmax.shard.num_real)
            label_C = torch.zeros_like(owned_C, dtype=own_CV.dtype)
            if softmax.shard.num_real:
                label_C = own_CV.gather(1, row_C[:, None])[:, 0].where(owned_C, label_C)
            value_CV, by_own_CV = _terms(self._teachers(some, own_CV, weight_VH), own_CV, self.divergence)
            sums_3C = softmax.summed(torch.stack([value_CV.sum(1), label_C, by_own_CV.sum(1)]))
            by_logit_CV = by_own_CV - own_CV.exp() * sums_3C[2, :, None]
            by_logit_CV = by_logit_CV if slope_CV is None else by_logit_CV * slope_CV
            yield some, sums_3C[0], sums_3C[1], by_logit_CV / softmax.temperature

    def _teachers(self, some: slice, own_CV: Tensor, weight_VH: Tensor) -> Tensor:
        """Return the teacher's log-probabilities, [C, V]."""
        match self.teacher:
            case TeacherStates(hidden_NH=hidden_NH, low_NR=low_NR, b_VR=b_VR):
                states_CX = hidden_NH[some] if low_NR is None else torch.cat([hidden_NH[some], low_NR[some]], dim=1)
                return self.softmax.logprobs(self.softmax.logits(states_CX, weight_VH, b_VR))
            case LikeliestIds(id_NK=id_NK, logprob_NK=logprob_NK):
                return self._of_named(id_NK[some].long(), logprob_NK[some].to(own_CV.dtype), own_CV)

    def _of_named(self, id_CK: Tensor, logprob_CK: Tensor, own_CV: Tensor) -> Tensor:
        num_rows = own_CV.shape[1]
        row_CK, owned_CK = rows_of_labels(id_CK, self.softmax.shard.first, num_rows)
        padded_CV = torch.nn.functional.pad(own_CV, (0, 1))  # a column for ids of other shards, which is cut off
        others_CV = self.softmax.others(padded_CV, row_CK, owned_CK)
        own_left_C = self.softmax.over_shards(others_CV).clamp(min=torch.finfo(own_CV.dtype).min)
        left_C = torch.where(id_CK[:, -1] == -1, logprob_CK[:, -1], _left(logprob_CK))
        padded_CV += (left_C - own_left_C)[:, None]
        return padded_CV.scatter(1, row_CK.where(owned_CK, num_rows), logprob_CK)[:, :num_rows]


def _left(logprob_CK: Tensor) -> Tensor:
    """Return the logarithm of the mass that a teacher's numbers leave to ids without any.

    One number near 0 is exact. Several are each rounded: a rest below `_LEAST_MASS` would be their rounding errors.
    """
    exact_CK = logprob_CK.double()
    mass_C = -exact_CK[:, 0].expm1() - exact_CK[:, 1:].exp().sum(dim=1)
    least = _LEAST_MASS if exact_CK.shape[1] > 1 else 0.0
    return mass_C.where(mass_C > least, _LEAST_MASS).log().to(logprob_CK.dtype)


def _terms(teacher_CV: Tensor, own_CV: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return f and f' of each id, from log-probabilities."""
    a = divergence.skew
    own = own_CV.exp()
    match divergence.kind:
        case "forward_kl":
            teacher = teacher_CV.exp()
            return teacher * (teacher_CV - own_CV), -teacher
        case "reverse_kl":
            value = own * (own_CV - teacher_CV)
            return value, value
        case "jsd":
            mixed_CV = _mixed(teacher_CV, own_CV, a)
            of_own = (1 - a) * own * (own_CV - mixed_CV)
            return a * teacher_CV.exp() * (teacher_CV - mixed_CV) + of_own, of_own
        case "skew_kl":
            mixed_CV = _mixed(teacher_CV, own_CV, a)
            return teacher_CV.exp() * (teacher_CV - mixed_CV), -(1 - a) * (teacher_CV + own_CV - mixed_CV).exp()
        case "skew_reverse_kl":
            mixed_CV = _mixed(teacher_CV, own_CV, 1 - a)
            value = own * (own_CV - mixed_CV)
            return value, value - a * (2 * own_CV - mixed_CV).exp()


def _mixed(teacher_CV: Tensor, own_CV: Tensor, part: float) -> Tensor:
    """Return log(part * teacher + (1 - part) * own)."""
    return torch.logaddexp(teacher_CV + torch.tensor(part).log(), own_CV + torch.tensor(1 - part).log())


class _Diverged(torch.autograd.Function):
    """`last_VR`: the last columns of the weight, if they alone have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NX: Tensor, weight_VH: Tensor, last_VR: Tensor | None, task: _Task
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.float32, hidden_NX.dtype)
        divergence_N, logprob_N = hidden_NX.new_empty(2, len(hidden_NX), dtype=dtype)
        rows_NX = hidden_NX.new_empty(hidden_NX.shape, dtype=dtype) if task.keep_rows else None
        reals = [x[: task.softmax.shard.num_real] for x in (weight_VH, last_VR) if x is not None]
        for some, divergence_N[some], logprob_N[some], by_logit_CV in task.chunks(hidden_NX, weight_VH, last_VR):
            if rows_NX is not None:
                rows_NX[some] = torch.cat([by_logit_CV.to(real_VX.dtype) @ real_VX for real_VX in reals], dim=1)
        ctx.task = task
        rows_NX = rows_NX if rows_NX is None else task.softmax.summed(rows_NX)
        ctx.save_for_backward(hidden_NX, weight_VH, last_VR, rows_NX)
        ctx.mark_non_differentiable(logprob_N)
        return divergence_N, logprob_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NX, weight_VH, last_VR, rows_NX = ctx.saved_tensors
        by_hidden, by_weight, by_last = ctx.needs_input_grad[:3]
        grad_NX = (rows_NX * grad_N[:, None]).to(hidden_NX.dtype) if by_hidden else None
        grad_VX = None
        if by_weight or by_last:
            width, num_real = (last_VR if by_last else weight_VH).shape[1], ctx.task.softmax.shard.num_real
            grad_VX = grad_N.new_zeros(len(weight_VH), width)
            for some, _divergence_C, _logprob_C, by_logit_CV in ctx.task.chunks(hidden_NX, weight_VH, last_VR):
                by_logit_CV *= grad_N[some, None]
                grad_VX[:num_real] += by_logit_CV.t() @ hidden_NX[some, -width:].to(grad_VX.dtype)
        return grad_NX, *((None, grad_VX) if by_last else (grad_VX, None)), None
