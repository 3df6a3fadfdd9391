"""Starts our programs as forks of a process that has imported their modules, which saves seconds."""

import atexit
import os
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

TRAINER_MODULES = ("megatron_worker.warm_engine", "megatron_worker.worker")
SAMPLER_MODULES = ("megatron_worker.sampler.decoder", "megatron_worker.sampler.server")
"""What the processes of a GPU or sampler host import: named, since they lie above this package."""

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

    Its title is its command line, by which others find it. If the parent's state does not survive a fork (threads,
    CUDA), this process executes the program with execve instead.

    `is_ready`: called as soon as the process can be found.
    """
    from setproctitle import setproctitle  # which no other process of ours needs

    code: object = 1
    try:
        cuda_is_lost = getattr(sys.modules.get("torch._C"), "_cuda_isInBadFork", bool)
        is_sound = not cuda_is_lost() and not _had_threads
        if is_sound:
            setproctitle(" ".join(command))
        is_ready()
        if not is_sound:
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


_had_threads = False


def _note_threads() -> None:
    global _had_threads
    tasks = Path("/proc/self/task")
    _had_threads = tasks.exists() and len(list(tasks.iterdir())) > 1


os.register_at_fork(before=_note_threads)


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
