"""Memory of a stack's processes over watched spans of time, and their CPU seconds.

Memory is the proportional set size: a page that forked processes share counts once among them all.
"""

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from shared.child_environment import STACK_MARK

_SAMPLE_EVERY_S = 1.0
_FLAT = 0.1


class Memory:
    """Memory of a stack's processes, in MB: at first, and over watched spans of time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._before = _held_mb(root)
        self._peaks: list[dict[str, float]] = []
        self._after: list[dict[str, float]] = []
        self._totals: list[float] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch during a wave: record its peak, and the memory at its end."""
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self._after.append(await asyncio.to_thread(_held_mb, self._root))

    async def _watch(self) -> None:
        peak: dict[str, float] = {}
        self._peaks.append(peak)
        self._totals.append(0.0)
        while True:
            now = await asyncio.to_thread(_held_mb, self._root)
            for role, held in now.items():
                peak[role] = max(held, peak.get(role, 0.0))
            together = sum(held for role, held in now.items() if role != "worker")
            self._totals[-1] = max(self._totals[-1], together)
            await asyncio.sleep(_SAMPLE_EVERY_S)

    def report(self) -> dict[str, Any]:
        """By process; whether the last wave took more than the first; whether any of the control plane did."""
        held = {}
        for role in self._peaks[0]:
            peaks = [peak.get(role, 0.0) for peak in self._peaks]
            growth = peaks[-1] / peaks[0] - 1
            held[role] = {
                "before": self._before.get(role),
                "peaks": peaks,
                "after": [after.get(role) for after in self._after],
                "growth": round(growth, 3),
                "is_flat": growth <= _FLAT,
            }
        totals = [round(total, 1) for total in self._totals]
        return {
            "memory_mb": held,
            "peak_mb": totals,
            "is_flat": all(one["is_flat"] for role, one in held.items() if role != "worker"),
        }


def _held_mb(root: Path) -> dict[str, float]:
    return {role: round(size, 1) for role, size in _of_each(root, lambda p: p.memory_full_info().pss / 1e6).items()}


def processor_s(root: Path) -> dict[str, float]:
    """CPU seconds of each process of the stack, and of the client."""
    return {**_of_each(root, lambda p: sum(p.cpu_times()[:2])), "client": sum(psutil.Process().cpu_times()[:2])}


def _of_each(root: Path, value: Callable[[psutil.Process], float]) -> dict[str, float]:
    """Return the sums of a value over the stack's processes, by role."""
    found: dict[str, list[float]] = {}
    for role, process in processes(root):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            found.setdefault(role, []).append(value(process))
    return {role: math.fsum(values) for role, values in sorted(found.items())}


def processes(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Yield a stack's processes, each with its role."""
    for process in psutil.process_iter():
        try:
            command = [word for word in process.cmdline() if word]  # a renamed process has empty ones behind
            if process.environ().get(STACK_MARK) == str(root) or command[-2:] == ["--root", str(root)]:
                yield _role(command), process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def _role(command: Sequence[str]) -> str:
    words = " ".join(command)
    roles = {"service.app": "service", "start-dev": "temporal", "megatron_worker": "worker", "wandb": "wandb"}
    roles |= {"service.dev.supervisor": "supervisor", "multiprocessing.forkserver": "fork servers"}
    if "service.host" in words:
        return f"{command[-1]} host"
    return next((role for word, role in roles.items() if word in words), Path(sys.executable).name)


def end(process: "subprocess.Popen[bytes]", within_s: float = 60.0) -> None:
    """Ask a process to end, and wait for it. Raises TimeoutError, after killing it, if it does not."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise TimeoutError(f"{process.args!r} does not end at SIGTERM within {within_s:g} s") from None
