"""The parts of an engine that depend only on its slots, the same for all engines."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from longshore.training import Full, Lora, Optimizer
from megatron_worker.engine import Memory, Norms, Outgoing, Part, PartPlaces, Where
from megatron_worker.tensors.adapter_slots import AdapterT, OptimizerT, Slots


class SlottedEngine(Generic[AdapterT, OptimizerT]):
    """The part of `megatron_worker.engine.Engine` that only the slots do. A subclass sets `_slots`."""

    _slots: Slots[AdapterT, OptimizerT]
    recompute = False

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

    # What is trained.

    def add_adapter(self, name: str, lora: Lora, seed: int) -> None:
        self._slots.add_adapter(name, lora, seed)

    def load_adapter(self, name: str, folder: Path, lora: Lora | None, trainable: bool, seed: int = 0) -> None:
        self._slots.load_adapter(name, folder, lora, trainable, seed)

    def drop_slot(self, slot: str | None) -> None:
        self._slots.drop(slot)

    def set_adapter(self, name: str | None) -> None:
        self._slots.activate(name)

    def train_full(self, full: Full, seed: int = 0) -> None:
        self._slots.train_base(full, seed)

    def train_own(self, slot: str | None, parameters: Mapping[str, Parameter]) -> None:
        self._slots.train_own(slot, parameters)

    # A step.

    def optim_step(self, adam: Optimizer, learning_rate: float, denominator: float) -> Norms:
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

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        raise NotImplementedError

    def reduce_gradients(self, denominator: float) -> float:
        return self._slots.training.reduce(denominator)

    def apply_gradients(self, adam: Optimizer, learning_rate: float, norm: float) -> Norms:
        return self._slots.training.apply(adam, learning_rate, norm)

    def zero_grad(self) -> None:
        if self._slots.is_training:
            self._slots.training.zero_grad()

    # State.

    def save(self, folder: Path) -> None:
        self._slots.save(folder)

    def write_base(self, folder: Path) -> None:
        """Write the base as Hugging Face's folder; rank 0 writes. Collective."""
        self._slots.write_base(folder)

    def load(self, folder: Path) -> None:
        self._slots.load(folder)

    def reset_moments(self) -> None:
        self._slots.reset_moments()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._slots.named_weights()

    def outgoing(self, slot: str | None) -> Outgoing:
        return self._slots.outgoing(slot)

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield PEFT's names and whole float32 tensors of a slot, one at a time, on every rank."""
        return self._slots.adapter_weights(name)

    def place(
        self,
        everything: Where | None = None,
        *,
        slots: Collection[str | None] | None = None,
        **parts: Unpack[PartPlaces],
    ) -> None:
        self._slots.residency.place(everything, slots=slots, **parts)

    def training(self) -> AbstractContextManager[None]:
        return self._slots.residency.training(self._slots.active)

    def scoring(self) -> AbstractContextManager[None]:
        return self._slots.residency.scoring(self._slots.active)

    def memory(self) -> Memory:
        return self._slots.residency.memory()

    def slot_bytes(self, trainable: Lora | Full) -> Mapping[Part, int]:
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
