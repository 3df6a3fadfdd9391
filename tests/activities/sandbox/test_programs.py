"""Programs as forks: found, ended and lost as if they had been started by themselves, as they are where that fails."""

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from activities.hosts import programs
from activities.hosts.programs import Fork, RunningProgram, start
from activities.hosts.workers import processes_of
from shared.child_environment import child_environment
from shared.jobs.job import WORKER_ID_VARIABLE
from tests.depth import drawn
from tests.waiting import wait_until


class Worker:
    """A worker of ours below a folder, which no host knows."""

    def __init__(self, root: Path, *more: str, num_ranks: int = 1, **variables: str) -> None:
        # Processes are found by this name on the whole machine, also by a folder of a test beside this one.
        root = root.with_name(f"{root.name}-{uuid.uuid4().hex}")
        root.mkdir()
        self.worker_id = root.name
        self.said = root / "said"
        launcher = ["megatron_worker.process.launcher", str(num_ranks)] if num_ranks > 1 else []
        self.command = [sys.executable, "-P", "-m", *launcher, "megatron_worker", "--root", str(root), *more]
        environment = child_environment("worker") | {WORKER_ID_VARIABLE: self.worker_id, "OMP_NUM_THREADS": "1"}
        environment |= variables
        with self.said.open("wb") as output:
            self.program: RunningProgram = start(self.command, environment, output.fileno(), output.fileno())

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.worker_id)

    def is_forked(self) -> bool:
        return isinstance(self.program, Fork)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    programs._server.end()  # which a test of another file may have started in this process
    yield tmp_path
    programs._server.end()


def fork_server() -> psutil.Process:
    assert programs._server._process is not None
    return psutil.Process(programs._server._process.pid)


def test_a_fork_is_found_by_its_command_and_its_mark(host: Path) -> None:
    worker = Worker(host / "one")
    assert worker.is_forked()
    [process] = worker.processes()
    assert (process.pid, process.ppid()) == (worker.program.pid, fork_server().pid)
    assert " ".join(process.cmdline()).split() == worker.command and os.getsid(process.pid) == process.pid
    assert worker.program.poll() is None
    process.kill()
    assert worker.program.wait(60) == worker.program.poll() == -signal.SIGKILL


def test_a_program_that_refuses_says_so_by_its_status_and_output(host: Path) -> None:
    worker = Worker(host / "one", "--no-such-option")
    assert worker.program.wait(60) == 2
    assert "unrecognized arguments: --no-such-option" in worker.said.read_text()


def test_what_a_program_imports_can_be_imported_before_it_is_started(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(programs._IMPORTS, "megatron_worker", ("sqlite3",))

    def has_imported() -> bool:
        return any("_sqlite3" in mapped.path for mapped in fork_server().memory_maps())

    programs.prepare([sys.executable, "-P", "-m", "no_program_of_ours"])
    assert programs._server._process is None
    programs.prepare([sys.executable, "-P", "-m", "megatron_worker"])
    wait_until(lambda: programs._server._process, "the server")
    wait_until(lambda: has_imported() or None, "the import")
    wait_until(lambda: not fork_server().children() or None, "nothing that runs")
    worker = Worker(host / "one", "--no-such-option")
    assert worker.is_forked() and worker.program.wait(60) == 2


@pytest.mark.parametrize("victim", drawn([0, 1, 2], 1))
def test_one_rank_or_the_launcher_is_lost_and_all_end(host: Path, victim: int) -> None:
    worker = Worker(host / "two", num_ranks=2)
    assert worker.is_forked()
    wait_until(lambda: len(worker.processes()) == 3 or None, "launcher and ranks")
    sorted(worker.processes(), key=lambda process: process.pid)[victim].kill()
    assert worker.program.wait(60) == (-signal.SIGKILL if victim == 0 else 128 + signal.SIGKILL)
    wait_until(lambda: not worker.processes() or None, "the end of all")


def test_the_fork_server_is_killed_its_programs_end_and_the_next_has_another(host: Path) -> None:
    worker, lost = Worker(host / "one"), fork_server()
    lost.kill()
    assert worker.program.wait(60) == -signal.SIGKILL
    wait_until(lambda: not worker.processes() or None, "its end")
    again = Worker(host / "again")
    assert again.is_forked() and again.program.poll() is None and fork_server() != lost


def test_the_fork_server_is_stopped_ends_are_known_and_programs_start_all_the_same(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_IMPORTS", {"megatron_worker": ()})
    worker = Worker(host / "one")
    monkeypatch.setattr(programs, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(programs, "_GRACE_S", 0.1)
    fork_server().suspend()
    os.kill(worker.program.pid, signal.SIGKILL)
    assert worker.program.wait(60) == -signal.SIGKILL
    by_itself = Worker(host / "two")
    assert not by_itself.is_forked() and by_itself.program.poll() is None
    os.kill(by_itself.program.pid, signal.SIGKILL)
    by_itself.program.wait(60)


def test_the_fork_server_ends_once_nothing_has_run_for_a_while(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_UNUSED_S", 0.1)
    worker = Worker(host / "one")
    server = fork_server()
    time.sleep(0.5)
    programs.end_if_unused()
    assert worker.program.poll() is None and server.is_running(), "it runs"
    worker.program.send_signal(signal.SIGKILL)
    worker.program.wait(60)

    def is_gone() -> bool:
        programs.end_if_unused()
        return not server.is_running()

    wait_until(is_gone, "its end")
    assert Worker(host / "two").is_forked(), "there is another"


def test_the_server_is_not_told_the_environment_of_a_program(host: Path) -> None:
    canary = "canary-of-the-store-" + "41c7ab"
    worker = Worker(host / "one", AWS_SECRET_ACCESS_KEY=canary)
    assert worker.is_forked() and canary.encode() in memory_of(worker.program.pid)
    assert canary.encode() not in memory_of(fork_server().pid)


def memory_of(pid: int) -> bytes:
    """What a process can write to: its heap, its stack, what it maps."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            begin, end = (int(each, 16) for each in span.split("-"))
            if rights.startswith("rw"):
                memory.seek(begin)
                with suppress(OSError):
                    found.append(memory.read(end - begin))
    return b"".join(found)


def test_programs_of_others_start_by_themselves(tmp_path: Path) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        program = start([sys.executable, "-c", "raise SystemExit(3)"], {}, nowhere.fileno(), nowhere.fileno())
    assert not isinstance(program, Fork) and program.wait(60) == 3
