"""Where a run goes on from: its newest checkpoint, and the highest epoch that was ever leased for it."""

from temporalio import activity

from activities.checkpoints import last_epoch, newest
from activities.heartbeat import beating
from shared.models import Frozen
from shared.runs import CheckpointRef, RunId
from shared.settings import Settings
from shared.store import open_store


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
        with beating():
            return ResumePoint(checkpoint=newest(store, request.run_id), last_epoch=last_epoch(store, request.run_id))
