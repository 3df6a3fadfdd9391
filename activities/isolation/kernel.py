"""Calls of the kernel that Python has no function for, and the mounts that sandboxes need."""

import ctypes
import errno
import os
import signal

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

TMP_BYTES = 16 << 20
MAX_NAMES = 512
"""Files and folders that one small file system may hold."""

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The system does not let us isolate."""


def checked(result: int, what: str) -> int:
    """The result of a call. Raises Refused with the call's error."""
    if result < 0:
        number = ctypes.get_errno()
        raise Refused(f"{what}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return result


def die_with_parent(expected_pid: int | None = None) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if expected_pid is not None and os.getppid() != expected_pid:  # it went before we asked
        os._exit(1)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(result, f"mount of {kind or source or target} at {target}")


def cover(folder: str) -> None:
    """Mount nothing over a folder: what lies below is out of reach."""
    mount("none", folder, "tmpfs", MS_RDONLY, "size=4k,nr_inodes=1,mode=755")


def mount_tmp() -> None:
    """Mount an empty /tmp, which goes with all that a sample leaves there."""
    options = f"size={TMP_BYTES},nr_inodes={MAX_NAMES},mode=1777"
    mount("tmp", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def unmount_tmp() -> None:
    libc.umount2(b"/tmp", MNT_DETACH)
