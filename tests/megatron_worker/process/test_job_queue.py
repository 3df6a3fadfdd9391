"""Rank 0's side of the folder: whole jobs only, in order, fenced; whole lines of events; and signals that end it."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.events import Cancelled, Evaluated, Failed, Step, Succeeded
from longshore.fields import Fence
from megatron_worker.process.job_queue import EventLog, JobQueue
from shared.errors import InvalidInput
from shared.jobs.job import LeaseMark
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
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
