"""The record of train steps: what a run without a history goes on from, and what must not be gone on from."""

import time
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.records import RecoverRequest, RunRecords, StepRecordRequest, find_newest, saved_by_job
from longshore.fields import Fence
from longshore.runs import HeldOut
from longshore.training import Lora
from longshore.views import CarriedOver, CheckpointRef, StepStatus
from shared.jobs.job import JobPlan, PackedData, Schedule
from shared.runs.status import Evaluated
from shared.settings import Settings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, ObjectStore, open_store
from tests.workflows.stand_in import artifact

RUN = "r1"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=tmp_path / "root")


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    return open_store(settings.store, settings.s3)


def save_checkpoint(store: ObjectStore, tmp_path: Path, step: int, epoch: int = 1) -> CheckpointRef:
    fence = Fence(epoch=epoch)
    key = RunKeys(RUN).checkpoint(fence, step)
    made = artifact(store, tmp_path / f"checkpoint-{epoch}-{step}", key, state_json=f'{{"step": {step}}}')
    return CheckpointRef(step=step, fence=fence, artifact=made)


def adapter_of(version: int) -> dict[str, str]:
    return {"adapter": f"file:///published/v{version}", "adapter_sha256": f"{version:064x}"}


def record(settings: Settings, number: int, **fields: object) -> StepStatus:
    step = StepStatus.model_validate({"step": number, "key": f"key-{number}", "groups": "file:///g.jsonl", **fields})
    RunRecords(HostContext(settings)).record_step(StepRecordRequest(run_id=RUN, step=step))
    return step


def test_a_run_goes_on_from_its_last_done_step(settings: Settings, store: ObjectStore, tmp_path: Path) -> None:
    kept = save_checkpoint(store, tmp_path, 4)
    record(settings, 1, state="done", policy_version=1, optimizer_step=2)
    done = record(settings, 2, state="done", policy_version=2, optimizer_step=4, checkpoint=kept, **adapter_of(2))
    record(settings, 3, state="failed", policy_version=2, optimizer_step=4)
    record(settings, 4, state="done", policy_version=1, optimizer_step=2, same_as=1)
    recovered = RunRecords(HostContext(settings)).recover_steps(RecoverRequest(run_id=RUN))
    assert (recovered.last_step, recovered.trained) == (4, done)


def test_a_run_knows_the_policies_of_its_last_steps(settings: Settings, store: ObjectStore, tmp_path: Path) -> None:
    """A skipped step leaves the policy as it was; before the first trained one it has no adapter."""
    kept = save_checkpoint(store, tmp_path, 4)
    record(settings, 0, state="done", policy_version=0, optimizer_step=0)
    record(settings, 1, state="skipped", policy_version=0, optimizer_step=0)
    record(settings, 2, state="done", policy_version=1, optimizer_step=2, checkpoint=kept, **adapter_of(1))
    record(settings, 3, state="skipped", policy_version=1, optimizer_step=2)
    record(settings, 4, state="done", policy_version=2, optimizer_step=4, checkpoint=kept, **adapter_of(2))

    def policies(num: int) -> list[tuple[int, int, str | None]]:
        recovered = RunRecords(HostContext(settings)).recover_steps(RecoverRequest(run_id=RUN, num_policies=num))
        assert recovered.last_step == 4
        return [(p.after_step, p.version, p.adapter.uri if p.adapter else None) for p in recovered.policies]

    first, second = adapter_of(1)["adapter"], adapter_of(2)["adapter"]
    assert policies(1) == [(4, 2, second)]
    assert policies(2) == [(3, 1, first), (4, 2, second)]
    assert policies(9) == [(0, 0, None), (1, 0, None), (2, 1, first), (3, 1, first), (4, 2, second)]
    # With prompts that the last step left, also those that they were begun with: here one step ahead, after step 1.
    record(settings, 5, state="skipped", policy_version=2, carried=(left := CarriedOver(next=7, left={3: (0,)})))
    recovered = RunRecords(HostContext(settings)).recover_steps(RecoverRequest(run_id=RUN, num_policies=2))
    assert recovered.carried == left and [p.after_step for p in recovered.policies] == [1, 2, 3, 4, 5]


def test_a_run_knows_its_best_step_and_for_how_long_it_has_waited(settings: Settings) -> None:
    """As the workflow found it, step by step: skipped and repeated steps have no policy of their own to evaluate."""
    held_out = {"prompts": {"uri": "file:///held-out"}, "every_steps": 1, "keep": "best", "early_stop": {"patience": 2}}
    watched, evaluated = HeldOut.model_validate(held_out), Evaluated()
    states = ["done", "done", "done", "skipped", "done", "done", "done"]
    for number, (state, grade) in enumerate(zip(states, [9.0, 0.5, 0.75, 2.0, 0.75, 3.0, 0.25], strict=True)):
        policy = {"policy_version": number, "optimizer_step": number} | ({"same_as": 1} if number == 5 else {})
        step = record(settings, number, state=state, metrics={"eval_reward_mean": grade}, **policy)
        evaluated = evaluated.after(step, watched)
    assert evaluated.best is not None and evaluated.best.step == 2
    assert watched.is_over(evaluated.known), "steps 4 and 6 were no better than step 2"
    recovered = RunRecords(HostContext(settings)).recover_steps(RecoverRequest(run_id=RUN, watched=watched))
    assert recovered.evaluated == evaluated


def test_checkpoints_of_steps_that_were_never_done_are_discarded(
    settings: Settings, store: ObjectStore, tmp_path: Path
) -> None:
    """Half of a step that was cut short would else be the run's newest, and the next step would begin inside it."""
    kept = save_checkpoint(store, tmp_path, 4)
    save_checkpoint(store, tmp_path, 5)
    save_checkpoint(store, tmp_path, 7, epoch=2)
    record(settings, 1, state="done", policy_version=1, optimizer_step=4, checkpoint=kept, **adapter_of(1))
    RunRecords(HostContext(settings)).recover_steps(RecoverRequest(run_id=RUN))
    assert find_newest(store, RUN).checkpoint == kept
    assert not [info.key for info in store.list(f"{RunKeys(RUN).checkpoints}/") if "step-00000004" not in info.key]


def test_a_run_without_a_done_step_begins_anew(settings: Settings, store: ObjectStore, tmp_path: Path) -> None:
    save_checkpoint(store, tmp_path, 0)
    recovered = RunRecords(HostContext(settings)).recover_steps(RecoverRequest(run_id=RUN))
    assert (recovered.last_step, recovered.trained) == (0, None)
    assert find_newest(store, RUN).checkpoint is None


def test_what_the_job_before_left_is_not_this_jobs_own(store: ObjectStore, tmp_path: Path) -> None:
    before, after = save_checkpoint(store, tmp_path, 4), save_checkpoint(store, tmp_path, 5)
    data = PackedData(units=before.artifact, plan=before.artifact)
    first = JobPlan(
        run_id=RUN,
        job_id="000001",
        model=before.artifact,
        trainable=Lora(),
        data=data,
        num_steps=2,
        schedule=Schedule(learning_rate=1e-4),
    )
    later = first.model_copy(update={"first_step": 4, "initial_checkpoint": before.artifact})
    assert saved_by_job(first, before) == before
    assert (saved_by_job(later, before), saved_by_job(later, after), saved_by_job(later, None)) == (None, after, None)


def test_a_cancellation_cuts_no_record_in_two(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the step would stand without its key, and whoever sends the key again would have it trained twice."""
    environment, put_bytes = ActivityEnvironment(), LocalStore.put_bytes

    def put_while_cancelled(self: LocalStore, key: str, data: bytes) -> None:
        put_bytes(self, key, data)
        environment.cancel()
        time.sleep(0.1)  # an exception reaches a thread between two of its instructions

    monkeypatch.setattr(LocalStore, "put_bytes", put_while_cancelled)
    step = StepStatus(step=1, key="k", groups="g", state="done")
    environment.run(RunRecords(HostContext(settings)).record_step, StepRecordRequest(run_id=RUN, step=step))
    assert store.get_bytes(RunKeys(RUN).step_key("k")) == store.get_bytes(RunKeys(RUN).step(1))
