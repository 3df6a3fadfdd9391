"""What users ask for beside runs: schedules, sweeps, webhooks, and collections of garbage."""

import base64
import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from longshore.fields import Artifact, Frozen, Name, pattern
from longshore.training import SessionRun
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.runs.dataset_runs import DatasetSource
from shared.runs.requests import RLRun, Run, RunId, Tenant
from shared.runs.start import AnyStart
from shared.storage.paths import content_key

# --- Requests and reports of garbage collection ---


class GarbageRequest(Frozen):
    """`is_dry`: only report what would be deleted."""

    is_dry: bool = True


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


# --- Schedules: runs that start at set times ---

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


# --- Sweeps: runs that differ in a few fields; the best one is published ---
#
# A sweep's decisions depend on its trials' metrics in the order of the trials' numbers, never on the order in which
# runs end, so a service that was killed makes the same decisions again.

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
        description="the metric at a run's last step; if absent, eval_loss, or an rl run's reward",
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
        if isinstance(self.run, RLRun):
            held_out = self.run.rollouts.held_out if self.run.rollouts else None
            return held_out.every_steps or 0 if held_out else None
        assert not isinstance(self.run, SessionRun)
        return self.run.eval_every if self.run.eval_dataset is not None else None

    @property
    def num_trials(self) -> int:
        combinations = math.prod(len(space.ends) for space in self.parameters.values())
        return min(self.trials or combinations, combinations) if self.sampler == "grid" else self.trials or 0

    @property
    def measured(self) -> str:
        """The metric that ranks the trials."""
        return self.metric or ("eval_reward_mean" if self.run.kind == "rl" else "eval_loss")

    @property
    def maximizes(self) -> bool:
        looks_better_high = "reward" in self.measured or "accuracy" in self.measured
        return looks_better_high if self.direction is None else self.direction == "maximize"


class SweepRecord(Frozen):
    """The record of an accepted sweep. Its trials have run records of their own, whose source holds their number."""

    schema_version: Literal[1] = 1
    sweep_id: SweepId
    tenant: Tenant
    owner: str | None = None
    sweep: Sweep
    created_at: float

    def trial_id(self, number: int) -> str:
        """Return a trial's run id, of the service's form: ids sort by time of the sweep and number of the trial."""
        chance = content_key(self.sweep_id, str(number))[:6]
        return f"{self.sweep.run.kind}-{int(self.created_at * 1000) + number:011x}{chance}"


class SweepRef(Frozen):
    """The input of a sweep's workflow: everything else is in its record."""

    tenant: Tenant
    sweep_id: SweepId


class BestRequest(Frozen):
    """A request to publish the best trial's adapter or model again, as a version of the sweep's name."""

    tenant: Tenant
    name: Name
    run_id: RunId
    kind: Literal["adapters", "models"]
    artifact: Artifact


class Report(NamedTuple):
    """A trial's metric after a step."""

    step: int
    value: float


class SweepEnd(Frozen):
    """The recorded end of a sweep."""

    state: Literal["succeeded", "failed", "cancelled"]
    pruned: dict[int, Report] = Field(default_factory=dict, description="reports of pruned trials, by trial number")
    problem: str | None = None
    adapter: str | None = Field(default=None, description="URI of the published adapter, or model after `full`")
    version: int | None = None
    ended_at: float


class SweepTurn(Frozen):
    """The result of advancing a sweep: its end, once all trials have ended, and what to publish before that."""

    end: SweepEnd | None = None
    best: BestRequest | None = None


class SweepEnding(SweepRef):
    """A request to record a sweep's end."""

    end: SweepEnd


class Reports(NamedTuple):
    """A trial's metric by step so far, and whether its run has ended."""

    by_step: Mapping[int, float]
    has_ended: bool


def grid_values(sweep: Sweep, number: int) -> Values:
    """Return one combination of a grid. The last parameter changes first, as in nested loops."""
    found: Values = {}
    for path, space in reversed(sweep.parameters.items()):
        number, index = divmod(number, len(space.ends))
        found[path] = space.ends[index]
    return {path: found[path] for path in sweep.parameters}


def with_values(run: Run, values: Mapping[str, JsonValue]) -> Run:
    """Return a run with these values in its fields, validated by the run's model.

    Raises:
        InvalidInput: at `parameters.PATH`: there is no such field, or the run's model refuses the values.
    """
    tops = {path.partition(".")[0] for path in values}
    # Without a `trainable`, an adapter named by `model` gives its shape.
    fields: Any = run.model_dump(mode="json", exclude={"trainable"} - run.model_fields_set - tops)
    for path, value in values.items():
        *above, last = path.split(".")
        place = fields
        for part in above:
            place = place.get(part)
            if not isinstance(place, dict):
                raise InvalidInput(f"there is no field {part} in the run, or it is not set", f"parameters.{path}")
        place[last] = value
    try:
        return type(run).model_validate(fields)
    except ValidationError as error:
        loc = [str(part) for part in error.errors(include_url=False)[0]["loc"]]
        named = next((path for path in values if path.split(".") == [p for p in loc if p in path.split(".")]), None)
        shown = ", ".join(f"{path}={json.dumps(value)[:64]}" for path, value in values.items())
        place = f"parameters.{named}" if named else "parameters"
        raise InvalidInput(f"with {shown}: {first_rule(error)}", place) from None


def candidates(sweep: Sweep) -> Iterator[Values]:
    """Yield the values that are validated by the run's model before a sweep is accepted.

    For a grid: every combination. For other samplers: every choice and both ends of a range, with the first values of
    the other parameters; and the last values of all parameters together.
    """
    if sweep.sampler == "grid":
        yield from (grid_values(sweep, number) for number in range(sweep.num_trials))
        return
    first: Values = {path: space.ends[0] for path, space in sweep.parameters.items()}
    yield first
    yield from ({**first, path: end} for path, space in sweep.parameters.items() for end in space.ends[1:])
    yield {path: space.ends[-1] for path, space in sweep.parameters.items()}


def pruned(trials: Sequence[Reports], halving: Halving, maximizes: bool) -> dict[int, Report]:
    """Return the trials that successive halving ends, by number, each with the report that decided it.

    The rule is that of Optuna's SuccessiveHalvingPruner for trials that run one after another: at a rung a trial is
    compared with those of lower numbers. The decision waits until each of these has reached the rung, or never will.

    Args:
        trials: in order of their numbers.
    """
    rungs: list[list[float]] = []
    found: dict[int, Report] = {}
    undecided: float = math.inf  # the first rung that a trial of a lower number may still reach
    for number, trial in enumerate(trials):
        rung = 0
        while True:
            least = halving.first_step * halving.reduction**rung
            step = min((step for step in trial.by_step if step >= least), default=None)
            if step is None or rung >= undecided:
                undecided = undecided if step is None and trial.has_ended else min(undecided, rung)
                break
            value = trial.by_step[step]
            if rung == len(rungs):
                rungs.append([])
            if not math.isnan(value):
                rungs[rung].append(value)
            if math.isnan(value) or not _goes_on(value, rungs[rung], halving.reduction, maximizes):
                found[number] = Report(step, value)
                break
            rung += 1
    return found


def _goes_on(value: float, competing: list[float], reduction: int, maximizes: bool) -> bool:
    """True if a value is among the best 1/reduction of a rung; if that is less than one value, if it is the best."""
    ranked = sorted(competing, reverse=maximizes)
    least = ranked[max(0, len(ranked) // reduction - 1)]
    return value >= least if maximizes else value <= least


# --- Webhooks: a tenant's addresses, the notices on its runs that they get, and the deliveries ---

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
_SECRET_PREFIX = "whsec_"
_SECRET_BYTES = 32


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


class Webhook(Frozen):
    """The record of a webhook. Only here its secret is stored, unencrypted, since signing needs it."""

    schema_version: Literal[1] = 1
    webhook_id: WebhookId
    tenant: Tenant
    owner: str | None = Field(default=None, description="id of the API key that created it")
    url: WebhookUrl
    events: tuple[NoticeType, ...] = Field(default=(), description="only these events are sent; all if empty")
    enabled: bool = True
    secret: str = Field(repr=False, description="whsec_ and the key of the signatures in base64")
    previous_secret: str | None = Field(
        default=None, repr=False, description="the previous secret, which also signs for a while"
    )
    previous_until: float | None = Field(
        default=None, description="when the previous secret stops signing, in seconds since 1970"
    )
    created_at: float

    def wants(self, kind: str) -> bool:
        return self.enabled and (not self.events or kind in self.events)

    def keys(self, now: float) -> tuple[bytes, ...]:
        """Return the signing keys at a moment: the current secret's, then the previous one's while it is valid."""
        before = self.previous_secret if now < (self.previous_until or 0) else None
        return tuple(base64.b64decode(s.removeprefix(_SECRET_PREFIX)) for s in (self.secret, before) if s)


class Notice(Frozen):
    """A message to webhooks. It is small; clients get more from the API."""

    notice_id: NoticeId
    tenant: Tenant
    type: NoticeType
    created_at: float
    data: dict[str, JsonValue]

    def body(self) -> bytes:
        """Return the body, the same bytes at every attempt, with the fields that clients of OpenAI's webhooks read."""
        moment = datetime.fromtimestamp(self.created_at, UTC).isoformat(timespec="milliseconds")
        said = {
            "id": self.notice_id,
            "object": "event",
            "type": self.type,
            "created_at": int(self.created_at),
            "timestamp": moment.replace("+00:00", "Z"),
            "data": self.data,
        }
        return json.dumps(said, separators=(",", ":")).encode()


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


def new_secret() -> str:
    """Return a new key for a webhook's signatures: 256 random bits."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def new_notice_id() -> str:
    """Return milliseconds since 1970 in 11 hex digits, so that ids sort by time, and 12 random digits."""
    return f"evt-{int(time.time() * 1000):011x}{secrets.token_hex(6)}"


class WebhookRequest(Frozen):
    """A notice and its webhooks. Workflows may not read settings, so it also has the first retry's delay."""

    notice: Notice
    webhook_ids: tuple[WebhookId, ...]
    first_retry_s: float
