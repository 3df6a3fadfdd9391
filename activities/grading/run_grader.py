"""Runs graders and environments, which are untrusted code. Called in a code process (activities/sandbox)."""

import importlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from activities.sandbox.child import ask

# Loaded before a child is forked, so that graders which use them start at once.
for _name in (
    "ast collections datetime decimal difflib fractions functools itertools json math operator re statistics string "
    "textwrap unicodedata"
).split():
    importlib.import_module(_name)
_MAX_ERROR_CHARS = 2_000
_SOURCE = "<source>"


def run_grader(source: str, given: Any) -> dict[str, Any]:
    """Grade a sample: `{"sample": …, "item": …}`; or only load the source, if that is None.

    Returns `{"grade": number}`, `{"failed": reason}` or `{"checked": true}`.
    """
    _forget_packages()
    try:
        grade = _loaded(source, "grader").get("grade")
        if not callable(grade):
            return {"failed": "the source does not define grade(sample, item)"}
        return {"checked": True} if given is None else _checked(grade(given["sample"], given["item"]))
    except MemoryError:
        return {"failed": "took more memory than it may"}
    except BaseException as error:
        return {"failed": _described(error)}


class _TooLong(BaseException):
    """A step has had its processor time."""


def run_environment(source: str, item: Any, seed: int, step_cpu_s: float) -> Iterator[dict[str, Any]]:
    """Play an episode: reset for a row, then a step for each answer that is asked for.

    Yields `{"said": what the environment returned}`. Or yields `{"failed": reason}` and ends, with `is_limit` if the
    environment took too much time or memory. A question is `["step", answer]` or `["score"]`; without a `score`
    the latter yields None.

    Args:
        step_cpu_s: seconds of processor time of one call. They do not depend on what else the machine does.
    """
    _forget_packages()
    signal.signal(signal.SIGPROF, _alarm)
    environment: Any = None

    def begin() -> Any:
        nonlocal environment
        environment = _loaded(source, "environment")["Environment"]()
        return environment.reset(item, seed)

    yield (said := _said(begin, step_cpu_s))
    while "failed" not in said:
        match json.loads(ask()):
            case ["step", answer]:
                said = _said(lambda given=answer: environment.step(given), step_cpu_s)  # type: ignore[misc]
            case _:
                said = _said(lambda: environment.score() if hasattr(environment, "score") else None, step_cpu_s)
        yield said


def _alarm(*_: object) -> None:
    raise _TooLong


def _said(call: Callable[[], Any], cpu_s: float) -> dict[str, Any]:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            said = call()
            json.dumps(said, allow_nan=False)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {"said": said}
    except MemoryError:
        return {"failed": "it took more memory than it may", "is_limit": True}
    except _TooLong:
        return {"failed": f"it took more than {cpu_s:g} s of processor time", "is_limit": True}
    except BaseException as error:
        return {"failed": _described(error)}


def _loaded(source: str, name: str) -> dict[str, Any]:
    """Run a source as a module of this name. Returns what it defines."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, _SOURCE, "exec", dont_inherit=True), names)
    return names


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
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _SOURCE]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = str(error)
    except BaseException:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS] + where
