"""Ranks that must go in step: their weights, or experts, are spread over ranks that have other data than they.

Each forward and backward of the trunk then wants all ranks, in the same order, whatever each of them asks. A rank that
has nothing for a slot sends an empty pack through. The graph is cut between trunk and heads: once the heads have told
the gradients of the hidden states, ranks agree which trunks go backward, and do those together, the newest first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_worker.process.agreement import agreement, everyone
from megatron_worker.trainer_rank.graphs import Graphs
from shared.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class _Trunk:
    """A forward's hidden states, and the same again where the heads' graph begins."""

    hidden_NH: Tensor
    leaf_NH: Tensor


class InStep:
    """Every method but `cut` is collective. A trunk is kept until it has gone backward, or no rank holds outputs."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self._trunks: dict[int, _Trunk] = {}  # by numbers that are alike on all ranks
        self._graphs = Graphs()
        self._num_cut = 0

    def slots(self, own: Iterable[str | None]) -> set[str | None]:
        """Those that any rank asks something of. Raises InvalidInput when some ranks keep graphs and others do not."""
        self.release()
        found = everyone(self._world_size, (set(own), torch.is_grad_enabled()))
        if len({keeps_graph for _, keeps_graph in found}) > 1:
            raise InvalidInput("some ranks keep a graph and others are under no_grad; here they go in step", "forward")
        return {name for names, _ in found for name in names}

    def cut(self, hidden_NH: Tensor) -> Tensor:
        """The hidden states for the heads, without the trunk's graph, which is kept here."""
        if not hidden_NH.requires_grad:
            return hidden_NH
        number, self._num_cut = self._num_cut, self._num_cut + 1
        leaf_NH = hidden_NH.detach().requires_grad_()
        leaf_NH.register_hook(lambda _: self._refuse_done(number))
        self._trunks[number] = _Trunk(hidden_NH, leaf_NH)
        return self._graphs.watch(leaf_NH, str(number))

    def backward(self, heads: Callable[[], None]) -> None:
        """`heads` does the backward of this rank's loss, as far as to the hidden states; what it raises, all raise."""
        try:
            with agreement(self._world_size, self._device):
                heads()
        except Exception:
            for trunk in self._trunks.values():
                trunk.leaf_NH.grad = None
            raise
        for number in sorted(self._of_any_rank(self._with_gradient()), reverse=True):
            trunk = self._trunks.pop(number)
            grad_NH, trunk.leaf_NH.grad = trunk.leaf_NH.grad, None
            trunk.hidden_NH.backward(torch.zeros_like(trunk.hidden_NH) if grad_NH is None else grad_NH)

    def release(self) -> None:
        """Let go of trunks whose outputs no rank holds any more."""
        if self._trunks:
            alive = self._of_any_rank({number for number in self._trunks if self._graphs.is_alive(str(number))})
            self._trunks = {number: trunk for number, trunk in self._trunks.items() if number in alive}

    def _with_gradient(self) -> set[int]:
        return {number for number, trunk in self._trunks.items() if trunk.leaf_NH.grad is not None}

    def _of_any_rank(self, numbers: set[int]) -> set[int]:
        return set().union(*everyone(self._world_size, numbers))

    def _refuse_done(self, number: int) -> None:
        if number not in self._trunks:
            message = "the trunk of these outputs has gone backward with a loss before: one backward a forward"
            raise InvalidInput(message, "loss")
