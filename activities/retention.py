"""Retention: what the store holds, what policies let go, and how that is deleted beside runs."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ValidationError
from temporalio import activity

from activities.host_context import HostContext, beating
from activities.records.run_records import find_newest
from longshore.fields import Artifact
from shared.automation import Freed, GarbageReport, GarbageRequest
from shared.errors import InvalidInput, NotFound
from shared.limits import RetentionSettings
from shared.runs.requests import FIRST_TENANT
from shared.storage.artifacts import find_artifact, is_job, stored_checkpoints
from shared.storage.paths import MANIFEST, RunKeys, brought, checkpoint_adapter
from shared.storage.store import ObjectInfo, ObjectStore
from shared.storage.stored_bytes import (
    CLAIMS,
    MARKS,
    SHARED,
    Measured,
    RemovedRun,
    RunEnd,
    claiming,
    delete_objects,
    delete_run,
    end_of,
    expired,
    forget_removed,
    marks_of,
    measured_record,
    of_mark,
    removed_run,
    unit_of,
    used_by,
)

# --- Inventory of the store: the parts of each run, the artifacts that runs may share, and their users ---
#
# One listing of each prefix, and of each run its record, its result and, if that is wanted, one job. Blocking.

What = Literal["checkpoints", "data", "samples", "logs", "sessions", "models", "records", "removed"]
FOLDERS: dict[str, What] = {
    "checkpoints": "checkpoints",
    "kept_states": "checkpoints",
    "dataset": "data",
    "logs": "logs",
    "wandb": "logs",
    "commands": "sessions",
    "results": "sessions",
}
"""Categories of a run's folders. Everything else there is a record, which is kept as long as the run."""
KINDS: dict[str, What] = {
    "tokenized": "data",
    "packed": "data",
    "prompts": "data",
    "models": "models",
}
"""Categories of artifacts that runs may share; the rest are samples."""
_NOTED = ("dataset", "commands", "run.json")
_NOTED_RESULT_BYTES = 2048  # larger results are noted by their writers (shared/runs/events.py)
_READS_AT_ONCE = 16


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


def _heaps() -> "defaultdict[What, Heap]":
    return defaultdict(Heap)


@dataclass
class RunFolder:
    """A run as the store has it.

    Attributes:
        noted: bytes that the tenant's ledger has already, by category.
        checkpoints: objects by step and fence; `newest` is the manifest's, 0 without one.
        job: the key of one of its job files, and how long that is.
        model: the unit of the imported model that its jobs train.
        ended_at: when its result says that it ended, or was written.
        is_on_record: it was accepted.
    """

    run_id: str
    heaps: dict[What, Heap] = field(default_factory=_heaps)
    noted: dict[What, int] = field(default_factory=lambda: defaultdict(int))
    checkpoints: dict[tuple[str, str], Heap] = field(default_factory=dict)
    job: str | None = None
    job_bytes: int = 0
    tenant: str = FIRST_TENANT
    model: str | None = None
    end: RunEnd | None = None
    is_on_record: bool = False
    ended_at: float | None = None

    @property
    def whole_checkpoints(self) -> list[tuple[str, str]]:
        """Those that have a manifest, the oldest first. Others are being uploaded, or were only half deleted."""
        return sorted(place for place, heap in self.checkpoints.items() if heap.newest)

    @property
    def goes_on(self) -> bool:
        return self.is_on_record and self.end is None


@dataclass
class Census:
    """The store's contents. `marks`: keys. `users`: the runs that have marked a unit. `removed`: removed runs."""

    runs: dict[str, RunFolder] = field(default_factory=dict)
    shared: dict[str, Heap] = field(default_factory=lambda: defaultdict(Heap))
    marks: set[str] = field(default_factory=set)
    users: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    removed: dict[str, RemovedRun] = field(default_factory=dict)

    def users_of(self, unit: str) -> list[RunFolder]:
        """Return the runs on record that use a unit."""
        known = (self.runs.get(run_id) for run_id in sorted(self.users.get(unit, ())))
        return [run for run in known if run is not None and run.is_on_record]

    def discount(self, gone: Iterable[ObjectInfo]) -> None:
        """Let deleted objects count no more in `measured`."""
        for info in gone:
            if (unit := unit_of(info.key)) is not None:
                self.shared[unit].num_bytes -= info.size
            elif info.key.startswith("runs/"):
                _, run_id, path = info.key.split("/", 2)
                what, noted = _kind(path, info.size)
                self.runs[run_id].heaps[what].num_bytes -= info.size
                self.runs[run_id].noted[what] -= noted

    def measured(self) -> dict[str, dict[str, int]]:
        """Return each tenant's bytes that are not in its ledger, by category."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for run in self.runs.values():
            for what, heap in run.heaps.items():
                found[run.tenant][what] += heap.num_bytes - run.noted.get(what, 0)
        for unit, heap in self.shared.items():
            if (what := what_of(unit)) != "models":  # its download is noted in the ledger
                for tenant in {run.tenant for run in self.users_of(unit)}:
                    found[tenant][what] += heap.num_bytes
        return {tenant: {w: n for w, n in sorted(of.items()) if n} for tenant, of in found.items()}


class _Record(BaseModel):
    tenant: str = FIRST_TENANT


class _Plan(BaseModel):
    model: Artifact


class _Job(BaseModel):
    plan: _Plan


def take(store: ObjectStore, *, reads_jobs: bool = True) -> Census:
    """Count everything. Marks are listed first: a run that puts one later is looked for again before a deletion.

    `reads_jobs`: which models runs have trained is wanted, too.
    """
    census = Census()
    for info in store.list(MARKS):
        unit, run_id = of_mark(info.key)
        census.marks.add(info.key)
        census.users[unit].add(run_id)
    for folder in SHARED:
        for info in store.list(f"{folder}/"):
            if (shared := unit_of(info.key)) is not None:
                census.shared[shared].add(info)
    for info in store.list("runs/"):
        _, run_id, path = info.key.split("/", 2)
        _count(census.runs.setdefault(run_id, RunFolder(run_id)), path, info)
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="census") as threads:
        list(threads.map(lambda run: _read(store, run, reads_jobs), census.runs.values()))
    prefix = removed_run()
    for info in list(store.list(prefix)):
        with suppress(NotFound):
            census.removed[info.key.removeprefix(prefix)] = RemovedRun.model_validate_json(store.get_bytes(info.key))
    return census


def _count(run: RunFolder, path: str, info: ObjectInfo) -> None:
    folder, _, rest = path.partition("/")
    what, noted = _kind(path, info.size)
    run.heaps[what].add(info)
    run.noted[what] += noted
    match folder, rest.split("/"):
        case "checkpoints", [label, step, *name]:
            heap = run.checkpoints.setdefault((step, label), Heap())
            heap.num_objects += 1
            heap.num_bytes += info.size
            if name == [MANIFEST]:
                heap.newest = info.modified
        case "logs", _ if run.job is None and is_job(info.key):
            run.job, run.job_bytes = info.key, info.size
        case "run.json", _:
            run.is_on_record = True
        case "result.json", _:
            run.ended_at = info.modified


def _kind(path: str, size: int) -> tuple[What, int]:
    """Return the category of an object in a run's folder, and how many of its bytes are in the tenant's ledger."""
    folder = path.partition("/")[0]
    is_noted = folder in _NOTED and not (folder == "dataset" and path.endswith(f"/{MANIFEST}"))
    is_noted = is_noted or (folder == "results" and size > _NOTED_RESULT_BYTES)
    return FOLDERS.get(folder, "records"), size if is_noted else 0


def _read(store: ObjectStore, run: RunFolder, reads_job: bool) -> None:
    keys = RunKeys(run.run_id)
    # It was removed after it was listed; or a record cannot be read: then the run counts as active.
    with suppress(NotFound, ValidationError):
        if run.is_on_record:
            run.tenant = _Record.model_validate_json(store.get_bytes(keys.record)).tenant
        if run.ended_at is not None:
            end = RunEnd.model_validate_json(store.get_bytes(keys.result))
            run.end, run.ended_at = None if end.state == "paused" else end, end.ended_at or run.ended_at
        if reads_job and run.job is not None:
            uri = _Job.model_validate_json(store.get_bytes(run.job)).plan.model.uri
            run.model = unit_of(uri.removeprefix(f"{store.uri}/"))


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
    needed = {run.model for run in census.runs.values() if _needs_its_model(run)}
    for unit, heap in census.shared.items():
        what, users = what_of(unit), census.users_of(unit)
        if unit in needed or any(run.goes_on for run in users):
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
    if run.end is None or not run.is_on_record or any(user.goes_on for user in others):
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


def _needs_its_model(run: RunFolder) -> bool:
    """True for a run whose checkpoints or published versions depend on the model that its jobs trained."""
    return run.goes_on or bool(run.whole_checkpoints) or (run.end is not None and run.end.adapter is not None)


def _is_over(days: float | None, since: float, now: float) -> bool:
    return days is not None and since < now - days * _DAY_S


# --- The activity `collect_garbage`: measures what tenants store, and deletes what policies expire ---
#
# It may be killed at any moment and retried: each unit is deleted under a claim, manifests first (stored_bytes.py).
# One census finds all due units; before its deletion each unit is checked again, under its claim.

_log = logging.getLogger(__name__)
_AT_ONCE = 8
_STATES = "kept_states"  # marks of a session's checkpoints
_COUNTED_S = 31 * 86_400.0  # GPU seconds of a removed run count for thirty days after its end
Deleted = dict[What, list[ObjectInfo]]


class CollectGarbage:
    """The activity. `policy`: the installation's."""

    def __init__(self, host: HostContext) -> None:
        self._store = host.store
        self._policy = host.settings.retention

    @activity.defn(name="collect_garbage")
    def collect(self, request: GarbageRequest) -> GarbageReport:
        """Measure, and delete what is due. A dry run only reports it.

        Raises StoreUnavailable: the next collection deletes the rest.
        """
        with beating():
            return collect(self._store, self._policy, is_dry=request.is_dry)


def collect(
    store: ObjectStore,
    policy: RetentionSettings,
    *,
    is_dry: bool,
    now: float | None = None,
    at_once: int = _AT_ONCE,
) -> GarbageReport:
    """Do the activity's work, this many units at once. Blocking. `now`: the time from which ages are counted."""
    began = time.time()
    census = take(store, reads_jobs=policy.models_days is not None)
    found = list(due(census, policy, began if now is None else now))
    num_withdrawn = 0
    if is_dry:
        heaps = [(each, *of) for each in found for of in zip(each.whats, each.heaps, strict=True)]
        freed = [_freed(each, what, heap.num_objects, heap.num_bytes) for each, what, heap in heaps]
    else:
        with ThreadPoolExecutor(at_once, thread_name_prefix="garbage") as threads:
            done = list(threads.map(lambda each: _delete_or_tell(store, policy, each, census), found))
        num_withdrawn = done.count(None)
        gone = [(each, what, infos) for each, of in zip(found, done, strict=True) for what, infos in (of or {}).items()]
        freed = [_freed(each, what, len(infos), sum(i.size for i in infos)) for each, what, infos in gone]
        census.discount(info for _, _, infos in gone for info in infos)
        _clean_up(store, census, began)
        _put_measured(store, census.measured(), began)
    return GarbageReport(
        is_dry=is_dry,
        began=began,
        took_s=time.time() - began,
        num_runs=sum(run.is_on_record for run in census.runs.values()),
        num_going_on=sum(run.goes_on for run in census.runs.values()),
        freed=_summed_report(freed),
        num_withdrawn=num_withdrawn,
        measured=census.measured(),
    )


def _freed(each: Due, what: What, num_objects: int, num_bytes: int) -> Freed:
    tenant = each.tenants[0] if len(each.tenants) == 1 else None
    return Freed(what=what, tenant=tenant, num_units=1, num_objects=num_objects, num_bytes=num_bytes)


def _summed_report(rows: Iterable[Freed]) -> tuple[Freed, ...]:
    found: dict[tuple[str, str], Freed] = {}
    for row in rows:
        place = row.tenant or "", row.what
        before = found.get(place, row.model_copy(update={"num_units": 0, "num_objects": 0, "num_bytes": 0}))
        sums = {n: getattr(before, n) + getattr(row, n) for n in ("num_units", "num_objects", "num_bytes")}
        found[place] = row.model_copy(update=sums)
    return tuple(row for _, row in sorted(found.items()))


def _delete_or_tell(store: ObjectStore, policy: RetentionSettings, each: Due, census: Census) -> Deleted | None:
    """Delete the due parts of a unit. An unreadable record there must not prevent other units' deletion."""
    try:
        return _delete(store, policy, each, census)
    except (ValueError, InvalidInput):
        _log.exception("nothing of %s is deleted", each.unit)
        return {}


def _delete(store: ObjectStore, policy: RetentionSettings, each: Due, census: Census) -> Deleted | None:
    """Delete the due parts of a unit. Returns None if it is still needed, or another process deletes it."""
    with claiming(store, each.unit) as until:
        if until is None:
            return None
        if each.whats == ("removed",):
            assert each.run is not None
            return {"removed": delete_run(store, census.removed[each.run.run_id], until)}
        marks = marks_of(store, each.unit)
        if used_by(store, marks, but=each.run.run_id if each.run else None) is not None:
            return None
        if each.run is None:
            if any(info.key not in census.marks for info in marks):
                return None  # a run began after the census, has ended, and may have published
            # Delete its marks and notes first: nobody would find them later. The marks belong to ended runs; a run
            # that begins or is resumed during this writes its own.
            for info in [*marks, *(_noted_model(store, each.unit, census) if each.whats == ("models",) else ())]:
                store.delete(info.key)
            return {each.whats[0]: list(delete_objects(store, list(store.list(each.unit)), until))}
        if end_of(store, each.run.run_id) != each.run.end:
            return None  # it was resumed
        return _delete_parts(store, policy, each, each.run, until)


def _delete_parts(store: ObjectStore, policy: RetentionSettings, each: Due, run: RunFolder, until: float) -> Deleted:
    """Delete parts of an ended run's folder, and their entries in its tenant's ledger."""
    keys, kept = RunKeys(run.run_id), set[str]()
    references: list[ObjectInfo] = []
    if "checkpoints" in each.whats:
        kept = _kept_checkpoints(store, run.run_id, policy.checkpoints_kept)
        hashes = {found.sha256[:32] for key in kept if (found := find_artifact(store, key)) is not None}
        known = list(store.list(checkpoint_adapter(run.tenant, run.run_id, "")))
        references = [info for info in known if info.key.split("/")[-2] not in hashes]
    if "sessions" in each.whats or ("checkpoints" in each.whats and not kept):
        store.put_bytes(expired(run.run_id), b"")
    deleted: Deleted = {}
    for what in each.whats:
        folders = [name for name, of in FOLDERS.items() if of == what and not (kept and name == _STATES)]
        listed = [info for name in folders for info in store.list(f"{keys.prefix}/{name}/")]
        going = [i for i in listed if i.key != run.job and not any(i.key.startswith(f"{key}/") for key in kept)]
        if what == "checkpoints":
            going = references + going
        for entry in _noted(store, run, what):
            store.delete(entry.key)
        deleted[what] = list(delete_objects(store, going, until))
    return deleted


def _kept_checkpoints(store: ObjectStore, run_id: str, most: int) -> set[str]:
    """Return the keys of the newest checkpoints of a run, and of the newest one that is intact."""
    if most == 0:
        return set()
    intact = find_newest(store, run_id).checkpoint
    newest = {found.key for found in stored_checkpoints(store, run_id)[-most:]}
    return newest | ({RunKeys(run_id).checkpoint(intact.fence, intact.step)} if intact else set())


def _noted(store: ObjectStore, run: RunFolder, what: What) -> list[ObjectInfo]:
    """Return the ledger's entries for the data, or the commands and scores, of a run."""
    own = brought(run.tenant, run.run_id)
    match what:
        case "data":
            splits = [info for info in store.list(own) if not info.key.startswith((f"{own}record/", f"{own}results/"))]
            return [info for info in splits if not info.key.startswith(f"{own}command-")]
        case "sessions":
            return [*store.list(f"{own}command-"), *store.list(f"{own}results/")]
        case _:
            return []


def _noted_model(store: ObjectStore, unit: str, census: Census) -> list[ObjectInfo]:
    """Return the entries of tenants' ledgers for an imported model."""
    places = (f"{brought(t, 'models')}{unit.rpartition('/')[2]}/" for t in {r.tenant for r in census.runs.values()})
    return [info for place in places for info in store.list(place)]


def _clean_up(store: ObjectStore, census: Census, now: float) -> None:
    """Give back claims of processes that died, and forget removed runs without remaining objects."""
    for info in list(store.list(CLAIMS)):
        with claiming(store, info.key.removeprefix(CLAIMS)):
            pass
    for run_id, removed in census.removed.items():
        if run_id not in census.runs and removed.ended_at < now - _COUNTED_S:
            forget_removed(store, removed)


def _put_measured(store: ObjectStore, usage: dict[str, dict[str, int]], at: float) -> None:
    before = [info.key.removeprefix(measured_record()) for info in store.list(measured_record())]
    for tenant in {*before, *usage}:
        found = Measured(at=at, num_bytes=usage.get(tenant, {}))
        store.put_bytes(measured_record(tenant), found.model_dump_json().encode())
