"""TrainerRank: the interface for custom training code on a rank, with forwards on its own inputs.

It trains adapters by their names, or every weight of the base, whose name is None.

Everything except `forward`, `backward` and `zero_grad` is collective: all ranks call it, in the same order. Ranks of
one tensor-parallel group make the same calls, with equal arguments. If ranks run in lockstep, those three
are collective as well; each rank has different inputs and another loss, or none.
"""

import math
import os
import resource
import shutil
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from longshore.training import (
    Dtype,
    EngineName,
    Full,
    Layout,
    Lora,
    Optimizer,
    OptimizerStates,
    Quantization,
    Recompute,
    storage_not_supported,
)
from megatron_worker.dispatch import WAYS, Dispatcher, SlotName
from megatron_worker.engine import Batch, EngineInfo, Norms
from megatron_worker.forwards import (
    LEAST_SAVED,
    CheckedInput,
    ForwardInput,
    ForwardOutput,
    HeadRequest,
    Inputs,
    Ints,
    Pack,
    Pass,
    answers,
    check,
    empty_output,
    in_parts,
    leaves,
    nested_alike,
    pack,
)
from megatron_worker.memory import PlannedSlot, RankShare, default_budget, new_meter
from megatron_worker.process.ranks import agreement, backend, everyone, start_group
from megatron_worker.tensors.safetensors_files import WrittenTensor, write_safetensors
from megatron_worker.tensors.slot_engine import Engine
from megatron_worker.warm_engine import new_engine
from shared.errors import InvalidInput
from shared.models import peft as peft_format
from shared.models.peft import OUTPUT, AdaptedModules

T = TypeVar("T")
_POWERS_OF_TWO = [1 << exponent for exponent in range(31)]


# --- Graphs ---
# Tracks which slots have a live autograd graph, by objects that autograd saves for the backward and frees with it.


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


# --- Keeps ranks in step whose weights or experts are spread over ranks with other data ---
#
# All ranks must take part in each forward and backward of the backbone, in the same order. A rank without inputs for
# a slot sends an empty pack. The graph is cut between backbone and heads: after the backward of the heads, ranks agree
# which backbones have gradients, and do the backwards of those together, the newest first.


@dataclass(frozen=True, eq=False)
class _Backbone:
    """The outputs of one forward for heads: hidden states, and a trained embedding if it is not the parameter itself.

    `made` has the backbone's graph; `leaves` are the same as leaves of the heads' graphs.
    """

    made: list[Tensor]
    leaves: list[Tensor]


class Lockstep:
    """Keeps backbones until their backward, or until no rank holds their outputs. Only `cut` is not collective."""

    def __init__(self) -> None:
        self._backbones: dict[int, _Backbone] = {}  # by numbers that are the same on all ranks
        self._graphs = Graphs()
        self._num_cut = 0

    def passes(self, own: Iterable[Pass]) -> set[Pass]:
        """Return the passes that any rank makes. Raises InvalidInput if some ranks keep graphs and others do not."""
        self.release()
        found = everyone((list(set(own)), torch.is_grad_enabled()))
        if len({keeps_graph for _, keeps_graph in found}) > 1:
            raise InvalidInput("some ranks keep a graph and others are under no_grad; here they go in step", "forward")
        return {Pass(*each) for passes, _ in found for each in passes}

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
            with agreement():
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
        return set().union(*everyone(list(numbers)))

    def _refuse_done(self, number: int) -> None:
        if number not in self._backbones:
            message = "the backbone of these outputs has gone backward with a loss before: one backward a forward"
            raise InvalidInput(message, "loss")


# --- Forward ---
# One packed forward of the inputs of one slot, then a light head for each kind of output that is asked for.
#
# The rows of hidden states that heads read are selected once; rows of one kind and temperature are adjacent. Inputs
# that only ask for log-probabilities are computed exactly as in a job's bin.
#
# Shape suffixes: T tokens of the pack, N rows, H hidden size, P positions of an input, K labels a position.

Watch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_slot(
    engine: Engine, requests: Sequence[CheckedInput], least_saved_tokens: int, watch: Watch
) -> list[ForwardOutput]:
    """Answer requests with the active slot. `watch` gets what the backbone made, and returns it for the heads.

    Without requests an empty pack goes through the backbone, as other ranks may need this one's part.
    """
    routes = [request.route_LEK for request in requests]
    packed = pack([request.token_L for request in requests], least_saved_tokens, routes)
    asked = _by_question(requests, packed.order)
    rows = [[packed.index_of[n][requests[n].position_P] for n in numbers] for numbers in asked.values()]
    batch = _batch(packed, [index_P for of_question in rows for index_P in of_question], engine.facts.device)
    hidden_NH, weight_VH = watch(*engine.hidden_states(batch))
    outputs = [ForwardOutput() for _ in requests]
    parts = [hidden_NH] if len(asked) == 1 else hidden_NH.split([sum(map(len, of_question)) for of_question in rows])
    for (question, numbers), rows_NH in zip(asked.items(), parts, strict=True):
        found = answers(question, rows_NH, [requests[n] for n in numbers], weight_VH, engine.vocab_shard)
        for number, answer in zip(numbers, found, strict=True):
            outputs[number].found.update(answer)
    return outputs


def _by_question(requests: Sequence[CheckedInput], order: Sequence[int]) -> dict[HeadRequest, list[int]]:
    """Return the requests of each question, in the planner's order: heads with a high peak before whole logits."""
    found: dict[HeadRequest, list[int]] = {}
    for number in order:
        for question in requests[number].questions:
            found.setdefault(question, []).append(number)
    return dict(sorted(found.items(), reverse=True))


def _batch(packed: Pack, rows: Sequence[Ints], device: torch.device) -> Batch:
    """The pack, and a target for each row. Labels, which heads have from the requests, are 0."""
    index_N = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
    arrays = packed.token_id_T, packed.position_T, packed.parent_T, index_N, np.zeros_like(index_N)
    batch = Batch.to_score(*(torch.from_numpy(array).to(device) for array in arrays))
    return batch if packed.route_TEK is None else batch.with_routes(packed.route_TEK)


# --- A copy of an adapter's weights, apart from the engine: to write while training continues, or to look at ---


@dataclass(frozen=True)
class Snapshot:
    """Whole float32 tensors on the host, by PEFT's names."""

    lora: Lora
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write the weights as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`."""
        entries = [WrittenTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        peft_format.write_config(folder, self.lora, self.tensors)
        metadata = peft_format.metadata_of(self.lora)
        write_safetensors(folder / peft_format.WEIGHTS, entries, iter(self.tensors.values()), metadata)


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of a rank's memory.

    Attributes:
        allocated: of tensors on the device: on CUDA all that torch has allocated, on the CPU weights and optimizers.
        reserved: what torch holds of the device, with its cache; on the CPU what the process has in memory.
        process_peak: the most that the process has had in host memory since it began.
    """

    allocated: int
    reserved: int
    process_peak: int


# --- Micro-batches that fit the memory: agree, plan, forward, hand over, measure ---


@dataclass(frozen=True)
class Planning:
    """The plan of this rank's micro-batch, and the peak of the one before, if it was measured.

    `num_logical_tokens`: tokens if prefixes were not shared. Bytes do not include weights and optimizer.
    """

    number: int
    num_items_left: int
    num_tokens: int
    num_logical_tokens: int
    estimated_bytes: int
    budget_bytes: int
    previous_peak_bytes: int | None


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of a micro-batch: its items as they were given, their outputs, and their indices.

    `outputs`: for each item, ForwardOutputs in the same lists and dicts as the item's inputs.
    """

    inputs: tuple[Inputs, ...]
    outputs: tuple[Any, ...]
    indices: tuple[int, ...]
    planning: Planning

    def select(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return the entries of these items from a list with one value for each item, such as advantages."""
        return tuple(values[index] for index in self.indices)


# --- The interface ---


def _digest(requests: list[list[CheckedInput]]) -> int:
    digest = zlib.crc32(str(torch.is_grad_enabled()).encode())
    for item in requests:
        digest = zlib.crc32(str(len(item)).encode(), digest)
        for r in item:
            asked = (r.goes_in, sorted(r.kinds), r.asked.top_k, r.asked.temperature)
            digest = zlib.crc32(repr(asked).encode(), digest)
            for array in (r.token_L, r.position_P, r.label_PK, r.route_LEK):
                digest = digest if array is None else zlib.crc32(array.tobytes(), digest)
    return digest


def refuse_beyond_passes(lora: Lora) -> None:
    """Raises InvalidInput for settings that user code's passes through the backbone do not support."""
    if lora.dropout or lora.head is not None or AdaptedModules(lora).of(OUTPUT) is not None:
        raise InvalidInput("dropout, heads and adapters of lm_head are of a run's own passes alone", "trainable")


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
        self._lockstep = Lockstep() if engine.needs_lockstep else None

    @property
    def facts(self) -> EngineInfo:
        return self.engine.facts

    # What is trained.

    def create_adapter(self, name: str, lora: Lora, seed: int) -> None:
        """Create an adapter, trainable and active: A is Kaiming-uniform from the seed, B zero."""
        with agreement():
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
        with agreement():
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
        with agreement():
            self._refuse_trained_base()
            if trained := sorted(name for name, is_trained in self.adapters.items() if is_trained):
                raise InvalidInput(f"it is trained alone: drop {', '.join(trained)} first", "the base")
        self.dispatcher.create_slot(None, Full(), seed=0)
        self._slots[None], self._active = _Slot(None, None, trainable=True), None

    def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter. None: end the training of the base, which is as it was published again.

        Raises InvalidInput when there is none, or its graph is alive.
        """
        with agreement():
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

        Inputs may be nested in lists and dicts; outputs are nested in the same way. They are grouped by adapter, by
        `no_grad` and by whether they have routes: one packed forward for each. Raises InvalidInput naming the input
        and the rule.
        """
        with nullcontext() if self._lockstep is None else agreement():
            requests = self.checked(inputs, "inputs")
        return nested_alike(inputs, iter(self._forward(requests)))

    def _forward(self, requests: Sequence[CheckedInput]) -> list[ForwardOutput]:
        passes = {request.goes_in for request in requests if not request.is_empty}
        if self._lockstep is not None:
            passes = self._lockstep.passes(passes)
        outputs = [empty_output(request, self.facts) for request in requests]
        for each in sorted(passes, key=lambda each: each.place):
            places = [i for i, r in enumerate(requests) if r.goes_in == each and not r.is_empty]
            own, watched = [requests[i] for i in places], partial(self._watched, name=each.adapter)
            with self._resident(each.adapter), torch.no_grad() if each.no_grad else nullcontext():
                answers = forward_slot(self.engine, own, self.least_saved_tokens, watched)
            for place, answer in zip(places, answers, strict=True):
                outputs[place] = answer
        return outputs

    def _watched(self, hidden_NH: Tensor, weight_VH: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
        if self._lockstep is not None:
            hidden_NH, weight_VH = self._lockstep.cut(hidden_NH, weight_VH)
        return self._graphs.watch(hidden_NH, name), weight_VH

    def forward_micro_batches(self, items: Sequence[Inputs]) -> Iterator[MicroBatch]:
        """Divide items over data-parallel ranks and micro-batches that fit the memory. Yields each one's outputs.

        Every rank gives the same items, and gets equally many micro-batches: its share of each may be empty. An item
        is never divided over micro-batches; if one does not fit otherwise, the inputs of each item go through in
        several passes. Do the backward of a micro-batch before the next is asked for.

        Raises InvalidInput: on every rank: items differ between ranks, or one would not fit the budget on its own.
        """
        requests = self._agreed_requests(items)
        device, budget_bytes = self.facts.device, self.memory_budget_bytes
        measures = budget_bytes is not None or device.type == "cuda"
        in_all = min(everyone(default_budget(device) if budget_bytes is None else budget_bytes))
        planner, in_step = self.dispatcher.planner, self.engine.needs_lockstep
        whole, most = requests, max([1, *map(len, requests)])
        parts = takewhile(lambda num: num < 2 * most, _POWERS_OF_TWO)
        for recomputes, num_parts in product(WAYS[self.recompute], parts):
            self.recomputes = recomputes
            requests = [in_parts(item, num_parts) for item in whole]
            slots = self.measured_slots(requests, in_all)
            with suppress(InvalidInput):  # it says which item is too large
                for item in range(len(items)):
                    planner.next_shares(requests, item, slots, in_step, in_all, most=1)
                break
        first, number, peak = 0, 0, None
        meter = new_meter(device)
        if measures:
            meter.start()
        try:
            while first < len(items):
                held = max(everyone(meter.mark() if measures else 0))
                plan = partial(planner.next_shares, requests, first, slots, in_step, in_all - held, held)
                shares, answered = self._as_many_as_fit(items, requests, plan)
                first += sum(len(share.items) for share in shares)
                own = shares[self.facts.dp_rank]
                sizes = own.num_tokens, own.num_logical_tokens, int(own.planned_bytes)
                planning = Planning(number, len(items) - first, *sizes, in_all - held, peak)
                inputs = tuple(items[place] for place in own.items)
                yield MicroBatch(inputs, tuple(answered.pop()), own.items, planning)  # nothing here holds its outputs
                if measures:
                    peak = meter.peak() - held
                    times = peak / own.planned_bytes if peak > in_all - held and own.items else 1.0
                    for kind, over in everyone((sorted(own.kind), times)):
                        if over > 1:
                            planner.exceeded(frozenset(kind), over)
                number += 1
        finally:
            self.recomputes = self.recompute == "on"
            if measures:
                meter.stop()

    def _agreed_requests(self, items: Sequence[Inputs]) -> list[list[CheckedInput]]:
        """Check the items. Raises InvalidInput on every rank if they differ between ranks, or one of them is wrong."""
        with agreement():
            requests = [self.checked(item, f"items[{number}]") for number, item in enumerate(items)]
        if len(set(everyone(_digest(requests)))) > 1:
            raise InvalidInput("every rank must give the same items; they are dealt out here", "items")
        return requests

    def measured_slots(self, requests: list[list[CheckedInput]], budget_bytes: float) -> list[PlannedSlot]:
        """Return the slots that are used, by passes in the order of their forwards, and measure their unknown costs.

        A forward with a slot has a graph if it, or the base, is trained.
        """
        of_pass: dict[Pass, list[CheckedInput]] = {}
        for request in (request for item in requests for request in item):
            of_pass.setdefault(request.goes_in, []).append(request)
        found = []
        for each in sorted(of_pass, key=lambda each: each.place):
            slot = self._slots[each.adapter]
            keeps_graph = (slot.trainable or self.trains_base) and torch.is_grad_enabled() and not each.no_grad
            found.append(PlannedSlot(each, slot.lora, keeps_graph, self.least_saved_tokens, self.recomputes))
            with self._resident(each.adapter):
                self.dispatcher.planner.measure(self.engine, found[-1], of_pass[each], budget_bytes)
        return found

    def _as_many_as_fit(
        self, items: Sequence[Inputs], requests: list[list[CheckedInput]], plan: Callable[..., list[RankShare]]
    ) -> tuple[list[RankShare], list[list[Any]]]:
        """Plan and do the forward; if a device runs out of memory, plan again with half of the items.

        Ranks that share a pack, or go in step, wait for each other inside a forward, and cannot recover from that
        error.
        """
        shares = plan()
        while True:
            own, answered = shares[self.facts.dp_rank], []
            with suppress(torch.OutOfMemoryError):
                outputs = self._forward([request for place in own.items for request in requests[place]])
                answered.append(nested_alike([items[place] for place in own.items], iter(outputs)))
            if all(everyone(len(answered) > 0)):
                return shares, answered
            answered.clear()
            num_items = sum(len(share.items) for share in shares)
            if num_items == 1:
                place = f"items[{max(share.items for share in shares)[0]}]"
                raise InvalidInput("it alone takes more memory than the device has", place)
            shares = plan(most=num_items // 2)

    def _resident(self, name: str | None) -> AbstractContextManager[Engine]:
        """Have an adapter on the device, for passes that recompute layers if `recomputes` is set."""
        self.dispatcher.set_recompute(slot := self.slot(name), self.recomputes)
        return self.dispatcher.resident(slot)

    def checked(self, inputs: Inputs, place: str) -> list[CheckedInput]:
        requests = []
        for where, asked in leaves(inputs, place):
            requests.append(check(asked, where, self.facts.vocab_size, self._active, self.facts.routes))
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
        with agreement():
            for name in names:
                self._trainable(name)
                self._refuse_alive(name, "stepped")
                if adam.noise_scale:
                    message = "it needs the weights of your losses, which only a run's or a session's have"
                    raise InvalidInput(message, "noise_scale")
                if adam.lora_plus_ratio != 1 and self._slots[name].lora is None:
                    raise InvalidInput("the base has no B matrices", "lora_plus_ratio")
            if not (math.isfinite(denominator) and denominator > 0):
                raise InvalidInput(f"a positive number is wanted, not {denominator}", "denominator")
        if self._lockstep is not None:
            self._lockstep.release()
        norms = {}
        for name in names:
            with self.dispatcher.resident(self.slot(name)):
                norms[name] = self.engine.trained.reduce(denominator)
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if broken:
            self.zero_grad(names)
            message = f"the gradient's norm is {norms[broken[0]]}; no weight has changed"
            raise InvalidInput(message, _place(broken[0]))
        stepped = {}
        for name, norm in norms.items():
            with self.dispatcher.resident(self.slot(name)):
                stepped[name] = self.engine.trained.apply(adam, learning_rate, norm)
        return stepped

    def zero_grad(self, adapters: Sequence[str | None] | None = None) -> None:
        """Set the accumulated gradients of these adapters (None: of the base) to zero; by default of all trained."""
        trained = [name for name, slot in self._slots.items() if slot.trainable]
        for name in trained if adapters is None else adapters:
            with self.dispatcher.resident(self.slot(name)) as engine:
                engine.zero_grad()

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Scalars of all data-parallel ranks added up; those whose names end in `:max` by their maximum."""
        return self.engine.reduce(sums)

    def memory(self) -> MemoryFigures:
        """Return what this rank's memory holds now."""
        device = self.facts.device
        on_cuda = device.type == "cuda"
        reserved = torch.cuda.memory_reserved(device) if on_cuda else psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryFigures(self.engine.memory().device_bytes, reserved, peak)

    # State.

    def snapshot(self, name: str) -> Snapshot:
        """The adapter's weights as they are now, whole and float32, in host memory of every rank."""
        with agreement():
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
        with agreement():
            if self.facts.rank == 0:
                snapshot.write(folder)

    def save(self, name: str | None, folder: Path) -> None:
        """Write `weights/` and `optimizer/` of a trained slot, as in a job's checkpoint; rank 0 writes."""
        with agreement():
            self._trainable(name)
        with self.dispatcher.resident(self.slot(name)) as engine:
            engine.save(folder)

    def save_in_background(self, name: str, folder: Path) -> "Future[None]":
        """Copy what `save` writes of an adapter to the host's memory, and write it on rank 0 beside later steps.

        Only the copy waits for other ranks. The folder is there once it is whole; `result()` of what is returned waits
        for that, and raises what prevented it.
        """
        if name is None:
            raise InvalidInput("a copy of all weights and moments may not fit the host's memory: save it", "the base")
        with agreement():
            self._trainable(name)
        with self.dispatcher.resident(self.slot(name)):
            write = self.engine.copied_state()
        return _WRITING.submit(_write_whole, write, folder) if write is not None else _WRITING.submit(lambda: None)

    def load(self, name: str | None, folder: Path) -> None:
        """Resume a trained slot from what `save` or a job wrote, under any layout: weights, moments, step count.

        Raises InvalidInput as `load_adapter` does.
        """
        with agreement():
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


_WRITING = ThreadPoolExecutor(1, thread_name_prefix="state")
_READING = ThreadPoolExecutor(2, thread_name_prefix="prefetch")
_PIECE_BYTES = 1 << 24


def _write_whole(write: Callable[[Path], None], folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    temporary.rename(folder)


def prefetch(folder: Path) -> "Future[int]":
    """Read an adapter's files in a thread, so that `load_adapter` finds them in the machine's memory. Not collective.

    Slots stay where they are, and nothing is checked yet. The result is the number of bytes. One rank of a machine does
    it for all; on others it is 0.
    """
    return _READING.submit(_read_ahead, folder) if os.environ.get("LOCAL_RANK", "0") == "0" else _READING.submit(int)


def _read_ahead(folder: Path) -> int:
    num_bytes = 0
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                num_bytes += len(piece)
    return num_bytes


def _place(name: str | None) -> str:
    return "the base" if name is None else f"adapter {name!r}"


# --- A head of one's own on hidden states, trained with a slot of a TrainerRank ---


class Head(Protocol):
    """A module, such as a torch.nn.Module, that computes named numbers from hidden states, [N, H], a row for each."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def scores(self, hidden_NH: Tensor) -> dict[str, Tensor]: ...


def train_head(rank: TrainerRank, name: str | None, head: Head) -> None:
    """Train a head with an adapter, or (None) with the base, once that was made. Heads are equal on all ranks.

    `optim_step` steps both, by the norm of both; `save` and `load` have both, and the head's buffers as rank 0 has
    them. Parameters take the engine's dtype, and lie in a buffer of the slot from then on. Raises InvalidInput if the
    slot is not trained. Collective.
    """
    with agreement():
        if not (rank.trains_base if name is None else rank.adapters.get(name)):
            raise InvalidInput("what it is to be trained with is not trained", "head")
    rank.engine.train_own(rank.slot(name), dict(head.named_parameters()), dict(head.named_buffers()))


# --- Starts a TrainerRank in a process that a launcher started as a rank, or in a single process ---


def start(
    model: Path,
    layout: Layout | None = None,
    dtype: Dtype = "float32",
    memory_budget_bytes: int | None = None,
    engine: EngineName = "megatron",
    quantize_base: Quantization | None = None,
    optimizer_states: OptimizerStates = "float32",
    recompute: Recompute = "auto",
) -> TrainerRank:
    """A TrainerRank around a fresh engine. Collective.

    Args:
        model: a Hugging Face folder.
        layout: by default all ranks are data-parallel.
        quantize_base: hold the base's linears so; then adapters alone are trained.
        optimizer_states: how both moments of AdamW are held.
        recompute: see TrainerRank.

    Raises:
        InvalidInput: the folder or the layout cannot be used, or the engine does not hold weights or moments so.
    """
    if rule := storage_not_supported(engine, quantize_base, optimizer_states):
        raise InvalidInput(rule, "start")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if num_ranks > 1 and not dist.is_initialized():
        start_group(backend())
    made = new_engine(engine, model, layout or Layout(dp=num_ranks), dtype, quantize_base, optimizer_states)
    return TrainerRank(made, memory_budget_bytes, recompute=recompute)
