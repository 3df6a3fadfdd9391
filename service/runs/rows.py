"""Reads and writes the rows of runs. A row is changed only if nobody else has changed it since it was read."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypedDict, Unpack, get_args

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from service.accounts.tenants import Quotas, waits_for_client
from service.database.engine import Database, OutboxRow, RemovedRow, RunRow
from service.errors import QuotaExceeded
from service.runs.views import RunView
from shared.automation import NOTICE_TYPES, Notice, NoticeType, new_notice_id
from shared.limits import QuotaSettings
from shared.runs.requests import RunRecord
from shared.runs.status import RunStatus, State
from shared.storage.stored_bytes import RemovedRun

_KEPT = 1024
_BY_LIMIT = '"paused_by":"'  # within a text of JSON the quotes would be escaped
_STATUS_COLUMNS = ("state", "phase", "step", "num_steps", "started_at", "ended_at", "gpu_seconds")
# OpenAI's names of events, for runs that were sent through its API.
_OPENAI: dict[State, NoticeType] = {
    "succeeded": "fine_tuning.job.succeeded",
    "failed": "fine_tuning.job.failed",
    "cancelled": "fine_tuning.job.cancelled",
}
_ENDED: dict[State, NoticeType] = {
    "paused": "run.paused",
    "succeeded": "run.succeeded",
    "failed": "run.failed",
    "cancelled": "run.cancelled",
}
assert set(_ENDED) == set(get_args(State)) - {"running"} and set(_ENDED.values()) <= set(NOTICE_TYPES)


@dataclass(frozen=True)
class IndexedRun:
    """A run as read from its row. `updated_at` identifies the state of the row that was read."""

    record: RunRecord
    status: RunStatus
    updated_at: float

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def is_open(self) -> bool:
        return self.status.state == "running"

    @cached_property
    def view(self) -> RunView:
        record, precision = self.record, self.record.precision
        told = (precision.notice,) if precision is not None and precision.notice is not None else ()
        return RunView.model_construct(  # its parts were validated already
            **dict(self.status) | {"notices": told + self.status.notices},
            created_at=record.created_at,
            tenant=record.tenant,
            owner=record.owner,
            source=record.source,
            run=record.run,
            precision=precision,
        )


class RunFilter(TypedDict, total=False):
    """A filter of a tenant's runs: all conditions that are not None must hold."""

    state: State | None
    api: str | None
    metadata: Mapping[str, str] | None
    kind: str | None
    words: str | None
    """Text within the run's id, its name or its model's."""
    no_session_idle_since: float | None
    """Not sessions that have waited for a command since before this time: their clients are gone."""


class RunRows:
    """Reads and writes the rows of runs. Quotas admit new ones."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database = database
        self._quotas = quotas

    async def admit(self, record: RunRecord, status: RunStatus) -> bool:
        """Add the row of a new run, before its record is written. False if it has one. Raises QuotaExceeded."""

        def work(session: Session) -> bool:
            if session.get(RunRow, record.run_id) is not None:
                return False
            try:
                self._quotas.admit_run(session, record.tenant)
            except QuotaExceeded:
                # On PostgreSQL a repeat of the same request may have added this row while this one waited.
                if session.get(RunRow, record.run_id) is None:
                    raise
                return False
            session.add(run_row(record, status))
            _put_notice(session, record, status, None)
            return True

        return await self._database.writing(work)

    async def quotas(self, tenant: str) -> QuotaSettings:
        """Return a tenant's quotas: its own if set, else the installation's."""
        return await self._database.reading(lambda session: self._quotas.of(session, tenant))

    async def check_place(self, tenant: str) -> None:
        """Raises QuotaExceeded when a tenant may not have one more run going on."""
        await self._database.writing(lambda session: self._quotas.admit_run(session, tenant))

    async def add(self, record: RunRecord, status: RunStatus) -> None:
        """Add the row of a run that has a record, unless there is one. Webhooks are not notified."""

        def work(session: Session) -> None:
            if session.get(RunRow, record.run_id) is None:
                session.add(run_row(record, status))

        await self._database.writing(work)

    async def find(self, run_id: str) -> IndexedRun | None:
        row = await self._database.reading(lambda session: session.get(RunRow, run_id))
        return None if row is None else _indexed(row)

    async def among(self, tenant: str, run_ids: Sequence[str]) -> tuple[IndexedRun, ...]:
        """The runs of these ids that the tenant has, in no order."""
        query = select(RunRow).where(RunRow.tenant == tenant, RunRow.run_id.in_(run_ids))
        rows = await self._database.reading(lambda session: session.scalars(query).all())
        return tuple(_indexed(row) for row in rows)

    async def waiting_for_clients(self, since: float) -> list[IndexedRun]:
        """Return the runs of all tenants that have waited for their client since then, or for longer."""
        query = select(RunRow).where(waits_for_client(since))
        return [_indexed(row) for row in await self._database.reading(lambda session: session.scalars(query).all())]

    async def num_sessions_idle_since(self, tenant: str, since: float) -> int:
        """Count a tenant's open sessions that have waited for a command since then, or for longer."""
        query = select(func.count()).where(RunRow.tenant == tenant, _is_idle(since))
        return await self._database.reading(lambda session: session.scalars(query).one())

    async def page(
        self, tenant: str, limit: int, after: str | None = None, **wanted: Unpack[RunFilter]
    ) -> tuple[IndexedRun, ...]:
        """List a tenant's runs, newest first: those behind the run `after`."""
        query = select(RunRow).where(RunRow.tenant == tenant)
        for column in (RunRow.state, RunRow.api, RunRow.kind):
            if (value := wanted.get(column.key)) is not None:
                query = query.where(column == value)
        if words := wanted.get("words"):
            found = (column.icontains(words, autoescape=True) for column in (RunRow.run_id, RunRow.name, RunRow.model))
            query = query.where(or_(*found))
        if (since := wanted.get("no_session_idle_since")) is not None:
            query = query.where(~_is_idle(since))
        for name, value in (wanted.get("metadata") or {}).items():
            query = query.where(self._has_label(name, value))

        def work(session: Session) -> Sequence[RunRow]:
            behind = query
            if after is not None:
                last = session.get(RunRow, after)
                if last is None or last.tenant != tenant:
                    return []
                behind = query.where(tuple_(RunRow.created_at, RunRow.run_id) < (last.created_at, after))
            return session.scalars(behind.order_by(RunRow.created_at.desc(), RunRow.run_id.desc()).limit(limit)).all()

        return tuple(_indexed(row) for row in await self._database.reading(work))

    def _has_label(self, name: str, value: str) -> ColumnElement[bool]:
        """Return a condition on one label. It compares keys, since a JSON path would interpret some characters."""
        each = func.json_each if self._database.is_sqlite else func.json_each_text
        labels = each(RunRow.labels).table_valued("key", "value")
        return exists(select(labels.c.key).where(labels.c.key == name, labels.c.value == value))

    async def states(self) -> dict[str, str]:
        """The state of every run."""
        query = select(RunRow.run_id, RunRow.state)
        return {row.run_id: row.state for row in await self._database.reading(lambda s: s.execute(query).all())}

    async def open(self) -> dict[str, str]:
        """The phases of the runs that have not ended, those first that were changed longest ago."""
        query = select(RunRow.run_id, RunRow.phase).where(RunRow.state == "running").order_by(RunRow.updated_at)
        return {row.run_id: row.phase for row in await self._database.reading(lambda s: s.execute(query).all())}

    async def overspending(self) -> tuple[dict[str, str], list[IndexedRun], list[IndexedRun]]:
        """Return the tenants at their spending limit, each with a message; their active runs that no limit has paused
        yet; and the runs of other tenants that a limit has paused.
        """

        def work(session: Session) -> tuple[dict[str, str], Sequence[RunRow], Sequence[RunRow]]:
            over = self._quotas.overspent(session)
            by_limit = RunRow.status.contains(_BY_LIMIT)
            going_on = select(RunRow).where(RunRow.state == "running", RunRow.tenant.in_(over), ~by_limit)
            held = select(RunRow).where(RunRow.state == "paused", RunRow.tenant.not_in(over), by_limit)
            open_runs = session.scalars(going_on).all() if over else []
            return over, open_runs, session.scalars(held.order_by(RunRow.created_at)).all()

        over, going_on, held = await self._database.reading(work)
        return over, [_indexed(row) for row in going_on], [_indexed(row) for row in held]

    async def ended_sessions(self, begin: float, end: float) -> list[tuple[str, str]]:
        """The ids of sessions that ended between two times, in seconds since 1970, and their tenants."""
        ended = (RunRow.kind == "session", RunRow.ended_at >= begin, RunRow.ended_at < end)
        query = select(RunRow.run_id, RunRow.tenant).where(*ended)
        return await self._database.reading(lambda session: [(row[0], row[1]) for row in session.execute(query)])

    async def change(self, run: IndexedRun, status: RunStatus) -> IndexedRun:
        """Change a run's status, unless its row was changed in the meantime. Returns the current run."""
        if status == run.status:
            return run

        def work(session: Session) -> bool:
            found = update(RunRow).where(
                RunRow.run_id == run.run_id, RunRow.state == run.status.state, RunRow.updated_at == run.updated_at
            )
            values = found.values(**_columns(status), updated_at=now)
            changed = session.scalars(values.returning(RunRow.run_id)).one_or_none() is not None
            if changed:
                _put_notice(session, run.record, status, run.status.state)
            return changed

        now = max(time.time(), run.updated_at + 1e-6)
        if await self._database.writing(work):
            return IndexedRun(run.record, status, now)
        return await self.find(run.run_id) or run

    async def delete(self, run_id: str) -> None:
        """Delete the row of a run whose record was never written."""
        await self._database.writing(lambda session: session.execute(delete(RunRow).where(RunRow.run_id == run_id)))


def run_row(record: RunRecord, status: RunStatus) -> RunRow:
    """The row of a run that was accepted just now, or found in the store."""
    return RunRow(
        run_id=record.run_id,
        tenant=record.tenant,
        owner=record.owner,
        kind=record.run.kind,
        name=record.run.name,
        api=record.source.api,
        schedule=record.source.schedule,
        model=record.run.model,
        labels=dict(record.source.metadata),
        created_at=record.created_at,
        record=record.model_dump_json(),
        updated_at=time.time(),
        **_columns(status),
    )


def forget(session: Session, removed: RemovedRun) -> None:
    """Move a removed run's row to the removed runs: its GPU seconds still count."""
    session.merge(removed_row(removed))
    session.execute(delete(RunRow).where(RunRow.run_id == removed.run_id))


def removed_row(removed: RemovedRun) -> RemovedRow:
    """The row of a removed run, as its record in the store has it."""
    return RemovedRow(**removed.model_dump(include={"run_id", "tenant", "created_at", "ended_at", "gpu_seconds"}))


def _columns(status: RunStatus) -> dict[str, object]:
    return {name: getattr(status, name) for name in _STATUS_COLUMNS} | {"status": status.model_dump_json()}


def _put_notice(session: Session, record: RunRecord, status: RunStatus, before: State | None) -> None:
    """Put a change of state into the outbox of webhooks, in the transaction that makes it."""
    notice = notice_of(record, status, before)
    if notice is not None:
        session.add(
            OutboxRow(
                id=notice.notice_id,
                tenant=notice.tenant,
                type=notice.type,
                run_id=record.run_id,
                payload=notice.data,
                created_at=notice.created_at,
            )
        )


def _is_idle(since: float) -> ColumnElement[bool]:
    """Open sessions that have waited for a command since then, or for longer."""
    return and_(RunRow.kind == "session", waits_for_client(since))


def _indexed(row: RunRow) -> IndexedRun:
    return _parsed(row.record, row.status, row.updated_at)


@lru_cache(_KEPT)
def _parsed(record: str, status: str, updated_at: float) -> IndexedRun:
    """Parse a row. Cached, since lists are read often and rows seldom change."""
    return IndexedRun(RunRecord.model_validate_json(record), RunStatus.model_validate_json(status), updated_at)


def notice_of(record: RunRecord, status: RunStatus, before: State | None) -> Notice | None:
    """The notice of a change of state; None if nothing changed.

    `before`: the state that the run had; None for a run that was not known.
    """
    if status.state == before:
        return None
    return Notice(
        notice_id=new_notice_id(),
        tenant=record.tenant,
        type=_type(record, status.state, before),
        created_at=time.time(),
        data={
            "id": record.run_id,
            "object": "fine_tuning.job" if record.source.api == "openai" else "run",
            "kind": record.run.kind,
            "name": record.run.name or record.run_id,
            "state": status.state,
            "step": status.step,
            "adapter": status.adapter,
            "problem": status.problem.message if status.problem else None,
            "schedule": record.source.schedule,
            "metadata": dict(record.source.metadata),
        },
    )


def _type(record: RunRecord, state: State, before: State | None) -> NoticeType:
    if state == "running":
        return "run.created" if before is None else "run.resumed"
    if record.source.api == "openai" and state in _OPENAI:
        return _OPENAI[state]
    return _ENDED[state]
