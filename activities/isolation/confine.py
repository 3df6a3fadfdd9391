"""Confine a process that has imported whatever it needs: it loses its rights, and opens no file any more."""

import os
import resource
from contextlib import suppress

from activities.isolation.kernel import Refused, die_with_parent
from activities.isolation.namespaces import end_as, enter_namespaces
from activities.isolation.rights import lose_rights
from activities.isolation.syscall_filter import DENIED, FILES, filter_calls


def confine(folder: str, memory_bytes: int) -> None:
    """Confine this process in namespaces of its own, behind an empty root.

    Where the system refuses those, as many containers do, what is left is to be nobody, who sees no file, starts
    nothing and speaks to no one but by the pipes that it has.

    Args:
        folder: an empty one, of the sandbox's own.
    """
    os.umask(0o022)
    with suppress(Refused):
        enter_namespaces(folder)
    if os.getpid() == 1:
        child = os.fork()
        if child:
            os.close(0)
            os.close(1)
            end_as(os.waitpid(child, 0)[1], [])
    parent = os.getppid()
    lose_rights(memory_bytes, resource.RLIM_INFINITY)
    if parent == 1:  # after the change of user, which forgets it
        die_with_parent(parent)
    filter_calls(DENIED | FILES)


def confine_in_bubblewrap(memory_bytes: int) -> None:
    """Confine this process, which bubblewrap has started with CAP_SYS_CHROOT, to an empty root."""
    os.chroot("/tmp")
    os.chdir("/")
    lose_rights(memory_bytes, resource.RLIM_INFINITY)
    filter_calls(DENIED | FILES)
