"""Removes runs that have ended: their folders, their rows, and their places in lists. Their published models stay."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from pydantic import Field

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.tenants import Quotas
from service.database.engine import Database
from service.errors import Conflict
from service.runs.rows import forget
from service.runs.runs import Runs
from shared.errors import NotFound
from shared.runs.requests import RunId, RunRecord, SessionRun
from shared.storage.artifacts import read_record
from shared.storage.paths import MANIFEST, RunKeys, SweepKeys, published, version_claim
from shared.storage.removal import RemovedRun, delete_run, note_removed
from shared.storage.store import ObjectStore
from shared.storage.uses import claiming, end_of, marks_of, removed_run, used_by


class RunRemoved(Frozen):
    """A run that is no more. `stays_published`: it published versions, which stay, with its record."""

    run_id: RunId
    stays_published: bool
    num_objects: int = Field(description="deleted from the store")
    num_bytes: int


class _Owner(Frozen, extra="ignore"):
    run_id: str


@dataclass(frozen=True, eq=False)
class Removals:
    """Removes runs. A removal that was cut off is finished when it is asked for again, or by the next collection."""

    _runs: Runs
    _store: ObjectStore
    _database: Database
    _quotas: Quotas

    async def remove(self, tenant: str, run_id: str) -> RunRemoved:
        """Remove a run. Raises NotFound; Conflict: it is active or paused, or another run uses its checkpoints."""
        view = await self._runs.view(tenant, run_id)
        if view.state in ("running", "paused"):
            rule = "cancel it first" if view.state == "paused" else "cancel it, and remove it when it has ended"
            raise Conflict(f"{run_id} {'is' if view.state == 'paused' else 'is still'} {view.state}: {rule}")
        record = await self._runs.record(tenant, run_id)
        audit.touched(run_id)
        removed = await asyncio.to_thread(self._remove, record)
        self._quotas.recount(tenant)
        return removed

    # Blocking.

    def _remove(self, record: RunRecord) -> RunRemoved:
        unit = RunKeys(record.run_id).prefix
        with claiming(self._store, unit) as until:
            if until is None:
                raise Conflict(f"{record.run_id} is being deleted already: look again in two minutes")
            removed = self._checked(record, unit)
            note_removed(self._store, removed)
            self._database.write(lambda session: forget(session, removed))
            gone = delete_run(self._store, removed, until)
        return RunRemoved(
            run_id=record.run_id,
            stays_published=removed.stays_published,
            num_objects=len(gone),
            num_bytes=sum(info.size for info in gone),
        )

    def _checked(self, record: RunRecord, unit: str) -> RemovedRun:
        """Return the record of the removal. Raises Conflict: the store shows that the run is still needed."""
        run_id, trial = record.run_id, record.source.trial
        with suppress(NotFound):  # a removal was cut off
            return read_record(self._store, removed_run(run_id), RemovedRun)
        end = end_of(self._store, run_id)
        if end is None:
            raise Conflict(f"{run_id} is still running: cancel it, and remove it once it has ended")
        if (user := used_by(self._store, marks_of(self._store, unit), but=run_id)) is not None:
            raise Conflict(f"{user} uses a checkpoint of {run_id}: remove it once that run has ended")
        if trial is not None and self._store.head(SweepKeys(record.tenant, trial.sweep).end) is None:
            raise Conflict(f"{run_id} is a trial of {trial.sweep}, which has not ended")
        return RemovedRun(
            run_id=run_id,
            tenant=record.tenant,
            removed_at=time.time(),
            created_at=record.created_at,
            ended_at=end.ended_at or record.created_at,
            gpu_seconds=end.gpu_seconds,
            stays_published=self._has_published(record),
        )

    def _has_published(self, record: RunRecord) -> bool:
        """Return True if a version exists that the run has claimed. Newest ones are checked first."""
        has_others = isinstance(record.run, SessionRun) or record.source.trial is not None
        name = "" if has_others else f"{record.run.name or record.run_id}/"
        for kind in ("adapters", "models"):
            prefix = published(record.tenant, kind)
            keys = [info.key for info in self._store.list(f"{prefix}{name}") if info.key.endswith(f"/{MANIFEST}")]
            for key in reversed(keys):
                claimed, _, version = key.removeprefix(prefix).removesuffix(f"/{MANIFEST}").rpartition("/v")
                if version.isdigit() and self._owner(record.tenant, kind, claimed, int(version)) == record.run_id:
                    return True
        return False

    def _owner(self, tenant: str, kind: str, name: str, version: int) -> str | None:
        try:
            return read_record(self._store, version_claim(tenant, kind, name, version), _Owner).run_id
        except NotFound:
            return None
