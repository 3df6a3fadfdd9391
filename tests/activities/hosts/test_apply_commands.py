"""A session's commands on a host whose worker goes on without the session."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.hosts.session import ApplyCommands, ApplyRequest
from shared.errors import WorkerLost
from shared.jobs.commands import OptimStep
from shared.jobs.job import Job
from shared.storage.paths import write_atomically
from tests.activities.hosts.running_jobs import KEYS, plan_for
from tests.activities.lease_on_thread import HeldLease, Host
from tests.workflows.stand_in import wait_until


def test_a_command_that_was_given_to_a_job_that_has_ended_is_waited_for_no_longer(tmp_path: Path) -> None:
    """The worker does no command of it any more, and serves on: others may share it."""
    environment = ActivityEnvironment()
    with (
        Host(tmp_path) as host,
        HeldLease(host, plan := plan_for(host, tmp_path, num_steps=100), epoch=1) as lease,
        ThreadPoolExecutor(1) as thread,
    ):
        fence, worker_id = lease.grant.fence, lease.grant.worker_id
        paths = host.paths.worker(worker_id)
        outputs = paths.outputs(plan.run_id, plan.job_id, fence)
        folders = {"log_path": "log.jsonl", "checkpoint_dir": "checkpoints", "scratch_dir": "scratch"}
        job = Job(plan=plan, fence=fence, **{name: str(outputs / path) for name, path in folders.items()})
        write_atomically(paths.job(plan.run_id, plan.job_id, fence), job.model_dump_json().encode())
        host.store.put_bytes(KEYS.command(1), OptimStep(learning_rate=0.1).model_dump_json().encode())
        request = ApplyRequest(
            run_id=plan.run_id, job_id=plan.job_id, fence=fence, worker_id=worker_id, next=1, most=10, idle_s=0.1
        )
        applying = thread.submit(environment.run, ApplyCommands(host.pool, host.store).apply_commands, request)
        try:
            wait_until(lambda: (outputs / "commands" / "00000001.json").exists(), "the command's file")
            with pytest.raises(WorkerLost, match="the session's job has ended"):
                applying.result(60)
            assert host.num_processes(worker_id)
        finally:
            environment.cancel()
