"""Tenants share an installation. Each sees only its own runs, files and keys.

Quotas of a tenant: runs at once, GPU hours of thirty days, bytes in the store.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import TypeVar

from pydantic import BaseModel, JsonValue
from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import Session

from longshore.fields import Frozen
from service.accounts import audit
from service.database.engine import Database, KeyedLocks, RemovedRow, RunRow, TenantRow
from service.errors import Conflict, QuotaExceeded
from shared.errors import InvalidInput, NotFound
from shared.limits import ClientSettings, PriceSettings, QuotaSettings
from shared.runs.requests import FIRST_TENANT, Tenant
from shared.settings import Settings
from shared.storage import paths
from shared.storage.places import OpenPlaces, without_queries
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import Ledger, Measured, Reservation, StoredCount, measured, no_room

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
_BYTES_TRUSTED_S = 60.0
_STEP_BYTES = 1 << 20
_LITTLE_BYTES = 512
_QUERIES = "queries"
_MOST_NAMED = 5
_MOST_IDLE = 100  # runs of a tenant that wait for their clients without a place of the quota; more of them count
F = TypeVar("F", bound=Frozen)


class TenantRecord(Frozen):
    """A tenant, as the store keeps it. `quotas`: fields that are set override the installation's."""

    tenant: Tenant
    title: str = ""
    quotas: QuotaSettings = QuotaSettings()
    created_at: float

    def row(self) -> TenantRow:
        quotas = self.quotas.model_dump(exclude_unset=True)
        return TenantRow(tenant=self.tenant, title=self.title, quotas=quotas, created_at=self.created_at)


class Tenants:
    """Keeps tenants: their records in the store, and the rows that list them."""

    def __init__(self, store: ObjectStore, database: Database) -> None:
        self._store = store
        self._database = database

    async def create(self, tenant: str, title: str = "", quotas: QuotaSettings | None = None) -> TenantRecord:
        """Create a tenant: its record, then its row. Raises Conflict when the name is taken."""
        record = TenantRecord(tenant=tenant, title=title, quotas=quotas or QuotaSettings(), created_at=time.time())
        data = _json(record)
        key = paths.tenant_record(tenant)
        # The first tenant always exists, even without a record: it gets one when its quotas are set.
        if tenant == FIRST_TENANT or not await asyncio.to_thread(self._store.put_if_absent, key, data):
            raise Conflict(f"there is a tenant {tenant} already")
        await self._save(record)
        return record

    async def complete(self, tenant: str) -> TenantRecord:
        """Add the row of a tenant that has a record only, since its creation was interrupted.

        Raises NotFound: it is not on record.
        """
        data = await asyncio.to_thread(self._store.get_bytes, paths.tenant_record(tenant))
        record = TenantRecord.model_validate_json(data)
        await self._save(record)
        return record

    async def list(self) -> tuple[TenantRecord, ...]:
        """List all tenants, by name."""
        rows = await self._database.reading(lambda s: s.scalars(select(TenantRow).order_by(TenantRow.tenant)).all())
        return tuple(TenantRecord.model_validate(row, from_attributes=True) for row in rows)

    async def show(self, tenant: str) -> TenantRecord:
        """Return a tenant. Raises NotFound."""
        row = await self._database.reading(lambda session: session.get(TenantRow, tenant))
        if row is None:
            raise NotFound(f"there is no tenant {tenant}")
        return TenantRecord.model_validate(row, from_attributes=True)

    async def set_quotas(self, tenant: str, quotas: QuotaSettings) -> TenantRecord:
        """Set a tenant's quotas. They replace the ones set before."""
        record = (await self.show(tenant)).model_copy(update={"quotas": quotas})
        await asyncio.to_thread(self._store.put_bytes, paths.tenant_record(tenant), _json(record))
        await self._save(record)
        return record

    async def _save(self, record: TenantRecord) -> None:
        audit.touched(record.tenant)
        await self._database.writing(lambda session: session.merge(record.row()))


def ensure_first(session: Session) -> None:
    """Add the row of the first tenant, which is never created otherwise, if it is missing."""
    if session.get(TenantRow, FIRST_TENANT) is None:
        session.add(TenantRecord(tenant=FIRST_TENANT, created_at=0.0).row())


def _json(record: TenantRecord) -> bytes:
    return record.model_dump_json(indent=1, exclude_unset=True).encode()


class TenantUsage(Frozen):
    """A tenant's usage and quotas; a quota of None is no limit.

    `cost`: of its GPU hours; None if they have no price. `measured`: the bytes that are only measured periodically.
    """

    tenant: Tenant
    concurrent_runs: int
    gpu_hours: float
    stored_bytes: int
    measured: Measured = Measured()
    cost: float | None = None
    currency: str = "USD"
    quotas: QuotaSettings


class Quotas:
    """Checks the quotas of tenants: on runs, which are counted in the database, and bytes, counted in the store."""

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
        self._counted: dict[str, tuple[float, StoredCount]] = {}
        self._locks = KeyedLocks()

    async def usage(self, tenant: str) -> TenantUsage:
        """Return a tenant's usage and quotas. Its count of bytes may be a minute old."""

        def look(session: Session) -> TenantUsage:
            hours = _gpu_hours(session, tenant)
            return TenantUsage(
                tenant=tenant,
                concurrent_runs=len(self._concurrent_runs(session, tenant)),
                gpu_hours=hours,
                cost=None if self._prices.gpu_hour is None else hours * self._prices.gpu_hour,
                currency=self._prices.currency,
                stored_bytes=stored,
                measured=parts,
                quotas=self.of(session, tenant),
            )

        stored = await self.stored_bytes(tenant)
        parts = await asyncio.to_thread(measured, self._store, tenant)
        return await self._database.reading(look)

    def of(self, session: Session, tenant: str) -> QuotaSettings:
        """The quotas that apply to a tenant."""
        row = session.get(TenantRow, tenant)
        return self._settings.model_copy(update=row.quotas if row else {})

    def admit_run(self, session: Session, tenant: str) -> None:
        """Check the quotas for one more run. To be called in the transaction that adds it, so that none is exceeded.

        Raises QuotaExceeded: one more would break a quota.
        """
        # PostgreSQL has concurrent writers; those of one tenant wait here for each other. SQLite has one writer.
        session.execute(select(TenantRow.tenant).where(TenantRow.tenant == tenant).with_for_update()).all()
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
        async with self.reservation(tenant) as reserved:
            await reserved.hold(more)

    @asynccontextmanager
    async def reservation(self, tenant: str) -> AsyncIterator["WriteReservation"]:
        """Reserve bytes that are written in the block. Those that are not settled by its end are released."""
        quotas = await self._database.reading(lambda session: self.of(session, tenant))
        reserved = WriteReservation(self, Reservation(self._store, tenant), tenant, quotas.stored_bytes)
        try:
            yield reserved
        finally:
            await asyncio.to_thread(reserved.reservation.drop)

    async def put_record(self, tenant: str, key: str, data: bytes, *, only_new: bool = False) -> bool:
        """Put a record that a tenant's request makes or changes, and count its bytes.

        Every such record is written here or by `put_noted`; `paths.counted_records` has their prefixes. A small change
        is written even if the quota is used up, so that whatever exists can be ended.

        Args:
            only_new: do not overwrite an existing record.

        Returns:
            True if the record was put.

        Raises:
            QuotaExceeded
        """
        before = await asyncio.to_thread(self._store.head, key)
        if before is not None and only_new:
            return False
        more = len(data) - (before.size if before else 0)
        async with self.reservation(tenant) as reserved:
            if before is None or more > _LITTLE_BYTES:
                await reserved.hold(more)
            put = self._store.put_if_absent if only_new else self._store.put_bytes
            is_put = await asyncio.to_thread(put, key, data) is not False
            if is_put:
                await reserved.settle(max(0, more))
        return is_put

    async def put_noted(self, tenant: str, owner: str, name: str, data: bytes, put: Callable[[], bool]) -> bool:
        """Put a record that no prefix of the tenant's has, and note its bytes in the tenant's ledger.

        Args:
            owner: the run that it is of, or the kind of record.
            name: the record's name among its owner's.
            put: puts it; returns False if it is there. Blocking.

        Returns:
            True if the record was put.

        Raises:
            QuotaExceeded
        """

        def put_and_note() -> bool:
            if is_put := put():
                Ledger(self._store, tenant).bring(owner, name, len(data))
            return is_put

        async with self.reservation(tenant) as reserved:
            await reserved.hold(len(data))
            if is_put := await asyncio.to_thread(put_and_note):
                await reserved.settle(len(data))
        return is_put

    async def sealed(self, tenant: str, request: F) -> F:
        """Return a request without the queries of its URIs, which may contain signatures; the store keeps them.

        Raises:
            InvalidInput: a URI would be too long.
            QuotaExceeded
        """
        request, queries = without_queries(request)
        for query_id, uri in queries.items():
            key = paths.query_record(query_id)
            if await asyncio.to_thread(self._store.head, key) is None:
                put = partial(self._store.put_if_absent, key, uri)
                await self.put_noted(tenant, _QUERIES, query_id, uri, put)
        return request

    async def reserve(self, reservation: Reservation, tenant: str, most: int, num_bytes: int) -> None:
        """Reserve bytes for a write. Within this process, a tenant's writers do this one after another.

        Raises QuotaExceeded: together with the bytes that others are writing they are too many.
        """
        async with self._locks.of(tenant):
            counted = await self._count_of(tenant)
            used = await asyncio.to_thread(reservation.admit, num_bytes, most, counted)
        if used > most:
            raise QuotaExceeded("stored_bytes", no_room(tenant, used - num_bytes, most, num_bytes))

    def recount(self, tenant: str | None = None) -> None:
        """Count a tenant's bytes again at the next request for them; without a tenant, all tenants'."""
        for each in [tenant] if tenant else list(self._counted):
            self._counted.pop(each, None)

    def remove_bytes(self, tenant: str, fewer: int) -> None:
        """Subtract bytes that were deleted since the last count."""
        if (known := self._counted.get(tenant)) is not None:
            self._counted[tenant] = known[0], StoredCount(known[1].at, known[1].num_bytes - fewer)

    async def stored_bytes(self, tenant: str) -> int:
        """Count the bytes in the store, those that are being written included."""
        counted = await self._count_of(tenant)
        ledger = Ledger(self._store, tenant)
        return counted.num_bytes + await asyncio.to_thread(ledger.written_since, counted.at)

    async def _count_of(self, tenant: str) -> StoredCount:
        counted_at, counted = self._counted.get(tenant, (0.0, None))
        if counted is None or time.monotonic() - counted_at > _BYTES_TRUSTED_S:
            counted_at = time.monotonic()
            counted = await asyncio.to_thread(Ledger(self._store, tenant).count)
            self._counted[tenant] = counted_at, counted
        return counted


class WriteReservation:
    """Bytes of a tenant's quota that are reserved before they are written."""

    def __init__(self, quotas: Quotas, reservation: Reservation, tenant: str, most: int | None) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._most = most
        self.reservation = reservation

    async def hold(self, num_bytes: int, *, grows: bool = False) -> None:
        """Reserve `num_bytes` in all. For a body that grows, a quarter more is reserved if the quota allows it.

        Raises QuotaExceeded.
        """
        if self._most is None or self.reservation.covers(num_bytes):
            return
        if grows and num_bytes > _STEP_BYTES:
            with suppress(QuotaExceeded):
                await self._quotas.reserve(self.reservation, self._tenant, self._most, num_bytes + num_bytes // 4)
        if not self.reservation.covers(num_bytes):
            await self._quotas.reserve(self.reservation, self._tenant, self._most, num_bytes)

    async def settle(self, num_bytes: int) -> None:
        """Count the bytes as written: they stay."""
        if self._most is None:
            self._quotas.remove_bytes(self._tenant, -num_bytes)
        else:
            await asyncio.to_thread(self.reservation.settle, num_bytes)


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
