"""Adapter slots, and the part of an engine that serves them: the same for Megatron and FSDP."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from longshore.training import Full, Lora, Optimizer, ScalarHead
from megatron_worker.engine import (
    Batch,
    EngineInfo,
    LossFunction,
    Memory,
    Norms,
    Outgoing,
    Outputs,
    Part,
    PartPlaces,
    Scores,
    TeacherStates,
    Where,
)
from megatron_worker.head import scalar
from megatron_worker.head.logprobs import VocabShard
from megatron_worker.lora import Adapter
from megatron_worker.offload import HostCopy, Residency, Resident
from megatron_worker.process.ranks import agreement
from megatron_worker.tensors.state_files import (
    Held,
    SlotOptimizer,
    SlotTraining,
    StateRanks,
    block_reader,
    blocks_of,
    copied_state,
    local_only,
    read_adapter,
    read_model,
    read_optimizer,
    write_adapter,
    write_model_folder,
    write_optimizer,
)
from shared.errors import InvalidInput
from shared.families import read_architecture
from shared.families.architecture import Architecture
from shared.families.tensor_slices import TensorSlice, modules_of
from shared.models import peft as peft_format
from shared.models.peft import OUTPUT, beside, module_of

AdapterT = TypeVar("AdapterT", bound=Adapter)
OptimizerT = TypeVar("OptimizerT", bound=SlotOptimizer)
_NO_LINEARS = "score"
"""The pattern of an adapter that is a head alone."""


@dataclass(frozen=True)
class Base:
    """The base model's weights on this rank.

    Args:
        folder: holds its published weights.
        parameters: by the names that `slices` give them.
        storages: the tensors that hold them, each with a separate storage.
    """

    folder: Path
    architecture: Architecture
    slices: list[TensorSlice]
    parameters: Mapping[str, Tensor]
    storages: list[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.storages[0].dtype


class Engine(ABC, Generic[AdapterT, OptimizerT]):
    """See the docstring of megatron_worker/engine.py. An engine holds one base model and any number of named adapter
    slots beside it, which may all be trained; or the base is trained itself. Forwards, backwards and steps use the slot
    that is active."""

    facts: EngineInfo
    recompute = False
    """Layers keep their inputs alone of a pass, and compute again in its backward (Chen et al. 2016, arXiv:1604.06174).
    Gradients are the same bits. A backward may leave the adapter of its forward active."""

    def __init__(self, base: Base, ranks: StateRanks) -> None:
        self._base, self._state_ranks = base, ranks
        published = Resident([HostCopy(base.storages)], is_frozen=True, refill=self._refill_base)
        self._device = base.storages[0].device
        self.residency = Residency(published, self._device)
        self._modules = modules_of(base.slices)
        self._slot_bytes: dict[Lora | Full, dict[Part, int]] = {}
        self.active: str | None = None
        self._base_head: AdapterT | None = None  # what the base is trained with in its output layer's place
        self.adapters: dict[str, AdapterT] = {}
        self.trainings: dict[str | None, SlotTraining[OptimizerT]] = {}

    @abstractmethod
    def _read_base(self) -> None:
        """Read the published weights into the base's parameters."""

    @abstractmethod
    def _use(self, adapter: AdapterT | None) -> None:
        """Make the model compute with an adapter on the base, or with none."""

    @abstractmethod
    def _new_adapter(self, lora: Lora, device: torch.device, own: Sequence[TensorSlice] = ()) -> AdapterT:
        """Make an adapter of zeros, on the base's device or another one, with more tensors if they are given."""

    @abstractmethod
    def _new_optimizer(self, adapter: AdapterT) -> OptimizerT:
        """Begin to train an adapter."""

    @abstractmethod
    def _new_base_optimizer(self, device: torch.device) -> OptimizerT:
        """Begin to train the base; for a device other than the base's, only make the buffers."""

    @property
    def is_training(self) -> bool:
        return self.active in self.trainings

    @property
    def trained(self) -> SlotTraining[OptimizerT]:
        """The training state of the active slot; without one, that of the base."""
        assert self.is_training, "nothing is being trained"
        return self.trainings[self.active]

    @contextmanager
    def dropout_scope(self) -> Iterator[None]:
        """Let a bin's forward pass drop inputs of the adapter that is trained. Enter it once for each bin."""
        training = self.trained
        moment = training.optimizer.step_count, training.num_bins
        training.num_bins += 1
        with self._dropping(self.active, moment):
            yield

    def _dropping(self, slot: str | None, moment: tuple[int, int] | None) -> AbstractContextManager[None]:
        """The base has no dropout."""
        return nullcontext() if slot is None else self.adapters[slot].masks.at(moment)

    def add_adapter(self, name: str, lora: Lora, seed: int) -> None:
        """Install a fresh adapter, trainable and active. Raises InvalidInput if the model has none of its targets.

        A is Kaiming-uniform from the seed, equal under every layout; B is zero.
        """
        own = beside(lora, self._modules, is_new=True)
        self.residency.bring_base()
        adapter = self._new_adapter(own, self._device)
        adapter.initialise(seed, self._weight_of)
        self._install(name, adapter, trainable=True, seed=seed)

    def _weight_of(self, factor: str) -> Tensor:
        """Gather the weight of the model whose adapter has this factor. Collective."""
        module = factor.removeprefix(peft_format.PREFIX).rpartition(".lora_")[0]
        found = next(s for s in self._base.slices if s.name.endswith(".weight") and module_of(s.name) == module)
        return self._state_ranks.whole(found, self._base.parameters, self._base.dtype)

    def load_adapter(self, name: str, folder: Path, lora: Lora | None, trainable: bool, seed: int = 0) -> None:
        """Install a PEFT adapter from a folder and make it active. `seed`: of its dropout.

        Raises the same InvalidInput on every rank if it is missing, damaged, or not of `lora`'s shape.
        """
        self.residency.bring_base()
        with agreement():
            found = beside(peft_format.read_config(folder, may_have_head=True), self._modules)
            if lora is not None:
                peft_format.check_same(found, beside(lora, self._modules), str(folder))
            own = {"dropout": 0.0} if lora is None else {"dropout": lora.dropout, "head": lora.head}  # and its names
            found = found.model_copy(update=own)
            adapter = self._new_adapter(found, self._device)
            # Read in float32, whatever the slot computes in, so that a trained slot's masters lose nothing.
            exact = adapter.flat.like(torch.float32)
            read_adapter(folder, adapter.slices, exact.views, self._state_ranks, self._base.folder)
        adapter.flat.buffer.copy_(exact.buffer)
        self._install(name, adapter, trainable, seed)
        if trainable:
            self.trained.optimizer.put("master", exact)

    def _install(self, name: str, adapter: AdapterT, trainable: bool, seed: int) -> None:
        assert name not in self.adapters, f"slot {name!r} is taken"
        assert not (trainable and self._trains_base), "adapters are trained, or the base, not both"
        adapter.masks.seed = seed
        self.adapters[name] = adapter
        self.residency.add(name, _adapter_parts(adapter))
        if trainable:
            self._train(name, [(self._new_optimizer(adapter), adapter.slices)])
        self.set_adapter(name)

    def train_full(self, full: Full, seed: int = 0) -> None:
        """Train every weight of the base; a head replaces its output layer. `seed`: of that."""
        assert not self.trainings, "drop_slot comes before training something else"
        head = self._base_head = None if full.head is None else self._new_head(full.head, self._device)
        heads = [head.flat.host] if head else []
        self.residency.add(None, {"weights": Resident([HostCopy(self._base.storages), *heads])})
        parts = [(self._new_base_optimizer(self._device), self._base.slices)]
        if head is not None:
            head.initialise(seed, self._weight_of)
            own = [replace(s, name=s.name.removeprefix(peft_format.PREFIX)) for s in head.slices]
            others = [s for s in self._base.slices if module_of(s.name) != OUTPUT]
            parts = [(parts[0][0], others), (self._new_optimizer(head), own)]
            self.set_adapter(None)
        self._train(None, parts)

    def _new_head(self, head: ScalarHead, device: torch.device) -> AdapterT:
        return self._new_adapter(Lora(target_pattern=_NO_LINEARS, head=head), device)

    def train_own(self, slot: str | None, parameters: Mapping[str, Parameter], buffers: Mapping[str, Tensor]) -> None:
        """Train parameters of the user's code with a slot: they step together, and `save` and `load` handle both.
        Buffers are only saved, as rank 0 has them, and loaded in place.

        They are whole and equal on every rank, and stay on the device. Ranks that share data must compute the same with
        them.
        """
        own = self._new_adapter(Lora(target_pattern=_NO_LINEARS), self._device, scalar.own_slices(parameters))
        for name, parameter in parameters.items():
            parameter.data = own.flat.views[scalar.OWN + name].copy_(parameter.data)
            parameter.register_hook(lambda grad: grad / self._state_ranks.num_replicas)
            own.parameters[scalar.OWN + name] = parameter
        self.trainings[slot].own = self._new_optimizer(own), own.slices
        self.trainings[slot].buffers = buffers

    def _train(self, slot: str | None, parts: list[tuple[OptimizerT, list[TensorSlice]]]) -> None:
        self.trainings[slot] = SlotTraining(slot, parts)
        self.residency.add(slot, _training_parts([optimizer for optimizer, _ in parts]))

    def slot_bytes(self, trainable: Lora | Full) -> Mapping[Part, int]:
        """Count the bytes that a slot takes on this rank's device while it is trained: made on a device without memory.

        Exact. `weights` of Full are 0: those of the base are there in any case.
        """
        if trainable not in self._slot_bytes:
            nowhere = torch.device("meta")
            if isinstance(trainable, Full):
                head = trainable.head and self._new_head(trainable.head, nowhere)
                optimizers = [self._new_base_optimizer(nowhere), *([self._new_optimizer(head)] if head else [])]
                parts = (_adapter_parts(head) if head else {}) | _training_parts(optimizers)
            else:
                adapter = self._new_adapter(beside(trainable, self._modules), nowhere)
                parts = _adapter_parts(adapter) | _training_parts([self._new_optimizer(adapter)])
            nothing: dict[Part, int] = {"weights": 0}
            self._slot_bytes[trainable] = nothing | {part: held.bytes.device for part, held in parts.items()}
        return self._slot_bytes[trainable]

    def set_adapter(self, name: str | None) -> None:
        """Use this slot in the following calls, or none."""
        self.active = name
        self._use(self._base_head if name is None else self.adapters[name])

    def drop_slot(self, slot: str | None) -> None:
        """Forget a slot, if it is there, with its gradients and moments, even one that an error has left incomplete.

        None is active if it was. Slot None: end the training of the base, whose published weights are read again when
        they are next needed. Collective.
        """
        if slot is None:
            self._base_head = None
        if slot == self.active:
            self.set_adapter(None)
        if (training := self.trainings.pop(slot, None)) is not None:
            training.detach()
        self.residency.drop(slot)
        if slot is not None:
            self.adapters.pop(slot, None)

    def _refill_base(self) -> None:
        for storage in self._base.storages:
            storage.zero_()
        self._read_base()

    # Files.

    def save(self, folder: Path) -> None:
        """Write `weights/` (PEFT adapter or Hugging Face model) and `optimizer/` of the active slot; rank 0 writes."""
        training, ranks = self.trained, self._state_ranks
        weights, optimizer = (folder / "weights", folder / "optimizer") if ranks.rank == 0 else (None, None)
        if training.slot is None:
            self.write_base(folder / "weights")
        else:
            lora, exact = self.adapters[training.slot].lora, training.optimizer.gathered("master")
            with agreement():
                write_adapter(weights, lora, training.slices, exact, ranks)
        with agreement():
            write_optimizer(optimizer, training, ranks)

    def copied_state(self) -> Callable[[Path], None] | None:
        """Copy what `save` writes of the active slot, an adapter. Rank 0 gets the function that writes the copy."""
        training, ranks = self.trained, self._state_ranks
        assert training.slot is not None, "an adapter's state is copied, not the base's"
        with agreement():
            return copied_state(self.adapters[training.slot].lora, training, ranks)

    def write_base(self, folder: Path) -> None:
        """Write the base as Hugging Face's folder; rank 0 writes. Collective."""
        base, ranks, head = self._base, self._state_ranks, self._base_head
        slices = base.slices if head is None else self.trainings[None].slices
        with agreement():
            own, named = folder if ranks.rank == 0 else None, None if head is None else head.lora.head
            write_model_folder(own, base.folder, slices, self._written, ranks, base.architecture.carried, named)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, under any layout, into what is being trained. Raises InvalidInput on mismatch."""
        training, ranks = self.trained, self._state_ranks
        with agreement():
            if training.slot is None:
                if read_architecture(folder / "weights") != self._base.architecture:
                    place = str(folder / "weights" / "config.json")
                    raise InvalidInput("the checkpoint is of another architecture than the model", place)
                carried = self._base.architecture.carried
                read_model(folder / "weights", training.slices, self._written, ranks, carried)
            else:
                adapter = self.adapters[training.slot]
                peft_format.read_config(folder / "weights", adapter.lora)
                exact = adapter.flat.like(torch.float32)
                read_adapter(folder / "weights", adapter.slices, exact.views, ranks, self._base.folder)
                training.optimizer.put("master", exact)
            read_optimizer(folder / "optimizer", training, ranks)
        training.refresh_working()

    def reset_moments(self) -> None:
        """Set moments and step count to zero, as at the beginning of training."""
        for optimizer, _ in self.trained.parts:
            zeros = optimizer.grad.like(torch.float32)
            optimizer.put("exp_avg", zeros)
            optimizer.put("exp_avg_sq", zeros)
            optimizer.step_count = 0

    @property
    def _written(self) -> Mapping[str, Tensor]:
        """The parameters of the base that files hold: with its head, if it is trained with one."""
        head = self._base_head
        return self._base.parameters if head is None else {**self._base.parameters, **head.flat.views}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors of the base, one at a time, on every rank."""
        parameters, dtype = self._base.parameters, self._base.dtype
        return ((p.name, self._state_ranks.whole(p, parameters, dtype)) for p in self._base.slices)

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and whole float32 tensors of a slot, one at a time, on every rank."""
        adapter, training = self.adapters[name], self.trainings.get(name)
        weights: Mapping[str, Tensor] = adapter.flat.views
        dtype = adapter.flat.buffer.dtype
        if training is not None:
            weights, dtype = training.optimizer.gathered("master"), torch.float32
        return ((p.name, self._state_ranks.whole(p, weights, dtype).float()) for p in adapter.slices)

    def outgoing(self, slot: str | None) -> Outgoing:
        """Return a slot's weights (None: the base's), to be read before they change."""
        base, side = self._base, self._state_ranks.side
        if slot is None:
            return self._outgoing(None, base.dtype, base.slices, local_only(base.parameters, side.rank))
        adapter, training = self.adapters[slot], self.trainings.get(slot)
        if training is not None:
            held, is_shared = training.optimizer.masters_on(side), training.optimizer.shares_masters
            return self._outgoing(adapter.lora, torch.float32, adapter.slices, held, is_shared)
        return self._outgoing(adapter.lora, torch.float32, adapter.slices, local_only(adapter.flat.views, side.rank))

    def _outgoing(
        self, lora: Lora | None, dtype: torch.dtype, slices: list[TensorSlice], held: Held, is_shared: bool = False
    ) -> Outgoing:
        """`is_shared`: ranks have shares of other ranks' blocks."""
        blocks = [block for s in slices for block in blocks_of(s, self._state_ranks)]
        read = block_reader(slices, held)
        return Outgoing(
            lora=lora,
            dtype=dtype,
            device=self._device,
            shapes={s.name: s.shape for s in slices},
            blocks=blocks,
            held=lambda block: None if (found := read(block)) is None else found.to(dtype),
            ranks=self._state_ranks.side,
            members=range(self._state_ranks.side.size) if is_shared else sorted({0} | {block.rank for block in blocks}),
        )

    @property
    def _trains_base(self) -> bool:
        return None in self.trainings

    def _let_recompute(self, layers: Iterable[Any]) -> None:
        """Let layers, each a class with `forward`, be computed again if passes are to be."""
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
        name = self.active
        moment = None if name is None else self.adapters[name].masks.moment

        def beside_its_adapter(*args: Any, **kwargs: Any) -> Any:
            if self.active != name:
                self.set_adapter(name)
            return forward(*args, **kwargs)

        again = partial(copy_context().run, beside_its_adapter)  # of the FSDP engine: the bin's forests
        how: Any = {"context_fn": lambda: (nullcontext(), self._dropping(name, moment)), "preserve_rng_state": False}
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
        """Combine the sums of all data-parallel ranks (engine.py). Every rank gets the same numbers."""

    def optim_step(self, adam: Optimizer, learning_rate: float, denominator: float) -> Norms:
        """Divide the accumulated gradients by `denominator`, clip, step, zero. Non-finite norms change no weight."""
        training = self.trained
        if not adam.noise_scale:
            return training.apply(adam, learning_rate, training.reduce(denominator))
        square = training.square_of_own_gradient()
        weight = torch.as_tensor(training.weight, dtype=torch.float64, device=square.device)
        has_bins = weight > 0  # over ranks that have bins of their own each
        square = square / torch.where(has_bins, weight, 1.0)
        sums = self.reduce({"square": square, "weight": weight, "ranks": has_bins.double()})
        norms = training.apply(adam, learning_rate, training.reduce(denominator))
        return replace(norms, noise=gradient_noise(sums, norms.grad_norm * denominator))

    def zero_grad(self) -> None:
        if self.is_training:
            self.trained.zero_grad()

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]) -> list[list[int]]:
        """Append the most likely token, the lowest id among equals, until a stop id (left out) or `max_tokens`.

        Every sequence is run again for each token: this is for an evaluation's few samples, not for serving. The same
        on every rank.
        """
        completions: list[list[int]] = [[] for _ in prompts]
        open_rows = [row for row, prompt in enumerate(prompts) if prompt]
        for _ in range(max_tokens):
            if not open_rows:
                break
            batch = Batch.of_sequences([prompts[row] + completions[row] for row in open_rows], self.facts.device)
            found = self.forward(batch, Outputs(logprob=False, top_k=1)).top_id_NK
            assert found is not None, "it was asked for"
            tokens = found[:, 0].tolist()
            for row, token in zip(open_rows, tokens, strict=True):
                if token not in stop_ids:
                    completions[row].append(token)
            open_rows = [row for row, token in zip(open_rows, tokens, strict=True) if token not in stop_ids]
        return completions

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


def _adapter_parts(adapter: Adapter) -> dict[Part, Resident]:
    return {"weights": Resident([adapter.flat.host])}


def _training_parts(optimizers: Sequence[SlotOptimizer]) -> dict[Part, Resident]:
    def zero_grad() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    return {
        "gradients": Resident([optimizer.grad.host for optimizer in optimizers], refill=zero_grad),
        "optimizer": Resident([flat.host for optimizer in optimizers for flat in optimizer.states()]),
    }


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
