"""AdamW (adamw.py) on float32 masters: one flat buffer each for weights, gradients and both moments."""

import math
from collections.abc import Collection

import torch
from torch.nn import Parameter

from megatron_worker.adamw import sum_of_squares, update
from megatron_worker.engine import Norms
from megatron_worker.flat import Flat
from megatron_worker.megatron.mesh import Mesh
from shared.jobs import Adam


class Optimizer:
    """Trains parameters that are views of one `Flat`, whose first `num_sharded` elements differ between tp ranks.

    Gradients are accumulated in float32, whatever the weights' dtype. `partial`: parameters that are replicated over
    tp, but see only this rank's heads, so that their gradients must be added up over tp.
    """

    def __init__(
        self,
        parameters: dict[str, Parameter],
        working: Flat,
        mesh: Mesh,
        num_sharded: int,
        partial: Collection[str] = (),
    ) -> None:
        self._mesh = mesh
        self._parameters = parameters
        self._partial = tuple(sorted(partial))
        self._num_sharded = num_sharded
        self._working = working
        self.step_count = 0
        exact = working.buffer.dtype == torch.float32
        self.master = working if exact else working.like(torch.float32)
        if not exact:
            self.master.buffer.copy_(working.buffer)
        self.grad, self.exp_avg, self.exp_avg_sq = (working.like(torch.float32) for _ in range(3))
        self._hooks = [self._attach(name, parameter) for name, parameter in parameters.items()]

    def _attach(self, name: str, parameter: Parameter) -> torch.utils.hooks.RemovableHandle:
        grad = self.grad.views[name]
        parameter.requires_grad_(True)
        if parameter.dtype == torch.float32:
            parameter.grad = grad  # autograd adds in place

        def accumulate(parameter: Parameter) -> None:
            if parameter.grad is not None and parameter.grad is not grad:
                grad.add_(parameter.grad)
                parameter.grad = None

        return parameter.register_post_accumulate_grad_hook(accumulate)

    def flats(self) -> list[Flat]:
        """Every buffer of its own; the working weights are their owner's."""
        masters = [] if self.master is self._working else [self.master]
        return [*masters, self.grad, self.exp_avg, self.exp_avg_sq]

    def detach(self) -> None:
        """Freeze the parameters and let go of their gradients."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters.values():
            parameter.grad = None
            parameter.requires_grad_(False)

    def zero_grad(self) -> None:
        self.grad.buffer.zero_()

    def refresh_working(self) -> None:
        """Round the masters into the weights that the model computes with."""
        if self.master is not self._working:
            self._working.buffer.copy_(self.master.buffer)

    def step(self, adam: Adam, learning_rate: float, denominator: float) -> Norms:
        """Reduce, divide, clip, update, zero. A norm that is not finite only zeroes the gradients."""
        return self.apply(adam, learning_rate, self.reduce(denominator))

    @torch.no_grad()
    def reduce(self, denominator: float) -> float:
        """Sum the gradients over all ranks and divide them. Returns their norm; `apply` or `zero_grad` comes next."""
        self._reduce()
        self.grad.buffer.div_(denominator)
        return self._norm()

    @torch.no_grad()
    def apply(self, adam: Adam, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce` left, update, zero. A norm that is not finite only zeroes the gradients."""
        if not math.isfinite(norm):
            self.zero_grad()
            return Norms(norm, clipped=False)
        clipped = 0 < adam.clip_norm < norm
        if clipped:
            self.grad.buffer.mul_(adam.clip_norm / (norm + 1e-6))
        self.step_count += 1
        self._update(adam, learning_rate)
        self.refresh_working()
        self.zero_grad()
        return Norms(norm, clipped)

    def _reduce(self) -> None:
        if self._partial and self._mesh.tp_group is not None:
            partial = torch.cat([self.grad.views[name].reshape(-1) for name in self._partial])
            self._mesh.sum_over_tp(partial)
            sizes = [self.grad.views[name].numel() for name in self._partial]
            for name, summed in zip(self._partial, partial.split(sizes), strict=True):
                self.grad.views[name].copy_(summed.view_as(self.grad.views[name]))
        self._mesh.sum_over_dp(self.grad.buffer)

    def _norm(self) -> float:
        """The gradient's norm over all ranks: what is sharded is added up over tp, what is replicated counts once."""
        sharded, replicated = self.grad.buffer.tensor_split((self._num_sharded,))
        squares = torch.stack([sum_of_squares(sharded), sum_of_squares(replicated)])
        self._mesh.sum_over_tp(squares[0])
        return float(squares.sum().sqrt())

    def _update(self, adam: Adam, learning_rate: float) -> None:
        buffers = (self.master.buffer, self.grad.buffer, self.exp_avg.buffer, self.exp_avg_sq.buffer)
        update(*buffers, adam, learning_rate, self.step_count)
