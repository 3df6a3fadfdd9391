"""The end of a job, in the order that docs/job_protocol.md promises. Nothing comes after the terminal event.

Step 1, the durable checkpoint, is the runner's last act before this.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from megatron_worker.process.event_log import Report
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.runner import Outcome
from megatron_worker.warm_engine import WarmEngine, collect_garbage
from shared.jobs.events import Cancelled, Failed, Offloaded, Succeeded
from shared.jobs.job import Job


def end_job(
    job: Job, outcome: Outcome, warm: WarmEngine, report: Report, ranks: WorkerRanks, archive: Callable[[], None]
) -> None:
    """Steps 2 to 7. The runner's own objects went when it returned. `archive` is called on rank 0."""
    _free_device(job, warm, report, ranks)  # 2, 3
    ranks.barrier()  # 4
    if ranks.rank == 0:
        if Path(job.scratch_dir).exists():
            shutil.rmtree(job.scratch_dir)  # 5
        archive()  # 6
        _conclude(outcome, warm, report)  # 7


def _free_device(job: Job, warm: WarmEngine, report: Report, ranks: WorkerRanks) -> None:
    """Drop what the job made, then offload what the next job can use. A job that was refused has touched nothing."""
    if not warm.in_use or warm.engine is None:
        collect_garbage()
        return
    began, before = time.perf_counter(), warm.engine.memory()
    warm.engine.drop_training_state()
    collect_garbage()
    if job.plan.after == "offload":
        warm.offload()
        after = warm.engine.memory()
        sums = ranks.total([before.device_bytes, after.device_bytes, after.host_bytes])
        report.emit(
            Offloaded,
            device_bytes_before=sums[0],
            device_bytes_after=sums[1],
            host_bytes=sums[2],
            duration_s=time.perf_counter() - began,
        )
    warm.put_back()


def _conclude(outcome: Outcome, warm: WarmEngine, report: Report) -> None:
    device = "held" if warm.on_device else "released"
    match outcome.state:
        case "succeeded":
            report.emit(Succeeded, step=outcome.step, device=device)
        case "cancelled":
            report.emit(Cancelled, step=outcome.step, device=device)
        case "failed":
            assert outcome.fault is not None
            report.emit(Failed, step=outcome.step, device=device, **outcome.fault.model_dump())
