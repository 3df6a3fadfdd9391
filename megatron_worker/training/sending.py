"""Weights that travel to samplers while they are saved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_worker.process.event_log import EventLog
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.weight_sync.gathering import Giving
from megatron_worker.weight_sync.sender import Sending
from shared.jobs.events import Synced
from shared.jobs.job import Job
from shared.jobs.weight_sync import SyncAccess, SyncTarget

Send = Callable[[SyncTarget, SyncAccess], Sending | Giving | None]


@contextmanager
def sent_meanwhile(
    send: Send, job: Job, step: int, report: EventLog, ranks: WorkerRanks, named: SyncTarget | None = None
) -> Iterator[None]:
    """Send weights during a `with` block that does not change them, and report `synced`. Collective.

    Args:
        send: begins to send, as `Dispatcher.send_weights` does.
        step: what the weights are after.
        named: the samplers that the plan names. Without any the weights go to the one that the host has found, if it
            has found one.

    Raises:
        InvalidInput: as `send` does.
    """
    access = SyncAccess.read(job.log_path) if ranks.rank == 0 else SyncAccess()
    target = named or _of_rank_0(access, ranks)
    sending = send(target if named else target.model_copy(update={"version": step}), access) if target else None
    try:
        yield
    finally:
        if sending is not None and (outcome := sending.wait()) is not None:
            report.emit(Synced, step=step, outcome=outcome)


def _of_rank_0(access: SyncAccess, ranks: WorkerRanks) -> SyncTarget | None:
    """Return the target that rank 0 has read: the host may write it while ranks look."""
    data = ranks.broadcast(access.target.model_dump_json().encode() if access.target is not None else b"")
    return SyncTarget.model_validate_json(data) if data else None
