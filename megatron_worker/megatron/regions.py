"""Regions of a flat buffer: tensors that the same ranks hold. Those ranks sum the gradients; each updates a share."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_worker.megatron.parallel.mesh import Group, Mesh, Placement
from megatron_worker.tensors.flat_buffer import Flat

_SHARE_ALIGNMENT = 64  # elements


@dataclass(frozen=True)
class Region:
    """Elements `start` to `stop`, which all ranks of `copies` hold. `counts`: this rank's share counts in a norm."""

    start: int
    stop: int
    copies: Group
    counts: bool

    @property
    def all(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def own(self) -> slice:
        """This rank's share."""
        return self.share_of(self.copies.rank)

    def share_of(self, rank: int) -> slice:
        """Return the share of a rank of `copies`."""
        size = (self.stop - self.start) // self.copies.size
        return slice(self.start + rank * size, self.start + (rank + 1) * size)


def arrange(
    shapes: Mapping[str, tuple[int, ...]], placements: Mapping[str, Placement], mesh: Mesh, dtype: torch.dtype
) -> tuple[Flat, list[Region]]:
    """Make a flat buffer of zeros for these tensors, and the regions that cover it."""
    sections: dict[tuple[Group, bool], list[str]] = {}
    for name in shapes:
        key = mesh.copies[placements[name]], mesh.counts(placements[name])
        sections.setdefault(key, []).append(name)
    names = [name for section in sections.values() for name in section]
    multiples = {section[0]: _SHARE_ALIGNMENT * copies.size for (copies, _), section in sections.items()}
    flat = Flat({name: shapes[name] for name in names}, dtype, mesh.device, multiples)
    starts = [flat.offsets[section[0]] for section in sections.values()]
    stops = [*starts[1:], flat.num_elements][: len(starts)]  # a stage may hold nothing
    return flat, [Region(a, b, *key) for a, b, key in zip(starts, stops, sections, strict=True)]
