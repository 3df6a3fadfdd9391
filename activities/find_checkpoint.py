"""Where a run goes on from: its newest checkpoint, and the highest epoch that was ever leased for it."""

from temporalio import activity

from activities.checkpoints import newest
from shared.jobs import Fence
from shared.models import Frozen
from shared.paths import RunKeys
from shared.runs import CheckpointRef, RunId
from shared.settings import Settings
from shared.store import ObjectStore, open_store


class FindCheckpointRequest(Frozen):
    """Which run."""

    run_id: RunId


class ResumePoint(Frozen):
    """`last_epoch` is 0 for a run that never had a lease."""

    checkpoint: CheckpointRef | None
    last_epoch: int


class FindCheckpoint:
    """Reads the store alone, so that it tells the same to every execution of the run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="find_checkpoint")
    def find_checkpoint(self, request: FindCheckpointRequest) -> ResumePoint:
        """The point to go on from; nothing and epoch 0 for a new run."""
        store = open_store(self._settings.store, self._settings.s3)
        return ResumePoint(checkpoint=newest(store, request.run_id), last_epoch=_last_epoch(store, request.run_id))


def _last_epoch(store: ObjectStore, run_id: str) -> int:
    keys = (info.key for info in store.list(f"{RunKeys(run_id).leases}/"))
    labels = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in keys)
    return max((Fence.from_label(label).epoch for label in labels), default=0)
