"""Hostile graders as real processes: each fails its sample with a message, harms nothing and leaves nothing behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic_core import _pydantic_core

from activities.grading.python_sandbox import NotGraded
from shared.settings import GradingSettings
from tests.activities.grading.sandboxes import (
    CAPABILITIES,
    LIMITS,
    REFUSAL,
    REPOSITORY,
    SHORT,
    Place,
    do,
    outcome,
    processes_of,
)
from tests.depth import IS_DEEP, drawn

pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def test_a_grader_sees_sample_and_item(place: Place) -> None:
    source = "def grade(sample, item):\n    return float(item['answer'] in sample['output_text']) + len(item)"
    assert outcome(source, place, answer="12", other={"é": [None, 1.5]}) == 3.0


@pytest.mark.parametrize(("value", "grade"), [("True", 1.0), ("3", 3.0), ("-0.25", -0.25), ("10**300", 1e300)])
def test_numbers_are_grades(place: Place, value: str, grade: float) -> None:
    assert outcome(do(f"result = {value}"), place) == grade


HOSTILE = {
    "hangs": ("while True: pass", "took longer than 1.5 s and was stopped"),
    "sleeps": ("import time; time.sleep(99)", "took longer than 1.5 s and was stopped"),
    "hangs, whatever it is told": (
        "import signal\nfor n in (1, 2, 3, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
        "while True:\n try: sum(iter(int, 1))\n except BaseException: pass",
        "took longer than 1.5 s and was stopped",
    ),
    "closes its answer and hangs": ("os.close(3)\nwhile True: pass", "took longer than 1.5 s"),
    "hangs in C": ("sum(iter(int, 1))", "took longer than 1.5 s and was stopped"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "crashed (SIGSEGV)"),
    "exits": ("os._exit(7)", "ended its process with status 7"),
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
    "raises its limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "Error",
    ),
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
    "answers by itself, NaN": ("os.write(3, b'{\"grade\": NaN}'); os._exit(0)", "an answer of its own making"),
    "answers by itself, nonsense": ("os.write(3, b'\\xff{'); os._exit(0)", "an answer of its own making"),
    "answers by itself, deeply": ("os.write(3, b'[' * 60000); os._exit(0)", "an answer of its own making"),
    "answers by itself, a huge integer": (
        "os.write(3, b'{\"grade\": 1' + b'0' * 4000 + b'}'); os._exit(0)",
        "an answer of its own making",
    ),
    "answers by itself, in megabytes": (
        "while True: os.write(3, b'x' * 65536)",
        "answered with more than 65,536 bytes",
    ),
    "answers by itself, a refusal of its own": ('os.write(3, b\'{"refused": "x"}\'); os._exit(0)', "own making"),
}


def limits_of(message: str) -> GradingSettings:
    """A busy machine takes long as well: the time is short where nothing but its end can come."""
    return SHORT if "took longer" in message else LIMITS


_IN_BUBBLEWRAP = drawn(list(HOSTILE), len(HOSTILE) // 2)
_IN_NAMESPACES = list(HOSTILE) if IS_DEEP else [name for name in HOSTILE if name not in _IN_BUBBLEWRAP]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "bwrap"),
    [*((name, "bubblewrap") for name in _IN_BUBBLEWRAP), *((name, "namespaces") for name in _IN_NAMESPACES)],
    indirect=["bwrap"],
)
def test_a_hostile_grader_fails_its_sample_alone(name: str, place: Place) -> None:
    lines, message = HOSTILE[name]
    source = do("if item.get('good'): return 0.5", lines)
    with place.sandbox(source, limits_of(message)) as sandbox:
        with pytest.raises(NotGraded) as failed:
            sandbox.grade({}, {})
        assert message in str(failed.value) and len(str(failed.value)) < 4100
        assert len(processes_of(place.folder)) == 2, "launcher and supervisor; no child is left"
        assert sandbox.grade({}, {"good": True}) == 0.5


HARMLESS = {
    "prints megabytes": "print('x' * (1 << 26)); sys.stderr.write('y' * (1 << 26)); sys.stdout.flush()",
    "reads its input": "assert sys.stdin.read() == ''",
    "has no environment": "assert set(os.environ) == {'PYTHONHASHSEED', 'PYTHONDONTWRITEBYTECODE', 'LANG'}, os.environ",
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
def test_what_a_grader_may_do_gets_a_grade(name: str, place: Place) -> None:
    is_open = "def _is_open(f):\n    try: os.fstat(f)\n    except OSError: return False\n    return True\n"
    assert isinstance(found := outcome(is_open + do(HARMLESS[name]), place), float), found


def test_a_package_that_is_loaded_brings_no_folder_into_the_sandbox(tmp_path: Path) -> None:
    """Its shared library lies beside it, on the import path, and not among the installed packages."""
    library = shutil.copy(_pydantic_core.__file__, tmp_path / "own.so")
    code = (
        "import ctypes, sys; from activities.isolation import library_folders\n"
        f"sys.path.append({str(tmp_path)!r}); ctypes.CDLL({str(library)!r}); print(*library_folders())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folders = done.stdout.split()
    assert str(tmp_path) not in folders and any(os.__file__.startswith(folder) for folder in folders)


def test_a_grader_has_no_rights(place: Place) -> None:
    """Read in the child, for there is no /proc: capabilities by capget, and the limits that bind."""
    source = CAPABILITIES + do(
        "import ctypes, resource",
        "assert num_capabilities() == 0",
        "assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1, 'no_new_privs'",
        "assert resource.getrlimit(resource.RLIMIT_NPROC) == (0, 0)",
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)",
        f"assert resource.getrlimit(resource.RLIMIT_AS)[1] == {LIMITS.python_memory_bytes}",
    )
    assert outcome(source, place) == 1.0


def test_no_network_leads_out(place: Place) -> None:
    """Were sockets allowed, the namespace would still have no way to this listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        address = listener.getsockname()
        found = outcome(do(f"import socket; socket.create_connection({address!r}, 1)"), place)
        assert "PermissionError" in str(found) or "Connection refused" in str(found)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_samples_do_not_see_each_other(place: Place) -> None:
    source = (
        "import os\nseen = []\n" + "def grade(sample, item):\n    seen.append(1); open('/tmp/left', 'a').write('x')\n"
    )
    source += (
        "    os.makedirs('/tmp/a/b'); os.chmod('/tmp/a', 0)\n    return len(seen) + os.path.getsize('/tmp/left')\n"
    )
    with place.sandbox(source) as sandbox:
        assert [sandbox.grade({}, {}) for _ in range(3)] == [2.0, 2.0, 2.0]


def test_the_same_sample_gets_the_same_grade_in_another_sandbox(place: Place) -> None:
    source = do("result = hash('x') % 1000 + list(set('abcdefgh')).index('c') / 10")
    grades = [outcome(source, place) for _ in range(3)]
    assert isinstance(grades[0], float) and len(set(grades)) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(sample item): return 1", "SyntaxError: invalid syntax"),
        ("grade = 1.0", "the source does not define grade(sample, item)"),
        ("import numpy\ndef grade(s, i): return 1", "ModuleNotFoundError: No module named 'numpy' (line 1)"),
        ("grade = 1\nwhile True: pass", "took longer than 1.5 s"),
        ("grade = " + "(" * 5000, "too many nested parentheses"),
        ("grade = " + "-" * 200_000 + "1", "took more memory than it may"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_told_at_once(source: str, message: str, place: Place) -> None:
    with place.sandbox(source, limits_of(message)) as sandbox, pytest.raises(NotGraded) as failed:
        sandbox.check()
    assert message in str(failed.value)


def test_a_lost_sandbox_costs_one_sample(place: Place) -> None:
    with place.sandbox(do("result = 2.0")) as sandbox:
        assert sandbox.grade({}, {}) == 2.0
        for pid in processes_of(place.folder):
            with suppress(ProcessLookupError):  # it has ended with the one before it
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(NotGraded, match="the sandbox ended its process"):
            sandbox.grade({}, {})
        assert sandbox.grade({}, {}) == 2.0


def test_a_sample_that_is_too_large_is_no_ones_end(place: Place) -> None:
    with place.sandbox(do("result = len(sample['output_text'])")) as sandbox:
        with pytest.raises(NotGraded, match="a python grader takes up to 33,554,432"):
            sandbox.grade({"output_text": "x" * (33 << 20)}, {})
        assert sandbox.grade({"output_text": "x" * (4 << 20)}, {}) == 4 << 20


OWNER = """
import sys
from pathlib import Path
from activities.grading.python_sandbox import PythonSandbox
from shared.settings import GradingSettings
source = "def grade(s, i):\\n    while True: pass"
with PythonSandbox(source, GradingSettings(python_time_s=60), Path(sys.argv[1]), *sys.argv[2:] or [None]) as box:
    print("grading", flush=True)
    box.grade({}, {})
"""


def test_a_killed_owner_takes_its_sandbox_along(place: Place) -> None:
    command = [sys.executable, "-c", OWNER, str(place.folder), *filter(None, [place.bwrap])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as owner:
        assert owner.stdout and owner.stdout.readline() == b"grading\n"
        while len(processes_of(place.folder)) < 4:  # owner, launcher, supervisor, child
            time.sleep(0.01)
        owner.kill()
    deadline = time.monotonic() + 5
    while processes_of(place.folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_of(place.folder) == []
