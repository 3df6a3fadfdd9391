"""What a backbone's forward and backward hold in memory, measured.

Bytes follow from the tokens of a pack: at any moment they are a line, and the most at any moment is a chain of lines
that grows steeper. A few small packs measure it, whatever the engine, the family, the adapter's rank, the layout or
recomputation. Their loss is zero times the hidden states, which adds nothing to any gradient. Masks, which grow with
the square of small trees, are taken off and counted for each pack as it is.

T tokens of a pack, L those of a tree under one mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_worker.engine import Batch
from megatron_worker.process.agreement import everyone
from megatron_worker.trainer_rank.inputs import Ints
from megatron_worker.trainer_rank.memory.meter import new_meter
from megatron_worker.trainer_rank.slot_engine import SlotEngine
from megatron_worker.tree_attention import mask_lengths
from shared.jobs.job import Lora

_PROBE_TOKENS = {"cpu": (4, 16, 64, 256), "cuda": (128, 512, 1024)}  # an allocator rounds, and kernels want work
_PROBE_SHARE = 0.25  # of a budget that a probe may take
_MASK_BLOCK = 128  # tokens, on CUDA


@dataclass(frozen=True)
class Backbone:
    """What tells one cost from another. `lora`: of the adapter, if any; `keeps_graph`: its backward will follow."""

    lora: Lora | None
    keeps_graph: bool
    branches: bool


@dataclass(frozen=True)
class Curve:
    """Lines through points, the last of them going on; below the first point as much as there."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, num_tokens: int) -> float:
        if num_tokens <= self.tokens[-1]:
            return float(np.interp(num_tokens, self.tokens, self.values))
        (t0, v0), (t1, v1) = list(zip(self.tokens, self.values, strict=True))[-2:]
        return v1 + max(0.0, v1 - v0) / (t1 - t0) * (num_tokens - t1)


@dataclass(frozen=True)
class BackboneCost:
    """Bytes without masks. `kept`: after the forward; `forward`, `backward`: the most at any moment of it."""

    kept: Curve
    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class _Point:
    kept: int
    forward: int
    backward: int


def measure_backbone(engine: SlotEngine, backbone: Backbone, budget_bytes: float) -> BackboneCost:
    """Of the slot that is active, on the rank where it is most. Collective.

    Args:
        budget_bytes: what probes stay well below, as far as the smallest two allow; the same on every rank.
    """
    sizes = _PROBE_TOKENS[engine.facts.device.type]
    if engine.facts.device.type == "cuda":  # libraries take their workspaces once
        _measure(engine, backbone, sizes[0])
    points: list[_Point] = []
    for number, size in enumerate(sizes):
        growth = size / sizes[number - 1]
        if number > 1 and growth * max(points[-1].forward, points[-1].backward) > _PROBE_SHARE * budget_bytes:
            break
        points.append(_worst(everyone(engine.facts.layout.world_size, _measure(engine, backbone, size))))
    tokens = sizes[: len(points)]
    kept, forward, backward = (tuple(getattr(p, name) for p in points) for name in ("kept", "forward", "backward"))
    return BackboneCost(Curve(tokens, kept), Curve(tokens, forward), Curve(tokens, backward))


def _worst(points: Sequence[_Point]) -> _Point:
    return _Point(*(max(getattr(p, name) for p in points) for name in ("kept", "forward", "backward")))


def _measure(engine: SlotEngine, backbone: Backbone, num_tokens: int) -> _Point:
    device = engine.facts.device
    batch = _probe(num_tokens, backbone.branches, device)
    masks = mask_bytes(batch.parent_T.cpu().numpy(), getattr(torch, engine.facts.dtype).itemsize, device.type)
    meter = new_meter(device)
    meter.start()
    meter.mark()
    try:
        with torch.set_grad_enabled(backbone.keeps_graph):
            hidden_NH = engine.hidden_states(batch)
            forward, kept = meter.peak(), meter.mark()
            if hidden_NH.requires_grad:
                (hidden_NH * 0).sum().backward()
        return _Point(kept - masks * backbone.keeps_graph, forward - masks, meter.peak() - masks * backbone.keeps_graph)
    finally:
        meter.stop()


def _probe(num_tokens: int, branches: bool, device: torch.device) -> Batch:
    """Two chains; or two branches from two tokens on, so that attention meets nearly all at once. One target."""
    index = torch.arange(num_tokens, device=device)
    position, parent = index.clone(), index - 1
    root = 2 if branches else 0
    second = root + (num_tokens - root) // 2
    position[second:] -= second - root
    parent[second] = root - 1
    zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
    return Batch.to_score(torch.zeros_like(index), position, parent, zero_1 + num_tokens - 1, zero_1)


def mask_bytes(parent_T: Ints, element_bytes: int, device_type: str) -> int:
    """Of what a forest is attended under, and layers share: [L, L] for each small bushy tree; on CUDA lists of blocks,
    by rows and by columns, of those in part and of those in full.
    """
    if device_type == "cuda":
        return 4 * 4 * (-(-len(parent_T) // _MASK_BLOCK)) ** 2
    return element_bytes * sum(length**2 for length in mask_lengths(parent_T))
