"""Rank 0's side of the folder: whole files only, in order, fenced."""

from pathlib import Path

import pytest

from megatron_worker.process.job_queue import JobQueue
from shared.jobs.job import LeaseMark
from shared.storage.files import write_atomically
from shared.storage.paths import Fence, WorkerPaths
from tests.megatron_worker.workshop import Workshop, make_workshop, submit


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
