"""The sandbox's own side: the first process of its own namespaces, which forks one child a sample.

Run by path, with the standard library alone: `python -S -P -s sandbox_process.py LIMITS`, where LIMITS is JSON. It
reads frames (four bytes of length, then JSON) from stdin and answers each with one on stdout. Nothing of a stranger's
runs in this process: source and samples are opened in the child, which has lost every right before it reads them.

    launcher            unshares, forks, waits; SIGTERM ends the namespace
    └─ supervisor       pid 1: builds an empty root, forks, keeps the time
       └─ child         one sample: no capabilities, no network, no new process, no file but its own
"""

import ctypes
import errno
import importlib
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MAX_FRAME_BYTES = 32 << 20
MAX_ANSWER_BYTES = 64 << 10
# Loaded before any child is forked, so that graders which use them start at once.
_PRELOADED = (
    "ast collections datetime decimal difflib fractions functools itertools operator random re statistics string "
    "textwrap typing unicodedata"
).split()
_MAX_ERROR_CHARS = 2_000
_FILE_BYTES = 16 << 20
_NUM_OPEN_FILES = 64
_NUM_INODES = 512
_NOBODY = 65534

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_NOATIME, _MS_NODIRATIME = 32, 1024, 2048
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2
_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """`folder`: empty, the sandbox's own. `parent_pid`: whose end is ours. Times are of one sample."""

    folder: str
    parent_pid: int
    time_s: float
    memory_bytes: int


class _Refused(Exception):
    """The system does not let us isolate."""


def main() -> None:
    limits = Limits(**json.loads(sys.argv[1]))
    if sys.platform != "linux":
        _send({"refused": "it takes Linux"})
        return
    _die_with_parent(limits.parent_pid)
    lift_processor_limit()
    os.umask(0o022)  # nobody must be able to enter the folders of the new root
    for name in _PRELOADED:
        importlib.import_module(name)
    try:
        _filter_program(_DENIED)
        _become_first_of_namespaces(limits.folder)
    except _Refused as refused:
        _send({"refused": str(refused)})
        return
    _supervise(limits)


def lift_processor_limit() -> None:
    """Whoever started us may count the processor time of a step of his own, and raise his limit with each; ours stays
    as he had it, for a whole dataset. What runs here has limits of its own for each row.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise _Refused(f"{what}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return result


def _die_with_parent(expected_pid: int | None = None) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if expected_pid is not None and os.getppid() != expected_pid:  # it went before we asked
        os._exit(1)


# Namespaces and the empty root.


def _become_first_of_namespaces(folder: str) -> None:
    """Returns in the supervisor, pid 1 of its namespaces, in a root that holds Python's own files, read-only."""
    is_root, uid, gid = os.geteuid() == 0, os.geteuid(), os.getegid()
    sources = _python_folders()
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP
    # Root needs no user namespace to build a sandbox; its children become nobody, whom process limits bind.
    _checked(_libc.unshare(flags if is_root else flags | _CLONE_NEWUSER), "unshare of namespaces")
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
        raise _Refused(f"{path}: {error.strerror}") from error


def _fork_first() -> None:
    """Returns in the new namespace's first process. The launcher stays behind, waits for it, and ends as it does."""
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
        _end_as(os.waitpid(first, 0)[1], was_asked)  # returns when every process of the namespace has gone
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(write_end)
    _die_with_parent()
    if select.select([read_end], [], [], 0)[0]:  # the launcher went before we asked
        os._exit(1)
    os.close(read_end)


def _end_as(status: int, was_asked: list[int]) -> NoReturn:
    """As another process did, or by the signal that asked for it: whoever waits for us looks at that."""
    code = os.waitstatus_to_exitcode(status)
    number = was_asked[0] if was_asked else -code if code < 0 else code - 128
    if number > 0 and os.getpid() != 1:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 - code if code < 0 else code)


def confine(folder: str, memory_bytes: int) -> None:
    """Become a process without rights, which opens no file any more: whatever it needs it has imported.

    In namespaces of its own, behind an empty root. Where the system refuses those, as many containers do, what is left
    is to be nobody, who sees no file, starts nothing and speaks to no one but by the pipes that it has.

    Args:
        folder: an empty one, of the sandbox's own.
    """
    os.umask(0o022)
    with suppress(_Refused):
        _become_first_of_namespaces(folder)
    if os.getpid() == 1:
        child = os.fork()
        if child:
            os.close(0)
            os.close(1)
            _end_as(os.waitpid(child, 0)[1], [])
    parent = os.getppid()
    _lose_rights(memory_bytes, resource.RLIM_INFINITY)
    if parent == 1:  # after the change of user, which forgets it
        _die_with_parent(parent)
    _filter_calls(_DENIED | _FILES)


def _python_folders() -> list[str]:
    """What a running Python still needs: its standard library, and the folders of its shared libraries."""
    standard = str(Path(os.__file__).parent)
    names = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    loaded = {str(Path(name).parent) for name in names if ".so" in name and not name.startswith(standard)}
    return [standard, *sorted(loaded)]


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount of {kind or source or target} at {target}")


def _build_root(folder: str, sources: list[str]) -> None:
    """A root on tmpfs: nothing of the host's but Python, null and urandom; nothing writable but /tmp."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("sandbox", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size=1m,nr_inodes={_NUM_INODES},mode=755")
    for source in sources:
        Path(folder + source).mkdir(parents=True, exist_ok=True)
        _bind_read_only(source, folder + source)
        for packages in ("site-packages", "dist-packages"):  # ours may be installed there
            if Path(source, packages).is_dir():
                _mount("none", f"{folder}{source}/{packages}", "tmpfs", _MS_RDONLY, "size=4k,nr_inodes=1,mode=755")
    Path(folder, "dev").mkdir()
    for device in ("/dev/null", "/dev/urandom"):
        Path(folder + device).touch()
        _mount(device, folder + device, None, _MS_BIND)
    Path(folder, "tmp").mkdir(exist_ok=True)
    os.chdir(folder)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the host's root")
    os.chdir("/")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _libc.sethostname(b"sandbox", 7)
    _new_tmp()


def _bind_read_only(source: str, target: str) -> None:
    _mount(source, target, None, _MS_BIND | _MS_REC)
    # In a user namespace, the flags that the host mounted with may not be taken away.
    host = os.statvfs(source).f_flag
    kept = host & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME)
    kept |= _MS_RELATIME if host & 4096 else 0  # ST_RELATIME of statvfs
    _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)


def _new_tmp() -> None:
    """An empty /tmp: what a sample left there goes with the mount, whatever shape it has."""
    options = f"size={_FILE_BYTES},nr_inodes={_NUM_INODES},mode=1777"
    _mount("tmp", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)


# The supervisor.


def _supervise(limits: Limits) -> None:
    """One frame in, one frame out, until stdin ends. The first frame is the source."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _send({"ready": True})
    source = _receive()
    while source is not None and (sample := _receive()) is not None:
        answer = _graded(source, sample, limits)
        _tidy()
        _send(answer)


def _receive() -> bytes | None:
    head = _read_exactly(4)
    return None if head is None else _read_exactly(int.from_bytes(head, "big"))


def _read_exactly(num_bytes: int) -> bytes | None:
    pieces: list[bytes] = []
    while num_bytes:
        piece = os.read(0, min(num_bytes, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _send(answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    left = memoryview(len(data).to_bytes(4, "big") + data)
    while left:
        left = left[os.write(1, left) :]


def _graded(source: bytes, sample: bytes, limits: Limits) -> dict[str, Any]:
    """`{"answer": text}` as the child wrote it, or `{"failed": reason}`."""
    deadline = time.monotonic() + limits.time_s
    supervisor = os.getpid()
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _grade_and_leave(source, sample, limits, write_end, supervisor)
    os.close(write_end)
    try:
        answer = _answer_until(read_end, deadline)
        if answer is None:
            return {"failed": f"took longer than {limits.time_s:g} s and was stopped"}
        if len(answer) > MAX_ANSWER_BYTES:
            return {"failed": f"answered with more than {MAX_ANSWER_BYTES:,} bytes"}
        return {"answer": answer.decode(errors="replace")} if answer else {"failed": _end_of(child, deadline, limits)}
    finally:
        os.close(read_end)
        _end(child)


def _answer_until(read_end: int, deadline: float) -> bytes | None:
    """What comes before the end of the pipe, a little more than is allowed at most; None when time is up."""
    answer = bytearray()
    while len(answer) <= MAX_ANSWER_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([read_end], [], [], left_s)[0]:
            return None
        piece = os.read(read_end, 1 << 16)
        if not piece:
            break
        answer += piece
    return bytes(answer)


def _end_of(child: int, deadline: float, limits: Limits) -> str:
    """How a child ended that gave no answer."""
    while True:
        info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            break
        if time.monotonic() > deadline:
            return f"took longer than {limits.time_s:g} s and was stopped"
        time.sleep(0.001)
    if info.si_code == os.CLD_EXITED:
        return f"ended its process with status {info.si_status} and gave no grade"
    name = signal.Signals(info.si_status).name
    if name in ("SIGXCPU", "SIGKILL"):
        return f"used too much processor time and was stopped ({name})"
    return f"crashed ({name})"


def _end(child: int) -> None:
    """End the child, and whatever else is in this namespace."""
    os.kill(child, signal.SIGKILL)
    assert os.getpid() == 1, "-1 is everybody: only in a namespace of our own"
    os.kill(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _tidy() -> None:
    _libc.umount2(b"/tmp", _MNT_DETACH)
    _new_tmp()


# The child. All below runs a stranger's code, or is about to.


def _grade_and_leave(source: bytes, sample: bytes, limits: Limits, write_end: int, supervisor: int) -> NoReturn:
    try:
        os.dup2(write_end, 3)
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.chdir("/tmp")
        _lose_rights(limits.memory_bytes, math.ceil(limits.time_s) + 1)
        _die_with_parent(supervisor)
        _filter_calls(_DENIED)
        answer = _run(source, sample)
    except MemoryError:
        answer = b'{"failed": "took more memory than it may"}'
    except BaseException as error:
        answer = json.dumps({"failed": _described(error)}).encode()
    left = memoryview(answer)
    while left:
        left = left[os.write(3, left) :]
    os._exit(0)


def _lose_rights(memory_bytes: int, cpu_s: int) -> None:
    bounds = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
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
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


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
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _run(source: bytes, sample: bytes) -> bytes:
    """A JSON answer: `{"grade": number}`, `{"checked": true}` for an empty sample, or `{"failed": reason}`."""
    names: dict[str, Any] = {"__name__": "grader"}
    exec(compile(source, "<grader>", "exec", dont_inherit=True), names)
    grade = names.get("grade")
    if not callable(grade):
        return b'{"failed": "the source does not define grade(sample, item)"}'
    given = json.loads(sample)
    if given is None:
        return b'{"checked": true}'
    return _encoded(grade(given["sample"], given["item"]))


def _encoded(value: Any) -> bytes:
    if not isinstance(value, int | float):
        return json.dumps({"failed": f"grade returned a {type(value).__name__}, not a number"}).encode()
    try:
        number = float(value)
    except OverflowError:
        return b'{"failed": "grade returned an integer beyond what a float holds"}'
    if not math.isfinite(number):
        return json.dumps({"failed": f"grade returned {number}, which is not finite"}).encode()
    return json.dumps({"grade": number}).encode()


def _described(error: BaseException) -> str:
    """What was raised, and the line of the grader that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<grader>"]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = str(error)
    except BaseException:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS] + where


# The filter of system calls (seccomp): what a grade never needs. Limits of memory and processes cannot be got round.

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_DENIED: dict[str, tuple[int | None, int | None]] = {  # the numbers on x86_64 and on aarch64
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
_FILES: dict[str, tuple[int | None, int | None]] = {
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


def _filter_program(denied: dict[str, tuple[int | None, int | None]]) -> bytes:
    """Classic BPF over struct seccomp_data: nr at byte 0, arch at byte 4. Raises _Refused on other machines."""
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if column is None:
        raise _Refused(f"no filter of system calls is written for {platform.machine()}")
    numbers = [entry[column] for entry in denied.values() if entry[column] is not None]
    program = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, (_X86_64, _AARCH64)[column]), (_RETURN, 0, 0, _RET_KILL)]
    program += [(_LOAD, 0, 0, 0), (_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _RET_KILL)]  # x32's numbers
    program += [(_JUMP_EQUAL, len(numbers) - k, 0, number) for k, number in enumerate(numbers)]  # type: ignore[misc]
    program += [(_RETURN, 0, 0, _RET_ALLOW), (_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_calls(denied: dict[str, tuple[int | None, int | None]]) -> None:
    instructions = _filter_program(denied)
    program = _Program(len(instructions) // 8, instructions)
    _checked(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


if __name__ == "__main__":
    main()
