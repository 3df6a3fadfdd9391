"""Reads and writes the rows of runs.

A workflow's changes are applied in their order. The service changes a row only if nobody has since it was read.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial
from typing import Any, TypedDict, Unpack

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, tuple_, update
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.worker import Worker

from longshore.accounts import QuotaSettings, Room
from longshore.automation import NoticeType
from longshore.runs import RunRecord
from longshore.views import RunStatus, RunView, State
from service.accounts.tenants import Quotas, add_stored, forget_stored, waits_for_client
from service.database.engine import Database, OutboxRow, RemovedRow, RunRow, UnitRow, UseRow
from service.temporal import LIST_PATIENCE, Temporal
from shared.automation import Notice, new_notice_id
from shared.errors import CorruptArtifact, NotFound, QuotaExceeded, StoreUnavailable
from shared.runs.status import RunChange
from shared.storage.artifacts import read_record
from shared.storage.paths import RunKeys, checkpoint_adapter_run, tenant_folder
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import USE_WORKFLOW, UseRequest

# --- Units that are deleted as a whole: who uses them, and who deletes them ---
#
# A *unit* is what is used or deleted as a whole: an artifact that several runs may share, or the folder of a run.
# Before a run uses a unit, a row says so. Before a process deletes a unit, it claims it, and reads in the same
# transaction who uses it. So a run waits until a deletion is over, and makes again what it does not find then; and the
# process that deletes leaves what is in use. What is deleted, and when: service/automation/retention.py.

WORK_S = 60.0
"""Who has claimed a unit deletes of it no longer than this, and leaves the rest to the next time."""
CLAIM_S = 2 * WORK_S
"""An older claim counts no more: its process died. (Clocks of services may differ by WORK_S.)"""


class BeingDeleted(StoreUnavailable):
    """A unit is being deleted. That takes two minutes at most."""


@dataclass
class Claim:
    """A unit that this process may delete until a time.

    Attributes:
        users: the runs that use the unit, each with the time when it last said so, in seconds since 1970.
        is_gone: set by the process when nothing is left of the unit: then its rows go, too.
    """

    until: float
    users: Mapping[str, float]
    is_gone: bool = False


@dataclass(frozen=True, eq=False)
class Uses:
    """Notes who uses units, and claims them. Services of one database do so at once."""

    _database: Database

    async def note(self, unit: str, run_id: str) -> None:
        """Let a run use a unit until it has ended, before anybody looks for the unit on the run's behalf.

        A run that is resumed uses its own folder, before its workflow begins.

        Raises BeingDeleted: in two minutes at most it can be used, or made anew.
        """
        await self.note_all([(unit, run_id)])

    async def note_all(self, uses: Iterable[tuple[str, str]]) -> None:
        """Note uses, by unit and run, as `note` does: all of them, or none."""

        def work(session: Session) -> None:
            for unit, run_id in sorted(uses):  # in one order, for processes that wait for each other
                _note(unit, run_id, session)

        await self._database.writing(work)

    async def last(self) -> float:
        """Return when a run last said that it uses something, in seconds since 1970; 0 if none ever did."""
        return await self._database.reading(lambda session: session.scalar(select(func.max(UseRow.at)))) or 0.0

    @contextmanager
    def claiming(self, *units: str) -> Iterator[tuple[Claim | None, ...]]:
        """Hold the claims of units in the block; None in place of one that another process has. Blocking."""
        now = time.time()
        users = self._database.write(partial(_claim, units, now))
        claims = {unit: Claim(now + WORK_S, of) for unit, of in users.items()}
        try:
            yield tuple(map(claims.get, units))
        finally:
            if claims:
                self._database.write(partial(_release, claims, now))


def checkpoints_named(tenant: str, request: str) -> dict[str, str]:
    """Return the keys of other runs' checkpoints that a run's request names, each with the run that made it."""
    keys = set(re.findall(rf"{tenant_folder(tenant)}/checkpoints/[a-z0-9-]+/[0-9a-f]{{32}}", request))
    return {key: source for key in keys if (source := checkpoint_adapter_run(tenant, key)) is not None}


def _locked(unit: str, session: Session) -> UnitRow:
    """Return the row of a unit, locked. Two that add it at once wait for each other, and the later one does it anew."""
    row = session.get(UnitRow, unit, with_for_update=True)
    if row is None:
        row = UnitRow(unit=unit, claimed_at=0.0)
        session.add(row)
        session.flush()
    return row


def _note(unit: str, run_id: str, session: Session) -> None:
    now = time.time()
    if _locked(unit, session).claimed_at > now - CLAIM_S:
        raise BeingDeleted(f"{unit} is being deleted: in two minutes at most it can be used, or made anew")
    session.merge(UseRow(unit=unit, run_id=run_id, at=now))


def _claim(units: Sequence[str], now: float, session: Session) -> dict[str, dict[str, float]]:
    """Claim the units that nobody else has. Returns who uses each."""
    users: dict[str, dict[str, float]] = {}
    for unit in sorted(units):
        row = _locked(unit, session)
        if row.claimed_at <= now - CLAIM_S:
            row.claimed_at, users[unit] = now, {}
    for use in session.scalars(select(UseRow).where(UseRow.unit.in_(users))):
        users[use.unit][use.run_id] = use.at
    return users


def _release(claims: Mapping[str, Claim], claimed_at: float, session: Session) -> None:
    mine = (UnitRow.unit.in_(claims), UnitRow.claimed_at == claimed_at)  # others found a claim too old, and have it
    held = session.scalars(select(UnitRow).where(*mine).order_by(UnitRow.unit).with_for_update()).all()
    for row in held:
        row.claimed_at = 0.0
        if claims[row.unit].is_gone:
            session.execute(delete(UseRow).where(UseRow.unit == row.unit))
            session.delete(row)


_KEPT = 1024
_BY_LIMIT = '"paused_by":"'  # within a text of JSON the quotes would be escaped
_notice_type: TypeAdapter[NoticeType] = TypeAdapter(NoticeType)
_STATUS_COLUMNS = ("state", "phase", "step", "num_steps", "started_at", "ended_at", "gpu_seconds")


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
        precision = self.record.precision
        told = (precision.notice,) if precision is not None and precision.notice is not None else ()
        parts = dict(self.record) | dict(self.status) | {"notices": told + self.status.notices}
        return RunView.model_construct(**parts)  # they were validated already


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
            num_bytes = len(record.model_dump_json(indent=1).encode())
            try:
                self._quotas.admit_run(session, record.tenant)
                self._quotas.check_bytes(session, record.tenant, num_bytes)
            except QuotaExceeded:
                # On PostgreSQL a repeat of the same request may have added this row while this one waited.
                if session.get(RunRow, record.run_id) is None:
                    raise
                return False
            session.add(run_row(record, status))
            add_stored(session, record.tenant, record.run_id, "records", num_bytes)
            _put_notice(session, record, status, None)
            return True

        return await self._database.writing(work)

    async def quotas(self, tenant: str) -> QuotaSettings:
        """Return a tenant's quotas: its own if set, else the installation's."""
        return await self._database.reading(lambda session: self._quotas.of(session, tenant))

    async def check_place(self, tenant: str) -> None:
        """Raises QuotaExceeded when a tenant may not have one more run going on."""
        await self._database.writing(lambda session: self._quotas.admit_run(session, tenant))

    async def record(self, change: RunChange) -> bool:
        """Change a run's status as its workflow says, unless a later change is recorded. False without a row."""

        def work(session: Session) -> bool:
            row = session.get(RunRow, change.status.run_id, with_for_update=True)
            if row is not None and change.at > row.recorded_at:
                run = _indexed(row)
                _put_notice(session, run.record, change.status, run.status.state)
                now = max(time.time(), row.updated_at + 1e-6)
                for name, value in (_columns(change.status) | {"recorded_at": change.at, "updated_at": now}).items():
                    setattr(row, name, value)
            return row is not None

        return await self._database.writing(work)

    async def add(self, record: RunRecord, status: RunStatus) -> None:
        """Add the row of a run that has a record, unless there is one, or it was removed. Webhooks are not notified."""

        def work(session: Session) -> None:
            if session.get(RunRow, record.run_id) is None and session.get(RemovedRow, record.run_id) is None:
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
        """Return the runs of all tenants that have waited for their client since then, the longest waiting first."""
        query = select(RunRow).where(waits_for_client(since)).order_by(RunRow.updated_at)
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

    async def is_removed(self, run_id: str) -> bool:
        return await self._database.reading(lambda session: session.get(RemovedRow, run_id)) is not None


def run_row(record: RunRecord, status: RunStatus) -> RunRow:
    """The row of a run whose workflow has recorded nothing in it."""
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
        recorded_at=0.0,
        **_columns(status),
    )


def forget(session: Session, removed: RemovedRow) -> None:
    """Put a removed run's row where its own was: its GPU seconds still count."""
    session.merge(removed)
    session.execute(delete(RunRow).where(RunRow.run_id == removed.run_id))
    forget_stored(session, removed.tenant, removed.run_id)


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
    # OpenAI has names of its own for runs that were sent through its API, but none for a pause.
    is_openai = record.source.api == "openai" and state != "paused"
    return _notice_type.validate_python(f"{'fine_tuning.job' if is_openai else 'run'}.{state}")


# --- Activities of the web service: what workflows ask of the process that has the database ---

_PATIENCE_S = 5.0
_MEASURED_EACH_S = 60.0
_MOST_REMEMBERED = 4096
_LISTED_LATE_S = 60.0


@dataclass(frozen=True, eq=False)
class Records:
    """Writes rows for workflows. Hosts need no database. While no service is up, the activities wait in Temporal."""

    _store: ObjectStore
    _rows: RunRows
    _uses: Uses
    _quotas: Quotas
    _temporal: Temporal
    _queue: str
    _measured: dict[str, float] = field(default_factory=dict)

    @property
    def activities(self) -> tuple[Callable[..., Any], ...]:
        return self.record_run, self.note_use

    @activity.defn(name="record_run")
    async def record_run(self, change: RunChange) -> Room:
        """Record a change of a run's status, and measure what it holds. Returns the room that its tenant has left.

        May be repeated: the latest change stays.
        """
        if not await self._rows.record(change):
            # The database was restored from a backup that is older than the run.
            with suppress(NotFound, CorruptArtifact):
                key = RunKeys(change.status.run_id).record
                record = await asyncio.to_thread(read_record, self._store, key, RunRecord)
                for made_by in checkpoints_named(record.tenant, record.run.model_dump_json()).values():
                    await self._uses.note(RunKeys(made_by).prefix, record.run_id)
                await self._rows.add(record, change.status)
        status = change.status
        if (run := await self._rows.find(status.run_id)) is None:  # it was removed
            return Room()
        last = self._measured.get(status.run_id, -math.inf)
        has_begun = status.step > 0 or status.state != "running"  # before, it has published nothing
        if not has_begun or status.state != "running" or time.monotonic() - last > _MEASURED_EACH_S:
            # A slow store must not delay the run: what is not measured now is measured later.
            with suppress(TimeoutError, StoreUnavailable):
                async with asyncio.timeout(_PATIENCE_S):
                    await self._quotas.measure(run.record.tenant, status.run_id, published=has_begun)
            if len(self._measured) >= _MOST_REMEMBERED:
                self._measured.clear()
            self._measured[status.run_id] = time.monotonic()
        return await self._quotas.room(run.record.tenant)

    @activity.defn(name="note_use")
    async def note_use(self, request: UseRequest) -> None:
        """Note that a run uses a unit, for the host that looks for it then. Raises BeingDeleted."""
        await self._uses.note(request.unit, request.run_id)

    async def restore_uses(self) -> None:
        """Note again what hosts have had noted since the last use that the database knows, as Temporal lists it. It is
        more than a minute's if the database was restored from a backup.

        All of them are noted, or none. Raises TemporalUnavailable, DatabaseUnavailable, BeingDeleted.
        """
        since = datetime.fromtimestamp(max(0.0, await self._uses.last() - _LISTED_LATE_S), UTC)
        ended = f"WorkflowType = '{USE_WORKFLOW}' AND CloseTime > '{since:%Y-%m-%dT%H:%M:%SZ}'"
        async with self._temporal.client() as client:
            listed = client.list_workflows(f"TaskQueue = '{self._queue}' AND {ended}", rpc_timeout=LIST_PATIENCE)
            found = [UseRequest.of_workflow(each.id) async for each in listed]
        await self._uses.note_all((use.unit, use.run_id) for use in found if use is not None)


async def serve(temporal: Temporal, queue: str, *activities: Callable[..., Any], at_once: int | None = None) -> None:
    """Do activities of a queue for workflows, until cancelled. Several services may do so at once.

    Raises TemporalUnavailable: before the first one. Later the worker waits for the server.
    """
    async with temporal.client() as client:
        await Worker(client, task_queue=queue, activities=activities, max_concurrent_activities=at_once).run()
