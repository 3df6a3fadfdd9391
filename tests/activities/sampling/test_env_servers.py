"""Episodes at an env server of verifiers 0.4: the real one, unmodified, and a real sampler; servers that misbehave."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.sampling.agents import CheckEnvironment, CheckEnvironmentRequest
from activities.sampling.sample import Sampled
from longshore.environments import Agent, Course
from shared.errors import InvalidInput
from shared.settings import AgentSettings, Settings
from tests.activities.sampling.conftest import (
    GROUP_SIZE,
    Place,
    cancelled_when,
    groups_in,
    proxy_of,
    rendered,
)
from tests.activities.sampling.test_agents import courses, played, settings_of, with_rows
from tests.activities.sampling.test_environments import grouped, talker

__all__ = ["talker"]

ROOT = Path(__file__).parents[3]
SERVED = Path(__file__).parent / "served"
TURNS = 3


class Server:
    """examples/verifiers_server.py in a process of its own, with the task set of `served`. It can be started again."""

    def __init__(self, folder: Path) -> None:
        client = ROOT / ".venv" / "clients" / "verifiers"
        assert client.is_dir(), "the clients are not installed: requirements/clients.sh"
        self._environment = os.environ | {"PYTHONPATH": f"{client}:{SERVED}", "HOME": str(folder)}
        self.address, self.output = f"ipc://{folder}/server", folder / "server.log"
        self.start()

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", str(ROOT / "examples" / "verifiers_server.py"), *words]

    def rows(self) -> list[dict[str, Any]]:
        told = subprocess.check_output(self.command("rows", "crates_set"), env=self._environment, text=True)
        return list(map(json.loads, told.splitlines()))

    def start(self) -> None:
        own = json.dumps({"agent": {"harness": {"id": "crates_set"}, "max_turns": TURNS + 1}})
        command = self.command("serve", "crates_set", "--env", own, "--address", self.address)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(command, env=self._environment, stderr=output)

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("env-server"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def rows(server: Server) -> list[dict[str, Any]]:
    return server.rows()


def known(root: Path, place: Place, address: str, url: str | None = None, wait_s: float = 120.0) -> Settings:
    return settings_of(root, place, url, servers={"quay": address}, server_wait_s=wait_s)


def episodes(settings: Settings, place: Place, environment: ActivityEnvironment | None = None, **agent: Any) -> Sampled:
    return played(settings, place, environment, command=None, server="quay", **agent)


def row_with(rows: list[dict[str, Any]], **data: Any) -> dict[str, Any]:
    return rows[0] | {"task_data": rows[0]["task_data"] | data}


def test_the_task_sets_reward_and_what_was_drawn_are_trained(
    talker: Place, server: Server, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    place = with_rows(talker, tmp_path, *rows)
    with proxy_of(talker.sampler.url) as proxy:
        settings = known(tmp_path, place, server.address, proxy.url)
        found = episodes(settings, place)
        asked = {tuple(body["prompt"]) for _, body in proxy.asked if "prompt" in body}
        assert all(body["temperature"] == 1.3 for _, body in proxy.asked if "prompt" in body), "the run's is imposed"
    assert found.episodes is not None and found.episodes.ends["completed"] == 2 * GROUP_SIZE
    assert found.episodes.num_kept == found.episodes.num_later == 2 * (TURNS - 1) * GROUP_SIZE
    made, groups = grouped(settings, found)
    assert made.num_ungraded == made.num_failed == 0
    for group, samples in zip(groups, groups_in(settings, found), strict=True):
        for one, course in zip(group.trajectories, courses(samples), strict=True):
            begins = [n for n in range(1, len(one.sampled)) if one.sampled[n] and not one.sampled[n - 1]]
            assert len(begins) == TURNS and all(one.token_ids[:begin] in asked for begin in begins)
            said = "".join(str(m["content"]) for m in course.messages if m["role"] == "assistant")
            assert one.reward == course.reward == said.count("e") + 0.5 * 4
            assert course.metrics == {"turns_seen": TURNS}
    again = episodes(known(tmp_path / "again", place, server.address), place)
    assert again.completions.sha256 == found.completions.sha256, "equal questions have equal answers"


@pytest.mark.parametrize(
    ("data", "agent", "end", "reward", "words"),
    [
        ({"turns": 9}, {}, "turn_limit", None, ""),  # the server's limit, which it scores
        ({"turns": 9}, {"max_turns": 2}, "turn_limit", 0.0, ""),  # ours, which nobody has scored
        ({"fault": "hangs"}, {"time_s": 20.0}, "time_limit", None, ""),
        ({"fault": "fails"}, {}, "environment_broke", None, "HarnessError: harness 'crates_set' exited 1"),
        ({"fault": "reward raises"}, {}, "environment_broke", None, "TaskError: .*no rule for this answer"),
    ],
)
def test_how_an_episode_ends(
    talker: Place,
    server: Server,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    data: dict[str, Any],
    agent: dict[str, Any],
    end: str,
    reward: float | None,
    words: str,
) -> None:
    place = with_rows(talker, tmp_path, row_with(rows, **data))
    settings = known(tmp_path, place, server.address)
    [group] = groups_in(settings, episodes(settings, place, **agent))
    for course in courses(group):
        assert course.end == end, course
        if words:
            assert course.reward is None and re.search(words, course.error or ""), course
        elif reward is not None:
            assert course.reward == reward and "this episode has had its 2 turns" in course.output
        else:
            assert course.reward is not None and course.reward >= 2.0, "a limit is scored"


def test_a_host_and_a_server_are_killed_and_the_answers_remain(
    talker: Place, server: Server, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    place = with_rows(talker, tmp_path, rows[0])
    expected = episodes(known(tmp_path / "whole", place, server.address), place)
    with proxy_of(talker.sampler.url) as proxy:
        settings = known(tmp_path / "killed", place, server.address, proxy.url)
        proxy.hold_after = 5
        cancelled_when(lambda: proxy.answered > 5, lambda environment: episodes(settings, place, environment))
        num_recorded = len([*settings.root.rglob("*-turns/*.json")])
        num_before = len(proxy.prompts())
        proxy.hold_after = 1 << 62
        proxy.released.set()
        found = episodes(settings, place)
        drawn_again = len(proxy.prompts()) - num_before
    assert found.completions.sha256 == expected.completions.sha256
    assert num_recorded, "answers are recorded before the program gets them"
    assert drawn_again <= TURNS * GROUP_SIZE - num_recorded, "what was recorded is not drawn again"

    with proxy_of(talker.sampler.url) as proxy:
        settings = known(tmp_path / "lost", place, server.address, proxy.url)
        proxy.hold_after = 5

        def kill() -> None:
            while proxy.answered <= 5:
                time.sleep(0.05)
            server.stop(signal.SIGKILL)
            proxy.hold_after = 1 << 62
            proxy.released.set()
            server.start()

        killer = threading.Thread(target=kill)
        killer.start()
        found = episodes(settings, place)
        killer.join()
    assert found.completions.sha256 == expected.completions.sha256, "begun anew, with the answers that were recorded"
    assert b"cancelled run" not in server.output.read_bytes()


# --- Servers that misbehave ---

Behaviour = Callable[[dict[str, Any], Callable[[bytes, bytes], None]], None]


@contextmanager
def misbehaving(folder: Path, behave: Behaviour) -> Iterator[tuple[str, list[bytes]]]:
    """Yields an address, and the methods that were called. A server there is healthy, and handles runs so."""
    address, called, is_over = f"ipc://{folder}/fake", list[bytes](), threading.Event()
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(address)

    def send(*frames: bytes) -> None:
        socket.send_multipart(frames)

    def serve() -> None:
        while not is_over.is_set():
            if not socket.poll(50):
                continue
            client, request, method, payload = socket.recv_multipart()
            called.append(method)
            if method == b"run":
                with suppress(OSError):  # the host has left
                    behave(msgpack.unpackb(payload), partial(send, client, request))
            else:
                socket.send_multipart([client, request, b"reply", msgpack.packb({"success": True})])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address, called
    finally:
        is_over.set()
        thread.join()
        socket.close()


def ask(run: dict[str, Any], trace: str = "t", path: str = "/chat/completions") -> int:
    """Ask the policy as a server would."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": f"By {trace}?"}]}).encode()
    headers = {"Content-Type": "application/json", "X-Session-ID": trace}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(run["client"]["base_url"] + path, body, headers), timeout=300
        ) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        return error.code


def told(trace: str = "t", **values: Any) -> bytes:
    scalars = {"ok": True, "stop_condition": "agent_completed", "rewards": {"r": {"score": 1.5, "weight": 2.0}}}
    return msgpack.packb({"trace": trace, "set": scalars | values})


def reply(*traces: str, **values: Any) -> bytes:
    summaries = [{"id": trace, "nodes": 0, "calls": 0} for trace in traces]
    return msgpack.packb({"success": True, "head": {"ok": True}, "traces": summaries} | values)


def only_course(settings: Settings, found: Sampled) -> Course:
    [group] = groups_in(settings, found)
    [first, *_] = courses(group)
    return first


NONSENSE: dict[str, tuple[bytes, bytes]] = {
    "no MessagePack": (b"delta", b"\xc1"),
    "no MessagePack 2": (b"reply", b"\x81\x90\x01"),
    "trace: Input should be a valid string": (b"delta", msgpack.packb({"trace": 3})),
    "set: Input should be a valid dictionary": (b"delta", msgpack.packb({"trace": "t", "set": 3})),
    "delta or reply, in three parts": (b"gossip", b""),
    "Input should be a valid dictionary": (b"reply", msgpack.packb([1])),
    "rewards.r.score: Input should be a finite number": (b"", b""),
    "a message had more than 8,388,608 bytes": (
        b"delta",
        msgpack.packb({"trace": "t", "set": {"x": b"0" * (100 << 20)}}),
    ),
}


@pytest.mark.parametrize("words", NONSENSE)
def test_nonsense_fails_the_group_after_three_tries(talker: Place, tmp_path: Path, words: str) -> None:
    place = with_rows(talker, tmp_path, {"task_data": {}})

    def behave(run: dict[str, Any], send: Callable[[bytes, bytes], None]) -> None:
        assert ask(run) == 200
        kind, data = NONSENSE[words]
        if not kind:
            send(b"delta", told(rewards={"r": {"score": float("nan")}}))
            kind, data = b"reply", reply("t")
        send(kind, data)

    with misbehaving(tmp_path, behave) as (address, called):
        settings = known(tmp_path, place, address)
        course = only_course(settings, episodes(settings, place))
    assert (course.end, course.reward) == ("environment_broke", None)
    assert words.removesuffix(" 2") in (course.error or ""), course.error
    assert called.count(b"run") == 3 * GROUP_SIZE
    if "more than" not in words:  # then the connection is gone
        assert called.count(b"cancel") == 3 * GROUP_SIZE


@pytest.mark.parametrize(
    ("traces", "replied", "end", "words"),
    [
        ({"rewards": {"r": None}}, {}, "verifier_broke", "the task set gave no reward"),
        ({"rewards": {}}, {}, "verifier_broke", "the task set gave no reward"),
        ({"rewards": {"r": {"score": 1e300}}}, {}, "verifier_broke", "a reward above"),
        ({"ok": False}, {"head": {"ok": False}}, "environment_broke", "its episode failed"),
        ({}, {"success": False, "error": "ValidationError: no such task"}, "environment_broke", "no such task"),
        ({"agent": {"trainable": False}}, {}, "environment_broke", "its episode failed"),
    ],
)
def test_an_episode_without_a_reward_is_never_worth_0(
    talker: Place, tmp_path: Path, traces: dict[str, Any], replied: dict[str, Any], end: str, words: str
) -> None:
    place = with_rows(talker, tmp_path, {"task_data": {}})

    def behave(run: dict[str, Any], send: Callable[[bytes, bytes], None]) -> None:
        assert ask(run) == 200
        send(b"delta", told(**traces))
        send(b"reply", reply("t", **replied))

    with misbehaving(tmp_path, behave) as (address, called):
        settings = known(tmp_path, place, address)
        course = only_course(settings, episodes(settings, place))
        assert (course.end, course.reward) == (end, None) and words in (course.error or ""), course
    assert called.count(b"run") == 3 * GROUP_SIZE, "it was tried again"


def test_only_the_agent_that_learns_is_trained(talker: Place, tmp_path: Path) -> None:
    place = with_rows(talker, tmp_path, {"task_data": {"timeout": {"agent": 25, "setup": 3}}})
    learners = ["one"]
    urls = list[str]()

    def behave(run: dict[str, Any], send: Callable[[bytes, bytes], None]) -> None:
        urls.append(run["client"]["base_url"])
        assert run["task_data"]["timeout"] == {"agent": 25, "setup": 3, "scoring": 600}, "the lesser of both limits"
        assert ask(run, path="/../chat/completions") == 404
        answers = {ask(run, name) for name in ("user", "one", "given up", "judge")}
        assert answers == {200} or len(learners) > 1, "a run that ends leaves its episodes"
        send(b"delta", told("given up"))
        send(b"delta", msgpack.packb({"trace": "given up", "discard": True}))
        metrics = {"right": 1.0, "not a name": 1.0, "none": None}
        for name in ("user", "one", "judge"):
            send(b"delta", told(name, agent={"trainable": name in learners}, metrics=metrics))
        send(b"reply", reply("user", "one", "judge"))

    with misbehaving(tmp_path, behave) as (address, _):
        settings = known(tmp_path, place, address)
        course = only_course(settings, episodes(settings, place))
        assert (course.end, course.reward, course.num_turns) == ("completed", 3.0, 1)
        assert course.messages[0]["content"] == "By one?"
        assert course.metrics == {"right": 1.0, "metrics_left_out": 1.0}
        learners.append("judge")
        settings = known(tmp_path / "two", place, address)
        with pytest.raises(InvalidInput, match="2 agents of an episode are trainable, and one of them can learn here"):
            episodes(settings, place)
    assert len(set(urls)) == len(urls), "each episode has its address"
    with pytest.raises(urllib.error.URLError):
        ask({"client": {"base_url": urls[0]}})


def test_an_agent_that_ends_as_its_conversation_is_too_long_is_scored(talker: Place, tmp_path: Path) -> None:
    place = with_rows(talker, tmp_path, {"task_data": {}})

    def behave(run: dict[str, Any], send: Callable[[bytes, bytes], None]) -> None:
        assert ask(run) == 200 and ask(run, "crate " * 500) == 400
        send(b"delta", told())
        send(b"reply", reply("t"))

    with misbehaving(tmp_path, behave) as (address, _):
        settings = known(tmp_path, place, address)
        course = only_course(settings, episodes(settings, place))
    assert (course.end, course.reward, course.num_turns) == ("context_limit", 3.0, 1)


def test_a_silent_server_is_given_up(talker: Place, tmp_path: Path) -> None:
    place = with_rows(talker, tmp_path, {"task_data": {}})
    with misbehaving(tmp_path, lambda run, _: ask(run) and None) as (address, called):
        settings = known(tmp_path, place, address, wait_s=1.0)
        course = only_course(settings, episodes(settings, place, time_s=0.5, verifier_time_s=0.5))
    assert (course.end, course.error) == ("environment_broke", "env server quay: it was silent for too long")
    assert called.count(b"cancel") == 3 * GROUP_SIZE


def test_what_cannot_be_played_is_refused_before_the_run(
    talker: Place, server: Server, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    def checked(row: dict[str, Any], address: str = server.address, name: str = "quay", wait_s: float = 60.0) -> None:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        place = with_rows(talker, folder, row)
        settings = known(folder, place, address, wait_s=wait_s)
        prompts = rendered(settings, place)
        plan = {"agent": {"server": name}, "source": {"uri": "file:///rows"}, "max_tokens": 400}
        request = CheckEnvironmentRequest(plan=plan, prompts=prompts.prompts, model=place.model)
        ActivityEnvironment().run(CheckEnvironment(HostContext(settings)).check_environment, request)

    checked(rows[0])
    with pytest.raises(InvalidInput, match="knows no env server other: LONGSHORE_AGENTS__SERVERS names quay"):
        checked(rows[0], name="other")
    with pytest.raises(InvalidInput, match=r"rows.jsonl:1: task_data: a task of the server's task set"):
        checked({})
    with pytest.raises(InvalidInput, match="agent: seconds above 0"):
        checked(row_with(rows, timeout={"agent": -1}))
    with pytest.raises(InvalidInput, match="env server quay asked the policy nothing: ValidationError"):
        checked(row_with(rows, turns="many"))
    with pytest.raises(InvalidInput, match="env server quay does not answer"):
        checked(rows[0], address=f"ipc://{tmp_path}/nobody", wait_s=1.0)
    with pytest.raises(InvalidInput, match="task_data: at most 4,194,304 bytes as MessagePack"):
        checked(row_with(rows, name="x" * (5 << 20)))
    with pytest.raises(ValueError, match="give exactly one of command and server"):
        Agent()
    with pytest.raises(ValueError, match="verifier: the server's task set has its own"):
        Agent(server="quay", verifier="true")
    with pytest.raises(ValueError, match="String should match pattern"):
        AgentSettings(servers={"quay": "http://127.0.0.1"})
