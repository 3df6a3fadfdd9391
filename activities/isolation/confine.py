"""Confines a process that has imported all that it needs: it gives up its rights, and can open no more files."""

import ctypes
import os
import resource
from contextlib import suppress

from activities.isolation.namespaces import (
    PR_SET_NO_NEW_PRIVS,
    TMP_BYTES,
    IsolationRefused,
    die_with_parent,
    end_as,
    enter_namespaces,
    libc,
    libc_result,
)
from activities.isolation.syscall_filter import DENIED, FILES, filter_calls

_NUM_OPEN_FILES = 64
_NOBODY = 65534


def lift_processor_limit() -> None:
    """Raise this process's limit of processor time to the hard limit, since it works through a whole dataset.

    It inherits the soft limit of its parent, which is for one step. Work in this process has time limits for each row.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def lose_rights(memory_bytes: int, cpu_s: int) -> None:
    bounds = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: TMP_BYTES,
        resource.RLIMIT_NOFILE: _NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    _become_nobody()
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        if bound == resource.RLIM_INFINITY:
            continue
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    _drop_capabilities()
    libc_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _become_nobody() -> None:
    """Switch root to the user nobody, as limits on processes do not apply to root. Other users stay who they are."""
    try:
        os.setgroups([])
    except PermissionError:
        return
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    libc_result(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def confine(folder: str, memory_bytes: int) -> None:
    """Confine this process in new namespaces, with an empty root.

    If the system refuses these, as in many containers, the process still gives up its rights. The filter of system
    calls lets it open no file and start no process; it can only communicate through the pipes that it has.

    `folder`: an empty folder for the sandbox alone.
    """
    os.umask(0o022)
    with suppress(IsolationRefused):
        enter_namespaces(folder)
    if os.getpid() == 1:
        child = os.fork()
        if child:
            os.close(0)
            os.close(1)
            end_as(os.waitpid(child, 0)[1], [])
    parent = os.getppid()
    lose_rights(memory_bytes, resource.RLIM_INFINITY)
    if parent == 1:  # only now, since changing the user resets this setting
        die_with_parent(parent)
    filter_calls(DENIED | FILES)


def confine_in_bubblewrap(memory_bytes: int) -> None:
    """Confine this process, which bubblewrap has started with CAP_SYS_CHROOT, to an empty root."""
    os.chroot("/tmp")
    os.chdir("/")
    lose_rights(memory_bytes, resource.RLIM_INFINITY)
    filter_calls(DENIED | FILES)
