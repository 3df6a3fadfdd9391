"""Tracks which slots have a live autograd graph, by objects that autograd saves for the backward and frees with it."""

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class _Alive:
    """An object that only a graph holds, so that it lives as long as the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Graphs:
    """The live graphs of slots. A graph lives until a backward frees it, or its outputs are no longer referenced."""

    def __init__(self) -> None:
        self._alive: defaultdict[str | None, weakref.WeakSet[_Alive]] = defaultdict(weakref.WeakSet)

    def watch(self, tensor: Tensor, slot: str | None) -> Tensor:
        """Return the tensor with its graph counted as the slot's; a tensor without a graph is returned unchanged."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor

        def keep(saved: Tensor) -> _Alive:
            token = _Alive(saved.detach())
            self._alive[slot].add(token)
            return token

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda token: token.tensor):
            watched: Tensor = _Identity.apply(tensor)
        return watched

    def is_alive(self, slot: str | None) -> bool:
        return len(self._alive[slot]) > 0

    @property
    def any_alive(self) -> bool:
        return any(map(len, self._alive.values()))
