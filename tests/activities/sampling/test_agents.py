"""Episodes whose agent is a program: what it is answered, what is trained, what is earned. A real sampler and box."""

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.sampling.agents import CheckEnvironment, CheckEnvironmentRequest, _Episode, _Gateway, _slot
from activities.sampling.completions import SampledGroup
from activities.sampling.sample import Sampled
from activities.sandbox.box import Box, BoxLimits, BoxLost
from longshore import harbor
from longshore.environments import Course
from shared.errors import InvalidInput
from shared.settings import AgentSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.sampling.conftest import (
    GROUP_SIZE,
    Place,
    cancelled_when,
    groups_in,
    proxy_of,
    rendered,
    request_of,
    sampled,
)
from tests.activities.sampling.conftest import settings_of as plain_settings
from tests.activities.sampling.test_environments import drawn_of, grouped, talker
from tests.waiting import wait_until

__all__ = ["talker"]

REPOSITORY = Path(__file__).parents[3]
TURNS = 6
ASKS = """
import json, os, sys, time, urllib.request

def ask(path, **body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request, timeout=600))
    except urllib.error.HTTPError as error:
        return json.load(error) | {"status": error.code}

def chat(messages, **more):
    answer = ask("/chat/completions", model=os.environ["MODEL"], messages=messages, temperature=0.1, **more)
    if "error" not in answer:
        messages.append(answer["choices"][0]["message"])
    return answer
"""
TALKS = f"""{ASKS}
messages = [{{"role": "user", "content": os.environ["PROMPT"]}}]
for turn in range(3):
    print(chat(messages)["choices"][0]["message"]["content"])
    messages.append({{"role": "user", "content": f"And {{turn}}?"}})
open("said.txt", "w").write("".join(m["content"] or "" for m in messages if m["role"] == "assistant"))
"""
COUNTS = """
grep -o e said.txt | wc -l > /logs/verifier/reward.txt
"""


def settings_of(root: Path, place: Place, url: str | None = None, **limits: Any) -> Settings:
    return plain_settings(root, place, url).model_copy(update={"agents": AgentSettings(**limits)})


def with_rows(place: Place, folder: Path, *rows: Mapping[str, Any]) -> Place:
    """Return the place with these rows as its prompts."""
    (folder / "rows").mkdir(parents=True)
    given = ({"prompt": f"How many crates, {number}?"} | dict(row) for number, row in enumerate(rows))
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    seal(folder / "rows")
    return dataclasses.replace(place, dataset=upload_artifact(LocalStore(folder / "store"), "rows", folder / "rows"))


def played(settings: Settings, place: Place, environment: ActivityEnvironment | None = None, **agent: Any) -> Sampled:
    """Play the episodes of all prompts of a place, by `python3 agent.py` unless `command` is given."""
    own = {"command": "python3 agent.py", "max_turns": TURNS, "time_s": 300.0} | agent
    plan = {"agent": own, "source": {"uri": "file:///rows"}, "max_tokens": 400}
    prompts = rendered(settings, place)
    changes: dict[str, Any] = {"rows": {"first": 0, "count": prompts.num_prompts, "seed": 5}, "adapter": None}
    changes |= {"sampling": {"temperature": 1.3, "max_tokens": 32}, "episodes": plan}
    return sampled(settings, request_of(place, prompts, **changes), environment)


def courses(group: SampledGroup) -> list[Course]:
    found = [sample.course for sample in group.samples]
    assert all(course is not None for course in found)
    return [course for course in found if course is not None]


def test_what_a_program_was_answered_is_trained_by_its_ids(talker: Place, tmp_path: Path) -> None:
    row = {"files": {"agent.py": TALKS}, "tests": {"test.sh": COUNTS}}
    place = with_rows(talker, tmp_path, row, row)
    with proxy_of(talker.sampler.url) as proxy:
        settings = settings_of(tmp_path, place, proxy.url)
        found = played(settings, place)
        asked = {tuple(body["prompt"]) for _, body in proxy.asked if "prompt" in body}
        assert all(body["temperature"] == 1.3 for _, body in proxy.asked if "prompt" in body), "the run's is imposed"
    assert found.episodes is not None and found.episodes.ends["completed"] == 2 * GROUP_SIZE
    assert found.episodes.num_kept == found.episodes.num_later == 2 * 2 * GROUP_SIZE
    made, groups = grouped(settings, found)
    assert made.num_ungraded == made.num_failed == 0
    for group, samples in zip(groups, groups_in(settings, found), strict=True):
        for one, course in zip(group.trajectories, courses(samples), strict=True):
            begins = [n for n in range(1, len(one.sampled)) if one.sampled[n] and not one.sampled[n - 1]]
            assert len(begins) == 3 and all(one.token_ids[:begin] in asked for begin in begins)
            said = "".join(str(m["content"]) for m in course.messages if m["role"] == "assistant")
            assert one.reward == said.count("e") == course.reward
            assert course.output.splitlines()[0] in said
            assert drawn_of(one), "something was drawn"
    again = played(settings_of(tmp_path / "again", place), place)
    assert again.completions.sha256 == found.completions.sha256, "equal questions have equal answers"


def test_a_program_is_started_afresh_after_a_kill_and_gets_its_answers(talker: Place, tmp_path: Path) -> None:
    row = {"files": {"agent.py": TALKS}, "tests": {"test.sh": COUNTS}}
    place = with_rows(talker, tmp_path, row)
    expected = played(settings_of(tmp_path / "whole", place), place)
    with proxy_of(talker.sampler.url) as proxy:
        settings = settings_of(tmp_path / "killed", place, proxy.url)
        proxy.hold_after = 7
        recorded = settings.root_path / "store" / "sampled"
        cancelled_when(
            lambda: len(list(recorded.glob("*-turns/*.json"))) >= 7,
            lambda environment: played(settings, place, environment),
        )
        num_before = len(proxy.prompts())
        proxy.hold_after = 1 << 62
        proxy.released.set()
        found = played(settings, place)
        drawn_again = len(proxy.prompts()) - num_before
    assert found.completions.sha256 == expected.completions.sha256
    assert drawn_again <= 3 * GROUP_SIZE - 7, "what was recorded is not drawn again"


def test_other_apis_side_questions_and_limits(talker: Place, tmp_path: Path) -> None:
    agent = f"""{ASKS}
question = [{{"role": "user", "content": os.environ["PROMPT"]}}]
told = {{}}
told["first"] = ask("/messages", model="policy", max_tokens=16, messages=question)
told["again"] = ask("/messages", model="policy", max_tokens=16, messages=question)
told["response"] = ask("/responses", model="policy", input=os.environ["PROMPT"] + "!", max_output_tokens=16)
told["title"] = ask("/chat/completions", model="small", max_tokens=8, messages=question)
told["count"] = ask("/messages/count_tokens", model="policy", messages=question)
told["none"] = ask("/embeddings", model="policy", input="x")
told["bad"] = ask("/chat/completions", model="policy", messages=3)
told["two"] = ask("/chat/completions", model="policy", messages=question, n=2)
told["long"] = ask("/chat/completions", model="policy", messages=[{{"role": "user", "content": "crate " * 500}}])
for number in range(9):
    told["last"] = ask("/chat/completions", model="policy", messages=[{{"role": "user", "content": str(number)}}])
print(json.dumps({{
    "one answer": told["first"]["id"] == told["again"]["id"],
    "kinds": [told["first"]["type"], told["response"]["object"], told["title"]["model"], told["none"]["status"]],
    "count": told["count"]["input_tokens"] == told["first"]["usage"]["input_tokens"],
    "places": [told[name]["error"]["param"] for name in ("bad", "two")],
    "long": told["long"]["error"]["code"],
    "last": told["last"]["error"]["message"],
}}))
os.makedirs("/logs/verifier", exist_ok=True)
json.dump({{"reward": 1, "kinds": len(told)}}, open("/logs/verifier/reward.json", "w"))
sys.exit(3)
"""
    tests = {"test.sh": """echo '{"reward": 0.5, "calls": 7, "c-d": 1}' > /logs/verifier/reward.json"""}
    place = with_rows(talker, tmp_path, {"files": {"/app/agent.py": agent}, "tests": tests, "folder": "/app"})
    settings = settings_of(tmp_path, place)
    found = played(settings, place)
    [group] = groups_in(settings, found)
    for course in courses(group):
        assert course.end == "turn_limit" and course.num_turns == TURNS
        assert course.reward == 0.5, "what the program left itself does not count"
        assert course.metrics == {"calls": 7.0, "metrics_left_out": 1.0}
        printed, *told = course.output.splitlines()
        assert f"longshore: 5 requests were refused: this episode has had its {TURNS} turns" in told
        assert any("metrics of reward.json were left out" in line and line.endswith("'c-d'") for line in told), told
        assert json.loads(printed) == {
            "one answer": True,
            "kinds": ["message", "response", "small", 404],
            "count": True,
            "places": ["messages", "n"],
            "long": "context_length_exceeded",
            "last": f"this episode has had its {TURNS} turns",
        }


@pytest.mark.parametrize(
    ("agent", "files", "tests", "end", "reward", "words"),
    [
        ("python3 agent.py; sleep 600", {}, {"test.sh": "echo 2 > /logs/verifier/reward.txt"}, "time_limit", 2.0, ""),
        ("python3 agent.py; exit 4", {}, {"test.sh": "echo 2 > /logs/verifier/reward.txt"}, "agent_failed", 2.0, ""),
        ("python3 agent.py", {}, {"test.sh": "true"}, "verifier_broke", None, "left no /logs/verifier/reward"),
        ("python3 agent.py", {}, {"test.sh": "echo nan > /logs/verifier/reward.txt"}, "verifier_broke", None, "finite"),
        ("python3 agent.py; echo 1 > x", {}, {}, "completed", None, "has no verifier"),
        ("python3 agent.py; python3 -c 'x = bytearray(1 << 30); input()'", {}, {}, "agent_failed", None, ""),
    ],
)
def test_how_an_episode_ends(
    talker: Place,
    tmp_path: Path,
    agent: str,
    files: dict[str, str],
    tests: dict[str, str],
    end: str,
    reward: float | None,
    words: str,
) -> None:
    place = with_rows(talker, tmp_path, {"files": {"agent.py": TALKS} | files, "tests": tests})
    settings = settings_of(tmp_path, place, memory_bytes=256 << 20)
    time_s = 45.0 if end == "time_limit" else 300.0
    [group] = groups_in(settings, played(settings, place, command=agent, time_s=time_s))
    for course in courses(group):
        assert (course.end, course.reward) == (end, reward), course
        assert words in (course.error or "")


def test_programs_that_cannot_play_are_refused(talker: Place, tmp_path: Path) -> None:
    place = with_rows(talker, tmp_path, {"files": {"agent.py": "print('nothing to ask')"}})
    settings = settings_of(tmp_path, place)
    with pytest.raises(InvalidInput, match="asked the policy nothing, ended with 0, and printed: nothing to ask"):
        played(settings, place)

    def checked(command: str, place: Place) -> None:
        prompts = rendered(settings, place)
        plan = {"agent": {"command": command}, "source": {"uri": "file:///rows"}, "max_tokens": 400}
        request = CheckEnvironmentRequest(plan=plan, prompts=prompts.prompts, model=place.model)
        ActivityEnvironment().run(CheckEnvironment(HostContext(settings)).check_environment, request)

    checked("python3 agent.py", place)
    with pytest.raises(InvalidInput, match="there is no program nosuchagent for agents"):
        checked("nosuchagent --fast", place)
    bad = with_rows(talker, tmp_path / "bad", {"files": {"a": 3}})
    with pytest.raises(InvalidInput, match="files: contents by path"):
        checked("python3 agent.py", bad)
    escaping = with_rows(talker, tmp_path / "out", {"files": {"/usr/bin/x": "3"}})
    with pytest.raises(InvalidInput, match="a file cannot be put into the box: /usr/bin/x: Read-only file system"):
        checked("python3 agent.py", escaping)


def test_a_box_shows_and_allows_little(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "agent-tool"
    tool.write_text("#!/bin/sh\necho from the tool\n")
    tool.chmod(0o755)
    tmp_path.chmod(0o755)
    program = f"""
import os, socket, subprocess
def tried(what, call):
    try:
        print(what, call())
    except Exception as error:
        print(what, type(error).__name__)
tried("tool", lambda: subprocess.check_output("agent-tool", text=True).strip())
tried("home", lambda: os.path.exists({str(Path.home())!r} + "/.bashrc"))
tried("usr", lambda: open("/usr/x", "w"))
tried("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
tried("network", lambda: socket.create_connection(("192.0.2.1", 80), 5))
tried("mounts", lambda: subprocess.call(["mount", "-t", "tmpfs", "x", "/tmp"], stderr=-3))
tried("namespace", lambda: subprocess.call(["unshare", "-U", "true"], stderr=-3))
tried("hosts processes", lambda: len([n for n in os.listdir("/proc") if n.isdigit()]) > 5)
def forks():
    for number in range(1000):
        if not os.fork():
            import time; time.sleep(60)
tried("forks", forks)
"""
    limits = BoxLimits(memory_bytes=256 << 20, disk_bytes=16 << 20, processes=40, shown=(str(tmp_path),))
    box = Box(limits)
    try:
        box.put("/work/try.py", program.encode())
        assert box.run("python3 try.py", {}, "/work", "/logs/out.txt", 60.0).code == 0
        told = dict(line.split(" ", 1) for line in (box.get("/logs/out.txt", 4096) or b"").decode().splitlines()[:3])
        whole = (box.get("/logs/out.txt", 4096) or b"").decode()
        assert told["tool"] == "from the tool" and told["home"] == "False" and told["usr"] == "OSError", whole
        for line in ("vsock PermissionError", "network OSError", "hosts processes False", "forks BlockingIOError"):
            assert line in whole, whole
        assert "mounts 0" not in whole and "namespace 0" not in whole
        assert box.run("ln -s /etc /evil; true", {}, "/work", "/logs/2.txt", 60.0).code == 0
        with pytest.raises(OSError, match="/evil/passwd"):
            box.put("/evil/passwd", b"root")  # as the box's user, who may write nothing there
        assert box.run("head -c 64M /dev/zero > big", {}, "/work", "/logs/3.txt", 60.0).code
        assert box.run("true", {"A": "1"}, "/work", "/logs/4.txt", 60.0).code == 0, "it goes on"
        box._process.kill()
        with pytest.raises(BoxLost):
            box.run("true", {}, "/work", "/logs/5.txt", 60.0)
    finally:
        box.close()


def test_what_a_program_computes_or_asks_leaves_processors_to_others() -> None:
    box = Box(BoxLimits(memory_bytes=256 << 20, disk_bytes=16 << 20, processes=40))
    episode = _Episode.__new__(_Episode)  # what a gateway notes
    episode.is_slowed = False
    with closing(box):
        assert box.run("ps -o ni= $$", {}, "/work", "/logs/nice.txt", 60.0).code == 0
        assert (box.get("/logs/nice.txt", 64) or b"").decode().strip() == str(max(10, os.nice(0)))
        crowd = "for n in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done\n"
        crowd += "until test $(ps -eo cls= | grep -c IDL) -ge 8; do sleep 0.2; done"
        assert box.run(crowd, {}, "/work", "/logs/crowd.txt", 300.0).code == 0, "they get what nobody else wants"
        gateway = _Gateway(box.listening, episode)
        gateway.spent(1.0)
        gateway.pace()
        assert not episode.is_slowed, "a program may need much at first"
        gateway.spent(1000.0)
        waits = threading.Thread(target=gateway.pace)
        waits.start()
        wait_until(lambda: episode.is_slowed, "it has to wait")
        assert waits.is_alive()
        gateway.is_over.set()
        waits.join(60)
        assert not waits.is_alive(), "until its box is closed"


def test_runs_share_a_hosts_places() -> None:
    """A free place goes to the run with the fewest agents; one that has none needs not wait for others to end."""
    under_way, threads = list[tuple[str, threading.Event]](), list[threading.Thread]()

    def play(run: str) -> None:
        with _slot(4, run):
            under_way.append((run, ends := threading.Event()))
            ends.wait(300)

    def begin(run: str, num: int, until: list[str]) -> None:
        threads.extend(threading.Thread(target=play, args=(run,)) for _ in range(num))
        for each in threads[-num:]:
            each.start()
        shown(until)

    def end(run: str, until: list[str]) -> None:
        one = next(each for each in under_way if each[0] == run)
        under_way.remove(one)
        one[1].set()
        shown(until)

    def shown(runs: list[str]) -> None:
        wait_until(lambda: [run for run, _ in under_way] == runs, f"{runs} are under way", 60)
        time.sleep(0.3)  # and no others
        assert [run for run, _ in under_way] == runs

    begin("a", 24, ["a"] * 4)
    begin("b", 3, ["a"] * 4 + ["b"])
    end("a", ["a"] * 3 + ["b"])
    end("a", ["a"] * 2 + ["b"] * 2)
    for _ in range(25):
        wait_until(lambda: under_way, "the next one", 60)
        under_way.pop()[1].set()
    for each in threads:
        each.join(60)
        assert not each.is_alive()


ORDINARY = """
import logging
from activities.sandbox.box import Box, BoxLimits
from activities.sandbox.kernel import IsolationRefused
logging.basicConfig(format="%(message)s")
for number in range(2):
    try:
        box = Box(BoxLimits(256 << 20, 16 << 20, 40))
    except IsolationRefused as refused:
        print("refused", refused)
        break
    print(box.run("id -u", {}, "/work", "/logs/out.txt", 60.0).code)
    box.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_bubblewrap_that_does_not_start_is_told_and_not_needed(tmp_path: Path) -> None:
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("needs a Python that others may run")
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "activities/sandbox").mkdir(parents=True)
        for name in ("box.py", "kernel.py"):
            shutil.copy(REPOSITORY / "activities/sandbox" / name, folder / "activities/sandbox" / name)
        (folder / "bin").mkdir()
        fails = "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1"
        (folder / "bin" / "bwrap").write_text(fails)
        (folder / "bin" / "bwrap").chmod(0o755)
        done = subprocess.run(
            [python, "-c", ORDINARY],
            **{"user": 12345, "group": 12345, "extra_groups": [], "cwd": folder},
            env={"PATH": f"{folder}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            **{"capture_output": True, "text": True, "timeout": 300},
        )
    finally:
        shutil.rmtree(folder)
    if done.stdout.startswith("refused"):
        pytest.skip(f"ordinary users get no namespaces here: {done.stdout}")
    assert done.stdout.split() == ["0", "0"], done
    told = "bwrap opens no boxes here, so Longshore's own launcher does: bwrap: setting up uid map: Permission denied"
    assert done.stderr.count(told) == 1, done.stderr


def harbor_task(folder: Path, dockerfile: str, **others: str) -> Path:
    """Write a task in Harbor's form: count the crates of a file."""
    files = {
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "quay/count"\n[agent]\ntimeout_sec = 200\n'
        "[verifier]\ntimeout_sec = 100.0\n",
        "instruction.md": "Count the crates in crates.txt, and write the number into count.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/crates.txt": "crate\ncrate\ncrate\n",
        "environment/data/more.bin": "more",
        "solution/solve.sh": "wc -l < crates.txt > count.txt",
        "tests/test.sh": 'grep -q "^$EXPECTED$" count.txt && cat /tests/right > /logs/verifier/reward.txt'
        " || echo 0 > /logs/verifier/reward.txt",
        "tests/right": "1.0",
    } | others
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


DOCKERFILE = """FROM ubuntu:24.04
RUN apt-get update && \\
    apt-get install -y python3
WORKDIR /app
ENV EXPECTED=4 OTHER="a b"
COPY crates.txt data ./
RUN echo crate >> crates.txt
"""


def test_a_task_of_harbor_is_played_and_verified(talker: Place, tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks" / "count", DOCKERFILE)
    told = list[str]()
    [row] = harbor.rows_of(tmp_path / "tasks", told.append)
    assert told == ["count: left out, as a box has no network: RUN apt-get update &&      apt-get install -y python3"]
    assert row["folder"] == "/app" and set(row["files"]) == {"/app/crates.txt", "/app/more.bin"}
    assert row["variables"] == {"EXPECTED": "4", "OTHER": "a b"} and (row["time_s"], row["verifier_time_s"]) == (
        200,
        100,
    )
    right = "test ! -e /tests/right && " + (tmp_path / "tasks/count/solution/solve.sh").read_text()
    agent = f"{ASKS}\nchat([{{'role': 'user', 'content': os.environ['PROMPT']}}]); os.system({right!r})"
    place = with_rows(talker, tmp_path, row | {"files": row["files"] | {"agent.py": agent}}, row)
    settings = settings_of(tmp_path, place)
    with pytest.raises(InvalidInput, match="the program asked the policy nothing"):
        played(settings, place)  # the second row has no program
    place = with_rows(talker, tmp_path / "one", row | {"files": row["files"] | {"agent.py": agent}})
    [group] = groups_in(settings, played(settings, place))
    assert [course.reward for course in courses(group)] == [1.0] * GROUP_SIZE, courses(group)
    idle = agent.replace("os.system", "str")
    place = with_rows(talker, tmp_path / "two", row | {"files": row["files"] | {"agent.py": idle}})
    [group] = groups_in(settings, played(settings, place))
    assert [course.reward for course in courses(group)] == [0.0] * GROUP_SIZE


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("task.toml", "[[steps]]\nname = 'one'", "a task of several steps"),
        ("task.toml", "[environment]\ngpus = 1", "a box has no accelerator"),
        ("task.toml", "steps = [", "Cannot|Invalid|Unclosed"),
        ("environment/docker-compose.yaml", "services: {}", "one machine"),
        ("environment/Dockerfile", "COPY nothing /x", "there is no nothing"),
        ("environment/Dockerfile", "ADD https://example.com/x /x", "no network"),
        ("environment/Dockerfile", "COPY ../task.toml /x", "there is no"),
        ("environment/Dockerfile", "ONBUILD RUN x", "ONBUILD cannot be followed"),
    ],
)
def test_tasks_that_cannot_be_played_here_are_refused(tmp_path: Path, name: str, text: str, rule: str) -> None:
    folder = harbor_task(tmp_path / "task", DOCKERFILE, **{name: text})
    with pytest.raises(ValueError, match=rule):
        list(harbor.rows_of(folder))


def test_a_program_that_cheats_floods_and_forks_earns_what_the_verifier_says(talker: Place, tmp_path: Path) -> None:
    agent = f"""{ASKS}
import shutil, socket
chat([{{"role": "user", "content": os.environ["PROMPT"]}}])
for attempt in (
    lambda: open("/tests/test.sh", "w").write("echo 9 > /logs/verifier/reward.txt"),
    lambda: open("/tests/json.py", "w").write("raise SystemExit('cheated')"),
    lambda: open("/logs/verifier/reward.json", "w").write('{{"reward": 9}}'),
    lambda: os.rename("/bin", "/bin2"),
    lambda: os.symlink("/work", "/usr/local/bin/python3"),
    lambda: os.makedirs(os.path.expanduser("~/.local/lib/python3.11/site-packages")),
    lambda: open(os.path.expanduser("~/.local/lib/python3.11/site-packages/usercustomize.py"), "w").write("1 / 0"),
    lambda: [connections.append(socket.create_connection(("127.0.0.1", 8321), 5)) for _ in range(200)],
    lambda: shutil.copyfileobj(open("/dev/zero", "rb"), open("/tmp/full", "wb")),
    lambda: shutil.copyfileobj(open("/dev/zero", "rb"), open("/tests/full", "wb")),
    lambda: print("x" * (100 << 20), flush=True),
    lambda: [os.fork() or time.sleep(600) for _ in range(1000)],
):
    connections = []
    try:
        attempt()
    except OSError:
        pass
os._exit(0)
"""
    tests = {
        "test.sh": "python3 /tests/check.py > /logs/verifier/reward.txt",
        "check.py": "import json; print(json.dumps(0.5))",
    }
    place = with_rows(talker, tmp_path, {"files": {"agent.py": agent}, "tests": tests})
    settings = settings_of(tmp_path, place, processes=40, disk_bytes=32 << 20)
    [group] = groups_in(settings, played(settings, place, time_s=120.0))
    assert [course.reward for course in courses(group)] == [0.5] * GROUP_SIZE, courses(group)
