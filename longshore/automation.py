"""Schedules, sweeps, webhooks and garbage collection: what users ask for beside runs, and what the API shows of it."""

import json
import math
import re
from typing import Annotated, Literal, NamedTuple, Self, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, AliasChoices, Field, JsonValue, model_validator

from longshore.dataset_runs import HELD_OUT_METRICS
from longshore.fields import Frozen, Name, pattern
from longshore.runs import RLRun, Run, RunId, Tenant
from longshore.training import SessionRun, Watched, more_is_better
from longshore.views import State


class Freed(Frozen):
    """What was deleted, or would be, of one tenant and one kind. Data that several tenants share has no tenant here."""

    what: str = Field(description="checkpoints, data, samples, logs, sessions, models, or removed (removed runs)")
    tenant: str | None = None
    num_units: int = Field(description="runs, or artifacts that runs share")
    num_objects: int
    num_bytes: int


class GarbageReport(Frozen):
    """The report of a collection."""

    is_dry: bool
    began: float
    took_s: float
    num_runs: int = Field(description="recorded runs")
    num_going_on: int
    freed: tuple[Freed, ...] = ()
    num_withdrawn: int = Field(default=0, description="units kept because the second check found a run that uses them")
    measured: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="measured bytes that count for each tenant's quota, by kind"
    )


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
    cron: Annotated[str, Field(max_length=128), AfterValidator(_five_fields)] | None = Field(
        default=None, description='times as in "0 2 * * *": minute, hour, day, month, weekday'
    )
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


class Action(Frozen):
    """The outcome of one action of a schedule. `skipped` and `failed`: the reason why there is no run."""

    state: Literal["preparing", "started", "skipped", "failed"] = "preparing"
    run_id: RunId | None = None
    reason: str | None = None


MAX_TRIALS = 256
_MAX_VALUES = 256
_NOT_SWEPT = ("kind", "schema_version", "name", "algorithm")
SweepId = Annotated[str, pattern(r"^sweep-[0-9a-f]{17}$", "a sweep's id is sweep- and 17 hexadecimal digits")]
FieldPath = Annotated[
    str,
    pattern(
        r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+){0,4}$", "a field of the run, such as learning_rate or trainable.rank",
        max_length=128,
    ),
]  # fmt: skip
Values = dict[FieldPath, JsonValue]


class Space(Frozen):
    """The values of one field: choices, or all numbers from min to max."""

    choices: tuple[JsonValue, ...] | None = Field(default=None, min_length=1, max_length=64)
    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)
    log: bool = Field(default=False, description="for a range: sampled on a logarithmic scale")
    integer: bool = Field(default=False, description="for a range: only whole numbers")

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if self.choices is not None:
            if self.min is not None or self.max is not None or self.log or self.integer:
                raise ValueError("give choices, or min and max: log and integer go with these")
            if len({json.dumps(each, sort_keys=True) for each in self.choices}) < len(self.choices):
                raise ValueError("choices: one is there twice")
            words = json.dumps(self.choices).replace('"', " ").split()
            if any("?" in word.partition("://")[2] for word in words):
                raise ValueError("choices: a URI with a query may hold a secret, and these are shown: upload the file")
            return self
        if self.min is None or self.max is None or self.min >= self.max:
            raise ValueError("give choices, or min and a greater max")
        if self.log and self.min <= 0:
            raise ValueError("log: min must be greater than 0")
        if self.integer and not (self.min.is_integer() and self.max.is_integer()):
            raise ValueError("integer: min and max must be whole numbers")
        return self

    @property
    def ends(self) -> tuple[JsonValue, ...]:
        """All choices; for a range its smallest and its largest number."""
        if self.choices is not None:
            return self.choices
        assert self.min is not None and self.max is not None
        return (int(self.min), int(self.max)) if self.integer else (self.min, self.max)


class Halving(Frozen):
    """Successive halving, asynchronous (arXiv:1810.05934): at each rung the best 1/reduction of the trials continue."""

    first_step: int = Field(ge=1, le=10_000_000, description="the first rung: a trial's first report from this step on")
    reduction: int = Field(default=3, ge=2, le=16, description="each rung's step is this many times the one before")


class Sweep(Frozen):
    """A sweep, as a user requests it: trials are runs like `run`, with values from `parameters` in their fields."""

    name: Name = Field(description="the name under which the best trial is published")
    run: Run
    parameters: dict[FieldPath, Space] = Field(min_length=1, max_length=16)
    sampler: Literal["grid", "random", "tpe"] = Field(
        default="tpe", description="every combination of choices; at random; or Optuna's TPE, which learns from trials"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the sampler")
    trials: int | None = Field(default=None, ge=1, le=MAX_TRIALS, description="for a grid, all combinations if absent")
    parallel: int = Field(default=4, ge=1, le=64, description="trials at a time")
    metric: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="the metric at a run's last step; if absent, eval_loss, or an rl run's reward; of runs that keep "
        "the best, best_eval_loss and so on",
    )
    direction: Literal["minimize", "maximize"] | None = Field(
        default=None, description="if absent, maximize for a metric with reward or accuracy in its name, else minimize"
    )
    halving: Halving | None = None

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if isinstance(self.run, SessionRun) or (isinstance(self.run, RLRun) and self.run.rollouts is None):
            raise ValueError("run: a trial cannot be a session, or an rl run that waits for groups")
        if self.run.name is not None:
            raise ValueError(
                "run.name: trials are published under their ids, and the best as the sweep's name: drop it"
            )
        if banned := next((path for path in self.parameters if path in _NOT_SWEPT), None):
            raise ValueError(f"parameters.{banned}: this cannot differ between trials")
        if sum(len(space.ends) for space in self.parameters.values()) > _MAX_VALUES:
            raise ValueError(f"parameters: at most {_MAX_VALUES} choices in all")
        if self.sampler == "grid":
            if ranged := next((path for path, space in self.parameters.items() if space.choices is None), None):
                raise ValueError(f"parameters.{ranged}: a grid is of choices, and this is a range")
            if self.num_trials > MAX_TRIALS:
                raise ValueError(f"{self.num_trials} combinations, and a sweep has at most {MAX_TRIALS}: give trials")
        elif self.trials is None:
            raise ValueError("trials is missing: only a grid can do without")
        return self._has_its_metric()

    def _has_its_metric(self) -> Self:
        every = self._evaluated_every
        if every is None and self.measured.startswith("eval_"):
            raise ValueError("metric: the run evaluates nothing: give it held-out data, or name a metric of its steps")
        if every == 0 and self.halving is not None and self.measured.startswith("eval_"):
            raise ValueError("halving: the run evaluates at its end alone: say every how many steps it is to do so")
        return self

    @property
    def _evaluated_every(self) -> int | None:
        """Steps from one evaluation of a run to the next; 0: only at its end; None: never."""
        run = self.run
        assert not isinstance(run, SessionRun)
        held_out = run.rollouts.held_out if run.rollouts is not None else None
        is_of_rows = not isinstance(run, RLRun) and bool(run.evaluations)
        if held_out is not None and (not is_of_rows or self.measured.removeprefix("best_") in held_out.metric_names):
            return held_out.every_steps
        return run.eval_every if not isinstance(run, RLRun) and is_of_rows else None

    @property
    def num_trials(self) -> int:
        combinations = math.prod(len(space.ends) for space in self.parameters.values())
        return min(self.trials or combinations, combinations) if self.sampler == "grid" else self.trials or 0

    @property
    def measured(self) -> str:
        """The metric that ranks the trials: by default that of a run's last evaluation, or of the best one that it
        publishes. (Trials that are halved are compared at their steps.)
        """
        if self.metric is not None:
            return self.metric
        if self.halving is None and (kept := self._watched and self._watched.keeps_by):
            return f"best_{kept}"
        return self._watched.usual_metric if self._watched is not None else HELD_OUT_METRICS[0]

    @property
    def _watched(self) -> Watched | None:
        if isinstance(self.run, RLRun):
            return self.run.held_out
        return self.run if isinstance(self.run, Watched) else None

    @property
    def maximizes(self) -> bool:
        return more_is_better(self.measured) if self.direction is None else self.direction == "maximize"


class SweepRecord(Frozen):
    """The record of an accepted sweep. Its trials have run records of their own, whose source holds their number."""

    schema_version: Literal[1] = 1
    sweep_id: SweepId
    tenant: Tenant
    owner: str | None = None
    sweep: Sweep
    created_at: float


class Report(NamedTuple):
    """A trial's metric after a step."""

    step: int
    value: float


WebhookId = Annotated[str, Field(pattern=r"^wh-[0-9a-f]{24}$")]
NoticeId = Annotated[str, Field(pattern=r"^evt-[0-9a-f]{23}$")]
NoticeType = Literal[
    "run.created",
    "run.resumed",
    "run.paused",
    "run.succeeded",
    "run.failed",
    "run.cancelled",
    "fine_tuning.job.succeeded",
    "fine_tuning.job.failed",
    "fine_tuning.job.cancelled",
    "ping",
]
NOTICE_TYPES: tuple[NoticeType, ...] = get_args(NoticeType)


def _plain_http(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a webhook's url is http://host/path or https://host/path")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a url may not carry a user or password: check the signature instead")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("a url is written in ASCII without spaces: escape other characters")
    return url


WebhookUrl = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(_plain_http)]


class Attempt(Frozen):
    """One attempt to deliver. `status`: the receiver's HTTP status; None without an answer."""

    at: float
    status: int | None = None
    problem: str | None = None
    retry_after_s: float | None = Field(default=None, description="seconds that the receiver asked to wait")


class Delivery(Frozen):
    """The delivery of one notice to one webhook. `attempts`: only the last ones."""

    notice_id: NoticeId
    type: NoticeType
    run_id: str | None = None
    created_at: float
    state: Literal["pending", "delivered", "failed"] = "pending"
    num_attempts: int = 0
    attempts: tuple[Attempt, ...] = ()


_MOST_BACKFILLED_S = 31 * 86_400


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


class TrialView(Frozen):
    """A trial. `pruned`: successive halving ended it, or would have.

    `value`: the sweep's metric, as the run reported it last; of a pruned one as it was compared.
    """

    number: int
    run_id: RunId
    values: Values
    state: State | Literal["pruned"]
    step: int = 0
    value: float | None = None
    gpu_seconds: float = 0.0
    problem: str | None = None


class SweepView(SweepRecord):
    """A sweep. Times are seconds since 1970."""

    state: Literal["running", "succeeded", "failed", "cancelled"]
    ended_at: float | None = None
    problem: str | None = None
    metric: str
    direction: Literal["minimize", "maximize"]
    num_trials: int
    trials: tuple[TrialView, ...] = Field(description="trials that have begun, in order")
    best: int | None = Field(default=None, description="the number of the best trial so far that succeeded")
    adapter: str | None = Field(default=None, description="URI of the published model of the best trial")
    version: int | None = Field(default=None, description="the published version, under the sweep's name")


class WebhookChoice(Frozen):
    """A webhook, as a user asks for it."""

    url: WebhookUrl
    events: tuple[NoticeType, ...] = Field(default=(), description="only these events are sent; all if empty")


class WebhookChange(Frozen):
    """The fields to change; the rest stays."""

    url: WebhookUrl | None = None
    events: tuple[NoticeType, ...] | None = None
    enabled: bool | None = None


_OVERLAP_S = 24 * 3600.0


class Rotation(Frozen):
    """How long the old secret is still used together with the new one."""

    overlap_s: float = Field(
        default=_OVERLAP_S, ge=0, le=7 * _OVERLAP_S, description="how long the old secret signs with the new one"
    )


class WebhookView(Frozen):
    """A webhook without its secret."""

    id: WebhookId = Field(validation_alias=AliasChoices("id", "webhook_id"))
    url: str
    events: tuple[NoticeType, ...]
    enabled: bool
    created_at: float
    previous_until: float | None = Field(default=None, description="the previous secret also signs until this time")

    @classmethod
    def of(cls, webhook: object) -> Self:
        """Return the view of a webhook's record."""
        return cls.model_validate(webhook, from_attributes=True)


class NewWebhook(WebhookView):
    """A webhook with its new secret, which no other answer shows."""

    secret: str = Field(repr=False, description="secret to verify signatures with (standardwebhooks.com)")


class Pinged(Frozen):
    """The ping that was sent; `GET …/deliveries` shows its outcome."""

    notice_id: NoticeId


class GarbageView(Frozen):
    """The status of a collection. `report`: set when it is done."""

    state: Literal["running", "done"]
    report: GarbageReport | None = None
