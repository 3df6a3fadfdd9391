"""The filter of system calls (seccomp). It is also used with bubblewrap, which sets none by default.

It closes what namespaces leave open: new processes and threads, sockets even of one's own namespace, signals, ptrace,
shared memory and memfd (which go round the memory limit), namespaces within the sandbox, keyrings, bpf, perf,
userfaultfd and io_uring.
"""

import ctypes
import errno
import platform
import struct

from activities.isolation.namespaces import PR_SET_SECCOMP, IsolationRefused, libc, libc_result

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
