"""What users ask for beside runs: schedules, sweeps, webhooks, and collections of garbage."""

import base64
import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from pydantic import Field, JsonValue, ValidationError

from longshore.automation import (
    Halving,
    NoticeId,
    NoticeType,
    Report,
    ScheduledRun,
    Sweep,
    SweepId,
    SweepRecord,
    Values,
    WebhookId,
    WebhookUrl,
)
from longshore.dataset_runs import DatasetSource, sources_by_split
from longshore.fields import Artifact, Frozen, Name, added
from longshore.runs import RLRun, Run, RunId, Tenant
from longshore.training import SessionRun
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.runs.start import AnyStart
from shared.storage.paths import content_key

# --- Requests and reports of garbage collection ---


class GarbageRequest(Frozen):
    """`is_dry`: only report what would be deleted."""

    is_dry: bool = True


# --- Schedules: runs that start at set times ---

# The memo of a schedule's workflow that holds its Action.
ACTION_MEMO = "action"


class LastScheduled(Frozen):
    """The last run that a schedule made. `dataset_sha256`: `AcceptRequest.data_sha256`."""

    run_id: RunId
    dataset_sha256: str


class ScheduleRecord(Frozen):
    """The record of an accepted schedule. If Temporal has lost the schedule, it is made again from this record.

    `salt`: keeps its id from telling its name to whoever guesses it. `last`: its last run.
    """

    schema_version: Literal[1] = 1
    tenant: Tenant
    owner: str | None = None
    scheduled: ScheduledRun
    created_at: float
    paused: bool = False
    note: str | None = None
    salt: str
    last: LastScheduled | None = None
    is_deleted: bool = Field(default=False, description="Temporal's schedule is still to be deleted")

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


class AcceptRequest(Frozen):
    """Asks the service to accept a run of a schedule, given the data that it would train on.

    `more`: the other sources of a mixture.
    """

    action: ScheduledAction
    run_id: RunId
    dataset: Artifact
    more: tuple[Artifact, ...] = added(())

    @property
    def data_sha256(self) -> str:
        """The hash of all data."""
        sources = [self.dataset.sha256, *(source.sha256 for source in self.more)]
        return content_key(*sources) if self.more else self.dataset.sha256


class Decision(Frozen):
    """The answer to an AcceptRequest: the workflow and input of the run to start; or why there is none."""

    workflow: str = ""
    start: AnyStart | None = None
    reason: str | None = None


def data_of(run: Run) -> dict[str, DatasetSource]:
    """Return a run's data by the names that it is downloaded under.

    A scheduled run is skipped if its data has not changed since the schedule's last run.
    """
    assert not isinstance(run, SessionRun)
    if not isinstance(run, RLRun):
        return sources_by_split(run.dataset, "train")
    assert run.rollouts is not None
    return sources_by_split(run.rollouts.prompts, "train")


# --- Sweeps: runs that differ in a few fields; the best one is published ---
#
# A sweep's decisions depend on its trials' metrics in the order of the trials' numbers, never on the order in which
# runs end, so a service that was killed makes the same decisions again.


def trial_id(sweep: SweepRecord, number: int) -> str:
    """Return a trial's run id, of the service's form: ids sort by time of the sweep and number of the trial."""
    chance = content_key(sweep.sweep_id, str(number))[:6]
    return f"{sweep.sweep.run.kind}-{int(sweep.created_at * 1000) + number:011x}{chance}"


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

_SECRET_PREFIX = "whsec_"
_SECRET_BYTES = 32


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


def new_secret() -> str:
    """Return a new key for a webhook's signatures: 256 random bits."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def new_notice_id() -> str:
    """Return milliseconds since 1970 in 11 hex digits, so that ids sort by time, and 12 random digits."""
    return f"evt-{int(time.time() * 1000):011x}{secrets.token_hex(6)}"


class DeliverRequest(Frozen):
    """A notice for a webhook. The webhook's address and secret are read from its record: Temporal never sees them."""

    webhook_id: WebhookId
    notice: Notice


class WebhookRequest(Frozen):
    """A notice and its webhooks. Workflows may not read settings, so it also has the first retry's delay."""

    notice: Notice
    webhook_ids: tuple[WebhookId, ...]
    first_retry_s: float
