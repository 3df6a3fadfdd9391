"""Upkeep: what policies let go, removed runs, and limits of spending."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.tenants import Quotas
from service.database.engine import Database
from service.errors import Conflict, QuotaExceeded
from service.runs.rows import RunRows, forget
from service.runs.runs import Runs
from service.temporal import Temporal, cause_of
from shared.automation import GarbageReport, GarbageRequest
from shared.errors import NotFound
from shared.runs.requests import FIRST_TENANT, RunId, RunRecord, SessionRun
from shared.settings import Settings
from shared.storage.artifacts import read_record
from shared.storage.paths import MANIFEST, RunKeys, SweepKeys, content_key, published, version_claim
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import (
    RemovedRun,
    claiming,
    delete_run,
    end_of,
    marks_of,
    note_removed,
    removed_run,
    used_by,
)

# --- Garbage collection, on a control host: at an operator's request, and periodically ---

GARBAGE_WORKFLOW = "GarbageWorkflow"


class GarbageView(Frozen):
    """The status of a collection. `report`: set when it is done."""

    state: Literal["running", "done"]
    report: GarbageReport | None = None


class Garbage:
    """Starts collections: of all services of an installation one at a time, and one dry run."""

    def __init__(self, settings: Settings, temporal: Temporal, quotas: Quotas) -> None:
        self._settings = settings
        self._temporal = temporal
        self._quotas = quotas
        self._due = time.monotonic() + settings.retention.every_s

    async def collect(self, request: GarbageRequest, wait_s: float) -> GarbageView:
        """Start a collection, or join the one that is going on, and wait for its end, so long at most.

        Raises TemporalUnavailable; StoreUnavailable, InvalidInput: the collection failed with it.
        """
        handle = await self._temporal.start(
            GARBAGE_WORKFLOW,
            request,
            f"garbage-{content_key(self._settings.control_queue, request)}",
            FIRST_TENANT,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            result_type=GarbageReport,
        )
        report: GarbageReport | None = None
        async with self._temporal.client():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    try:
                        report = await handle.result()
                    except WorkflowFailureError as error:
                        raise cause_of(error) from None
        self._quotas.recount()
        return GarbageView(state="running" if report is None else "done", report=report)

    async def collect_when_due(self) -> None:
        """Start a collection each `retention.every_s` seconds, the first so long after this service began."""
        if time.monotonic() >= self._due:
            await self.collect(GarbageRequest(is_dry=False), 0)
            self._due = time.monotonic() + self._settings.retention.every_s


# --- Removes runs that have ended ---
# Their folders, their rows, and their places in lists. Their published models stay.


class RunRemoved(Frozen):
    """A run that is no more. `stays_published`: it published versions, which stay, with its record."""

    run_id: RunId
    stays_published: bool
    num_objects: int = Field(description="objects deleted from the store")
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


# --- Limits of spending: pauses the runs of a tenant at its limit, and resumes them when the limit is raised ---
#
# This keeps no state: spending is computed from the rows of runs, and a run's status says whether a limit has paused
# it.

logger = logging.getLogger("longshore.service")


class SpendingLimits:
    """Pauses and resumes runs. Several services may do so at once."""

    def __init__(self, runs: Runs, rows: RunRows) -> None:
        self._runs = runs
        self._rows = rows

    async def enforce(self) -> None:
        """Pause the runs of tenants at their limit; resume, oldest first, paused runs of tenants now below theirs.

        Raises:
            TemporalUnavailable, DatabaseUnavailable: the next call does the rest.
        """
        over, going_on, held = await self._rows.overspending()
        for run in going_on:
            tenant = run.record.tenant
            with suppress(Conflict, NotFound):  # it has just ended
                await self._runs.pause(tenant, run.run_id, f"quota spending: {over[tenant]}")
                logger.info("%s is paused: %s", run.run_id, over[tenant])
        for run in held:
            with suppress(Conflict, NotFound, QuotaExceeded):  # another quota has no place for it yet
                await self._runs.resume(run.record.tenant, run.run_id)
                logger.info("%s goes on: its tenant may spend more", run.run_id)
