"""The planner: how many tokens a job's micro-batch has, and which items TrainerRank's has. Equal on every rank.

A job's micro-batch is one pass, forward and backward, which is measured whole (probes.py).

For TrainerRank the memory of a micro-batch is simulated: the forwards slot by slot, each of the backbone and then of
its heads; the user's loss; then the backwards, the newest first, each freeing its memory. The memory of each pass is
measured (probes.py). The user's loss is assumed to keep one copy of each output that has a gradient until it has made
that gradient, and to need two more copies of one input's outputs at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longshore.training import Lora
from megatron_worker.engine import Facts, LossFunction
from megatron_worker.forwards.inputs import CheckedInput, HeadCall, Ints
from megatron_worker.forwards.packing import PackSize
from megatron_worker.memory.pass_costs import PassBytes, PassCost
from megatron_worker.memory.probes import mask_bytes, measure_backbone, measure_head, measure_step
from megatron_worker.tensors.slot_engine import Engine
from shared.errors import InvalidInput
from shared.jobs.packed import Units
from shared.jobs.prefix_forest import tables

_MARGIN = 0.02  # added to an estimate, as a fraction
_STEP_MARGIN = 0.08  # to a job's: many short sequences take somewhat more memory than a probe's two
_LOSS_WORK = 2  # copies of one input's outputs that a loss is assumed to make


class HeadRows(NamedTuple):
    """Rows of one question in a pack: their number, the most of one input, and the most labels of a row."""

    num: int = 0
    most: int = 0
    num_labels: int = 0


class PlannedSlot(NamedTuple):
    name: str | None
    lora: Lora | None
    keeps_graph: bool
    least_saved_tokens: int
    recomputes: bool = False


@dataclass(frozen=True)
class SlotLoad:
    """The work of one slot in one rank's micro-batch."""

    size: PackSize
    rows: dict[HeadCall, HeadRows] = field(default_factory=dict)

    def with_requests(self, requests: Sequence[CheckedInput]) -> "SlotLoad":
        size, rows = self.size.with_sequences([request.token_L for request in requests]), self.rows.copy()
        for request in requests:
            count = len(request.position_P)
            for question in request.questions:
                had = rows.get(question, HeadRows())
                rows[question] = HeadRows(
                    had.num + count, max(had.most, count), max(had.num_labels, request.label_PK.shape[1])
                )
        return SlotLoad(size, rows)


@dataclass(frozen=True)
class RankShare:
    """One rank's share of a micro-batch: the indices of its items, their work by slot, and the estimated bytes."""

    items: tuple[int, ...]
    loads: dict[PlannedSlot, SlotLoad]
    planned_bytes: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(load.size.num_tokens for load in self.loads.values())

    @property
    def num_logical_tokens(self) -> int:
        """The number of tokens if prefixes were not shared."""
        return self.num_tokens + sum(load.size.num_shared for load in self.loads.values())

    @cached_property
    def kind(self) -> frozenset[str]:
        """The kinds of questions that are asked."""
        return frozenset(question.kind for load in self.loads.values() for question in load.rows)


class Planner:
    """Plans micro-batches for the data-parallel ranks of an engine. Its state is the same on all of them.

    Every cost is measured when it is first needed. `_excess`: for each set of request kinds, the factor by which a
    micro-batch that exceeded its budget took more than its estimate.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._backbones: dict[tuple[Lora | None, bool, bool, bool], PassCost] = {}
        self._heads: dict[tuple[HeadCall, int, bool], PassCost] = {}
        self._excess: dict[frozenset[str], float] = {}

    def step_tokens(
        self, engine: Engine, loss: LossFunction, units: Units, budget_bytes: float, most_tokens: int | None
    ) -> int:
        """Return how many tokens of a job's units fit the budget, by passes of `most_tokens` at most. Collective.

        The slot that is active must hold no gradients.
        """
        trees = _trees(units)
        most_masks = max((mask_bytes(parent_T, self._facts) / len(parent_T) for parent_T in trees), default=0.0)
        cost = measure_step(engine, loss, len(trees) > 0, budget_bytes, most_tokens)
        return cost.size_within(budget_bytes / (1 + _STEP_MARGIN), most_masks)

    def measure(self, engine: Engine, slot: PlannedSlot, requests: Sequence[CheckedInput], budget_bytes: float) -> None:
        """Measure the costs of these requests of the active slot that are not known yet. Collective."""
        load = _no_load(slot).with_requests(requests)
        for branches in (False, True)[: 1 + (load.size.num_shared > 0)]:
            backbone = slot.lora, slot.keeps_graph, slot.recomputes, branches
            if backbone not in self._backbones:
                self._backbones[backbone] = measure_backbone(engine, slot.keeps_graph, branches, budget_bytes)
        for head in sorted(
            {_head_key(q, r.label_PK.shape[1], slot.keeps_graph) for r in requests for q in r.questions}
        ):
            if head not in self._heads:
                self._heads[head] = measure_head(engine, *head, budget_bytes)

    def next_shares(
        self,
        items: Sequence[Sequence[CheckedInput]],
        first: int,
        slots: Sequence[PlannedSlot],
        in_step: bool,
        budget_bytes: float,
        held_bytes: float = 0.0,
        most: int | None = None,
    ) -> list[RankShare]:
        """Divide as many items as fit, from `first` on in order, over the ranks: each goes to the least loaded one.

        Args:
            slots: in the order of their forwards.
            in_step: ranks run the backbones of all slots, if need be with an empty pack, and all heads go backward
                before them.
            budget_bytes: the rest of the budget, without `held_bytes`.
            most: the most items to take.

        Raises:
            InvalidInput: even the first item alone does not fit.
        """
        shares = [RankShare((), {slot: _no_load(slot) for slot in slots if in_step})] * self._facts.dp_size
        for item in range(first, len(items) if most is None else first + most):
            least = min(range(len(shares)), key=lambda rank: (shares[rank].planned_bytes, rank))
            grown = self._grown(shares[least], item, items[item], slots, in_step)
            if grown.planned_bytes > budget_bytes:
                if item == first:
                    needed, left = int(grown.planned_bytes), int(budget_bytes)
                    message = f"it alone needs about {needed:,} bytes, backward included; the budget leaves {left:,}"
                    if held_bytes:
                        message += f" beside {int(held_bytes):,} that are held of micro-batches before"
                    raise InvalidInput(message, f"items[{item}]")
                break
            shares[least] = grown
        return shares

    def exceeded(self, kind: frozenset[str], times: float) -> None:
        """Record that a micro-batch with these kinds of requests took `times` its estimate."""
        self._excess[kind] = self._excess.get(kind, 1.0) * times

    def _grown(
        self, share: RankShare, item: int, requests: Sequence[CheckedInput], slots: Sequence[PlannedSlot], in_step: bool
    ) -> RankShare:
        loads = {}
        for slot in slots:
            own = [request for request in requests if request.adapter == slot.name and not request.is_empty]
            before = share.loads.get(slot)
            if own:
                loads[slot] = (before or _no_load(slot)).with_requests(own)
            elif before:
                loads[slot] = before
        grown = RankShare((*share.items, item), loads)
        excess = self._excess.get(grown.kind, 1.0)
        return replace(grown, planned_bytes=self._estimate(loads, in_step) * (1 + _MARGIN) * excess)

    def _estimate(self, loads: dict[PlannedSlot, SlotLoad], in_step: bool) -> float:
        """Return the bytes at the peak of a micro-batch."""
        live = peak = gradients = largest = 0.0
        passes: list[tuple[list[PassBytes], list[tuple[PassBytes, float]]]] = []
        for slot, load in loads.items():
            branches = load.size.num_shared > 0
            has_masks = branches or any(self._facts.windows)
            masks = mask_bytes(tables(load.size.nodes)[1], self._facts) if has_masks else 0.0
            backbone = self._backbones[slot.lora, slot.keeps_graph, slot.recomputes, branches].at(load.size.num_tokens)
            peak = max(peak, live + backbone.forward + masks)
            live += (backbone.kept + masks) * slot.keeps_graph
            heads = []
            for question, rows in sorted(load.rows.items(), reverse=True):  # as forward.py does
                head = self._heads[_head_key(question, rows.num_labels, slot.keeps_graph)].at(rows.num)
                heads.append(head)
                peak = max(peak, live + head.forward)
                live += head.kept
                gradients += head.gradient
                largest = max(largest, head.gradient * rows.most / rows.num)
            if slot.keeps_graph:
                passes.append((heads, [(backbone, masks)]))
        live += gradients
        peak = max(peak, live + _LOSS_WORK * largest)
        passes.reverse()
        if in_step:  # the heads of all slots go before their backbones (lockstep.py)
            passes = [([head for heads, _ in passes for head in heads], [b for _, bs in passes for b in bs])]
        for heads, backbones in passes:
            for head in reversed(heads):
                live -= head.kept + head.gradient
                peak = max(peak, live + head.backward)
                live += head.left
            for backbone, masks in backbones:
                live -= backbone.kept + masks
                peak = max(peak, live + backbone.backward + masks)
        return peak


def _trees(units: Units) -> list[Ints]:
    """Return the parents, [T], of the units that branch."""
    parent_T = units.columns.get("parent")
    if parent_T is None:
        return []
    begin_U, end_U = units.token_offsets[:-1].astype(np.int64), units.token_offsets[1:].astype(np.int64)
    index_T = np.arange(len(parent_T)) - np.repeat(begin_U, end_U - begin_U)
    branching_U = np.unique(np.searchsorted(begin_U, np.flatnonzero(parent_T != index_T - 1), side="right") - 1)
    return [parent_T[begin_U[unit] : end_U[unit]].astype(np.int64) for unit in branching_U]


def _no_load(slot: PlannedSlot) -> SlotLoad:
    return SlotLoad(PackSize(slot.least_saved_tokens))


def _head_key(question: HeadCall, num_labels: int, keeps_graph: bool) -> tuple[HeadCall, int, bool]:
    """Return the key of a head's cost: settings that do not change its memory are left out, labels are rounded up."""
    rounded = 1 << (num_labels - 1).bit_length() if num_labels and question.kind == "ranks" else 0
    return replace(question, temperature=1.0), rounded, keeps_graph
