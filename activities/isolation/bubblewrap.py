"""Starts Python programs in bubblewrap (bwrap, 0.8 or newer), and prepares them once they are inside.

bubblewrap makes the namespaces and the root, sets the environment, and ends the program when its parent ends. The root
holds Python's own files and the packages that are named, all read-only. Longshore adds what bubblewrap lacks: rlimits,
a bound on the number of files in /tmp, and a filter of system calls.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from activities.isolation.namespaces import (
    CLONE_NEWNS,
    cover,
    libc,
    libc_result,
    library_folders,
    mount_tmp,
    package_folders,
)

INSTALLED = shutil.which("bwrap")

_PACKAGES = "/packages"
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
    """Hide the packages, and mount a /tmp of bounded size, which bubblewrap cannot do. Raises IsolationRefused."""
    libc_result(libc.unshare(CLONE_NEWNS), "unshare of mounts")  # bubblewrap's own mounts cannot be changed from here
    cover(_PACKAGES)
    mount_tmp()


def forget_start() -> None:
    """Remove variables and import paths that were only needed to start the program."""
    packages = os.environ.get("PYTHONPATH")
    for name in _START_VARIABLES:
        os.environ.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != packages]
    sys.path_importer_cache.pop(packages or "", None)
