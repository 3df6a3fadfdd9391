"""The stack on one machine: it starts, mends itself, keeps its runs over a restart, and leaves nothing behind."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.cli.command import main
from service.dev import Connection, Ports, StackProcess, end_leftovers, listens, supervisor, temporal_binary
from shared.child_environment import STACK_MARK
from tests import forks
from tests.depth import drawn
from tests.ended import living
from tests.files_below import files_below
from tests.service.conftest import LONGSHORE, Answer, longshore, sft
from tests.waiting import wait_until


@dataclass(frozen=True)
class Dev:
    """`longshore dev` in a root of its own."""

    root: Path

    def cli(self, *arguments: str, **environment: str) -> Answer:
        """`longshore` with these arguments: the user's own program where it starts a stack."""
        env = {**os.environ, "LONGSHORE_ROOT": str(self.root), **environment}
        if "--detach" in arguments:
            return longshore(*arguments, env=env, timeout_s=300)
        return forks.captured(main, ["longshore", *arguments], env, Path.cwd(), timeout_s=300)

    @property
    def connection(self) -> Connection:
        found = Connection.read(self.root)
        assert found is not None
        return found

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living children whose command line holds all of the words."""
        return living(self.root, STACK_MARK, *words)

    def get(self, path: str, **options: Any) -> httpx.Response | None:
        connection = self.connection
        headers = {"authorization": f"Bearer {connection.api_key}"}
        try:
            return httpx.get(f"{connection.api_url}/api/v1{path}", headers=headers, timeout=300, **options)
        except httpx.HTTPError:
            return None

    def post(self, path: str, body: dict) -> httpx.Response | None:
        headers = {"authorization": f"Bearer {self.connection.api_key}"}
        try:
            return httpx.post(f"{self.connection.api_url}/api/v1{path}", json=body, headers=headers, timeout=300)
        except httpx.HTTPError:
            return None

    def is_well(self) -> bool:
        answer = self.get("/health")
        return answer is not None and answer.status_code == 200


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    dev = Dev(tmp_path_factory.mktemp("dev") / "root")
    dev.root.mkdir(mode=0o755)  # as one of an older Longshore may be
    try:
        started = dev.cli("dev", "--detach")
        assert started.code == 0, started
        yield dev
    finally:
        dev.cli("dev", "--stop")


def test_the_stack_says_where_it_is_and_its_key_is_private(dev: Dev) -> None:
    wait_until(dev.is_well, "the stack is well")
    assert dev.connection.temporal_ui is None, "nobody asked for it"
    assert stat.S_IMODE((dev.root / "dev.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(dev.root.stat().st_mode) == 0o700
    kept = b"".join(data for path, data in files_below(dev.root) if path != "dev.json")
    assert kept and dev.connection.api_key.encode() not in kept
    assert httpx.get(f"{dev.connection.api_url}/api/v1/runs").status_code == 401
    assert dev.cli("ls").code == 0  # finds address and key by itself
    assert all(dev.connection.api_key not in json.dumps(p.environ()) for p in dev.processes())


def test_a_link_signs_a_browser_in_once(dev: Dev) -> None:
    link = dev.cli("dev", "--link").stdout.strip()
    path, _, once = link.partition("?once=")
    assert path == f"{dev.connection.api_url}/login" and once
    for _ in range(2):
        assert "This link signs" in httpx.get(link).text, "looking uses up nothing"
    assert httpx.post(path, data={"once": once}).status_code == 303
    assert httpx.post(path, data={"once": once}).status_code == 401
    refused = httpx.post(f"{path}/link")
    assert refused.status_code == 401, "without a key"


def test_only_the_folder_where_it_was_started_is_open_and_a_second_tenant_is_warned_of(dev: Dev) -> None:
    headers = {"authorization": f"Bearer {dev.connection.api_key}"}
    outside = dev.root.parent / "outside"
    outside.mkdir()
    for folder, is_open in ((Path.cwd() / "docs", True), (outside, False)):
        asked = {"source": {"uri": f"{folder.as_uri()}/rows.jsonl"}, "model_uri": str(folder)}
        answer = httpx.post(f"{dev.connection.api_url}/api/v1/validate", json=asked, headers=headers, timeout=300)
        assert answer.status_code == 422
        assert ("download.file_roots" not in answer.text) == is_open, answer.text
    assert "longshore dev --open" in answer.text
    (host,) = dev.processes("service.host")
    opened = dev.cli("dev", "--open", str(outside))
    assert opened.code == 0 and str(outside) in opened.stderr, opened
    wait_until(lambda: (found := dev.post("/validate", asked)) and "dev --open" not in found.text, "it is open")
    wait_until(dev.is_well, "the stack is well")
    assert dev.processes("service.host") == [host], "its leases go on"
    previewed = {"source": {"uri": (outside / "rows.jsonl").as_uri()}, "model_uri": str(outside)}
    wait_until(
        lambda: (found := dev.post("/preview", previewed)) and "dev --open" not in found.text, "it is open to the host"
    )
    made = dev.cli("tenants", "create", "second")
    assert made.code == 0
    assert "warning: every tenant may read files below" in made.stderr and str(Path.cwd()) in made.stderr


def test_a_second_stack_on_the_same_root_is_refused(dev: Dev) -> None:
    answer = dev.cli("dev")
    assert answer.code == 100
    assert "is running" in answer.stderr and "longshore dev --stop" in answer.stderr


def test_a_second_call_tells_the_address_and_a_link_and_restarts_nothing(dev: Dev) -> None:
    wait_until(dev.is_well, "the stack is well")
    before = {(each.pid, each.create_time()) for words in CHILDREN for each in dev.processes(*words)}
    for more in ((), ("--open", str(Path.cwd())), ("--port", "9", "--ui")):
        again = dev.cli("dev", "--detach", *more)
        assert again.code == 0, again
        assert f"API, page    {dev.connection.api_url}" in again.stderr
        assert "/login?once=" in again.stderr
        assert ("count when it is started anew" in again.stderr) == ("--port" in more)
    assert {(each.pid, each.create_time()) for words in CHILDREN for each in dev.processes(*words)} == before


def test_a_start_is_waited_for_and_told_however_long_it_takes(tmp_path: Path) -> None:
    """Temporal is suspended as it starts, so that the start takes as long as this test wants."""
    dev = Dev(tmp_path / "root")
    program, go = tmp_path / "bin" / "temporal", tmp_path / "go"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.2; done\nexec {temporal_binary()} "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "LONGSHORE_ROOT": str(dev.root), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    said = [tmp_path / "first", tmp_path / "second"]
    try:
        with said[0].open("wb") as first, said[1].open("wb") as second:
            calls = [subprocess.Popen([LONGSHORE, "dev", "--detach"], stderr=first, env=env)]
            wait_until(lambda: b"waiting until Temporal" in said[0].read_bytes(), "it says what it waits for")
            calls.append(subprocess.Popen([LONGSHORE, "dev", "--detach"], stderr=second, env=env))
            wait_until(lambda: b"waiting until Temporal" in said[1].read_bytes(), "the second call says so too")
            assert [call.poll() for call in calls] == [None, None]
            go.touch()
            assert [call.wait(300) for call in calls] == [0, 0]
        for each in said:
            assert b"Longshore is up" in each.read_bytes() and b"/login?once=" in each.read_bytes()
    finally:
        go.touch()
        dev.cli("dev", "--stop")


def test_a_start_that_fails_again_and_again_ends_with_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    dev = Dev(tmp_path / "root")
    program = tmp_path / "temporal"
    program.write_text("#!/bin/sh\necho no room on the disk\nexit 3\n")
    program.chmod(0o755)
    failed = dev.cli("dev", "--detach", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert failed.code == 100
    assert "Temporal does not start" in failed.stderr and "no room on the disk" in failed.stderr
    assert dev.processes() == []


CHILDREN = [("service.app",), ("start-dev",), ("service.host",)]


@pytest.mark.drawn
@pytest.mark.parametrize("words", drawn(CHILDREN, 1))
def test_a_killed_child_is_started_again(dev: Dev, words: tuple[str, ...]) -> None:
    (victim,) = wait_until(lambda: dev.processes(*words), f"{words} runs")
    victim.kill()
    wait_until(lambda: any(p.pid != victim.pid for p in dev.processes(*words)), f"{words} runs again")
    wait_until(dev.is_well, "the stack is well again", timeout_s=300)


def test_a_killed_service_keeps_its_port_from_other_stacks(dev: Dev) -> None:
    wait_until(dev.is_well, "the stack is well", timeout_s=300)
    process = supervisor(dev.root)
    assert process is not None
    process.suspend()
    try:
        (victim,) = dev.processes("service.app")
        victim.kill()
        port = int(dev.connection.api_url.rpartition(":")[2])
        wait_until(lambda: not listens(f"127.0.0.1:{port}"), "nobody listens")
        with Ports() as others:
            assert others.take(port) != port
    finally:
        process.resume()
    wait_until(dev.is_well, "the stack is well again", timeout_s=300)


def test_runs_survive_a_restart_and_ports_stay(dev: Dev) -> None:
    wait_until(dev.is_well, "the stack is well", timeout_s=300)
    before = dev.connection
    headers = {"authorization": f"Bearer {before.api_key}"}
    body = sft(model="file:///nowhere/model")
    run_id = httpx.post(f"{before.api_url}/api/v1/runs/sft", json=body, headers=headers, timeout=300).json()["run_id"]
    with grandchild(dev) as orphan:
        assert dev.cli("dev", "--stop").code == 0
        assert orphan.wait(300) == -signal.SIGKILL
    assert dev.processes() == []
    assert supervisor(dev.root) is None
    assert "no stack was running" in dev.cli("dev", "--stop").stderr
    assert dev.cli("ls").code == 100
    kept = dev.connection
    assert kept == replace(before, pid=None)
    # Of the usual ports the tests beside this one may have those that were just left.
    with Ports() as ports:
        own = os.getpid() % 1000  # another round of these tests may be beside this one
        api, temporal, ui = (f"127.0.0.1:{ports.take(wanted + own)}" for wanted in (18000, 17000, 19000))
    kept = replace(kept, api_url=f"http://{api}", temporal_address=temporal, temporal_ui=f"http://{ui}")
    kept.write()
    assert dev.cli("dev", "--detach", "--ui").code == 0
    assert replace(dev.connection, pid=None) == kept
    assert httpx.get(kept.temporal_ui or "", trust_env=False).is_success
    assert run_id in [row["run_id"] for row in dev.cli("ls", "--json").json]


@contextmanager
def grandchild(dev: Dev) -> Iterator[subprocess.Popen]:
    """As a rank of a worker, whose host was killed: in a session of its own, but with the mark. It does not leave."""
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {STACK_MARK: str(dev.root)},
        start_new_session=True,
        stdout=subprocess.PIPE,
    ) as orphan:
        assert orphan.stdout is not None
        orphan.stdout.readline()
        try:
            yield orphan
        finally:
            orphan.kill()


def test_a_killed_supervisor_takes_its_children_along_and_the_next_leaves_on_ctrl_c(dev: Dev) -> None:
    wait_until(dev.is_well, "the stack is well", timeout_s=300)
    left = dev.processes()
    assert len(left) >= 2
    process = supervisor(dev.root)
    assert process is not None
    process.kill()
    psutil.wait_procs(left, timeout=300)
    wait_until(lambda: not dev.processes(), "its children are gone", timeout_s=300)
    path = dev.root.parent / "said"
    with path.open("wb") as said:
        foreground = subprocess.Popen([LONGSHORE, "dev", "--root", str(dev.root)], stderr=said, start_new_session=True)
    wait_until(lambda: b"Longshore is up" in path.read_bytes(), "the stack is up", timeout_s=300)
    assert dev.connection.pid == foreground.pid
    foreground.send_signal(signal.SIGINT)
    assert foreground.wait(300) == 0
    assert dev.processes() == []
    assert b"Traceback" not in path.read_bytes()


def test_a_taken_port_is_replaced() -> None:
    with socket.socket() as listener, Ports() as ports:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert ports.take(taken) != taken
    with Ports() as ports:
        assert ports.take(taken) == taken
        assert ports.take(taken) != taken, "it serves one thing"
        assert ports.take(0) != ports.take(0)


def test_a_port_is_its_stacks_also_while_nobody_listens(tmp_path: Path) -> None:
    """A server that was killed finds its port again, though another stack starts before it is back."""
    code = (
        "import pathlib, sys; from service.dev import Ports; "
        "print(Ports(pathlib.Path(sys.argv[1])).take(int(sys.argv[2])), flush=True); sys.stdin.read()"
    )
    with Ports(tmp_path) as free:
        wanted = free.take(0)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(wanted)], **pipes) as other:
        assert int(other.stdout.readline()) == wanted
        with Ports(tmp_path) as ports:
            next_one = ports.take(wanted)
        other.kill()
    with Ports(tmp_path) as ports:
        assert (wanted < next_one <= wanted + 100, ports.take(wanted)) == (True, wanted)


def test_somebody_elses_file_of_locks_keeps_nobody_from_starting(tmp_path: Path) -> None:
    (tmp_path / f"longshore-ports-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with Ports(tmp_path) as ports:
        assert ports.take(0) > 0
    assert not (tmp_path / "elsewhere").exists()


def test_leftovers_of_another_root_are_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {STACK_MARK: "/other"}
    )
    assert end_leftovers(tmp_path) == 0
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_child_that_keeps_dying_is_started_ever_more_slowly(tmp_path: Path) -> None:
    child = StackProcess("quitter", [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path / "log")
    told = [wait_until(child.revive, "it ended") for _ in range(4)]
    assert all("quitter ended with code 3" in line for line in told)
    assert ["0.2 s" in told[0], "0.4 s" in told[1], "0.8 s" in told[2], "1.6 s" in told[3]] == [True] * 4
