"""The outcome of grading one sample: a number, or the reason why there is none."""

from collections.abc import Callable
from dataclasses import dataclass, field

from activities.confined.fork_server import sign


class NotGraded(Exception):
    """A sample that got no grade, and why."""


@dataclass(frozen=True)
class Outcome:
    """`parts`: by name, the grades that a multi grader made its own of."""

    grade: float | None
    error: str | None = None
    parts: dict[str, float | None] = field(default_factory=dict)


def attempt(grade: Callable[[], float]) -> Outcome:
    """The outcome of grading one sample."""
    sign()
    try:
        return Outcome(grade())
    except NotGraded as error:
        return Outcome(None, str(error))
