"""One worker, several runs, and inputs that come slowly, or never: whose they are waits for them, and nobody else."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longshore.events import Cancelled, Event, Failed, Started, Succeeded
from longshore.training import Full
from shared.jobs.job import Job, JobPlan, PackedData
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.megatron_worker.slow_store import SlowStore, slow_store
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, has_ended, losses, new_worker, serve
from tests.megatron_worker.workshop import FIRST, Workshop, make_workshop, read_log

_PATIENCE_S = 300.0


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return make_workshop(tmp_path)


@pytest.fixture
def store(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    with slow_store(workshop.root, "units", monkeypatch) as store:
        yield store


def slow_plan(workshop: Workshop, store: SlowStore, **changes: object) -> JobPlan:
    data = PackedData(units=store.artifact(workshop.data.units), plan=workshop.data.plan)
    return workshop.plan(**{"run_id": "slow", "data": data, **changes})


def log_of(workshop: Workshop, run_id: str, job_id: str = "000001") -> list[Event]:
    path = WorkerPaths(workshop.root / "shared").outputs(run_id, job_id, FIRST) / "log.jsonl"
    return read_log(path) if path.exists() else []


def is_over(workshop: Workshop, run_id: str, job_id: str = "000001") -> bool:
    events = log_of(workshop, run_id, job_id)
    return bool(events) and isinstance(events[-1], Succeeded | Failed | Cancelled)


def when(condition: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Do something as soon as the condition holds, and after a while whether it does or not."""

    def wait() -> None:
        deadline = time.monotonic() + _PATIENCE_S / 3
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    return waiting


def cancel(workshop: Workshop, run_id: str) -> None:
    write_atomically(WorkerPaths(workshop.root / "shared").cancel(run_id, "000001", FIRST), b"")


def transfers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "staging"]


def in_cache(workshop: Workshop) -> list[Path]:
    return list((workshop.root / "cache" / "artifacts").glob("*"))


def assert_as_alone(workshop: Workshop, job: Job) -> None:
    """The data's SHA-256 is that of the same files where they are at hand."""
    alone = do(workshop, f"alone-{job.plan.run_id}", job.plan.model_copy(update={"data": workshop.data}))
    assert losses(job) == losses(alone)
    assert checkpoint(job, 6).sha256 == checkpoint(alone, 6).sha256


def test_others_train_while_a_jobs_inputs_come(workshop: Workshop, store: SlowStore):
    """The input comes when the other run, whose job came later, has ended."""
    when(lambda: is_over(workshop, "quick"), store.let_go.set)
    slow, quick = serve(workshop, [slow_plan(workshop, store), workshop.plan(run_id="quick")], s3=store.settings)
    ended = read_log(quick.log_path)[-1]
    began = next(event for event in read_log(slow.log_path) if isinstance(event, Started))
    assert isinstance(ended, Succeeded) and ended.time < began.time
    for job in (slow, quick):
        assert_as_alone(workshop, job)


def test_a_cancel_does_not_wait_for_the_inputs(workshop: Workshop, store: SlowStore):
    when(lambda: bool(store.asked), lambda: cancel(workshop, "slow"))
    slow, quick = serve(workshop, [slow_plan(workshop, store), workshop.plan(run_id="quick")], s3=store.settings)
    assert [type(event) for event in read_log(slow.log_path)] == [Cancelled]
    assert isinstance(read_log(quick.log_path)[-1], Succeeded)
    assert not store.let_go.is_set()
    store.let_go.set()  # the transfer looks up when it has a part
    deadline = time.monotonic() + _PATIENCE_S
    while transfers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not transfers() and in_cache(workshop) == [], "what nobody wants any more is not kept"


def test_inputs_that_do_not_come_are_the_fault_of_their_job(workshop: Workshop, store: SlowStore):
    store.refuses = True
    slow, quick = serve(workshop, [slow_plan(workshop, store), workshop.plan(run_id="quick")], s3=store.settings)
    failed = read_log(slow.log_path)[-1]
    assert isinstance(failed, Failed) and failed.kind == "error" and "refuses our credentials" in failed.message
    assert isinstance(read_log(quick.log_path)[-1], Succeeded)


def test_what_two_jobs_want_comes_once_and_a_cancel_of_one_is_not_the_others(workshop: Workshop, store: SlowStore):
    """Three want it: one fetches it and is cancelled, one fetches it, and one finds it. (Or the first has it whole,
    before it hears of the cancel, and the others find it.)"""
    when(lambda: bool(store.asked), lambda: cancel(workshop, "first"))
    when(lambda: is_over(workshop, "first"), store.let_go.set)
    jobs = [slow_plan(workshop, store, run_id=run_id) for run_id in ("first", "second", "third")]
    first, *others = serve(workshop, jobs, s3=store.settings)
    assert isinstance(read_log(first.log_path)[-1], Cancelled)
    for job in others:
        assert_as_alone(workshop, job)
    num_files = sum(path.is_file() for path in (workshop.root / "units").glob("*")) - 1  # the manifest
    assert num_files <= len(store.asked) <= 2 * num_files and set(store.asked[-num_files:]) == set(store.asked)


def test_a_worker_by_hand_fetches_what_is_not_in_the_cache(workshop: Workshop, store: SlowStore):
    store.let_go.set()
    job = do(workshop, "slow", slow_plan(workshop, store), worker=new_worker(workshop.root, s3=store.settings))
    num_asked = len(store.asked)
    assert num_asked and in_cache(workshop)
    assert_as_alone(workshop, job)
    do(workshop, "again", slow_plan(workshop, store), worker=new_worker(workshop.root, s3=None))
    assert len(store.asked) == num_asked, "in the cache it is found without a store or a host"


def test_a_worker_without_another_job_waits_idly(workshop: Workshop, store: SlowStore):
    used: list[tuple[float, float]] = []

    def measure() -> None:
        time.sleep(0.5)
        began, before = time.monotonic(), time.process_time()
        time.sleep(2.0)
        used.append((time.process_time() - before, time.monotonic() - began))
        store.let_go.set()

    when(lambda: bool(store.asked), measure)
    serve(workshop, [slow_plan(workshop, store)], s3=store.settings)
    ((cpu_s, wall_s),) = used
    assert cpu_s < 0.5 * wall_s


def test_a_run_that_trains_all_weights_has_the_worker_from_its_inputs_on(workshop: Workshop, store: SlowStore):
    when(lambda: bool(store.asked), lambda: time.sleep(0.5) or store.let_go.set())
    jobs = [slow_plan(workshop, store, trainable=Full()), workshop.plan(run_id="adapter")]
    full, adapter = serve(workshop, jobs, s3=store.settings)
    began = next(event for event in read_log(adapter.log_path) if isinstance(event, Started))
    ended = read_log(full.log_path)[-1]
    assert isinstance(ended, Succeeded) and ended.time <= began.time


def test_what_was_kept_may_have_gone_when_the_inputs_have_come(
    workshop: Workshop, store: SlowStore, monkeypatch: pytest.MonkeyPatch
):
    """Then the job reads the checkpoint after all, and ends in the same bits."""
    monkeypatch.setattr("megatron_worker.warm_engine._MAX_KEPT", 1)
    first = do(workshop, "first", workshop.plan(run_id="slow", num_steps=2))
    begins = {"job_id": "000002", "first_step": 2, "num_steps": 4, "initial_checkpoint": checkpoint(first, 2)}
    when(lambda: is_over(workshop, "other"), store.let_go.set)
    jobs = [
        workshop.plan(run_id="slow", num_steps=2, after="keep"),
        workshop.plan(run_id="other", after="keep"),
        slow_plan(workshop, store, **begins),
    ]
    kept, _, slow = serve(workshop, jobs, s3=store.settings)
    assert checkpoint(kept, 2).sha256 == checkpoint(first, 2).sha256 and has_ended(slow)
    alone = do(workshop, "second", workshop.plan(run_id="slow", **begins))
    assert adapter_sha256(slow, 6) == adapter_sha256(alone, 6)
