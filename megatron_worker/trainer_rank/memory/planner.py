"""The planner: which of the next items make a micro-batch, and which rank takes which. The same on every rank.

It knows what all ranks know: the items, the backbone's costs and the peaks that were measured, each brought together
over the ranks before it is used. It plans one micro-batch at a time, so that what the last one taught counts for the
next.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_worker.trainer_rank.inputs import Ints, Request
from megatron_worker.trainer_rank.memory.backbone_costs import Backbone, BackboneCost, mask_bytes
from megatron_worker.trainer_rank.memory.costs import SlotLoad, estimate, total_tokens
from megatron_worker.trainer_rank.memory.head_costs import Head
from megatron_worker.trainer_rank.packing import PackSize, pack
from shared.errors import InvalidInput
from shared.jobs.job import Lora

_MARGIN = 0.01  # on an estimate corrected by many peaks
_DOUBT = 0.04  # on top, on one that no peak has been measured for; less the more there were
_SPREAD = 0.5  # on top, of how far measured peaks differ in this from each other
_LEAST = 0.9  # of an estimate: what a loss did without before it may want again
_MEMORY = 16  # peaks that are remembered of a kind
_COMPARABLE = 4  # a peak says nothing of a micro-batch more than so many times as large

Slots = dict[str | None, tuple[Lora | None, bool]]


@dataclass(frozen=True)
class Peak:
    """What a micro-batch was estimated to hold, and what it did. `kind`: what was asked of it."""

    kind: str
    estimated_bytes: float
    measured_bytes: float


class Experience:
    """How far measured peaks were from their estimates, by kind."""

    def __init__(self) -> None:
        self._peaks: defaultdict[str, deque[Peak]] = defaultdict(lambda: deque(maxlen=_MEMORY))

    def learn(self, peak: Peak) -> None:
        self._peaks[peak.kind].append(peak)

    def corrected(self, kind: str, estimated_bytes: float) -> float:
        """An estimate as it should have been, with a margin."""
        ratios = [
            max(_LEAST, peak.measured_bytes / peak.estimated_bytes)
            for peak in self._peaks.get(kind, ())
            if peak.estimated_bytes * _COMPARABLE >= estimated_bytes
        ]
        if not ratios:
            return estimated_bytes * (1 + _MARGIN + _DOUBT)
        doubt = 2 * _DOUBT / (2 + len(ratios)) + _SPREAD * (max(ratios) - min(ratios))
        return estimated_bytes * max(ratios) * (1 + _MARGIN + doubt)


@dataclass(frozen=True)
class Share:
    """What one rank does in a micro-batch: places of items, its estimate as it stands and corrected."""

    items: tuple[int, ...]
    num_tokens: int
    num_logical_tokens: int
    kind: str
    estimated_bytes: float
    corrected_bytes: float


class _Load:
    """A rank's share as it grows."""

    def __init__(self, planner: "Planner") -> None:
        self._planner = planner
        self.items: list[int] = []
        self.slots = planner.new_slots()
        self.kinds: set[str] = set()
        self.estimated_bytes = self.corrected_bytes = 0.0

    def grown(self, item: int, requests: Sequence[Request]) -> "_Load":
        load = _Load(self._planner)
        load.items, load.kinds = [*self.items, item], self.kinds.copy()
        load.slots = self.slots.copy()
        for name in {request.adapter for request in requests if not request.is_empty}:
            load.slots[name] = self._planner.grown(self.slots.get(name), [r for r in requests if r.adapter == name])
        load.kinds |= {kind for request in requests if not request.is_empty for kind in request.kinds}
        load.estimated_bytes = self._planner.estimate(load.slots)
        load.corrected_bytes = self._planner.experience.corrected(load.kind, load.estimated_bytes)
        return load

    @property
    def kind(self) -> str:
        branches = any(slot.branches for slot in self.slots.values())
        return " ".join(sorted(self.kinds | ({"branches"} if branches else set())))

    def share(self) -> Share:
        tokens, logical = total_tokens(list(self.slots.values()))
        return Share(tuple(self.items), tokens, logical, self.kind, self.estimated_bytes, self.corrected_bytes)


class Planner:
    """Plans for `num_ranks` data-parallel ranks.

    Args:
        slots: of each adapter's name its shape, and whether a graph of it will be kept, in the order of their forwards.
        costs: of every backbone that may be met.
        in_step: every rank sends all slots' backbones forward, if with nothing.
    """

    def __init__(
        self,
        head: Head,
        slots: Slots,
        costs: dict[Backbone, BackboneCost],
        experience: Experience,
        num_ranks: int,
        min_shared_tokens: int,
        in_step: bool = False,
    ) -> None:
        self._head, self._slots, self._costs = head, slots, costs
        self._num_ranks, self._min_shared, self._in_step = num_ranks, min_shared_tokens, in_step
        self._mask_bytes: dict[tuple[bytes, ...], float] = {}
        self.experience = experience

    def new_slots(self) -> dict[str | None, SlotLoad]:
        return {name: SlotLoad(self._new_size()) for name in self._slots} if self._in_step else {}

    def _new_size(self) -> PackSize:
        return PackSize(self._min_shared)

    def grown(self, before: SlotLoad | None, requests: Sequence[Request]) -> SlotLoad:
        load = SlotLoad(self._new_size()) if before is None else before.copy()
        for request in requests:
            if not request.is_empty:
                load.add(request)
        load.mask_bytes = self._masks(load.size)
        return load

    def _masks(self, size: PackSize) -> float:
        """Of all trees of a pack; on a device, of the pack."""
        if not size.num_shared:
            return 0.0
        if self._head.on_device:
            return mask_bytes(np.zeros(size.num_tokens, dtype=np.int64), self._head.element, "cuda")
        return sum(self._tree_masks(unit) for unit in size.trees())

    def _tree_masks(self, unit: list[Ints]) -> float:
        key = tuple(token_L.tobytes() for token_L in unit)
        if key not in self._mask_bytes:
            parent_T = pack(unit, self._min_shared).parent_T
            self._mask_bytes[key] = mask_bytes(parent_T, self._head.element, "cpu")
        return self._mask_bytes[key]

    def estimate(self, loads: dict[str | None, SlotLoad]) -> float:
        slots = []
        for name in self._slots:
            if (load := loads.get(name)) is not None:
                lora, keeps_graph = self._slots[name]
                slots.append((load, self._costs[Backbone(lora, keeps_graph, load.branches)], keeps_graph))
        return estimate(slots, self._head, self._in_step)

    def next_shares(
        self, items: Sequence[Sequence[Request]], first: int, budget_bytes: float, held_bytes: float = 0.0
    ) -> list[Share]:
        """The items from `first` on that fit, in their order, each to the rank with the least to do.

        `budget_bytes` is what is left of the budget beside `held_bytes`. Raises InvalidInput when not even the first
        fits a rank that has nothing else.
        """
        loads = [_Load(self) for _ in range(self._num_ranks)]
        for item in range(first, len(items)):
            least = min(range(self._num_ranks), key=lambda rank: (loads[rank].corrected_bytes, rank))
            grown = loads[least].grown(item, items[item])
            if grown.corrected_bytes > budget_bytes:
                if item == first:
                    needed, left = int(grown.corrected_bytes), int(budget_bytes)
                    message = f"it alone needs about {needed:,} bytes, backward included; the budget leaves {left:,}"
                    if held_bytes:
                        message += f" beside {int(held_bytes):,} that are held of micro-batches before"
                    raise InvalidInput(message, f"items[{item}]")
                break
            loads[least] = grown
        return [load.share() for load in loads]
