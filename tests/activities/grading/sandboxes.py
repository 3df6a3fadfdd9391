"""Sandboxes of python graders in folders of tests, and what this machine says where it cannot isolate."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.grading.python_sandbox import NotGraded, PythonSandbox
from shared.errors import InvalidInput
from shared.settings import GradingSettings

LIMITS = GradingSettings(python_time_s=60, python_memory_bytes=256 << 20)
SHORT = LIMITS.model_copy(update={"python_time_s": 1.5})  # for what takes for ever
REPOSITORY = Path(__file__).parents[3]


def _refusal() -> str | None:
    """Why this machine cannot isolate: what the product says of it."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"longshore-refusal-{os.getpid()}"
    folder.mkdir()
    try:
        with PythonSandbox("def grade(sample, item): return 1", LIMITS, folder):
            return None
    except InvalidInput as error:
        return error.message
    finally:
        shutil.rmtree(folder)


REFUSAL = _refusal()


CAPABILITIES = """
def num_capabilities():
    import ctypes
    data = (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6)
    assert ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), data) == 0
    return sum(word.bit_count() for word in data)
"""


def processes_of(folder: Path) -> list[int]:
    """Every process that names the folder on its command line: launcher, supervisor and children do."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just gone
            if str(folder).encode() in command.read_bytes():
                found.append(int(command.parent.name))
    return found


@dataclass(frozen=True)
class Place:
    """A sandbox's folder, and what isolates it."""

    folder: Path
    bwrap: str | None

    def sandbox(self, source: str, settings: GradingSettings = LIMITS) -> PythonSandbox:
        return PythonSandbox(source, settings, self.folder, self.bwrap)


def do(*lines: str) -> str:
    """A grader that does something, then returns `result`, 1.0 unless it is set."""
    body = "\n".join(f"    {line}" for text in lines for line in text.splitlines())
    return f"import os, sys\ndef grade(sample, item):\n    result = 1.0\n{body}\n    return result\n"


def outcome(source: str, place: Place, settings: GradingSettings = LIMITS, **item: Any) -> float | str:
    with place.sandbox(source, settings) as sandbox:
        assert processes_of(place.folder), "the way to find its processes works"
        try:
            return sandbox.grade({"output_text": "12 sacks"}, item)
        except NotGraded as error:
            return str(error)
