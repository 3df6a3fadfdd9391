"""Names of runs' results: `<name>` and `<name>:v<n>` of published weights, `<run>:step-<n>` of checkpoints.

A checkpoint is the state of a run after step n, or of a session after command n.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from longshore.commands import CHECKPOINT_NAME
from longshore.fields import Artifact
from shared.storage.artifacts import find_artifact
from shared.storage.paths import MANIFEST, RunKeys
from shared.storage.store import ObjectStore

PUBLISHED_NAME = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,62})(:v(?P<version>[1-9][0-9]{0,5}))?")


def is_name(text: str) -> bool:
    """True if a text can only name a checkpoint or something published: hub ids, paths and URIs have a /."""
    return PUBLISHED_NAME.fullmatch(text) is not None or CheckpointName.parse(text) is not None


@dataclass(frozen=True)
class CheckpointName:
    run_id: str
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}:step-{self.step}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        if not re.fullmatch(CHECKPOINT_NAME, text):
            return None
        run_id, _, step = text.partition(":step-")
        return cls(run_id, int(step))


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint that has a manifest. Ordered by step, then by fence: a later lease's replaces an earlier one's."""

    step: int
    fence_label: str
    key: str


def is_job(key: str) -> bool:
    """True for the key of a job's file below a run's logs."""
    return key.endswith("/job.json")


def stored_checkpoints(store: ObjectStore, run_id: str) -> list[StoredCheckpoint]:
    """List a run's checkpoints that have a manifest, the newest last."""
    return checkpoints_among(run_id, (info.key for info in store.list(f"{RunKeys(run_id).checkpoints}/")))


def checkpoints_among(run_id: str, keys: Iterable[str]) -> list[StoredCheckpoint]:
    """Return the checkpoints whose manifests are among a run's keys, the newest last."""
    found = []
    for key in keys:
        if (place := RunKeys(run_id).checkpoint_of(key)) is not None:
            fence, step = place
            found.append(StoredCheckpoint(step, fence.label, key.removesuffix(f"/{MANIFEST}")))
    return sorted(found)


def checkpoint_of_step(store: ObjectStore, name: CheckpointName) -> tuple[str, Artifact] | None:
    """Return the key and the artifact of a checkpoint, of the newest lease that saved it; None if there is none."""
    found = [each.key for each in stored_checkpoints(store, name.run_id) if each.step == name.step]
    artifact = find_artifact(store, found[-1]) if found else None
    return None if artifact is None else (found[-1], artifact)
