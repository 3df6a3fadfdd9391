"""The loop of `forward_micro_batches`: agree, plan, forward, hand over, measure."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from longshore.training import Recompute
from megatron_worker.dispatch import WAYS, Dispatcher, SlotName
from megatron_worker.engine import Facts
from megatron_worker.forwards import CheckedInput, Inputs
from megatron_worker.memory import PlannedSlot, Planner, RankShare, default_budget, new_meter
from megatron_worker.process.ranks import everyone
from megatron_worker.tensors.slot_engine import Engine
from shared.errors import InvalidInput

T = TypeVar("T")


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


class Forwards(Protocol):
    """The methods of a TrainerRank that this module uses."""

    dispatcher: Dispatcher
    engine: Engine
    recompute: Recompute
    recomputes: bool

    @property
    def facts(self) -> Facts: ...
    def forward(self, inputs: Sequence[Inputs]) -> list[Any]: ...
    def checked(self, inputs: Inputs, place: str) -> list[CheckedInput]: ...
    def slot(self, name: str | None) -> SlotName: ...
    def planned_slot(self, name: str | None) -> PlannedSlot: ...
    def agreement(self) -> AbstractContextManager[None]: ...


def micro_batches(rank: Forwards, items: Sequence[Inputs], budget_bytes: int | None) -> Iterator[MicroBatch]:
    """See `TrainerRank.forward_micro_batches`. `budget_bytes` None: `default_budget`."""
    requests = _agreed_requests(rank, items)
    world_size, device = rank.facts.layout.world_size, rank.facts.device
    measures = budget_bytes is not None or device.type == "cuda"
    in_all = min(everyone(world_size, default_budget(device) if budget_bytes is None else budget_bytes))
    planner, in_step = rank.dispatcher.planner, rank.engine.needs_lockstep
    for recomputes in WAYS[rank.recompute]:
        rank.recomputes = recomputes
        slots = measured_slots(rank, requests, in_all)
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
            held = max(everyone(world_size, meter.mark() if measures else 0))
            plan = partial(planner.next_shares, requests, first, slots, in_step, in_all - held, held)
            shares, answered = _as_many_as_fit(rank, items, plan)
            first += sum(len(share.items) for share in shares)
            own = shares[rank.facts.dp_rank]
            sizes = own.num_tokens, own.num_logical_tokens, int(own.planned_bytes)
            planning = Planning(number, len(items) - first, *sizes, in_all - held, peak)
            inputs = tuple(items[place] for place in own.items)
            yield MicroBatch(inputs, tuple(answered.pop()), own.items, planning)  # nothing here holds its outputs
            if measures:
                peak = meter.peak() - held
                _learn(rank, planner, own, peak / own.planned_bytes if peak > in_all - held and own.items else 1.0)
            number += 1
    finally:
        rank.recomputes = rank.recompute == "on"
        if measures:
            meter.stop()


def _as_many_as_fit(
    rank: Forwards, items: Sequence[Inputs], plan: Callable[..., list[RankShare]]
) -> tuple[list[RankShare], list[list[Any]]]:
    """Plan and do the forward; if a device runs out of memory, plan again with half of the items.

    Ranks that share a pack, or go in step, wait for each other inside a forward, and cannot recover from that error.
    """
    shares = plan()
    while True:
        own, answered = shares[rank.facts.dp_rank], []
        with suppress(torch.OutOfMemoryError):
            answered.append(rank.forward([items[place] for place in own.items]))
        if all(everyone(rank.facts.layout.world_size, len(answered) > 0)):
            return shares, answered
        answered.clear()
        num_items = sum(len(share.items) for share in shares)
        if num_items == 1:
            raise InvalidInput(
                "it alone takes more memory than the device has", f"items[{max(s.items for s in shares)[0]}]"
            )
        shares = plan(most=num_items // 2)


def _learn(rank: Forwards, planner: Planner, own: RankShare, times: float) -> None:
    """Tell the planner by which factor each rank exceeded its estimate, if it did."""
    for kind, most in everyone(rank.facts.layout.world_size, (sorted(own.kind), times)):
        if most > 1:
            planner.exceeded(frozenset(kind), most)


def _agreed_requests(rank: Forwards, items: Sequence[Inputs]) -> list[list[CheckedInput]]:
    """Check the items. Raises InvalidInput on every rank if they differ between ranks, or one of them is wrong."""
    with rank.agreement():
        requests = [rank.checked(item, f"items[{number}]") for number, item in enumerate(items)]
    if len(set(everyone(rank.facts.layout.world_size, _digest(requests)))) > 1:
        raise InvalidInput("every rank must give the same items; they are dealt out here", "items")
    return requests


def _digest(requests: list[list[CheckedInput]]) -> int:
    digest = zlib.crc32(str(torch.is_grad_enabled()).encode())
    for item in requests:
        digest = zlib.crc32(str(len(item)).encode(), digest)
        for r in item:
            asked = (r.adapter, sorted(r.kinds), r.asked.top_k, r.asked.temperature)
            digest = zlib.crc32(repr(asked).encode(), digest)
            for array in (r.token_L, r.position_P, r.label_PK):
                digest = zlib.crc32(array.tobytes(), digest)
    return digest


def measured_slots(rank: Forwards, requests: list[list[CheckedInput]], budget_bytes: float) -> list[PlannedSlot]:
    """Return the slots that are used, in the order of their forwards, and measure their unknown costs."""
    of_slot: dict[str | None, list[CheckedInput]] = {}
    for request in (request for item in requests for request in item):
        of_slot.setdefault(request.adapter, []).append(request)
    found = []
    for name in sorted(of_slot, key=base_first):
        found.append(rank.planned_slot(name))
        with resident(rank, name):
            rank.dispatcher.planner.measure(rank.engine, found[-1], of_slot[name], budget_bytes)
    return found


def resident(rank: Forwards, name: str | None) -> AbstractContextManager[None]:
    """Have an adapter on the device, for passes that recompute layers if `recomputes` is set."""
    rank.dispatcher.set_recompute(slot := rank.slot(name), rank.recomputes)
    return rank.dispatcher.resident(slot)


def base_first(name: str | None) -> tuple[bool, str]:
    """The sort key of slots: the base first, then by name, so that the order is the same on every rank."""
    return name is not None, name or ""
