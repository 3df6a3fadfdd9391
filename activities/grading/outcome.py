"""The outcome of grading one sample: a grade, or the reason why there is none."""

from collections.abc import Callable

from activities.confined.fork_server import sign
from shared.grading.graders import SampleGrade


class NotGraded(Exception):
    """A sample gets no grade; the message is the reason."""


def attempt(grade: Callable[[], float]) -> SampleGrade:
    """Call `grade`, and return its grade, or the reason of its NotGraded. The caller fills in the sample's place."""
    sign()
    try:
        return SampleGrade(place="", grade=grade())
    except NotGraded as error:
        return SampleGrade(place="", grade=None, error=str(error))
