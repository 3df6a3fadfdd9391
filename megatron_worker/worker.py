"""The resident worker: rank 0 watches the folder, every rank does the job that it broadcasts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron_worker.ending import end_job
from megatron_worker.process.event_log import Report
from megatron_worker.process.faults import Fault
from megatron_worker.process.job_queue import Claim, JobQueue
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.process.staging import Staging
from megatron_worker.runner import Outcome, run_job
from megatron_worker.warm_engine import BuildEngine, WarmEngine
from shared.contract import Frozen
from shared.jobs.job import Job
from shared.storage.paths import WorkerPaths, write_atomically

POLL_S = 0.05
KEEP_ALIVE_S = 60.0  # idle ranks wait in a broadcast, which may not time out


class Order(Frozen):
    """What rank 0 tells the others. `stale`: why the job is refused."""

    kind: Literal["wait", "do", "leave"]
    job: Job | None = None
    stale: str | None = None


class CancelFlag:
    """Whether the job in hand is to end now. Collective: every rank gets rank 0's answer, and a yes stays."""

    def __init__(self, ranks: WorkerRanks, asked: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._asked = asked
        self._seen = False

    def __call__(self) -> bool:
        if not self._seen:
            asked = self._ranks.rank == 0 and self._asked()
            self._seen = bool(self._ranks.largest([int(asked)])[0])
        return self._seen


class Worker:
    """One process of the group, with its engine and what it needs for any job."""

    def __init__(self, ranks: WorkerRanks, staging: Staging, build: BuildEngine) -> None:
        self._ranks = ranks
        self._staging = staging
        self._warm = WarmEngine(build)

    def serve(self, paths: WorkerPaths) -> None:
        """Do jobs until the folder's `stop` stands and no job is in hand."""
        reader = QueueReader(paths) if self._ranks.rank == 0 else None
        while True:
            order = self._next_order(reader)
            if order.kind == "leave":
                return
            if order.job is not None:
                self._do(order.job, order.stale, reader)

    def do_one(self, job: Job) -> Outcome:
        """Do one job by hand: nothing is claimed, archived or cancelled. Raises InvalidInput when its log is in use."""
        report = Report(Path(job.log_path) if self._ranks.rank == 0 else None)
        return self.run(job, report)

    def _next_order(self, reader: "QueueReader | None") -> Order:
        order = reader.next_order() if reader else None
        return Order.model_validate_json(self._ranks.broadcast(order.model_dump_json().encode() if order else None))

    def _do(self, job: Job, stale: str | None, reader: "QueueReader | None") -> None:
        if reader is None:
            self.run(job, Report(None), stale)
        else:
            self.run(job, reader.claim.report, stale, lambda: reader.queue.is_cancelled(job), reader.archive)

    def run(
        self,
        job: Job,
        report: Report,
        stale: str | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        archive: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """A job from its inputs to its terminal event. `cancelled` and `archive` are asked on rank 0 alone."""
        if stale:
            outcome = Outcome("failed", 0, Fault(kind="stale_fence", message=stale))
        else:
            flag = CancelFlag(self._ranks, cancelled)
            outcome = run_job(job, self._warm, self._staging, report, self._ranks, flag)
        end_job(job, outcome, self._warm, report, self._ranks, archive)
        return outcome


class QueueReader:
    """Rank 0's own: the queue, and the claim of the job in hand."""

    def __init__(self, paths: WorkerPaths) -> None:
        self.queue = JobQueue(paths)
        self.claim: Claim
        write_atomically(paths.ready, b"")

    def next_order(self) -> Order:
        """Wait for a job or `stop`; speak up now and then all the same."""
        deadline = time.monotonic() + KEEP_ALIVE_S
        while time.monotonic() < deadline:
            if self.queue.should_leave():
                return Order(kind="leave")
            if (claim := self.queue.claim()) is not None:
                self.claim = claim
                return Order(kind="do", job=claim.job, stale=claim.stale)
            time.sleep(POLL_S)
        return Order(kind="wait")

    def archive(self) -> None:
        self.queue.archive(self.claim.path)
