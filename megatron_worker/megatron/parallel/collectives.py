"""Collectives over rows (the first dimension) that know their own derivative.

Groups of one cost nothing. Autograd functions here are once differentiable, and their backwards are collectives too:
every rank of the group must come to them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.megatron.parallel.mesh import Group


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Every rank's rows, one rank's after another's. Ranks go different ways with them: gradients are added up."""
    return x if group.size == 1 else _applied(_Gather, x, group)


def sum_rows(x: Tensor, group: Group) -> Tensor:
    """The sum over the group of this rank's equal share of the rows."""
    return x if group.size == 1 else _applied(_SumShares, x, group)


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's equal share of rows that all ranks have alike; the gradient of the others comes from the others."""
    return x if group.size == 1 else _applied(_OwnShare, x, group)


def gather_alike(x: Tensor, group: Group) -> Tensor:
    """Every rank's rows, for all ranks to do the same with: the gradient is the same on all, and is not added up."""
    return x if group.size == 1 else _applied(_GatherAlike, x, group)


def sum_alike(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, for all ranks to do the same with: the gradient is the same on all."""
    return x if group.size == 1 else _applied(_SumAlike, x, group)


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Rows for each rank, one's after another's, for those that each has for this one. Gradients go the way back."""
    if group.size == 1:
        return x
    result: Tensor = _Exchange.apply(x, sent, received, group)
    return result


def _applied(function: type[torch.autograd.Function], x: Tensor, group: Group) -> Tensor:
    result: Tensor = function.apply(x, group)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.join_shares(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_shares(grad), None


class _SumShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum_shares(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.join_shares(grad), None


class _OwnShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size)[group.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.join_shares(grad), None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.join_shares(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size)[ctx.group.rank], None


class _SumAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone()
        group.sum(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return group.exchange(x, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.exchange(grad, ctx.received, ctx.sent), None, None, None
