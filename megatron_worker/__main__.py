"""The worker's entry point.

    python -m megatron_worker.process.launcher N megatron_worker --root FOLDER          do jobs until told to stop
    torchrun --standalone --nproc_per_node N -m megatron_worker --once JOB.json [--into FOLDER]      do one, by hand

Either way of starting N ranks does for both; for one rank, `python -m megatron_worker`. With `--once` the exit status
is 0 after success, 1 after a failure, 2 when the job was not begun.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from megatron_worker.process.startup import slow_imports, start_watchdog
from shared.errors import InvalidInput
from shared.jobs.job import Job
from shared.log_lines import escape_output
from shared.programs import leave
from shared.settings import Settings
from shared.storage.paths import HostPaths, WorkerPaths

if TYPE_CHECKING:
    from megatron_worker.warm_engine import BuildEngine


def main(arguments: list[str] | None = None, build: "BuildEngine | None" = None) -> int:
    """Run this rank; returns its exit status. `build` makes the engine of a plan; Longshore's own unless given."""
    options = _parse(arguments)
    paths = WorkerPaths(options.root.resolve()) if options.root else None
    start_watchdog(paths.record if paths else None)  # before the slow imports, as the host may die during them
    settings = Settings()
    try:
        job = _job_by_hand(options.once, options.into) if options.once else None
        return _work(paths, job, settings, build)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2


def _work(paths: WorkerPaths | None, job: Job | None, settings: Settings, build: "BuildEngine | None") -> int:
    """Join the group, then serve a folder or do one job."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read when CUDA starts
    with slow_imports():
        from megatron_worker.head.logprobs import set_policy
        from megatron_worker.process.ranks import Staging, connect_ranks
        from megatron_worker.warm_engine import build_engine
        from megatron_worker.worker import Worker

    set_policy(settings.kernels)
    with connect_ranks() as control:
        # A worker that serves a host has no credentials: the host stages what it lacks.
        staging = Staging(HostPaths(settings.root_path).cache, settings.s3 if job is not None else None, control)
        worker = Worker(control, staging, build or build_engine, settings.slot_bytes)
        if job is not None:
            return 0 if worker.do_one(job).state == "succeeded" else 1
        assert paths is not None
        worker.serve(paths)
        return 0


def _job_by_hand(path: Path, into: Path | None) -> Job:
    try:
        job = Job.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidInput(f"no job of this schema: {error}", str(path)) from error
    if into is None:
        return job
    folder = into.resolve()
    places = {"log_path": "log.jsonl", "checkpoint_dir": "checkpoints", "scratch_dir": "scratch"}
    if job.commands_dir is not None:
        places["commands_dir"] = "commands"
    return job.model_copy(update={field: str(folder / name) for field, name in places.items()})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron_worker", description="The training worker: one rank.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--root", type=Path, metavar="FOLDER", help="do the jobs that appear in this folder")
    what.add_argument("--once", type=Path, metavar="JOB.json", help="do one job and leave")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="with --once: where log and checkpoints go")
    options = parser.parse_args(arguments)
    if options.into and not options.once:
        parser.error("--into goes with --once")
    return options


if __name__ == "__main__":
    escape_output()
    leave(main())
