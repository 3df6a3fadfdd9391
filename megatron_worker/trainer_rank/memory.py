"""How much memory tensors hold: of a CUDA device its allocator says so, of a CPU a mode that sees every operation."""

import os
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

_SHARE_OF_FREE = 0.9


class Meter(Protocol):
    """Counts bytes of tensors that came to be since `start`, until `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def live_bytes(self) -> int: ...

    def take_peak(self) -> int:
        """The height since `start` or the last `take_peak`; never less than what lives now."""
        ...


class CpuMeter(TorchDispatchMode):
    """Bytes of the storages that operations make while it is on. Costs some microseconds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = self._peak = 0
        self._is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_on:
            self._see(result, (args, kwargs))
        return result

    def _see(self, result: Any, given: Any) -> None:
        fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not fresh:
            return
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        for tensor in fresh:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in known and key not in self._live and size:
                self._live[key] = (weakref.ref(storage, lambda _, key=key: self._forget(key)), size)
                self._bytes += size
        self._peak = max(self._peak, self._bytes)

    def _forget(self, key: int) -> None:
        self._bytes -= self._live.pop(key)[1]

    def start(self) -> None:
        self._is_on = True
        self.__enter__()

    def stop(self) -> None:
        """Leaves the stack of modes when it is on top; from below another, it only stops counting."""
        self._is_on = False
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            self.__exit__(None, None, None)

    def live_bytes(self) -> int:
        return self._bytes

    def take_peak(self) -> int:
        peak, self._peak = max(self._peak, self._bytes), self._bytes
        return peak


class CudaMeter:
    """What the caching allocator has given out beyond what it had at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> None:
        pass

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


def new_meter(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def free_bytes(device: torch.device) -> int:
    """What this process may take of what is free, a tenth left alone."""
    if device.type != "cuda":
        return int(_SHARE_OF_FREE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, _total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE_OF_FREE * (free + cached))
