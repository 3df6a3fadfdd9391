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
    """The outputs of one forward for heads: hidden states, and a trained embedding if it is not the parameter itself.

    `made` has the backbone's graph; `leaves` are the same as leaves of the heads' graphs.
    """

    made: list[Tensor]
    leaves: list[Tensor]


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

    def cut(self, hidden_NH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and embedding for the heads, detached from the backbone's graph, which is kept here."""
        if not hidden_NH.requires_grad:
            return hidden_NH, weight_VH
        number, self._num_cut = self._num_cut, self._num_cut + 1
        made = [hidden_NH, weight_VH] if weight_VH.grad_fn is not None else [hidden_NH]
        leaves = [tensor.detach().requires_grad_() for tensor in made]
        leaves[0].register_hook(lambda _: self._refuse_done(number))
        self._backbones[number] = _Backbone(made, leaves)
        return self._graphs.watch(leaves[0], str(number)), leaves[1] if len(leaves) > 1 else weight_VH

    def backward(self, heads: Callable[[], None]) -> None:
        """Do the backward of all ranks' losses. `heads` does this rank's as far as the hidden states.

        If `heads` raises on one rank, all ranks raise.
        """
        try:
            with agreement(self._world_size, self._device):
                heads()
        except Exception:
            for backbone in self._backbones.values():
                for leaf in backbone.leaves:
                    leaf.grad = None
            raise
        graded = {number for number, backbone in self._backbones.items() if backbone.leaves[0].grad is not None}
        for number in sorted(self._of_any_rank(graded), reverse=True):
            backbone = self._backbones.pop(number)
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in backbone.leaves]
            for leaf in backbone.leaves:
                leaf.grad = None
            torch.autograd.backward(backbone.made, gradients)

    def release(self) -> None:
        """Drop backbones whose outputs no rank holds any more."""
        if self._backbones:
            alive = self._of_any_rank({number for number in self._backbones if self._graphs.is_alive(str(number))})
            self._backbones = {number: backbone for number, backbone in self._backbones.items() if number in alive}

    def _of_any_rank(self, numbers: set[int]) -> set[int]:
        return set().union(*everyone(self._world_size, list(numbers)))

    def _refuse_done(self, number: int) -> None:
        if number not in self._backbones:
            message = "the backbone of these outputs has gone backward with a loss before: one backward a forward"
            raise InvalidInput(message, "loss")
