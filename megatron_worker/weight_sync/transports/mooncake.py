"""`mooncake`: samplers read the trainer's buffers by Mooncake's transfer engine, over TCP.

**Experimental**: run between processes of one machine without GPU. The engine listens at free ports of **all**
addresses of the machine, as long as the process lives; it reads and writes what is registered with it, which the
buffers are during a sync. RDMA, which Mooncake is made for, has never been tried: it is not used.
"""

import functools
import importlib
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_worker.weight_sync.messages import SyncBroken

_IS_READ = 1
_HAS_ENDED = (_IS_READ, -1)  # other states: still running, or timed out and may complete later


class MooncakeEngine:
    """This process's engine, with the buffers of one sync."""

    def __init__(self, host: str, buffers: Sequence[Tensor]) -> None:
        """Raises SyncBroken."""
        self._engine = _engine_at(host)
        self._buffers = buffers
        self._batch = 0
        self.endpoint = f"{host}:{self._engine.get_rpc_port()}"
        registered: list[int] = []
        # Also if nobody closes this: a region must not stay registered when its memory is reused.
        self._unregister = weakref.finalize(self, _unregister, self._engine, registered)
        self._unregister.atexit = False
        for buffer in buffers:
            if self._engine.register_memory(buffer.data_ptr(), buffer.numel()) != 0:
                self._unregister()
                raise SyncBroken("Mooncake does not register a buffer")
            registered.append(buffer.data_ptr())

    def begin(self, endpoint: str, address: int, into: Tensor) -> None:
        self._batch = self._engine.batch_transfer_async_read(endpoint, [into.data_ptr()], [address], [into.numel()])
        if self._batch == 0:
            raise SyncBroken(f"Mooncake does not reach the trainer at {endpoint}")

    def is_done(self) -> bool:
        state = self._engine.transfer_check_status(self._batch)
        if state == 0:
            return False
        if state in _HAS_ENDED:
            self._batch = 0
        if state != _IS_READ:
            raise SyncBroken(f"Mooncake has not read the trainer's buffer (status {state})")
        return True

    def close(self) -> None:
        self._unregister()
        if self._batch:
            _given_up.append((self._engine, self._batch, self._buffers))
        _given_up[:] = [one for one in _given_up if one[0].transfer_check_status(one[1]) not in _HAS_ENDED]


def _unregister(engine: Any, addresses: Sequence[int]) -> None:
    for address in addresses:
        engine.unregister_memory(address)


_given_up: list[tuple[Any, int, Sequence[Tensor]]] = []
"""Reads that nobody waits for. They cannot be ended, and their buffers must stand as long as they may be written."""


@functools.cache
def _engine_at(host: str) -> Any:
    """Return the engine of this process at an address. It is never ended: that would stop all threads for a second."""
    engine = api_module().TransferEngine()
    if (code := engine.initialize(f"{host}:0", "P2PHANDSHAKE", "tcp", "")) != 0:
        raise SyncBroken(f"Mooncake's engine does not start at {host} (code {code})")
    return engine


def api_module() -> Any:
    """Import Mooncake. Raises ImportError."""
    return importlib.import_module("mooncake.engine")
