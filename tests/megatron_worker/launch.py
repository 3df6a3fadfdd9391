"""Starts ranks: as a host does, by our launcher; and as a user may by hand, by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]


def ranks_command(module: str, *arguments: str, num_ranks: int = 1) -> list[str]:
    launcher = ["megatron_worker.process.launcher", str(num_ranks)] if num_ranks > 1 else []
    return [sys.executable, "-m", *launcher, module, *arguments]


def torchrun_command(module: str, *arguments: str, num_ranks: int = 1) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*launcher, "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | variables


def run_ranks(module: str, *arguments: str, num_ranks: int = 1, timeout_s: float = 120) -> str:
    """Run to the end; stdout of all ranks. A rank that fails fails the test, with what it said."""
    return run(ranks_command(module, *arguments, num_ranks=num_ranks), timeout_s)


def torchrun(module: str, *arguments: str, num_ranks: int = 1, timeout_s: float = 120) -> str:
    return run(torchrun_command(module, *arguments, num_ranks=num_ranks), timeout_s)


def run(command: list[str], timeout_s: float) -> str:
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            stdout, stderr = launcher.communicate(timeout=timeout_s)
        except BaseException:  # ranks would wait for each other on and on
            for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
                process.kill()
            raise
    assert launcher.returncode == 0, stdout + stderr
    return stdout
