"""The activity `collect_garbage`: measures what tenants store, and deletes what policies expire.

It may be killed at any moment and retried: each unit is deleted under a claim, manifests first (uses.py). One census
finds all due units; before its deletion each unit is checked again, under its claim.
"""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from temporalio import activity

from activities.host_context import HostContext, beating
from activities.records.checkpoints import find_newest
from activities.retention.census import FOLDERS, Census, RunFolder, What, take
from activities.retention.policy import Due, due
from shared.automation.garbage import Freed, GarbageReport, GarbageRequest
from shared.errors import InvalidInput
from shared.limits import RetentionSettings
from shared.storage.artifacts import find_artifact
from shared.storage.checkpoints import stored_checkpoints
from shared.storage.paths import RunKeys, brought, checkpoint_adapter
from shared.storage.removal import delete_run, forget_removed
from shared.storage.store import ObjectInfo, ObjectStore
from shared.storage.stored_bytes import Measured
from shared.storage.uses import (
    CLAIMS,
    claiming,
    delete_objects,
    end_of,
    expired,
    marks_of,
    measured_record,
    used_by,
)

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
        freed=_summed(freed),
        num_withdrawn=num_withdrawn,
        measured=census.measured(),
    )


def _freed(each: Due, what: What, num_objects: int, num_bytes: int) -> Freed:
    tenant = each.tenants[0] if len(each.tenants) == 1 else None
    return Freed(what=what, tenant=tenant, num_units=1, num_objects=num_objects, num_bytes=num_bytes)


def _summed(rows: Iterable[Freed]) -> tuple[Freed, ...]:
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
