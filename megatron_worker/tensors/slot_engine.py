"""The base class of engines, with all that depends only on an engine's slots."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from longshore.training import Full, Lora, Optimizer
from megatron_worker.engine import (
    Batch,
    Facts,
    LossFunction,
    Memory,
    Norms,
    Outgoing,
    Outputs,
    Part,
    PartPlaces,
    Scores,
    Where,
)
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.teachers import TeacherStates
from megatron_worker.tensors.adapter_slots import Slots
from megatron_worker.tensors.greedy import greedy


class Engine(ABC):
    """See the docstring of megatron_worker/engine.py. An engine holds one base model and any number of named adapter
    slots beside it, which may all be trained. Forwards, backwards and steps use the active one."""

    _slots: Slots[Any, Any]
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
        masks, name = self._slots.masks, self._slots.active
        moment = masks.moment

        def beside_its_adapter(*args: Any, **kwargs: Any) -> Any:
            if self._slots.active != name:
                self.set_adapter(name)
            return forward(*args, **kwargs)

        again = partial(copy_context().run, beside_its_adapter)  # of the FSDP engine: the bin's forests
        how: Any = {"context_fn": lambda: (nullcontext(), masks.at(moment)), "preserve_rng_state": False}
        return checkpoint(again, *args, use_reentrant=False, **how, **kwargs)

    # What to train: one of these is called before the first step of a job.

    def add_adapter(self, name: str, lora: Lora, seed: int) -> None:
        """A fresh adapter, trainable and active: A Kaiming-uniform from the seed, equal under every layout; B zero."""
        self._slots.add_adapter(name, lora, seed)

    def load_adapter(self, name: str, folder: Path, lora: Lora | None, trainable: bool, seed: int = 0) -> None:
        """Load a PEFT adapter from a folder and make it active. `seed`: of its dropout.

        Raises InvalidInput if it is missing, damaged, or not of `lora`'s shape.
        """
        self._slots.load_adapter(name, folder, lora, trainable, seed)

    def drop_slot(self, slot: str | None) -> None:
        """Forget a slot, if it is there, with its gradients and moments. None is active if it was. Collective.

        Slot None: end the training of the base, whose published weights are read again when they are next needed.
        """
        self._slots.drop(slot)

    def set_adapter(self, name: str | None) -> None:
        """Use this slot in the following calls, or none."""
        self._slots.activate(name)

    def train_full(self, full: Full, seed: int = 0) -> None:
        """Make every weight of the base trainable. `seed`: of its scalar head, if it has one."""
        self._slots.train_base(full, seed)

    def train_own(self, slot: str | None, parameters: Mapping[str, Parameter]) -> None:
        """Train parameters of the user's code with a slot: they step together, and `save` and `load` handle both.

        They are whole and equal on every rank. Ranks that share data must compute the same with them.
        """
        self._slots.train_own(slot, parameters)

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
        training = self._slots.training
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
        return self._slots.training.reduce(denominator)

    def apply_gradients(self, adam: Optimizer, learning_rate: float, norm: float) -> Norms:
        """Clip what `reduce_gradients` left, step, zero. A norm that is not finite changes no weight."""
        return self._slots.training.apply(adam, learning_rate, norm)

    def zero_grad(self) -> None:
        if self._slots.is_training:
            self._slots.training.zero_grad()

    def greedy(self, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]) -> list[list[int]]:
        """Greedy continuations of token ids, the stop id left out; the same on every rank."""
        return greedy(self.forward, self.facts.device, prompts, max_tokens, stop_ids)

    # State.

    def save(self, folder: Path) -> None:
        """Write `weights/` (PEFT adapter or Hugging Face model) and `optimizer/`; rank 0 writes. Not sealed."""
        self._slots.save(folder)

    def write_base(self, folder: Path) -> None:
        """Write the base as Hugging Face's folder; rank 0 writes. Collective."""
        self._slots.write_base(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, under any layout, into what is being trained. Raises InvalidInput on mismatch."""
        self._slots.load(folder)

    def reset_moments(self) -> None:
        """Set the optimizer's moments and step count to zero."""
        self._slots.reset_moments()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors of the base, one at a time, on every rank."""
        return self._slots.named_weights()

    def outgoing(self, slot: str | None) -> Outgoing:
        """Return a slot's weights (None: the base's) for a weight sync. Read all of them before they change."""
        return self._slots.outgoing(slot)

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield PEFT's names and whole float32 tensors of a slot, one at a time, on every rank."""
        return self._slots.adapter_weights(name)

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
        self._slots.residency.place(everything, slots=slots, **parts)

    def training(self) -> AbstractContextManager[None]:
        """Have the base and all of the active slot on the device in a `with` block, and afterwards all where it was."""
        return self._slots.residency.training(self._slots.active)

    def scoring(self) -> AbstractContextManager[None]:
        """Have the base and the active slot's weights on the device in a `with` block, and no optimizer state."""
        return self._slots.residency.scoring(self._slots.active)

    def memory(self) -> Memory:
        return self._slots.residency.memory()

    def slot_bytes(self, trainable: Lora | Full) -> Mapping[Part, int]:
        """Count the bytes that a slot takes on this rank's device while it is trained, without making it.

        Exact. `weights` of Full are 0: those of the base are there in any case.
        """
        return self._slots.slot_bytes(trainable)


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
