"""Dropout of adapters' inputs (Srivastava et al. 2014, JMLR 15:1929), from masks that are never stored.

A mask follows from the run's seed, the step, the bin in it and the linear: a run that was killed draws the same again.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Masks:
    """An adapter's dropout masks follow from this. `moment`: the step and the bin in it; None: nothing is dropped."""

    rate: float
    seed: int
    moment: tuple[int, int] | None = None

    @contextmanager
    def at(self, moment: tuple[int, int] | None) -> Iterator[None]:
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def seed_of(self, linear: str, place: int) -> int | None:
        """Return the seed of a linear's mask on ranks of this place; None if nothing is dropped."""
        if self.moment is None or not self.rate:
            return None
        digest = hashlib.sha256(f"{self.seed}:{self.moment}:{linear}:{place}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def dropped(x: Tensor, rate: float, seed: int | None) -> Tensor:
    """Return x with a share `rate` of its numbers zero and the others larger, so that the mean stays; None: x itself.

    The gradient of a sum of products with the result, by x, is the same function of the gradient by the result.
    """
    if seed is None:
        return x
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return x * kept.to(x.dtype).div_(1 - rate)
