"""Tenants share an installation. Each sees only its own runs, files and keys.

Quotas of a tenant: runs at once, GPU hours of thirty days, bytes in the store.
"""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError
from sqlalchemy import ColumnElement, and_, delete, func, select
from sqlalchemy.orm import Session

from longshore.accounts import Measured, QuotaSettings, Room, TenantUsage, TenantView
from longshore.fields import Frozen
from service.accounts import audit
from service.database.engine import Database, DocumentRow, FileRow, RemovedRow, RunRow, StoredRow, TenantRow
from shared.errors import Conflict, InvalidInput, NotFound, QuotaExceeded
from shared.settings import ClientSettings, PriceSettings, Settings
from shared.storage import paths
from shared.storage.places import OpenPlaces, without_queries
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import PUBLISHED, Measurement, Stored, no_room, stored_as_published, stored_of_run

# --- Check a tenant's URIs: those into our own store must lead into the tenant's own folder ---

_MODEL_FIELDS = ("model", "model_uri", "initial_adapter", "reference")


class Access:
    """Checks every string of a request for URIs and paths, whatever its field, so that no new field is forgotten."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self._places = OpenPlaces(settings, store)

    def check(self, tenant: str, request: BaseModel) -> None:
        """Check every string of a request. Blocking: paths are resolved.

        Raises InvalidInput: a URI or a path leads to files of the installation or of another tenant, whether they exist
        or not, or has a scheme that is not supported.
        """
        self.check_value(tenant, request.model_dump(mode="json"))

    def check_value(self, tenant: str, value: JsonValue, place: str = "") -> None:
        """Check every string of a field's value, as `check` does. `place`: the field."""
        for at, text in _strings(value, place):
            _check_scheme(text, at)
            self._places.check_named(tenant, text, at)


def _check_scheme(text: str, place: str) -> None:
    """Refuse a scheme that no host reads, before a run waits for a host."""
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    field = place.rpartition(".")[2]
    if field == "uri" and scheme not in ("file", "http", "https", "s3"):
        raise InvalidInput("a dataset's URI starts with file://, http://, https:// or s3://", place)
    if field in _MODEL_FIELDS and scheme not in ("", "file", "s3"):
        raise InvalidInput("give an absolute path, a file:// or s3:// URI, or a hub id such as org/name", place)


def _strings(value: JsonValue, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a document, with its place."""
    match value:
        case str():
            yield place, value
        case list():
            for number, item in enumerate(value):
                yield from _strings(item, f"{place}.{number}" if place else str(number))
        case dict():
            for name, item in value.items():
                yield from _strings(item, f"{place}.{name}" if place else name)


WINDOW_S = 30 * 86_400
_BELIEVED_S = 900.0  # a reservation of a process that died
_RENEWED_S = 300.0
_PATIENCE_S, _POLL_S = 10.0, 0.1  # of the first of several reservations
_STEP_BYTES = 1 << 20
_FILE_ROW_BYTES = 512
QUERIES, PARTS, _RESERVED = "queries", "parts", "reserved"
_NOTED = (QUERIES, PARTS, _RESERVED)
"""Owners of bytes that the service alone writes and counts: no measurement has them."""
_MOST_NAMED = 5
_MOST_SURPLUS = 4096
_MOST_IDLE = 100  # runs of a tenant that wait for their clients without a place of the quota; more of them count
F = TypeVar("F", bound=Frozen)


class Tenants:
    """Keeps tenants in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, tenant: str, title: str = "", quotas: QuotaSettings | None = None) -> TenantView:
        """Create a tenant. Raises Conflict when the name is taken."""
        row = TenantRow(tenant=tenant, title=title, quotas=_quotas_json(quotas), created_at=time.time())

        def add(session: Session) -> None:
            if session.get(TenantRow, tenant) is not None:
                raise Conflict(f"there is a tenant {tenant} already")
            session.add(row)

        await self._database.writing(add)
        audit.touched(tenant)
        return _tenant(row)

    async def list(self) -> tuple[TenantView, ...]:
        rows = await self._database.reading(lambda s: s.scalars(select(TenantRow).order_by(TenantRow.tenant)).all())
        return tuple(map(_tenant, rows))

    async def show(self, tenant: str) -> TenantView:
        """Return a tenant. Raises NotFound."""
        return _tenant(await self._database.reading(partial(_tenant_row, tenant)))

    async def set_quotas(self, tenant: str, quotas: QuotaSettings) -> TenantView:
        """Set a tenant's quotas. They replace the ones set before. Raises NotFound."""

        def change(session: Session) -> TenantRow:
            row = _tenant_row(tenant, session)
            row.quotas = _quotas_json(quotas)
            return row

        row = await self._database.writing(change)
        audit.touched(tenant)
        return _tenant(row)


def _tenant_row(tenant: str, session: Session) -> TenantRow:
    row = session.get(TenantRow, tenant)
    if row is None:
        raise NotFound(f"there is no tenant {tenant}")
    return row


def _tenant(row: TenantRow) -> TenantView:
    return TenantView.model_validate(row, from_attributes=True)


def _quotas_json(quotas: QuotaSettings | None) -> dict[str, Any]:
    return {} if quotas is None else quotas.model_dump(mode="json", exclude_unset=True)


class Quotas:
    """Checks the quotas of tenants: on runs, and on bytes, all counted in the database."""

    def __init__(
        self,
        settings: QuotaSettings,
        store: ObjectStore,
        database: Database,
        prices: PriceSettings | None = None,
        clients: ClientSettings | None = None,
    ) -> None:
        self._clients = clients or ClientSettings()
        self._settings = settings
        self._prices = prices or PriceSettings()
        self._store = store
        self._database = database
        self._surplus: dict[tuple[str, str, str], int] = {}  # bytes that `put_noted` has counted ahead

    async def usage(self, tenant: str) -> TenantUsage:
        """Return a tenant's usage and quotas."""

        def look(session: Session) -> TenantUsage:
            hours = _gpu_hours(session, tenant)
            return TenantUsage(
                tenant=tenant,
                concurrent_runs=len(self._concurrent_runs(session, tenant)),
                gpu_hours=hours,
                cost=None if self._prices.gpu_hour is None else hours * self._prices.gpu_hour,
                currency=self._prices.currency,
                stored_bytes=_stored_bytes(session, tenant),
                measured=_measured(session, tenant),
                quotas=self.of(session, tenant),
            )

        return await self._database.reading(look)

    def of(self, session: Session, tenant: str) -> QuotaSettings:
        row = session.get(TenantRow, tenant)
        return self._settings.model_copy(update=row.quotas if row else {})

    def admit_run(self, session: Session, tenant: str) -> None:
        """Check the quotas for one more run. To be called in the transaction that adds it, so that none is exceeded.

        Raises QuotaExceeded: one more would break a quota.
        """
        lock_tenant(session, tenant)
        quotas = self.of(session, tenant)
        most = quotas.concurrent_runs
        if most is not None and len(going_on := self._concurrent_runs(session, tenant)) >= most:
            named = ", ".join(going_on[:_MOST_NAMED]) + (", …" if len(going_on) > _MOST_NAMED else "")
            text = f"{most} of {tenant}'s runs are going on, and more are not allowed"
            raise QuotaExceeded("concurrent_runs", f"{text}: {named or 'none'}. `longshore cancel RUN` ends one")
        if quotas.gpu_hours is not None and (used := _gpu_hours(session, tenant)) >= quotas.gpu_hours:
            text = f"{tenant}'s runs of the last 30 days took {used:.2f} GPU hours of {quotas.gpu_hours:g}"
            raise QuotaExceeded("gpu_hours", text)
        if (overspent := self._overspent(session, tenant)) is not None:
            raise QuotaExceeded("spending", overspent)

    def _concurrent_runs(self, session: Session, tenant: str) -> Sequence[str]:
        """Return the ids of a tenant's active runs, oldest first, except up to `_MOST_IDLE` that wait for clients."""
        going_on = select(RunRow.run_id).where(RunRow.tenant == tenant, RunRow.state == "running")
        going_on, idle = going_on.order_by(RunRow.created_at), waits_for_client(time.time() - self._clients.idle_s)
        too_many = session.scalars(going_on.where(idle).offset(_MOST_IDLE)).all()
        return [*session.scalars(going_on.where(~idle)), *too_many]

    def overspent(self, session: Session) -> dict[str, str]:
        """Return the tenants at or above their spending limit, each with a message."""
        tenants = session.scalars(select(TenantRow.tenant)).all()
        found = ((tenant, self._overspent(session, tenant)) for tenant in tenants)
        return {tenant: text for tenant, text in found if text is not None}

    def check_priced(self, quotas: QuotaSettings) -> None:
        """Raise InvalidInput for a limit of spending if GPU hours have no price."""
        if quotas.spending is not None and self._prices.gpu_hour is None:
            rule = "a GPU hour has no price in this installation: set LONGSHORE_PRICES__GPU_HOUR, or limit gpu_hours"
            raise InvalidInput(rule, "spending")

    def _overspent(self, session: Session, tenant: str) -> str | None:
        most, price = self.of(session, tenant).spending, self._prices.gpu_hour
        if most is None or price is None or (spent := _gpu_hours(session, tenant) * price) < most:
            return None
        money = self._prices.currency
        return f"{tenant}'s runs of the last 30 days cost {spent:.2f} {money}, and may cost {most:g} {money}"

    async def admit_bytes(self, tenant: str, more: int) -> None:
        """Raise QuotaExceeded if `more` bytes would exceed the quota. Nothing is reserved (see `reservation`)."""
        await self._database.reading(lambda session: self.check_bytes(session, tenant, more))

    def check_bytes(self, session: Session, tenant: str, more: int) -> None:
        """Check the quota for `more` bytes, in the transaction that adds them and has locked the tenant.

        Raises QuotaExceeded.
        """
        most = self.of(session, tenant).stored_bytes
        if most is not None and (used := _stored_bytes(session, tenant)) + more > most:
            raise QuotaExceeded("stored_bytes", no_room(tenant, used, most, more))

    async def room(self, tenant: str) -> Room:
        """Return what a tenant stores and may store, for hosts that write for it."""

        def look(session: Session) -> Room:
            most = self.of(session, tenant).stored_bytes
            return Room(used=0 if most is None else _stored_bytes(session, tenant), most=most)

        return await self._database.reading(look)

    @asynccontextmanager
    async def reservation(self, tenant: str) -> AsyncIterator["Reservation"]:
        """Reserve bytes that are written in the block. At its end bytes that are not settled are released."""
        quotas = await self._database.reading(lambda session: self.of(session, tenant))
        reserved = Reservation(self._database, self, tenant, quotas.stored_bytes is not None)
        try:
            yield reserved
        finally:
            await reserved.release()

    async def put_noted(
        self,
        tenant: str,
        owner: str,
        what: str,
        num_bytes: int,
        put: Callable[[], Awaitable[bool]],
        block_bytes: int = 0,
    ) -> bool:
        """Put an object of `num_bytes`, which count before it is there. `put` returns False if it was there.

        If the process dies in between they count until `owner` is measured.

        Args:
            block_bytes: count so many bytes more, if the quota has room, for the next objects of the same kind; these
                then need no transaction. A measurement of `owner` forgets this surplus.

        Raises QuotaExceeded, and what `put` raises.
        """

        def add(more: int, session: Session) -> None:
            lock_tenant(session, tenant)
            self.check_bytes(session, tenant, more)
            add_stored(session, tenant, owner, what, more)

        key = tenant, owner, what
        counted = min(self._surplus.get(key, 0), num_bytes)  # the rest is for objects that come at the same time
        self._count_ahead(key, -counted)
        is_put = False
        try:
            if (missing := num_bytes - counted) > 0:
                try:
                    await self._database.writing(partial(add, missing + block_bytes))
                    counted = num_bytes + block_bytes
                except QuotaExceeded:
                    if not block_bytes:
                        raise
                    await self._database.writing(partial(add, missing))
                    counted = num_bytes
            is_put = await put()
        finally:
            left = counted - num_bytes if is_put else counted
            if left and block_bytes:
                self._count_ahead(key, left)
            elif left:
                await self._database.writing(lambda s: add_stored(s, tenant, owner, what, -left))
        return is_put

    def forget_ahead(self, tenant: str) -> None:
        """Forget the bytes that were counted ahead for a tenant, whose quota may be smaller now."""
        self._surplus = {key: surplus for key, surplus in self._surplus.items() if key[0] != tenant}

    def _count_ahead(self, key: tuple[str, str, str], more: int) -> None:
        if surplus := self._surplus.pop(key, 0) + more:
            if len(self._surplus) >= _MOST_SURPLUS:
                self._surplus.clear()  # these count until their owners are measured
            self._surplus[key] = surplus

    async def sealed(self, tenant: str, request: F) -> F:
        """Return a request without the queries of its URIs, which may contain signatures; the store keeps them.

        Raises:
            InvalidInput: a URI would be too long.
            QuotaExceeded
        """
        request, queries = without_queries(request)
        for query_id, uri in queries.items():
            put = partial(asyncio.to_thread, self._store.put_if_absent, paths.query_record(query_id), uri)
            await self.put_noted(tenant, QUERIES, QUERIES, len(uri), put)
        return request

    async def measure(self, tenant: str, run_id: str | None = None, *, published: bool = True) -> None:
        """Measure what a tenant has published, and what one of its runs holds."""
        began, stored, owners = time.time(), list[Stored](), list[str]()
        if published:
            owners.append(PUBLISHED)
            stored.append(await asyncio.to_thread(stored_as_published, self._store, tenant))
        if run_id is not None:
            owners.append(run_id)
            stored += await asyncio.to_thread(stored_of_run, self._store, tenant, run_id)
        of = (StoredRow.tenant == tenant, StoredRow.owner.in_(owners))
        await self.note_measured(Measurement(began=began, stored=tuple(stored)), *of, run_id=run_id)

    async def note_measured(
        self, measurement: Measurement, *of: ColumnElement[bool], run_id: str | None = None
    ) -> None:
        """Replace what was known of the store's bytes by a measurement, which was `of` these rows, or of all.

        Rows that were noted after it began stay unchanged. `run_id`: the run that was measured; if it was removed
        meanwhile, nothing is noted.
        """

        def note(session: Session) -> None:
            if run_id is not None:
                session.get(RunRow, run_id, with_for_update=True)  # a removal comes before this, or waits
                if session.get(RemovedRow, run_id) is not None:
                    return
            known = select(StoredRow).where(StoredRow.owner.not_in(_NOTED), *of).with_for_update()
            rows = {(row.tenant, row.owner, row.what): row for row in session.scalars(known)}
            for found in measurement.stored:
                row = rows.pop((found.tenant, found.owner, found.what), None)
                if row is None:
                    session.add(StoredRow(**dict(found), at=measurement.began))
                elif row.at <= measurement.began:
                    row.num_bytes, row.at = found.num_bytes, measurement.began
            for row in rows.values():
                if row.at <= measurement.began:
                    session.delete(row)

        await self._database.writing(note)


def lock_tenant(session: Session, tenant: str) -> None:
    """Let the writing transactions of a tenant wait for each other on PostgreSQL. SQLite has one writer anyway."""
    session.execute(select(TenantRow.tenant).where(TenantRow.tenant == tenant).with_for_update()).all()


def bytes_of_rows(session: Session, tenant: str) -> int:
    """Return the bytes of a tenant's records in the database, those of files' rows by a flat rate."""
    documents = select(func.coalesce(func.sum(DocumentRow.num_bytes), 0)).where(DocumentRow.tenant == tenant)
    files = select(func.count()).where(FileRow.tenant == tenant)
    return int(session.scalars(documents).one()) + _FILE_ROW_BYTES * session.scalars(files).one()


def _stored_bytes(session: Session, tenant: str) -> int:
    """Return the bytes that a tenant stores or reserves: records, files, and what was noted or measured."""
    # Files with equal bytes and names share an object. While it is written, a reservation counts.
    kept = select(func.max(FileRow.size).label("size")).where(FileRow.tenant == tenant, FileRow.state != "writing")
    files = select(func.coalesce(func.sum(kept.group_by(FileRow.uri).subquery().c.size), 0))
    is_valid = StoredRow.expires_at.is_(None) | (StoredRow.expires_at > time.time())
    stored = select(func.coalesce(func.sum(StoredRow.num_bytes), 0)).where(StoredRow.tenant == tenant, is_valid)
    return bytes_of_rows(session, tenant) + sum(int(session.scalars(query).one()) for query in (files, stored))


def _measured(session: Session, tenant: str) -> Measured:
    query = select(StoredRow.what, func.sum(StoredRow.num_bytes), func.max(StoredRow.at))
    query = query.where(StoredRow.tenant == tenant, StoredRow.owner.not_in(_NOTED)).group_by(StoredRow.what)
    found = session.execute(query.order_by(StoredRow.what)).all()
    return Measured(
        at=max((at for *_, at in found), default=0.0), num_bytes={what: int(n) for what, n, _ in found if n}
    )


def add_stored(session: Session, tenant: str, owner: str, what: str, more: int) -> None:
    row = session.get(StoredRow, (tenant, owner, what), with_for_update=True)
    if row is None:
        row = StoredRow(tenant=tenant, owner=owner, what=what, num_bytes=0)
        session.add(row)
    row.num_bytes, row.at = max(0, row.num_bytes + more), time.time()


def forget_stored(session: Session, tenant: str, owner: str, what: str | None = None) -> None:
    """Count no more what an owner holds, of one category or of all."""
    gone = delete(StoredRow).where(StoredRow.tenant == tenant, StoredRow.owner == owner)
    session.execute(gone if what is None else gone.where(StoredRow.what == what))


class Reservation:
    """Bytes of a tenant's quota that are reserved in a row before they are written."""

    def __init__(self, database: Database, quotas: Quotas, tenant: str, is_limited: bool) -> None:
        self._database = database
        self._quotas = quotas
        self._tenant = tenant
        self._is_limited = is_limited
        self._key = tenant, _RESERVED, f"{time.time_ns():020d}-{uuid.uuid4().hex}"  # the first one's is the smallest
        self._num_bytes = 0
        self._renew_at = 0.0

    async def hold(self, num_bytes: int, *, grows: bool = False) -> None:
        """Reserve `num_bytes` in all. For a body that grows, a quarter more is reserved if the quota allows it.

        If bodies that come at once exceed the quota together, the first of them waits until others are refused: none
        would be taken if all were refused in the middle.

        Raises QuotaExceeded: then an earlier reservation does not change.
        """
        if not self._is_limited or (num_bytes <= self._num_bytes and time.time() < self._renew_at):
            return
        if grows and num_bytes > _STEP_BYTES:
            with suppress(QuotaExceeded):
                if await self._reserve(num_bytes + num_bytes // 4):
                    return
        until = time.monotonic() + _PATIENCE_S
        while True:
            if await self._reserve(num_bytes, is_patient=time.monotonic() < until):
                return
            await asyncio.sleep(_POLL_S)

    async def _reserve(self, num_bytes: int, *, is_patient: bool = True) -> bool:
        """Return True if it is reserved; False if it may be later, as this is the first of several reservations."""

        def reserve(session: Session) -> bool:
            lock_tenant(session, self._tenant)
            session.execute(delete(StoredRow).where(StoredRow.expires_at < now))  # of processes that died
            row = session.get(StoredRow, self._key)
            try:
                self._quotas.check_bytes(session, self._tenant, num_bytes - (row.num_bytes if row else 0))
            except QuotaExceeded:
                own = (StoredRow.tenant == self._tenant, StoredRow.owner == _RESERVED, StoredRow.what != self._key[2])
                first = session.scalars(select(func.min(StoredRow.what)).where(*own)).one()
                if first is None or first < self._key[2] or not is_patient:
                    raise
                return False
            held = StoredRow(**dict(zip(("tenant", "owner", "what"), self._key, strict=True)))
            held.num_bytes, held.at, held.expires_at = num_bytes, now, now + _BELIEVED_S
            session.merge(held)
            return True

        now = time.time()
        if is_reserved := await self._database.writing(reserve):
            self._num_bytes, self._renew_at = num_bytes, now + _RENEWED_S
        return is_reserved

    def settle(self, session: Session) -> None:
        """Release the reservation, in the transaction that notes what was written."""
        session.execute(delete(StoredRow).where(StoredRow.tenant == self._tenant, StoredRow.what == self._key[2]))

    async def release(self) -> None:
        if self._num_bytes:
            self._num_bytes = 0
            await self._database.writing(self.settle)


def waits_for_client(since: float) -> ColumnElement[bool]:
    """Return a condition on rows: runs that have waited for their client since then, or for longer."""
    phases = ("waiting_for_commands", "waiting_for_groups")
    return and_(RunRow.state == "running", RunRow.phase.in_(phases), RunRow.updated_at < since)


def _gpu_hours(session: Session, tenant: str) -> float:
    """Return all GPU hours of runs that are active or ended within the window, including removed runs."""
    query = select(func.coalesce(func.sum(RunRow.gpu_seconds), 0.0)).where(RunRow.tenant == tenant)
    # Two queries, as each can use an index, which a query with OR could not.
    each = (RunRow.ended_at.is_(None), RunRow.ended_at > time.time() - WINDOW_S)
    removed = select(func.coalesce(func.sum(RemovedRow.gpu_seconds), 0.0)).where(
        RemovedRow.tenant == tenant, RemovedRow.ended_at > time.time() - WINDOW_S
    )
    return sum(float(session.scalars(one).one()) for one in (*map(query.where, each), removed)) / 3600


def used_gpu_seconds(session: Session) -> list[tuple[str, float]]:
    """Return the tenants and their GPU seconds, counted as `_gpu_hours` counts, the greatest first."""
    since, used = time.time() - WINDOW_S, defaultdict[str, float](float)
    for row, is_recent in (
        (RunRow, RunRow.ended_at.is_(None) | (RunRow.ended_at > since)),
        (RemovedRow, RemovedRow.ended_at > since),
    ):
        query = select(row.tenant, func.sum(row.gpu_seconds)).where(is_recent).group_by(row.tenant)
        for tenant, seconds in session.execute(query):
            used[tenant] += float(seconds)
    return sorted(used.items(), key=itemgetter(1), reverse=True)


# --- Small records of tenants, as JSON in rows: what the service notes of requests, and nobody else reads ---

logger = logging.getLogger("longshore.service")

R = TypeVar("R", bound=BaseModel)
_LITTLE_BYTES = 512
_MOST_BYTES = 4 << 20
_LAST = chr(0x10FFFF)


class Documents(Generic[R]):
    """The records of one kind, each found by its tenant and key. Lists are in the order of keys.

    Every record counts in its tenant's quota of bytes. A change that adds little is always written, so that whatever
    exists can be ended.
    """

    def __init__(
        self, database: Database, quotas: Quotas, kind: str, model: type[R], *, is_counted: bool = True
    ) -> None:
        """`is_counted`: False for records that are not of requests, and whose number is bounded otherwise."""
        self._database = database
        self._quotas = quotas
        self._kind = kind
        self._model = model
        self._is_counted = is_counted

    async def find(self, tenant: str, key: str) -> R | None:
        row = await self._database.reading(partial(self._row, tenant, key, None))
        return None if row is None else self._parsed(row)

    async def find_alias(self, tenant: str, alias: str) -> R | None:
        row = await self._database.reading(partial(self._row, tenant, "", alias))
        return None if row is None else self._parsed(row)

    async def get(self, tenant: str, key: str) -> R:
        """Return a record. Raises NotFound."""
        if (found := await self.find(tenant, key)) is None:
            raise NotFound(f"there is no {self._kind} {key[:120]}")
        return found

    async def keys(self, tenant: str, below: str = "") -> list[str]:
        """List the keys of a tenant's records that begin with `below`."""
        query = select(DocumentRow.key).where(*self._below(tenant, below)).order_by(DocumentRow.key)
        return await self._database.reading(lambda session: list(session.scalars(query)))

    async def all(self, tenant: str, below: str = "") -> list[R]:
        """List a tenant's records whose keys begin with `below`."""
        return await self._database.reading(lambda session: self._all(session, tenant, below))

    async def newest(self, tenant: str, limit: int, before: str | None = None) -> list[R]:
        """List a tenant's last records in the order of keys, the last one first; with `before` those below that key."""
        query = select(DocumentRow).where(DocumentRow.tenant == tenant, DocumentRow.kind == self._kind)
        if before is not None:
            query = query.where(DocumentRow.key < before)
        query = query.order_by(DocumentRow.key.desc()).limit(limit)
        rows = await self._database.reading(lambda session: session.scalars(query).all())
        return [record for _, record in self._readable(rows)]

    async def everybodys(self) -> list[tuple[str, R]]:
        """List the records of all tenants, each with its tenant."""
        query = select(DocumentRow).where(DocumentRow.kind == self._kind).order_by(DocumentRow.tenant, DocumentRow.key)
        rows = await self._database.reading(lambda session: session.scalars(query).all())
        return [(row.tenant, record) for row, record in self._readable(rows)]

    async def add(
        self,
        tenant: str,
        key: str,
        record: R,
        *,
        alias: str | None = None,
        check: Callable[[Sequence[R]], None] | None = None,
    ) -> R | None:
        """Add a record unless there is one with this key, or this alias. Returns the one that was there, else None.

        Args:
            alias: a second key, for `find_alias`.
            check: called with the tenant's records of this kind, in the transaction that adds this one. What it raises
                is raised, and nothing is added.

        Raises QuotaExceeded.
        """
        return (await self._write(tenant, key, lambda before: before or record, alias, check))[0]

    async def put(self, tenant: str, key: str, record: R) -> None:
        """Add or replace a record. Raises QuotaExceeded."""
        await self._write(tenant, key, lambda _: record)

    async def change(self, tenant: str, key: str, change: Callable[[R], R], *, always: bool = False) -> R:
        """Replace a record by the one that `change` makes, in one transaction. Returns the new one.

        `always`: also beyond the quota, as for an end, however much it adds.

        Raises NotFound, QuotaExceeded, and what `change` raises: then nothing is written.
        """

        def changed(before: R | None) -> R:
            if before is None:
                raise NotFound(f"there is no {self._kind} {key[:120]}")
            return change(before)

        return (await self._write(tenant, key, changed, always=always))[1]

    async def delete(self, tenant: str, key: str) -> None:
        where = (DocumentRow.tenant == tenant, DocumentRow.kind == self._kind, DocumentRow.key == key)
        await self._database.writing(lambda session: session.execute(delete(DocumentRow).where(*where)))

    async def delete_below(self, tenant: str, below: str) -> None:
        where = self._below(tenant, below)
        await self._database.writing(lambda session: session.execute(delete(DocumentRow).where(*where)))

    async def delete_older(self, age_s: float) -> None:
        """Delete the records of all tenants that were written longer ago."""
        where = (DocumentRow.kind == self._kind, DocumentRow.written_at < time.time() - age_s)
        await self._database.writing(lambda session: session.execute(delete(DocumentRow).where(*where)))

    async def _write(
        self,
        tenant: str,
        key: str,
        change: Callable[[R | None], R],
        alias: str | None = None,
        check: Callable[[Sequence[R]], None] | None = None,
        *,
        always: bool = False,
    ) -> tuple[R | None, R]:
        def write(session: Session) -> tuple[R | None, R]:
            lock_tenant(session, tenant)
            row = self._row(tenant, key, alias, session)
            before = None if row is None else self._parsed(row)
            after = change(before)
            if after is before:
                return before, after
            body = after.model_dump_json()
            num_bytes = len(key.encode()) + len(body.encode())
            if num_bytes > _MOST_BYTES:
                raise InvalidInput(f"a {self._kind} has at most {_MOST_BYTES:,} bytes in all")
            more = num_bytes - (0 if row is None else row.num_bytes)
            if self._is_counted and not always and (row is None or more > _LITTLE_BYTES):
                self._quotas.check_bytes(session, tenant, more)
            if row is None and check is not None:
                check(self._all(session, tenant))
            if row is None:
                row = DocumentRow(tenant=tenant, kind=self._kind, key=key, alias=alias)
                session.add(row)
            row.body, row.num_bytes, row.written_at = body, num_bytes if self._is_counted else 0, time.time()
            return before, after

        return await self._database.writing(write)

    def _row(self, tenant: str, key: str, alias: str | None, session: Session) -> DocumentRow | None:
        own = (DocumentRow.tenant == tenant, DocumentRow.kind == self._kind)
        is_named = DocumentRow.key == key if alias is None else DocumentRow.alias == alias
        return session.scalars(select(DocumentRow).where(*own, is_named)).one_or_none()

    def _all(self, session: Session, tenant: str, below: str = "") -> list[R]:
        query = select(DocumentRow).where(*self._below(tenant, below)).order_by(DocumentRow.key)
        return [record for _, record in self._readable(session.scalars(query).all())]

    def _readable(self, rows: Sequence[DocumentRow]) -> Iterator[tuple[DocumentRow, R]]:
        """Parse rows. One that cannot be read, such as another version's, is logged and left out."""
        for row in rows:
            try:
                yield row, self._parsed(row)
            except ValidationError as error:
                # Without the input that pydantic quotes, which may be secret.
                rules = error.errors(include_url=False, include_context=False, include_input=False)
                logger.error("%s %s of %s cannot be read: %s", self._kind, row.key, row.tenant, rules)

    def _below(self, tenant: str, below: str) -> tuple[ColumnElement[bool], ...]:
        own = (DocumentRow.tenant == tenant, DocumentRow.kind == self._kind)
        return (*own, DocumentRow.key >= below, DocumentRow.key < below + _LAST)

    def _parsed(self, row: DocumentRow) -> R:
        return self._model.model_validate_json(row.body)
