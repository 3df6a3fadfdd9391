"""Memory of a stack's processes over watched spans of time, and their CPU seconds.

    python -m benchmarks.stack_processes [--idle 60] [--separate-hosts] [--out FILE.json]

prints the memory of `longshore dev` that has been idle for this many seconds after its start.

Memory is the proportional set size: a page that forked processes share counts once among them all.
"""

import argparse
import asyncio
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import provenance, tell
from service.dev import supervisor
from shared.child_environment import STACK_MARK

_SAMPLE_EVERY_S = 1.0
_FLAT = 0.1


class Memory:
    """Memory of a stack's processes, in MB: at first, and over watched spans of time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._before = held_mb(root)
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
        self._after.append(await asyncio.to_thread(held_mb, self._root))

    async def _watch(self) -> None:
        peak: dict[str, float] = {}
        self._peaks.append(peak)
        self._totals.append(0.0)
        while True:
            now = await asyncio.to_thread(held_mb, self._root)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=float, default=60, metavar="S", help="after the start")
    parser.add_argument("--separate-hosts", action="store_true", help="a process for each role")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    environment = os.environ | {"LONGSHORE_SEPARATE_HOSTS": str(given.separate_hosts).lower()}
    with tempfile.TemporaryDirectory() as folder:
        dev = [sys.executable, "-P", "-c", "from longshore.server import main; main()", "dev", "--root", folder]
        begin = time.monotonic()
        subprocess.run([*dev, "--detach"], check=True, env=environment, stderr=subprocess.DEVNULL)
        start_s = time.monotonic() - begin
        time.sleep(given.idle)
        found = supervisor(Path(folder))
        assert found is not None
        # The whole tree: a sandbox has neither the mark nor the root of its stack.
        held: list[tuple[str, float]] = []
        for process in (found, *found.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                role = _role(" ".join(process.cmdline()).split())
                held.append((role, round(process.memory_full_info().pss / 1e6, 1)))
        subprocess.run([*dev, "--stop"], check=True, env=environment, stderr=subprocess.DEVNULL)
    total = round(sum(size for _, size in held), 1)
    told = {"what": "MB of longshore dev, idle: proportional set size", "total": total, "processes": sorted(held)}
    tell(told | {"idle_s": given.idle, "start_s": round(start_s, 1)} | provenance(), given.out)


def held_mb(root: Path) -> dict[str, float]:
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
            command = " ".join(process.cmdline()).split()  # a fork's title is one word
            if process.environ().get(STACK_MARK) == str(root) or command[-2:] == ["--root", str(root)]:
                yield _role(command), process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def _role(command: Sequence[str]) -> str:
    words = " ".join(command)
    roles = {"service.app": "service", "start-dev": "temporal", "megatron_worker": "worker", "wandb": "wandb"}
    roles |= {"service.dev": "supervisor", "activities.sandbox": "sandbox"}
    if "service.host" in words:
        return f"{command[-1]} host" if command.count("--role") == 1 else "host"
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


if __name__ == "__main__":
    main()
