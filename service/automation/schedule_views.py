"""What the API shows of schedules, and what is asked of one."""

from typing import Self

from pydantic import Field, model_validator

from shared.models import Frozen
from shared.schedules import Action, Overlap, ScheduledRun

_MOST_BACKFILLED_S = 31 * 86_400


class ActionView(Action):
    """What a schedule did, and when it began to. `skipped` and `failed` say why there is no run."""

    at: float


class ScheduleView(Frozen):
    """A schedule as it stands. Times are seconds since 1970."""

    scheduled: ScheduledRun
    created_at: float
    paused: bool
    note: str | None = None
    next_times: tuple[float, ...] = ()
    num_actions: int = Field(default=0, description="times that it acted")
    num_overlapped: int = Field(default=0, description="times left out because the run before was going on")
    num_missed: int = Field(default=0, description="times left out because they were missed by more than catch_up_s")
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
