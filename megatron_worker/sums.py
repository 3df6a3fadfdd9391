"""Combines reported values over bins and ranks: by their maximum if the name ends in `:max`, else by their sum.

`x:sum` and `x:count` are numerator and denominator of a mean, which is computed at the end. Means named `x:part…` are
reported as x, the sum of their absolute values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

SUM, COUNT, MAX, PART = ":sum", ":count", ":max", ":part"


@dataclass(frozen=True)
class LossSums:
    """Sums over a bin's targets: `loss` to differentiate, `weight` to normalise by, the rest to report.

    `means` are pairs of sums, reported as their quotient. `maxima`, of values that are never negative, are reported as
    the greatest of all bins.
    """

    loss: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def detached(self) -> dict[str, Tensor]:
        """Return all values, detached, under names that say how to combine them over bins (sums.py)."""
        named = {"loss": self.loss, "weight": self.weight, **self.metrics}
        named |= {name + SUM: value for name, (value, _) in self.means.items()}
        named |= {name + COUNT: count for name, (_, count) in self.means.items()}
        named |= {name + MAX: value for name, value in self.maxima.items()}
        return {name: value.detach() for name, value in named.items()}


def combine(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Return the sum, or the maximum, of two values of one name."""
    return torch.maximum(one, other) if name.endswith(MAX) else one + other


def over_ranks(
    sums: dict[str, Tensor], rank: int, num_ranks: int, add_over_ranks: Callable[[Tensor], None]
) -> dict[str, float]:
    """Combine the values of all ranks in one reduction, a sum: each rank has a separate column for its maxima.

    Args:
        sums: scalars of this rank, the same names on every rank, all on one device.
        add_over_ranks: adds a float64 vector up over the ranks, in place.
    """
    added = sorted(name for name in sums if not name.endswith(MAX))
    maxima = sorted(name for name in sums if name.endswith(MAX))
    values = torch.stack([sums[name].detach().double() for name in added])
    columns = values.new_zeros(len(maxima), num_ranks)
    for row, name in enumerate(maxima):
        columns[row, rank] = sums[name].detach()
    both = torch.cat([values, columns.flatten()])
    add_over_ranks(both)
    greatest = both[len(added) :].view(len(maxima), num_ranks).tolist()
    return dict(zip(added, both.tolist(), strict=False)) | {
        name: max(row) for name, row in zip(maxima, greatest, strict=True)
    }


def reported(reduced: dict[str, float]) -> dict[str, float]:
    """Return metrics under their own names, sums divided by counts. A mean of no values is left out."""
    means = {
        name.removesuffix(SUM): value / reduced[name.removesuffix(SUM) + COUNT]
        for name, value in reduced.items()
        if name.endswith(SUM) and reduced[name.removesuffix(SUM) + COUNT]
    }
    for name in [name for name in means if PART in name]:
        whole = name.partition(PART)[0]
        means[whole] = means.get(whole, 0.0) + abs(means.pop(name))
    plain = {name: value for name, value in reduced.items() if not name.endswith((SUM, COUNT, MAX))}
    return plain | means | {name.removesuffix(MAX): v for name, v in reduced.items() if name.endswith(MAX)}
