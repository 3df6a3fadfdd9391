"""The rights that a process gives up before it runs a stranger's code: user, capabilities, and limits (rlimits)."""

import ctypes
import os
import resource

from activities.isolation.kernel import PR_SET_NO_NEW_PRIVS, TMP_BYTES, checked, libc

_NUM_OPEN_FILES = 64
_NOBODY = 65534


def lift_processor_limit() -> None:
    """Whoever started us may count the processor time of a step of his own, and raise his limit with each; ours stays
    as he had it, for a whole dataset. What runs here has limits of its own for each row.
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
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _become_nobody() -> None:
    """Process limits do not bind root. Who is not root, or the root of a user namespace of one, stays who he is."""
    try:
        os.setgroups([])
    except PermissionError:
        return
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
