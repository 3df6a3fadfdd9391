"""Work on strangers' data in children: what breaks is the child, and its input is told why; a kill is another thing."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from activities.confined import calls as confined
from activities.confined.calls import Child
from activities.host_context import HostContext
from activities.sampling.questions import ChatPrompts
from shared.errors import CorruptArtifact, InvalidInput, StoreUnavailable
from shared.settings import ConfinedSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import LocalStore
from tests.activities import confined_work as work
from tests.waiting import wait_until

SMALL = ConfinedSettings(memory_bytes=512 << 20, step_cpu_s=2, file_bytes=8 << 20)


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
    with pytest.raises(InvalidInput, match=r"^rows\.jsonl:6: it takes longer than 1 s$"):
        confined.call(SMALL.model_copy(update={"silence_s": 1.0}), work.wait, str(tmp_path / "note"))


def test_files_have_a_size(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"):
        confined.call(SMALL, work.write, str(tmp_path))
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
    settings = ConfinedSettings(memory_bytes=3 << 29)
    data, status = confined._server.fork()
    killed = Child(data, status, settings)
    limits = {"memory_bytes": settings.memory_bytes, "step_cpu_s": 300, "file_bytes": 1 << 20}
    killed.send(json.dumps({"module": work.__name__, "function": "take_and_die", "limits": limits}).encode())
    killed.send(json.dumps([num_bytes]).encode())
    how, _, peak_bytes = json.loads(os.read(status, 4096))
    killed.close()
    ours, theirs = socket.socketpair()
    told, tells = os.pipe()
    os.write(tells, json.dumps([how, True, peak_bytes]).encode())
    os.close(tells)
    theirs.close()
    child = Child(ours, told, settings)
    with pytest.raises(error, match=r"memory|killed by signal 9"):
        list(child.results())
    child.close()


def test_a_lost_fork_server_loses_the_calls_in_hand_and_the_next_ones_find_another(tmp_path: Path) -> None:
    note, errors = tmp_path / "note", list[BaseException]()

    def hold() -> None:
        try:
            confined.call(SMALL, work.wait, str(note))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    wait_until(lambda: note.exists() and note.read_text(), "the call is in hand")
    child = psutil.Process(int(note.read_text()))
    server = child.parent()
    assert server is not None
    server.kill()
    thread.join(20)
    assert [type(error) for error in errors] == [RuntimeError]
    # What a dying server was still handed would be lost too: it is gone when it can be waited for.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child has gone")
    assert confined.call(SMALL, work.echo, "again") == "again"


def test_a_call_that_is_given_up_ends_its_child(tmp_path: Path) -> None:
    note = tmp_path / "note"
    results = confined.stream(SMALL, work.pids, None)
    pid = next(results)
    results.close()
    wait_until(lambda: not psutil.pid_exists(pid), "the child has ended")
    assert not note.exists()


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
        found = list(threads.map(lambda _: confined.call(two, work.notes, str(tmp_path)), range(8)))
    assert max(found) <= 2


def test_whole_datasets_leave_a_place_to_others(tmp_path: Path) -> None:
    two, note = SMALL.model_copy(update={"at_once": 2}), tmp_path / "note"
    long = confined.stream(two, work.pids, None, kind="dataset")
    next(long)
    assert confined.call(two, work.echo, "short") == "short"
    waiting = threading.Thread(target=lambda: confined.call(two, work.write_note, str(note), kind="dataset"))
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
        confined.call(SMALL, work.wait, str(note))
        os._exit(1)
    wait_until(lambda: note.exists() and note.read_text(), "the call is in hand")
    child = psutil.Process(int(note.read_text()))
    server = child.parent()
    assert server is not None and server.ppid() == host
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    wait_until(lambda: not child.is_running() and not server.is_running(), "both have ended")


def test_a_call_is_cheap() -> None:
    """Not a bound of time: a call forks, and starts no interpreter."""
    confined.call(SMALL, work.echo, "")
    server = psutil.Process(confined.call(SMALL, work.parent, None))
    before = server.create_time()
    began = time.monotonic()
    for _ in range(10):
        assert confined.call(SMALL, work.parent, None) == server.pid
    print(f"{(time.monotonic() - began) * 100:.1f} ms a call")
    assert server.create_time() == before
