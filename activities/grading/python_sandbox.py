"""Grades samples by python graders, which are untrusted code: each sample in a separate process in a sandbox."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from activities.sandbox.calls import CODE, CodeProcess, Limits, Server
from activities.sandbox.child import sign
from longshore.grading import SampleGrade
from shared.errors import InvalidInput
from shared.settings import GradingSettings

_MAX_SAMPLE_BYTES = 32 << 20
_MAX_ANSWER_BYTES = 64 << 10
_OWN_MAKING = "the grader wrote an answer of its own making"


class NotGraded(Exception):
    """A sample gets no grade; the message is the reason."""


def attempt(grade: Callable[[], float]) -> SampleGrade:
    """Call `grade`, and return its grade, or the reason of its NotGraded. The caller fills in the sample's place."""
    sign()
    try:
        return SampleGrade(place="", grade=grade())
    except NotGraded as error:
        return SampleGrade(place="", grade=None, error=str(error))


class PythonSandbox:
    """A grader's source, which grades each sample in a separate sandbox."""

    def __init__(self, source: str, settings: GradingSettings, server: Server | None = None) -> None:
        """`server`: of the sandbox, unless it is this process's."""
        self._source = source
        self._server = server
        time_s = settings.python_time_s
        self._limits = Limits(
            settings.python_memory_bytes, math.ceil(time_s) + 1, time_s, answer_bytes=_MAX_ANSWER_BYTES
        )

    def check(self) -> None:
        """Load the source. Raises NotGraded when it cannot be, or defines no `grade`; InvalidInput as `grade`."""
        self._ask(None)

    def grade(self, sample: Any, item: Any) -> float:
        """The grade of one sample, finite. Raises NotGraded with the reason when there is none.

        Raises InvalidInput: this system refuses isolation.
        """
        match self._ask({"sample": sample, "item": item}):
            case {"grade": float() as grade} if math.isfinite(grade):
                return grade
        raise NotGraded(_OWN_MAKING)

    def _ask(self, request: Any) -> Any:
        frame = json.dumps([self._source, request]).encode()
        if len(frame) > _MAX_SAMPLE_BYTES:
            raise NotGraded(f"the sample has {len(frame):,} bytes; a python grader takes up to {_MAX_SAMPLE_BYTES:,}")
        process = CodeProcess("grade", frame, self._limits, self._server)
        try:
            answer = process.answer()
        except (InvalidInput, RuntimeError, OSError) as error:
            raise NotGraded(str(error)[:4000]) from error
        finally:
            process.close()
        with suppress(ValueError, RecursionError):
            match json.loads(answer):
                case {"failed": str(reason)}:
                    raise NotGraded(reason[:4000])
                case {"checked": True} | {"grade": _} as parsed:
                    return parsed
        raise NotGraded(_OWN_MAKING)


def isolation_in_use() -> str:
    """Return how graders are isolated on this machine: `bubblewrap`, `namespaces`, or why they are not."""
    isolation, refusal = CODE.start()
    return refusal or isolation


if __name__ == "__main__":  # for `longshore doctor`
    print(isolation_in_use())
