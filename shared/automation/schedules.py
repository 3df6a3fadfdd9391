"""Schedules: runs that start at set times."""

import hashlib
import json
import re
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, model_validator

from longshore.fields import Artifact, Frozen, Name
from longshore.training import SessionRun
from shared.runs.requests import RLRun, Run, RunId, Tenant
from shared.runs.sources import DatasetSource
from shared.runs.start import AnyStart

# The memo of a schedule's workflow that holds its Action.
ACTION_MEMO = "action"
_NAMED = ("@hourly", "@daily", "@weekly", "@monthly", "@yearly")
Overlap = Literal["skip", "buffer_one", "buffer_all", "allow_all", "cancel_other"]


def _five_fields(cron: str) -> str:
    if cron not in _NAMED and (len(cron.split()) != 5 or not re.fullmatch(r"[0-9A-Za-z*/,?#L \t-]+", cron)):
        raise ValueError(f"five fields (minute hour day month weekday), or one of {', '.join(_NAMED)}")
    return cron


def _known_zone(name: str) -> str:
    if name == "UTC":  # known even if the system has no time zone database
        return name
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"no time zone is called {name!r}") from error
    return name


class ScheduledRun(Frozen):
    """A schedule, as a user requests it: either `cron` or `every_s`."""

    name: Name
    run: Run
    cron: Annotated[str, Field(max_length=128), AfterValidator(_five_fields)] | None = None
    every_s: int | None = Field(default=None, ge=60, le=366 * 86_400)
    timezone: Annotated[str, Field(max_length=64), AfterValidator(_known_zone)] = Field(
        default="UTC", description="the time zone of cron's hours"
    )
    overlap: Overlap = Field(default="skip", description="if the previous run has not ended")
    catch_up_s: int = Field(
        default=600,
        ge=10,
        le=30 * 86_400,
        description="a time missed by more seconds, such as in an outage, is skipped",
    )
    continues: bool = Field(
        default=False, description="train from the last published version of the run's name, if any"
    )
    even_unchanged: bool = Field(
        default=False, description="also start if the data has not changed since the last run and that run did not fail"
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if (self.cron is None) == (self.every_s is None):
            raise ValueError("give exactly one of cron and every_s")
        if self.cron is None and self.timezone != "UTC":
            raise ValueError("timezone goes with cron: every_s counts from 1970")
        if isinstance(self.run, SessionRun):
            raise ValueError("a session cannot be scheduled: no client would send its commands")
        if isinstance(self.run, RLRun) and self.run.rollouts is None:
            raise ValueError("a scheduled rl run needs rollouts: no client would send its groups")
        if self.continues and (self.run.name is None or self.run.trainable.kind == "full"):
            raise ValueError("continues goes with a run that has a name and trains a lora")
        return self


class ScheduleRecord(Frozen):
    """The record of an accepted schedule. If Temporal has lost the schedule, it is made again from this record.

    `salt`: keeps its id from telling its name to whoever guesses it.
    """

    schema_version: Literal[1] = 1
    tenant: Tenant
    owner: str | None = None
    scheduled: ScheduledRun
    created_at: float
    paused: bool = False
    note: str | None = None
    salt: str

    @property
    def temporal_id(self) -> str:
        """The schedule's id in Temporal: a hash, since users choose the names and Temporal's ids are not encrypted."""
        told = [self.tenant, self.scheduled.name, self.created_at, self.salt]
        return f"{self.tenant}/{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]}"


class ScheduledAction(Frozen):
    """The input of the workflow that a schedule starts."""

    tenant: Tenant
    owner: str | None = None
    scheduled: ScheduledRun


class Action(Frozen):
    """The outcome of one action of a schedule. `skipped` and `failed`: the reason why there is no run."""

    state: Literal["preparing", "started", "skipped", "failed"] = "preparing"
    run_id: RunId | None = None
    reason: str | None = None


class AcceptRequest(Frozen):
    """Asks the service to accept a run of a schedule, given the data that it would train on."""

    action: ScheduledAction
    run_id: RunId
    dataset: Artifact


class Decision(Frozen):
    """The answer to an AcceptRequest: the workflow and input of the run to start; or why there is none."""

    workflow: str = ""
    start: AnyStart | None = None
    reason: str | None = None


class LastScheduled(Frozen):
    """The last run that a schedule made. `dataset_sha256`: of its dataset's manifest."""

    run_id: RunId
    dataset_sha256: str


def data_of(run: Run) -> DatasetSource:
    """Return a run's data. A scheduled run is skipped if its data has not changed since the schedule's last run."""
    if isinstance(run, RLRun):
        assert run.rollouts is not None
        return run.rollouts.prompts
    assert not isinstance(run, SessionRun)
    return run.dataset
