"""A sandbox by the kernel: namespaces, a root with the files that one call may see, limits, and a filter.

Standard library alone. `child.py` says which process calls what:

    launcher             bubblewrap or `enter_namespaces`: user, network, IPC and PID namespaces, once
    └─ server            imports our modules, forks
       └─ keeper         pid 1 of a PID namespace a call; `enter_root`
          └─ child       `give_up_rights`; then it reads untrusted data or runs untrusted code
"""

import ctypes
import errno
import os
import platform
import resource
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CAP_DAC_OVERRIDE = 1

TMP_BYTES = 16 << 20
MAX_NAMES = 512
"""The most files and folders in a sandbox's /tmp."""

libc = ctypes.CDLL(None, use_errno=True)
_STANDARD = Path(os.__file__).parent
_PACKAGES = ("site-packages", "dist-packages")
_NOBODY = 65534
_NUM_OPEN_FILES = 64
_ZONES = "/usr/share/zoneinfo"  # chat templates may tell the date


class IsolationRefused(Exception):
    """The system refuses a call that isolation needs."""


def libc_result(result: int, what: str) -> int:
    """Return the result of a libc call. Raises IsolationRefused, with the call's error, if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise IsolationRefused(f"{what}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return result


def die_with_parent(expected_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent is gone (Linux alone).

    `expected_pid`: the parent's; this process ends if it has ended already.
    """
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if expected_pid is not None and os.getppid() != expected_pid:  # the parent had ended already
        os._exit(1)


# --- Namespaces of the server: by bubblewrap, which some systems let make user namespaces where others may not ---

BUBBLEWRAP = shutil.which("bwrap")


def launchers() -> list[list[str]]:
    """Return the beginnings of command lines that give a program its namespaces; `enter_namespaces` is the other way.

    Root needs none: it may make namespaces itself, and in a separate user namespace it would still be root outside.
    """
    if BUBBLEWRAP is None or os.geteuid() == 0 or sys.platform != "linux":
        return []
    shared = ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--as-pid-1")
    rights = ("--uid", "0", "--gid", "0", "--cap-add", "ALL")
    return [[BUBBLEWRAP, *shared, *rights, "--dev-bind", "/", "/", "--"]]


def enter_namespaces() -> None:
    """Go on as pid 1 of new namespaces, without network. The calling process stays behind and ends with it.

    Raises IsolationRefused.
    """
    filter_program(DENIED, threads=False)
    is_root, uid, gid = os.geteuid() == 0, os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    libc_result(libc.unshare(flags if is_root else flags | CLONE_NEWUSER), "unshare of namespaces")
    if not is_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            try:
                Path("/proc/self", name).write_text(text)
            except OSError as error:
                raise IsolationRefused(f"/proc/self/{name}: {error.strerror}") from error
    read_end, write_end = os.pipe()
    server = os.fork()
    if server:  # keeps write_end: it closes when this process ends
        os.closerange(0, 3)
        os.waitpid(server, 0)  # returns when every process of the namespace has gone
        os._exit(0)
    os.close(write_end)
    die_with_parent()
    if select.select([read_end], [], [], 0)[0]:  # the launcher went before we asked
        os._exit(1)
    os.close(read_end)


def fork_first() -> int:
    """Fork; the child is pid 1 of a new PID namespace. Called by the pid 1 of another."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        libc_result(libc.unshare(CLONE_NEWPID), "unshare of a PID namespace")
        pid = os.fork()
        if pid:
            libc_result(libc.setns(own, CLONE_NEWPID), "return to the PID namespace")
        return pid
    finally:
        os.close(own)


# --- The root of one call: Python's own files, and those that the call names ---


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    libc_result(result, f"mount of {kind or source or target} at {target}")


@cache
def library_folders() -> list[str]:
    """The standard library and the folders of the shared libraries that Python loads; none lies in another.

    Those of packages are left out, wherever they are imported from: untrusted code has none of this process's.
    """
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    packages = _imported_from()
    loaded = {Path(name) for name in names if not name.startswith(packages)}
    folders = {str(path.parent) for path in loaded if not set(path.parts) & set(_PACKAGES)} | {str(_STANDARD)}
    return _outermost(folders)


def _outermost(folders: set[str]) -> list[str]:
    return sorted(folder for folder in folders if not any(folder.startswith(f"{other}/") for other in folders))


def _imported_from() -> tuple[str, ...]:
    """Folders of packages on the import path: those that are neither around nor in the standard library."""
    standard = f"{_STANDARD}/"
    found = (f"{os.path.realpath(entry)}/" for entry in sys.path if entry)
    return tuple(entry for entry in found if not standard.startswith(entry) and not entry.startswith(standard))


@cache
def package_folders() -> list[str]:
    """Folders in `library_folders` that may contain installed packages."""
    folders = [home / name for home in (_STANDARD, _STANDARD.parent / "python3") for name in _PACKAGES]
    inside = tuple(f"{folder}/" for folder in library_folders())
    return [str(folder) for folder in folders if folder.is_dir() and str(folder).startswith(inside)]


@cache
def program_folders() -> list[str]:
    """What our own code may import beside `library_folders`: installed packages, and Longshore's."""
    own = Path(__file__).parents[2]
    packages = {str(own / name) for name in ("activities", "longshore", "service", "shared") if (own / name).is_dir()}
    package_folders()
    return _outermost({*library_folders(), *packages, *(os.path.realpath(p) for p in (sys.prefix, sys.base_prefix))})


def empty_root(name: str, options: str) -> str:
    """Mount the tmpfs that is to be this process's root, in new mounts of its own. Returns where it is."""
    libc_result(libc.unshare(CLONE_NEWNS), "unshare of mounts")
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = "/proc"  # no longer needed: a folder that exists and holds nobody's files
    mount(name, root, "tmpfs", MS_NOSUID | MS_NODEV, options)
    return root


def pivot_to(root: str) -> None:
    """Make it this process's root, and let the host's go."""
    os.chdir(root)
    libc_result(libc.pivot_root(b".", b"."), "pivot_root")
    libc_result(libc.umount2(b".", MNT_DETACH), "umount of the host's root")


def enter_root(reads: Sequence[str], writes: Sequence[str], is_code: bool) -> None:
    """Replace this process's root by one on tmpfs, in which all but /tmp and `writes` is read-only.

    `is_code`: untrusted code sees no packages.

    Raises IsolationRefused.
    """
    base = library_folders() if is_code else program_folders()
    hidden = package_folders() if is_code else []
    umask = os.umask(0o022)  # nobody must be able to enter the folders
    root = empty_root("sandbox", "size=8m,nr_inodes=8k,mode=755")
    Path(root, "tmp").mkdir()
    mount(
        "tmp",
        f"{root}/tmp",
        "tmpfs",
        MS_NOSUID | MS_NODEV | MS_NOEXEC,
        f"size={TMP_BYTES},nr_inodes={MAX_NAMES},mode=1777",
    )
    zones = [_ZONES] if Path(_ZONES).is_dir() else []
    shown = [(path, False) for path in (*base, *zones, *reads)] + [(path, True) for path in writes]
    for path, writable in sorted(shown, key=lambda each: (len(Path(each[0]).parts), each[1])):
        bind(os.path.realpath(path), root + path, writable)
    for folder in hidden:
        mount("none", root + folder, "tmpfs", MS_RDONLY, "size=4k,nr_inodes=1,mode=755")
    for device in ("/dev/null", "/dev/urandom"):
        bind(device, root + device, writable=False, is_device=True)
    pivot_to(root)
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/tmp")
    os.umask(umask)
    libc.sethostname(b"sandbox", 7)


def bind(source: str, target: str, writable: bool, is_device: bool = False) -> None:
    """Show a file or folder of the host at a place of the new root."""
    if not Path(target).exists():
        if Path(source).is_dir():
            Path(target).mkdir(parents=True)
        else:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).touch()
    mount(source, target, None, MS_BIND | MS_REC)
    # In a user namespace, the flags that the host mounted with may not be taken away.
    host = os.statvfs(source).f_flag
    kept = host & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    kept |= MS_RELATIME if host & 4096 else 0  # ST_RELATIME of statvfs
    access = host & MS_RDONLY if writable else MS_RDONLY
    access |= 0 if is_device else MS_NODEV
    mount(None, target, None, MS_REMOUNT | MS_BIND | access | MS_NOSUID | kept & ~(MS_NODEV if is_device else 0))


# --- Rights and limits of the child ---


def give_up_rights(memory_bytes: int, file_bytes: int, is_code: bool, is_alone: bool) -> None:
    """Limit this process, and take all rights from it. Raises IsolationRefused.

    Untrusted code (`is_code`) becomes nobody, and starts no thread. `is_alone`: it has its own namespaces.
    """
    bounds = {resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0}
    if is_code:
        bounds |= {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_NOFILE: _NUM_OPEN_FILES}
        with suppress(PermissionError):  # others than root stay who they are; limits on processes do not apply to root
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        bounds[resource.RLIMIT_DATA] = memory_bytes  # libraries reserve more address space than they use
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))
    if sys.platform != "linux":
        return
    if is_code:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    drop_capabilities(0 if is_code else 1 << CAP_DAC_OVERRIDE)  # root reads the files of others that its call names
    if is_code:
        filter_calls(DENIED if is_alone else DENIED | FILES, threads=False)
    else:
        allowed = _SIGNALS if is_alone else ()  # `abort` sends itself one
        filter_calls({name: number for name, number in DENIED.items() if name not in allowed}, threads=True)


def drop_capabilities(kept: int = 0) -> None:
    """Take all capabilities but those of the mask from this process, and from all that it becomes."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    kept &= _capabilities(header)
    libc_result(libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept)), "capset")
    libc_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _capabilities(header: Any) -> int:
    data = (ctypes.c_uint32 * 6)()
    libc_result(libc.capget(header, data), "capget")
    return int(data[1])


# --- The filter of system calls (seccomp) ---
#
# It closes what namespaces leave open: new processes, sockets even of one's own namespace, ptrace, shared memory and
# memfd (which go round the memory limit), namespaces within the sandbox, keyrings, bpf, perf, userfaultfd and io_uring.
# Untrusted code also gets no threads and sends no signals; without namespaces it opens no files.

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_Numbers = dict[str, tuple[int | None, int | None]]  # on x86_64 and on aarch64
_SIGNALS = ("kill", "tkill", "tgkill")
_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
_FAMILIES = (1, 2, 10, 16)
"""Of sockets: Unix, IPv4, IPv6 and netlink, which are of one's own namespace. Others, such as vsock, lead out of it."""


def _numbers(table: str) -> _Numbers:
    """Parse a table of calls: name, number on x86_64 and on aarch64; `-` if there is none."""
    rows = (entry.split() for entry in table.split(","))
    return {name: (int(x86) if x86 != "-" else None, int(arm) if arm != "-" else None) for name, x86, arm in rows}


DENIED = _numbers("""
    socket 41 198, socketpair 53 199, clone 56 220, fork 57 -, vfork 58 -, clone3 435 435, execve 59 221,
    execveat 322 281, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
    pidfd_open 434 434, pidfd_send_signal 424 424, ptrace 101 117, process_vm_readv 310 270,
    process_vm_writev 311 271, shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180, memfd_create 319 279,
    memfd_secret 447 447, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97,
    setns 308 268, open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432,
    fspick 433 433, mount_setattr 442 442, open_by_handle_at 304 265, add_key 248 217, request_key 249 218,
    keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425,
    io_uring_enter 426 426, io_uring_register 427 427, personality 135 92, modify_ldt 154 -
""")
FILES = _numbers("""
    open 2 -, creat 85 -, openat 257 56, openat2 437 437, name_to_handle_at 303 264, unlink 87 -, unlinkat 263 35,
    rename 82 -, renameat 264 38, renameat2 316 276, chmod 90 -, fchmodat 268 53, link 86 -, linkat 265 37,
    symlink 88 -, symlinkat 266 36, mkdir 83 -, mkdirat 258 34, rmdir 84 -, truncate 76 45
""")
_RET_ALLOW, _RET_ERRNO, _RET_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def filter_program(denied: _Numbers, threads: bool, programs: bool = False) -> bytes:
    """Classic BPF over struct seccomp_data: nr at byte 0, arch at byte 4, the first argument at byte 16.

    Args:
        threads: allow `clone` of threads, and say that there is no `clone3`, whose flags a filter cannot read.
        programs: allow `clone` of processes too, except into new namespaces, and sockets of `_FAMILIES` alone.

    Raises IsolationRefused on other machines.
    """
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if column is None or sys.platform != "linux":
        raise IsolationRefused(f"no filter of system calls is written for {sys.platform} on {platform.machine()}")
    refuse = (_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)
    program = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, (_X86_64, _AARCH64)[column]), (_RETURN, 0, 0, _RET_KILL)]
    program += [(_LOAD, 0, 0, 0), (_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _RET_KILL)]  # x32's numbers
    if threads or programs:
        clone, clone3 = (DENIED[name][column] or 0 for name in ("clone", "clone3"))
        allowed = (_JUMP_SET, 1, 0, _NEW_NAMESPACES) if programs else (_JUMP_SET, 0, 1, _CLONE_THREAD)
        program += [(_JUMP_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS)]
        program += [(_JUMP_EQUAL, 0, 4, clone), (_LOAD, 0, 0, 16), allowed, (_RETURN, 0, 0, _RET_ALLOW), refuse]
    if programs:
        known = [(_JUMP_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
        program += [(_JUMP_EQUAL, 0, len(known) + 3, DENIED["socket"][column] or 0), (_LOAD, 0, 0, 16), *known]
        program += [refuse, (_RETURN, 0, 0, _RET_ALLOW)]
    for entry in denied.values():
        if (number := entry[column]) is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), refuse]
    program += [(_RETURN, 0, 0, _RET_ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(denied: _Numbers, threads: bool, programs: bool = False) -> None:
    instructions = filter_program(denied, threads, programs)
    program = _Program(len(instructions) // 8, instructions)
    libc_result(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


# --- Priorities: untrusted programs compute after all others ---


def lower_priority(leader: int, niceness: int) -> None:
    """Lower the priority of a session's processes, and of all that they start. `leader`: its first one; 0: this one.

    It does not become higher than this process's, which an operator may have lowered.
    """
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PGRP, leader, niceness)
    # Outside of services and containers, kernels with autogroups share processors among sessions first.
    with suppress(OSError):
        Path("/proc", str(leader or "self"), "autogroup").write_text(str(niceness))


def begin_session() -> None:
    """Lead a new session, with the priority of the one before."""
    autogroup = Path("/proc/self/autogroup")  # as in `lower_priority`
    niceness = autogroup.read_text().split()[-1] if autogroup.exists() else None
    os.setsid()
    if niceness is not None:
        with suppress(OSError):
            autogroup.write_text(niceness)


def box_group() -> int | None:
    """Open the list of the processes of a control group that has half a session's share of processors.

    A program may begin any number of sessions, and raise their priority. So if this host is root, and in the kernel's
    first group, where sessions count, its programs go into a group of their own. None: there can be none, or need not.
    """
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = Path("/sys/fs/cgroup", controllers, "longshore-boxes")  # the second version names no controllers
            if path == "/" and "cpu" in (controllers or "cpu").split(",") and (group.parent / "cpu.stat").exists():
                group.mkdir(exist_ok=True)
                name, share = ("cpu.shares", "512") if controllers else ("cpu.weight", "50")
                with (group / name).open("r+") as file:
                    file.write(share)
                return os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    return None


# --- Frames between our processes: eight bytes of length, then this many bytes ---

_HEAD_BYTES = 8
_SLICE_S = 0.5  # waits are cut into slices of this length, with a `check` before each
Check = Callable[[], None]


def write_frame(descriptor: int, *parts: bytes, check: Check = lambda: None) -> None:
    """Write all parts as one frame, with a `check` while a descriptor is not ready. Raises BrokenPipeError."""
    head = sum(map(len, parts)).to_bytes(_HEAD_BYTES, "big")
    left = memoryview(b"".join((head, *parts)))
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            check()
            select.select([], [descriptor], [], _SLICE_S)


def read_frame(
    descriptor: int, max_bytes: int | None = None, deadline: float | None = None, check: Check = lambda: None
) -> bytearray:
    """Read one frame, without waiting beyond `deadline` (of `time.monotonic`), and with a `check` now and then.

    Raises:
        EOFError: the other end has closed. TimeoutError: the deadline has passed.
        OverflowError: the frame has more than `max_bytes`.
    """
    num_bytes = int.from_bytes(_read(descriptor, _HEAD_BYTES, deadline, check), "big")
    if max_bytes is not None and num_bytes > max_bytes:
        raise OverflowError(f"a frame of {num_bytes:,} bytes")
    return _read(descriptor, num_bytes, deadline, check)


def _read(descriptor: int, num_bytes: int, deadline: float | None, check: Check) -> bytearray:
    found = bytearray()
    while len(found) < num_bytes:
        if deadline is not None:
            check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no whole frame came in time")
            if not select.select([descriptor], [], [], min(left_s, _SLICE_S))[0]:
                continue
        piece = os.read(descriptor, min(num_bytes - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return found
