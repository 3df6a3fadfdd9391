"""Starts our programs as forks of a process that has imported their modules, which saves seconds."""

import atexit
import ctypes
import os
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

TRAINER_MODULES = ("megatron_worker.warm_engine", "megatron_worker.worker")
SAMPLER_MODULES = ("megatron_worker.sampler.decoder", "megatron_worker.sampler.server")
"""What the processes of a GPU or sampler host import: named, since they lie above this package."""

ROOM_OF_COMMAND, ROOM_OF_ENVIRONMENT = " " * 2048, {"LONGSHORE_ROOM": " " * 8192}
"""The last argument and a variable of a process that is to be forked: what a fork shows as its own takes their room."""


BUILD_VARIABLE = "LONGSHORE_BUILD_ID"
"""Of a control host, and so read before its settings: how its workflows are versioned is said as they are imported."""
RENDEZVOUS_VARIABLE = "LONGSHORE_RENDEZVOUS"
"""Names the file in which a worker's ranks meet, or that says where."""
NODE_VARIABLE, INTERFACE_VARIABLE = "LONGSHORE_NODE", "LONGSHORE_INTERFACE"
"""For a worker on several machines: which of them this is, and its network interface to the others."""


def is_of_a_build() -> bool:
    return bool(os.environ.get(BUILD_VARIABLE))


def become(
    command: Sequence[str], environment: Mapping[str, str], is_ready: Callable[[], object] = lambda: None
) -> NoReturn:
    """Become the program `python -P -m MODULE ARGUMENTS` in a process that was just forked, and end with it.

    `ps` and psutil show it with its own command line and environment, so that others find it. If that fails, or the
    parent's state does not survive a fork (threads, CUDA), this process executes the program with execve instead.

    `is_ready`: called as soon as the process can be found.
    """
    code: object = 1
    try:
        is_shown = _is_sound() and show(command, environment)
        is_ready()
        if not is_shown:
            os.execve(command[0], [*command], environment)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # its TMPDIR differs
        _, _, _, module, *sys.argv[1:] = command
        sys.modules.pop(module, None)  # imported for a name in it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = None
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    leave(code)


def _is_sound() -> bool:
    """Return False if the parent had threads, or had started CUDA."""
    cuda_is_lost = getattr(sys.modules.get("torch._C"), "_cuda_isInBadFork", bool)
    return not cuda_is_lost() and not _had_threads


_had_threads = False


def _note_threads() -> None:
    global _had_threads
    tasks = Path("/proc/self/task")
    _had_threads = tasks.exists() and len(list(tasks.iterdir())) > 1


os.register_at_fork(before=_note_threads)


def show(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Write both where the kernel reads them: over the command line and environment of this process's start."""
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        arg_start, arg_end, env_start, env_end = map(int, stat[45:49])
    except (OSError, ValueError):  # on systems without it
        return False
    shown = (
        _block(command, arg_end - arg_start),
        _block((f"{k}={v}" for k, v in environment.items()), env_end - env_start),
    )
    for start, block in zip((arg_start, env_start), shown, strict=True):
        if not start or block is None:
            return False
        ctypes.memmove(start, block, len(block))
    return True


def _block(texts: Iterable[str], size: int) -> bytes | None:
    """Return the texts in the kernel's format; None if they do not fit."""
    block = b"".join(os.fsencode(text) + b"\0" for text in texts)
    return block.ljust(size, b"\0") if len(block) <= size else None


def leave(code: object) -> NoReturn:
    """End this process as `sys.exit` does, without the interpreter's finalization.

    In a fork, finalization would leave the parent's `with` blocks. In a rank, a thread of torch that still runs can
    abort the process during finalization, after a job has succeeded.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((code or 0) & 0xFF)
