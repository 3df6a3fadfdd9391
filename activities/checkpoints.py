"""The checkpoints of a run that stand in the store, over all its leases."""

from dataclasses import dataclass

from shared.artifacts import Manifest, find
from shared.errors import NotFound
from shared.jobs import Fence, JobPlan
from shared.paths import MANIFEST, RunKeys
from shared.runs import CheckpointRef
from shared.store import ObjectStore


@dataclass(frozen=True, order=True)
class Standing:
    """A checkpoint whose manifest stands. Ordered by step, then by fence: a later lease's replaces an earlier one's."""

    step: int
    fence_label: str
    key: str


def standing(store: ObjectStore, run_id: str) -> list[Standing]:
    """All checkpoints with a manifest, the newest last."""
    found = (_parse(info.key) for info in store.list(f"{RunKeys(run_id).checkpoints}/"))
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def newest(store: ObjectStore, run_id: str) -> CheckpointRef | None:
    """The newest checkpoint of which every file is there in its full size."""
    for checkpoint in reversed(standing(store, run_id)):
        artifact = find(store, checkpoint.key)
        if artifact is not None and _is_whole(store, checkpoint.key):
            fence = Fence.from_label(checkpoint.fence_label)
            return CheckpointRef(step=checkpoint.step, fence=fence, artifact=artifact)
    return None


def own(plan: JobPlan, checkpoint: CheckpointRef | None) -> CheckpointRef | None:
    """A run's newest checkpoint, if it is this job's own and not the one that the job before it ended with."""
    if plan.initial_checkpoint is None or (checkpoint is not None and checkpoint.step > plan.first_step):
        return checkpoint
    return None


def last_epoch(store: ObjectStore, run_id: str) -> int:
    """The highest epoch that was ever leased for a run; 0 for one that never had a lease."""
    keys = (info.key for info in store.list(f"{RunKeys(run_id).leases}/"))
    labels = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in keys)
    return max((Fence.from_label(label).epoch for label in labels), default=0)


def prune(store: ObjectStore, run_id: str, keep: int, fence: Fence) -> None:
    """Delete all but the newest `keep`, each one's manifest first, so that no half of one is ever taken for whole.

    What hosts of older fences began to carry, and did not finish, goes too. A straggler deletes nothing: the lease
    after its own may have begun from any checkpoint that stands.
    """
    if last_epoch(store, run_id) > fence.epoch:
        return
    keys = [info.key for info in store.list(f"{RunKeys(run_id).checkpoints}/")]
    found = sorted(checkpoint for checkpoint in map(_parse, keys) if checkpoint is not None)
    # A straggler can have set its manifest over files that were deleted here as half-carried.
    whole = [c for c in found if c.fence_label >= fence.label or _is_whole(store, c.key)]
    kept = {checkpoint.key for checkpoint in whole[-keep:]}
    marked = {checkpoint.key for checkpoint in found}
    for checkpoint in found:
        if checkpoint.key not in kept:
            store.delete(f"{checkpoint.key}/{MANIFEST}")
    for key in keys:
        label, step, *_ = key.removeprefix(f"{RunKeys(run_id).checkpoints}/").split("/")
        folder = f"{RunKeys(run_id).checkpoints}/{label}/{step}"
        if folder not in kept and (folder in marked or label < fence.label):
            store.delete(key)


def discard_after(store: ObjectStore, run_id: str, step: int) -> None:
    """Delete the checkpoints of later steps, each one's manifest first: what they began will be done anew."""
    for checkpoint in standing(store, run_id):
        if checkpoint.step > step:
            store.delete(f"{checkpoint.key}/{MANIFEST}")
            for info in list(store.list(f"{checkpoint.key}/")):
                store.delete(info.key)


def _is_whole(store: ObjectStore, key: str) -> bool:
    try:
        manifest = Manifest.model_validate_json(store.get_bytes(f"{key}/{MANIFEST}"))
    except NotFound:
        return False
    sizes = {info.key: info.size for info in store.list(f"{key}/")}
    return all(sizes.get(f"{key}/{entry.path}") == entry.size for entry in manifest.files)


def _parse(key: str) -> Standing | None:
    match key.split("/")[-3:]:
        case [label, step, name] if name == MANIFEST and step.startswith("step-"):
            return Standing(int(step.removeprefix("step-")), label, key.removesuffix(f"/{MANIFEST}"))
        case _:
            return None
