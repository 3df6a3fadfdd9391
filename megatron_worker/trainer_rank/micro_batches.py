"""The loop behind `forward_micro_batches`: agree, plan, forward, hand over, measure, learn."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_worker.engine import Facts
from megatron_worker.head.logprobs import kernels_do
from megatron_worker.process.agreement import everyone
from megatron_worker.trainer_rank.inputs import ForwardInput, ForwardOutput, Request, TopK
from megatron_worker.trainer_rank.memory.backbone_costs import Backbone, BackboneCost, measure_backbone
from megatron_worker.trainer_rank.memory.head_costs import Head
from megatron_worker.trainer_rank.memory.meter import free_bytes, new_meter
from megatron_worker.trainer_rank.memory.planner import Experience, Peak, Planner, Share, Slots
from megatron_worker.trainer_rank.packing import PackSize
from megatron_worker.trainer_rank.slot_engine import SlotEngine
from shared.errors import InvalidInput
from shared.jobs.job import Lora


@dataclass(frozen=True)
class Planning:
    """Of this rank's micro-batch: what was planned, and the peak that the one before it reached, if measured.

    `num_logical_tokens`: without sharing prefixes. Bytes are beside weights and optimizer.
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
    """This rank's share: items as they were given, their outputs, and their places among all items."""

    inputs: tuple[tuple[ForwardInput, ...], ...]
    outputs: tuple[tuple[ForwardOutput, ...], ...]
    indices: tuple[int, ...]
    planning: Planning


class Forwards(Protocol):
    """What this loop needs of a TrainerRank."""

    engine: SlotEngine
    min_shared_tokens: int

    @property
    def facts(self) -> Facts: ...
    def forward(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]: ...
    def checked(self, inputs: Sequence[ForwardInput], place: str) -> list[Request]: ...
    def lora_of(self, name: str | None) -> tuple[Lora | None, bool]: ...
    def adapter(self, name: str | None) -> AbstractContextManager[None]: ...
    def agreement(self) -> AbstractContextManager[None]: ...


class MemoryModel:
    """What a TrainerRank has learnt of memory, from one loop to the next."""

    def __init__(self) -> None:
        self.costs: dict[Backbone, BackboneCost] = {}
        self.experience = Experience()


def micro_batches(
    rank: Forwards, items: Sequence[Sequence[ForwardInput]], budget_bytes: int | None, model: MemoryModel
) -> Iterator[MicroBatch]:
    """See `TrainerRank.forward_micro_batches`. `budget_bytes` None: what is free."""
    requests = _agreed_requests(rank, items)
    world_size = rank.facts.layout.world_size
    free = budget_bytes if budget_bytes is not None else free_bytes(rank.facts.device)
    planner = new_planner(rank, requests, model, min(everyone(world_size, free)))
    measures = budget_bytes is not None or rank.facts.device.type == "cuda"
    meter = new_meter(rank.facts.device)
    first, number, peak = 0, 0, None
    if measures:
        meter.start()
    try:
        while first < len(items):
            held = meter.mark() if measures else 0
            budget = (budget_bytes - held) if budget_bytes is not None else free_bytes(rank.facts.device)
            budget, held = min(everyone(world_size, (budget, held)))
            shares = planner.next_shares(requests, first, budget, held)
            first += sum(len(share.items) for share in shares)
            own = shares[rank.facts.dp_rank]
            planning = Planning(
                number,
                len(items) - first,
                own.num_tokens,
                own.num_logical_tokens,
                int(own.corrected_bytes),
                int(budget),
                peak,
            )
            to_hand_over = [_forward(rank, items, own, planning)]
            output_bytes = _bytes_of(to_hand_over[0])
            yield to_hand_over.pop()  # nothing here holds its outputs
            if measures:
                peak = meter.peak_of_new(output_bytes)
                _learn(rank, model.experience, own, peak)
            number += 1
    finally:
        if measures:
            meter.stop()


def _forward(rank: Forwards, items: Sequence[Sequence[ForwardInput]], own: Share, planning: Planning) -> MicroBatch:
    inputs = tuple(tuple(items[place]) for place in own.items)
    outputs = iter(rank.forward([asked for item in inputs for asked in item]))
    by_item = tuple(tuple(next(outputs) for _ in item) for item in inputs)
    return MicroBatch(inputs, by_item, own.items, planning)


def _bytes_of(micro_batch: MicroBatch) -> int:
    """Of the outputs' storages, views of one counted once."""
    answers = [vars(output).values() for item in micro_batch.outputs for output in item]
    tensors = [t for values in answers for v in values for t in (vars(v).values() if isinstance(v, TopK) else (v,))]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _learn(rank: Forwards, experience: Experience, own: Share, peak: int) -> None:
    for peaks in everyone(
        rank.facts.layout.world_size, Peak(own.kind, own.estimated_bytes, peak) if own.items else None
    ):
        if peaks is not None and peaks.estimated_bytes:
            experience.learn(peaks)


def _agreed_requests(rank: Forwards, items: Sequence[Sequence[ForwardInput]]) -> list[list[Request]]:
    """Checked items. Raises InvalidInput on every rank when they differ between ranks, or one of them is wrong."""
    with rank.agreement():
        requests = [rank.checked(item, f"items[{number}]") for number, item in enumerate(items)]
    if len(set(everyone(rank.facts.layout.world_size, _digest(requests)))) > 1:
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


def new_planner(rank: Forwards, requests: list[list[Request]], model: MemoryModel, budget_bytes: float) -> Planner:
    """With the cost of every backbone that may be met, measured where it is not known yet."""
    keeps_graph = torch.is_grad_enabled()
    slots: Slots = {}
    by_name: dict[str | None, list[Request]] = {}
    for request in (r for item in requests for r in item):
        by_name.setdefault(request.adapter, []).append(request)
    for name in sorted(by_name, key=lambda name: (name is not None, name or "")):  # as forwards go
        lora, trainable = rank.lora_of(name)
        slots[name] = lora, trainable and keeps_graph
        size = PackSize(rank.min_shared_tokens)
        for request in by_name[name]:
            size.add(request.token_L)
        for branches in (False, True)[: 1 + (size.num_shared > 0)]:
            backbone = Backbone(lora, trainable and keeps_graph, branches)
            if backbone not in model.costs:
                with rank.adapter(name):
                    model.costs[backbone] = measure_backbone(rank.engine, backbone, budget_bytes)
    min_shared, in_step = rank.min_shared_tokens, rank.engine.in_step
    return Planner(_head(rank), slots, model.costs, model.experience, rank.facts.dp_size, min_shared, in_step)


def _head(rank: Forwards) -> Head:
    weight_VH, shard = rank.engine.output_head
    return Head(
        hidden_size=weight_VH.shape[1],
        vocab_size=shard.vocab_size,
        shard_size=shard.size,
        dtype=weight_VH.dtype,
        num_shards=1 if shard.group is None else shard.group.size(),
        kernels=kernels_do(weight_VH),
        on_device=weight_VH.is_cuda,
        is_cut=rank.facts.layout.cp > 1,
    )
