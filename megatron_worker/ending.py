"""The end of a job: steps 2 to 7 of those in docs/job_protocol.md, the last of which is the terminal event.

Step 1, the durable checkpoint, is done by the runner before.
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
    """End a job, after the runner has returned and freed its own objects. `archive` is called on rank 0."""
    _free_device(job, outcome, warm, report, ranks)  # 2, 3
    ranks.barrier()  # 4
    if ranks.rank == 0:
        if Path(job.scratch_dir).exists():
            shutil.rmtree(job.scratch_dir)  # 5
        archive()  # 6
        _conclude(job, outcome, warm, report)  # 7


def _free_device(job: Job, outcome: Outcome, warm: WarmEngine, report: Report, ranks: WorkerRanks) -> None:
    """Drop what the job made, and offload what later jobs can use. A job that was refused has nothing to free."""
    if job.plan.run_id not in warm.in_hand or warm.dispatcher is None:
        collect_garbage()
        return
    engine = warm.dispatcher.engine
    began, before = time.perf_counter(), engine.memory()
    warm.give_back(job.plan, outcome.kept)
    collect_garbage()
    if job.plan.after == "offload":
        warm.offload(job.plan)
        after = engine.memory()
        sums = ranks.total([before.device_bytes, after.device_bytes, after.host_bytes])
        report.emit(
            Offloaded,
            device_bytes_before=sums[0],
            device_bytes_after=sums[1],
            host_bytes=sums[2],
            duration_s=time.perf_counter() - began,
        )


def _conclude(job: Job, outcome: Outcome, warm: WarmEngine, report: Report) -> None:
    """Emit the terminal event. `device` says whether the job's own part of the device's memory is still held."""
    is_held = warm.on_device and (job.plan.after == "keep" or not warm.in_hand)
    device = "held" if is_held else "released"
    match outcome.state:
        case "succeeded":
            report.emit(Succeeded, step=outcome.step, device=device)
        case "cancelled":
            report.emit(Cancelled, step=outcome.step, device=device)
        case "failed":
            assert outcome.fault is not None
            report.emit(Failed, step=outcome.step, device=device, **outcome.fault.model_dump())
