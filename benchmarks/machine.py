"""Common parts of benchmarks: the commit, the machine and its load in each result, and the output of results."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tell(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as JSON, and write it to `out` if given."""
    text = json.dumps(result, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


def until(holds: Callable[[], bool], what: str, patience_s: float, every_s: float) -> None:
    """Wait until `holds()`. Raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s:g} s")
        time.sleep(every_s)


def attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure a part of a result. If it fails, the result has the error, and the other parts are still measured."""
    try:
        return part()
    except Exception as error:  # out of memory, a kernel that does not compile, a transport that is refused
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


def provenance() -> dict[str, object]:
    """Commit and hardware for a benchmark's JSON. The load is the last minute's, including the benchmark."""
    return {"commit": commit(), "hardware": {"cpu": _cpu(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}}


def accelerator() -> dict[str, object] | None:
    """The current CUDA device and its software versions; None if there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    import triton

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_gb": round(device.total_memory / 1e9, 1),
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


class PeakMemory:
    """A process's resident memory over a span of time, as Linux counts it: private and shared."""

    def __init__(self, pid: int) -> None:
        self._of = Path("/proc", str(pid))
        self._before = 0

    def start(self) -> None:
        """Begin a span: record the current memory, and reset the peak."""
        (self._of / "clear_refs").write_text("5")
        self._before = self._bytes("VmRSS")

    def extra_bytes(self) -> int:
        """Return the span's peak minus its beginning."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        return int(field(str(self._of / "status"), name).removesuffix("kB")) * 1024


def commit() -> str:
    """The checkout's commit, `none` outside one; with `-dirty` if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "none"


def field(path: str, name: str) -> str:
    """The first value of a name in a file of `name: value` lines below /proc; empty if there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _cpu() -> str:
    return field("/proc/cpuinfo", "model name") or platform.machine()
