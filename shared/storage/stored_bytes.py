"""What the store's objects are used by, the bytes that tenants hold there, and removal."""

import random
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pydantic import BaseModel, Field

from longshore.fields import Frozen
from shared.errors import InvalidInput, NotFound, StoreUnavailable
from shared.limits import QuotaSettings
from shared.storage import paths
from shared.storage.artifacts import find_artifact, is_job
from shared.storage.paths import MANIFEST, RunKeys, checkpoint_adapter_run, tenant_folder
from shared.storage.store import ObjectInfo, ObjectStore

# --- Uses ---
# Reference markers (*marks*) and deletion locks (*claims*) of shared objects in the store, and their keys.
#
# What is deleted, and when: activities/retention, service/automation/upkeep.py.
#
# A *unit* is what is marked or deleted as a whole: an artifact that several runs may share, or the folder of a run.
# Before a run uses a unit, it puts a mark and then looks for a claim. Before a process deletes a unit, it puts a claim
# and then looks for marks of unfinished runs. If both happen at the same moment, at least one sees the other: the run
# waits until the claim is gone, and makes again what it does not find then; the process that deletes gives up.
# Blocking.

MARKS, CLAIMS = "uses/", "deleting/"
SHARED = (
    "tokenized",
    "packed",
    "prompts",
    "sampled",
    "grouped",
    "graded",
    "taught",
    "rewarded",
    "models/imported",
)
"""Folders of artifacts by hash, which several runs may use."""
WORK_S = 60.0
"""Who has claimed a unit deletes of it no longer than this, and leaves the rest to the next time."""
CLAIM_S = 2 * WORK_S
"""An older claim counts no more: its process died, or forgot to give it back. (Clocks may differ by WORK_S.)"""
_NEW_S = 3600.0
_UNIT = re.compile(rf"(?:{'|'.join(SHARED)})/[0-9a-f]{{32}}")


def unit_of(key: str) -> str | None:
    """Return the unit that a key belongs to; None for a key outside the folders of shared artifacts."""
    match = _UNIT.match(key)
    return match[0] if match else None


def mark(unit: str, run_id: str, execution: str) -> str:
    """The empty object that says that a run uses a unit. `execution`: the id of its workflow's execution, so that
    cleaning up after an ended run does not delete the marks it made after being resumed.
    """
    return f"{MARKS}{unit}/{run_id}/{execution}"


def of_mark(key: str) -> tuple[str, str]:
    """Return the unit and the run of a mark's key."""
    unit, run_id, _ = key.removeprefix(MARKS).rsplit("/", 2)
    return unit, run_id


def claim(unit: str) -> str:
    """The object whose creation decides who deletes a unit: the time of the claim, in seconds since 1970."""
    return f"{CLAIMS}{unit}"


def removed_run(run_id: str = "") -> str:
    """The record of a removed run. It is kept while the run's GPU seconds count in its tenant's quota."""
    return f"records/removed/{run_id}"


def measured_record(tenant: str = "") -> str:
    """The bytes of a tenant that are measured from time to time."""
    return f"records/measured/{tenant}"


def expired(run_id: str) -> str:
    """The object that says that a run's checkpoints, or its commands, were deleted: it can no longer be resumed."""
    return f"{RunKeys(run_id).prefix}/expired"


STATE_IS_GONE = "what it would go on from was deleted, as this installation's policy has it (docs/backup.md)"


class BeingDeleted(StoreUnavailable):
    """A unit is being deleted. That takes two minutes at most."""


class RunEnd(BaseModel):
    """The fields of a run's result that are read here."""

    state: str
    adapter: str | None = None
    ended_at: float | None = None
    gpu_seconds: float = 0.0


def use(store: ObjectStore, unit: str, run_id: str, execution: str = "service") -> None:
    """Mark a unit as used by a run, before anybody looks for it on the run's behalf.

    Raises BeingDeleted: somebody may be deleting it at this moment.
    """
    store.put_bytes(mark(unit, run_id, execution), b"")
    if _is_claimed(store, unit, time.time()):
        raise BeingDeleted(f"{unit} is being deleted: in two minutes at most it can be used, or made anew")


def _is_claimed(store: ObjectStore, unit: str, now: float) -> bool:
    try:
        return float(store.get_bytes(claim(unit))) > now - CLAIM_S
    except NotFound:
        return False


def hold_checkpoints(store: ObjectStore, tenant: str, run_id: str, request: str) -> None:
    """Protect checkpoints of other runs that a run's request names from deletion until the run ends.

    Raises InvalidInput: one was deleted after its name was looked up. BeingDeleted: it may be deleted in a moment.
    """
    for key in set(re.findall(rf"{tenant_folder(tenant)}/checkpoints/[a-z0-9-]+/[0-9a-f]{{32}}", request)):
        if (source := checkpoint_adapter_run(tenant, key)) is not None:
            use(store, RunKeys(source).prefix, run_id)
            if find_artifact(store, key) is None:
                raise InvalidInput(f"this checkpoint of {source} was deleted", key)


def end_of(store: ObjectStore, run_id: str) -> RunEnd | None:
    """Return how a run ended; None if it has not ended, is paused, or is unknown."""
    with suppress(NotFound):
        end = RunEnd.model_validate_json(store.get_bytes(RunKeys(run_id).result))
        return None if end.state == "paused" else end
    return None


def marks_of(store: ObjectStore, unit: str) -> list[ObjectInfo]:
    return list(store.list(f"{MARKS}{unit}/"))


def used_by(store: ObjectStore, marks: Iterable[ObjectInfo], but: str | None = None) -> str | None:
    """Return a run that has put one of the marks and has not ended; None if there is none. `but`: a run to ignore.

    If a run names another run's checkpoint, its mark is put before its record. A mark without a record, also a
    preview's, counts for an hour.
    """
    users: dict[str, float] = {}
    for info in marks:
        user = of_mark(info.key)[1]
        users[user] = max(users.get(user, 0.0), info.modified)
    for user, marked_at in users.items():
        if user != but and end_of(store, user) is None:
            is_new = marked_at > time.time() - _NEW_S
            if is_new or store.head(RunKeys(user).record) is not None:
                return user
    return None


@contextmanager
def claiming(store: ObjectStore, unit: str) -> Iterator[float | None]:
    """Hold the claim of a unit in the block. Yields the time until which the block may delete; None if another process
    has the claim. If several processes find the claim expired, one of them takes it.
    """
    now = time.time()
    if not _take(store, unit, now):
        yield None
        return
    try:
        yield now + WORK_S
    finally:
        if time.time() < now + CLAIM_S:  # else another process may have it by now
            store.delete(claim(unit))


def _take(store: ObjectStore, unit: str, now: float) -> bool:
    data = f"{now:.6f}".encode()
    if store.put_if_absent(claim(unit), data):
        return True
    seen = store.head(claim(unit))  # before it is read: what is read is this one or a newer one
    return seen is not None and not _is_claimed(store, unit, now) and store.put_if_unchanged(claim(unit), data, seen)


def delete_objects(store: ObjectStore, found: Iterable[ObjectInfo], until: float) -> Iterator[ObjectInfo]:
    """Delete objects, manifests first, so that what is half deleted reads as missing and never as damaged.

    Yields each that was deleted. Ends at `until`, since another process may take the claim soon after.
    """
    for info in sorted(found, key=lambda info: not info.key.endswith(f"/{MANIFEST}")):
        if time.time() > until:
            return
        store.delete(info.key)
        yield info


# --- Counts the bytes that a tenant stores, and the bytes that are being written for it ---
#
# Writes are recorded in the store before they begin, so that all processes of the service and the hosts count the
# same. An entry is an empty object whose key holds the writer, the number of bytes and an expiry time. It counts until
# it expires, or until a later count of the store includes the bytes themselves.
#
# Writers take no lock. Each puts an `asked` entry before it counts, so that of two writers at least one sees the
# other. The entry becomes `held` once there is room. If only other `asked` entries are in the way, the writer with the
# smallest id waits until the others are decided; these withdraw and ask again. Blocking.

_BELIEVED_S = 900.0  # an entry of a process that died
_RENEWED_S = 300.0
_FORGOTTEN_S = 180.0  # counts are trusted for a minute (service/accounts/tenants.py)
_PATIENCE_S = 20.0  # while other writers ask at the same moment
_PAUSE_S = 0.02
_ASKED, _HELD, _SETTLED = "asked", "held", "settled"


@dataclass(frozen=True)
class StoredCount:
    """The bytes in the store by a count that began at `at`."""

    at: float
    num_bytes: int


class Measured(BaseModel, frozen=True):
    """A tenant's bytes by category, from a scan of the store at time `at`. The ledger does not track these.

    Shared data counts in full for every tenant that uses it.
    """

    at: float = 0.0
    num_bytes: dict[str, int] = {}


def measured(store: ObjectStore, tenant: str) -> Measured:
    """Return the last measurement (activities/retention)."""
    try:
        return Measured.model_validate_json(store.get_bytes(measured_record(tenant)))
    except NotFound:
        return Measured()


@dataclass(frozen=True)
class Ledger:
    """A tenant's account of stored bytes."""

    _store: ObjectStore
    _tenant: str

    def count(self) -> StoredCount:
        """Count uploads, published adapters and models, records, runs' downloads, and sessions' scores; for the rest
        add the last measurement.
        """
        at = time.time()
        own = (f"{paths.tenant_folder(self._tenant)}/", *paths.counted_records(self._tenant))
        stored = sum(item.size for prefix in own for item in self._store.list(prefix))
        brought = sum(_bytes_of(item.key) for item in self._store.list(paths.brought(self._tenant)))
        return StoredCount(at, stored + brought + sum(measured(self._store, self._tenant).num_bytes.values()))

    def written_since(self, at: float) -> int:
        """Bytes that are being written, or were after a count began."""
        return sum(max(num_bytes.values()) for num_bytes in self.writers_since(at).values())

    def writers_since(self, at: float) -> dict[str, dict[str, int]]:
        """Return for each writer, by its id, the bytes that it asks for, holds, or has written after a count began."""
        now, writers = time.time(), dict[str, dict[str, int]]()
        for item in list(self._store.list(paths.reserved(self._tenant))):
            writer, kind, num_bytes, when = _last(item.key).split("-")
            if float(when) < min(at, now - _FORGOTTEN_S):
                self._store.delete(item.key)
            elif float(when) > (at if kind == _SETTLED else now):
                own = writers.setdefault(writer, {})
                own[kind] = max(own.get(kind, 0), int(num_bytes))
        return writers

    def bring(self, run_id: str, name: str, num_bytes: int) -> None:
        """Record the bytes that a run has downloaded into the store outside its tenant's folder."""
        self._store.put_bytes(f"{paths.brought(self._tenant, run_id)}{name}/{num_bytes}", b"")

    def has_brought(self, run_id: str, name: str) -> bool:
        return any(True for _ in self._store.list(f"{paths.brought(self._tenant, run_id)}{name}/"))

    def bring_result(self, run_id: str, number: int, num_bytes: int) -> None:
        """Record the bytes of the result of a session's command."""
        self._store.put_bytes(self._result(run_id, number, num_bytes), b"")

    def results(self, run_id: str) -> Iterator[tuple[int, int]]:
        """Yield the numbers and bytes of the results on record, in order."""
        for item in self._store.list(f"{paths.brought(self._tenant, run_id)}results/"):
            yield int(_last(item.key).partition("-")[0]), _bytes_of(item.key)

    def forget_result(self, run_id: str, number: int, num_bytes: int) -> None:
        self._store.delete(self._result(run_id, number, num_bytes))

    def _result(self, run_id: str, number: int, num_bytes: int) -> str:
        # All in one folder: in a local store an empty one would stay.
        return f"{paths.brought(self._tenant, run_id)}results/{number:08d}-{num_bytes}"

    def forget(self, run_id: str) -> None:
        """Delete the record of the bytes that a run has downloaded, after these were deleted."""
        for item in list(self._store.list(paths.brought(self._tenant, run_id))):
            self._store.delete(item.key)


class Reservation:
    """Bytes reserved before they are written: an entry in the store, replaced when more bytes are needed."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self._store = store
        self._ledger = Ledger(store, tenant)
        self._id = uuid.uuid4().hex
        self._prefix = f"{paths.reserved(tenant)}{self._id}"  # no folder: in a local store an empty one would stay
        self._key: str | None = None
        self._renew_at = 0.0
        self.num_bytes = 0

    def covers(self, num_bytes: int) -> bool:
        return num_bytes <= self.num_bytes and time.time() < self._renew_at

    def admit(self, num_bytes: int, most: int, counted: StoredCount) -> int:
        """Reserve `num_bytes` in all if the tenant's total stays within `most`. Returns that total.

        If there is no room, an earlier reservation does not change.
        """
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            asked = self._put(_ASKED, num_bytes, time.time() + _BELIEVED_S)
            try:
                used = self._decide(num_bytes, most, counted, give_up_at)
                if used is not None and used <= most:
                    self.hold(num_bytes)
            finally:
                self._store.delete(asked)
            if used is not None:
                return used
            time.sleep(_PAUSE_S * (1 + random.random()))

    def _decide(self, num_bytes: int, most: int, counted: StoredCount, give_up_at: float) -> int | None:
        """Return the tenant's total in bytes; None if another writer that asks at the same time goes first."""
        while True:
            others = self._ledger.writers_since(counted.at)
            others.pop(self._id, None)
            used = counted.num_bytes + num_bytes + sum(max(other.values()) for other in others.values())
            asking = [i for i, other in others.items() if max(other.values()) > _decided(other)]
            without = counted.num_bytes + num_bytes + sum(map(_decided, others.values()))
            if used <= most or without > most or time.monotonic() > give_up_at:
                return used
            if min(asking) < self._id:
                return None
            time.sleep(_PAUSE_S)

    def hold(self, num_bytes: int) -> None:
        """Reserve `num_bytes` without checking for room."""
        now = time.time()
        self._replace(self._put(_HELD, num_bytes, now + _BELIEVED_S))
        self.num_bytes, self._renew_at = num_bytes, now + _RENEWED_S

    def settle(self, num_bytes: int) -> None:
        """Mark the bytes as written. Counts that began before do not include them."""
        self._replace(self._put(_SETTLED, num_bytes, time.time()))
        self._key = None

    def drop(self) -> None:
        """Release bytes that were not written. Harmless after `settle`."""
        if self._key is not None:
            self._store.delete(self._key)
            self._key = None

    def _put(self, kind: str, num_bytes: int, when: float) -> str:
        key = f"{self._prefix}-{kind}-{num_bytes}-{when:.6f}"
        self._store.put_bytes(key, b"")
        return key

    def _replace(self, key: str) -> None:
        """Replace the entry by another; while both are there, the larger counts."""
        if key != self._key:
            self.drop()
        self._key = key


def _decided(writer: dict[str, int]) -> int:
    """Return the bytes that a writer holds or has written, without those that it only asks for."""
    return max((num_bytes for kind, num_bytes in writer.items() if kind != _ASKED), default=0)


class Room:
    """The bytes that a host may still write for a tenant, by the quota in its record (hosts have no database)."""

    def __init__(self, store: ObjectStore, tenant: str, quotas: QuotaSettings) -> None:
        self.ledger = Ledger(store, tenant)
        self._store = store
        self._tenant = tenant
        self._most = _quotas_of(store, tenant, quotas).stored_bytes

    def left(self) -> int | None:
        """Return the bytes left; None without a quota."""
        if self._most is None:
            return None
        counted = self.ledger.count()
        return max(0, self._most - counted.num_bytes - self.ledger.written_since(counted.at))

    @contextmanager
    def reserving(self, num_bytes: int, place: str) -> Iterator[None]:
        """Reserve room for bytes that are written in the block. Raises InvalidInput: there is none."""
        if self._most is None:
            yield
            return
        reservation = Reservation(self._store, self._tenant)
        try:
            used = reservation.admit(num_bytes, self._most, self.ledger.count())
            if used > self._most:
                raise InvalidInput(no_room(self._tenant, used - num_bytes, self._most, num_bytes), place)
            yield
            reservation.settle(num_bytes)
        finally:
            reservation.drop()


def no_room(tenant: str, used: int, most: int, more: int) -> str:
    return f"quota stored_bytes: {tenant} stores {used:,} bytes of {most:,}: {more:,} more are not allowed"


class _Quotas(BaseModel):
    """The fields of a tenant's record that are read here."""

    quotas: QuotaSettings = QuotaSettings()


def _quotas_of(store: ObjectStore, tenant: str, quotas: QuotaSettings) -> QuotaSettings:
    try:
        own = _Quotas.model_validate_json(store.get_bytes(paths.tenant_record(tenant))).quotas
    except NotFound:
        return quotas
    return quotas.model_copy(update=own.model_dump(exclude_unset=True))


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def _bytes_of(key: str) -> int:
    return int(_last(key).rpartition("-")[2])


# --- Removes a run: its record as removed, and the deletion of its folder. Blocking ---

_REMOVED = "removed"


class RemovedRun(Frozen):
    """The record of a removed run. Once it exists the run is removed, even if some of its files remain."""

    run_id: str
    tenant: str
    removed_at: float
    created_at: float
    ended_at: float
    gpu_seconds: float = Field(description="they still count for the tenant's quota")
    stays_published: bool = Field(description="its published versions stay, and need its record and one job file")


def delete_run(store: ObjectStore, removed: RemovedRun, until: float) -> list[ObjectInfo]:
    """Delete what is in a removed run's folder, and its entries elsewhere. Returns what was deleted, entries apart."""
    keys = paths.RunKeys(removed.run_id)
    found = list(store.list(f"{keys.prefix}/"))
    job = next((info.key for info in found if is_job(info.key)), None)
    stay = {keys.record, keys.result, job} if removed.stays_published else set()
    store.delete(paths.run_index(removed.run_id))
    references = list(store.list(paths.checkpoint_adapter(removed.tenant, removed.run_id, "")))
    own = paths.brought(removed.tenant, removed.run_id)
    for info in [*store.list(own), *marks_of(store, keys.prefix)]:  # first, since they could not be found later
        if not (removed.stays_published and info.key.startswith(f"{own}record/")):
            store.delete(info.key)
    return list(delete_objects(store, (*references, *(info for info in found if info.key not in stay)), until))


def note_removed(store: ObjectStore, removed: RemovedRun) -> None:
    """Write the record of a removed run. Its bytes count for the tenant."""
    data = removed.model_dump_json().encode()
    Ledger(store, removed.tenant).bring(_REMOVED, removed.run_id, len(data))
    store.put_bytes(removed_run(removed.run_id), data)


def forget_removed(store: ObjectStore, removed: RemovedRun) -> None:
    """Delete the record of a removed run when nothing else of it is stored or counted."""
    store.delete(removed_run(removed.run_id))
    for info in list(store.list(f"{paths.brought(removed.tenant, _REMOVED)}{removed.run_id}/")):
        store.delete(info.key)
