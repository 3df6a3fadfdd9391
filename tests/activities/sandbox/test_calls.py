"""Work on strangers' data in children: what breaks is the child, and its input is told why; a kill is another thing."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts
from activities.sandbox import calls as confined
from activities.sandbox.calls import Child, Limits
from shared.errors import CorruptArtifact, InvalidInput, LongshoreError, StoreUnavailable
from shared.settings import ConfinedSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import LocalStore
from tests.activities import confined_work as work
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


def test_many_calls_at_once() -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = confined.call(SMALL, work.echo, str(number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: str(number) for number in range(20)}


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
            prompts.ids(model, [{"role": "user", "content": "hello"}])
        with pytest.raises(InvalidInput, match=r"^messages: a text of 4,194,3\d\d characters; a row may have up to"):
            prompts.ids(model, [{"role": "user", "content": "a" * (4 << 20)}])
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
