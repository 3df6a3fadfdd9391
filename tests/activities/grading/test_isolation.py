"""What isolates graders and templates: for root and for others, where the system refuses, and by which filter."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities import isolation
from activities.formats.messages import Question
from activities.tokenizing.template_process import TemplateProcess, TemplateSource
from tests.activities.grading.sandboxes import CAPABILITIES, REFUSAL, REPOSITORY, Place, do

pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def test_bubblewrap_isolates_where_it_is_installed(place: Place) -> None:
    with place.sandbox("def grade(sample, item): return 1.0") as sandbox:
        assert sandbox.isolation == ("namespaces" if place.bwrap is None else "bubblewrap")
        assert sandbox.grade({}, {}) == 1.0


REFUSED = """
import sys
from pathlib import Path
from activities.grading.python_sandbox import PythonSandbox
from shared.errors import InvalidInput
from shared.settings import GradingSettings
try:
    source, folder = "def grade(s, i):\\n    return 1", Path(sys.argv[1])
    with PythonSandbox(source, GradingSettings(), folder, *sys.argv[2:] or [None]) as box:
        print(box.grade({}, {}))
except InvalidInput as error:
    print(error)
"""


def without_namespaces(place: Place, program: str = REFUSED) -> list[str]:
    """What a program says in a process without the right to make namespaces, as in many containers."""
    drop = "import ctypes, os, sys; assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0; "
    drop += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", drop, sys.executable, "-c", program, str(place.folder)]
    command += filter(None, [place.bwrap])
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take a right away from its own kind")


@needs_root
def test_where_namespaces_are_refused_so_is_the_grader(place: Place) -> None:
    [refusal] = without_namespaces(place)
    assert "this system refuses the isolation that python graders need (unshare of namespaces: EPERM" in refusal


def of_renderer(process: psutil.Process) -> dict[str, str]:
    """What the kernel says of the process that renders: the last of its launchers' line."""
    while children := process.children():
        [process] = children
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    told = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return told | {"net": str(Path(f"/proc/{process.pid}/ns/net").readlink())}


def test_chat_templates_render_in_the_same_sandbox(bwrap: str | None) -> None:
    before = {child.pid for child in psutil.Process().children()}
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    template = TemplateSource(source, {}, ["</s>"])
    with TemplateProcess(template, "model", bwrap=bwrap) as process:
        [launcher] = [child for child in psutil.Process().children() if child.pid not in before]
        told = of_renderer(launcher)
        isolated_by = Path(launcher.exe()).name
        [asked] = process.asked([Question("p", [{"role": "user", "content": "q"}], None, {})])
    assert asked.text == "<|user|>q</s>"
    assert (told["Seccomp"], told["NoNewPrivs"], int(told["CapEff"], 16)) == ("2", "1", 0)
    assert told["net"] != str(Path("/proc/self/ns/net").readlink())
    assert (isolated_by == "bwrap") == (bwrap is not None)
    if os.geteuid() == 0:
        assert told["Uid"].split() == ["65534"] * 4


TEMPLATE_WITHOUT = """
import psutil, sys
from pathlib import Path
from activities.formats.messages import Question
from activities.tokenizing.template_process import TemplateProcess, TemplateSource
source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
with TemplateProcess(TemplateSource(source, {}, ["</s>"]), "model", 10, *sys.argv[2:] or [None]) as process:
    print(*(one.text for one in process.asked([Question("p", [{"role": "user", "content": "q"}], None, {})])))
    [child] = psutil.Process().children()
    told = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    print(told["Seccomp"].strip(), int(told["CapEff"], 16), told["Uid"].split()[1])
"""


@needs_root
def test_where_namespaces_are_refused_templates_render_as_nobody_who_opens_no_file(place: Place) -> None:
    assert without_namespaces(place, TEMPLATE_WITHOUT) == ["<|user|>q</s>", "2 0 65534"]


CONFINED = """
import os, socket, sys
from activities import isolation
if sys.argv[1:]:
    isolation.confine(sys.argv[1], 1 << 30)
else:
    isolation.confine_in_bubblewrap(1 << 30)
    assert os.getcwd() == "/"
for call in (lambda: open("/dev/null"), lambda: open(os.__file__), socket.socket, os.fork, lambda: os.mkdir("/tmp/x")):
    try: call()
    except PermissionError: continue
    os._exit(1)
os._exit(9)
"""


def test_what_renders_templates_opens_no_file_and_no_socket(tmp_path: Path, bwrap: str | None) -> None:
    command = [sys.executable, "-c", CONFINED, str(tmp_path)]
    if bwrap is not None:
        start = isolation.BubblewrapStart([REPOSITORY / "activities"], {}, ["CAP_SYS_CHROOT"])
        command = isolation.isolated_command(bwrap, ["-c", CONFINED], start, isolation.namespace_options()[0])
    done = subprocess.run(command, cwd=REPOSITORY, timeout=60, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr


SAMPLES = [
    "0.5",
    "open('/etc/passwd')",
    "os.fork()",
    "os.listdir('/tmp').__len__()",
    "open('/tmp/x', 'w').write('1')",
    "num_capabilities()",
    "os.chmod('/dev/null', 0)",
    "os.listdir('/packages' if os.path.exists('/packages') else '/tmp').__len__()",
]


@needs_root
def test_an_ordinary_user_gets_a_sandbox_too(bwrap: str | None) -> None:
    """Run by root, this file tests root's way; here is the other one, by the system's Python."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("needs a Python that others may run")
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    program = Path(__file__).with_name("sandbox_of_a_user.py")
    try:
        work = folder / "work"
        work.mkdir()
        shutil.copytree(REPOSITORY / "activities" / "grading", folder / "activities" / "grading")
        for module in ("__init__.py", "isolation.py"):
            shutil.copy(REPOSITORY / "activities" / module, folder / "activities")
        shutil.copy(program, folder)
        subprocess.run(["chown", "-R", "12345:12345", str(folder)], check=True)
        frames = [(CAPABILITIES + do("result = eval(item['code'])")).encode()]
        frames += [json.dumps({"sample": {}, "item": {"code": code}}).encode() for code in [*SAMPLES, SAMPLES[3]]]
        done = subprocess.run(
            [python, str(folder / program.name), str(work), *filter(None, [bwrap])],
            input=b"".join(len(frame).to_bytes(8, "big") + frame for frame in frames),
            capture_output=True,
            user=12345,
            group=12345,
            extra_groups=[],
            env={"PYTHONPATH": str(folder)},
            cwd=work,
            timeout=60,
        )
        ready, *answers = frames_in(done.stdout)
        if "refused" in ready:
            pytest.skip(f"ordinary users get no namespaces here: {ready['refused']}")
        grades = [json.loads(answer["answer"]) for answer in answers]
        assert [grade.get("grade") for grade in grades] == [0.5, None, None, 0.0, 1.0, 0.0, None, 0.0, 0.0], grades
        assert "No such file" in grades[1]["failed"] and "PermissionError" in grades[2]["failed"]
    finally:
        shutil.rmtree(folder)


def frames_in(data: bytes) -> list[Any]:
    found = []
    while data:
        end = 8 + int.from_bytes(data[:8], "big")
        found.append(json.loads(data[8:end]))
        data = data[end:]
    return found


def test_the_filter_is_what_refuses(tmp_path: Path) -> None:
    """The same calls without it: an ordinary process forks, opens sockets and takes shared memory."""
    code = "import os, socket, sys; socket.socket(); pid = os.fork(); sys.exit(0) if pid else os._exit(0)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    filtered = """
import os, sys
from activities import isolation
isolation.libc.prctl(isolation.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
isolation.filter_calls(isolation.DENIED)
for call in (os.fork, lambda: __import__('socket').socket(), lambda: os.execv('/bin/true', ['true'])):
    try: call()
    except PermissionError: continue
    sys.exit(1)
"""
    assert subprocess.run([sys.executable, "-c", filtered], cwd=REPOSITORY).returncode == 0
