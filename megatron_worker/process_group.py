"""The process group in which an engine's ranks meet: the launcher's, or one made for a process that is alone."""

import torch
import torch.distributed as dist

from shared.layout import Layout


def backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def join(layout: Layout, device: torch.device | None) -> torch.device:
    """Take this process's place; its device. One process alone needs no group beforehand; several do."""
    if not dist.is_initialized():
        assert layout.world_size == 1, "a layout of several ranks needs torch.distributed to be initialised"
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    if device is not None or not torch.cuda.is_available():
        return device or torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
