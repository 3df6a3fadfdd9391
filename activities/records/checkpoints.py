"""The checkpoints of a run in the store, of all its leases."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from temporalio import activity

from activities.host_context import HostContext, beating
from longshore.fields import Frozen
from shared.errors import CorruptArtifact, NotFound
from shared.fence import Fence
from shared.jobs.job import WorkerPlan
from shared.runs.requests import RunId
from shared.runs.status import CheckpointRef
from shared.storage.artifacts import Manifest, find_artifact, read_manifest, read_record, sha256_object
from shared.storage.checkpoints import checkpoints_among, stored_checkpoints
from shared.storage.paths import MANIFEST, RunKeys
from shared.storage.store import ObjectStore, uri_of


def newest_first(store: ObjectStore, run_id: str) -> Iterator[CheckpointRef]:
    """Yield the checkpoints that are in the store."""
    for stored in reversed(stored_checkpoints(store, run_id)):
        artifact = find_artifact(store, stored.key)
        if artifact is not None:  # else it was pruned since it was listed
            yield CheckpointRef(step=stored.step, fence=Fence.from_label(stored.fence_label), artifact=artifact)


@dataclass(frozen=True)
class Found:
    """The newest intact checkpoint, and messages on newer ones that are damaged, the newest first."""

    checkpoint: CheckpointRef | None
    damaged: tuple[str, ...] = ()


def find_newest(store: ObjectStore, run_id: str, passed_over: Collection[str] = ()) -> Found:
    """Find the newest checkpoint whose files have the sizes in its manifest. (Hashes are checked when it is read.)

    `passed_over`: URIs of checkpoints that a worker found damaged.
    """
    damaged: list[str] = []
    for found in newest_first(store, run_id):
        if found.artifact.uri in passed_over:
            damaged.append(f"the checkpoint of step {found.step} is damaged")
            continue
        why = _what_is_wrong(store, RunKeys(run_id).checkpoint(found.fence, found.step))
        if why is None:
            return Found(found, tuple(damaged))
        if why:
            damaged.append(f"the checkpoint of step {found.step} is damaged: {why}")
    return Found(None, tuple(damaged))


def damage(store: ObjectStore, run_id: str, checkpoint: CheckpointRef) -> str | None:
    """Compare every file of a checkpoint with its manifest. Returns the difference, or None for a sound one."""
    key = RunKeys(run_id).checkpoint(checkpoint.fence, checkpoint.step)
    try:
        manifest = read_manifest(store, key, checkpoint.artifact.sha256)
        for entry in manifest.files:
            info = store.head(f"{key}/{entry.path}")
            if info is None or sha256_object(store, f"{key}/{entry.path}", info.size) != entry.sha256:
                why = "the file's SHA-256 is not the manifest's" if info else "the file is missing"
                raise CorruptArtifact(why, uri_of(store, f"{key}/{entry.path}"))
    except CorruptArtifact as error:
        return f"the checkpoint of step {checkpoint.step} is damaged: {error}"
    return None


def saved_by_job(plan: WorkerPlan, checkpoint: CheckpointRef | None) -> CheckpointRef | None:
    """Return a run's newest checkpoint if this job saved it; None if it is the one that the job before ended with."""
    if plan.initial_checkpoint is None or (checkpoint is not None and checkpoint.step > plan.first_step):
        return checkpoint
    return None


def last_epoch(store: ObjectStore, run_id: str) -> int:
    """The highest epoch that was ever leased for a run; 0 for one that never had a lease."""
    keys = (info.key for info in store.list(f"{RunKeys(run_id).leases}/"))
    labels = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in keys)
    return max((Fence.from_label(label).epoch for label in labels), default=0)


def prune_checkpoints(store: ObjectStore, run_id: str, keep: int, fence: Fence, keep_states: int = 0) -> None:
    """Delete all checkpoints but the newest `keep`. Manifests go first, so that no incomplete one seems complete.

    A session also keeps the newest `keep_states` that its client asked for.

    A checkpoint of an older lease with a later step than this lease has saved was damaged, or uploaded too late for
    this lease to resume from it. It is deleted.

    Incomplete uploads of older fences are deleted, too. If a newer lease exists, nothing is deleted, since that lease
    may have begun from any checkpoint.
    """
    if last_epoch(store, run_id) > fence.epoch:
        return
    keys = [info.key for info in store.list(f"{RunKeys(run_id).checkpoints}/")]
    found = checkpoints_among(run_id, keys)
    # A host of an older lease may have put its manifest after files of it were deleted here as incomplete.
    reached = max((c.step for c in found if c.fence_label == fence.label), default=None)
    found_by_now = [c for c in found if c.fence_label >= fence.label or reached is None or c.step <= reached]
    whole = [c for c in found_by_now if c.fence_label >= fence.label or _what_is_wrong(store, c.key) is None]
    kept = {checkpoint.key for checkpoint in whole[-keep:]}
    if keep_states:
        asked = _asked_for(store, RunKeys(run_id), keep_states)
        kept.update({c.step: c.key for c in whole if c.step in asked}.values())  # of two leases the later one's
    marked = {checkpoint.key for checkpoint in found}
    for checkpoint in found:
        if checkpoint.key not in kept:
            store.delete(f"{checkpoint.key}/{MANIFEST}")
    for key in keys:
        label, step, *_ = key.removeprefix(f"{RunKeys(run_id).checkpoints}/").split("/")
        folder = f"{RunKeys(run_id).checkpoints}/{label}/{step}"
        if folder not in kept and (folder in marked or label < fence.label):
            store.delete(key)


def _asked_for(store: ObjectStore, keys: RunKeys, most: int) -> set[int]:
    """Return the steps of the newest `most` states that a session's client asked for; marks of older ones go."""
    marks = sorted(info.key for info in store.list(keys.kept_states))
    for key in marks[:-most]:
        store.delete(key)
    return {int(key.removeprefix(keys.kept_states)) for key in marks[-most:]}


def discard_after(store: ObjectStore, run_id: str, step: int) -> None:
    """Delete the checkpoints of later steps, which will be done again. Manifests are deleted first."""
    for checkpoint in stored_checkpoints(store, run_id):
        if checkpoint.step > step:
            store.delete(f"{checkpoint.key}/{MANIFEST}")
            for info in list(store.list(f"{checkpoint.key}/")):
                store.delete(info.key)


def _what_is_wrong(store: ObjectStore, key: str) -> str | None:
    """Compare a checkpoint's sizes with its manifest. Returns None if it is intact, else the fault.

    An empty text means that files are missing, because it was being pruned or uploaded.
    """
    try:
        manifest = read_record(store, f"{key}/{MANIFEST}", Manifest)
    except NotFound:
        return ""
    except CorruptArtifact as error:
        return str(error)
    sizes = {info.key.removeprefix(f"{key}/"): info.size for info in store.list(f"{key}/")}
    named = {entry.path: entry.size for entry in manifest.files}
    if unnamed := sorted(sizes.keys() - named.keys() - {MANIFEST}):
        return f"{uri_of(store, f'{key}/{MANIFEST}')}: it does not name {unnamed[0]}, which is there"
    if other := sorted(path for path, size in named.items() if sizes.get(path, size) != size):
        return f"{uri_of(store, f'{key}/{other[0]}')}: the file is not as long as its manifest says"
    return None if sizes.keys() >= named.keys() else ""


class FindCheckpointRequest(Frozen):
    """A run. `passed_over`: URIs of its checkpoints that a worker found damaged."""

    run_id: RunId
    passed_over: tuple[str, ...] = ()


class ResumePoint(Frozen):
    """The checkpoint to resume from. `last_epoch`: the number of leases so far. `damaged`: faults of newer ones."""

    checkpoint: CheckpointRef | None
    last_epoch: int
    damaged: tuple[str, ...] = ()


class FindCheckpoint:
    """The activity `find_checkpoint`. It reads nothing but the store: every execution of a run gets the same answer."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="find_checkpoint")
    def find_checkpoint(self, request: FindCheckpointRequest) -> ResumePoint:
        """Return the run's newest intact checkpoint, and its number of leases so far; None and 0 for a new run.

        Raises CorruptArtifact: there are checkpoints, and every one of them is damaged.
        """
        store = self._host.store
        with beating():
            found = find_newest(store, request.run_id, request.passed_over)
            if found.checkpoint is None and found.damaged:
                raise CorruptArtifact(f"no sound checkpoint is left to go on from: {'; '.join(found.damaged)}")
            epoch = last_epoch(store, request.run_id)
            return ResumePoint(checkpoint=found.checkpoint, last_epoch=epoch, damaged=found.damaged)
