"""Gauges of the whole installation, the same in every web service: queues, runs, tenants' GPU seconds."""

from typing import get_args

from prometheus_client import Gauge
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.accounts.tenants import used_gpu_seconds
from service.database.engine import Database
from service.database.tables import RunRow
from service.temporal import Temporal
from shared.runs.status import State
from shared.settings import Settings

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
