"""The overview next to a list of runs: counts by state, places in the queue for workers, and sparklines of losses."""

import asyncio
import time
from collections import OrderedDict
from typing import get_args

from prometheus_client import Gauge
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from longshore.views import Overview, Sparkline, State, StepStatus
from service.accounts.tenants import used_gpu_seconds
from service.database.engine import Database, KeyRow, RunRow
from service.runs.files import Histories
from service.runs.rows import IndexedRun
from service.runs.runs import SHARED_S
from service.runs.views import IN_QUEUE
from service.temporal import Temporal
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

_POINTS = 48
_FRESH_S = 5.0
_MOST_KEPT = 2000
_CONCURRENT = 4


class Overviews:
    """Reads counts from the index, and metrics of runs from the store."""

    def __init__(self, database: Database, store: ObjectStore, histories: Histories) -> None:
        self._database = database
        self._store = store
        self._histories = histories
        self._kept: OrderedDict[str, tuple[object, float, Sparkline]] = OrderedDict()
        self._shown: dict[str, tuple[float, Overview]] = {}
        self._places = asyncio.Semaphore(_CONCURRENT)

    async def show(self, tenant: str) -> Overview:
        """Counts, places in the queue, and the titles of keys (owners are ids of keys); at most half a second old."""
        since, overview = self._shown.get(tenant, (0.0, None))
        if overview is None or time.monotonic() - since > SHARED_S:
            asked = time.monotonic()
            overview = await self._look(tenant)
            self._shown[tenant] = asked, overview
        return overview

    async def _look(self, tenant: str) -> Overview:
        counts = select(RunRow.state, func.count()).where(RunRow.tenant == tenant).group_by(RunRow.state)
        waiting = (
            select(RunRow.run_id, RunRow.tenant)
            .where(RunRow.state == "running", RunRow.phase.in_(IN_QUEUE))
            .order_by(RunRow.created_at, RunRow.run_id)
        )
        owners = select(KeyRow.key_id, KeyRow.title).where(KeyRow.tenant == tenant, KeyRow.title != "")
        found = await self._database.reading(
            lambda session: [session.execute(query).all() for query in (counts, waiting, owners)]
        )
        return Overview(
            counts=dict(map(tuple, found[0])),
            waiting={run_id: place for place, (run_id, owner) in enumerate(found[1], 1) if owner == tenant},
            owners=dict(map(tuple, found[2])),
        )

    async def sparkline(self, run: IndexedRun) -> Sparkline:
        """Return a run's sparkline: read once if the run has ended, else every few seconds."""
        stamp = (run.status.state, run.status.step)
        before, since, line = self._kept.get(run.run_id, (None, 0.0, None))
        if line is None or (before != stamp and (not run.is_open or time.monotonic() - since > _FRESH_S)):
            async with self._places:
                if run.record.run.kind == "rl":
                    line = await asyncio.to_thread(self._rewards, run.run_id)
                else:
                    line = await self._losses(run.run_id)
            self._kept[run.run_id] = stamp, time.monotonic(), line
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return line

    async def _losses(self, run_id: str) -> Sparkline:
        steps = (await self._histories.of(run_id)).step_metrics().values()
        losses = [metrics["loss"] for metrics in steps if "loss" in metrics]
        return Sparkline(name="loss", values=tuple(losses[place] for place in _places_of(len(losses))))

    def _rewards(self, run_id: str) -> Sparkline:
        keys = [info.key for info in self._store.list(f"{RunKeys(run_id).steps}/")]
        chosen = [keys[place] for place in _places_of(len(keys))]
        steps = (StepStatus.model_validate_json(self._store.get_bytes(key)) for key in chosen)
        rewards = (step.metrics.get("reward_mean") for step in steps)
        return Sparkline(name="reward", values=tuple(reward for reward in rewards if reward is not None))


def _places_of(number: int) -> list[int]:
    """Choose at most a few dozen indices of a list, evenly spaced, the first and the last among them."""
    if number <= _POINTS:
        return list(range(number))
    return [round(place * (number - 1) / (_POINTS - 1)) for place in range(_POINTS)]


# --- Gauges of the whole installation, the same in every web service: queues, runs, tenants' GPU seconds ---

_MOST_TENANTS = 20
_OTHERS = "(others)"
_NONE_ENDED = {
    state: 0 for state in get_args(State) if state != "running"
}  # Prometheus sees no change in a first value
QUEUE_DEPTH = Gauge("longshore_queue_depth", "Activities that wait for a host: of a shape, leases", ["role", "shape"])
QUEUE_AGE = Gauge("longshore_queue_age_seconds", "Since the oldest of them was asked for", ["role", "shape"])
RUNS = Gauge("longshore_runs", "Runs that go on, by phase", ["phase"])
ENDED_RUNS = Gauge("longshore_ended_runs", "Runs that have ended or are paused, by state", ["state"])
TENANT_GPU_SECONDS = Gauge(
    "longshore_tenant_gpu_seconds",
    "Of 30 days: the tenants that used most, and all others together",
    ["tenant"],
)


class InstallationGauges:
    """Reads them again. At most twenty tenants, even of 10,000, have a separate series at a time."""

    def __init__(self, settings: Settings, database: Database, temporal: Temporal) -> None:
        self._settings = settings
        self._database = database
        self._temporal = temporal

    async def refresh(self) -> None:
        """Raises TemporalUnavailable, DatabaseUnavailable: the rest stays as it was."""
        states, phases, tenants = await self._database.reading(_counts)
        _set(RUNS, phases)
        _set(ENDED_RUNS, list((_NONE_ENDED | dict(states)).items()))
        most, rest = tenants[:_MOST_TENANTS], tenants[_MOST_TENANTS:]
        _set(TENANT_GPU_SECONDS, [*most, (_OTHERS, sum(seconds for _, seconds in rest))])
        settings = self._settings
        for role, shape, queue in (
            ("gpu", settings.shape, settings.lease_queue),
            ("sampler", settings.shape, settings.sampler_queue),
            ("control", "", settings.control_queue),
        ):
            waiting = await self._temporal.backlog(queue)
            QUEUE_DEPTH.labels(role, shape).set(waiting.num)
            QUEUE_AGE.labels(role, shape).set(waiting.age_s)


def _counts(session: Session) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[tuple[str, float]]]:
    num = func.count()
    states = select(RunRow.state, num).where(RunRow.state != "running").group_by(RunRow.state)
    phases = select(RunRow.phase, num).where(RunRow.state == "running").group_by(RunRow.phase)
    tuples = [[(name, count) for name, count in session.execute(query)] for query in (states, phases)]
    return tuples[0], tuples[1], used_gpu_seconds(session)


def _set(gauge: Gauge, values: "list[tuple[str, int]] | list[tuple[str, float]]") -> None:
    gauge.clear()
    for label, value in values:
        gauge.labels(label).set(value)
