"""Namespaces of our own and an empty root, where bubblewrap is not installed.

launcher            unshares, forks, waits; SIGTERM ends the namespace
└─ first process    pid 1: builds an empty root, goes on
"""

import os
import select
import signal
from pathlib import Path
from typing import Any, NoReturn

from activities.isolation.kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MAX_NAMES,
    MNT_DETACH,
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    Refused,
    checked,
    cover,
    die_with_parent,
    libc,
    mount,
    mount_tmp,
)
from activities.isolation.python_files import library_folders, package_folders


def enter_namespaces(folder: str) -> None:
    """Become pid 1 of new namespaces, in a root that holds Python's own files, read-only. The caller stays behind.

    Raises Refused.
    """
    is_root, uid, gid = os.geteuid() == 0, os.geteuid(), os.getegid()
    sources = library_folders()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    # Root needs no user namespace to build a sandbox; its children become nobody, whom process limits bind.
    checked(libc.unshare(flags if is_root else flags | CLONE_NEWUSER), "unshare of namespaces")
    if not is_root:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    _fork_first()
    _build_root(folder, sources)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error


def _fork_first() -> None:
    """Return in the new namespace's first process. The launcher stays behind, waits for it, and ends as it does."""
    first, was_asked = 0, list[int]()

    def end(number: int, __: Any) -> None:
        was_asked.append(number)
        if first:
            os.kill(first, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    read_end, write_end = os.pipe()
    first = os.fork()
    if first:  # keeps write_end: its closing tells of our end
        os.close(0)
        os.close(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        end_as(os.waitpid(first, 0)[1], was_asked)  # returns when every process of the namespace has gone
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(write_end)
    die_with_parent()
    if select.select([read_end], [], [], 0)[0]:  # the launcher went before we asked
        os._exit(1)
    os.close(read_end)


def end_as(status: int, was_asked: list[int]) -> NoReturn:
    """End as another process did, or by the signal that asked for it: whoever waits for us looks at that."""
    code = os.waitstatus_to_exitcode(status)
    number = was_asked[0] if was_asked else -code if code < 0 else code - 128
    if number > 0 and os.getpid() != 1:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 - code if code < 0 else code)


def _build_root(folder: str, sources: list[str]) -> None:
    """Build a root on tmpfs: nothing of the host's but Python, null and urandom; nothing writable but /tmp."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("sandbox", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MAX_NAMES},mode=755")
    for source in sources:
        Path(folder + source).mkdir(parents=True, exist_ok=True)
        _bind_read_only(source, folder + source)
    for packages in package_folders():
        cover(folder + packages)
    Path(folder, "dev").mkdir()
    for device in ("/dev/null", "/dev/urandom"):
        Path(folder + device).touch()
        mount(device, folder + device, None, MS_BIND)
    Path(folder, "tmp").mkdir(exist_ok=True)
    os.chdir(folder)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount of the host's root")
    os.chdir("/")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    libc.sethostname(b"sandbox", 7)
    mount_tmp()


def _bind_read_only(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    # In a user namespace, the flags that the host mounted with may not be taken away.
    host = os.statvfs(source).f_flag
    kept = host & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    kept |= MS_RELATIME if host & 4096 else 0  # ST_RELATIME of statvfs
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)
