"""Tenants: who shares an installation. Each sees its own runs, files and keys, and nothing of the others'."""

import asyncio
import time

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.accounts import audit
from service.database.engine import Database
from service.database.tables import TenantRow
from service.errors import Conflict
from shared.contract import Frozen
from shared.errors import NotFound
from shared.runs.requests import FIRST_TENANT, Tenant
from shared.settings import QuotaSettings
from shared.storage import paths
from shared.storage.store import ObjectStore


class TenantRecord(Frozen):
    """A tenant, as the store keeps it. `quotas`: fields that are set override the installation's."""

    tenant: Tenant
    title: str = ""
    quotas: QuotaSettings = QuotaSettings()
    created_at: float

    def row(self) -> TenantRow:
        quotas = self.quotas.model_dump(exclude_unset=True)
        return TenantRow(tenant=self.tenant, title=self.title, quotas=quotas, created_at=self.created_at)

    @classmethod
    def of(cls, row: TenantRow) -> "TenantRecord":
        quotas = QuotaSettings.model_validate(row.quotas)
        return cls(tenant=row.tenant, title=row.title, quotas=quotas, created_at=row.created_at)


class Tenants:
    """Needs the store with their records, and the database that lists them."""

    def __init__(self, store: ObjectStore, database: Database) -> None:
        self._store = store
        self._database = database

    async def create(self, tenant: str, title: str = "", quotas: QuotaSettings | None = None) -> TenantRecord:
        """Raises Conflict when the name is taken."""
        record = TenantRecord(tenant=tenant, title=title, quotas=quotas or QuotaSettings(), created_at=time.time())
        data = _json(record)
        key = paths.tenant_record(tenant)
        # The first tenant is there without a record, until it has quotas of its own.
        if tenant == FIRST_TENANT or not await asyncio.to_thread(self._store.put_if_absent, key, data):
            raise Conflict(f"there is a tenant {tenant} already")
        await self._save(record)
        return record

    async def complete(self, tenant: str) -> TenantRecord:
        """Put a tenant that is on record into the list, where its making was cut off in between.

        Raises:
            NotFound: it is not on record.
        """
        data = await asyncio.to_thread(self._store.get_bytes, paths.tenant_record(tenant))
        record = TenantRecord.model_validate_json(data)
        await self._save(record)
        return record

    async def list(self) -> tuple[TenantRecord, ...]:
        """All tenants, by name."""
        rows = await self._database.reading(lambda s: s.scalars(select(TenantRow).order_by(TenantRow.tenant)).all())
        return tuple(TenantRecord.of(row) for row in rows)

    async def show(self, tenant: str) -> TenantRecord:
        """Raises NotFound."""
        row = await self._database.reading(lambda session: session.get(TenantRow, tenant))
        if row is None:
            raise NotFound(f"there is no tenant {tenant}")
        return TenantRecord.of(row)

    async def set_quotas(self, tenant: str, quotas: QuotaSettings) -> TenantRecord:
        """Give a tenant quotas of its own, in the place of those that it had."""
        record = (await self.show(tenant)).model_copy(update={"quotas": quotas})
        await asyncio.to_thread(self._store.put_bytes, paths.tenant_record(tenant), _json(record))
        await self._save(record)
        return record

    async def _save(self, record: TenantRecord) -> None:
        audit.touched(record.tenant)
        await self._database.writing(lambda session: session.merge(record.row()))


def ensure_first(session: Session) -> None:
    """The first tenant is always there; it was never made."""
    if session.get(TenantRow, FIRST_TENANT) is None:
        session.add(TenantRecord(tenant=FIRST_TENANT, created_at=0.0).row())


def _json(record: TenantRecord) -> bytes:
    return record.model_dump_json(indent=1, exclude_unset=True).encode()
