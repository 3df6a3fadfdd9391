"""Which steps of a run can be done again: of each job between its own checkpoints, as far as its inputs are there."""

import hashlib
from pathlib import Path

import pytest

from longshore.fields import Artifact
from longshore.training import Lora
from service.inference.retraining import stretches
from shared.errors import InvalidInput
from shared.jobs.job import Job, JobPlan, PackedData, Schedule
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.paths import Fence, RunKeys
from shared.storage.store import LocalStore

KEYS, FENCE = RunKeys("rl-1"), Fence(epoch=1)


def put(store: LocalStore, folder: Path, key: str, content: str) -> Artifact:
    path = folder / key
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    seal(path)
    return upload_artifact(store, key, path)


def test_jobs_of_one_lease_have_stretches_between_their_own_checkpoints(tmp_path: Path) -> None:
    """As RL has them: a job a step of the run, each of which goes on from the last checkpoint of the one before."""
    store = LocalStore(tmp_path / "store")
    given = put(store, tmp_path, "packed/data", "data")
    places = dict.fromkeys(("log_path", "checkpoint_dir", "scratch_dir"), "/there")
    made: dict[int, Artifact] = {0: given}
    for number in (1, 2):
        first = 2 * (number - 1)
        plan = JobPlan(
            run_id="rl-1",
            job_id=f"{number:06d}",
            model=given,
            trainable=Lora(rank=4),
            data=PackedData(units=given, plan=given),
            num_steps=2,
            first_step=first,
            initial_checkpoint=made[first] if first else None,
            schedule=Schedule(learning_rate=1e-3),
        )
        job = Job(plan=plan, fence=FENCE, **places)
        store.put_bytes(KEYS.job(plan.job_id, FENCE), job.model_dump_json().encode())
        made |= {s: put(store, tmp_path, KEYS.checkpoint(FENCE, s), f"{s}") for s in (first + 1, first + 2)}

    def found() -> list[tuple[str, int, int, str]]:
        return [(s.job.plan.job_id, s.first_step, s.last_step, s.made.sha256) for s in stretches(store, "rl-1")]

    each = [("000001", 0, 1), ("000001", 1, 2), ("000002", 2, 3), ("000002", 3, 4)]
    assert found() == [(*place, made[place[2]].sha256) for place in each]
    signed = hashlib.sha256(store.get_bytes(KEYS.job("000002", FENCE))).hexdigest()
    assert len(stretches(store, "rl-1", signed)) == 4
    with pytest.raises(InvalidInput, match="no job of rl-1 in the store is the one that the statement names"):
        stretches(store, "rl-1", "0" * 64)
    store.delete(f"{KEYS.checkpoint(FENCE, 2)}/manifest.json")  # without it neither job can be done as it was
    assert [place[:3] for place in found()] == [("000001", 0, 1), ("000002", 3, 4)]
