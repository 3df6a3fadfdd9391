"""TrainerRank: the interface for custom training code on a rank, with forwards on its own inputs and named adapters.

Everything but `forward`, `backward` and `zero_grad` is collective: all ranks call it, in the same order. Ranks of one
tensor-parallel group call everything alike, with equal arguments. Where ranks go in step (lockstep.py) those three are
collective as well, each rank with inputs and a loss of its own, or none.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from longshore.training import Adam, Lora
from megatron_worker.engine import Facts, Norms
from megatron_worker.process.agreement import agreement
from megatron_worker.trainer_rank.forward import forward_slot
from megatron_worker.trainer_rank.forward_engine import ForwardEngine
from megatron_worker.trainer_rank.graphs import Graphs
from megatron_worker.trainer_rank.inputs import (
    CheckedInput,
    ForwardInput,
    ForwardOutput,
    Inputs,
    check,
    empty_output,
    leaves,
    nested_alike,
)
from megatron_worker.trainer_rank.lockstep import Lockstep
from megatron_worker.trainer_rank.memory.planner import Planner
from megatron_worker.trainer_rank.micro_batches import MicroBatch, micro_batches
from megatron_worker.trainer_rank.snapshot import Snapshot, take_snapshot
from shared.errors import InvalidInput
from shared.models import peft as peft_format


@dataclass(frozen=True)
class _Adapter:
    """The engine's slot of a named adapter. If a name is loaded again, it gets a new slot before the old is dropped."""

    slot: str
    lora: Lora
    trainable: bool


class TrainerRank:
    """See the module's docstring and docs/trainer_rank.md.

    Args:
        memory_budget_bytes: what micro-batches may hold at once beside weights and optimizer, user's code included. By
            default a share of the device's memory (`live_bytes.default_budget`).
        min_shared_tokens: sequences that begin with so many equal tokens share them in a pack.

    Raises:
        InvalidInput: the layout is a pipeline, which cannot give a loss the outputs of all of its inputs.
    """

    def __init__(
        self, engine: ForwardEngine, memory_budget_bytes: int | None = None, min_shared_tokens: int = 16
    ) -> None:
        _refuse_pipelines(engine)
        self.engine = engine
        self.min_shared_tokens = min_shared_tokens
        self.memory_budget_bytes = memory_budget_bytes
        self._adapters: dict[str, _Adapter] = {}
        self._active: str | None = None
        self._graphs = Graphs()
        self._lockstep = (
            Lockstep(engine.facts.layout.world_size, engine.facts.device) if engine.needs_lockstep else None
        )
        self._num_slots = 0
        self._planner = Planner(engine, min_shared_tokens)

    @property
    def facts(self) -> Facts:
        return self.engine.facts

    # Adapters.

    def create_adapter(self, name: str, lora: Lora, seed: int) -> None:
        """Create an adapter, trainable and active: A is Kaiming-uniform from the seed, B zero."""
        with self.agreement():
            self._refuse_alive(name, "replaced")
        slot = self._new_slot(name)
        self.engine.add_adapter(slot, lora, seed)
        self._install(name, _Adapter(slot, lora, trainable=True))

    def load_adapter(self, name: str, path: Path, trainable: bool, lora: Lora | None = None) -> None:
        """A PEFT adapter from a folder, made active. One of this name goes once the new one stands.

        Raises:
            InvalidInput: it is missing, damaged, not finite, not of the base's shapes or not of `lora`; or the name's
                graph is alive. What stood under the name still does.
        """
        with self.agreement():
            self._refuse_alive(name, "loaded")
            found = peft_format.read_config(path)
        slot = self._new_slot(name)
        try:
            self.engine.load_adapter(slot, path, lora, trainable)
        except Exception:
            self._activate()
            raise
        self._install(name, _Adapter(slot, found, trainable))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Raises InvalidInput when there is none, or its graph is alive."""
        with self.agreement():
            slot = self._adapter(name).slot
            self._refuse_alive(name, "dropped")
        del self._adapters[name]
        self.engine.drop_adapter(slot)
        if self._active == name:
            self._active = None
        self._activate()

    def set_adapter(self, name: str | None) -> None:
        """Set the active adapter, which inputs use unless they name another; None: the base model alone."""
        if name is not None:
            self._adapter(name)
        self._active = name
        self._activate()

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
        return {name: adapter.trainable for name, adapter in self._adapters.items()}

    # A step.

    @overload
    def forward(self, inputs: ForwardInput) -> ForwardOutput: ...
    @overload
    def forward(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]: ...
    @overload
    def forward(self, inputs: Inputs) -> Any: ...
    def forward(self, inputs: Inputs) -> Any:
        """Return the outputs of this data-parallel rank's own inputs. Keeps the graph unless under `no_grad`.

        Inputs may stand in lists and dicts, whose outputs stand in the same ones. They are grouped by adapter: one
        packed forward for each. Raises InvalidInput naming the input and the rule.
        """
        requests, slots = self._to_answer(inputs)
        outputs = [empty_output(request, self.facts) for request in requests]
        for name in sorted(slots, key=_base_first):
            places = [i for i, r in enumerate(requests) if r.adapter == name and not r.is_empty]
            with self.adapter(name):
                answers = forward_slot(
                    self.engine,
                    [requests[i] for i in places],
                    self.min_shared_tokens,
                    partial(self._watched, name=name),
                )
            for place, answer in zip(places, answers, strict=True):
                outputs[place] = answer
        return nested_alike(inputs, iter(outputs))

    def _to_answer(self, inputs: Inputs) -> tuple[list[CheckedInput], set[str | None]]:
        """Check inputs. Returns them, and the slots whose backbones must be run."""
        if self._lockstep is None:
            requests = self.checked(inputs, "inputs")
            return requests, _asked_of(requests)
        with self.agreement():
            requests = self.checked(inputs, "inputs")
        return requests, self._lockstep.slots(_asked_of(requests))

    def _watched(self, hidden_NH: Tensor, name: str | None) -> Tensor:
        return self._graphs.watch(hidden_NH if self._lockstep is None else self._lockstep.cut(hidden_NH), str(name))

    def forward_micro_batches(self, items: Sequence[Inputs]) -> Iterator[MicroBatch]:
        """Divide items over data-parallel ranks and micro-batches that fit the memory. Yields each one's outputs.

        Every rank gives the same items, and gets equally many micro-batches: its share of each may be empty. An item
        is never split. Do the backward of a micro-batch before the next is asked for.

        Raises:
            InvalidInput: on every rank: items differ between ranks, or one would not fit the budget on its own.
        """
        return micro_batches(self, items, self.memory_budget_bytes, self._planner)

    def checked(self, inputs: Inputs, place: str) -> list[CheckedInput]:
        requests = []
        for where, asked in leaves(inputs, place):
            requests.append(check(asked, where, self.facts.vocab_size, self._active))
            if (adapter := requests[-1].adapter) is not None:
                self._adapter(adapter, f"{where}.adapter")
        return requests

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar to what its adapters have accumulated: sums, not means.

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
        elif any(self._graphs.is_alive(name) for name in self._adapters):
            raise InvalidInput("it does not depend on any output: was it detached?", "loss")

    def optim_step(
        self, adam: Adam, learning_rate: float, denominator: float = 1.0, adapters: Sequence[str] | None = None
    ) -> dict[str, Norms]:
        """Divide gradients by `denominator`, clip and step each adapter by its own norm over all ranks; zero them.

        Args:
            denominator: the same on every rank, such as a weight that `reduce` brought together.
            adapters: by default the active one.

        Raises:
            InvalidInput: a gradient is not finite (then no weight of any has changed, and the gradients of all are
                zero), an adapter is unknown, not trainable, or its graph is alive.
        """
        names = list(dict.fromkeys([self._active] if adapters is None else adapters))
        with self.agreement():
            slots = [self._to_step(name) for name in names]
            if not (math.isfinite(denominator) and denominator > 0):
                raise InvalidInput(f"a positive number is wanted, not {denominator}", "denominator")
        if self._lockstep is not None:
            self._lockstep.release()
        norms = {}
        for name in slots:
            with self.adapter(name):
                norms[name] = self.engine.reduce_gradients(denominator)
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if broken:
            self.zero_grad(slots)
            message = f"the gradient's norm is {norms[broken[0]]}; no weight has changed"
            raise InvalidInput(message, f"adapter {broken[0]!r}")
        stepped = {}
        for name, norm in norms.items():
            with self.adapter(name):
                stepped[name] = self.engine.apply_gradients(adam, learning_rate, norm)
        return stepped

    def zero_grad(self, adapters: Sequence[str] | None = None) -> None:
        """Set the accumulated gradients of these adapters to zero; by default of all trainable ones."""
        trainable = [name for name, adapter in self._adapters.items() if adapter.trainable]
        for name in trainable if adapters is None else adapters:
            with self.adapter(name):
                self.engine.zero_grad()

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Scalars of all data-parallel ranks added up; those whose names end in `:max` by their maximum."""
        return self.engine.reduce(sums)

    # State.

    def snapshot(self, name: str) -> Snapshot:
        """The adapter's weights as they are now, whole and float32, in host memory of every rank."""
        with self.agreement():
            adapter = self._adapter(name)
        return take_snapshot(adapter.lora, self.engine.adapter_weights(adapter.slot))

    def export(self, name: str, folder: Path) -> None:
        """Write the adapter as a PEFT folder; rank 0 writes. Raises InvalidInput if there is no such adapter."""
        snapshot = self.snapshot(name)
        with self.agreement():
            if self.facts.rank == 0:
                snapshot.write(folder)

    def save(self, name: str, folder: Path) -> None:
        """Write `weights/` (PEFT) and `optimizer/` of a trainable adapter, for `load`; rank 0 writes."""
        with self.agreement():
            self._trainable(name)
        with self.adapter(name):
            self.engine.save(folder)

    def load(self, name: str, folder: Path) -> None:
        """Go on from what `save` wrote, under any layout: weights, moments, step count, into a trainable adapter.

        Raises InvalidInput as `load_adapter` does.
        """
        with self.agreement():
            self._trainable(name)
            self._refuse_alive(name, "loaded")
        with self.adapter(name):
            self.engine.load(folder)

    # What its parts share.

    def lora_of(self, name: str | None) -> tuple[Lora | None, bool]:
        """An adapter's shape, and whether it is trained."""
        if name is None:
            return None, False
        adapter = self._adapter(name)
        return adapter.lora, adapter.trainable

    def agreement(self) -> AbstractContextManager[None]:
        """If one rank raises in the block, all do."""
        return agreement(self.facts.layout.world_size, self.facts.device)

    def _new_slot(self, name: str) -> str:
        self._num_slots += 1
        return f"{name}#{self._num_slots}"

    def _install(self, name: str, adapter: _Adapter) -> None:
        if (old := self._adapters.pop(name, None)) is not None:
            self.engine.drop_adapter(old.slot)
        self._adapters[name] = adapter
        self._active = name
        self._activate()

    def _activate(self) -> None:
        self.engine.set_adapter(None if self._active is None else self._adapters[self._active].slot)

    def _adapter(self, name: str, place: str | None = None) -> _Adapter:
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise InvalidInput(f"there is no adapter {name!r}; loaded: {known}", place or "adapter")
        return self._adapters[name]

    def _trainable(self, name: str) -> None:
        if not self._adapter(name).trainable:
            raise InvalidInput("it was loaded as not trainable", f"adapter {name!r}")

    def _to_step(self, name: str | None) -> str:
        if name is None:
            raise InvalidInput("no adapter is active: name those to step", "adapters")
        self._trainable(name)
        self._refuse_alive(name, "stepped")
        return name

    def _refuse_alive(self, name: str, what: str) -> None:
        if self._graphs.is_alive(name):
            message = f"it cannot be {what} while a graph of it is alive: do its backward, or let its outputs go"
            raise InvalidInput(message, f"adapter {name!r}")


def _asked_of(requests: Sequence[CheckedInput]) -> set[str | None]:
    return {request.adapter for request in requests if not request.is_empty}


def _base_first(name: str | None) -> tuple[bool, str]:
    """The sort key of slots: the base first, then by name, so that the order is the same on every rank."""
    return name is not None, name or ""


def _refuse_pipelines(engine: ForwardEngine) -> None:
    if engine.facts.layout.pp > 1:
        message = "a pipeline's ranks never hold all outputs for a loss written outside the engine: use tp, cp, ep, dp"
        raise InvalidInput(message, "layout.pp")
