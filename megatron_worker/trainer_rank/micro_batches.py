"""The loop behind `forward_micro_batches`: agree, plan, forward, hand over, measure, learn."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatron_worker.trainer_rank.costs import Head, Trunk, TrunkCost, measure_trunk
from megatron_worker.trainer_rank.inputs import ForwardInput, ForwardOutput, Request
from megatron_worker.trainer_rank.memory import free_bytes, new_meter
from megatron_worker.trainer_rank.planner import Experience, Height, Planner, Share, Slots
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from megatron_worker.trainer_rank.rank import TrainerRank

T = TypeVar("T")


@dataclass(frozen=True)
class Planning:
    """Of this rank's micro-batch: what was planned, and the height that the one before it reached, if measured.

    `num_logical_tokens`: without sharing prefixes. Bytes are beside weights and optimizer.
    """

    number: int
    num_items_left: int
    num_tokens: int
    num_logical_tokens: int
    estimated_bytes: int
    budget_bytes: int
    previous_height_bytes: int | None


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share: items as they were given, their outputs, and their places among all items."""

    inputs: tuple[tuple[ForwardInput, ...], ...]
    outputs: tuple[tuple[ForwardOutput, ...], ...]
    indices: tuple[int, ...]
    planning: Planning


class MemoryModel:
    """What a TrainerRank has learnt of memory, from one loop to the next."""

    def __init__(self) -> None:
        self.costs: dict[Trunk, TrunkCost] = {}
        self.experience = Experience()


def micro_batches(
    rank: "TrainerRank", items: Sequence[Sequence[ForwardInput]], budget_bytes: int | None, model: MemoryModel
) -> Iterator[MicroBatch]:
    """See `TrainerRank.forward_micro_batches`. `budget_bytes` None: what is free."""
    requests = _agreed_requests(rank, items)
    planner = _new_planner(rank, requests, model)
    measures = budget_bytes is not None or rank.facts.device.type == "cuda"
    meter = new_meter(rank.facts.device)
    first, number, height = 0, 0, None
    if measures:
        meter.start()
    try:
        while first < len(items):
            held = meter.mark() if measures else 0
            budget = (budget_bytes - held) if budget_bytes is not None else free_bytes(rank.facts.device)
            budget, held = min(_everyone(rank, (budget, held)))
            shares = planner.next_shares(requests, first, budget, held)
            first += sum(len(share.items) for share in shares)
            own = shares[rank.facts.dp_rank]
            yield _forward(
                rank,
                items,
                own,
                Planning(
                    number,
                    len(items) - first,
                    own.num_tokens,
                    own.num_logical_tokens,
                    int(own.corrected_bytes),
                    int(budget),
                    height,
                ),
            )
            if measures:
                height = meter.height()
                _learn(rank, model.experience, own, height)
            number += 1
    finally:
        if measures:
            meter.stop()


def _forward(
    rank: "TrainerRank", items: Sequence[Sequence[ForwardInput]], own: Share, planning: Planning
) -> MicroBatch:
    inputs = tuple(tuple(items[place]) for place in own.items)
    outputs = iter(rank.forward([asked for item in inputs for asked in item]))
    by_item = tuple(tuple(next(outputs) for _ in item) for item in inputs)
    return MicroBatch(inputs, by_item, own.items, planning)


def _learn(rank: "TrainerRank", experience: Experience, own: Share, height: int) -> None:
    for heights in _everyone(rank, Height(own.kind, own.estimated_bytes, height) if own.items else None):
        if heights is not None and heights.estimated_bytes:
            experience.learn(heights)


def _agreed_requests(rank: "TrainerRank", items: Sequence[Sequence[ForwardInput]]) -> list[list[Request]]:
    """Checked items. Raises InvalidInput on every rank when they differ between ranks, or one of them is wrong."""
    with rank.agreement():
        requests = [rank.checked(item, f"items[{number}]") for number, item in enumerate(items)]
    if len(set(_everyone(rank, _digest(requests)))) > 1:
        raise InvalidInput("every rank must give the same items; they are dealt out here", "items")
    return requests


def _digest(requests: list[list[Request]]) -> int:
    digest = zlib.crc32(str(torch.is_grad_enabled()).encode())
    for item in requests:
        digest = zlib.crc32(str(len(item)).encode(), digest)
        for r in item:
            asked = (r.adapter, sorted(r.kinds), r.asked.top_k, r.asked.temperature)
            digest = zlib.crc32(repr(asked).encode(), digest)
            for array in (r.token_L, r.position_P, r.label_PK):
                digest = digest if array is None else zlib.crc32(array.tobytes(), digest)
    return digest


def _new_planner(rank: "TrainerRank", requests: list[list[Request]], model: MemoryModel) -> Planner:
    """With the cost of every trunk that may be met, measured where it is not known yet."""
    keeps_graph = torch.is_grad_enabled()
    slots: Slots = {}
    for name in sorted({r.adapter for item in requests for r in item}, key=str):
        lora, trainable = rank.lora_of(name)
        slots[name] = lora, trainable and keeps_graph
        for branches in (False, True):
            trunk = Trunk(lora, trainable and keeps_graph, branches)
            if trunk not in model.costs:
                with rank.adapter(name):
                    costs = _everyone(rank, measure_trunk(rank.engine, trunk))
                model.costs[trunk] = max(costs, key=lambda cost: (cost.height.token_bytes, cost.height.fixed_bytes))
    weight_VH, shard = rank.engine.output_head
    head = Head(weight_VH.shape[1], shard.vocab_size, shard.size, weight_VH.element_size())
    return Planner(head, slots, model.costs, model.experience, rank.facts.dp_size, rank.min_shared_tokens)


def _everyone(rank: "TrainerRank", value: T) -> list[T]:
    """The value of every rank, in their order."""
    if rank.facts.layout.world_size == 1:
        return [value]
    everyone: list[Any] = [None] * rank.facts.layout.world_size
    dist.all_gather_object(everyone, value)
    return everyone
