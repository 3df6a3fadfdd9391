"""The base class of engines, with all that depends only on an engine's slots."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longshore.training import Optimizer
from megatron_worker.engine import (
    Batch,
    Facts,
    LossFunction,
    Memory,
    Norms,
    Outputs,
    PartPlaces,
    Scores,
    Where,
)
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.teachers import TeacherStates
from megatron_worker.tensors.adapter_slots import AdapterT, OptimizerT, Slots
from megatron_worker.tensors.greedy import greedy


class Engine(Slots[AdapterT, OptimizerT]):
    """See the docstring of megatron_worker/engine.py. An engine holds one base model and any number of named adapter
    slots beside it, which may all be trained. Forwards, backwards and steps use the active one."""

    facts: Facts
    recompute = False
    """Layers keep their inputs alone of a pass, and compute again in its backward (Chen et al. 2016, arXiv:1604.06174).
    Gradients are the same bits. A backward may leave the adapter of its forward active."""

    def _let_recompute(self, layers: Iterable[torch.nn.Module]) -> None:
        for layer in layers:
            layer.forward = partial(self._run_layer, layer.forward)

    def _run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; with `recompute`, a graph keeps only the layer's inputs.

        The backward has the same bits: masks of dropout are those of the bin, and nothing else is drawn. Megatron's
        recomputation is not used: it needs CUDA's random state, passes a layer only tensors, and makes no gradients of
        adapters if a layer's input needs none. Several forwards may precede a backward, each with another adapter.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        masks, name = self.masks, self.active
        moment = masks.moment

        def beside_its_adapter(*args: Any, **kwargs: Any) -> Any:
            if self.active != name:
                self.set_adapter(name)
            return forward(*args, **kwargs)

        again = partial(copy_context().run, beside_its_adapter)  # of the FSDP engine: the bin's forests
        how: Any = {"context_fn": lambda: (nullcontext(), masks.at(moment)), "preserve_rng_state": False}
        return checkpoint(again, *args, use_reentrant=False, **how, **kwargs)

    # A step.

    @property
    @abstractmethod
    def needs_lockstep(self) -> bool:
        """True if all ranks must do the same forwards and backwards in the same order, if need be of empty batches."""

    @property
    @abstractmethod
    def vocab_shard(self) -> VocabShard:
        """The rows of the output embedding that this rank's heads have."""

    @abstractmethod
    def forward(self, batch: Batch, outputs: Outputs) -> Scores:
        """Score a bin's targets. Keeps the graph unless under `torch.no_grad`; under pp only there."""

    @abstractmethod
    def teacher_states(self, batch: Batch) -> TeacherStates | None:
        """Compute what a bin's `teacher` is, by the active slot; None on ranks that score nothing. Under no_grad."""

    @abstractmethod
    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the targets' hidden states after the final norm, [N, H], and the output embedding for their heads.

        The embedding has only this rank's rows, [V, H]. Hidden states are equal on all ranks that share a
        vocabulary, and heads must give them the complete gradient on each.
        """

    @abstractmethod
    def forward_backward(self, batch: Batch, loss: LossFunction) -> dict[str, Tensor]:
        """Add a bin's gradients (of sums) to what is accumulated. Returns detached sums of this rank's bin."""

    @abstractmethod
    def forward_backward_all(
        self, batches: Iterable[Batch], loss: LossFunction
    ) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        """Like `forward_backward` for all bins of a step, as a pipeline needs. Yields each bin with its sums.

        The iterator must be exhausted.
        """

    @abstractmethod
    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Combine the sums of all data-parallel ranks (sums.py). Every rank gets the same numbers."""

    def optim_step(self, adam: Optimizer, learning_rate: float, denominator: float) -> Norms:
        """Divide the accumulated gradients by `denominator`, clip, step, zero. Non-finite norms change no weight."""
        training = self.trained
        sums = self._noise_sums(training.square_of_own_gradient(), training.weight) if adam.noise_scale else None
        norms = training.apply(adam, learning_rate, training.reduce(denominator))
        return norms if sums is None else replace(norms, noise=gradient_noise(sums, norms.grad_norm * denominator))

    def _noise_sums(self, square: Tensor, weight: Tensor | float) -> dict[str, float]:
        """Return what `gradient_noise` needs, over ranks that have bins of their own each. Collective."""
        weight = torch.as_tensor(weight, dtype=torch.float64, device=square.device)
        has_bins = weight > 0
        square = square / torch.where(has_bins, weight, 1.0)
        return self.reduce({"square": square, "weight": weight, "ranks": has_bins.double()})

    def reduce_gradients(self, denominator: float) -> float:
        """Add the active slot's gradients up over all ranks, and divide them. Returns their norm over all ranks."""
        return self.trained.reduce(denominator)

    def apply_gradients(self, adam: Optimizer, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce_gradients` left, step, zero. A norm that is not finite changes no weight."""
        return self.trained.apply(adam, learning_rate, norm)

    def zero_grad(self) -> None:
        if self.is_training:
            self.trained.zero_grad()

    def greedy(self, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]) -> list[list[int]]:
        """Greedy continuations of token ids, the stop id left out; the same on every rank."""
        return greedy(self.forward, self.facts.device, prompts, max_tokens, stop_ids)

    # Residency: a part that is not on the device has storages of size 0 there.

    def place(
        self,
        everything: Where | None = None,
        *,
        slots: Collection[str | None] | None = None,
        **parts: Unpack[PartPlaces],
    ) -> None:
        """Move parts of some slots (None among them: the base), or of all, to the device or to the host, or drop them.

        Bits are kept, except of dropped parts: the base is read again from its files, gradients are zero. Raises
        ValueError if nothing else holds a part that is to be dropped.
        """
        self.residency.place(everything, slots=slots, **parts)

    def training(self) -> AbstractContextManager[None]:
        """Have the base and all of the active slot on the device in a `with` block, and afterwards all where it was."""
        return self.residency.training(self.active)

    def scoring(self) -> AbstractContextManager[None]:
        """Have the base and the active slot's weights on the device in a `with` block, and no optimizer state."""
        return self.residency.scoring(self.active)

    def memory(self) -> Memory:
        return self.residency.memory()


def gradient_noise(sums: Mapping[str, float], norm: float) -> dict[str, float]:
    """Estimate the gradient noise scale, trace / signal (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).

    The mean gradient G_w of a weight w has E |G_w|^2 = signal + trace / w, with `signal` the true gradient's square and
    `trace` that of the covariance of weight 1. Ranks with w_r each, and all together, are two such sizes. Both
    estimates are unbiased whatever the w_r; their quotient is not, and is left out if signal is not positive.

    Args:
        sums: over the ranks with a weight: `square`, of w_r |G_r|^2; `weight`, of w_r; `ranks`, their number.
        norm: of the sum of all gradients.
    """
    weight, ranks = sums["weight"], sums["ranks"]
    if ranks < 2:
        return {}
    square = (norm / weight) ** 2
    trace = (sums["square"] - weight * square) / (ranks - 1)
    signal = square - trace / weight
    parts = {"grad_noise_trace": trace, "grad_signal": signal}
    return parts | ({"grad_noise_scale": trace / signal} if signal > 0 else {})
