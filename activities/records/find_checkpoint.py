"""Where a run goes on from: its newest checkpoint, and the highest epoch that was ever leased for it."""

from temporalio import activity

from activities.heartbeat import beating
from activities.records.checkpoints import find_newest, last_epoch
from shared.contract import Frozen
from shared.errors import CorruptArtifact
from shared.runs.requests import RunId
from shared.runs.status import CheckpointRef
from shared.settings import Settings
from shared.storage.store import open_store


class FindCheckpointRequest(Frozen):
    """Which run. `passed_over`: URIs of its checkpoints in which a worker found damage."""

    run_id: RunId
    passed_over: tuple[str, ...] = ()


class ResumePoint(Frozen):
    """`last_epoch` is 0 for a run that never had a lease. `damaged`: why newer checkpoints are not gone on from."""

    checkpoint: CheckpointRef | None
    last_epoch: int
    damaged: tuple[str, ...] = ()


class FindCheckpoint:
    """Reads the store alone, so that it tells the same to every execution of the run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="find_checkpoint")
    def find_checkpoint(self, request: FindCheckpointRequest) -> ResumePoint:
        """The point to go on from; nothing and epoch 0 for a new run.

        Raises:
            CorruptArtifact: there are checkpoints, and every one of them is damaged.
        """
        store = open_store(self._settings.store, self._settings.s3)
        with beating():
            found = find_newest(store, request.run_id, request.passed_over)
            if found.checkpoint is None and found.damaged:
                raise CorruptArtifact(f"no sound checkpoint is left to go on from: {'; '.join(found.damaged)}")
            epoch = last_epoch(store, request.run_id)
            return ResumePoint(checkpoint=found.checkpoint, last_epoch=epoch, damaged=found.damaged)
