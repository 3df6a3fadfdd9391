"""The planner: decides which of the next items form a micro-batch, and which rank gets which. Equal on every rank.

The memory of a micro-batch is simulated: the forwards slot by slot, each of the backbone and then of its heads; the
user's loss; then the backwards, the newest first, each freeing its memory. What passes hold is measured (probes.py).
What a loss does is the user's: it is taken to keep one copy of each output that has a gradient until it has made that
gradient, and to work on one input's outputs at a time in two copies more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from longshore.training import Lora
from megatron_worker.tensors.pass_costs import PassBytes, PassCost
from megatron_worker.trainer_rank.forward_engine import ForwardEngine
from megatron_worker.trainer_rank.inputs import CheckedInput, HeadCall
from megatron_worker.trainer_rank.memory.probes import block_mask_bytes, mask_elements, measure_backbone, measure_head
from megatron_worker.trainer_rank.packing import PackSize, pack
from shared.errors import InvalidInput

_MARGIN = 0.02  # added to an estimate, as a fraction
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


@dataclass(frozen=True)
class SlotLoad:
    """The work of one slot in one rank's micro-batch."""

    size: PackSize
    rows: dict[HeadCall, HeadRows] = field(default_factory=dict)

    def with_requests(self, requests: Sequence[CheckedInput]) -> "SlotLoad":
        size, rows = self.size.copy(), self.rows.copy()
        for request in requests:
            size.add(request.token_L)
            count = len(request.position_P)
            for question in request.questions:
                had = rows.get(question, HeadRows())
                rows[question] = HeadRows(
                    had.num + count, max(had.most, count), max(had.num_labels, request.num_labels)
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

    Every cost is measured when it is first needed. `_excess`: by kinds of questions, the factor by which a micro-batch
    that exceeded its budget took more than its estimate.
    """

    def __init__(self, engine: ForwardEngine, min_shared_tokens: int) -> None:
        self._engine, self._min_shared = engine, min_shared_tokens
        self._backbones: dict[tuple[Lora | None, bool, bool], PassCost] = {}
        self._heads: dict[tuple[HeadCall, int, bool], PassCost] = {}
        self._excess: dict[frozenset[str], float] = {}

    def measure(self, slot: PlannedSlot, requests: Sequence[CheckedInput], budget_bytes: float) -> None:
        """Measure the costs of these requests of the active slot that are not known yet. Collective."""
        load = SlotLoad(PackSize(self._min_shared)).with_requests(requests)
        for branches in (False, True)[: 1 + (load.size.num_shared > 0)]:
            backbone = slot.lora, slot.keeps_graph, branches
            if backbone not in self._backbones:
                self._backbones[backbone] = measure_backbone(self._engine, slot.keeps_graph, branches, budget_bytes)
        for head in sorted({_head_key(q, r.num_labels, slot.keeps_graph) for r in requests for q in r.questions}):
            if head not in self._heads:
                self._heads[head] = measure_head(self._engine, *head, budget_bytes)

    def next_shares(
        self,
        items: Sequence[Sequence[CheckedInput]],
        first: int,
        slots: Sequence[PlannedSlot],
        budget_bytes: float,
        held_bytes: float = 0.0,
        most: int | None = None,
    ) -> list[RankShare]:
        """Divide as many items as fit, from `first` on in order, over the ranks: each goes to the one with least to do.

        Args:
            slots: in the order of their forwards.
            budget_bytes: what is left of the budget beside `held_bytes`.
            most: the most items to take.

        Raises:
            InvalidInput: even the first item alone does not fit.
        """
        # Ranks that go in step run the backbones of all slots, if need be with an empty pack.
        nothing = {slot: SlotLoad(PackSize(self._min_shared)) for slot in slots if self._engine.needs_lockstep}
        shares = [RankShare((), nothing)] * self._engine.facts.dp_size
        for item in range(first, len(items) if most is None else first + most):
            least = min(range(len(shares)), key=lambda rank: (shares[rank].planned_bytes, rank))
            grown = self._grown(shares[least], item, items[item], slots)
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
        """Learn that a micro-batch with these kinds of questions took so many times its estimate."""
        self._excess[kind] = self._excess.get(kind, 1.0) * times

    def _grown(
        self, share: RankShare, item: int, requests: Sequence[CheckedInput], slots: Sequence[PlannedSlot]
    ) -> RankShare:
        loads = {}
        for slot in slots:
            own = [request for request in requests if request.adapter == slot.name and not request.is_empty]
            before = share.loads.get(slot)
            if own:
                loads[slot] = (before or SlotLoad(PackSize(self._min_shared))).with_requests(own)
            elif before:
                loads[slot] = before
        grown = RankShare((*share.items, item), loads)
        return replace(grown, planned_bytes=self._estimate(loads) * (1 + _MARGIN) * self._excess.get(grown.kind, 1.0))

    def _estimate(self, loads: dict[PlannedSlot, SlotLoad]) -> float:
        """Return the bytes at the peak of a micro-batch."""
        live = peak = gradients = largest = 0.0
        passes: list[tuple[list[PassBytes], list[tuple[PassBytes, float]]]] = []
        for slot, load in loads.items():
            masks, num_tokens = self._mask_bytes(load.size), load.size.num_tokens
            backbone = self._backbones[slot.lora, slot.keeps_graph, load.size.num_shared > 0].at(num_tokens)
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
        if self._engine.needs_lockstep:  # the heads of all slots go before their backbones (lockstep.py)
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

    def _mask_bytes(self, size: PackSize) -> float:
        """Return the bytes of the attention masks of a pack's trees, which all layers share."""
        facts = self._engine.facts
        if not size.num_shared:
            return 0.0
        if facts.device.type == "cuda":
            return block_mask_bytes(size.num_tokens)
        units = (tuple(token_L.tobytes() for token_L in unit) for unit in size.trees())
        return getattr(torch, facts.dtype).itemsize * sum(_mask_elements(unit, self._min_shared) for unit in units)


@lru_cache(maxsize=4096)
def _mask_elements(unit: tuple[bytes, ...], min_shared_tokens: int) -> int:
    return mask_elements(pack([np.frombuffer(ids, np.int64) for ids in unit], min_shared_tokens).parent_T)


def _head_key(question: HeadCall, num_labels: int, keeps_graph: bool) -> tuple[HeadCall, int, bool]:
    """Return the key of a head's cost: settings that do not change its memory are left out, labels are rounded up."""
    rounded = 1 << (num_labels - 1).bit_length() if num_labels and question.kind == "ranks" else 0
    return replace(question, temperature=1.0), rounded, keeps_graph
