"""Sandboxes of python graders, and what this machine says where it cannot isolate."""

from pathlib import Path
from typing import Any

from activities.grading.open_grader import NotGraded, PythonSandbox
from activities.sandbox import calls
from activities.sandbox.calls import Server
from shared.settings import GradingSettings

LIMITS = GradingSettings(python_time_s=60, python_memory_bytes=256 << 20)
SHORT = LIMITS.model_copy(update={"python_time_s": 1.5})  # for what takes for ever
REPOSITORY = Path(__file__).parents[3]


REFUSAL = calls.CODE.start()[1]
"""Why this machine cannot isolate: what the product says of it."""


CAPABILITIES = """
def num_capabilities():
    import ctypes
    data = (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6)
    assert ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), data) == 0
    return sum(word.bit_count() for word in data)
"""


def do(*lines: str) -> str:
    """A grader that does something, then returns `result`, 1.0 unless it is set."""
    body = "\n".join(f"    {line}" for text in lines for line in text.splitlines())
    return f"import os, sys\ndef grade(sample, item):\n    result = 1.0\n{body}\n    return result\n"


def outcome(source: str, server: Server, settings: GradingSettings = LIMITS, **item: Any) -> float | str:
    try:
        return PythonSandbox(source, settings).grade({"output_text": "12 sacks"}, item)
    except NotGraded as error:
        return str(error)
