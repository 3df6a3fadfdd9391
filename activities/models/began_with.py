"""What a run began with: its model, and the adapters that it names. It goes on with the same bytes, or not at all."""

from typing import Literal

from shared.contract import Artifact
from shared.errors import InvalidInput
from shared.runs.requests import RunId
from shared.settings import Settings
from shared.storage.artifacts import Manifest, files_of, read_record
from shared.storage.paths import RunKeys
from shared.storage.store import open_store

What = Literal["model", "initial_adapter", "reference"]
_MOST_NAMES = 4


def check_began_with(what: What, found: Artifact, place: str, run_id: RunId, settings: Settings) -> None:
    """Put on record what a run's first execution found at a place, and hold every later execution to it.

    Files are compared by hash. Where they lie does not matter: a cache may have moved.

    Raises:
        InvalidInput: other files are there now; names them.
        CorruptArtifact: the record is damaged.
    """
    store, key = open_store(settings.store, settings.s3), RunKeys(run_id).began_with(what)
    _, now = files_of(found, settings.s3)
    if store.put_if_absent(key, now.encoded()):
        return
    if names := _different(read_record(store, key, Manifest), now):
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        raise InvalidInput(
            f"this {what.replace('_', ' ')} is not the one that the run began with: {', '.join(names[:_MOST_NAMES])}"
            f"{more} changed since; put the former files back and resume, or start a new run",
            place,
        )


def _different(before: Manifest, now: Manifest) -> list[str]:
    """Names of files that differ, are missing, or are new."""
    theirs, ours = ({entry.path: entry.sha256 for entry in manifest.files} for manifest in (before, now))
    return sorted(path for path in theirs.keys() | ours.keys() if theirs.get(path) != ours.get(path))
