"""Runs a python grader, which is untrusted code, on one sample. Called in a code process (activities/sandbox)."""

import importlib
import os
import random
import sys
import traceback
from math import isfinite
from typing import Any

# Loaded before a child is forked, so that graders which use them start at once.
for _name in (
    "ast collections datetime decimal difflib fractions functools itertools json math operator re statistics string "
    "textwrap unicodedata"
).split():
    importlib.import_module(_name)
_MAX_ERROR_CHARS = 2_000


def run_grader(source: str, given: Any) -> dict[str, Any]:
    """Grade a sample: `{"sample": …, "item": …}`; or only load the source, if that is None.

    Returns `{"grade": number}`, `{"failed": reason}` or `{"checked": true}`.
    """
    _forget_packages()
    try:
        names: dict[str, Any] = {"__name__": "grader"}
        exec(compile(source, "<grader>", "exec", dont_inherit=True), names)
        grade = names.get("grade")
        if not callable(grade):
            return {"failed": "the source does not define grade(sample, item)"}
        return {"checked": True} if given is None else _checked(grade(given["sample"], given["item"]))
    except MemoryError:
        return {"failed": "took more memory than it may"}
    except BaseException as error:
        return {"failed": _described(error)}


def _forget_packages() -> None:
    """Leave the standard library alone, without any variable, and with the same chance for every sample."""
    os.environ.clear()
    standard = os.__file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry.startswith(standard) and "packages" not in entry]
    sys.path_importer_cache.clear()
    for name in list(sys.modules):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "__main__"}:
            del sys.modules[name]
    random.seed(0)


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, int | float):
        return {"failed": f"grade returned a {type(value).__name__}, not a number"}
    try:
        number = float(value)
    except OverflowError:
        return {"failed": "grade returned an integer beyond what a float holds"}
    if not isfinite(number):
        return {"failed": f"grade returned {number}, which is not finite"}
    return {"grade": number}


def _described(error: BaseException) -> str:
    """Describe an exception, with the line of the grader that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<grader>"]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = str(error)
    except BaseException:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS] + where
