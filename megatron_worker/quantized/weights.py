"""Frozen weights that are held as codes, and products with them.

A weight is decoded for a product and freed after it, in the forward and in the backward: a pass keeps none of it, and
the gradient of the input is that of the product that was computed.

Shape suffixes: T tokens, I input features, O output features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_worker.quantized.tensors import QuantizedTensor


class WholeWeights(dict[str, Any]):
    """Parameters by name, plain ones first; quantized ones are made whole whenever they are looked up."""

    def __getitem__(self, name: str) -> Tensor:
        return whole(super().__getitem__(name))


def whole(weight: Tensor | QuantizedTensor) -> Tensor:
    """Return the weight that is multiplied by."""
    return weight if isinstance(weight, Tensor) else weight.whole()


def quantized_linear(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    bias_O: Tensor | None,
    forward_group: dist.ProcessGroup | None = None,
    backward_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Apply a frozen linear, its weight [O, I]. The output, or the input's gradient, is summed over a group."""
    output: Tensor = _Linear.apply(x, lambda: whole(weight), bias_O, forward_group, backward_group)
    return output


def quantized_product(bias_O: Tensor, x_TI: Tensor, weight: QuantizedTensor) -> Tensor:
    """Return x W + bias, as torch.addmm does with a weight [I, O]."""
    output_TO: Tensor = _Linear.apply(x_TI, lambda: weight.whole().t(), bias_O, None, None)
    return output_TO


class _Linear(torch.autograd.Function):
    """y = x W^T + bias, both frozen. `matrix` makes W, [O, I]; of all that only the input's gradient is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Callable[[], Tensor],
        bias_O: Tensor | None,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.matrix, ctx.group = matrix, backward_group
        output = F.linear(x, matrix(), bias_O)
        if forward_group is not None:
            dist.all_reduce(output, group=forward_group)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad @ ctx.matrix()
        if ctx.group is not None:
            dist.all_reduce(grad_x, group=ctx.group)
        return grad_x, None, None, None, None
