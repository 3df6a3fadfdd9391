"""Removes a run: its record as removed, and the deletion of its folder. Blocking."""

from pydantic import Field

from longshore.fields import Frozen
from shared.storage import paths
from shared.storage.checkpoints import is_job
from shared.storage.store import ObjectInfo, ObjectStore
from shared.storage.stored_bytes import Ledger
from shared.storage.uses import delete_objects, marks_of, removed_run

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
