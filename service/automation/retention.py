"""Retention: what the store holds, what policies let go, and how that is deleted beside runs; removals of runs."""

import asyncio
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from activities.records import find_newest
from longshore.automation import Freed, GarbageReport, GarbageView
from longshore.runs import FIRST_TENANT, RunRecord, SessionRun
from longshore.views import RunRemoved, RunView
from service.accounts import audit
from service.accounts.tenants import Documents, Quotas
from service.automation.sweeps import SweepState
from service.database.engine import Database, RemovedRow, RunRow, UseRow
from service.inference.published_models import PublishedModels
from service.runs.rows import CLAIM_S, Claim, Uses, forget
from service.runs.runs import Runs
from service.temporal import Temporal, cause_of
from shared.automation import GarbageRequest
from shared.errors import Conflict, InvalidInput, NotFound
from shared.settings import RetentionSettings, Settings
from shared.storage.artifacts import find_artifact, is_job, stored_checkpoints
from shared.storage.paths import MANIFEST, RunKeys, checkpoint_adapter, content_key, tenant_folder
from shared.storage.store import ObjectInfo, ObjectStore
from shared.storage.stored_bytes import (
    FOLDERS,
    PUBLISHED,
    PUBLISHED_FOLDERS,
    SHARED,
    Measurement,
    Stored,
    What,
    count_object,
    unit_of,
)

# --- Inventory of the store: the parts of each run, the artifacts that runs may share, and their users ---
#
# Rows say what runs are and what they use; one listing of each prefix says what lies there. Blocking.

KINDS: dict[str, What] = {
    "tokenized": "data",
    "packed": "data",
    "prompts": "data",
    "models": "models",
}
"""Categories of artifacts that runs may share; the rest are samples."""


@dataclass
class Heap:
    """Objects that are counted together. `newest`: when the last of them was written, in seconds since 1970."""

    num_objects: int = 0
    num_bytes: int = 0
    newest: float = 0.0

    def add(self, info: ObjectInfo) -> None:
        self.num_objects += 1
        self.num_bytes += info.size
        self.newest = max(self.newest, info.modified)


@dataclass
class RunFolder:
    """A run, and its folder.

    Attributes:
        stored: bytes that count for its tenant, by category.
        checkpoints: objects by step and fence; `newest` is the manifest's, 0 without one.
        job: the key of one of its job files, and how long that is.
        state: as its row says; None without a row: it was removed, or is newer than a database that was restored.
        adapter: what it has published.
    """

    run_id: str
    heaps: dict[What, Heap] = field(default_factory=lambda: defaultdict(Heap))
    stored: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[tuple[str, str], Heap] = field(default_factory=dict)
    job: str | None = None
    job_bytes: int = 0
    tenant: str = ""
    state: str | None = None
    ended_at: float | None = None
    adapter: str | None = None

    @property
    def whole_checkpoints(self) -> list[tuple[str, str]]:
        """Those that have a manifest, the oldest first. Others are being uploaded, or were only half deleted."""
        return sorted(place for place, heap in self.checkpoints.items() if heap.newest)

    @property
    def goes_on(self) -> bool:
        return self.state in ("running", "paused")


@dataclass
class Census:
    """The store's contents.

    `users`: the runs that use a unit, each with the time when it last said so. `removed`: removed runs. `published`:
    bytes by tenant.
    """

    runs: dict[str, RunFolder] = field(default_factory=dict)
    shared: dict[str, Heap] = field(default_factory=lambda: defaultdict(Heap))
    users: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    removed: dict[str, RemovedRow] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def users_of(self, unit: str) -> list[RunFolder]:
        """Return the runs on record that use a unit."""
        known = (self.runs.get(run_id) for run_id in sorted(self.users.get(unit, ())))
        return [run for run in known if run is not None and run.state is not None]

    def discount(self, gone: Iterable[ObjectInfo]) -> None:
        """Let deleted objects count no more in `measured`."""
        for info in gone:
            if (unit := unit_of(info.key)) is not None:
                self.shared[unit].num_bytes -= info.size
            elif info.key.startswith("runs/"):
                _, run_id, path = info.key.split("/", 2)
                count_object(self.runs[run_id].stored, path, -info.size)

    def stored(self) -> tuple[Stored, ...]:
        """Return what counts for tenants."""
        found = [Stored(tenant=t, owner=PUBLISHED, what=PUBLISHED, num_bytes=n) for t, n in self.published.items()]
        for run_id, run in self.runs.items():
            for what, num_bytes in run.stored.items() if run.tenant else ():
                found.append(Stored(tenant=run.tenant, owner=run_id, what=what, num_bytes=num_bytes))
        for unit, heap in self.shared.items():
            for tenant in sorted({run.tenant for run in self.users_of(unit)}):
                found.append(Stored(tenant=tenant, owner=unit, what=what_of(unit), num_bytes=heap.num_bytes))
        return tuple(each for each in found if each.num_bytes > 0)


def take(store: ObjectStore, database: Database) -> Census:
    """Count everything. Rows are read first: a run that uses a unit later is looked for again before a deletion."""
    census = Census()

    def read(session: Session) -> None:
        for use in session.scalars(select(UseRow)):
            census.users[use.unit][use.run_id] = use.at
        for row in session.execute(select(RunRow.run_id, RunRow.tenant, RunRow.state, RunRow.ended_at, RunRow.status)):
            census.runs[row.run_id] = RunFolder(
                row.run_id,
                tenant=row.tenant,
                state=row.state,
                ended_at=row.ended_at,
                adapter=json.loads(row.status)["adapter"],
            )
        for removed in session.scalars(select(RemovedRow)):
            census.removed[removed.run_id] = removed
            census.runs[removed.run_id] = RunFolder(removed.run_id, tenant=removed.tenant)

    database.read(read)
    for folder in SHARED:
        for info in store.list(f"{folder}/"):
            if (shared := unit_of(info.key)) is not None:
                census.shared[shared].add(info)
    for info in store.list("runs/"):
        _, run_id, path = info.key.split("/", 2)
        _count(census.runs.setdefault(run_id, RunFolder(run_id)), path, info)
    for info in store.list(f"{tenant_folder()}"):
        _, tenant, folder, _ = info.key.split("/", 3)
        if folder in PUBLISHED_FOLDERS:
            census.published[tenant] += info.size
    return census


def _count(run: RunFolder, path: str, info: ObjectInfo) -> None:
    folder, _, rest = path.partition("/")
    run.heaps[FOLDERS.get(folder, "records")].add(info)
    count_object(run.stored, path, info.size)
    match folder, rest.split("/"):
        case "checkpoints", [label, step, *name]:
            heap = run.checkpoints.setdefault((step, label), Heap())
            heap.num_objects += 1
            heap.num_bytes += info.size
            if name == [MANIFEST]:
                heap.newest = info.modified
        case "logs", _ if run.job is None and is_job(info.key):
            run.job, run.job_bytes = info.key, info.size
        case "result.json", _ if run.ended_at is None:
            run.ended_at = info.modified


def what_of(unit: str) -> What:
    return KINDS.get(unit.partition("/")[0], "samples")


# --- Which stored objects a retention policy expires. Pure: it reads nothing, and the collection checks again ---

_DAY_S = 86_400.0
NUM_STAY = 3
"""Objects that stay of a removed run whose published versions stay: its record, its result, one job."""


@dataclass(frozen=True)
class Due:
    """A unit, or parts of a run's folder, that may go: `heaps` has each of `whats`. `tenants`: whose they are."""

    unit: str
    whats: tuple[What, ...]
    tenants: tuple[str, ...]
    heaps: tuple[Heap, ...]
    run: RunFolder | None = None


def due(census: Census, policy: RetentionSettings, now: float) -> Iterator[Due]:
    """Yield what the policy expires. It never includes anything that a recorded run uses before its end."""
    for run in census.runs.values():
        yield from _of_run(census, run, policy, now)
    days: dict[What, float | None] = {
        "data": policy.data_days,
        "samples": policy.samples_days,
        "models": policy.models_days,
    }
    for unit, heap in census.shared.items():
        what, users = what_of(unit), census.users_of(unit)
        is_needed = what == "models" and any(_needs_its_model(census, run_id) for run_id in census.users.get(unit, ()))
        if is_needed or any(run.goes_on for run in users):
            continue
        used = max((run.ended_at or 0.0 for run in users), default=0.0)
        if _is_over(days[what], max(heap.newest, used), now):
            tenants = tuple(sorted({run.tenant for run in users}))
            yield Due(unit, (what,), tenants, (heap,))


def _of_run(census: Census, run: RunFolder, policy: RetentionSettings, now: float) -> Iterator[Due]:
    unit = RunKeys(run.run_id).prefix
    if (removed := census.removed.get(run.run_id)) is not None:
        left = _summed(run.heaps.values())
        if left.num_objects > (NUM_STAY if removed.stays_published else 0):
            yield Due(unit, ("removed",), (removed.tenant,), (left,), run)
        return
    others = [user for user in census.users_of(unit) if user is not run]
    if run.state is None or run.goes_on or any(user.goes_on for user in others):
        return
    ended_at, found = run.ended_at or now, dict[What, Heap]()
    if _is_over(policy.checkpoints_days, ended_at, now):
        kept = run.whole_checkpoints[-policy.checkpoints_kept :] if policy.checkpoints_kept else []
        going = [heap for place, heap in run.checkpoints.items() if place not in kept]
        if policy.checkpoints_kept == 0 and run.heaps["checkpoints"].num_objects:
            found["checkpoints"] = run.heaps["checkpoints"]
        elif going:
            found["checkpoints"] = _summed(going)
    logs, num_jobs = run.heaps["logs"], int(run.job is not None)  # one job stays: it says what the run trained
    if _is_over(policy.logs_days, ended_at, now) and logs.num_objects > num_jobs:
        found["logs"] = Heap(logs.num_objects - num_jobs, logs.num_bytes - run.job_bytes)
    rest: dict[What, float | None] = {"data": policy.data_days, "sessions": policy.sessions_days}
    for what, days in rest.items():
        if _is_over(days, ended_at, now) and run.heaps[what].num_objects:
            found[what] = run.heaps[what]
    if found:
        yield Due(unit, tuple(found), (run.tenant,), tuple(found.values()), run)


def _summed(heaps: Iterable[Heap]) -> Heap:
    found = list(heaps)
    return Heap(sum(heap.num_objects for heap in found), sum(heap.num_bytes for heap in found))


def _needs_its_model(census: Census, run_id: str) -> bool:
    """True for a run whose checkpoints or published versions depend on the models that it used."""
    run, removed = census.runs.get(run_id), census.removed.get(run_id)
    if removed is not None:
        return removed.stays_published
    return run is not None and (run.goes_on or bool(run.whole_checkpoints) or run.adapter is not None)


def _is_over(days: float | None, since: float, now: float) -> bool:
    return days is not None and since < now - days * _DAY_S


# --- The activity `collect_garbage`: measures what tenants store, and deletes what policies expire ---
#
# It may be killed at any moment and retried: each unit is deleted under a claim (service/runs/rows.py), manifests
# first. One census finds all due units; before its deletion each unit is checked again, under its claim.

_log = logging.getLogger("longshore.service")
_AT_ONCE = 8
_BEAT_S = 1.0
_NEW_S = 3600.0
_RESUMING_S = 86_400.0  # until the workflow of a run that was resumed has moved its result away
_STATES = "kept_states"  # marks of a session's checkpoints
Deleted = dict[What, list[ObjectInfo]]


@dataclass(frozen=True, eq=False)
class Retention:
    """The activity. `_policy`: the installation's."""

    _store: ObjectStore
    _database: Database
    _quotas: Quotas
    _policy: RetentionSettings

    @activity.defn(name="collect_garbage")
    async def collect(self, request: GarbageRequest) -> GarbageReport:
        """Measure, and delete what is due. A dry run only reports it.

        Raises StoreUnavailable, DatabaseUnavailable: the next collection deletes the rest.
        """
        work = asyncio.to_thread(collect, self._store, self._database, self._policy, is_dry=request.is_dry)
        working = asyncio.ensure_future(work)
        while not working.done():
            activity.heartbeat()
            await asyncio.wait({working}, timeout=_BEAT_S)
        report, measurement = working.result()
        if not request.is_dry:
            await self._quotas.note_measured(measurement)
        return report


def collect(
    store: ObjectStore,
    database: Database,
    policy: RetentionSettings,
    *,
    is_dry: bool,
    now: float | None = None,
    at_once: int = _AT_ONCE,
) -> tuple[GarbageReport, Measurement]:
    """Do the activity's work, this many units at once. Blocking. `now`: the time from which ages are counted.

    Returns what was done, and what tenants store after it.
    """
    began = time.time()
    census = take(store, database)
    found = list(due(census, policy, began if now is None else now))
    num_withdrawn = 0
    if is_dry:
        heaps = [(each, *of) for each in found for of in zip(each.whats, each.heaps, strict=True)]
        freed = _freed((each, what, heap.num_objects, heap.num_bytes) for each, what, heap in heaps)
    else:
        uses, done = Uses(database), list[Deleted | None]()
        for some in (found[first : first + at_once] for first in range(0, len(found), at_once)):
            with (
                uses.claiming(*(each.unit for each in some)) as claims,
                ThreadPoolExecutor(at_once, thread_name_prefix="garbage") as threads,
            ):
                deleting = partial(_delete_or_tell, store, policy, census)
                done += threads.map(deleting, some, claims)
        num_withdrawn = done.count(None)
        gone = [(each, what, infos) for each, of in zip(found, done, strict=True) for what, infos in (of or {}).items()]
        freed = _freed((each, what, len(infos), sum(i.size for i in infos)) for each, what, infos in gone)
        census.discount(info for _, _, infos in gone for info in infos)
        _forget_unused(store, uses, census)
    measured = census.stored()
    by_tenant: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for each_stored in measured:
        by_tenant[each_stored.tenant][each_stored.what] += each_stored.num_bytes
    report = GarbageReport(
        is_dry=is_dry,
        began=began,
        took_s=time.time() - began,
        num_runs=sum(run.state is not None for run in census.runs.values()),
        num_going_on=sum(run.goes_on for run in census.runs.values()),
        freed=freed,
        num_withdrawn=num_withdrawn,
        measured={tenant: dict(sorted(of.items())) for tenant, of in by_tenant.items()},
    )
    return report, Measurement(began=began, stored=measured)


def _freed(gone: Iterable[tuple[Due, What, int, int]]) -> tuple[Freed, ...]:
    """Sum up what went, or would go: of each unit a category, objects and bytes."""
    found: dict[tuple[str, What], Counter[str]] = defaultdict(Counter)
    for each, what, num_objects, num_bytes in gone:
        tenant = each.tenants[0] if len(each.tenants) == 1 else ""
        found[tenant, what].update(num_units=1, num_objects=num_objects, num_bytes=num_bytes)
    return tuple(Freed(tenant=tenant or None, what=what, **sums) for (tenant, what), sums in sorted(found.items()))


def _delete_or_tell(
    store: ObjectStore, policy: RetentionSettings, census: Census, each: Due, claim: Claim | None
) -> Deleted | None:
    """Delete the due parts of a unit. An unreadable record there must not prevent other units' deletion."""
    try:
        return None if claim is None else _delete(store, policy, census, each, claim)
    except (ValueError, InvalidInput):
        _log.exception("nothing of %s is deleted", each.unit)
        return {}


def _delete(store: ObjectStore, policy: RetentionSettings, census: Census, each: Due, claim: Claim) -> Deleted | None:
    """Delete the due parts of a unit. Returns None if it is still needed."""
    run = each.run
    if run is not None and each.whats == ("removed",):
        return {"removed": delete_run(store, census.removed[run.run_id], claim.until)}
    if used_by(store, claim, but=run.run_id if run else None) is not None:
        return None
    if run is not None:
        is_asked_for = claim.users.get(run.run_id, 0.0) > max(run.ended_at or 0.0, time.time() - _RESUMING_S)
        is_resumed = is_asked_for or not has_ended(store, run.run_id)  # it runs again, or is about to
        return None if is_resumed else _delete_parts(store, policy, each, run, claim.until)
    if claim.users != census.users.get(each.unit, {}):
        return None  # a run began after the census, has ended, and may have published
    found = list(store.list(f"{each.unit}/"))
    deleted = list(delete_objects(store, found, claim.until))
    claim.is_gone = len(deleted) == len(found)
    return {each.whats[0]: deleted}


def used_by(store: ObjectStore, claim: Claim, but: str | None = None) -> str | None:
    """Return a run that uses a claimed unit and has not ended; None if there is none. `but`: a run to ignore.

    The store says whether it has ended, since a restored database may not know of a running run. A run uses a
    checkpoint before it is on record. Without a record, as a preview's, a use counts for an hour.
    """
    for user, at in claim.users.items():
        is_known = at > time.time() - _NEW_S or store.head(RunKeys(user).record) is not None
        if user != but and is_known and not has_ended(store, user):
            return user
    return None


def has_ended(store: ObjectStore, run_id: str) -> bool:
    """Return False for a run that is running, paused, or is unknown."""
    with suppress(NotFound):
        return _End.model_validate_json(store.get_bytes(RunKeys(run_id).result)).state != "paused"
    return False


class _End(BaseModel):
    state: str


def _delete_parts(store: ObjectStore, policy: RetentionSettings, each: Due, run: RunFolder, until: float) -> Deleted:
    keys, kept = RunKeys(run.run_id), set[str]()
    references: list[ObjectInfo] = []
    if "checkpoints" in each.whats:
        kept = _kept_checkpoints(store, run.run_id, policy.checkpoints_kept)
        hashes = {found.sha256[:32] for key in kept if (found := find_artifact(store, key)) is not None}
        known = list(store.list(checkpoint_adapter(run.tenant, run.run_id, "")))
        references = [info for info in known if info.key.split("/")[-2] not in hashes]
    if "sessions" in each.whats or ("checkpoints" in each.whats and not kept):
        store.put_bytes(keys.is_expired, b"")
    deleted: Deleted = {}
    for what in each.whats:
        folders = [name for name, of in FOLDERS.items() if of == what and not (kept and name == _STATES)]
        listed = [info for name in folders for info in store.list(f"{keys.prefix}/{name}/")]
        going = [i for i in listed if i.key != run.job and not any(i.key.startswith(f"{key}/") for key in kept)]
        if what == "checkpoints":
            going = references + going
        deleted[what] = list(delete_objects(store, going, until))
    return deleted


def _kept_checkpoints(store: ObjectStore, run_id: str, most: int) -> set[str]:
    """Return the keys of the newest checkpoints of a run, and of the newest one that is intact."""
    if most == 0:
        return set()
    intact = find_newest(store, run_id).checkpoint
    newest = {found.key for found in stored_checkpoints(store, run_id)[-most:]}
    return newest | ({RunKeys(run_id).checkpoint(intact.fence, intact.step)} if intact else set())


def _forget_unused(store: ObjectStore, uses: Uses, census: Census) -> None:
    """Forget who has used units that are gone, or were never made."""
    there = census.shared.keys() | {RunKeys(run_id).prefix for run_id, run in census.runs.items() if run.stored}
    unused = sorted(census.users.keys() - there)
    for first in range(0, len(unused), _AT_ONCE):
        with uses.claiming(*unused[first : first + _AT_ONCE]) as claims:
            for claim in claims:
                if claim is not None:
                    claim.is_gone = used_by(store, claim) is None


def delete_objects(store: ObjectStore, found: Iterable[ObjectInfo], until: float) -> Iterator[ObjectInfo]:
    """Delete objects, manifests first, so that what is half deleted reads as missing and never as damaged.

    Yields each that was deleted. Ends at `until`, since another process may take the claim soon after.
    """
    for info in sorted(found, key=lambda info: not info.key.endswith(f"/{MANIFEST}")):
        if time.time() > until:
            return
        store.delete(info.key)
        yield info


def delete_run(store: ObjectStore, removed: RemovedRow, until: float) -> list[ObjectInfo]:
    """Delete what is in a removed run's folder, and its entries elsewhere. Returns what was deleted."""
    keys = RunKeys(removed.run_id)
    found = list(store.list(f"{keys.prefix}/"))
    job = next((info.key for info in found if is_job(info.key)), None)
    stay = {keys.record, keys.result, job} if removed.stays_published else set()
    references = list(store.list(checkpoint_adapter(removed.tenant, removed.run_id, "")))
    return list(delete_objects(store, (*references, *(info for info in found if info.key not in stay)), until))


# --- Garbage collection: at an operator's request, and periodically ---

GARBAGE_WORKFLOW = "GarbageWorkflow"


class Garbage:
    """Starts collections: of all services of an installation one at a time, and one dry run."""

    def __init__(self, settings: Settings, temporal: Temporal) -> None:
        self._settings = settings
        self._temporal = temporal
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
        return GarbageView(state="running" if report is None else "done", report=report)

    async def collect_when_due(self) -> None:
        """Start a collection each `retention.every_s` seconds, the first so long after this service began."""
        if time.monotonic() >= self._due:
            await self.collect(GarbageRequest(is_dry=False), 0)
            self._due = time.monotonic() + self._settings.retention.every_s


# --- Removes runs that have ended ---
# Their folders, their rows, and their places in lists. Their published models stay.


@dataclass(frozen=True, eq=False)
class Removals:
    """Removes runs. A removal that was cut off is finished by the next collection."""

    _runs: Runs
    _store: ObjectStore
    _database: Database
    _uses: Uses
    _quotas: Quotas
    _sweeps: Documents[SweepState]

    async def remove(self, tenant: str, run_id: str) -> RunRemoved:
        """Remove a run that has ended, with its checkpoints and logs. What it published stays.

        Raises Conflict: it is active or paused, or another run uses its checkpoints.
        """
        view = await self._runs.view(tenant, run_id)
        if view.state in ("running", "paused"):
            rule = "cancel it first" if view.state == "paused" else "cancel it, and remove it when it has ended"
            raise Conflict(f"{run_id} {'is' if view.state == 'paused' else 'is still'} {view.state}: {rule}")
        record = await self._runs.record(tenant, run_id)
        if (trial := record.source.trial) is not None:
            sweep = await self._sweeps.find(tenant, trial.sweep)
            if sweep is not None and sweep.end is None:
                raise Conflict(f"{run_id} is a trial of {trial.sweep}, which has not ended")
        audit.touched(run_id)
        removed = await asyncio.to_thread(self._remove, record, view)
        await self._quotas.measure(tenant, run_id)
        return removed

    # Blocking.

    def _remove(self, record: RunRecord, view: RunView) -> RunRemoved:
        run_id = record.run_id
        with self._uses.claiming(RunKeys(run_id).prefix) as (claim,):
            if claim is None:
                raise Conflict(f"{run_id} is being deleted already: look again in two minutes")
            is_resumed = claim.users.get(run_id, 0.0) > max(view.ended_at or 0.0, time.time() - CLAIM_S)
            if is_resumed or not has_ended(self._store, run_id):
                raise Conflict(f"{run_id} is still running: cancel it, and remove it once it has ended")
            if (user := used_by(self._store, claim, but=run_id)) is not None:
                raise Conflict(f"{user} uses a checkpoint of {run_id}: remove it once that run has ended")
            has_others = isinstance(record.run, SessionRun) or record.source.trial is not None
            name = None if has_others else record.run.name or record.run_id
            removed = RemovedRow(
                run_id=run_id,
                tenant=record.tenant,
                created_at=record.created_at,
                ended_at=view.ended_at or record.created_at,
                gpu_seconds=view.gpu_seconds,
                stays_published=PublishedModels(self._store).has_claimed(record, name),
            )
            self._database.write(lambda session: forget(session, removed))
            gone = delete_run(self._store, removed, claim.until)
        return RunRemoved(
            run_id=run_id,
            stays_published=removed.stays_published,
            num_objects=len(gone),
            num_bytes=sum(info.size for info in gone),
        )
