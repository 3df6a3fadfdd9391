"""Jobs on a real worker process whose host is told to leave, with time to save."""

from pathlib import Path

import pytest

from activities.records import find_newest
from shared.errors import HostLeft
from tests.activities.hosts.running_jobs import Running, plan_for, steps
from tests.activities.lease_on_thread import HeldLease, Host
from tests.waiting import wait_until
from tests.workflows.stand_in import read_events
from tests.workflows.stand_in_worker import SEEDS


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
