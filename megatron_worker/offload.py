"""Host memory for what leaves the device: declared buffers, pinned where there is a device to copy to.

A frozen buffer is copied once and its host copy kept for good: afterwards offloading only drops, reloading only copies
back. Whatever is trained is copied each time, and its host copy given back on reload.
"""

import torch
from torch import Tensor

from megatron_worker.flat import Flat


class HostBuffers:
    """Host copies by name. They are all the host memory that an offloaded engine keeps."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._stashed: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self._kept.values(), *self._stashed.values()))

    def holds(self, name: str) -> bool:
        return name in self._kept

    def offload_frozen(self, name: str, flat: Flat) -> None:
        """Drop a buffer that never changes, after copying it the first time."""
        if flat.resident_bytes == 0:
            return
        if name not in self._kept:
            self._kept[name] = _host_copy(flat)
        flat.release()

    def reload_frozen(self, name: str, flat: Flat) -> None:
        flat.restore()
        flat.buffer.copy_(self._kept[name], non_blocking=True)

    def offload(self, name: str, flat: Flat) -> None:
        if flat.resident_bytes:
            self._stashed[name] = _host_copy(flat)
            flat.release()

    def reload(self, name: str, flat: Flat) -> None:
        flat.restore()
        flat.buffer.copy_(self._stashed.pop(name))


def _host_copy(flat: Flat) -> Tensor:
    pinned = flat.buffer.device.type == "cuda"
    host = torch.empty(flat.num_elements, dtype=flat.buffer.dtype, pin_memory=pinned)
    return host.copy_(flat.buffer)
