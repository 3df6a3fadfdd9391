"""How much memory tensors hold: of a CUDA device its allocator says so, of a CPU a mode that sees every operation."""

import os
import weakref
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
_PLAIN = (int, float, type(None), torch.dtype, torch.device)  # most of what operations are given beside tensors


class Meter(Protocol):
    """Counts bytes of tensors that came to be since `start`, until `stop`: what lives now, and the most that did."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def live_bytes(self) -> int: ...

    def mark(self) -> int:
        """Begin anew to look for the peaks. Returns what lives now."""
        ...

    def peak(self) -> int:
        """The most that lived at once since the last `mark`."""
        ...

    def peak_of_new(self, held_bytes: int = 0) -> int:
        """The same of what came to be since the last `mark` alone.

        Args:
            held_bytes: of that, what surely lives now. For devices that do not know how old anything is.
        """
        ...


class CpuMeter(TorchDispatchMode):
    """Bytes of the storages that operations make while it is on. Costs some microseconds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._bytes = self._peak = self._num_marks = 0
        self._young_bytes = self._young_peak = 0  # of what came since the last mark
        self._is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_on:
            self._see(result, (args, kwargs))
        return result

    def _see(self, result: Any, given: Any) -> None:
        storages = {storage._cdata: storage for storage in _storages(result)}
        if storages.keys() <= self._live.keys():  # as of a view: what was given need not be looked at
            return
        known = {storage._cdata for storage in _storages(given)}
        for key, storage in storages.items():
            if key not in known and key not in self._live and (size := storage.nbytes()):
                gone = weakref.ref(storage, partial(self._forget, key))
                self._live[key] = gone, size, self._num_marks
                self._bytes += size
                self._young_bytes += size
        self._peak = max(self._peak, self._bytes)
        self._young_peak = max(self._young_peak, self._young_bytes)

    def _forget(self, key: int, _: object) -> None:
        _gone, size, born = self._live.pop(key)
        self._bytes -= size
        if born == self._num_marks:
            self._young_bytes -= size

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
        self._young_bytes = self._young_peak = 0
        return self._bytes

    def peak(self) -> int:
        return self._peak

    def peak_of_new(self, held_bytes: int = 0) -> int:
        return self._young_peak


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """Of what operations take and give: tensors, and tuples, lists and dictionaries of them."""
    if isinstance(value, Tensor):
        return [value.untyped_storage()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [storage for part in value if not isinstance(part, _PLAIN) for storage in _storages(part)]


class CudaMeter:
    """What the caching allocator has given out beyond what it had at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> None:
        pass

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def mark(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.live_bytes()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def peak_of_new(self, held_bytes: int = 0) -> int:
        # The allocator knows no ages: what lives now, but for what is surely young, is taken to be old.
        return self.peak() - max(0, self.live_bytes() - held_bytes)


def new_meter(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def free_bytes(device: torch.device) -> int:
    """What this process may take of what is free, a tenth left alone."""
    if device.type != "cuda":
        return int(_SHARE_OF_FREE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, _total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE_OF_FREE * (free + cached))
