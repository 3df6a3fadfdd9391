"""Measure what a kind of pass holds in memory, as a function of its size, by a few small passes of that kind.

At each moment of a pass the bytes are a linear function of its size (tokens of a backbone, rows of a head), so the peak
is piecewise linear, and can be measured at a few sizes for any engine, model family, adapter, dtype or layout. It does
not depend on what else runs on the machine.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_worker.memory.live_bytes import new_meter
from megatron_worker.process.agreement import everyone

_PROBE_SHARE = 0.75  # the share of a budget that a probe may take
_MOST_TOKENS = 1 << 40
_REPEATS = 2  # of a measurement on several ranks, where threads of collectives may hold a tensor somewhat longer


class PassBytes(NamedTuple):
    """Bytes that a pass holds. `forward`, `backward`: the peaks; `kept`: after the forward; `left`: after the backward.

    `gradient`: the gradients of its outputs, before the backward begins; they are included in `backward`.
    """

    forward: float = 0.0
    kept: float = 0.0
    backward: float = 0.0
    left: float = 0.0
    gradient: float = 0.0


Probe = Callable[[int], Iterator[float]]
"""Does a pass of a given size. It yields three times: before its forward; before its backward, with the bytes of its
outputs' gradients; and after its backward."""


@dataclass(frozen=True)
class PassCost:
    """A piecewise linear function through measured points: constant below the first, extrapolated after the last."""

    sizes: tuple[int, ...]
    points: tuple[PassBytes, ...]

    def at(self, size: int) -> PassBytes:
        if size <= self.sizes[-1]:
            columns = zip(*self.points, strict=True)
            return PassBytes(*(float(np.interp(size, self.sizes, column)) for column in columns))
        (size0, point0), (size1, point1) = [(0, PassBytes()), *zip(self.sizes, self.points, strict=True)][-2:]
        beyond = (size - size1) / (size1 - size0)
        return PassBytes(*(v1 + max(0.0, v1 - v0) * beyond for v0, v1 in zip(point0, point1, strict=True)))

    def size_within(self, budget_bytes: float, mask_bytes: float = 0.0) -> int:
        """Return the largest size whose forward stays within the budget. `mask_bytes`: for each token, besides."""
        sizes = range(_MOST_TOKENS)
        return bisect_left(sizes, True, 1, key=lambda n: self.at(n).forward + n * mask_bytes > budget_bytes) - 1


def measure(probe: Probe, sizes: Sequence[int], device: torch.device, world_size: int, budget_bytes: float) -> PassCost:
    """Run the probe at rising sizes while the next is estimated to stay within the budget; always at the first.

    Collective: for each size the largest bytes of any rank count.
    """
    if device.type == "cuda":  # a first run: libraries allocate their workspaces
        _measured(probe, sizes[0], device)
    cost = PassCost((), ())
    for number, size in enumerate(sizes):
        if number and max(cost.at(size)) > _PROBE_SHARE * budget_bytes:
            break
        repeated = [_measured(probe, size, device) for _ in range(_REPEATS if world_size > 1 else 1)]
        least = tuple(map(min, zip(*repeated, strict=True)))
        most = map(max, zip(*everyone(world_size, least), strict=True))
        cost = PassCost((*cost.sizes, size), (*cost.points, PassBytes(*most)))
    return cost


def _measured(probe: Probe, size: int, device: torch.device) -> PassBytes:
    meter, running = new_meter(device), probe(size)
    next(running)
    meter.start()
    try:
        meter.mark()
        gradient = next(running)
        forward, kept = meter.peak(), meter.mark()
        next(running)
        return PassBytes(forward, kept, meter.peak(), meter.mark(), gradient)
    finally:
        meter.stop()
