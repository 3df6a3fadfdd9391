"""Rank 0's side of the folder: whole jobs, in order, fenced; whole lines of events; signals. And how ranks talk."""

import errno
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from longshore.events import Cancelled, Evaluated, Failed, Step, Succeeded
from longshore.fields import Fence
from megatron_worker.process.job_queue import EventLog, JobQueue
from megatron_worker.process.ranks import (
    CancelledEarly,
    Check,
    Fault,
    JobFailed,
    WorkerRanks,
    everyone,
    fault_of,
    in_background,
)
from shared.errors import CorruptArtifact, DiskFull, InvalidInput, StoreUnavailable
from shared.jobs.job import LeaseMark
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, submit


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("workshop"), num_steps=1)


@pytest.fixture
def paths(tmp_path: Path) -> WorkerPaths:
    return WorkerPaths(tmp_path)


def test_jobs_are_claimed_by_rename_oldest_first(workshop: Workshop, paths: WorkerPaths):
    queue = JobQueue(paths)
    for job_id in ("000002", "000001", "000003"):
        submit(paths, workshop.plan(job_id=job_id))
    claims = [queue.claim() for _ in range(3)]
    assert [claim.job.plan.job_id for claim in claims] == ["000002", "000001", "000003"]
    assert queue.claim() is None
    assert not list(paths.jobs.iterdir())
    assert all(claim.path.parent == paths.claimed and claim.path.exists() for claim in claims)
    queue.archive(claims[0].path)
    assert [p.name for p in paths.archive.iterdir()] == ["run-1-000002-e000001-a01.json"]


def test_a_file_that_is_being_written_is_not_read(workshop: Workshop, paths: WorkerPaths):
    queue = JobQueue(paths)
    job = submit(paths, workshop.plan())
    whole = paths.job("run-1", "000001", job.fence)
    for half in (".half.tmp", ".000001-e000001-a01.json", "000001-e000001-a01.json.part"):
        (paths.jobs / half).write_bytes(whole.read_bytes()[:100])
    whole.unlink()
    assert queue.claim() is None
    assert len(list(paths.jobs.iterdir())) == 3


def test_a_file_that_is_no_job_is_set_aside_and_the_next_is_taken(
    workshop: Workshop, paths: WorkerPaths, capfd: pytest.CaptureFixture[str]
):
    queue = JobQueue(paths)
    (paths.jobs / "000000-broken.json").write_text('{"schema_version": 1')
    submit(paths, workshop.plan())
    assert queue.claim().job.plan.job_id == "000001"
    assert [p.name for p in paths.archive.iterdir()] == ["000000-broken.json.refused"]
    assert "000000-broken.json" in capfd.readouterr().err


def test_a_job_whose_log_already_holds_events_is_set_aside(workshop: Workshop, paths: WorkerPaths):
    queue, job = JobQueue(paths), submit(paths, workshop.plan())
    write_atomically(Path(job.log_path), b'{"seq": 1}\n')
    assert queue.claim() is None
    assert Path(job.log_path).read_bytes() == b'{"seq": 1}\n'


@pytest.mark.parametrize(
    ("lease", "reason"),
    [
        (None, None),
        (LeaseMark(run_id="run-1", fence=Fence(epoch=2, attempt=3)), None),
        (LeaseMark(run_id="run-1", fence=Fence(epoch=2, attempt=2)), None),
        (
            LeaseMark(run_id="run-1", fence=Fence(epoch=2, attempt=4)),
            "e000002-a03 is older than the lease's e000002-a04",
        ),
        (
            LeaseMark(run_id="run-1", fence=Fence(epoch=3, attempt=1)),
            "e000002-a03 is older than the lease's e000003-a01",
        ),
        (LeaseMark(run_id="run-2", fence=Fence(epoch=1)), "run run-1 has no lease of this worker"),
    ],
)
def test_the_lease_that_stands_decides(
    workshop: Workshop, paths: WorkerPaths, lease: LeaseMark | None, reason: str | None
):
    if lease is not None:
        write_atomically(paths.lease(lease.run_id), lease.model_dump_json().encode())
    queue = JobQueue(paths)
    submit(paths, workshop.plan(), fence=Fence(epoch=2, attempt=3))
    stale = queue.claim().stale
    assert (stale is None) == (reason is None)
    assert reason is None or reason in stale


def test_cancel_and_stop_are_files(workshop: Workshop, paths: WorkerPaths):
    queue, job = JobQueue(paths), submit(paths, workshop.plan())
    assert not queue.is_cancelled(job)
    assert not queue.should_leave()
    write_atomically(paths.cancel("run-1", "000001", Fence(epoch=1, attempt=2)), b"")
    assert not queue.is_cancelled(job), "another attempt's cancel"
    write_atomically(paths.cancel("run-1", "000001", job.fence), b"")
    write_atomically(paths.stop, b"")
    assert queue.is_cancelled(job)
    assert queue.should_leave()


def test_events_are_numbered_from_one_and_readable_at_once(tmp_path: Path):
    report = EventLog(tmp_path / "deep" / "log.jsonl")
    for step in (1, 2, 3):
        report.emit(Step, step=step, metrics={"loss": 1.0})
        assert [event.seq for event in read_log(tmp_path / "deep" / "log.jsonl")] == list(range(1, step + 1))


@pytest.mark.parametrize("terminal", [Succeeded, Cancelled, Failed])
def test_nothing_comes_after_the_terminal_event(tmp_path: Path, terminal: type):
    report = EventLog(tmp_path / "log.jsonl")
    fault = {"kind": "error", "message": "it broke"} if terminal is Failed else {}
    report.emit(terminal, step=3, device="released", **fault)
    report.emit(Step, step=4, metrics={})
    assert [type(event) for event in read_log(tmp_path / "log.jsonl")] == [terminal]


def test_a_log_of_another_attempt_is_refused(tmp_path: Path):
    EventLog(tmp_path / "log.jsonl").emit(Step, step=1, metrics={})
    with pytest.raises(InvalidInput, match="another attempt"):
        EventLog(tmp_path / "log.jsonl")


def test_a_report_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    EventLog(None).emit(Succeeded, step=1, device="released")
    assert not list(tmp_path.iterdir())


def test_a_metric_that_is_not_finite_stays_readable(tmp_path: Path):
    EventLog(tmp_path / "log.jsonl").emit(Evaluated, step=1, metrics={"loss": float("nan")})
    assert str(read_log(tmp_path / "log.jsonl")[0].metrics["loss"]) == "nan"


def test_a_line_that_does_not_fit_leaves_nothing_and_takes_no_number(tmp_path: Path):
    """The kernel's own limit on a file's size stands for a full disk: the write is cut short."""
    report = EventLog(tmp_path / "log.jsonl")
    report.emit(Step, step=1, metrics={"loss": 1.0})
    size = (tmp_path / "log.jsonl").stat().st_size
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            report.emit(Step, step=2, metrics={"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "log.jsonl").stat().st_size == size
    report.emit(Succeeded, step=1, device="released")
    assert [event.seq for event in read_log(tmp_path / "log.jsonl")] == [1, 2]


WAITS = """
import queue, signal, sys, threading, time
from megatron_worker.process.startup import on_signals

waiting = queue.SimpleQueue()
on_signals(lambda: waiting.put(None))
idle = threading.Thread(target=threading.Event().wait, daemon=True)
idle.start()
threading.Timer(0.2, lambda: signal.pthread_kill(idle.ident, signal.SIGTERM)).start()
waiting.get()
print("ended")
"""


def test_a_signal_that_another_thread_takes_ends_a_wait():
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended\n", "")


T = TypeVar("T")


def fail_on(control: WorkerRanks, ranks: tuple[int, ...]) -> str:
    def action() -> str:
        if control.rank in ranks:
            raise InvalidInput(f"rank {control.rank} cannot", "field")
        return f"done by {control.rank}"

    try:
        return control.agree(action)
    except JobFailed as failed:
        return f"{failed.fault.kind}: {failed.fault.message}"


def check_messages(control: WorkerRanks) -> None:
    for content in (b"", b"x", b"\0" * 100_000):
        assert control.broadcast(content if control.rank == 0 else None) == content
    assert control.total([1, control.rank]) == [2, 1]
    assert control.largest([5 - control.rank]) == [5]


def check_everyone(rank: int) -> None:
    """Values of any length, of JSON and never of pickle."""
    told = ["x" * (1 + 1000 * rank), None, rank / 3, float("inf")]
    assert everyone(told) == [["x", None, 0.0, float("inf")], ["x" * 1001, None, 1 / 3, float("inf")]]
    with suppress(TypeError):
        everyone(object())
        raise AssertionError("an object is pickled")


def check_agreement(control: WorkerRanks) -> None:
    assert fail_on(control, ()) == f"done by {control.rank}"
    assert fail_on(control, (1,)) == "invalid_input: field: rank 1 cannot"
    assert fail_on(control, (0, 1)) == "invalid_input: field: rank 0 cannot"
    assert fail_on(control, ()) == f"done by {control.rank}", "a fault is not remembered"
    failed = control.agree_on(RuntimeError("everywhere"))
    assert failed.fault.message == "RuntimeError: everywhere"
    control.barrier()


def check_a_fault_of_one_rank(control: WorkerRanks) -> None:
    """Rank 1 fails in a step, rank 0 does not: rank 1 finds out that it is alone, and raises its own error again."""
    if control.rank == 1:
        began = time.monotonic()
        try:
            control.agree_on(ValueError("here alone"), patience=timedelta(seconds=1))
        except ValueError as error:
            assert str(error) == "here alone"
            assert time.monotonic() - began > 0.9, "it waits for the other as long as it may"
            return
        raise AssertionError("a fault of one rank was taken for everybody's")
    time.sleep(1.5)


def drive(control: WorkerRanks, call: Callable[[Check], T], is_cancelled: bool = False) -> tuple[int, T]:
    """How often a call in the background yields, and what it returns. A cancel is known to rank 0."""
    passes, num_passes = in_background(call, control, lambda: control.total([control.rank == 0 and is_cancelled])[0]), 0
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return num_passes, end.value
        num_passes += 1


def check_calls_in_the_background(control: WorkerRanks) -> None:
    """One rank's call takes longer, or fails, or is not waited for any more: all of them come out alike."""

    def slow_on_rank_1(check: Check) -> int:
        time.sleep(0.5 * control.rank)
        return control.rank

    def broken_on_rank_1(check: Check) -> None:
        if control.rank == 1:
            raise InvalidInput("it cannot come", "units")

    def endless(check: Check) -> None:
        try:
            while True:
                check()
                time.sleep(0.01)
        finally:
            ended.set()

    num_passes, rank = drive(control, slow_on_rank_1)
    assert rank == control.rank and num_passes > 1 and control.total([num_passes]) == [2 * num_passes]
    try:
        drive(control, broken_on_rank_1)
    except JobFailed as failed:
        assert failed.fault.message == "units: it cannot come"
    else:
        raise AssertionError("a fault of one rank's call was not told to the other")
    ended = threading.Event()
    try:
        drive(control, endless, is_cancelled=True)
    except CancelledEarly:
        assert ended.wait(60)
    else:
        raise AssertionError("a cancel was not heard")


def check_everything() -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    control = WorkerRanks(dist.PrefixStore("control", store), rank, rank, dist.get_world_size())
    check_messages(control)
    check_everyone(control.rank)
    check_agreement(control)
    check_calls_in_the_background(control)
    check_a_fault_of_one_rank(control)


def test_two_ranks_hear_of_each_others_faults():
    on_ranks(2, check_everything)


def test_a_single_rank_needs_nobody():
    ranks = WorkerRanks(dist.HashStore(), rank=0, local_rank=0, world_size=1)
    assert ranks.broadcast(b"x") == b"x"
    assert ranks.total([3]) == ranks.largest([3]) == [3]
    assert ranks.agree(lambda: 7) == 7
    with pytest.raises(JobFailed, match="no such field"):
        ranks.agree(lambda: (_ for _ in ()).throw(InvalidInput("no such field")))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidInput("too long", "data:3"), "invalid_input", "data:3: too long"),
        (CorruptArtifact("torn", "a.bin"), "corrupt_artifact", "a.bin: torn"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "disk_full", "while writing /x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full", "no space is left"),
        (DiskFull("/cache: no space"), "disk_full", "/cache: no space"),
        (StoreUnavailable("s3://b: refused"), "error", "s3://b: refused"),
        (KeyError("x"), "error", "KeyError: 'x'"),
        (JobFailed(Fault(kind="not_finite", message="nan")), "not_finite", "nan"),
    ],
)
def test_errors_become_faults_that_a_user_can_read(error: Exception, kind: str, message: str):
    fault = fault_of(error)
    assert fault.kind == kind
    assert message in fault.message
    assert "Traceback" not in fault.message
