"""How a fresh adapter begins, whatever the engine and the layout."""

import hashlib

import torch
from torch import Tensor


def kaiming_uniform(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """An A matrix as PEFT begins it (Kaiming-uniform, a = sqrt 5), float32, from the seed and its own PEFT name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
