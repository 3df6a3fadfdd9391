"""An adapter's tensors: the linears that have some, their initial values, and their scales."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_worker.head import scalar
from shared.families.tensor_slices import TensorSlice
from shared.models import peft as peft_format
from shared.models.peft import AdaptedModules, LoraSize


def targeted(parts: Sequence[TensorSlice], adapted: AdaptedModules) -> dict[TensorSlice, LoraSize]:
    """Return the parts of a fused linear that an adapter targets."""
    sizes = {part: adapted.of(peft_format.module_of(part.name)) for part in parts if part.takes_adapter}
    return {part: size for part, size in sizes.items() if size is not None}


def scale_of(sizes: Sequence[LoraSize], device: torch.device) -> float | Tensor:
    """Return the scale of adapters whose ranks are stacked: one of each rank, float32 [R], if they differ."""
    if len({size.scale for size in sizes}) == 1:
        return sizes[0].scale
    return torch.tensor([size.scale for size in sizes for _ in range(size.rank)], device=device)


@torch.no_grad()
def norms_of_rows(weight_OI: Tensor, change_OI: Tensor | float = 0.0) -> Tensor:
    """Return the norms of the rows of W + scale B A, DoRA's divisors, in float32: constants, as in PEFT."""
    norm_O: Tensor = torch.linalg.vector_norm(weight_OI.float() + change_OI, dim=1)
    return norm_O


def initial(s: TensorSlice, seed: int) -> Tensor | None:
    """Return what a tensor of a fresh adapter is, whole and float32, from the seed and its PEFT name; None: zeros.

    A as PEFT's (Kaiming-uniform, a = sqrt 5); of embeddings it is B that begins at random, with a deviation of 1. A
    head's weight is normal with a variance of 1 / (inputs + 1) (Stiennon et al. 2020, arXiv:2009.01325). It is the same
    for every engine and layout.
    """
    digest = hashlib.sha256(f"{seed}:{s.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.empty(s.shape)
    if s.parameter == scalar.WEIGHT:
        return drawn.normal_(0.0, (s.shape[1] + 1) ** -0.5, generator=generator)
    if not s.name.endswith(peft_format.DRAWN):
        return None
    if s.name.endswith("_B"):
        return drawn.normal_(generator=generator)
    return drawn.uniform_(-(s.shape[1] ** -0.5), s.shape[1] ** -0.5, generator=generator)


# --- Dropout of adapters' inputs (Srivastava et al. 2014, JMLR 15:1929), from masks that are never stored ---
#
# A mask follows from the run's seed, the step, the bin in it and the linear: a run that was killed draws the same
# again.


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
