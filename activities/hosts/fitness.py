"""Checks of a GPU or sampler host: packages, free disk space, working devices.

    python -P -m longshore.server activities.hosts.fitness --role gpu|sampler

prints a line for each thing that this machine lacks, and nothing if it lacks nothing.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from activities.confined.programs import start
from activities.hosts.worker_process import last_words
from shared.child_environment import child_environment
from shared.settings import Settings
from shared.storage.host_states import WORKER_PACKAGES, LeasingRole

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


if __name__ == "__main__":
    main()
