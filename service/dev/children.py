"""Processes that one supervisor starts, restarts and ends, and the leftovers of a supervisor that was killed."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from activities.confined import programs
from shared.child_environment import STACK_MARK, Kind

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_STEADY_S = 30.0
_LOG_BYTES = 16 << 20


@dataclass
class StackProcess:
    """One process of the stack. If it dies it is restarted, after a pause."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    grace_s: float = 8.0
    role: Kind = "temporal"
    process: programs.RunningProgram | None = None
    started_at: float = 0.0
    wait_s: float = _SHORTEST_WAIT_S
    start_at: float = 0.0
    num_ends: int = 0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
            self.log.rename(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as log:
            self.process = programs.start(
                self.command, self.environment, log.fileno(), log.fileno(), dies_by=signal.SIGTERM
            )
        self.started_at = time.monotonic()

    def revive(self) -> str | None:
        """Start the process if it is down and its wait is over. Returns a message for the user."""
        now = time.monotonic()
        if self.process is None:
            if now >= self.start_at:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        self.process = None
        self.num_ends += 1
        if now - self.started_at > _STEADY_S:
            self.wait_s = _SHORTEST_WAIT_S
        self.start_at = now + self.wait_s
        message = f"{self.name} ended with code {code}; starting it again in {self.wait_s:.1f} s (log: {self.log})"
        self.wait_s = min(self.wait_s * 2, _LONGEST_WAIT_S)
        return message

    def cpu_s(self) -> float:
        """Return the seconds of processor time that the process has used; 0 while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sum(psutil.Process(self.process.pid).cpu_times()[:2]) if self.process else 0.0
        return 0.0

    def ask_to_leave(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for the process to leave, then end its process group."""
        if self.process is None:
            return
        try:
            self.process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def end_leftovers(root: Path) -> int:
    """End processes that an earlier stack of this root left behind, found by their mark. Returns their number."""
    left = [process for process in psutil.process_iter() if _carries(process, str(root))]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=5)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5)
    return len(left)


def _carries(process: psutil.Process, root: str) -> bool:
    try:
        is_me = process.pid == os.getpid()
        return not is_me and process.status() != psutil.STATUS_ZOMBIE and process.environ().get(STACK_MARK) == root
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
