"""TrainerRank: the interface for custom training code on a rank, with forwards on its own inputs.

It trains adapters by their names, or every weight of the base, whose name is None.

Everything except `forward`, `backward` and `zero_grad` is collective: all ranks call it, in the same order. Ranks of
one tensor-parallel group make the same calls, with equal arguments. If ranks run in lockstep (lockstep.py), those three
are collective as well; each rank has different inputs and another loss, or none.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from longshore.training import Full, Lora, Optimizer, Recompute
from megatron_worker.dispatch import Dispatcher, SlotName
from megatron_worker.engine import Facts, Norms
from megatron_worker.forwards.inputs import (
    CheckedInput,
    ForwardInput,
    ForwardOutput,
    Inputs,
    check,
    empty_output,
    leaves,
    nested_alike,
)
from megatron_worker.forwards.packing import LEAST_SAVED
from megatron_worker.memory.planner import PlannedSlot
from megatron_worker.process.agreement import agreement
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.trainer_rank.forward import forward_slot
from megatron_worker.trainer_rank.graphs import Graphs
from megatron_worker.trainer_rank.lockstep import Lockstep
from megatron_worker.trainer_rank.micro_batches import MicroBatch, base_first, micro_batches, resident
from megatron_worker.trainer_rank.snapshot import Snapshot, refuse_beyond_passes, refuse_beyond_steps
from shared.errors import InvalidInput
from shared.models import peft as peft_format


@dataclass(frozen=True)
class _Slot:
    """The dispatcher's slot of an adapter, or (None) of the base.

    If a name is loaded again, it gets a new slot before the old is dropped.
    """

    name: SlotName
    lora: Lora | None
    trainable: bool


class TrainerRank:
    """See the module's docstring and docs/trainer_rank.md.

    Args:
        memory_budget_bytes: the most that micro-batches may hold at once, without weights and optimizer but including
            the user's code. By default a share of the device's memory (`live_bytes.default_budget`).
        least_saved_tokens: a prefix is shared in a pack if that saves at least this many tokens. A prefix of L tokens
            saves L for each branch except one.
        recompute: layers are recomputed in the backward, which takes less memory; auto: only in micro-batches with an
            item that would not fit the budget otherwise.

    Raises:
        InvalidInput: the layout is a pipeline, which cannot give a loss the outputs of all of its inputs.
    """

    def __init__(
        self,
        engine: Engine,
        memory_budget_bytes: int | None = None,
        least_saved_tokens: int = LEAST_SAVED,
        recompute: Recompute = "auto",
    ) -> None:
        if engine.facts.layout.pp > 1:
            message = "ranks of a pipeline never hold all outputs for a loss of one's own: use tp, cp, ep, dp"
            raise InvalidInput(message, "layout.pp")
        self.engine = engine
        self.dispatcher = Dispatcher(engine)
        self.least_saved_tokens, self.memory_budget_bytes = least_saved_tokens, memory_budget_bytes
        self.recompute, self.recomputes = recompute, recompute == "on"
        self._slots: dict[str | None, _Slot] = {None: _Slot(None, None, trainable=False)}
        self._slot_number = count(1)
        self._active: str | None = None
        self._graphs = Graphs()
        world_size, device = engine.facts.layout.world_size, engine.facts.device
        self._lockstep = Lockstep(world_size, device) if engine.needs_lockstep else None

    @property
    def facts(self) -> Facts:
        return self.engine.facts

    # What is trained.

    def create_adapter(self, name: str, lora: Lora, seed: int) -> None:
        """Create an adapter, trainable and active: A is Kaiming-uniform from the seed, B zero."""
        with self.agreement():
            refuse_beyond_passes(lora)
            self._refuse_trained_base()
            self._refuse_alive(name, "replaced")
        slot = f"{name}#{next(self._slot_number)}"
        self.dispatcher.create_slot(slot, lora, seed)
        self._install(name, _Slot(slot, lora, trainable=True))

    def load_adapter(self, name: str, path: Path, trainable: bool, lora: Lora | None = None) -> None:
        """Load a PEFT adapter from a folder and make it active. It replaces a loaded one of the same name.

        Raises InvalidInput: it is missing, damaged, not finite, not of the base's shapes or not of `lora`; the name's
        graph is alive; or it is trainable, but the base is trained. An adapter of the same name then stays.
        """
        with self.agreement():
            if trainable:
                self._refuse_trained_base()
            self._refuse_alive(name, "loaded")
            found = peft_format.read_config(path, lora)
            refuse_beyond_passes(lora or found)
        slot = f"{name}#{next(self._slot_number)}"
        try:
            if trainable:
                self.dispatcher.create_slot(slot, found, seed=0, adapter=path)
            else:
                self.dispatcher.load_frozen(slot, path)
        except Exception:
            self.dispatcher.drop_slot(slot)
            raise
        self._install(name, _Slot(slot, found, trainable))

    def train_base(self) -> None:
        """Train every weight of the base, and make it active.

        Adapters that are not trainable may be loaded too; forwards with them give gradients for the base.
        Raises InvalidInput: something else is trained, or the base is quantized.
        """
        with self.agreement():
            self._refuse_trained_base()
            if trained := sorted(name for name, is_trained in self.adapters.items() if is_trained):
                raise InvalidInput(f"it is trained alone: drop {', '.join(trained)} first", "the base")
        self.dispatcher.create_slot(None, Full(), seed=0)
        self._slots[None], self._active = _Slot(None, None, trainable=True), None

    def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter. None: end the training of the base, which is as it was published again.

        Raises InvalidInput when there is none, or its graph is alive.
        """
        with self.agreement():
            slot = self.slot(name)
            if name is None:
                self._trainable(None)
            self._refuse_alive(name, "dropped")
        self.dispatcher.drop_slot(slot)
        del self._slots[name]
        if name is None:
            self._slots[None] = _Slot(None, None, trainable=False)
            self.engine.place(weights="device", slots=[None])
        self._active = None if self._active == name else self._active

    def set_adapter(self, name: str | None) -> None:
        """Set the active adapter, which inputs use unless they name another; None: the base model alone."""
        self.slot(name)
        self._active = name

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Make another adapter the active one within a `with` block."""
        before = self._active
        self.set_adapter(name)
        try:
            yield
        finally:
            self.set_adapter(before)

    @property
    def active_adapter(self) -> str | None:
        return self._active

    @property
    def adapters(self) -> dict[str, bool]:
        """All adapters by name, and whether they are trainable."""
        return {name: slot.trainable for name, slot in self._slots.items() if name is not None}

    @property
    def trains_base(self) -> bool:
        return self._slots[None].trainable

    # A step.

    @overload
    def forward(self, inputs: ForwardInput) -> ForwardOutput: ...
    @overload
    def forward(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]: ...
    @overload
    def forward(self, inputs: Inputs) -> Any: ...
    def forward(self, inputs: Inputs) -> Any:
        """Return the outputs of this data-parallel rank's own inputs. Keeps the graph unless under `no_grad`.

        Inputs may be nested in lists and dicts; outputs are nested in the same way. They are grouped by adapter: one
        packed forward for each. Raises InvalidInput naming the input and the rule.
        """
        requests, slots = self._to_answer(inputs)
        outputs = [empty_output(request, self.facts) for request in requests]
        for name in sorted(slots, key=base_first):
            places = [i for i, r in enumerate(requests) if r.adapter == name and not r.is_empty]
            own, watched = [requests[i] for i in places], partial(self._watched, name=name)
            with resident(self, name):
                answers = forward_slot(self.engine, own, self.least_saved_tokens, watched)
            for place, answer in zip(places, answers, strict=True):
                outputs[place] = answer
        return nested_alike(inputs, iter(outputs))

    def _to_answer(self, inputs: Inputs) -> tuple[list[CheckedInput], set[str | None]]:
        """Check inputs. Returns them, and the slots whose backbones must be run."""
        with nullcontext() if self._lockstep is None else self.agreement():
            requests = self.checked(inputs, "inputs")
        asked = {request.adapter for request in requests if not request.is_empty}
        return requests, asked if self._lockstep is None else self._lockstep.slots(asked)

    def _watched(self, hidden_NH: Tensor, weight_VH: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
        if self._lockstep is not None:
            hidden_NH, weight_VH = self._lockstep.cut(hidden_NH, weight_VH)
        return self._graphs.watch(hidden_NH, name), weight_VH

    def forward_micro_batches(self, items: Sequence[Inputs]) -> Iterator[MicroBatch]:
        """Divide items over data-parallel ranks and micro-batches that fit the memory. Yields each one's outputs.

        Every rank gives the same items, and gets equally many micro-batches: its share of each may be empty. An item
        is never split. Do the backward of a micro-batch before the next is asked for.

        Raises InvalidInput: on every rank: items differ between ranks, or one would not fit the budget on its own.
        """
        return micro_batches(self, items, self.memory_budget_bytes)

    def checked(self, inputs: Inputs, place: str) -> list[CheckedInput]:
        requests = []
        for where, asked in leaves(inputs, place):
            requests.append(check(asked, where, self.facts.vocab_size, self._active))
            self.slot(requests[-1].adapter, f"{where}.adapter")
        return requests

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar to what its adapters, or the base, have accumulated: sums, not means.

        A loss of nothing, as of an empty micro-batch, has none to add. Raises InvalidInput when the loss has no graph
        though one is alive; where ranks go in step, on every rank.
        """
        if self._lockstep is None:
            self._backward(loss)
        else:
            self._lockstep.backward(partial(self._backward, loss))

    def _backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.backward()
        elif self._graphs.any_alive:
            raise InvalidInput("it does not depend on any output: was it detached?", "loss")

    def optim_step(
        self,
        adam: Optimizer,
        learning_rate: float,
        denominator: float = 1.0,
        adapters: Sequence[str | None] | None = None,
    ) -> dict[str | None, Norms]:
        """Divide gradients by `denominator`, clip and step each adapter by its own norm over all ranks; zero them.

        Args:
            denominator: the same on every rank, such as a weight that `reduce` brought together.
            adapters: by default the active one; None is the base.

        Raises:
            InvalidInput: a gradient is not finite (then no weight of any has changed, and the gradients of all are
                zero), an adapter is unknown, not trainable, or its graph is alive.
        """
        names = list(dict.fromkeys([self._active] if adapters is None else adapters))
        with self.agreement():
            for name in names:
                self._trainable(name)
                self._refuse_alive(name, "stepped")
                refuse_beyond_steps(adam, self._slots[name].lora)
            if not (math.isfinite(denominator) and denominator > 0):
                raise InvalidInput(f"a positive number is wanted, not {denominator}", "denominator")
        if self._lockstep is not None:
            self._lockstep.release()
        norms = {}
        for name in names:
            with self.dispatcher.resident(self.slot(name)):
                norms[name] = self.engine.reduce_gradients(denominator)
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if broken:
            self.zero_grad(names)
            message = f"the gradient's norm is {norms[broken[0]]}; no weight has changed"
            raise InvalidInput(message, _place(broken[0]))
        stepped = {}
        for name, norm in norms.items():
            with self.dispatcher.resident(self.slot(name)):
                stepped[name] = self.engine.apply_gradients(adam, learning_rate, norm)
        return stepped

    def zero_grad(self, adapters: Sequence[str | None] | None = None) -> None:
        """Set the accumulated gradients of these adapters (None: of the base) to zero; by default of all trained."""
        trained = [name for name, slot in self._slots.items() if slot.trainable]
        for name in trained if adapters is None else adapters:
            self.dispatcher.zero_grad(self.slot(name))

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Scalars of all data-parallel ranks added up; those whose names end in `:max` by their maximum."""
        return self.engine.reduce(sums)

    # State.

    def snapshot(self, name: str) -> Snapshot:
        """The adapter's weights as they are now, whole and float32, in host memory of every rank."""
        with self.agreement():
            self.slot(name)
        lora, slot = self._slots[name].lora, self._slots[name].name
        assert lora is not None and slot is not None
        tensors = {key: tensor.detach().cpu().clone() for key, tensor in self.engine.adapter_weights(slot)}
        return Snapshot(lora, tensors)

    def export(self, name: str | None, folder: Path) -> None:
        """Write the adapter as a PEFT folder, or (None) the base as Hugging Face's; rank 0 writes.

        Raises InvalidInput if there is no such adapter.
        """
        if name is None:
            self.engine.write_base(folder)
            return
        snapshot = self.snapshot(name)
        with self.agreement():
            if self.facts.rank == 0:
                snapshot.write(folder)

    def save(self, name: str | None, folder: Path) -> None:
        """Write `weights/` and `optimizer/` of a trained slot, as in a job's checkpoint; rank 0 writes."""
        with self.agreement():
            self._trainable(name)
        self.dispatcher.save_state(self.slot(name), folder)

    def load(self, name: str | None, folder: Path) -> None:
        """Resume a trained slot from what `save` or a job wrote, under any layout: weights, moments, step count.

        Raises InvalidInput as `load_adapter` does.
        """
        with self.agreement():
            self._trainable(name)
            self._refuse_alive(name, "loaded")
        self.dispatcher.load_state(self.slot(name), folder)

    # What its parts share.

    def slot(self, name: str | None, place: str = "adapter") -> SlotName:
        """Return the dispatcher's slot of an adapter. Raises InvalidInput if there is no such adapter."""
        if name not in self._slots:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise InvalidInput(f"there is no adapter {name!r}; loaded: {known}", place)
        return self._slots[name].name

    def planned_slot(self, name: str | None) -> PlannedSlot:
        """Return an adapter as the planner knows it. A forward with it has a graph if it is trained."""
        keeps_graph = (self._slots[name].trainable or self.trains_base) and torch.is_grad_enabled()
        return PlannedSlot(name, self._slots[name].lora, keeps_graph, self.least_saved_tokens, self.recomputes)

    def agreement(self) -> AbstractContextManager[None]:
        """If one rank raises in the block, all do."""
        return agreement(self.facts.layout.world_size, self.facts.device)

    def _install(self, name: str, slot: _Slot) -> None:
        if (old := self._slots.pop(name, None)) is not None:
            self.dispatcher.drop_slot(old.name)
        self._slots[name], self._active = slot, name

    def _trainable(self, name: str | None) -> None:
        self.slot(name)
        if not self._slots[name].trainable:
            if name is None:
                raise InvalidInput("no adapter is active: name those to step, or train_base first", "adapters")
            raise InvalidInput("it was loaded as not trainable", _place(name))

    def _refuse_trained_base(self) -> None:
        if self.trains_base:
            raise InvalidInput("it is trained, alone: drop_adapter(None) ends that", "the base")

    def _refuse_alive(self, name: str | None, what: str) -> None:
        """Raise InvalidInput if a graph of it is alive. Every graph counts as one of a trained base."""
        if self._graphs.any_alive if name is None else self._graphs.is_alive(name):
            message = f"it cannot be {what} while a graph of it is alive: do its backward, or let its outputs go"
            raise InvalidInput(message, _place(name))


def _place(name: str | None) -> str:
    return "the base" if name is None else f"adapter {name!r}"
