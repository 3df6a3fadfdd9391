"""Starts ranks: by our launcher, as a host does; by torchrun, as a user may by hand; and as forks
(tests/forks.py), where a test is of what ranks do and not of how they are started.
"""

import os
import pickle
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from shared.programs import RENDEZVOUS_VARIABLE
from tests import forks
from tests.forks import Program

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[2]
forks.IMPORTED += ["pytest", "megatron_worker.fsdp.engine", "megatron_worker.megatron.engine", "megatron_worker.worker"]


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
        command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    return _forked(call, [module, *arguments], num_ranks, timeout_s)


def on_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, timeout_s: float = 300) -> list[T]:
    """Call a function of a module on ranks that are forks, each on one thread, in a group over gloo.

    Function, arguments and results are pickled. A rank that raises fails the test, with what all of them said.

    Returns:
        What the function returned, by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        _forked(partial(_call_on_rank, function, arguments, Path(folder)), ["rank"], num_ranks, timeout_s)
        return [pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(num_ranks)]


def in_turn(function: Callable[..., T], cases: Iterable[tuple[Any, ...]]) -> list[T]:
    """Call a function with each of these arguments: one start of ranks serves a table."""
    return [function(*case) for case in cases]


def _call_on_rank(function: Callable[..., object], arguments: tuple[Any, ...], folder: Path) -> None:
    import torch

    from megatron_worker.process.ranks import start_group

    torch.set_num_threads(1)
    start_group("gloo")
    result = function(*arguments)
    (folder / f"{torch.distributed.get_rank()}").write_bytes(pickle.dumps(result))
    torch.distributed.destroy_process_group()


def _forked(call: Callable[[], object], argv: Sequence[str], num_ranks: int, timeout_s: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank-{rank}") for rank in range(num_ranks)]
        ranks = [
            Program(call, argv, environment(**_place(rank, num_ranks, folder)), REPOSITORY, own, own)
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
