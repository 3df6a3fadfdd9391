"""How much memory tensors hold: of a CUDA device its allocator says so, of a CPU a mode that sees every operation."""

import os
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_SHARE_OF_FREE = 0.9


class Meter(Protocol):
    """Counts bytes of tensors that came to be since `start`, until `stop`: what lives now, and the height of it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def live_bytes(self) -> int: ...

    def mark(self) -> int:
        """Begin anew to look for a height. Returns what lives now."""
        ...

    def height(self) -> int:
        """The most that lived since the last `mark`, less what is older than it and lives now."""
        ...


class CpuMeter(TorchDispatchMode):
    """Bytes of the storages that operations make while it is on. Costs some microseconds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._bytes = self._peak = self._num_marks = 0
        self._is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_on:
            self._see(result, (args, kwargs))
        return result

    def _see(self, result: Any, given: Any) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in known and key not in self._live and size:
                gone = weakref.ref(storage, partial(self._forget, key))
                self._live[key] = gone, size, self._num_marks
                self._bytes += size
        self._peak = max(self._peak, self._bytes)

    def _forget(self, key: int, _: object) -> None:
        self._bytes -= self._live.pop(key)[1]

    def start(self) -> None:
        self._is_on = True
        self.__enter__()

    def stop(self) -> None:
        """Leaves the stack of modes, from below others too: whose loop is left by an error ends when it may."""
        self._is_on = False
        above = []
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def live_bytes(self) -> int:
        return self._bytes

    def mark(self) -> int:
        self._num_marks += 1
        self._peak = self._bytes
        return self._bytes

    def height(self) -> int:
        return self._peak - sum(size for _, size, born in self._live.values() if born < self._num_marks)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Of what operations take and give: tensors, and tuples, lists and dictionaries of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


class CudaMeter:
    """What the caching allocator has given out beyond what it had at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._marked = 0

    def start(self) -> None:
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> None:
        pass

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def mark(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._marked = self.live_bytes()
        return self._marked

    def height(self) -> int:
        # The allocator knows no ages: what lived at the mark is taken to live still, as far as it can.
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        return peak - min(self._marked, self.live_bytes())


def new_meter(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def free_bytes(device: torch.device) -> int:
    """What this process may take of what is free, a tenth left alone."""
    if device.type != "cuda":
        return int(_SHARE_OF_FREE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, _total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE_OF_FREE * (free + cached))
