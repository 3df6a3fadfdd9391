"""Views of schedules in the API, and the request of a backfill."""

from typing import Self

from pydantic import Field, model_validator

from longshore.fields import Frozen
from shared.automation import Action, Overlap, ScheduledRun
from shared.errors import InvalidInput

_MOST_BACKFILLED_S = 31 * 86_400
_MOST_BACKFILLED = 200


class ActionView(Action):
    """One action of a schedule, and when it began. `skipped` and `failed` give the reason why there is no run."""

    at: float


class ScheduleView(Frozen):
    """A schedule and its counts. Times are seconds since 1970."""

    scheduled: ScheduledRun
    created_at: float
    paused: bool
    note: str | None = None
    next_times: tuple[float, ...] = ()
    num_actions: int = Field(default=0, description="how many times it acted")
    num_overlapped: int = Field(default=0, description="times skipped because the previous run was still active")
    num_missed: int = Field(default=0, description="times skipped because they were missed by more than catch_up_s")
    actions: tuple[ActionView, ...] = Field(
        default=(), description="newest first, as far back as Temporal keeps them; not in lists"
    )


class Backfill(Frozen):
    """Times to act at, in seconds since 1970, though they have passed."""

    begin: float = Field(ge=0, lt=2**40)
    end: float = Field(ge=0, lt=2**40)
    overlap: Overlap = "buffer_all"

    @model_validator(mode="after")
    def _a_span(self) -> Self:
        if not 0 <= self.end - self.begin <= _MOST_BACKFILLED_S:
            raise ValueError("end is not before begin, and at most 31 days after it")
        return self

    def check_times(self, scheduled: ScheduledRun) -> None:
        """Raises InvalidInput when there may be more times in the span than one request may act at."""
        span_s = self.end - self.begin
        num_times = span_s / (scheduled.every_s or _least_s(scheduled.cron or "")) + 1
        if num_times > _MOST_BACKFILLED:
            raise InvalidInput(
                f"up to {int(num_times):,} times; one backfill acts at {_MOST_BACKFILLED} at most", "end"
            )


def _least_s(cron: str) -> float:
    """A lower bound in seconds for the mean distance between the times of a cron line."""
    match cron.split():
        case ["@hourly"]:
            return 3600.0
        case [minutes, hours, *_]:
            return 86_400.0 / (_num_values(minutes, 60) * _num_values(hours, 24))
        case _:
            return 86_400.0


def _num_values(field: str, most: int) -> int:
    """The number of values of a cron field: exact for numbers, lists, ranges and steps; `most` for the rest."""
    total = 0
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            num = most
        elif first.isdecimal() and (last.isdecimal() or not last):
            num = int(last) - int(first) + 1 if last else (most if step else 1)
        else:
            return most
        total += -(-num // int(step)) if step.isdecimal() and int(step) else num
    return min(most, max(1, total))
