"""What isolates graders and templates: for root and for others, where the system refuses, and by which filter."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.formats.rows import Question
from activities.sandbox.calls import CODE
from activities.sandbox.kernel import BUBBLEWRAP, launchers, read_frame, write_frame
from activities.tokenizing.tokenizer import TemplateProcess, TemplateSource
from tests.activities.grading.sandboxes import CAPABILITIES, REFUSAL, REPOSITORY, do

pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

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
    assert "this system refuses the isolation that python graders need (unshare of" in refusal and "EPERM" in refusal
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
