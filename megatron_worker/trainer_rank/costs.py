"""What a forward and its backward hold in memory, before anything of it is made: measured for the trunk, counted for
the heads.

A trunk's bytes are a line in the tokens of its pack, kept ones and height alike. Two small packs measure it, whatever
the engine, the family, the adapter's rank, the layout or recomputation. Their loss is zero times the hidden states,
which adds nothing to any gradient.

Letters: H hidden size, V vocabulary of this rank's shard.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_worker.engine import Batch
from megatron_worker.trainer_rank.heads import CHUNK_ROWS
from megatron_worker.trainer_rank.inputs import Request
from megatron_worker.trainer_rank.memory import new_meter
from megatron_worker.trainer_rank.packing import PackSize
from megatron_worker.trainer_rank.slot_engine import SlotEngine
from shared.jobs import Lora

_PROBE_TOKENS = {"cpu": (16, 32), "cuda": (512, 1024)}  # an allocator rounds, and kernels want work
_MASK_PAIRS = 8192  # a node costs no mask more than this (tree_attention.py weighs calls against masks)
_MASK_BYTES = 8  # a pair of a mask, and what making it takes
_USER_COPIES = 3  # what a loss keeps and makes of logits: a softmax, their gradient, that of their split


@dataclass(frozen=True)
class Trunk:
    """What tells one line from another. `lora`: of the adapter, if any; `keeps_graph`: its backward will follow."""

    lora: Lora | None
    keeps_graph: bool
    branches: bool


@dataclass(frozen=True)
class Line:
    fixed_bytes: float
    token_bytes: float

    def at(self, num_tokens: int) -> float:
        return self.fixed_bytes + self.token_bytes * num_tokens


@dataclass(frozen=True)
class TrunkCost:
    """`kept`: after the forward. `height`: the most at any moment of forward and backward."""

    kept: Line
    height: Line


def measure_trunk(engine: SlotEngine, trunk: Trunk) -> TrunkCost:
    """Of the slot that is active. Collective as a forward is."""
    sizes = _PROBE_TOKENS[engine.facts.device.type]
    if engine.facts.device.type == "cuda":  # libraries take their workspaces once
        _measure(engine, _probe(sizes[0], trunk.branches, engine.facts.device), trunk.keeps_graph)
    points = [_measure(engine, _probe(size, trunk.branches, engine.facts.device), trunk.keeps_graph) for size in sizes]
    kept, height = zip(*points, strict=True)
    return TrunkCost(_line(sizes, kept), _line(sizes, height))


def _measure(engine: SlotEngine, batch: Batch, keeps_graph: bool) -> tuple[int, int]:
    meter = new_meter(engine.facts.device)
    meter.start()
    meter.mark()
    try:
        with torch.set_grad_enabled(keeps_graph):
            hidden_NH = engine.hidden_states(batch)
            kept = meter.live_bytes()
            if hidden_NH.requires_grad:
                (hidden_NH * 0).sum().backward()
        return kept, meter.height()
    finally:
        meter.stop()


def _line(sizes: tuple[int, int], values: tuple[int, ...]) -> Line:
    slope = max(0.0, (values[1] - values[0]) / (sizes[1] - sizes[0]))
    return Line(max(0.0, values[0] - slope * sizes[0]), slope)


def _probe(num_tokens: int, branches: bool, device: torch.device) -> Batch:
    """One chain; or a trunk of half the tokens under two branches. One target."""
    index = torch.arange(num_tokens, device=device)
    half, quarter = num_tokens // 2, num_tokens // 4
    position, parent = index.clone(), index - 1
    if branches:
        position[half + quarter :] -= quarter
        parent[half + quarter] = half - 1
    zero, one_index = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    return Batch(
        token_id_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        position_T=position,
        parent_T=parent,
        hidden_index_N=one_index + num_tokens - 1,
        label_N=one_index,
        weight_N=zero,
        advantage_N=zero,
        old_logprob_N=zero,
        ref_logprob_N=zero,
        sampler_logprob_N=zero,
        sequence_N=one_index,
    )


@dataclass
class Rows:
    """How many rows the heads of a slot read, by kind; and how many ids the labelled ones have."""

    scored: int = 0
    ranked: int = 0
    ids: int = 0
    logits: int = 0
    hidden: int = 0
    has_entropy: bool = False

    @property
    def total(self) -> int:
        return self.scored + self.ranked + self.logits + self.hidden

    def add(self, request: Request) -> None:
        count, asked = len(request.position_P), request.asked
        width = asked.top_k + (0 if request.label_PK is None else request.label_PK.shape[1])
        self.scored += count * request.scores
        self.ranked += count * request.ranks
        self.ids += count * width
        self.logits += count * asked.logits
        self.hidden += count * asked.hidden
        self.has_entropy |= asked.entropy


@dataclass(frozen=True)
class Head:
    """Sizes that heads' bytes follow from; `element_bytes` of a hidden state."""

    hidden_size: int
    vocab_size: int
    shard_size: int
    element_bytes: int

    def kept(self, rows: Rows, keeps_graph: bool) -> float:
        """From the forward on: rows, outputs, and what a loss makes of large ones."""
        row = self.hidden_size * self.element_bytes
        copies = _USER_COPIES if keeps_graph else 1
        return (
            rows.total * (row + 64)
            + rows.scored * (4 * self.hidden_size * keeps_graph + 64)
            + rows.ids * 72
            + rows.logits * self.vocab_size * 4 * (1 + copies)
            + rows.hidden * row * copies
        )

    def passing(self, rows: Rows, keeps_graph: bool) -> float:
        """At the height of a head's own work, forward or backward."""
        row = self.hidden_size * (4 + self.element_bytes)
        product = self.element_bytes if self.element_bytes < 4 else 0  # before it is made float32
        logit_row = self.shard_size * (4 + product) + row
        scored = min(rows.scored, CHUNK_ROWS) * logit_row * (2 if rows.has_entropy else 1)
        scored += rows.scored * 4 * self.hidden_size * keeps_graph
        # A chunk is made while the one before it is still held.
        ranked = min(rows.ranked, 2 * CHUNK_ROWS) * logit_row + rows.ranked * row * keeps_graph
        return max(scored, ranked, rows.total * row * 2 * keeps_graph)


@dataclass
class SlotLoad:
    """What one slot is to do in a micro-batch of one rank."""

    size: PackSize
    rows: Rows

    @property
    def branches(self) -> bool:
        return self.size.num_shared > 0

    @property
    def mask_bytes(self) -> float:
        """Small bushy trees may be attended under masks: all of one cannot be larger than this."""
        nodes = 2 * self.size.num_sequences if self.branches else 0
        return _MASK_BYTES * min(self.size.num_tokens**2, _MASK_PAIRS * nodes)


def estimate(slots: list[tuple[SlotLoad, TrunkCost, bool]], head: Head) -> float:
    """Bytes at the height of a micro-batch: all that is kept, and the greatest of what passes by.

    Args:
        slots: of each its load, its trunk's cost, and whether it keeps a graph.
    """
    kept, passing = 0.0, 0.0
    for load, cost, keeps_graph in slots:
        tokens = load.size.num_tokens
        trunk = cost.kept.at(tokens)
        kept += trunk + head.kept(load.rows, keeps_graph) + load.mask_bytes
        # A tree's calls may each take more of it than the probe's did.
        passing_trunk = (cost.height.at(tokens) - trunk) * (2 if load.branches else 1)
        passing = max(passing, passing_trunk, head.passing(load.rows, keeps_graph))
    return kept + passing


def total_tokens(loads: list[SlotLoad]) -> tuple[int, int]:
    """Packed tokens, and what they would be without sharing."""
    packed = sum(load.size.num_tokens for load in loads)
    return packed, packed + int(np.sum([load.size.num_shared for load in loads]))
