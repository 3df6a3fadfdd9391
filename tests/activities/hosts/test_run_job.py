"""Jobs on a real worker process: what stands in the store, is left on the disk, and answered; the store may be away."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.host_context import HostContext
from activities.hosts.run_job import JobResult, ProgressReport
from activities.hosts.workers import processes_of
from activities.records import FindCheckpoint, FindCheckpointRequest, damage, find_newest, prune_checkpoints
from longshore.events import Cancelled, Probed, Succeeded
from longshore.fields import Fence
from longshore.losses import Reinforce
from shared.errors import CorruptArtifact, HostLeft, LeaseLost, StoreUnavailable, WorkerLost
from shared.jobs.job import Job, JobPlan
from shared.settings import Settings
from shared.storage.artifacts import find_artifact, read_manifest, stored_checkpoints
from shared.storage.files import go_on
from shared.storage.store import Check, LocalStore, open_store
from tests.activities.hosts.running_jobs import KEYS, Running, plan_for, steps, weights
from tests.activities.lease_on_thread import HeldLease, Host
from tests.conftest import S3Server
from tests.waiting import wait_until
from tests.workflows.stand_in import artifact, read_events
from tests.workflows.stand_in_worker import SEEDS, adapter_bytes


@pytest.fixture
def job_host(tmp_path: Path) -> Iterator[Host]:
    with Host(tmp_path) as job_host:
        yield job_host


def done(job_host: Host, plan: JobPlan, epoch: int = 1) -> JobResult:
    with HeldLease(job_host, plan, epoch=epoch) as lease:
        return Running(job_host, lease, plan).ended()


def test_a_job_ends_with_everything_in_the_store_and_nothing_on_the_disk(job_host: Host, tmp_path: Path) -> None:
    plan = plan_for(job_host, tmp_path)
    with HeldLease(job_host, plan, epoch=1) as lease:
        result = Running(job_host, lease, plan).ended()
        worker = job_host.paths.worker(lease.grant.worker_id)
        assert not list((worker.root / "outputs").rglob("*.*"))
        assert not list((worker.root / "scratch").glob("*"))
    assert (result.outcome, result.step, result.problem) == ("succeeded", 20, None)
    assert result.metrics["loss"] == pytest.approx(1 / 20)
    assert weights(job_host, result.checkpoint) == adapter_bytes(7, 20)
    events, _ = read_events(job_host.store, "r1")
    assert steps(events) == list(range(1, 21))
    assert isinstance(events[-1], Succeeded)
    assert job_host.store.head(KEYS.log("000001", Fence(epoch=1))) is not None
    assert not list(job_host.store.list(f"{KEYS.logs}/000001/e000001-a01/parts/")), "the whole log replaced its pieces"
    assert Job.model_validate_json(job_host.store.get_bytes(KEYS.job("000001", Fence(epoch=1)))).plan == plan


def test_the_newest_checkpoints_are_kept_whole_and_older_ones_go(job_host: Host, tmp_path: Path) -> None:
    plan = plan_for(job_host, tmp_path, num_steps=20, every_steps=2, keep=3)
    result = done(job_host, plan)
    left = stored_checkpoints(job_host.store, "r1")
    assert [checkpoint.step for checkpoint in left] == [16, 18, 20]
    for checkpoint in left:
        found = find_artifact(job_host.store, checkpoint.key)
        assert found is not None
        files = {
            f"{checkpoint.key}/{e.path}" for e in read_manifest(job_host.store, checkpoint.key, found.sha256).files
        }
        assert files < {info.key for info in job_host.store.list(checkpoint.key)}
    all_keys = [info.key for info in job_host.store.list(KEYS.checkpoints)]
    assert len(all_keys) == 3 * 4, "no file of an older checkpoint is left"
    assert result.checkpoint == find_newest(job_host.store, "r1").checkpoint


def test_what_an_older_lease_left_half_carried_goes(job_host: Host, tmp_path: Path) -> None:
    half = f"{KEYS.checkpoint(Fence(epoch=1), 3)}/state.json"
    running = f"{KEYS.checkpoint(Fence(epoch=3), 3)}/state.json"
    job_host.store.put_bytes(half, b"{}")
    job_host.store.put_bytes(running, b"{}")
    plan = plan_for(job_host, tmp_path)
    done(job_host, plan, epoch=2)
    assert job_host.store.head(half) is None
    assert job_host.store.head(running) is not None, "a newer lease's is not ours to judge"


def test_a_job_whose_results_go_to_s3(tmp_path: Path, s3_server: S3Server) -> None:
    with Host(tmp_path) as job_host:
        job_host.store = open_store(f"{s3_server.uri}/job-{tmp_path.name}", s3_server.settings)
        plan = plan_for(job_host, tmp_path, num_steps=12, every_steps=3, keep=2)
        result = done(job_host, plan)
        assert result.checkpoint == find_newest(job_host.store, "r1").checkpoint
        assert [checkpoint.step for checkpoint in stored_checkpoints(job_host.store, "r1")] == [9, 12]
        assert weights(job_host, result.checkpoint, s3_server.settings) == adapter_bytes(7, 12)
        events, _ = read_events(job_host.store, "r1")
        assert steps(events) == list(range(1, 13))


def test_a_half_pruned_or_half_carried_checkpoint_is_never_found(job_host: Host, tmp_path: Path) -> None:
    plan = plan_for(job_host, tmp_path, num_steps=10, every_steps=5)
    done(job_host, plan)
    job_host.store.delete(f"{stored_checkpoints(job_host.store, 'r1')[-1].key}/state.json")
    found = find_newest(job_host.store, "r1").checkpoint
    assert found is not None
    assert found.step == 5
    job_host.store.delete(f"{stored_checkpoints(job_host.store, 'r1')[0].key}/manifest.json")
    assert find_newest(job_host.store, "r1").checkpoint is None
    settings = Settings(root=tmp_path, store_uri=job_host.store.uri)
    point = FindCheckpoint(HostContext(settings)).find_checkpoint(FindCheckpointRequest(run_id="r1"))
    assert (point.checkpoint, point.last_epoch) == (None, 1)


def test_no_byte_of_a_manifest_can_be_flipped_without_an_older_checkpoint_or_a_final_word(
    job_host: Host, tmp_path: Path
) -> None:
    plan = plan_for(job_host, tmp_path, num_steps=10, every_steps=5)
    done(job_host, plan)
    older, newer = stored_checkpoints(job_host.store, "r1")
    key = f"{newer.key}/manifest.json"
    whole = job_host.store.get_bytes(key)
    find_checkpoint = FindCheckpoint(HostContext(Settings(root=tmp_path, store_uri=job_host.store.uri))).find_checkpoint
    passed_over = 0
    for at in range(len(whole)):
        job_host.store.put_bytes(key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        point = find_checkpoint(FindCheckpointRequest(run_id="r1"))
        assert point.checkpoint is not None
        if point.checkpoint.step == 5:
            passed_over += 1
            assert "the checkpoint of step 10 is damaged: " in point.damaged[0]
        else:  # a digit of a file's hash: whoever reads the file finds out
            assert damage(job_host.store, "r1", point.checkpoint)
            again = find_checkpoint(FindCheckpointRequest(run_id="r1", passed_over=(point.checkpoint.artifact.uri,)))
            assert (again.checkpoint and again.checkpoint.step, len(again.damaged)) == (5, 1)
    assert passed_over > 50
    job_host.store.put_bytes(f"{older.key}/manifest.json", b"{")
    job_host.store.put_bytes(key, whole[:-5])
    with pytest.raises(CorruptArtifact, match=r"no sound checkpoint is left.*step 10 is damaged.*step 5 is damaged"):
        find_checkpoint(FindCheckpointRequest(run_id="r1"))
    job_host.store.put_bytes(key, whole)
    found = find_checkpoint(FindCheckpointRequest(run_id="r1")).checkpoint
    assert found is not None
    assert damage(job_host.store, "r1", found) is None


def test_a_cancelled_job_leaves_a_checkpoint_and_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    with Host(tmp_path, step_s=0.1) as job_host:
        plan = plan_for(job_host, tmp_path, num_steps=50, every_steps=10)
        with HeldLease(job_host, plan, epoch=1) as lease:
            job = Running(job_host, lease, plan)
            wait_until(lambda: steps(read_events(job_host.store, "r1")[0])[-1:] > [2], "some steps")
            job.environment.cancel()
            result = job.ended()
            assert result.outcome == "cancelled"
            assert 2 < result.step < 50, "it ends at a step boundary, not at its end"
            assert result.checkpoint is not None
            assert result.checkpoint.step == result.step
            assert isinstance(read_events(job_host.store, "r1")[0][-1], Cancelled)
            assert lease.thread.is_alive(), "the worker is free, not dead"
        end = done(job_host, plan, epoch=2)
        assert weights(job_host, end.checkpoint) == adapter_bytes(7, 50)


def test_a_worker_that_does_not_hear_a_cancel_is_ended_after_the_grace(tmp_path: Path) -> None:
    with Host(tmp_path, step_s=0.05) as job_host:
        plan = plan_for(job_host, tmp_path, num_steps=1000, every_steps=2, seed=SEEDS["deaf"])
        lease = HeldLease(job_host, plan, epoch=1)
        job = Running(job_host, lease, plan, cancel_grace_s=0.5)
        wait_until(lambda: find_newest(job_host.store, "r1").checkpoint, "a checkpoint")
        job.environment.cancel()
        result = job.ended()
        assert result.outcome == "cancelled"
        assert result.checkpoint == find_newest(job_host.store, "r1").checkpoint
        assert isinstance(lease.ended(), WorkerLost)
        assert job_host.num_processes(lease.grant.worker_id) == 0
        assert job_host.worker_ids() == []


def test_what_a_dying_worker_saved_is_carried_and_its_last_words_are_told(job_host: Host, tmp_path: Path) -> None:
    plan = plan_for(job_host, tmp_path, num_steps=10, every_steps=1, seed=SEEDS["dies"])
    lease = HeldLease(job_host, plan, epoch=1)
    with pytest.raises(WorkerLost, match=r"signal 9(.|\n)*the stand-in dies of its seed"):
        Running(job_host, lease, plan).ended()
    assert steps(read_events(job_host.store, "r1")[0]) == [1]
    assert b"dies of its seed" in job_host.store.get_bytes(KEYS.output("000001", Fence(epoch=1)))
    assert isinstance(lease.ended(), WorkerLost)
    assert job_host.worker_ids() == []


def train_step(job_host: Host, tmp_path: Path, **changes: int) -> JobPlan:
    plan = plan_for(job_host, tmp_path, num_steps=3, every_steps=1, **changes)
    return plan.model_copy(update={"loss": Reinforce(), "probe": (5, 6, 7)})


def test_metrics_of_a_train_step_are_whole_whichever_attempts_did_it(job_host: Host, tmp_path: Path) -> None:
    """The worker dies after each step but the last; an attempt that finds all steps done tells of them all the same."""
    plan, results = train_step(job_host, tmp_path, seed=SEEDS["dies_saved"]), []
    for epoch in (1, 2, 3, 4):
        lease = HeldLease(job_host, plan, epoch=epoch)
        try:
            results.append(Running(job_host, lease, plan).ended())
            lease.release()
        except WorkerLost:
            lease.ended()
    assert steps(read_events(job_host.store, "r1")[0]) == [1, 2, 3]
    done, again = results
    assert done.metrics["loss"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert again.metrics == done.metrics
    told = {event.logprobs for event in read_events(job_host.store, "r1")[0] if isinstance(event, Probed)}
    assert told == {done.probe} == {again.probe} and len(done.probe) == 2


def test_a_checkpoint_that_stands_has_the_log_of_its_steps_before_it(tmp_path: Path) -> None:
    """At every moment, so that a host may die at any: who goes on from the checkpoint finds their metrics."""
    seen = set()
    with Host(tmp_path, step_s=0.03) as job_host:
        plan = plan_for(job_host, tmp_path, num_steps=30, every_steps=1)
        with HeldLease(job_host, plan, epoch=1) as lease:
            job = Running(job_host, lease, plan)
            while job.thread.is_alive():
                if (checkpoint := find_newest(job_host.store, "r1").checkpoint) is not None:
                    seen.add(checkpoint.step)
                    assert checkpoint.step in steps(read_events(job_host.store, "r1")[0])
            job.ended()
    assert len(seen) >= 2, "a reader that is starved sees few of them"


def test_a_job_of_an_older_fence_is_refused_by_the_host(job_host: Host, tmp_path: Path) -> None:
    plan = plan_for(job_host, tmp_path)
    with HeldLease(job_host, plan, epoch=1) as old:
        old_grant = old.grant
    with HeldLease(job_host, plan, epoch=2) as lease:
        assert lease.grant.worker_id == old_grant.worker_id
        with pytest.raises(LeaseLost, match="no longer serves"):
            Running(job_host, lease, plan, fence=old_grant.fence).ended()
    assert not list(job_host.store.list(KEYS.logs))


def test_progress_is_told_at_once_and_then_seldom(tmp_path: Path) -> None:
    with Host(tmp_path, step_s=0.01) as job_host:
        plan = plan_for(job_host, tmp_path, num_steps=300, every_steps=100)
        with HeldLease(job_host, plan, epoch=1) as lease:
            begun = time.monotonic()
            Running(job_host, lease, plan).ended()
            took_s = time.monotonic() - begun
            told = lease.notebook.of("progress")
    assert all(isinstance(report, ProgressReport) and report.fence.epoch == 1 for report in told)
    assert 2 <= len(told) <= 2 + took_s / 2, "the first, and one every two seconds of about four"
    assert told[0].step < 150
    assert [report.step for report in told] == sorted({report.step for report in told})


def save(job_host: Host, tmp_path: Path, *saved: tuple[int, int]) -> None:
    """Checkpoints of these steps and epochs."""
    for step, epoch in saved:
        key = KEYS.checkpoint(Fence(epoch=epoch), step)
        artifact(job_host.store, tmp_path / f"{epoch}-{step}", key, state_json="{}")


def left_of(job_host: Host, epoch: int, keep: int, **more: int) -> list[tuple[int, int]]:
    prune_checkpoints(job_host.store, "r1", keep, Fence(epoch=epoch), **more)
    return [(one.step, Fence.from_label(one.fence_label).epoch) for one in stored_checkpoints(job_host.store, "r1")]


def test_a_straggler_deletes_no_checkpoint_that_a_newer_lease_may_have_begun_from(
    job_host: Host, tmp_path: Path
) -> None:
    save(job_host, tmp_path, (5, 1), (10, 1), (15, 1))
    job_host.store.put_bytes(KEYS.lease(2), b"{}")
    assert left_of(job_host, 1, keep=1) == [(5, 1), (10, 1), (15, 1)]
    assert left_of(job_host, 2, keep=1) == [(15, 1)]


@pytest.mark.parametrize(("keep", "left"), [(1, [(12, 2)]), (2, [(10, 1), (12, 2)]), (3, [(5, 1), (10, 1), (12, 2)])])
def test_a_checkpoint_that_was_passed_over_takes_no_sound_ones_place(
    job_host: Host, tmp_path: Path, keep: int, left: list[tuple[int, int]]
) -> None:
    """Step 20 is damaged inside a file of the right size: the second lease went on from step 10."""
    save(job_host, tmp_path, (5, 1), (10, 1), (20, 1), (12, 2))
    assert left_of(job_host, 2, keep) == left


def test_states_that_a_client_asked_for_stay_the_newest_of_them(job_host: Host, tmp_path: Path) -> None:
    save(job_host, tmp_path, (3, 1), (5, 1), (7, 1), (5, 2), (9, 2), (11, 2))
    for step in (3, 5, 7):
        job_host.store.put_bytes(f"{KEYS.kept_states}{step:08d}", b"")
    assert left_of(job_host, 2, keep=1, keep_states=2) == [(5, 2), (7, 1), (11, 2)]
    assert left_of(job_host, 2, keep=1, keep_states=1) == [(7, 1), (11, 2)]


def test_a_broken_checkpoint_of_a_straggler_pushes_out_no_whole_one(job_host: Host, tmp_path: Path) -> None:
    save(job_host, tmp_path, (20, 1), (15, 2))
    job_host.store.delete(f"{KEYS.checkpoint(Fence(epoch=1), 20)}/state.json")
    assert left_of(job_host, 2, keep=1) == [(15, 2)]


def test_a_worker_that_is_stopped_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.hosts.run_job._SILENCE_S", 0.5)
    with Host(tmp_path, step_s=0.05) as job_host:
        plan = plan_for(job_host, tmp_path, num_steps=1000)
        lease = HeldLease(job_host, plan, epoch=1)
        job = Running(job_host, lease, plan)
        wait_until(lambda: find_newest(job_host.store, "r1").checkpoint, "a checkpoint")
        for process in processes_of(lease.grant.worker_id):
            process.suspend()
        with pytest.raises(WorkerLost, match="SIGSTOP"):
            job.ended()
        lease.ended()
        assert job_host.num_processes(lease.grant.worker_id) == 0
        assert job_host.worker_ids() == []


def test_a_worker_that_is_slow_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("activities.hosts.run_job._SILENCE_S", 0.05)
    with Host(tmp_path, step_s=0.5) as job_host:
        plan = plan_for(job_host, tmp_path, num_steps=2)
        assert done(job_host, plan).outcome == "succeeded"


def newest_step(host: Host) -> int:
    found = find_newest(host.store, "r1").checkpoint
    assert found is not None
    return found.step


def test_a_job_saves_a_checkpoint_before_its_host_leaves(tmp_path: Path) -> None:
    with Host(tmp_path, step_s=0.05) as host:
        plan = plan_for(host, tmp_path, num_steps=1000, every_steps=1000)
        with HeldLease(host, plan, epoch=1) as lease:
            job = Running(host, lease, plan, drain_grace_s=60.0)
            wait_until(lambda: 3 in steps(read_events(host.store, "r1")[0]), "some steps")
            job.environment.worker_shutdown()
            with pytest.raises(HostLeft, match="shutting down"):
                job.ended()
    assert newest_step(host) == max(steps(read_events(host.store, "r1")[0])), "no step is done twice"


def test_a_host_leaves_at_the_end_of_its_grace_without_a_job_that_does_not_hear(tmp_path: Path) -> None:
    with Host(tmp_path, step_s=0.05) as host:
        plan = plan_for(host, tmp_path, num_steps=1000, every_steps=2, seed=SEEDS["deaf"])
        with HeldLease(host, plan, epoch=1) as lease:
            job = Running(host, lease, plan, drain_grace_s=1.0)
            wait_until(lambda: find_newest(host.store, "r1").checkpoint, "a checkpoint")
            job.environment.worker_shutdown()
            with pytest.raises(HostLeft, match="shutting down"):
                job.ended()
            assert host.num_processes(lease.grant.worker_id) == 0
    assert newest_step(host) % 2 == 0, "from the last that it saved by itself"


def test_a_run_that_is_cancelled_while_its_host_leaves_is_cancelled(tmp_path: Path) -> None:
    with Host(tmp_path, step_s=0.05) as host:
        plan = plan_for(host, tmp_path, num_steps=1000, every_steps=1000)
        with HeldLease(host, plan, epoch=1) as lease:
            job = Running(host, lease, plan, drain_grace_s=60.0)
            wait_until(lambda: 2 in steps(read_events(host.store, "r1")[0]), "some steps")
            job.environment.cancel()
            job.environment.worker_shutdown()
            result = job.ended()
    assert result.outcome == "cancelled"
    assert result.checkpoint is not None and result.checkpoint.step == result.step


class Leaky(LocalStore):
    """A store that is away while it is told to be. `refused`: how often it was asked for each key meanwhile."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_away = False
        self.refused: Counter[str] = Counter()

    def put_bytes(self, key: str, data: bytes) -> None:
        self._answer(key)
        super().put_bytes(key, data)

    def put_file(self, key: str, path: Path, check: Check = go_on) -> None:
        self._answer(key)
        super().put_file(key, path, check)

    def _answer(self, key: str) -> None:
        if self.is_away:
            self.refused[key] += 1
            raise StoreUnavailable("the store is away")


@pytest.fixture
def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Leaky]]:
    monkeypatch.setattr("activities.hosts.run_job._UPLOAD_PAUSE_S", 0.05)
    with Host(tmp_path, step_s=0.02) as host:
        host.store = store = Leaky(tmp_path / "store")
        yield host, store


def test_a_store_that_comes_back_finds_the_job_further_on(leaky: tuple[Host, Leaky], tmp_path: Path) -> None:
    host, store = leaky
    plan = plan_for(host, tmp_path, num_steps=100, every_steps=2, keep=2)
    with HeldLease(host, plan, epoch=1) as lease:
        job = Running(host, lease, plan)
        wait_until(lambda: find_newest(store, "r1").checkpoint, "a checkpoint")
        store.is_away = True
        time.sleep(0.3)  # what had been answered lands
        outputs = host.paths.worker(lease.grant.worker_id).outputs("r1", "000001", Fence(epoch=1))
        before = wait_until(lambda: find_newest(store, "r1").checkpoint, "the last one before")
        time.sleep(1.0)
        assert find_newest(store, "r1").checkpoint == before
        store.is_away = False
        result = job.ended()
        assert (result.outcome, result.step) == ("succeeded", 100)
        assert not outputs.exists()
    assert weights(host, result.checkpoint) == adapter_bytes(7, 100)
    assert steps(read_events(store, "r1")[0]) == list(range(1, 101))


@pytest.mark.deep
def test_a_store_that_stays_away_ends_the_job_without_a_process_left(
    leaky: tuple[Host, Leaky], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.hosts.run_job._PATIENCE_S", 0.5)
    host, store = leaky
    plan = plan_for(host, tmp_path, num_steps=1000)
    lease = HeldLease(host, plan, epoch=1)
    assert lease.grant
    store.is_away = True
    with pytest.raises(StoreUnavailable, match="away"):
        Running(host, lease, plan).ended()
    first, *others = store.refused.values()
    assert first > 1 and set(others) <= {1}, "what waits does not lose patience one by one"
    lease.ended()
    assert host.worker_ids() == []
