"""Repeats steps of a run from the archive on this machine, and compares the bits of the resulting checkpoint.

For operators: it opens the installation's store with the settings of the environment, and needs the worker's packages.
"""

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longshore.events import Failed, Saved, Started, parse_event
from longshore.fields import Artifact
from longshore.server import with_import_path
from shared.errors import InvalidInput, NotFound
from shared.jobs.job import Job, JobPlan, artifacts_of
from shared.provenance import started_of
from shared.storage.artifacts import StoredCheckpoint, find_artifact, is_job, stored_checkpoints
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore

_LOOK_EVERY_S = 0.2
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Stretch:
    """Steps between two states that are on record. `job`: begins at the first; `made`: the second, a checkpoint."""

    job: Job
    first_step: int
    last_step: int
    made: Artifact

    def __str__(self) -> str:
        return f"steps {self.first_step + 1} to {self.last_step} of job {self.job.plan.job_id}"


@dataclass(frozen=True)
class Retrained:
    """What came of a stretch. `devices`: that of the run, and this machine's."""

    stretch: str
    recorded_sha256: str
    found_sha256: str
    devices: tuple[str, str]

    @property
    def is_equal(self) -> bool:
        return self.found_sha256 == self.recorded_sha256


def stretches(store: ObjectStore, run_id: str, signed_job: str | None = None) -> list[Stretch]:
    """Return the stretches of a run that can be repeated: of jobs whose inputs are still stored, between checkpoints.

    `signed_job`: the SHA-256 of a job that is to be among them. Raises InvalidInput: it is not, so that this is the
    archive of something else.
    """
    saved = stored_checkpoints(store, run_id)
    found, hashes = [], set[str]()
    for info in list(store.list(f"{RunKeys(run_id).logs}/")):
        if is_job(info.key):
            data = store.get_bytes(info.key)
            hashes.add(hashlib.sha256(data).hexdigest())
            job = Job.model_validate_json(data)
            found += [each for each in _of_job(store, job, saved) if _has_inputs(store, each.job)]
    if found and signed_job is not None and signed_job not in hashes:
        raise InvalidInput(f"no job of {run_id} in the store is the one that the statement names", "the steps")
    return found


def _of_job(store: ObjectStore, job: Job, saved: list[StoredCheckpoint]) -> Iterator[Stretch]:
    """Yield the stretches of a job. Jobs of one lease, as RL's steps are, have their checkpoints in one folder."""
    if not isinstance(job.plan, JobPlan):  # a session's steps are its client's commands
        return
    step, begins = job.plan.first_step, job
    for each in saved:
        is_its_own = each.fence_label == job.fence.label and job.plan.first_step < each.step <= job.plan.last_step
        if not is_its_own or (made := find_artifact(store, each.key)) is None:
            continue
        if job.start is None or begins is not job:  # the step of a job's start checkpoint is not known here
            yield Stretch(begins, step, each.step, made)
        step, begins = each.step, job.model_copy(update={"start": made})


def _has_inputs(store: ObjectStore, job: Job) -> bool:
    def is_there(artifact: Artifact) -> bool:
        if not artifact.uri.startswith(f"{store.uri}/"):
            return True  # unknown here; the worker reports it if missing
        return find_artifact(store, artifact.uri.removeprefix(f"{store.uri}/")) is not None

    return all(is_there(artifact) for artifact in artifacts_of(job))


def choose(found: list[Stretch], run_id: str, seed: int | None) -> Stretch:
    """Return one of them, drawn at random. Raises NotFound: there is none."""
    if not found:
        rule = "a job can be while its data and a checkpoint that it left are in the store"
        raise NotFound(f"nothing of {run_id} can be done again: {rule}")
    return random.Random(seed).choice(found)


def retrain(stretch: Stretch, store: ObjectStore, folder: Path) -> Retrained:
    """Do a stretch's steps in a folder, and compare. Raises InvalidInput: the worker did not come to their end."""
    plan = stretch.job.plan.model_copy(update={"sync": None})  # the samplers of that day are gone
    path = folder / "job.json"
    path.write_text(stretch.job.model_copy(update={"plan": plan}).model_dump_json())
    ranks = str(plan.layout.world_size)
    command = [sys.executable, "-P", "-m", "megatron_worker.process.launcher", ranks, "megatron_worker"]
    command += ["--once", str(path), "--into", str(folder)]
    log, output = folder / "log.jsonl", folder / "output.log"
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=with_import_path(), stdout=file, stderr=subprocess.STDOUT)
        try:
            found = _followed(process, log, stretch.last_step, output)
        finally:
            process.terminate()
            process.wait()
    started = started_of(store, plan.run_id, plan.job_id, stretch.job.fence)
    device = "unknown" if started is None else started.device
    return Retrained(str(stretch), stretch.made.sha256, found[0], (device, found[1]))


def _followed(process: subprocess.Popen[bytes], log: Path, step: int, output: Path) -> tuple[str, str]:
    """Wait for the checkpoint of a step. Returns its manifest's SHA-256, and the device."""
    device = ""
    while True:
        has_ended = process.poll() is not None
        for line in log.read_bytes().splitlines(keepends=True) if log.exists() else []:
            if not line.endswith(b"\n"):
                break
            match parse_event(line):
                case Started(device=str(name)):
                    device = name
                case Saved(step=saved, manifest_sha256=sha256) if saved == step:
                    return sha256, device
                case Failed(message=why):
                    raise InvalidInput(why, "the steps")
        if has_ended:
            tail = output.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
            raise InvalidInput(f"the worker ended without the checkpoint of step {step}: {tail}", "the steps")
        time.sleep(_LOOK_EVERY_S)
