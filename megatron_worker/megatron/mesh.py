"""The mesh: which ranks share a model (tensor parallel, adjacent ranks) and which share the data (data parallel)."""

import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_worker.agreement import agreement
from shared.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """This process's place. Groups of one rank are None: nothing to talk about."""

    layout: Layout
    device: torch.device
    rank: int
    tp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None

    @property
    def tp_size(self) -> int:
        return self.layout.tp

    @property
    def dp_size(self) -> int:
        return self.layout.dp

    def sum_over_tp(self, tensor: Tensor) -> None:
        if self.tp_group is not None:
            dist.all_reduce(tensor, group=self.tp_group)

    def sum_over_dp(self, tensor: Tensor) -> None:
        if self.dp_group is not None:
            dist.all_reduce(tensor, group=self.dp_group)

    def gather_over_tp(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every tensor-parallel rank; shapes are equal."""
        if self.tp_group is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.tp_group)
        return parts

    def agreement(self) -> AbstractContextManager[None]:
        """All ranks leave the block alike: when one raises, all do. No collective may be skipped by raising."""
        return agreement(self.layout.world_size, self.device)


def join_mesh(layout: Layout, device: torch.device | None = None) -> Mesh:
    """Take this process's place. Collective. One process alone needs no process group beforehand; several do."""
    if not dist.is_initialized():
        assert layout.world_size == 1, "a layout of several ranks needs torch.distributed to be initialised"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    _initialise_groups(layout)
    tp_group, dp_group = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    return Mesh(
        layout=layout,
        device=device or _default_device(),
        rank=dist.get_rank(),
        tp_rank=tp_group.rank(),
        dp_rank=dp_group.rank(),
        tp_group=tp_group if layout.tp > 1 else None,
        dp_group=dp_group if layout.dp > 1 else None,
    )


def _initialise_groups(layout: Layout) -> None:
    """Megatron keeps its groups in module state: made anew only when the layout is another."""
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == layout.tp:
            return
        parallel_state.destroy_model_parallel()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron's ordering of collectives and kernels
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, create_gloo_process_groups=not torch.cuda.is_available()
    )


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
