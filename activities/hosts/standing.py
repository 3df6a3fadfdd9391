"""A host's health: what it lacks, which workers it has lost, and whether it takes leases.

A host that lacks something, or has lost workers at their start again and again, leaves its lease queue to others. If
there are no others, runs must not wait for ever: then a host that lacks something tells them what it lacks, and one
that has lost workers takes leases again.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.confined.calls import machine_bytes
from activities.confined.programs import start
from activities.host_context import HOST_LEAVES
from activities.hosts.workers import last_words, room_for_ranks, worker_environment
from activities.telemetry import HOST_START
from shared.child_environment import child_environment
from shared.errors import AVOIDED, UNFIT, HostLeft, LeaseLost, LongshoreError, WorkerLost
from shared.settings import Settings
from shared.storage.host_states import (
    MAX_LOST,
    WORKER_PACKAGES,
    HostState,
    LeasingRole,
    delete_state,
    devices_here,
    is_bf16_fast,
    read_states,
    told_file,
    write_fast_bf16,
    write_offer,
    write_state,
)
from shared.storage.store import ObjectStore, open_store

# --- Checks of a GPU or sampler host: packages, free disk space, working devices ---
#
#     python -P -m longshore.server activities.hosts.standing --role gpu|sampler
#
# prints a line for each thing that this machine lacks, and nothing if it lacks nothing.

LEAST_BYTES = 256 << 20
"""Of the disk under a host's root: less cannot hold the log and the checkpoint of a small run."""
_WRITTEN_BYTES = 4 << 20
_TRIAL_S = 300.0  # as long as a worker may take to be up
_PASSED_S = 3600.0  # how long a passed check is valid for the next host of the same root and installation

Check = Callable[[], tuple[str, ...]]
"""Returns descriptions of what a host lacks."""


@dataclass(frozen=True)
class Fitness:
    """Checks this machine as a worker or sampler would find it. `environment`: their variables besides the host's."""

    role: LeasingRole
    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> tuple[str, ...]:
        """Return what is missing. Devices are tried only if the packages for that are installed."""
        found = (*missing_packages(WORKER_PACKAGES), *disk_lacks(self.root)) or self._tried()
        with suppress(OSError):  # without the mark the next host checks first
            self._mark.unlink(missing_ok=True) if found else self._mark.write_text(self._installation())
        return found

    def passed_lately(self) -> bool:
        """Return True if a host of this machine and root has passed its check within the hour, and nothing has changed.

        A host that restarts after a kill then takes leases at once; its full check runs while they do. Its disk is
        checked here, because it may have filled up since.
        """
        with suppress(OSError):
            is_new = 0 <= time.time() - self._mark.stat().st_mtime < _PASSED_S
            return is_new and self._mark.read_text() == self._installation() and not disk_lacks(self.root)
        return False

    @property
    def _mark(self) -> Path:
        return self.root / f"passed-{self.role}-{socket.gethostname()}"

    def _installation(self) -> str:
        """Return a hash of a check's dependencies: packages, Python, the machine's boot and its GPUs."""
        nvidia = Path("/proc/driver/nvidia")
        files = [
            Path("/proc/sys/kernel/random/boot_id"),
            nvidia / "version",
            *sorted(nvidia.glob("gpus/*/information")),
        ]
        texts = [file.read_text() for file in files if file.exists()]
        versions = [version(name) for name in WORKER_PACKAGES if _is_installed(name)]
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        told = [versions, sys.executable, sys.version, texts, devices, dict(self.environment)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _tried(self) -> tuple[str, ...]:
        # -P, as in ranks_command: `shared` shall be Longshore's.
        command = [sys.executable, "-P", "-m", "megatron_worker.training.trial", "--role", self.role]
        return trial_lacks(command, child_environment("worker") | dict(self.environment))


def missing_packages(wanted: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name} is not installed: pip install {name}" for name in wanted if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


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
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            trial = start(command, environment, stdout.fileno(), stderr.fileno())
            code = trial.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.kill(trial.pid, signal.SIGKILL)
            trial.wait()
            return (f"a tiny pass on its devices did not end within {timeout_s:g} s",)
        except OSError as error:
            return (f"a tiny pass cannot be tried: {error.strerror}",)
        said, errors = (_text(file) for file in (stdout, stderr))
    try:
        return tuple(str(each) for each in json.loads(said.splitlines()[-1]))
    except (IndexError, ValueError):
        last = last_words(errors)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return (f"a tiny pass on its devices ended with {how}" + (f": {last}" if last else ""),)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("gpu", "sampler"), default="gpu")
    for lack in Fitness(parser.parse_args().role, Settings().root_path)():
        print(lack)


_QUARANTINE_S = 600.0
_REST_S = 10.0  # for each run that lost a worker here at its start, before there are enough for quarantine
_LEAVE_S = 5.0
_log = logging.getLogger(__name__)


class Standing:
    """The standing of one host. Safe to use from several threads.

    Args:
        check: finds what the host lacks; it may take a minute.
        alone_s: after this many seconds without a host that takes leases, one that lacks something answers runs.
        num_warm: this many hosts of this role and shape stay without leases: the first idle ones by their queues'
            names.

    `leave`: stops this host's poller of leases; called by the activity that holds the only one. `begun`: called when
    the host has taken a lease.
    """

    def __init__(
        self, store: ObjectStore, state: HostState, check: Check, alone_s: float = 60.0, num_warm: int = 0
    ) -> None:
        self._store = store
        self._check = check
        self._alone_s = alone_s
        self._num_warm, self._stays = num_warm, num_warm > 0
        self._alone_since: float | None = None
        self._lock = threading.Lock()
        self.state = state
        self.leave: Callable[[], object] | None = None
        self.begun: Callable[[], object] = lambda: None
        self.is_doubtful = False  # a worker was lost, or a job failed, since the last check
        self.is_closing = False  # leases that still come are given back at once
        self.num_offered = 0
        self._num_held, self._is_retired = 0, False
        self._is_examined = self._has_asked = False
        self._idle_since = time.monotonic()

    def examine(self) -> None:
        """Check what the host lacks."""
        self.is_doubtful = False
        lacks = self._check()
        if not self._is_examined:
            self._is_examined, self._idle_since = True, time.monotonic()
            HOST_START.reached("host: first check")
        if lacks and lacks != self.state.lacks:
            _log.warning("this host lacks: %s", "; ".join(lacks))
        elif self.state.lacks and not lacks:
            _log.info("this host lacks nothing: it takes runs")
        self._change(lacks=lacks)
        if lacks and self.holds_lease:
            self.is_doubtful = True  # checked beside a lease: it leaves the queue once that has ended

    def asks(self) -> None:
        """Count idle time from when this host first asks for leases: to make its first worker may take seconds."""
        if not self._has_asked:
            self._has_asked, self._idle_since = True, time.monotonic()

    def beat(self) -> None:
        """Write the state into the store, and note whether there are others that take leases."""
        others = self._look()
        is_cleared = bool(self.state.lost_runs) and not self.state.blamed_for(others)
        self._change(seen_at=time.time(), **({"quarantined_until": 0.0} if is_cleared else {}))
        if self.state.role == "gpu":
            self._say((self.state, *others))

    def _say(self, hosts: tuple[HostState, ...]) -> None:
        """Write what GPU hosts of the shape offer to future runs: whether bfloat16 is fast on all of them (runs choose
        their precision by it), the most ranks that one of them takes, and the largest devices.
        """
        try:
            write_fast_bf16(self._store, self.state.shape, all(host.fast_bf16 for host in hosts))
            if most := max((host.max_ranks or 0 for host in hosts), default=0):
                devices = [host.devices for host in hosts if host.devices is not None]
                largest = max(devices, key=lambda each: each.num_bytes, default=None)
                write_offer(self._store, self.state.shape, most, largest)
        except (LongshoreError, OSError) as error:
            _log.warning("what this host offers is not written: %s", error)

    def _look(self) -> tuple[HostState, ...]:
        """Return the other hosts. Notes since when none of them takes leases, and whether this one stays warm."""
        others, now = self._others(), time.time()
        free = [each for each in others if each.takes_leases(now) and each.lease_since is None]
        self._stays = sum(each.queue < self.state.queue for each in free) < self._num_warm
        if any(other.takes_leases(now) for other in others):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        return others

    def retire(self) -> None:
        """Delete the state from the store, because this host leaves in good order."""
        with self._lock:
            self._is_retired = True  # a beat that is still running does not write it again
            try:
                delete_state(self._store, self.state)
            except (LongshoreError, OSError) as error:
                _log.warning("the state of this host stays in the store: %s", error)

    @property
    def holds_lease(self) -> bool:
        return self._num_held > 0

    @property
    def polls(self) -> bool:
        """True if the host should ask for leases now. A host that lacks something asks only to report that."""
        if self.state.lacks:
            return self._alone_since is not None and time.monotonic() - self._alone_since >= self._alone_s
        return self._alone_since is not None or not self.state.is_quarantined(time.time())

    def is_idle(self, after_s: float, close: bool = False) -> bool:
        """Return True if no lease came for `after_s` seconds and none is held. The time begins when the host asks for
        leases, or at its first check if that finds something lacking. A host that must stay warm is never idle.

        `close`: if idle, give back leases that come from now on.
        """
        with self._lock:
            stays = self._stays and not self.state.lacks
            is_idle = not stays and not self._num_held and time.monotonic() - self._idle_since >= after_s
            if is_idle and close:
                self.is_closing = True
            return is_idle

    @contextmanager
    def offered(self, run_id: str, avoid: tuple[str, ...], num_hosts: int = 1) -> Iterator[None]:
        """Hold a lease of a run in a `with` block, whose outcome the caller notes by `lost` and `worked`.

        `num_hosts`: hosts that the run needs at once. Without that many others, a host that it avoids takes it anyway.

        Raises:
            ApplicationError: `UNFIT` or `AVOIDED`; or the WorkerLost of the block, with this host's queue as its
                detail, so that the run can avoid this host.
            HostLeft: the host stopped polling while this lease was on its way.
        """
        with self._lock:
            self.num_offered += 1
            self._num_held += 1
            is_closing = self.is_closing
        try:
            if is_closing:
                raise HostLeft(HOST_LEAVES)
            self._refuse(avoid, num_hosts)
            HOST_START.reached("host: asks for leases")
            if activity.in_activity():
                HOST_START.tell(activity.info().scheduled_time.timestamp())
            self._change(lease_since=time.time())
            self.begun()
            try:
                yield
            except WorkerLost as error:
                raise ApplicationError(str(error), self.state.queue, type=type(error).__name__) from error
            finally:
                if self.is_doubtful:
                    self._leave_queue()
                self._change(lease_since=None)  # before Temporal can give it the next one
        finally:
            with self._lock:
                self._num_held, self._idle_since = self._num_held - 1, time.monotonic()

    def _refuse(self, avoid: tuple[str, ...], num_hosts: int) -> None:
        state = self.state
        if state.lacks:
            text = f"no host can take it: the {state.role} host {state.name} lacks what it needs: " + "; ".join(
                state.lacks
            )
            raise ApplicationError(text, state.queue, type=UNFIT, non_retryable=True)
        if state.queue in avoid and self.others_take_leases(avoid, num_hosts):
            raise ApplicationError("another host is to take it", state.queue, type=AVOIDED, non_retryable=True)

    def lost(self, run_id: str, error: WorkerLost | None, at_start: bool) -> None:
        """Note that a worker was lost here, or, without an error, that a job failed before its first step.

        Losses for reasons outside the worker's process, such as a leaving host, are not counted.
        """
        if isinstance(error, LeaseLost):
            return
        self.is_doubtful = True
        state = self.state.with_loss(run_id) if at_start else self.state
        until = max(state.quarantined_until, time.time() + self._rest_s(state)) if at_start else state.quarantined_until
        num_lost = state.num_lost + (error is not None)
        self._change(lost_runs=state.lost_runs, num_lost=num_lost, quarantined_until=until)

    def _rest_s(self, state: HostState) -> float:
        """Return for how long others go first."""
        num_blamed = len(state.blamed_for(self._look()))
        if num_blamed < MAX_LOST:
            return num_blamed * _REST_S
        _log.warning("this host has lost the workers of %d runs at their start: it is quarantined", num_blamed)
        return _QUARANTINE_S

    def worked(self) -> None:
        """Note that a worker has done a step here, which ends the count of losses."""
        if self.state.lost_runs:
            self._change(lost_runs=(), quarantined_until=0.0)

    def _others(self) -> tuple[HostState, ...]:
        try:
            states = read_states(self._store, self.state.shape)
        except (LongshoreError, OSError) as error:
            _log.warning("the states of other hosts are not known: %s", error)
            return ()
        return tuple(each for each in states if each.role == self.state.role and each.queue != self.state.queue)

    def others_take_leases(self, but: tuple[str, ...] = (), num: int = 1) -> bool:
        """Return True if `num` other hosts of its role and shape take leases, without those of the queues `but`."""
        now = time.time()
        return sum(other.takes_leases(now) and other.queue not in but for other in self._others()) >= num

    def _change(self, **fields: object) -> None:
        with self._lock:
            self.state = self.state.model_copy(update=fields)
            if self._is_retired:
                return
            try:
                write_state(self._store, self.state)
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


def standing_of(role: LeasingRole, settings: Settings, queue: str, check: Check | None = None) -> Standing:
    """Return the standing of this host, whose own queue is given.

    Until its first check has ended it lacks that, unless the host before it has passed the same one lately.
    """
    fitness = Fitness(role, settings.root_path, worker_environment(settings))
    is_known = check is None and fitness.passed_lately()
    state = HostState(
        role=role,
        shape=settings.shape,
        name=socket.gethostname(),
        queue=queue,
        seen_at=time.time(),
        lacks=() if is_known else ("its first check has not ended",),
        fast_bf16=is_bf16_fast(),
        launch=settings.launch,
        max_ranks=room_for_ranks(settings.max_ranks) if role == "gpu" else None,
        devices=devices_here(machine_bytes()) if role == "gpu" else None,
    )
    standing = Standing(open_store(settings.store, settings.s3), state, check or fitness, num_warm=settings.warm_hosts)
    leased = told_file(settings.root_path, "leased", role)
    leased.unlink(missing_ok=True)
    standing.begun = leased.touch
    return standing


if __name__ == "__main__":
    main()
