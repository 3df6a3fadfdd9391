"""What a tenant uses, and what it may use: runs at once, GPU hours of thirty days, bytes in the store."""

import asyncio
import time

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.database.tables import RunRow, TenantRow
from service.problems import QuotaExceeded
from shared import paths
from shared.models import Frozen
from shared.runs import Tenant
from shared.settings import QuotaSettings
from shared.store import ObjectStore

WINDOW_S = 30 * 86_400
_BYTES_TRUSTED_S = 60.0


class Usage(Frozen):
    """What a tenant uses, beside its quotas; a quota of None is no limit."""

    tenant: Tenant
    concurrent_runs: int
    gpu_hours: float
    stored_bytes: int
    quotas: QuotaSettings


class Quotas:
    """Needs the installation's own quotas, the database that counts runs, and the store that holds bytes."""

    def __init__(self, settings: QuotaSettings, store: ObjectStore, database: Database) -> None:
        self._settings = settings
        self._store = store
        self._database = database
        self._bytes: dict[str, tuple[float, int]] = {}

    async def usage(self, tenant: str) -> Usage:
        """Bytes may be a minute old."""

        def look(session: Session) -> Usage:
            return Usage(
                tenant=tenant,
                concurrent_runs=_concurrent_runs(session, tenant),
                gpu_hours=_gpu_hours(session, tenant),
                stored_bytes=stored,
                quotas=self.of(session, tenant),
            )

        stored = await self._stored_bytes(tenant)
        return await self._database.reading(look)

    def of(self, session: Session, tenant: str) -> QuotaSettings:
        """The quotas that hold for a tenant."""
        row = session.get(TenantRow, tenant)
        return self._settings.model_copy(update=row.quotas if row else {})

    def admit_run(self, session: Session, tenant: str) -> None:
        """Called in the writing transaction that makes a run running, so that two never take the last place.

        Raises:
            QuotaExceeded: one more would break a quota.
        """
        # PostgreSQL lets writers work side by side: those of one tenant wait here. SQLite has one writer.
        session.execute(select(TenantRow.tenant).where(TenantRow.tenant == tenant).with_for_update()).all()
        quotas = self.of(session, tenant)
        most = quotas.concurrent_runs
        if most is not None and _concurrent_runs(session, tenant) >= most:
            raise QuotaExceeded("concurrent_runs", f"{most} of {tenant}'s runs are going on, and more are not allowed")
        if quotas.gpu_hours is not None and (used := _gpu_hours(session, tenant)) >= quotas.gpu_hours:
            text = f"{tenant}'s runs of the last 30 days took {used:.2f} GPU hours of {quotas.gpu_hours:g}"
            raise QuotaExceeded("gpu_hours", text)

    async def admit_bytes(self, tenant: str, more: int) -> None:
        """Raises QuotaExceeded when so many bytes more would break the quota."""
        quotas = await self._database.reading(lambda session: self.of(session, tenant))
        if quotas.stored_bytes is not None and (used := await self._stored_bytes(tenant)) + more > quotas.stored_bytes:
            text = f"{tenant} stores {used:,} bytes of {quotas.stored_bytes:,}: {more:,} more are not allowed"
            raise QuotaExceeded("stored_bytes", text)

    def add_bytes(self, tenant: str, more: int) -> None:
        """So many were stored since they were counted."""
        since, stored = self._bytes.get(tenant, (0.0, 0))
        self._bytes[tenant] = since, stored + more

    async def _stored_bytes(self, tenant: str) -> int:
        since, _ = self._bytes.get(tenant, (0.0, 0))
        if not since or time.monotonic() - since > _BYTES_TRUSTED_S:
            folder = f"{paths.tenant_folder(tenant)}/"
            asked = time.monotonic()
            total = await asyncio.to_thread(lambda: sum(item.size for item in self._store.list(folder)))
            self._bytes[tenant] = asked, total
        return self._bytes[tenant][1]


def _concurrent_runs(session: Session, tenant: str) -> int:
    query = select(func.count()).where(RunRow.tenant == tenant, RunRow.state == "running")
    return session.scalars(query).one()


def _gpu_hours(session: Session, tenant: str) -> float:
    """Of runs that are going on, or ended within the window: a run counts whole."""
    query = select(func.coalesce(func.sum(RunRow.gpu_seconds), 0.0)).where(RunRow.tenant == tenant)
    # Two questions: an index has the answer to each, and none to whether one or the other holds.
    each = (RunRow.ended_at.is_(None), RunRow.ended_at > time.time() - WINDOW_S)
    return sum(float(session.scalars(query.where(which)).one()) for which in each) / 3600
