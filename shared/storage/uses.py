"""Reference markers (*marks*) and deletion locks (*claims*) of shared objects in the store, and their keys.

What is deleted, and when: activities/retention, service/automation/removals.py.

A *unit* is what is marked or deleted as a whole: an artifact that several runs may share, or the folder of a run.
Before a run uses a unit, it puts a mark and then looks for a claim. Before a process deletes a unit, it puts a claim
and then looks for marks of unfinished runs. If both happen at the same moment, at least one sees the other: the run
waits until the claim is gone, and makes again what it does not find then; the process that deletes gives up. Blocking.
"""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from pydantic import BaseModel

from shared.errors import InvalidInput, NotFound, StoreUnavailable
from shared.storage.artifacts import find_artifact
from shared.storage.paths import MANIFEST, RunKeys, checkpoint_adapter_run, tenant_folder
from shared.storage.store import ObjectInfo, ObjectStore

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
    """The bytes of a tenant that are measured from time to time (stored_bytes.py)."""
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
