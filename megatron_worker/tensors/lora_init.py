"""Initial weights of an adapter, the same for every engine and layout."""

import hashlib

import torch
from torch import Tensor


def kaiming_uniform(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an initial A matrix as PEFT's (Kaiming-uniform, a = sqrt 5), float32, from the seed and its PEFT name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
