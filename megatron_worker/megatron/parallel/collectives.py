"""Collectives over rows (the first dimension) as differentiable linear maps, whose gradients are their transposes.

In groups of one they cost nothing. Their backwards are collectives, too: every rank of the group must take part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.megatron.parallel.mesh import Group


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[..., Tensor], transpose: Callable[..., Tensor], *constants: Tensor
    ) -> Tensor:
        ctx.transpose = transpose
        ctx.save_for_backward(*constants)
        return forward(x, *constants)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        constants = ctx.saved_tensors  # read once: under recomputation, a checkpoint gives them only once
        return ctx.transpose(grad, *constants), None, None, *(None for _ in constants)


def linear_map(
    x: Tensor, forward: Callable[..., Tensor], transpose: Callable[..., Tensor], *constants: Tensor
) -> Tensor:
    """Return `forward(x, *constants)`, whose gradient is `transpose(grad, *constants)`; differentiable once."""
    result: Tensor = _LinearMap.apply(x, forward, transpose, *constants)
    return result


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Gather every rank's rows. Ranks may use them differently, so gradients are summed over ranks."""
    return x if group.size == 1 else linear_map(x, group.join_shares, group.sum_shares)


def sum_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's equal share of the rows, summed over the group."""
    return x if group.size == 1 else linear_map(x, group.sum_shares, group.join_shares)


def own_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's equal share of rows that all ranks have; other rows' gradients come from other ranks."""
    return x if group.size == 1 else linear_map(x, lambda x: _share(x, group).clone(), group.join_shares)


def gather_alike(x: Tensor, group: Group) -> Tensor:
    """Gather every rank's rows. All ranks must compute the same with them, as equal gradients are not summed."""
    return x if group.size == 1 else linear_map(x, group.join_shares, lambda grad: _share(grad, group))


def sum_alike(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the group. All ranks must compute the same with it, as equal gradients are not summed."""

    def total(x: Tensor) -> Tensor:
        x = x.clone()
        group.sum(x)
        return x

    return x if group.size == 1 else linear_map(x, total, lambda grad: grad)


def alike_over(weight: Tensor, group: Group) -> Tensor:
    """Return a weight whose gradient is equal on all ranks of the group, and is summed over them later."""
    return weight if group.size == 1 else linear_map(weight, lambda x: x.view_as(x), lambda grad: grad / group.size)


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send rows to each rank and return the received rows, in the order of ranks. Gradients go the way back."""
    if group.size == 1:
        return x
    return linear_map(x, lambda x: group.exchange(x, sent, received), lambda grad: group.exchange(grad, received, sent))


def _share(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size)[group.rank]
