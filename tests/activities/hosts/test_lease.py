"""Leases: when worker processes live, whose they are, and that none is left behind."""

import os
import subprocess
import sys
import threading
import time
from collections import UserDict
from itertools import count
from pathlib import Path

import psutil
import pytest

import activities.hosts.lease
from activities.hosts import workers
from activities.hosts.workers import WorkerPool, end_leftover_workers, end_processes, launch, processes_of
from longshore.fields import Fence
from longshore.training import Layout, Lora
from shared.errors import HostLeft, LeaseLost, WorkerLost
from shared.jobs.job import WORKER_ID_VARIABLE, LeaseMark, WorkerKey, WorkerRecord
from shared.storage.files import write_atomically
from shared.storage.paths import HostPaths, RunKeys, WorkerPaths
from shared.storage.store import LocalStore
from tests.activities.lease_on_thread import HeldLease, Host
from tests.waiting import wait_until
from tests.workflows.stand_in import REPOSITORY, StandInCommand, artifact, job_plan


@pytest.fixture
def plan(tmp_path: Path):
    return job_plan(artifact(LocalStore(tmp_path / "store"), tmp_path / "any", "any", x_json="{}"))


def test_a_lease_starts_a_worker_marks_it_and_tells_the_run(tmp_path: Path, plan) -> None:
    with Host(tmp_path) as host:
        assert host.worker_ids() == []
        with HeldLease(host, plan, epoch=3) as lease:
            grant = lease.grant
            worker = host.paths.worker(grant.worker_id)
            assert (grant.fence.epoch, grant.host_queue) == (3, "host-queue")
            assert LeaseMark.model_validate_json(worker.lease("r1").read_bytes()).fence == grant.fence
            record = WorkerRecord.model_validate_json(worker.record.read_bytes())
            assert psutil.Process(record.pid).create_time() == record.started_at
            assert record.host_pid == os.getpid()
            assert host.store.head(RunKeys("r1").lease(3)) is not None
        assert lease.error is None


def test_a_released_worker_stays_warm_for_an_equal_key_and_ends_for_another(tmp_path: Path, plan) -> None:
    with Host(tmp_path) as host:
        with HeldLease(host, plan, epoch=1) as first:
            worker_id = first.grant.worker_id
        with HeldLease(host, plan.model_copy(update={"trainable": Lora(rank=4)}), epoch=2) as second:
            assert second.grant.worker_id == worker_id, "what is trained is no part of the key"
            assert LeaseMark.model_validate_json(host.paths.worker(worker_id).lease("r1").read_bytes()).fence.epoch == 2
        with HeldLease(host, plan.model_copy(update={"dtype": "bfloat16"}), epoch=3) as third:
            assert third.grant.worker_id != worker_id
            assert host.worker_ids() == [third.grant.worker_id]
            assert host.num_processes(worker_id) == 0


def test_idle_workers_of_other_keys_stay_as_long_as_their_memory_fits(tmp_path: Path, plan) -> None:
    """Beside the one in use, for as long as it takes; those that were used least recently have to go first."""
    plans = [plan.model_copy(update={"threads_per_rank": number}) for number in range(1, 5)]

    def lease(number: int) -> str:
        with HeldLease(host, plans[number], epoch=next(epochs)) as held:
            worker_id = held.grant.worker_id
            time.sleep(0.3)
            host.pool.end_idle()
            assert worker_id in host.worker_ids()
        return worker_id

    epochs = count(1)
    with Host(tmp_path, idle_s=0.2, warm_bytes=1 << 40) as host:
        first, second = lease(0), lease(1)
        assert lease(0) == first and lease(1) == second, "each is found again"
        one = host.pool._idle[first][1]
        assert 1 << 20 < one < 1 << 30
        host.pool._warm_bytes = int(2.5 * one)
        third = lease(2)
        assert set(host.worker_ids()) == {second, third} and host.num_processes(first) == 0
        with HeldLease(host, plans[3], epoch=next(epochs)) as held:
            fourth = held.grant.worker_id
            assert set(host.worker_ids()) == {second, third, fourth}
            host.pool._warm_bytes = 0
        assert host.worker_ids() == [fourth], "the last one stays, for a run that may come"
        time.sleep(0.3)
        host.pool.end_idle()
        assert host.worker_ids() == []


def test_a_worker_leaves_the_device_before_it_waits_in_the_pool(tmp_path: Path, plan) -> None:
    """The next lease's worker may take the device at once. One that does not leave is ended."""
    with Host(tmp_path, warm_bytes=1 << 40) as host:
        key = WorkerKey(model=plan.model, layout=plan.layout, dtype=plan.dtype)
        mark = LeaseMark(run_id="r1", fence=Fence(epoch=1))
        worker = host.pool.acquire(key, mark)
        worker.holds_device = True
        write_atomically(worker.paths.offloaded, b"1")  # of an earlier time
        released = threading.Thread(target=host.pool.release, args=(worker, mark))
        released.start()
        wait_until(lambda: not any(worker.paths.leases.glob("*.json")), "the lease's end")
        time.sleep(0.1)
        assert released.is_alive() and not host.pool._idle
        write_atomically(worker.paths.offloaded, str(5 << 30).encode())
        released.join(20)
        assert host.pool._idle[worker.worker_id] == (worker, 5 << 30)
        assert host.pool.acquire(key, mark) is worker
        worker.holds_device = True
        for process in processes_of(worker.worker_id):
            process.kill()
        host.pool.release(worker, mark)
        assert host.worker_ids() == []


def test_a_worker_that_cannot_be_asked_to_stop_is_ended_all_the_same(tmp_path: Path, plan) -> None:
    """As when the disk is full: nobody would know of it any more, and it would keep its device."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Host(tmp_path, idle_s=0, command=lambda folder, key: command) as host:
        mark = LeaseMark(run_id="r1", fence=Fence(epoch=1))
        worker = host.pool.acquire(WorkerKey(model=plan.model, layout=plan.layout, dtype=plan.dtype), mark)
        worker.paths.stop.mkdir()  # so that no file can take its name
        try:
            host.pool.release(worker, mark)
            assert host.worker_ids() == [] and host.num_processes(worker.worker_id) == 0
        finally:
            worker.end()


def test_a_worker_that_cannot_be_put_on_record_is_ended(tmp_path: Path, plan) -> None:
    """As when the disk is full when it has just been started: its error leaves nothing behind."""
    paths = HostPaths(tmp_path / "host")
    key = WorkerKey(model=plan.model, layout=plan.layout, dtype=plan.dtype)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    worker_ids: list[str] = []

    class Environment(UserDict[str, str]):
        """It is looked into right before the process is started."""

        def keys(self):
            for record in paths.workers.glob("*/worker.json"):
                worker_ids.append(record.parent.name)
                record.unlink()
                record.mkdir()
            return super().keys()

    with pytest.raises(IsADirectoryError):
        launch(paths, key, lambda folder, key: command, Environment())
    [worker_id] = worker_ids
    try:
        assert processes_of(worker_id) == [] and not paths.worker(worker_id).root.exists()
    finally:
        end_processes(worker_id)


def test_what_a_worker_compiles_outlives_it_and_its_temporary_files_do_not(
    tmp_path: Path, plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in processes that import it
    with Host(tmp_path) as host, HeldLease(host, plan, epoch=1) as lease:
        worker_id = lease.grant.worker_id
        places = processes_of(worker_id)[0].environ()
        assert Path(places["TMPDIR"]).is_relative_to(host.paths.worker(worker_id).root)
        assert Path(places["TORCHINDUCTOR_CACHE_DIR"]) == host.paths.compiled
        assert Path(places["TRITON_CACHE_DIR"]).is_relative_to(host.paths.compiled)
        assert not host.paths.compiled.is_relative_to(host.paths.workers)


def test_a_worker_that_dies_loses_its_lease(tmp_path: Path, plan) -> None:
    with Host(tmp_path) as host:
        lease = HeldLease(host, plan, epoch=1)
        for process in processes_of(lease.grant.worker_id):
            process.kill()
        error = lease.ended()
        assert type(error) is WorkerLost, "the worker's own end: its runs do not meet on the next one"
        assert "signal 9" in str(error)
        assert host.worker_ids() == []


def test_a_worker_that_was_stopped_loses_its_lease(tmp_path: Path, plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activities.hosts.lease, "_LOOK_EVERY_S", 0.2)
    with Host(tmp_path) as host:
        lease = HeldLease(host, plan, epoch=1)
        for process in processes_of(lease.grant.worker_id):
            process.suspend()
        error = lease.ended()
        assert isinstance(error, WorkerLost)
        assert "SIGSTOP" in str(error)
        assert host.worker_ids() == []


def test_a_warm_worker_that_was_stopped_serves_nobody_again(tmp_path: Path, plan) -> None:
    with Host(tmp_path) as host:
        with HeldLease(host, plan, epoch=1) as lease:
            worker_id = lease.grant.worker_id
        for process in processes_of(worker_id):
            process.suspend()
        with HeldLease(host, plan, epoch=2) as lease:
            assert lease.grant.worker_id != worker_id
            assert host.worker_ids() == [lease.grant.worker_id]
            assert host.num_processes(worker_id) == 0


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, plan) -> None:
    command = [sys.executable, "-c", "print('no torch here'); raise SystemExit(3)"]
    with Host(tmp_path, command=lambda folder, key: command) as host:
        error = HeldLease(host, plan, epoch=1).ended()
        assert isinstance(error, WorkerLost)
        assert "exit code 3" in str(error)
        assert "no torch here" in str(error)


def test_a_worker_that_is_never_ready_is_ended_with_its_whole_group(tmp_path: Path, plan) -> None:
    """Its child has a session of its own, and neither hears SIGTERM."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True); {deaf}"
    )
    with Host(tmp_path, command=lambda folder, key: [sys.executable, "-c", parent]) as host:
        lease = HeldLease(host, plan, epoch=1, ready_timeout_s=5.0)
        worker_id = wait_until(lambda: host.worker_ids(), "a worker")[0]
        wait_until(lambda: host.num_processes(worker_id) == 2, "parent and child")
        assert "no worker within 5 s" in str(lease.ended())
        assert host.num_processes(worker_id) == 0
        assert host.worker_ids() == []


def test_an_epoch_is_leased_once(tmp_path: Path, plan) -> None:
    with Host(tmp_path) as host:
        with HeldLease(host, plan, epoch=1) as lease:
            assert lease.grant
        error = HeldLease(host, plan, epoch=1).ended()
        assert isinstance(error, LeaseLost)
        assert "taken before" in str(error)


def test_a_leaving_host_gives_its_lease_up(tmp_path: Path, plan) -> None:
    with Host(tmp_path) as host:
        lease = HeldLease(host, plan, epoch=1)
        worker_id = lease.grant.worker_id
        lease.environment.worker_shutdown()
        error = lease.ended()
        assert isinstance(error, HostLeft)
        assert "shutting down" in str(error)
    assert host.num_processes(worker_id) == 0
    assert host.worker_ids() == []


def orphan(paths: WorkerPaths, host_pid: int, host_started_at: float, key, with_pid: bool) -> subprocess.Popen:
    """A worker process whose host is as given; without its pid, as when the host died right after starting it."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, WORKER_ID_VARIABLE: paths.root.name},
        start_new_session=True,
        cwd=REPOSITORY,
    )
    record = WorkerRecord(
        worker_id=paths.root.name,
        pid=process.pid if with_pid else 0,
        started_at=psutil.Process(process.pid).create_time() if with_pid else 0.0,
        host_pid=host_pid,
        host_started_at=host_started_at,
        key=key,
    )
    write_atomically(paths.record, record.model_dump_json().encode())
    return process


@pytest.mark.parametrize("with_pid", [True, False])
def test_a_new_host_ends_what_a_killed_one_left(tmp_path: Path, plan, with_pid: bool) -> None:
    key = WorkerKey(model=plan.model, layout=plan.layout, dtype=plan.dtype)
    paths = HostPaths(tmp_path / "host")
    me = psutil.Process()
    # The pid of a living process, with another start time: pids are used again.
    left = orphan(paths.worker("left"), me.pid, me.create_time() - 1000, key, with_pid)
    ours = orphan(paths.worker("ours"), me.pid, me.create_time(), key, with_pid)
    try:
        end_leftover_workers(paths)
        assert left.wait(300) != 0
        assert ours.poll() is None
        assert [folder.name for folder in paths.workers.iterdir()] == ["ours"]
    finally:
        ours.kill()
        ours.wait()


def test_a_new_host_starts_what_a_killed_one_had_leased(tmp_path: Path, plan) -> None:
    """It is on its way before the run that lost it asks again. What was never leased is not started."""
    key = WorkerKey(model=plan.model, layout=plan.layout, dtype=plan.dtype)
    paths = Host.paths_below(tmp_path)
    left = [orphan(paths.worker(name), 1, 0.0, key, with_pid=True) for name in ("leased", "starting")]
    write_atomically(paths.worker("leased").lease("r1"), b"{}")
    with Host(tmp_path) as host:
        assert [process.wait(300) != 0 for process in left] == [True, True]
        [worker_id] = host.worker_ids()
        assert worker_id not in ("leased", "starting")
        with HeldLease(host, plan, epoch=1) as lease:
            assert lease.grant.worker_id == worker_id


def test_a_new_host_starts_nothing_that_has_more_ranks_than_it_takes(tmp_path: Path, plan) -> None:
    key = WorkerKey(model=plan.model, layout=Layout(dp=2), dtype=plan.dtype)
    paths = Host.paths_below(tmp_path)
    left = orphan(paths.worker("leased"), 1, 0.0, key, with_pid=True)
    write_atomically(paths.worker("leased").lease("r1"), b"{}")
    pool = WorkerPool(paths, StandInCommand(), {"PYTHONPATH": str(REPOSITORY)}, 30.0, max_ranks=1)
    try:
        assert left.wait(300) != 0
        assert list(paths.workers.iterdir()) == []
    finally:
        pool.close()


def test_a_process_that_outlives_its_kill_is_named_instead_of_waited_for(
    tmp_path: Path, plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the kernel does not give back, of a device that has failed."""
    key = WorkerKey(model=plan.model, layout=plan.layout, dtype=plan.dtype)
    left = orphan(HostPaths(tmp_path / "host").worker("left"), 1, 0.0, key, with_pid=True)
    monkeypatch.setattr(workers, "_signal", lambda process, kill: None)
    monkeypatch.setattr(workers, "_KILL_PATIENCE_S", 0.5)
    try:
        with pytest.raises(OSError, match=rf"live on, though they were killed: {left.pid} \(sleeping\)"):
            workers.end_processes("left")
    finally:
        left.kill()
        left.wait()


def test_a_folder_that_another_host_is_just_making_is_left_alone(tmp_path: Path) -> None:
    paths = HostPaths(tmp_path / "host")
    made = paths.worker("made").root
    made.mkdir(parents=True)
    end_leftover_workers(paths)
    assert made.exists()
    os.utime(made, (time.time() - 60, time.time() - 60))
    end_leftover_workers(paths)
    assert not made.exists()
