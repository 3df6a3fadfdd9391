"""Work on strangers' data in children, and programs as forks: what breaks is the child, found, ended and told."""

import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from activities.host_context import HostContext
from activities.hosts import programs
from activities.hosts.programs import Fork, RunningProgram, start
from activities.hosts.workers import processes_of
from activities.sampling.questions import ChatPrompts
from activities.sandbox import calls as confined
from activities.sandbox.calls import Child, Limits
from shared.child_environment import child_environment
from shared.errors import CorruptArtifact, InvalidInput, LongshoreError, StoreUnavailable
from shared.jobs.job import WORKER_ID_VARIABLE
from shared.settings import ConfinedSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import LocalStore
from tests.activities import confined_work as work
from tests.depth import drawn
from tests.waiting import wait_until

SMALL = ConfinedSettings(memory_bytes=512 << 20, step_cpu_s=2, file_bytes=8 << 20)


def server_process() -> psutil.Process:
    assert confined._server._process is not None
    return psutil.Process(confined._server._process.pid)


def line_of(process: psutil.Process) -> list[psutil.Process]:
    """A process and what it has started: launcher, server, and the keeper and child of a call in hand."""
    return [process, *(each for child in process.children()[-1:] for each in line_of(child))]


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_call_sees_only_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "rows").write_text("12 sacks")
    (tmp_path / "other").write_text("a secret")
    (tmp_path / "seen" / "link").symlink_to("../linked")
    (tmp_path / "linked").write_text("of a hub's cache")
    made = tmp_path / "made"
    made.mkdir()
    found = confined.call(SMALL, work.look_round, str(tmp_path), reads=[tmp_path / "seen"], writes=[made])
    assert found == {
        "seen/rows": "12 sacks",
        "seen/link": "of a hub's cache",
        "other": "FileNotFoundError",
        "/etc/passwd": "FileNotFoundError",
        "/proc/self/environ": "FileNotFoundError",
        "write seen": "OSError",
        "write made": "made",
        "socket": "PermissionError",
        "fork": "PermissionError",
        "execute": "PermissionError",
        "thread": "it ran",
    }
    assert (made / "file").read_text() == "made"
    owner = (made / "file").stat()
    assert (owner.st_uid, owner.st_gid) == (os.getuid(), os.getgid())


def test_a_child_that_is_not_ours_any_more_harms_nobody() -> None:
    for frame in ("", "z", "q", "x" + "[" * 100_000, 'x{"bug": 1}', 'x{"error": "Exception", "message": ""}'):
        with pytest.raises(LongshoreError):
            confined.call(SMALL, work.send, frame)


def test_a_call_gives_what_the_function_gives_without_the_hosts_environment() -> None:
    assert confined.call(SMALL, work.echo, "grüße \N{SNOWMAN}" * 100_000) == "grüße \N{SNOWMAN}" * 100_000
    assert list(confined.stream(SMALL, work.count, 5)) == [0, 1, 2, 3, 4]
    os.environ["LONGSHORE_SECRET_OF_THE_TEST"] = "secret"
    try:
        found = confined.call(SMALL, work.environment, None)
    finally:
        del os.environ["LONGSHORE_SECRET_OF_THE_TEST"]
    assert "secret" not in found.values() and "HOME" not in found


def test_what_a_child_asks_is_answered_by_its_caller() -> None:
    questions = ["grüße", "", "x" * 3_000_000]
    answered = confined.call(SMALL, work.ask_often, questions, answer=lambda question: b"to " + question)
    assert answered == [f"to {question}" for question in questions]


def test_where_the_caller_cannot_answer_its_error_is_the_calls() -> None:
    def away(_: bytearray) -> bytes:
        raise StoreUnavailable("the store is away")

    with pytest.raises(StoreUnavailable, match="the store is away"):
        confined.call(SMALL, work.ask_often, ["?"], answer=away)
    assert confined.call(SMALL, work.echo, "and on") == "and on"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (work.grow_python, r"^rows\.jsonl:3: reading it takes more memory than the 0\.5 GiB that it may$"),
        (work.grow_native, r"^rows\.jsonl:4: reading it aborts its process \(SIGABRT\), .* the limit is 0\.5 GiB$"),
        (work.spin, r"^rows\.jsonl:5: it takes more than 2 s of processor time$"),
    ],
)
def test_what_takes_more_than_it_may_is_its_inputs_error(function, message: str) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidInput, match=message):
        confined.call(SMALL, function, None)
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_what_goes_on_may_take_long_and_what_is_silent_may_not(tmp_path: Path) -> None:
    assert confined.call(SMALL, work.work_long_and_say_so, 5) > 3
    with pytest.raises(InvalidInput, match=r"^rows\.jsonl:6: it takes longer than 1 s and was stopped$"):
        confined.call(SMALL.model_copy(update={"silence_s": 1.0}), work.wait, str(tmp_path / "note"), writes=[tmp_path])


def test_files_have_a_size(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"):
        confined.call(SMALL, work.write, str(tmp_path), writes=[tmp_path])
    assert (tmp_path / "large").stat().st_size <= SMALL.file_bytes


def test_errors_come_as_they_were_raised() -> None:
    with pytest.raises(InvalidInput, match=r"^rows\.jsonl:7: it is wrong$"):
        confined.call(SMALL, work.fail, "input")
    with pytest.raises(CorruptArtifact, match=r"^a/b: it changed$"):
        confined.call(SMALL, work.fail, "corrupt")
    with pytest.raises(StoreUnavailable, match=r"^not now$"):
        confined.call(SMALL, work.fail, "away")
    with pytest.raises(OSError, match="No space left on device"):
        confined.call(SMALL, work.fail, "disk")
    with pytest.raises(InvalidInput, match=r"aborts its process \(SIGSEGV\)"):
        confined.call(SMALL, work.fail, "stack")
    with pytest.raises(RuntimeError, match=r"(?s)in a process of its own:.*KeyError: 'a bug'"):
        confined.call(SMALL, work.fail, "bug")


def test_a_child_that_somebody_killed_says_nothing_of_its_input() -> None:
    with pytest.raises(RuntimeError, match="was killed by signal 9"):
        confined.call(SMALL, work.fail, "killed")


@pytest.mark.parametrize(("num_bytes", "error"), [(1 << 20, RuntimeError), (1 << 30, InvalidInput)])
def test_only_what_took_much_memory_itself_is_why_the_kernel_had_none_left(
    num_bytes: int, error: type[Exception]
) -> None:
    """The kernel ends such children first, whoever took the memory. That it ended any is made up here."""
    limits = Limits.of(ConfinedSettings(memory_bytes=3 << 29))
    child = Child(confined._server, limits, work.take_and_die, (num_bytes,))
    how, _, peak_bytes = json.loads(os.read(child._status, 4096))
    os.close(child._status)
    child._status, tells = os.pipe()
    os.write(tells, json.dumps([how, True, peak_bytes]).encode())
    os.close(tells)
    with pytest.raises(error, match=r"memory|killed by signal 9"):
        list(child.results())
    child.close()


def test_a_lost_fork_server_loses_the_calls_in_hand_and_the_next_ones_find_another(tmp_path: Path) -> None:
    note, errors = tmp_path / "note", list[BaseException]()

    def hold() -> None:
        try:
            confined.call(SMALL, work.wait, str(note), writes=[tmp_path])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    wait_until(note.exists, "the call is in hand")
    [launcher, server, keeper, child] = line_of(server_process())
    server.kill()
    thread.join(20)
    assert [type(error) for error in errors] == [RuntimeError]
    # What a dying server was still handed would be lost too: it is gone when it can be waited for.
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    wait_until(lambda: not any(map(lives, (keeper, child))), "the child has gone")
    assert confined.call(SMALL, work.echo, "again") == "again"


def test_a_call_that_is_given_up_ends_its_child() -> None:
    results = confined.stream(SMALL, work.pids, None)
    next(results)
    *_, keeper, child = line_of(server_process())
    results.close()
    wait_until(lambda: not any(map(lives, (keeper, child))), "the child has ended")


def test_a_host_has_no_more_children_at_once_than_it_may(tmp_path: Path) -> None:
    two = SMALL.model_copy(update={"at_once": 2})
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: confined.call(two, work.notes, str(tmp_path), writes=[tmp_path]), range(8)))
    assert max(found) <= 2


def test_whole_datasets_leave_a_place_to_others(tmp_path: Path) -> None:
    two, note = SMALL.model_copy(update={"at_once": 2}), tmp_path / "note"
    long = confined.stream(two, work.pids, None, kind="dataset")
    next(long)
    assert confined.call(two, work.echo, "short") == "short"
    waiting = threading.Thread(
        target=lambda: confined.call(two, work.write_note, str(note), kind="dataset", writes=[tmp_path])
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not note.exists()
    assert confined.call(two, work.echo, "short") == "short"
    assert confined.call(two, work.echo, "a grade", kind="grading") == "a grade"
    long.close()
    waiting.join(60)
    assert not waiting.is_alive() and note.exists(), "it had its turn"


def test_as_many_children_as_the_machine_has_memory_for() -> None:
    assert confined._room(1 << 50) == 2
    assert 2 <= confined._room(1 << 30) <= psutil.virtual_memory().total >> 30 or confined._room(1 << 30) == 2


HOSTILE = [
    ('{"model": ' + "[" * 4_000_000, "invalid JSON"),
    ('{"model": [' + "{}," * 12_000_000 + "{}]}", "takes more memory than the 0.5 GiB"),
]


@pytest.mark.parametrize(("text", "sentence"), HOSTILE, ids=["deep", "large"])
def test_a_hostile_tokenizer_is_refused_to_who_asks_and_costs_the_host_nothing(
    tmp_path: Path, text: str, sentence: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(text)
    seal(folder)
    model = upload_artifact(LocalStore(tmp_path / "store"), "models/hostile", folder)
    before = psutil.Process().memory_info().rss
    with closing(ChatPrompts(HostContext(Settings(root=tmp_path, confined=SMALL)))) as prompts:
        with pytest.raises(InvalidInput, match=sentence):
            prompts.prompt(model, [{"role": "user", "content": "hello"}])
        with pytest.raises(InvalidInput, match=r"^messages: a text of 4,194,3\d\d characters; a row may have up to"):
            prompts.prompt(model, [{"role": "user", "content": "a" * (4 << 20)}])
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_nothing_of_it_outlives_its_host(tmp_path: Path) -> None:
    note = tmp_path / "note"
    host = os.fork()
    if not host:
        confined.call(SMALL, work.wait, str(note), writes=[tmp_path])
        os._exit(1)
    wait_until(note.exists, "the call is in hand")
    line = line_of(psutil.Process(host).children()[0])
    assert len(line) == 4
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    wait_until(lambda: not any(map(lives, line)), "all have ended")


def test_a_call_is_cheap() -> None:
    """Not a bound of time: a call forks, and starts no interpreter."""
    confined.call(SMALL, work.echo, "")
    before = server_process()
    began = time.monotonic()
    for _ in range(10):
        confined.call(SMALL, work.echo, "")
    print(f"{(time.monotonic() - began) * 100:.1f} ms a call")
    assert server_process() == before


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
