"""The mesh: which ranks share a model (tensor parallel, adjacent ranks) and which share the data (data parallel)."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from shared.errors import InvalidInput
from shared.layout import Layout

_MESSAGE_BYTES = 2048


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

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """All ranks leave the block alike: when one raises, all do. No collective may be skipped by raising."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # every rank must hear of it before it goes on
            error = raised
        first = self._first_error(error)
        if error is not None:
            raise error
        if first is not None:
            raise first

    def _first_error(self, error: Exception | None) -> Exception | None:
        if self.layout.world_size == 1:
            return error
        own = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        message = _encoded(error)
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else own[:0]
        own = own.to(self.device)
        everyone = [torch.empty_like(own) for _ in range(self.layout.world_size)]
        dist.all_gather(everyone, own)
        texts = [bytes(t.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for t in everyone]
        return next((_decoded(t) for t in texts if t), None)


def _encoded(error: Exception | None) -> bytes:
    match error:
        case None:
            return b""
        case InvalidInput():
            return f"invalid\n{error.place or ''}\n{error.message}".encode()[:_MESSAGE_BYTES]
        case OSError():
            return f"os\n{error.errno or 0}\n{error.strerror}".encode()[:_MESSAGE_BYTES]
        case _:
            return f"other\n\n{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES]


def _decoded(text: str) -> Exception:
    kind, place, message = text.split("\n", 2)
    match kind:
        case "invalid":
            return InvalidInput(message, place or None)
        case "os":
            return OSError(int(place), message)
        case _:
            return RuntimeError(f"another rank failed: {message}")


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
