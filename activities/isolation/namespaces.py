"""Namespaces and an empty root for hosts without bubblewrap; mounts and system calls for both.

launcher            unshares, forks, waits; SIGTERM ends the namespace
└─ first process    pid 1: builds an empty root, continues
"""

import ctypes
import errno
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

TMP_BYTES = 16 << 20
MAX_NAMES = 512
"""The most files and folders in a sandbox's root or /tmp."""

libc = ctypes.CDLL(None, use_errno=True)
_STANDARD = Path(os.__file__).parent
_PACKAGES = ("site-packages", "dist-packages")


class IsolationRefused(Exception):
    """The system refuses a call that isolation needs."""


def libc_result(result: int, what: str) -> int:
    """Return the result of a libc call. Raises IsolationRefused, with the call's error, if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise IsolationRefused(f"{what}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return result


def die_with_parent(expected_pid: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent is gone (Linux alone).

    `expected_pid`: the parent's; this process ends if it has ended already.
    """
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if expected_pid is not None and os.getppid() != expected_pid:  # the parent had ended already
        os._exit(1)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    libc_result(result, f"mount of {kind or source or target} at {target}")


def cover(folder: str) -> None:
    """Mount an empty file system over a folder, to hide its contents."""
    mount("none", folder, "tmpfs", MS_RDONLY, "size=4k,nr_inodes=1,mode=755")


def mount_tmp() -> None:
    """Mount an empty /tmp; unmounting it deletes all that a sample has left there."""
    options = f"size={TMP_BYTES},nr_inodes={MAX_NAMES},mode=1777"
    mount("tmp", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def unmount_tmp() -> None:
    libc.umount2(b"/tmp", MNT_DETACH)


def library_folders() -> list[str]:
    """The standard library and the folders of the shared libraries that Python loads; none lies in another.

    Those of packages are left out, wherever they are imported from: a sandbox has none of this process's.
    """
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    packages = _imported_from()
    loaded = {Path(name) for name in names if not name.startswith(packages)}
    folders = {str(path.parent) for path in loaded if not set(path.parts) & set(_PACKAGES)} | {str(_STANDARD)}
    return sorted(folder for folder in folders if not any(folder.startswith(f"{other}/") for other in folders))


def _imported_from() -> tuple[str, ...]:
    """Folders of packages on the import path: those that are neither around nor in the standard library."""
    standard = f"{_STANDARD}/"
    found = (f"{os.path.realpath(entry)}/" for entry in sys.path if entry)
    return tuple(entry for entry in found if not standard.startswith(entry) and not entry.startswith(standard))


def package_folders() -> list[str]:
    """Folders in `library_folders` that may contain installed packages."""
    folders = [home / name for home in (_STANDARD, _STANDARD.parent / "python3") for name in _PACKAGES]
    inside = tuple(f"{folder}/" for folder in library_folders())
    return [str(folder) for folder in folders if folder.is_dir() and str(folder).startswith(inside)]


def enter_namespaces(folder: str) -> None:
    """Become pid 1 of new namespaces, in a root that holds Python's own files, read-only. The caller stays behind.

    Raises IsolationRefused.
    """
    is_root, uid, gid = os.geteuid() == 0, os.geteuid(), os.getegid()
    sources = library_folders()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    # Root needs no user namespace to build a sandbox; its children become nobody, to whom limits on processes apply.
    libc_result(libc.unshare(flags if is_root else flags | CLONE_NEWUSER), "unshare of namespaces")
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
        raise IsolationRefused(f"{path}: {error.strerror}") from error


def _fork_first() -> None:
    """Fork. The child, the new namespace's first process, returns; the launcher waits for it and ends as it does."""
    first, was_asked = 0, list[int]()

    def end(number: int, __: Any) -> None:
        was_asked.append(number)
        if first:
            os.kill(first, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    read_end, write_end = os.pipe()
    first = os.fork()
    if first:  # keeps write_end: it closes when this process ends
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
    """End this process with another one's exit status, or by the signal that ended it or asked for its end."""
    code = os.waitstatus_to_exitcode(status)
    number = was_asked[0] if was_asked else -code if code < 0 else code - 128
    if number > 0 and os.getpid() != 1:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 - code if code < 0 else code)


def _build_root(folder: str, sources: list[str]) -> None:
    """Build a root on tmpfs: from the host it has only Python, null and urandom; only /tmp is writable."""
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
    libc_result(libc.pivot_root(b".", b"."), "pivot_root")
    libc_result(libc.umount2(b".", MNT_DETACH), "umount of the host's root")
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
