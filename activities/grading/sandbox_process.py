"""The program in a python grader's sandbox: a supervisor, the first process of its namespaces, forks a child a sample.

It runs with the standard library alone: `python -S -P -s -m activities.grading.sandbox_process LIMITS`, where LIMITS is
JSON. It reads frames (activities/isolation.py) of JSON from stdin and answers each with one on stdout. Untrusted
source and samples are opened only in the children, which have given up all rights before that.

    launcher            bubblewrap, or our own: makes the namespaces, waits
    └─ supervisor       pid 1 in an empty root: forks, keeps the time
       └─ child         one sample: no capabilities, no network, no new process, no file but its own
"""

import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from activities.isolation import (
    DENIED,
    PR_SET_DUMPABLE,
    IsolationRefused,
    die_with_parent,
    enter_bubblewrap,
    enter_namespaces,
    filter_calls,
    filter_program,
    forget_start,
    frames_of,
    libc,
    lift_processor_limit,
    lose_rights,
    mount_tmp,
    unmount_tmp,
    write_frame,
)

MAX_FRAME_BYTES = 32 << 20
MAX_ANSWER_BYTES = 64 << 10
# Loaded before any child is forked, so that graders which use them start at once.
_PRELOADED = (
    "ast collections datetime decimal difflib fractions functools itertools operator random re statistics string "
    "textwrap typing unicodedata"
).split()
_MAX_ERROR_CHARS = 2_000


@dataclass(frozen=True)
class SandboxLimits:
    """The command line's limits. `time_s` is for one sample. `folder`: an empty folder for the sandbox alone.

    `parent_pid`: the process whose end ends the sandbox.
    """

    folder: str
    parent_pid: int
    in_bubblewrap: bool
    time_s: float
    memory_bytes: int


def main() -> None:
    limits = SandboxLimits(**json.loads(sys.argv[1]))
    if sys.platform != "linux":
        _send({"refused": "it takes Linux"})
        return
    lift_processor_limit()
    os.umask(0o022)  # the user `nobody` must be able to enter the folders of the new root
    for name in _PRELOADED:
        importlib.import_module(name)
    try:
        filter_program(DENIED)
        _isolate(limits)
    except IsolationRefused as refused:
        _send({"refused": str(refused)})
        return
    _supervise(limits)


def _isolate(limits: SandboxLimits) -> None:
    if limits.in_bubblewrap:
        enter_bubblewrap()
    else:
        die_with_parent(limits.parent_pid)
        enter_namespaces(limits.folder)
    forget_start()


# The supervisor.


def _supervise(limits: SandboxLimits) -> None:
    """Read the grader's source from the first frame; then answer each frame, a sample, until stdin ends."""
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _send({"ready": True})
    frames = frames_of(0)
    source = next(frames, b"")
    for sample in frames:
        answer = _graded(source, sample, limits)
        unmount_tmp()
        mount_tmp()
        _send(answer)


def _send(answer: dict[str, Any]) -> None:
    write_frame(1, json.dumps(answer).encode())


def _graded(source: bytes, sample: bytes, limits: SandboxLimits) -> dict[str, Any]:
    """Grade a sample in a child. Returns `{"answer": text}` as the child wrote it, or `{"failed": reason}`."""
    deadline = time.monotonic() + limits.time_s
    supervisor = os.getpid()
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _grade_and_leave(source, sample, limits, write_end, supervisor)
    os.close(write_end)
    try:
        answer = _answer_until(read_end, deadline)
        if answer is None:
            return {"failed": f"took longer than {limits.time_s:g} s and was stopped"}
        if len(answer) > MAX_ANSWER_BYTES:
            return {"failed": f"answered with more than {MAX_ANSWER_BYTES:,} bytes"}
        return {"answer": answer.decode(errors="replace")} if answer else {"failed": _end_of(child, deadline, limits)}
    finally:
        os.close(read_end)
        _end(child)


def _answer_until(read_end: int, deadline: float) -> bytes | None:
    """Read a pipe to its end, or to a little more than MAX_ANSWER_BYTES. Returns None at the deadline."""
    answer = bytearray()
    while len(answer) <= MAX_ANSWER_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([read_end], [], [], left_s)[0]:
            return None
        piece = os.read(read_end, 1 << 16)
        if not piece:
            break
        answer += piece
    return bytes(answer)


def _end_of(child: int, deadline: float, limits: SandboxLimits) -> str:
    """Describe the end of a child that gave no answer."""
    while True:
        info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            break
        if time.monotonic() > deadline:
            return f"took longer than {limits.time_s:g} s and was stopped"
        time.sleep(0.001)
    if info.si_code == os.CLD_EXITED:
        return f"ended its process with status {info.si_status} and gave no grade"
    name = signal.Signals(info.si_status).name
    if name in ("SIGXCPU", "SIGKILL"):
        return f"used too much processor time and was stopped ({name})"
    return f"crashed ({name})"


def _end(child: int) -> None:
    """End the child and all other processes of this namespace."""
    os.kill(child, signal.SIGKILL)
    assert os.getpid() == 1, "-1 is everybody: only in a namespace of our own"
    os.kill(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# The child. All below runs a stranger's code, or is about to.


def _grade_and_leave(source: bytes, sample: bytes, limits: SandboxLimits, write_end: int, supervisor: int) -> NoReturn:
    try:
        os.dup2(write_end, 3)
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.chdir("/tmp")
        lose_rights(limits.memory_bytes, math.ceil(limits.time_s) + 1)
        die_with_parent(supervisor)
        filter_calls(DENIED)
        answer = _run(source, sample)
    except MemoryError:
        answer = b'{"failed": "took more memory than it may"}'
    except BaseException as error:
        answer = json.dumps({"failed": _described(error)}).encode()
    left = memoryview(answer)
    while left:
        left = left[os.write(3, left) :]
    os._exit(0)


def _run(source: bytes, sample: bytes) -> bytes:
    """Run the grader. Returns JSON: `{"grade": number}`, `{"failed": reason}`, or `{"checked": true}` for null."""
    names: dict[str, Any] = {"__name__": "grader"}
    exec(compile(source, "<grader>", "exec", dont_inherit=True), names)
    grade = names.get("grade")
    if not callable(grade):
        return b'{"failed": "the source does not define grade(sample, item)"}'
    given = json.loads(sample)
    if given is None:
        return b'{"checked": true}'
    return _encoded(grade(given["sample"], given["item"]))


def _encoded(value: Any) -> bytes:
    if not isinstance(value, int | float):
        return json.dumps({"failed": f"grade returned a {type(value).__name__}, not a number"}).encode()
    try:
        number = float(value)
    except OverflowError:
        return b'{"failed": "grade returned an integer beyond what a float holds"}'
    if not math.isfinite(number):
        return json.dumps({"failed": f"grade returned {number}, which is not finite"}).encode()
    return json.dumps({"grade": number}).encode()


def _described(error: BaseException) -> str:
    """Describe an exception, with the line of the grader that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<grader>"]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = str(error)
    except BaseException:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS] + where


if __name__ == "__main__":
    main()
