"""A GPU or sampler host's health: what it lacks, which workers it has lost, and whether it is idle.

A host that lacks something ends, and whatever started it starts it again, with growing pauses. Packages and disk are
checked at each start. Devices are tried after a worker was lost, and at a start after they have failed.
"""

import argparse
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from temporalio import activity

from activities.heartbeats import HOST_LEAVES
from activities.hosts.workers import last_words, room_for_ranks, worker_environment
from activities.sandbox.calls import machine_bytes
from activities.telemetry import HOST_START
from shared.child_environment import child_environment
from shared.errors import HostLeft, LeaseLost, LongshoreError, WorkerLost
from shared.settings import Settings
from shared.storage import host_states
from shared.storage.store import ObjectStore, open_store

# --- The check of a GPU or sampler host: packages, free disk space, working devices ---
#
#     python -P -m longshore.server activities.hosts.health --role gpu|sampler
#
# prints a line for each thing that this machine lacks, and nothing if it lacks nothing.

LEAST_BYTES = 256 << 20
"""Of the disk under a host's root: less cannot hold the log and the checkpoint of a small run."""
_WRITTEN_BYTES = 4 << 20
_TRIAL_S = 300.0  # as long as a worker may take to be up


@dataclass(frozen=True)
class HostCheck:
    """Checks this machine as a worker or sampler would find it. `environment`: their variables besides the host's."""

    role: host_states.LeasingRole
    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def at_start(self) -> tuple[str, ...]:
        """Return what is missing: packages and disk, and devices only if they have failed the last time."""
        return self() if self._failed.exists() else self._quick()

    def __call__(self) -> tuple[str, ...]:
        """Return what is missing. Devices are tried only if the packages for that are installed."""
        # -P, as in ranks_command: `shared` shall be Longshore's.
        command = [sys.executable, "-P", "-m", "megatron_worker.training.trial", "--role", self.role]
        found = self._quick() or trial_lacks(command, child_environment("worker") | dict(self.environment))
        with suppress(OSError):
            self._failed.touch() if found else self._failed.unlink(missing_ok=True)
        return found

    def _quick(self) -> tuple[str, ...]:
        return *missing_packages(host_states.WORKER_PACKAGES), *disk_lacks(self.root)

    @property
    def _failed(self) -> Path:
        return self.root / f"failed-{self.role}-{socket.gethostname()}"


def missing_packages(wanted: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name} is not installed: pip install {name}" for name in wanted if not any(distributions(name=name)))


def disk_lacks(root: Path, least_bytes: int = LEAST_BYTES) -> tuple[str, ...]:
    """Try to write below a folder, as a disk may be full, read-only or beyond its owner's quota."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
    except OSError as error:
        return (f"the disk of LONGSHORE_ROOT cannot be written: {error.strerror}",)
    if free < least_bytes:
        return (f"the disk of LONGSHORE_ROOT has {free >> 20} MiB free, and {least_bytes >> 20} are the least",)
    return ()


def trial_lacks(command: list[str], environment: Mapping[str, str], timeout_s: float = _TRIAL_S) -> tuple[str, ...]:
    """Run megatron_worker/training/trial.py as a separate process: a broken device may hang or kill it."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return (f"a tiny pass on its devices did not end within {timeout_s:g} s",)
    except OSError as error:
        return (f"a tiny pass cannot be tried: {error.strerror}",)
    try:
        return tuple(str(each) for each in json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last, code = last_words(done.stderr), done.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return (f"a tiny pass on its devices ended with {how}" + (f": {last}" if last else ""),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("gpu", "sampler"), default="gpu")
    for lack in HostCheck(parser.parse_args().role, Settings().root_path)():
        print(lack)


# --- One host's health ---

_REST_S = 10.0  # after a worker was lost at its start; doubled for each more in a row
_LONGEST_REST_S, _LONGEST_ALONE_S = 600.0, 60.0  # beside other hosts, and without any
_LEAVE_S = 5.0
_log = logging.getLogger(__name__)


class HostUnfit(LongshoreError):
    """The host lacks something that workers need, and has to end."""


class HostHealth:
    """The health of one host, whose state it writes to the store. Safe to use from several threads.

    Args:
        check: finds what the host lacks; it may take a minute.
        num_warm: this many hosts of this role and shape stay without leases: the first idle ones by their queues'
            names.

    `leave`: stops this host's poller of leases; called by the activity that holds the only one. `begun`: called when
    the host has taken a lease.
    """

    def __init__(
        self, store: ObjectStore, state: host_states.HostState, check: Callable[[], tuple[str, ...]], num_warm: int = 0
    ) -> None:
        self._store = store
        self._check = check
        self._num_warm, self._stays = num_warm, num_warm > 0
        self._lock = threading.Lock()
        self.state = state
        self.leave: Callable[[], object] | None = None
        self.begun: Callable[[], object] = lambda: None
        self.is_doubtful = False  # a worker was lost, or a job failed, since the last check
        self.is_closing = False  # leases that still come are given back at once
        self.num_offered = 0
        self._num_lost_in_a_row = 0  # workers at their start
        self._num_held, self._is_retired = 0, False
        self._has_asked, self._idle_since = False, time.monotonic()

    def examine(self) -> None:
        """Check what the host lacks, if there is a doubt.

        Raises HostUnfit: it lacks something.
        """
        if self.is_doubtful:
            self.is_doubtful = False
            self._change(lacks=self._check())
        if self.state.lacks:
            raise HostUnfit(f"this {self.state.role} host lacks what it needs: {'; '.join(self.state.lacks)}")

    def rest_s(self) -> float:
        """Return for how long others go first: after workers were lost at their start, although nothing lacks."""
        if not self._num_lost_in_a_row:
            return 0.0
        longest_s = _LONGEST_REST_S if self.has_others() else _LONGEST_ALONE_S
        return float(min(longest_s, _REST_S * 2 ** min(10, self._num_lost_in_a_row - 1)))

    def asks(self) -> None:
        """Count idle time from when this host first asks for leases: to make its first worker may take seconds."""
        if not self._has_asked:
            self._has_asked, self._idle_since = True, time.monotonic()

    def beat(self) -> None:
        """Write the state into the store, and note whether this host stays without leases."""
        others, now = self._others(), time.time()
        free = [each for each in others if each.takes_leases(now) and each.lease_since is None]
        self._stays = sum(each.queue < self.state.queue for each in free) < self._num_warm
        self._change(seen_at=now)
        if self.state.role != "gpu":
            return
        # What GPU hosts of the shape offer to future runs: whether bfloat16 is fast on all of them (runs choose their
        # precision by it), the most ranks that one of them takes, and the largest devices.
        hosts = (self.state, *others)
        try:
            host_states.write_fast_bf16(self._store, self.state.shape, all(host.fast_bf16 for host in hosts))
            if most := max((host.max_ranks or 0 for host in hosts), default=0):
                devices = [host.devices for host in hosts if host.devices is not None]
                largest = max(devices, key=lambda each: each.num_bytes, default=None)
                host_states.write_offer(self._store, self.state.shape, most, largest)
        except (LongshoreError, OSError) as error:
            _log.warning("what this host offers is not written: %s", error)

    def retire(self) -> None:
        """Delete the state from the store, because this host leaves. What it lacks stays there for some time."""
        with self._lock:
            self._is_retired = True  # a beat that is still running does not write it again
            if self.state.lacks:
                return
            try:
                host_states.delete_state(self._store, self.state)
            except (LongshoreError, OSError) as error:
                _log.warning("the state of this host stays in the store: %s", error)

    def is_idle(self, after_s: float, close: bool = False) -> bool:
        """Return True if no lease came for `after_s` seconds and none is held. The time begins when the host asks for
        leases. A host that must stay warm is never idle.

        `close`: if idle, give back leases that come from now on.
        """
        with self._lock:
            is_idle = not self._stays and not self._num_held and time.monotonic() - self._idle_since >= after_s
            if is_idle and close:
                self.is_closing = True
            return is_idle

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Hold a lease in a `with` block, whose outcome the caller notes by `lost` and `worked`.

        Raises HostLeft: the host stopped polling while this lease was on its way.
        """
        with self._lock:
            self.num_offered += 1
            self._num_held += 1
            is_closing = self.is_closing
        try:
            if is_closing:
                raise HostLeft(HOST_LEAVES)
            HOST_START.reached("host: asks for leases")
            if activity.in_activity():
                HOST_START.tell(activity.info().scheduled_time.timestamp())
            self._change(lease_since=time.time())
            self.begun()
            try:
                yield
            finally:
                if self.is_doubtful:
                    self._leave_queue()
                self._change(lease_since=None)  # before Temporal can give it the next one
        finally:
            with self._lock:
                self._num_held, self._idle_since = self._num_held - 1, time.monotonic()

    def lost(self, error: WorkerLost | None, at_start: bool) -> None:
        """Note that a worker was lost here, or, without an error, that a job failed before its first step.

        Losses for reasons outside the worker's process, such as a leaving host, are not counted.
        """
        if isinstance(error, LeaseLost):
            return
        self.is_doubtful = True
        self._num_lost_in_a_row += at_start

    def worked(self) -> None:
        """Note that a worker has done a step here, which ends the count of losses."""
        self._num_lost_in_a_row = 0

    def has_others(self) -> bool:
        """Return True if other hosts of its role and shape take leases."""
        now = time.time()
        return any(other.takes_leases(now) for other in self._others())

    def _others(self) -> tuple[host_states.HostState, ...]:
        try:
            states = host_states.read_states(self._store, self.state.shape)
        except (LongshoreError, OSError) as error:
            _log.warning("the states of other hosts are not known: %s", error)
            return ()
        return tuple(each for each in states if each.role == self.state.role and each.queue != self.state.queue)

    def _change(self, **fields: object) -> None:
        with self._lock:
            self.state = self.state.model_copy(update=fields)
            if self._is_retired:
                return
            try:
                host_states.write_state(self._store, self.state)
            except (LongshoreError, OSError) as error:  # a full disk: this host's own checks report it
                _log.warning("the state of this host is not written: %s", error)

    def _leave_queue(self) -> None:
        """Have the poller stop before this activity ends: it could otherwise take another lease at once."""
        if self.leave is None:
            return
        self.leave()
        deadline = time.monotonic() + _LEAVE_S
        while not activity.is_worker_shutdown() and time.monotonic() < deadline:
            time.sleep(0.01)


def health_of(
    role: host_states.LeasingRole, settings: Settings, queue: str, check: Callable[[], tuple[str, ...]] | None = None
) -> HostHealth:
    """Return the health of this host, whose own queue is given. `check`: in place of this machine's own."""
    own = HostCheck(role, settings.root_path, worker_environment(settings))
    state = host_states.HostState(
        role=role,
        shape=settings.shape,
        name=socket.gethostname(),
        queue=queue,
        seen_at=time.time(),
        lacks=own.at_start() if check is None else check(),
        fast_bf16=host_states.is_bf16_fast(),
        launch=settings.launch,
        max_ranks=room_for_ranks(settings.max_ranks) if role == "gpu" else None,
        devices=host_states.devices_here(machine_bytes()) if role == "gpu" else None,
    )
    health = HostHealth(open_store(settings.store, settings.s3), state, check or own, settings.warm_hosts)
    leased = host_states.told_file(settings.root_path, "leased", role)
    leased.unlink(missing_ok=True)
    health.begun = leased.touch
    return health


if __name__ == "__main__":
    main()
