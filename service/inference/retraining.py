"""Steps of a run done again from the archive on this machine: the bits of the checkpoint that they left are compared.

For operators: it opens the installation's store with the settings of the environment, and needs the worker's packages.
"""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longshore.fields import Artifact
from longshore.server import with_import_path
from shared.errors import InvalidInput, NotFound
from shared.jobs.events import Failed, Saved, Started, parse_event
from shared.jobs.job import Job, JobPlan, artifacts_of
from shared.storage.artifacts import find_artifact
from shared.storage.paths import MANIFEST, RunKeys
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


def stretches(store: ObjectStore, run_id: str) -> list[Stretch]:
    """Return what can be done again of a run: jobs whose inputs are still in the store, between their checkpoints."""
    keys = RunKeys(run_id)
    saved: dict[str, list[tuple[int, str]]] = {}
    for item in store.list(f"{keys.checkpoints}/"):
        if (place := keys.checkpoint_of(item.key)) is not None:
            saved.setdefault(place[0].label, []).append((place[1], item.key.removesuffix(f"/{MANIFEST}")))
    found = []
    for key in [item.key for item in store.list(f"{keys.logs}/") if item.key.endswith("/job.json")]:
        label = key.split("/")[-2]
        if label in saved:
            job = Job.model_validate_json(store.get_bytes(key))
            found += [each for each in _of_job(store, job, sorted(saved[label])) if _has_inputs(store, each.job)]
    return found


def _of_job(store: ObjectStore, job: Job, saved: list[tuple[int, str]]) -> Iterator[Stretch]:
    if not isinstance(job.plan, JobPlan):  # a session's steps are its client's commands
        return
    from_start = job.start is None
    step, begins = job.plan.first_step, job
    for last_step, key in saved:
        if (made := find_artifact(store, key)) is None:
            continue
        if from_start or begins is not job:  # of a job that went on from a checkpoint the step is not in the file
            yield Stretch(begins, step, last_step, made)
        step, begins = last_step, job.model_copy(update={"start": made})


def _has_inputs(store: ObjectStore, job: Job) -> bool:
    def is_there(artifact: Artifact) -> bool:
        if not artifact.uri.startswith(f"{store.uri}/"):
            return True  # not ours to know; the worker says if it is not
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
    device = _device_of(store, stretch.job.plan.run_id, stretch.job)
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


def _device_of(store: ObjectStore, run_id: str, job: Job) -> str:
    key = RunKeys(run_id).log(job.plan.job_id, job.fence)
    first = parse_event(store.read_range(key, 0, 1 << 16).split(b"\n", 1)[0]) if store.head(key) else None
    return first.device if isinstance(first, Started) else "unknown"
