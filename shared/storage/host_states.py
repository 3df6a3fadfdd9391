"""The states that GPU and sampler hosts write to the store: what they are, what they lack, whether they work."""

import os
import re
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from longshore.fields import Frozen
from longshore.views import Devices
from shared.errors import NotFound
from shared.storage.paths import ANSWERING_HOSTS, HOST_STATES, host_state, of_shape
from shared.storage.store import ObjectStore

WORKER_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")
LeasingRole = Literal["gpu", "sampler"]
BEAT_S = 20.0
"""How often a host writes its state."""
_SILENT_S = 90.0  # then a host is taken for gone
_FORGOTTEN_S = 86_400.0  # then its state is deleted
_BF16_CAPABILITY = 8.0
_ASKED_S = 20.0


class HostAddress(Frozen):
    """Where the web service reaches a host.

    `socket`: the path of a Unix socket on the host's own machine; `address`: `host:port` for other machines, by mutual
    TLS.
    """

    socket: str
    address: str | None = None


class AnsweringHost(Frozen):
    """The address of a control host that forwards questions to the installation's sampler. `seen_at`: Unix seconds."""

    at: HostAddress
    seen_at: float


class Offer(Frozen):
    """What GPU hosts of a shape reported at `seen_at` (seconds since 1970): the most ranks that one of them takes, and
    the devices of the host that has the largest.
    """

    max_ranks: int
    seen_at: float
    devices: Devices | None = None


class HostState(Frozen):
    """One host. Times are seconds since 1970.

    `lacks`: why it has ended, or is about to. `fast_bf16`: its devices multiply bfloat16 fast. `launch`: the name under
    which it was started, if hosts are started on demand. `lease_since`: when its current lease began; None without a
    lease. `max_ranks`, `devices`: of a GPU host's worker.
    """

    role: LeasingRole
    shape: str
    name: str
    queue: str
    seen_at: float
    lacks: tuple[str, ...] = ()
    fast_bf16: bool = False
    launch: str | None = None
    lease_since: float | None = None
    max_ranks: int | None = None
    devices: Devices | None = None

    @property
    def id(self) -> str:
        """A short id that differs between hosts of one machine: from the random end of its queue's name."""
        return self.queue.rpartition("-")[2][:8]

    def is_seen(self, now: float) -> bool:
        return now - self.seen_at < _SILENT_S

    def takes_leases(self, now: float) -> bool:
        """True for a host that is up and lacks nothing. It may be busy."""
        return self.is_seen(now) and not self.lacks


def told_file(root: Path, what: Literal["polls", "leased"], role: str) -> Path:
    """A file in a host's root that says it has polled for work, or has had a lease. Kubernetes probes look for it."""
    return root / f"{what}-{role}"


def write_state(store: ObjectStore, state: HostState) -> None:
    store.put_bytes(_key(state), state.model_dump_json().encode())


def delete_state(store: ObjectStore, state: HostState) -> None:
    store.delete(_key(state))


def read_states(store: ObjectStore, shape: str) -> tuple[HostState, ...]:
    """Read the states of the GPU and sampler hosts of a shape that are up. Those of hosts long gone are deleted."""
    now, found = time.time(), list[HostState]()
    for info in store.list(HOST_STATES):
        with suppress(NotFound, ValidationError):  # it has just left, or is of another version
            state = HostState.model_validate_json(store.get_bytes(info.key))
            if now - state.seen_at > _FORGOTTEN_S:
                store.delete(info.key)
            elif state.shape == shape and state.is_seen(now):
                found.append(state)
    return tuple(found)


def announce(store: ObjectStore, queue: str, at: HostAddress | None) -> None:
    """Announce the address of the control host with a task queue, as it does every BEAT_S; None: withdraw it."""
    key = f"{ANSWERING_HOSTS}{queue}.json"
    if at is None:
        store.delete(key)
    else:
        store.put_bytes(key, AnsweringHost(at=at, seen_at=time.time()).model_dump_json().encode())


def announced(store: ObjectStore) -> list[HostAddress]:
    """Return the addresses of control hosts that answer questions, the last seen first."""
    found = list[AnsweringHost]()
    for info in store.list(ANSWERING_HOSTS):
        with suppress(NotFound, ValidationError):  # it has just left, or is of another version
            host = AnsweringHost.model_validate_json(store.get_bytes(info.key))
            if time.time() - host.seen_at < _SILENT_S:
                found.append(host)
            else:
                store.delete(info.key)
    return [host.at for host in sorted(found, key=lambda host: -host.seen_at)]


def _key(state: HostState) -> str:
    return host_state(_plain(f"{state.role}-{state.queue}"))


def _plain(name: str) -> str:
    """Return a name with only characters that a key of the store may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def write_fast_bf16(store: ObjectStore, shape: str, is_fast: bool) -> None:
    store.put_bytes(of_shape(_plain(shape), "fast_bf16"), b"true" if is_fast else b"false")


def read_fast_bf16(store: ObjectStore, shape: str) -> bool | None:
    """Return whether bfloat16 is fast on all GPU hosts of a shape, by their last reports; None without a report."""
    with suppress(NotFound):
        return store.get_bytes(of_shape(_plain(shape), "fast_bf16")) == b"true"
    return None


def write_offer(store: ObjectStore, shape: str, max_ranks: int, devices: Devices | None = None) -> None:
    offer = Offer(max_ranks=max_ranks, seen_at=time.time(), devices=devices)
    store.put_bytes(of_shape(_plain(shape), "offer"), offer.model_dump_json().encode())


def read_offer(store: ObjectStore, shape: str) -> Offer | None:
    """Return what the running GPU hosts of a shape offer; None if none is up, or none has reported."""
    with suppress(NotFound, ValidationError):
        said = Offer.model_validate_json(store.get_bytes(of_shape(_plain(shape), "offer")))
        return said if time.time() - said.seen_at < _SILENT_S else None
    return None


def is_bf16_fast(proc: Path = Path("/proc")) -> bool:
    """Return True if workers on this machine multiply bfloat16 fast: on CUDA of a compute capability of 8 or more, else
    on a CPU with instructions for it. Nothing is timed, so that a busy machine gives the same answer.
    """
    if not has_gpus(proc):
        info = proc / "cpuinfo"
        return info.exists() and has_fast_bf16(info.read_text())
    return min(_asked("compute_cap"), default=0.0) >= _BF16_CAPABILITY  # else float32 is slower, and never wrong


def devices_here(cpu_bytes: int, proc: Path = Path("/proc")) -> Devices | None:
    """Return this machine's devices; None if that is unknown. `cpu_bytes`: the memory of a CPU."""
    if not has_gpus(proc):
        return Devices(number=1, num_bytes=cpu_bytes)
    sizes = _asked("memory.total")
    return Devices(number=len(sizes), num_bytes=int(min(sizes)) << 20) if sizes else None


def has_gpus(proc: Path = Path("/proc")) -> bool:
    """Return True if workers on this machine use CUDA devices."""
    is_off = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or _is_torch_for_cpu()
    return any((proc / "driver" / "nvidia" / "gpus").glob("*")) and not is_off


def _asked(what: str) -> list[float]:
    """Return a property of each CUDA device; nothing if nvidia-smi fails. Memory is in MiB."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_ASKED_S, check=True)
        return list(map(float, done.stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def has_fast_bf16(cpuinfo: str) -> bool:
    """Return True for a CPU with instructions for products of bfloat16; without them torch takes 100 times as long."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.split())


def _is_torch_for_cpu() -> bool:
    with suppress(PackageNotFoundError):
        return version("torch").endswith("+cpu")
    return False
