"""Hostile graders as real processes: each fails its sample and harms nothing; what isolates them and templates."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.formats.rows import Question
from activities.grading.open_grader import NotGraded, PythonSandbox
from activities.sandbox.calls import CODE, Server
from activities.sandbox.kernel import BUBBLEWRAP, launchers, read_frame, write_frame
from activities.tokenizing.tokenizer import TemplateProcess, TemplateSource
from shared.settings import GradingSettings
from tests.activities.grading.sandboxes import CAPABILITIES, LIMITS, REFUSAL, REPOSITORY, SHORT, do, outcome
from tests.depth import drawn
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def test_a_grader_sees_sample_and_item(server: Server) -> None:
    source = "def grade(sample, item):\n    return float(item['answer'] in sample['output_text']) + len(item)"
    assert outcome(source, server, answer="12", other={"é": [None, 1.5]}) == 3.0


@pytest.mark.parametrize(("value", "grade"), [("True", 1.0), ("3", 3.0), ("-0.25", -0.25), ("10**300", 1e300)])
def test_numbers_are_grades(server: Server, value: str, grade: float) -> None:
    assert outcome(do(f"result = {value}"), server) == grade


HOSTILE = {
    "hangs": ("while True: pass", "takes longer than 1.5 s"),
    "sleeps": ("import time; time.sleep(99)", "takes longer than 1.5 s"),
    "hangs, whatever it is told": (
        "import signal\nfor n in (1, 2, 3, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
        "while True:\n try: sum(iter(int, 1))\n except BaseException: pass",
        "takes longer than 1.5 s",
    ),
    "closes its answer and hangs": ("os.close(3)\nwhile True: pass", "the sandbox ended"),
    "hangs in C": ("sum(iter(int, 1))", "takes longer than 1.5 s"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "aborts its process (SIGSEGV)"),
    "exits": ("os._exit(7)", "it ended its process with status 7"),
    "raises SystemExit": ("sys.exit(3)", "SystemExit: 3 (line 5)"),
    "raises": ("item['no']", "KeyError: 'no' (line 5)"),
    "raises what cannot be shown": (
        "class E(Exception):\n def __str__(self): raise ValueError\nraise E",
        "E: an error that cannot be shown (line 7)",
    ),
    "raises megabytes": ("raise ValueError('x' * 10**7)", "ValueError: xxx"),
    "recurses": ("f = lambda: f()\nf()", "RecursionError"),
    "forks": ("os.fork()", "PermissionError: [Errno 1]"),
    "forks in C": ("import ctypes\nassert ctypes.CDLL(None).fork() >= 0, 'no fork'", "AssertionError: no fork"),
    "starts a program": ("import subprocess; subprocess.run(['/bin/true'])", "PermissionError: [Errno 1]"),
    "becomes a program": ("os.execv(sys.executable, ['python'])", "PermissionError: [Errno 1]"),
    "starts a thread": ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
    "opens a socket": ("import socket; socket.socket()", "PermissionError: [Errno 1]"),
    "opens a local socket": ("import socket; socket.socketpair()", "PermissionError: [Errno 1]"),
    "reads the passwords": ("open('/etc/passwd').read()", "No such file or directory: '/etc/passwd'"),
    "reads our files": (f"open({str(REPOSITORY / 'pyproject.toml')!r}).read()", "No such file or directory"),
    "reads the processes": ("os.listdir('/proc')", "No such file or directory: '/proc'"),
    "climbs out": ("os.listdir('/../../../root')\nos.listdir('/../../home')", "No such file or directory"),
    "writes Python's files": ("open(os.__file__, 'a')", "Error: [Errno"),
    "writes elsewhere": ("open('/x', 'w')", "Read-only file system"),
    "makes a device": ("os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))", "PermissionError"),
    "signals everybody": ("os.kill(-1, 9)", "PermissionError: [Errno 1]"),
    "signals its supervisor": ("os.kill(1, 9)", "PermissionError: [Errno 1]"),
    "unshares": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0, 'no namespace'",
        "AssertionError: no namespace",
    ),
    "mounts": (
        "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0, 'no mount'",
        "AssertionError: no mount",
    ),
    "traces its supervisor": (
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0, 'no trace'",
        "AssertionError: no trace",
    ),
    "takes shared memory": (
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0, 'no shm'",
        "AssertionError: no shm",
    ),
    "takes memory behind the limit": ("os.memfd_create('x')", "PermissionError: [Errno 1]"),
    "allocates everything": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "took more memory than it may"),
    "maps everything": ("import mmap; mmap.mmap(-1, 1 << 40)", "Cannot allocate memory"),
    "raises its limits": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "Error"),
    "fills its disk": (
        "n = 0\nwhile True:\n n += 1\n with open(f'/tmp/{n}', 'wb') as f: f.write(bytes(1 << 22))",
        "No space left on device",
    ),
    "writes one large file": ("open('/tmp/x', 'wb').write(bytes(1 << 25))", "Error"),
    "fills its disk with names": ("n = 0\nwhile True:\n n += 1\n os.mkdir(f'/tmp/{n}')", "No space left on device"),
    "opens too much": ("x = []\nwhile True: x.append(open('/dev/null'))", "Too many open files"),
    "returns NaN": ("result = float('nan')", "grade returned nan, which is not finite"),
    "returns infinity": ("result = -float('inf')", "grade returned -inf, which is not finite"),
    "returns a text": ("result = '1.0'", "grade returned a str, not a number"),
    "returns nothing": ("result = None", "grade returned a NoneType, not a number"),
    "returns a complex": ("result = 1j", "grade returned a complex, not a number"),
    "returns a huge integer": ("result = 10**5000", "an integer beyond what a float holds"),
    "answers by itself, NaN": ("_send(b'r' + b'{\"grade\": NaN}'); os._exit(0)", "an answer of its own making"),
    "answers by itself, nonsense": ("_send(b'r' + b'\\xff{'); os._exit(0)", "an answer of its own making"),
    "answers by itself, deeply": ("_send(b'r' + b'[' * 60000); os._exit(0)", "an answer of its own making"),
    "answers by itself, a huge integer": (
        "_send(b'r' + b'{\"grade\": 1' + b'0' * 4000 + b'}'); os._exit(0)",
        "an answer of its own making",
    ),
    "answers by itself, in megabytes": (
        "while True: os.write(3, b'\\0' * 6 + b'\\x01\\0' + b'r' * 65536)",
        "an answer of its own making",
    ),
    "answers by itself, too much": ("os.write(3, b'\\x01' * 99); os._exit(0)", "larger than the 65,536 bytes"),
    "answers by itself, an error of its own": (
        "_send(b'x' + b'{\"bug\": \"x\"}'); os._exit(0)",
        "in a process of its own",
    ),
}


def limits_of(message: str) -> GradingSettings:
    """A busy machine takes long as well: the time is short where nothing but its end can come."""
    return SHORT if "takes longer" in message else LIMITS


@pytest.mark.parametrize("name", drawn(list(HOSTILE), 12))
def test_a_hostile_grader_fails_its_sample_alone(name: str, server: Server) -> None:
    lines, message = HOSTILE[name]
    send = "def _send(frame): os.write(3, len(frame).to_bytes(8, 'big') + frame)\n"
    source = do("if item.get('good'): return 0.5", lines) + send
    sandbox = PythonSandbox(source, limits_of(message))
    with pytest.raises(NotGraded) as failed:
        sandbox.grade({}, {})
    assert message in str(failed.value) and len(str(failed.value)) < 4100
    assert sandbox.grade({}, {"good": True}) == 0.5


HARMLESS = {
    "prints megabytes": "print('x' * (1 << 26)); sys.stderr.write('y' * (1 << 26)); sys.stdout.flush()",
    "reads its input": "assert sys.stdin.read() == ''",
    "has no environment": "assert not os.environ, os.environ",
    "has no descriptor of ours": "assert sorted(f for f in range(4096) if _is_open(f)) == [0, 1, 2, 3]",
    "is nobody of importance": "assert os.listdir('/tmp') == [] and os.getcwd() == '/tmp'",
    "sees Python and nothing else": "assert not {'etc', 'home', 'proc', 'sys', 'work', 'bin'} & set(os.listdir('/'))",
    "sees no packages": (
        "import site\nfor folder in ['/packages', *site.getsitepackages()]:\n"
        " assert not os.path.exists(folder) or not os.listdir(folder)"
    ),
    "has a disk of its own": "open('/tmp/x', 'w').write('12'); result = float(open('/tmp/x').read())",
    "uses the library": "import re, json, math, decimal, hashlib, datetime, random, statistics, asyncio.events",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_grader_may_do_gets_a_grade(name: str, server: Server) -> None:
    is_open = "def _is_open(f):\n    try: os.fstat(f)\n    except OSError: return False\n    return True\n"
    assert isinstance(found := outcome(is_open + do(HARMLESS[name]), server), float), found


def test_a_grader_has_no_rights(server: Server) -> None:
    """Read in the child, for there is no /proc: capabilities by capget, and the limits that bind."""
    source = CAPABILITIES + do(
        "import ctypes, resource",
        "assert num_capabilities() == 0",
        "assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1, 'no_new_privs'",
        "assert resource.getrlimit(resource.RLIMIT_NPROC) == (0, 0)",
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)",
        f"assert 0 < resource.getrlimit(resource.RLIMIT_AS)[1] < {LIMITS.python_memory_bytes} + (1 << 29)",
    )
    assert outcome(source, server) == 1.0


def test_no_network_leads_out(server: Server) -> None:
    """Were sockets allowed, the namespace would still have no way to this listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        address = listener.getsockname()
        found = outcome(do(f"import socket; socket.create_connection({address!r}, 1)"), server)
        assert "PermissionError" in str(found) or "Connection refused" in str(found)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_samples_do_not_see_each_other(server: Server) -> None:
    source = (
        "import os\nseen = []\n" + "def grade(sample, item):\n    seen.append(1); open('/tmp/left', 'a').write('x')\n"
    )
    source += (
        "    os.makedirs('/tmp/a/b'); os.chmod('/tmp/a', 0)\n    return len(seen) + os.path.getsize('/tmp/left')\n"
    )
    sandbox = PythonSandbox(source, LIMITS)
    assert [sandbox.grade({}, {}) for _ in range(3)] == [2.0, 2.0, 2.0]


def test_the_same_sample_gets_the_same_grade_in_another_sandbox(server: Server) -> None:
    source = do("result = hash('x') % 1000 + list(set('abcdefgh')).index('c') / 10")
    grades = [outcome(source, server) for _ in range(3)]
    assert isinstance(grades[0], float) and len(set(grades)) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(sample item): return 1", "SyntaxError: invalid syntax"),
        ("grade = 1.0", "the source does not define grade(sample, item)"),
        ("import numpy\ndef grade(s, i): return 1", "ModuleNotFoundError: No module named 'numpy' (line 1)"),
        ("grade = 1\nwhile True: pass", "takes longer than 1.5 s"),
        ("grade = " + "(" * 5000, "too many nested parentheses"),
        ("grade = " + "-" * 200_000 + "1", "took more memory than it may"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_told_at_once(source: str, message: str, server: Server) -> None:
    with pytest.raises(NotGraded) as failed:
        PythonSandbox(source, limits_of(message)).check()
    assert message in str(failed.value)


def test_a_lost_sandbox_costs_one_sample(server: Server) -> None:
    sandbox = PythonSandbox("import time\ndef grade(s, i):\n    time.sleep(i['s'])\n    return 2.0", LIMITS)
    assert sandbox.grade({}, {"s": 0}) == 2.0
    assert server._process is not None
    launcher = psutil.Process(server._process.pid)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(sandbox.grade, {}, {"s": 99})
        wait_until(lambda: len(launcher.children(recursive=True)) == 3, "a sample is being graded")
        for process in launcher.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended with the one before it
                process.kill()
        with pytest.raises(NotGraded, match=r"the sandbox ended|killed by signal 9"):
            waiting.result()
    wait_until(lambda: not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE, "its launcher's end")
    assert sandbox.grade({}, {"s": 0}) == 2.0


def test_a_sample_that_is_too_large_is_no_ones_end(server: Server) -> None:
    sandbox = PythonSandbox(do("result = len(sample['output_text'])"), LIMITS)
    with pytest.raises(NotGraded, match="a python grader takes up to 33,554,432"):
        sandbox.grade({"output_text": "x" * (33 << 20)}, {})
    assert sandbox.grade({"output_text": "x" * (4 << 20)}, {}) == 4 << 20


OWNER = """
from activities.grading.open_grader import PythonSandbox
from shared.settings import GradingSettings
print("grading", flush=True)
PythonSandbox("def grade(s, i):\\n    while True: pass", GradingSettings(python_time_s=60)).grade({}, {})
"""


def test_a_killed_owner_takes_its_sandbox_along() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=REPOSITORY) as owner:
        assert owner.stdout and owner.stdout.readline() == b"grading\n"
        # launcher, server, keeper, child
        line = wait_until(lambda: len(all := psutil.Process(owner.pid).children(recursive=True)) == 4 and all, "all")
        owner.kill()
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in line), "the end")


WITHOUT = """
from activities.formats.rows import Question
from activities.grading.open_grader import PythonSandbox
from activities.sandbox import calls
from activities.tokenizing.tokenizer import TemplateProcess, TemplateSource
from shared.errors import InvalidInput
from shared.settings import ConfinedSettings, GradingSettings
from tests.activities.confined_work import look_round
import psutil, sys
from pathlib import Path
try:
    print(PythonSandbox("def grade(s, i):\\n    return 1", GradingSettings()).grade({}, {}))
except InvalidInput as error:
    print(error)
source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
with TemplateProcess(TemplateSource(source, {}, ["</s>"]), "model", 10) as process:
    print(*(one.text for one in process.asked([Question("p", [{"role": "user", "content": "q"}], None, {})])))
    [server] = psutil.Process().children()
    [child] = server.children()
    told = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    print(told["Seccomp"].strip(), int(told["CapEff"], 16), told["Uid"].split()[1])
found = calls.call(ConfinedSettings(), look_round, sys.argv[1])
print(found["other"], found["socket"], found["fork"], found["execute"], found["thread"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take a right away from its own kind")
def test_where_namespaces_are_refused_so_are_graders_and_the_rest_has_limits_and_a_filter(tmp_path: Path) -> None:
    """As in many containers: in a process without the right to make namespaces."""
    (tmp_path / "other").write_text("seen")
    drop = "import ctypes, os, sys; assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0; "
    drop += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", drop, sys.executable, "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    refusal, *told = done.stdout.splitlines()
    assert (
        "this system refuses the isolation that python graders and environments need (unshare of" in refusal
        and "EPERM" in refusal
    )
    assert told == ["<|user|>q</s>", "2 0 65534", "seen PermissionError PermissionError PermissionError it ran"]


def test_chat_templates_render_in_the_same_sandbox() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    with TemplateProcess(TemplateSource(source, {}, ["</s>"]), "model") as process:
        assert CODE._process is not None
        *_, child = psutil.Process(CODE._process.pid).children(recursive=True)
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        told = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        spaces = [{str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for pid in (child.pid, "self")} for kind in KINDS]
        [asked] = process.asked([Question("p", [{"role": "user", "content": "q"}], None, {})])
    assert asked.text == "<|user|>q</s>"
    assert (told["Seccomp"], told["NoNewPrivs"], int(told["CapEff"], 16)) == ("2", "1", 0)
    assert all(len(each) == 2 for each in spaces), "namespaces of its own"
    if os.geteuid() == 0:
        assert told["Uid"].split() == ["65534"] * 4


KINDS = "net", "mnt", "pid", "ipc", "uts"
SAMPLES = {
    "0.5": 0.5,
    "open('/etc/passwd')": "FileNotFoundError",
    "os.fork()": "PermissionError",
    "len(os.listdir('/tmp'))": 0.0,
    "open('/tmp/x', 'w').write('1')": 1.0,
    "num_capabilities()": 0.0,
    "os.chmod('/dev/null', 0)": "Error",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("way", ["bubblewrap", "namespaces"])
def test_an_ordinary_user_gets_a_sandbox_too(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by root, this file tests root's way; here are the other ones, by the system's Python."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None or (way == "bubblewrap" and BUBBLEWRAP is None):
        pytest.skip("needs a Python that others may run, and bubblewrap")
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        for name in ("activities/sandbox/child.py", "activities/sandbox/kernel.py", "activities/grading/run_grader.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
        (folder / "shared").mkdir()
        shutil.copy(REPOSITORY / "shared/programs.py", folder / "shared/programs.py")
        subprocess.run(["chown", "-R", "12345:12345", str(folder)], check=True)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        launcher = launchers()[0] if way == "bubblewrap" else []
        monkeypatch.undo()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server = subprocess.Popen(
                [*launcher, python, "-m", "activities.sandbox.child", way],
                stdin=theirs.fileno(),
                user=12345,
                group=12345,
                extra_groups=[],
                cwd=folder,
                env={},
            )
        ours.settimeout(60)
        isolation, refusal = json.loads(ours.recv(1 << 16))
        if refusal:
            pytest.skip(f"ordinary users get no namespaces here: {refusal}")
        assert isolation == way
        for code, expected in SAMPLES.items():
            answer = graded(ours, CAPABILITIES + do("result = eval(item['code'])"), code)
            assert answer == {"grade": expected} or str(expected) in answer.get("failed", ""), (code, answer)
        ours.close()
        server.wait(60)
    finally:
        shutil.rmtree(folder)


def graded(control: socket.socket, source: str, code: str) -> Any:
    """What a server's child answers to a sample."""
    module = "activities.grading.run_grader"
    limits = {"memory_bytes": 1 << 28, "file_bytes": 1 << 20, "step_cpu_s": 9}
    opening = {"imports": [module], "module": module, "function": "run_grader", "limits": limits}
    ours, childs = socket.socketpair()
    told, tells = os.pipe()
    with ours, childs:
        message = json.dumps(opening | {"is_code": True, "reads": [], "writes": []}).encode()
        socket.send_fds(control, [message], [childs.fileno(), tells])
        childs.close()
        write_frame(ours.fileno(), json.dumps([source, {"sample": {}, "item": {"code": code}}]).encode())
        while (frame := read_frame(ours.fileno()))[:1] == b"s":
            pass
    for end in (told, tells):
        os.close(end)
    return json.loads(frame[1:])


def test_the_filter_is_what_refuses() -> None:
    """The same calls without it: an ordinary process forks, opens sockets and takes shared memory."""
    code = "import os, socket, sys; socket.socket(); pid = os.fork(); sys.exit(0) if pid else os._exit(0)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    filtered = """
import os, sys, threading
from activities.sandbox import kernel
threads = sys.argv[1] == "threads"
kernel.libc.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
kernel.filter_calls(kernel.DENIED, threads)
for call in (os.fork, lambda: __import__('socket').socket(), lambda: os.execv('/bin/true', ['true'])):
    try: call()
    except PermissionError: continue
    os._exit(1)
try:
    threading.Thread(target=print).start()
    os._exit(2 if threads else 1)
except RuntimeError:
    os._exit(1 if threads else 3)
"""
    for threads, code in (("threads", 2), ("none", 3)):
        command = [sys.executable, "-c", filtered, threads]
        assert subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL).returncode == code
