"""Transports by which samplers pull buckets over the network: what they share, NIXL, Mooncake."""

import functools
import importlib
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from megatron_worker.weight_sync.buckets import (
    NUM_BUFFERS,
    Bucket,
    Connect,
    RemoteBuffers,
    SyncBroken,
    SyncMessage,
    SyncReply,
)
from megatron_worker.weight_sync.connections import PATIENCE_S, Receiver
from megatron_worker.weight_sync.transports.protocol import LocalOutbound, Messages, make_buffers

# --- The common part of `nixl` and `mooncake` ---
# Samplers read the trainer's buffers into their own, with another project's engine, which listens at the address over
# which trainer and sampler reached each other.
#
# These engines do not authenticate readers and writers. So a sampler compares what it reads with checksums that come
# over the authenticated connection; and a host takes part only if its operator has allowed it.

_POLL_S = 0.0005
_LOOK_S = 0.02  # between looks whether the trainer is there
_CPU = torch.device("cpu")


class PullEngine(Protocol):
    """One end of an engine, with buffers that it may read and write. `endpoint`: as RemoteBuffers has it.

    Every method raises SyncBroken in the engine's own words.
    """

    endpoint: str

    def begin(self, endpoint: str, address: int, into: Tensor) -> None:
        """Begin to read from another end's memory into a part of one of the buffers, uint8 [num_bytes]."""
        ...

    def is_done(self) -> bool:
        """Return True once what was begun has been read."""
        ...

    def close(self) -> None:
        """Release everything, even during a read."""
        ...


MakeEngine = Callable[[str, Sequence[Tensor]], PullEngine]
"""Makes an end at an address of this machine. Raises SyncBroken."""


class PulledOutbound(LocalOutbound):
    """The trainer's end: it only fills buffers."""

    def __init__(self, make: MakeEngine, device: torch.device) -> None:
        self._make = make
        self._engines: dict[str, PullEngine] = {}  # by the address at which samplers reach this machine

    def prepare(self, num_bytes: int) -> None:
        self.buffers = make_buffers(num_bytes, _CPU)

    def _hand_over(self, receiver: Receiver) -> None:
        host = receiver.connection.local_host
        if host not in self._engines:
            self._engines[host] = self._make(host, self.buffers)
        addresses = tuple(buffer.data_ptr() for buffer in self.buffers)
        remote = RemoteBuffers(endpoint=self._engines[host].endpoint, addresses=addresses)
        receiver.send(SyncMessage(connect=Connect(remote=remote)))

    def finalize(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines = {}
        self.buffers = ()


class PulledInbound:
    """A sampler's end, which reads each bucket when the trainer says that it is ready."""

    def __init__(self, make: MakeEngine, device: torch.device) -> None:
        self._make = make
        self._engine: PullEngine | None = None

    def prepare(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def connect(self, messages: Messages, given: Connect) -> None:
        if given.remote is None or self._engine is not None:
            raise SyncBroken("the trainer's buffers are due, once")
        self._messages, self._remote = messages, given.remote
        self._buffers = make_buffers(self._num_bytes, _CPU)
        self._engine = self._make(messages.connection.local_host, self._buffers)
        messages.connection.write(SyncReply())

    def receive(self, bucket: Bucket) -> Tensor | None:
        if self._engine is None:
            raise SyncBroken("a bucket came before its buffer")
        place = bucket.number % NUM_BUFFERS
        buffer = self._buffers[place]
        if bucket.num_bytes:
            self._engine.begin(self._remote.endpoint, self._remote.addresses[place], buffer[: bucket.num_bytes])
            self._wait(self._engine)
        return buffer

    def _wait(self, engine: PullEngine) -> None:
        """Wait for the read. Raises SyncBroken: it failed, the trainer is gone, or it takes too long."""
        until, look = time.monotonic() + PATIENCE_S, time.monotonic() + _LOOK_S
        while not engine.is_done():
            if (now := time.monotonic()) > until:
                raise SyncBroken(f"the trainer's buffer could not be read within {PATIENCE_S:g} s")
            if now > look:
                if self._messages.is_interrupted():
                    raise SyncBroken("the trainer has begun anew")
                look = now + _LOOK_S
            time.sleep(_POLL_S)

    def finalize(self) -> None:
        if self._engine is not None:
            self._engine.close()


# --- `nixl` ---
# Samplers read the trainer's buffers by NIXL, whose backend UCX takes TCP, or shared memory on one machine.
#
# **Experimental**: run between processes of one machine without GPU. UCX listens at one interface, as long as a sync
# lasts. RDMA and memory of GPUs, which NIXL is made for, have never been tried: neither is used.

_BACKEND = "UCX"


class NixlEngine:
    """An agent of NIXL for one sync."""

    def __init__(self, host: str, buffers: Sequence[Tensor]) -> None:
        """Raises SyncBroken."""
        api = nixl_api()
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


def nixl_api() -> Any:
    """Import NIXL. Raises ImportError."""
    api = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it says of every agent that it has been made
    return api


# --- `mooncake`: samplers read the trainer's buffers by Mooncake's transfer engine, over TCP ---
#
# **Experimental**: run between processes of one machine without GPU. The engine listens at free ports of **all**
# addresses of the machine, as long as the process lives; it reads and writes what is registered with it, which the
# buffers are during a sync. RDMA, which Mooncake is made for, has never been tried: it is not used.

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
    engine = mooncake_api().TransferEngine()
    if (code := engine.initialize(f"{host}:0", "P2PHANDSHAKE", "tcp", "")) != 0:
        raise SyncBroken(f"Mooncake's engine does not start at {host} (code {code})")
    return engine


def mooncake_api() -> Any:
    """Import Mooncake. Raises ImportError."""
    return importlib.import_module("mooncake.engine")
