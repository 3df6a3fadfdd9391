"""The files that a running Python needs, seen from a process that runs it."""

import os
from pathlib import Path

_STANDARD = Path(os.__file__).parent
_PACKAGES = ("site-packages", "dist-packages")


def library_folders() -> list[str]:
    """The standard library and the folders of the shared libraries that Python loads; none lies in another."""
    names = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    loaded = {Path(name) for name in names if ".so" in name}
    folders = {str(path.parent) for path in loaded if not set(path.parts) & set(_PACKAGES)} | {str(_STANDARD)}
    return sorted(folder for folder in folders if not any(folder.startswith(f"{other}/") for other in folders))


def package_folders() -> list[str]:
    """Folders in `library_folders` where ours and others' packages may be installed."""
    folders = [home / name for home in (_STANDARD, _STANDARD.parent / "python3") for name in _PACKAGES]
    inside = tuple(f"{folder}/" for folder in library_folders())
    return [str(folder) for folder in folders if folder.is_dir() and str(folder).startswith(inside)]
