"""`nixl`: samplers read the trainer's buffers by NIXL, whose backend UCX takes TCP, or shared memory on one machine.

**Experimental**: run between processes of one machine without GPU. UCX listens at one interface, as long as a sync
lasts. RDMA and memory of GPUs, which NIXL is made for, have never been tried: neither is used.
"""

import importlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from torch import Tensor

from megatron_worker.weight_sync.messages import SyncBroken

_BACKEND = "UCX"


class NixlEngine:
    """An agent of NIXL for one sync."""

    def __init__(self, host: str, buffers: Sequence[Tensor]) -> None:
        """Raises SyncBroken."""
        api = api_module()
        self._reading: Any = None
        self._others: dict[str, str] = {}  # names of agents by their metadata
        with _breaking():
            # Its own listener is off, and nothing is asked of a server of metadata.
            self._agent: Any = api.nixl_agent(secrets.token_hex(16), api.nixl_agent_config(backends=[]))
            self._agent.create_backend(_BACKEND, {"engine_config": f"NET_DEVICES={_interface(host)}"})
            regions = [(buffer.data_ptr(), buffer.numel(), 0, "") for buffer in buffers]
            self._registered: Any = self._agent.register_memory(regions, "DRAM")
            self.endpoint = self._agent.get_agent_metadata().hex()

    def begin(self, endpoint: str, address: int, into: Tensor) -> None:
        with _breaking():
            self._release()
            own, theirs = (
                self._agent.get_xfer_descs([(start, into.numel(), 0)], "DRAM") for start in (into.data_ptr(), address)
            )
            self._reading = self._agent.initialize_xfer("READ", own, theirs, self._other(endpoint))
            if self._agent.transfer(self._reading) == "ERR":
                raise SyncBroken("NIXL cannot read the trainer's buffer")

    def is_done(self) -> bool:
        with _breaking():
            state = self._agent.check_xfer_state(self._reading)
        if state == "ERR":
            raise SyncBroken("NIXL has not read the trainer's buffer")
        return bool(state == "DONE")

    def close(self) -> None:
        """Leave the others and end the agent; nothing is written into the buffers afterwards."""
        with _breaking():
            self._release()
            for name in self._others.values():
                self._agent.remove_remote_agent(name)
            self._agent.deregister_memory(self._registered)
        self._agent = None

    def _other(self, endpoint: str) -> str:
        if endpoint not in self._others:
            name = self._agent.add_remote_agent(bytes.fromhex(endpoint))
            self._others[endpoint] = name.decode() if isinstance(name, bytes) else name
        return self._others[endpoint]

    def _release(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.release()


@contextmanager
def _breaking() -> Iterator[None]:
    """Say errors of NIXL, which have no class in common, as SyncBroken."""
    try:
        yield
    except SyncBroken:
        raise
    except Exception as error:
        raise SyncBroken(f"NIXL: {type(error).__name__}: {error}") from error


def _interface(host: str) -> str:
    """Return the network interface of this machine that has an address. Raises SyncBroken."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == host for one in addresses):
            return name
    raise SyncBroken(f"no interface of this machine has the address {host}")


def api_module() -> Any:
    """Import NIXL. Raises ImportError."""
    api = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it says of every agent that it has been made
    return api
