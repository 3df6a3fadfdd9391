"""Finds the server's packages and starts their programs: `python -P -m longshore.server MODULE …` runs one.

The packages `shared`, `workflows`, `activities`, `megatron_worker` and `service` lie beside this one in a checkout, and
inside it (`_parts`) in an installed Longshore. Only the server's own processes have them on the import path, first: a
program that imports `longshore.client` can use these names for its own packages.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

PACKAGES = ("shared", "workflows", "activities", "megatron_worker", "service")
_HERE = Path(__file__).parent
FOLDER = str(next(folder for folder in (_HERE / "_parts", _HERE.parent) if (folder / "shared").is_dir()))


def main() -> None:
    """Run the command line, `longshore`."""
    _enter()
    try:
        import_module("service.cli.command").main()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:  # a bug of ours
            raise
        sys.exit(f"longshore: its commands need `pip install 'longshore[server]'`: {error.name} is not installed")


@contextmanager
def importable(*packages: str) -> Iterator[None]:
    """Put the server's packages first on the import path for a while, for a program that is not the server's.

    Raises ImportError: one of `packages` is another one's already.
    """
    for name in set(packages) & sys.modules.keys():
        found = next(iter(sys.modules[name].__path__), "")
        if not Path(found).resolve().is_relative_to(Path(FOLDER).resolve()):
            raise ImportError(f"Longshore's package {name} cannot be imported beside yours of that name, {found}")
    sys.path.insert(0, FOLDER)
    try:
        yield
    finally:
        sys.path.remove(FOLDER)


def with_import_path(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment where Python finds the server's packages, before others of the same names."""
    others = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", FOLDER)]
    return {**environment, "PYTHONPATH": os.pathsep.join((FOLDER, *others))}


def _enter() -> None:
    """Make the server's packages importable in this process, and in those that it starts."""
    sys.path.insert(0, FOLDER)
    os.environ.update(with_import_path())


if __name__ == "__main__":
    _enter()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
