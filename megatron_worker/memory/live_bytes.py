"""Count the bytes of this process's own tensors: on CUDA by its allocator, on the CPU by a dispatch mode.

Free memory and other processes do not matter here, so that plans are reproducible.
"""

import os
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_PLAIN = (int, float, type(None), torch.dtype, torch.device)  # common types of arguments that hold no tensors
_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of all memory, the budget if none is given


class CpuMeter(TorchDispatchMode):
    """Counts the storages that operations make from `start` to `stop`. Costs some microseconds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {storage._cdata: storage for storage in _storages(result)}
        if not storages.keys() <= self._live.keys():  # else it is a view or the like, and the arguments need no look
            known = {storage._cdata for storage in _storages((args, kwargs))}
            for key, storage in storages.items():
                if key not in known and key not in self._live and (size := storage.nbytes()):
                    self._live[key] = weakref.ref(storage, partial(self._forget, key)), size
                    self._bytes += size
        self._peak = max(self._peak, self._bytes)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: measured passes compile nothing, and PyTorch's guard against it doubles the cost of a count."""
        return False

    def _forget(self, key: int, _: object) -> None:
        self._bytes -= self._live.pop(key)[1]

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        """Stop counting. Other modes may have been entered since, if a generator is closed late, after an error."""
        above = []
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def mark(self) -> int:
        """Reset the peak. Returns the bytes that live now."""
        self._peak = self._bytes
        return self._bytes

    def peak(self) -> int:
        """Return the most that lived at once since the last `mark`."""
        return self._peak


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """Return the storages of operations' inputs or outputs: tensors, and tuples, lists and dictionaries of them."""
    if isinstance(value, Tensor):
        return [value.untyped_storage()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [storage for part in value if not isinstance(part, _PLAIN) for storage in _storages(part)]


class CudaMeter:
    """Like CpuMeter, for the bytes that CUDA's caching allocator has given out since the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> None:
        pass

    def mark(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


def new_meter(device: torch.device) -> CpuMeter | CudaMeter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def default_budget(device: torch.device) -> int:
    """Return the default budget of passes: a share of all memory that this rank can use.

    It is the same whatever else runs: on CUDA 90 % of the device without what this process has allocated on it; on the
    CPU half of the machine or container, divided by the ranks on it.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(_SHARE["cuda"] * total) - torch.cuda.memory_allocated(device)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such container, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(_SHARE["cpu"] * total) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
