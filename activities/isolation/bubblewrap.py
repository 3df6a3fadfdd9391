"""Python programs in bubblewrap (bwrap, 0.8 or newer): the command, and what the program does first inside.

bubblewrap makes the namespaces and the root, keeps the environment, and ends what it started when its parent ends.
The root holds Python's own files and the packages that are named, all read-only. Limits (rlimits), a bound on the
number of files in /tmp, and the filter of system calls are ours: bubblewrap has none.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from activities.isolation.namespaces import (
    CLONE_NEWNS,
    checked,
    cover,
    libc,
    library_folders,
    mount_tmp,
    package_folders,
)

INSTALLED = shutil.which("bwrap")

_PACKAGES = "/packages"
_DEVICES = ("/dev/null", "/dev/urandom")
_START_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "PWD")
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
# An ordinary user's sandbox is nobody in a user namespace of its own; root's children become nobody themselves, whom
# process limits bind, and a user namespace of root's would keep them root outside of it.
_AS_USER = ("--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534")
_OF_ROOT = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")


@dataclass(frozen=True)
class Start:
    """The means that a program in bubblewrap gets.

    Attributes:
        packages: folders of packages that it imports. Nothing else is importable but the standard library.
        environment: its variables, all of them.
        capabilities: those that it needs until it gives up its rights.
        options: more of bwrap's.
    """

    packages: Sequence[Path]
    environment: Mapping[str, str]
    capabilities: Sequence[str] = ()
    options: Sequence[str] = ()


def command(bwrap: str, program: Sequence[str], start: Start, namespaces: Sequence[str]) -> list[str]:
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
    """bwrap's options for namespaces, the strictest first; where the system refuses one, the next may do."""
    if os.geteuid() == 0:
        return (_NAMESPACES,)
    return (*_AS_USER, "--disable-userns"), _AS_USER  # the latter where /proc/sys is read-only, as in many containers


def _root(packages: Sequence[Path]) -> Iterator[str]:
    for name in ("/lib", "/lib64"):  # where programs name their loader
        if Path(name).is_symlink():
            yield from ("--symlink", str(Path(name).readlink()), name)
    # Programs of x86_64 and of some others look for their loader in /lib64.
    loaders = [str(Path(name).resolve()) for name in ("/lib64",) if Path(name).is_dir()]
    folders = list(dict.fromkeys((*library_folders(), *loaders)))
    found = (*folders, str(_python()), *_DEVICES)
    for parent in sorted({str(parent) for path in found for parent in Path(path).parents}):
        yield from ("--dir", parent)  # which anybody may enter, as perhaps not on the host
    for folder in folders:
        yield from ("--ro-bind", folder, folder)
    for folder in package_folders():
        yield from ("--size", "4096", "--tmpfs", folder, "--remount-ro", folder)
    yield from ("--ro-bind", str(_python()), str(_python()))
    for device in _DEVICES:
        yield from ("--dev-bind", device, device)
    for package in packages:
        yield from ("--ro-bind", str(package), f"{_PACKAGES}/{package.name}")
    yield from ("--dir", "/tmp")


def _python() -> Path:
    return Path(sys.executable).resolve()


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    start = {"PYTHONPATH": _PACKAGES, "LD_LIBRARY_PATH": ":".join(library_folders())}
    yield "--clearenv"
    for name, value in {**environment, **start}.items():
        yield from ("--setenv", name, value)


def enter_bubblewrap() -> None:
    """Put the packages out of sight, and mount a /tmp, which bubblewrap cannot bound. Raises Refused."""
    checked(libc.unshare(CLONE_NEWNS), "unshare of mounts")  # bubblewrap's belong to a namespace above ours
    cover(_PACKAGES)
    mount_tmp()


def forget_start() -> None:
    """Take out of the environment and the import path what only the start needed."""
    packages = os.environ.get("PYTHONPATH")
    for name in _START_VARIABLES:
        os.environ.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != packages]
    sys.path_importer_cache.pop(packages or "", None)
