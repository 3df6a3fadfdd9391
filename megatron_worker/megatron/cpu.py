"""megatron-core's hard calls of CUDA, answered on a machine without it, for as long as a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cuda_answers() -> Iterator[None]:
    """`torch.cuda.current_device()` answers "cpu" where there is no CUDA device; where there is one, nothing changes.

    It is the one call that building and running a dense GPTModel makes, because parameters are made on the CPU and moved,
    there is no dropout, and optimizer, schedules and checkpoints are our own.
    """
    if torch.cuda.is_available():
        yield
        return
    asked = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = asked
