"""The artifacts that runs share, and the bytes that tenants hold in the store."""

import re
from typing import Literal

from longshore.accounts import Room
from longshore.fields import Frozen
from shared.errors import InvalidInput
from shared.storage import paths
from shared.storage.paths import RunKeys, tenant_folder
from shared.storage.store import ObjectStore

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
_UNIT = re.compile(rf"(?:{'|'.join(SHARED)})/[0-9a-f]{{32}}")


def unit_of(key: str) -> str | None:
    """Return the unit (service/runs/rows.py) of a key; None for a key outside the folders of shared artifacts."""
    match = _UNIT.match(key)
    return match[0] if match else None


USE_WORKFLOW = "UseWorkflow"


class UseRequest(Frozen):
    """A run that uses a unit until it has ended."""

    unit: str
    run_id: str

    @property
    def workflow_id(self) -> str:
        """The id of the workflow that has it noted, by which Temporal lists it later."""
        return f"use/{self.run_id}/{self.unit}"

    @classmethod
    def of_workflow(cls, workflow_id: str) -> "UseRequest | None":
        """Return the request of a workflow's id; None for another id."""
        match = re.fullmatch(rf"use/(.+)/({_UNIT.pattern})", workflow_id)
        return cls(unit=match[2], run_id=match[1]) if match else None


# --- The bytes that a tenant has in the store: by listing, for the rows of the service's database ---

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
COMMANDS, PUBLISHED = "commands", "published"
PUBLISHED_FOLDERS = ("adapters", "models", "checkpoints")


class Stored(Frozen):
    """The bytes of a category that a run, or a shared unit, holds for a tenant."""

    tenant: str
    owner: str
    what: str
    num_bytes: int


class Measurement(Frozen):
    """What was in the store by a listing that began at `began`."""

    began: float
    stored: tuple[Stored, ...]


def count_object(stored: dict[str, int], path: str, size: int) -> None:
    """Add an object of a run's folder to the bytes that count for its tenant. `path`: below that folder.

    Commands are apart, as the service counts them when it accepts them.
    """
    folder, _, rest = path.partition("/")
    what = COMMANDS if folder == COMMANDS else FOLDERS.get(folder, "records")
    match rest.split("/"):
        case [split, own] if folder == "dataset" and split.endswith(paths.OWN):
            size = -int(own)  # a copy of the tenant's uploads, which count already
    stored[what] = stored.get(what, 0) + size


def stored_of_run(store: ObjectStore, tenant: str, run_id: str) -> list[Stored]:
    """Measure what a run holds."""
    prefix, stored = f"{RunKeys(run_id).prefix}/", dict[str, int]()
    for info in store.list(prefix):
        count_object(stored, info.key.removeprefix(prefix), info.size)
    return [Stored(tenant=tenant, owner=run_id, what=what, num_bytes=n) for what, n in stored.items() if n > 0]


def stored_as_published(store: ObjectStore, tenant: str) -> Stored:
    """Measure a tenant's published versions, with their exports."""
    folders = (f"{tenant_folder(tenant)}/{folder}/" for folder in PUBLISHED_FOLDERS)
    num_bytes = sum(info.size for folder in folders for info in store.list(folder))
    return Stored(tenant=tenant, owner=PUBLISHED, what=PUBLISHED, num_bytes=num_bytes)


def check_room(room: Room, tenant: str, num_bytes: int, place: str) -> None:
    """Raise InvalidInput if a tenant has no room for bytes that a host is about to store."""
    if room.most is not None and room.used + num_bytes > room.most:
        raise InvalidInput(f"quota stored_bytes: {no_room(tenant, room.used, room.most, num_bytes)}", place)


def no_room(tenant: str, used: int, most: int, more: int) -> str:
    return f"{tenant} stores {used:,} bytes of {most:,}: {more:,} more are not allowed"
