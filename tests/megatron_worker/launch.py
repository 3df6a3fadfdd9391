"""Starts ranks: by our launcher, as a host does; by torchrun, as a user may by hand; and as forks
(tests/forks.py), where a test is of what ranks do and not of how they are started.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil

from shared.programs import RENDEZVOUS_VARIABLE
from tests import forks
from tests.forks import Program

REPOSITORY = Path(__file__).parents[2]
forks.IMPORTED += ["megatron_worker.fsdp.engine", "megatron_worker.megatron.engine", "megatron_worker.worker"]


def ranks_command(module: str, *arguments: str, num_ranks: int = 1) -> list[str]:
    launcher = ["megatron_worker.process.launcher", str(num_ranks)] if num_ranks > 1 else []
    return [sys.executable, "-m", *launcher, module, *arguments]


def torchrun_command(module: str, *arguments: str, num_ranks: int = 1) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*launcher, "-m", module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | variables


def launch_ranks(module: str, *arguments: str, num_ranks: int = 1, timeout_s: float = 300) -> str:
    """Run to the end; stdout of all ranks. A rank that fails fails the test, with what it said."""
    return run(ranks_command(module, *arguments, num_ranks=num_ranks), timeout_s)


def torchrun(module: str, *arguments: str, num_ranks: int = 1, timeout_s: float = 300) -> str:
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


def fork_ranks(module: str, *arguments: str, num_ranks: int, timeout_s: float = 300) -> str:
    """As `launch_ranks`, without the seconds that each rank would import for."""
    call = partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank-{rank}") for rank in range(num_ranks)]
        ranks = [
            Program(call, [module, *arguments], environment(**_place(rank, num_ranks, folder)), REPOSITORY, own, own)
            for rank, own in enumerate(outputs)
        ]
        codes = forks.run(ranks, timeout_s)
        said = "".join(output.read_text() for output in outputs)
    assert not any(codes), said
    return said


def _place(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """What the launcher tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {name: str(number) for name, number in numbers.items()} | {RENDEZVOUS_VARIABLE: f"{folder}/rendezvous"}
