"""An attempt at grading one sample: a grade, or the reason why there is none."""

from collections.abc import Callable

from activities.confined.fork_server import sign
from shared.grading.graders import SampleGrade


class NotGraded(Exception):
    """A sample that got no grade, and why."""


def attempt(grade: Callable[[], float]) -> SampleGrade:
    """Grade one sample. Whoever knows its place adds that."""
    sign()
    try:
        return SampleGrade(place="", grade=grade())
    except NotGraded as error:
        return SampleGrade(place="", grade=None, error=str(error))
