"""Keeps ranks in step whose weights or experts are spread over ranks with other data.

All ranks must take part in each forward and backward of the backbone, in the same order. A rank without inputs for
a slot sends an empty pack. The graph is cut between backbone and heads: after the backward of the heads, ranks agree
which backbones have gradients, and do the backwards of those together, the newest first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_worker.process.agreement import agreement, everyone
from megatron_worker.trainer_rank.graphs import Graphs
from shared.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class _Backbone:
    """The hidden states of one forward: `hidden_NH` with the backbone's graph, `leaf_NH` as the leaf of the heads'."""

    hidden_NH: Tensor
    leaf_NH: Tensor


class Lockstep:
    """Keeps backbones until their backward, or until no rank holds their outputs. Only `cut` is not collective."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self._backbones: dict[int, _Backbone] = {}  # by numbers that are the same on all ranks
        self._graphs = Graphs()
        self._num_cut = 0

    def slots(self, own: Iterable[str | None]) -> set[str | None]:
        """Return the slots that any rank uses. Raises InvalidInput if some ranks keep graphs and others do not."""
        self.release()
        found = everyone(self._world_size, (list(set(own)), torch.is_grad_enabled()))
        if len({keeps_graph for _, keeps_graph in found}) > 1:
            raise InvalidInput("some ranks keep a graph and others are under no_grad; here they go in step", "forward")
        return {name for names, _ in found for name in names}

    def cut(self, hidden_NH: Tensor) -> Tensor:
        """Return the hidden states for the heads, detached from the backbone's graph, which is kept here."""
        if not hidden_NH.requires_grad:
            return hidden_NH
        number, self._num_cut = self._num_cut, self._num_cut + 1
        leaf_NH = hidden_NH.detach().requires_grad_()
        leaf_NH.register_hook(lambda _: self._refuse_done(number))
        self._backbones[number] = _Backbone(hidden_NH, leaf_NH)
        return self._graphs.watch(leaf_NH, str(number))

    def backward(self, heads: Callable[[], None]) -> None:
        """Do the backward of all ranks' losses. `heads` does this rank's as far as the hidden states.

        If `heads` raises on one rank, all ranks raise.
        """
        try:
            with agreement(self._world_size, self._device):
                heads()
        except Exception:
            for backbone in self._backbones.values():
                backbone.leaf_NH.grad = None
            raise
        for number in sorted(self._of_any_rank(self._with_gradient()), reverse=True):
            backbone = self._backbones.pop(number)
            grad_NH, backbone.leaf_NH.grad = backbone.leaf_NH.grad, None
            backbone.hidden_NH.backward(torch.zeros_like(backbone.hidden_NH) if grad_NH is None else grad_NH)

    def release(self) -> None:
        """Drop backbones whose outputs no rank holds any more."""
        if self._backbones:
            alive = self._of_any_rank({number for number in self._backbones if self._graphs.is_alive(str(number))})
            self._backbones = {number: backbone for number, backbone in self._backbones.items() if number in alive}

    def _with_gradient(self) -> set[int]:
        return {number for number, backbone in self._backbones.items() if backbone.leaf_NH.grad is not None}

    def _of_any_rank(self, numbers: set[int]) -> set[int]:
        return set().union(*everyone(self._world_size, list(numbers)))

    def _refuse_done(self, number: int) -> None:
        if number not in self._backbones:
            message = "the backbone of these outputs has gone backward with a loss before: one backward a forward"
            raise InvalidInput(message, "loss")
