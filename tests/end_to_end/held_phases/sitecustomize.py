"""Holds a stack's trainers at the beginning of a phase of a weight sync, until a test has killed what it wants to.

Python imports this module in every process that has this folder in PYTHONPATH. The folder that PYTHON_HELD_PHASES names
says what to do: a file `hold` holds a phase's name. Whoever comes to that phase first renames the file to `held`, and
goes on when the test has removed it.
"""

import importlib.util
import os
import sys
import time
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from pathlib import Path

_MODULE = "megatron_worker.weight_sync.sender"
_PATIENCE_S = 100.0  # less than samplers have


def _hold_at(folder, name):
    with suppress(FileNotFoundError):
        if (folder / "hold").read_text() != name:
            return
        (folder / "hold").rename(folder / "held")
        end = time.monotonic() + _PATIENCE_S
        while (folder / "held").exists() and time.monotonic() < end:
            time.sleep(0.01)


def _have_held(profile, folder):
    enter = profile.__call__

    @contextmanager
    def held(self, name):
        _hold_at(folder, name)
        with enter(self, name):
            yield

    profile.__call__ = held


class _Finder(MetaPathFinder):
    """Finds one module, once, as it is found otherwise."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _have_held(module.SyncProfile, Path(os.environ["PYTHON_HELD_PHASES"]))

        spec.loader.exec_module = exec_module
        return spec


if "PYTHON_HELD_PHASES" in os.environ:
    sys.meta_path.insert(0, _Finder())
