"""Isolation of untrusted code: bubblewrap or our own namespaces, each with limits and a filter of system calls.

The processes inside run these modules with the standard library alone.
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
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# --- Namespaces and an empty root for hosts without bubblewrap; mounts and system calls for both ---
#
# launcher            unshares, forks, waits; SIGTERM ends the namespace
# └─ first process    pid 1: builds an empty root, continues

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


# --- The filter of system calls (seccomp). It is also used with bubblewrap, which sets none by default ---
#
# It closes what namespaces leave open: new processes and threads, sockets even of one's own namespace, signals,
# ptrace, shared memory and memfd (which go round the memory limit), namespaces within the sandbox, keyrings, bpf,
# perf, userfaultfd and io_uring.

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_Numbers = dict[str, tuple[int | None, int | None]]  # on x86_64 and on aarch64

DENIED: _Numbers = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "modify_ldt": (154, None),
}
FILES: _Numbers = {
    "open": (2, None),
    "creat": (85, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "name_to_handle_at": (303, 264),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "truncate": (76, 45),
}
_RET_ALLOW, _RET_ERRNO, _RET_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06


def filter_program(denied: _Numbers) -> bytes:
    """Classic BPF over struct seccomp_data: nr at byte 0, arch at byte 4. Raises IsolationRefused on other machines."""
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if column is None:
        raise IsolationRefused(f"no filter of system calls is written for {platform.machine()}")
    numbers = [entry[column] for entry in denied.values() if entry[column] is not None]
    program = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, (_X86_64, _AARCH64)[column]), (_RETURN, 0, 0, _RET_KILL)]
    program += [(_LOAD, 0, 0, 0), (_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _RET_KILL)]  # x32's numbers
    program += [(_JUMP_EQUAL, len(numbers) - k, 0, number) for k, number in enumerate(numbers)]  # type: ignore[misc]
    program += [(_RETURN, 0, 0, _RET_ALLOW), (_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(denied: _Numbers) -> None:
    instructions = filter_program(denied)
    program = _Program(len(instructions) // 8, instructions)
    libc_result(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


# --- Starts Python programs in bubblewrap (bwrap, 0.8 or newer), and prepares them once they are inside ---
#
# bubblewrap makes the namespaces and the root, sets the environment, and ends the program when its parent ends. The
# root holds Python's own files and the packages that are named, all read-only. Longshore adds what bubblewrap lacks:
# rlimits, a bound on the number of files in /tmp, and a filter of system calls.

INSTALLED = shutil.which("bwrap")

_BUBBLEWRAP_PACKAGES = "/packages"
_DEVICES = ("/dev/null", "/dev/urandom")
_START_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "PWD")
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
# An ordinary user's sandbox runs as nobody in a user namespace. Root's sandbox has no user namespace, because it would
# still be root to the outside. Instead its children switch to the user nobody, to whom process limits apply.
_AS_USER = ("--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534")
_OF_ROOT = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")


@dataclass(frozen=True)
class BubblewrapStart:
    """How a program is started inside bubblewrap's sandbox.

    Attributes:
        packages: folders of packages that it imports. It can import only these and the standard library.
        environment: all of its variables.
        capabilities: those that it keeps until it gives up its rights.
        options: more of bwrap's.
    """

    packages: Sequence[Path]
    environment: Mapping[str, str]
    capabilities: Sequence[str] = ()
    options: Sequence[str] = ()


def isolated_command(
    bwrap: str, program: Sequence[str], start: BubblewrapStart, namespaces: Sequence[str]
) -> list[str]:
    """The command that starts `python -S PROGRAM` in bubblewrap. The program ends with the thread that starts it.

    Args:
        bwrap: the path of bubblewrap.
        namespaces: one of `namespace_options()`.
    """
    kept = (*start.capabilities, *(_OF_ROOT if os.geteuid() == 0 else ()))
    parts = [bwrap, *namespaces, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    parts += [part for name in kept for part in ("--cap-add", name)]
    parts += [*_root(start.packages), *_environment(start.environment), *start.options]
    parts += ["--remount-ro", "/", "--chdir", "/", "--"]
    return [*parts, str(_python()), "-S", "-P", "-s", *program]


def namespace_options() -> tuple[tuple[str, ...], ...]:
    """Return alternative namespace options for bwrap, the strictest first; not every system allows each of them."""
    if os.geteuid() == 0:
        return (_NAMESPACES,)
    return (*_AS_USER, "--disable-userns"), _AS_USER  # the latter if /proc/sys is read-only, as in many containers


def _root(packages: Sequence[Path]) -> Iterator[str]:
    for name in ("/lib", "/lib64"):  # where programs name their loader
        if Path(name).is_symlink():
            yield from ("--symlink", str(Path(name).readlink()), name)
    # Programs of x86_64 and of some others look for their loader in /lib64.
    loaders = [str(Path(name).resolve()) for name in ("/lib64",) if Path(name).is_dir()]
    folders = list(dict.fromkeys((*library_folders(), *loaders)))
    found = (*folders, str(_python()), *_DEVICES)
    for parent in sorted({str(parent) for path in found for parent in Path(path).parents}):
        yield from ("--dir", parent)  # with permissions for everybody, which the host's folder may lack
    for folder in folders:
        yield from ("--ro-bind", folder, folder)
    for folder in package_folders():
        yield from ("--size", "4096", "--tmpfs", folder, "--remount-ro", folder)
    yield from ("--ro-bind", str(_python()), str(_python()))
    for device in _DEVICES:
        yield from ("--dev-bind", device, device)
    for package in packages:
        yield from ("--ro-bind", str(package), f"{_BUBBLEWRAP_PACKAGES}/{package.name}")
    yield from ("--dir", "/tmp")


def _python() -> Path:
    return Path(sys.executable).resolve()


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    start = {"PYTHONPATH": _BUBBLEWRAP_PACKAGES, "LD_LIBRARY_PATH": ":".join(library_folders())}
    yield "--clearenv"
    for name, value in {**environment, **start}.items():
        yield from ("--setenv", name, value)


def enter_bubblewrap() -> None:
    """Hide the packages, and mount a /tmp of bounded size, which bubblewrap cannot do. Raises IsolationRefused."""
    libc_result(libc.unshare(CLONE_NEWNS), "unshare of mounts")  # bubblewrap's own mounts cannot be changed from here
    cover(_BUBBLEWRAP_PACKAGES)
    mount_tmp()


def forget_start() -> None:
    """Remove variables and import paths that were only needed to start the program."""
    packages = os.environ.get("PYTHONPATH")
    for name in _START_VARIABLES:
        os.environ.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != packages]
    sys.path_importer_cache.pop(packages or "", None)


# --- Confines a process that has imported all that it needs ---
# It gives up its rights, and can open no more files.

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


# --- Frames between our processes ---
# Eight bytes of length, then this many bytes. Imports only the standard library.

_HEAD_BYTES = 8
_SLICE_S = 0.5  # waits are cut into such slices, as a cancellation is raised in a thread only between two waits


def write_frame(descriptor: int, *parts: bytes) -> None:
    """Write all parts as one frame. Raises BrokenPipeError."""
    head = sum(map(len, parts)).to_bytes(_HEAD_BYTES, "big")
    left = memoryview(b"".join((head, *parts)))
    while left:
        left = left[os.write(descriptor, left) :]


def read_frame(descriptor: int, max_bytes: int | None = None, deadline: float | None = None) -> bytearray:
    """Read one frame, without waiting beyond `deadline` (of `time.monotonic`).

    Raises:
        EOFError: the other end has closed. TimeoutError: the deadline has passed.
        OverflowError: the frame has more than `max_bytes`.
    """
    num_bytes = int.from_bytes(_read(descriptor, _HEAD_BYTES, deadline), "big")
    if max_bytes is not None and num_bytes > max_bytes:
        raise OverflowError(f"a frame of {num_bytes:,} bytes")
    return _read(descriptor, num_bytes, deadline)


def frames_of(descriptor: int) -> Iterator[bytes]:
    """Read frames until the other end closes."""
    with suppress(EOFError):
        while True:
            yield bytes(read_frame(descriptor))


def _read(descriptor: int, num_bytes: int, deadline: float | None) -> bytearray:
    found = bytearray()
    while len(found) < num_bytes:
        if deadline is not None:
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


class FramedProcess(subprocess.Popen[bytes]):
    """A process that answers each frame on its standard input with one on its standard output."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the host
            pass_fds=pass_fds,
        )

    def send(self, data: bytes) -> None:
        """Send one frame. Raises EOFError when the process has ended."""
        assert self.stdin
        try:
            write_frame(self.stdin.fileno(), data)
        except BrokenPipeError as error:
            raise EOFError from error

    def receive(self, limit_s: float, max_bytes: int) -> bytearray:
        """Wait at most `limit_s` seconds for one frame. Raises as `read_frame` does."""
        assert self.stdout
        return read_frame(self.stdout.fileno(), max_bytes, time.monotonic() + limit_s)

    def end(self, grace_s: float = 0.0) -> None:
        """Kill the process unless it ends by itself within `grace_s`, reap it, and close its pipes."""
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout):
            assert pipe
            pipe.close()
