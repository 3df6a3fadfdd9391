"""A session's commands on a host: what a worker is given after others, and one that goes on without the session."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.hosts.session import AppliedCommands, ApplyCommands, ApplyRequest, ServedSessions
from longshore.commands import (
    Asked,
    CommandProblem,
    CommandResult,
    Datum,
    Forward,
    ForwardBackward,
    OptimStep,
    SaveState,
)
from shared.errors import WorkerLost
from shared.jobs.commands import Skip, stored_form
from shared.jobs.job import Job
from shared.storage.files import write_atomically
from shared.storage.host_states import HostAddress
from tests.activities.hosts.running_jobs import KEYS, plan_for
from tests.activities.lease_on_thread import HeldLease, Host
from tests.waiting import wait_until


@dataclass
class Applying:
    """`apply_commands` in a thread. `given`: the folder of the commands that the worker has been given."""

    given: Path
    future: "Future[AppliedCommands]"


@contextmanager
def applying(host: Host, tmp_path: Path, num_steps: int, next_command: int) -> Iterator[Applying]:
    """The commands in the store for a session whose worker does none of them, and ends its job after some steps."""
    plan, environment = plan_for(host, tmp_path, num_steps=num_steps), ActivityEnvironment()
    with HeldLease(host, plan, epoch=1) as lease, ThreadPoolExecutor(1) as thread:
        fence, worker_id = lease.grant.fence, lease.grant.worker_id
        paths = host.paths.worker(worker_id)
        outputs = paths.outputs(plan.run_id, plan.job_id, fence)
        folders = {"log_path": "log.jsonl", "checkpoint_dir": "checkpoints", "scratch_dir": "scratch"}
        job = Job(plan=plan, fence=fence, **{name: str(outputs / path) for name, path in folders.items()})
        write_atomically(paths.job(plan.run_id, plan.job_id, fence), job.model_dump_json().encode())
        request = ApplyRequest(
            run_id=plan.run_id,
            job_id=plan.job_id,
            fence=fence,
            worker_id=worker_id,
            next=next_command,
            most=10,
            idle_s=0.1,
        )
        commands = ApplyCommands(host.pool, host.store, ServedSessions(), HostAddress(socket="/nowhere"))
        future = thread.submit(environment.run, commands.apply_commands, request)
        try:
            yield Applying(outputs / "commands", future)
            assert host.num_processes(worker_id), "the worker serves on"
        finally:
            environment.cancel()


def test_a_command_that_was_given_to_a_job_that_has_ended_is_waited_for_no_longer(tmp_path: Path) -> None:
    """The worker does no command of it any more, and serves on: others may share it."""
    with Host(tmp_path) as host:
        host.store.put_bytes(KEYS.command(1), stored_form(OptimStep(learning_rate=0.1)))
        with applying(host, tmp_path, num_steps=100, next_command=1) as session:
            wait_until(lambda: (session.given / "00000001.json").exists(), "the command's file")
            with pytest.raises(WorkerLost, match="the session's job has ended"):
                session.future.result(60)


def test_a_new_worker_repeats_what_changed_the_state_and_of_errors_their_effect(tmp_path: Path) -> None:
    data = (Datum(tokens=(5, 6, 7)),)
    gradients, step = ForwardBackward(data=data), OptimStep(learning_rate=0.1)
    done: list[tuple[Asked, str | None]] = [
        (Forward(data=data), None),
        (gradients, None),
        (gradients, "error"),
        (gradients, "not_finite"),
        (gradients, "invalid_input"),
        (SaveState(), "error"),
        (step, None),
    ]
    expected = [Skip(), gradients, Skip(drops=True), gradients, gradients, Skip(), step]
    with Host(tmp_path) as host:
        for number, (asked, kind) in enumerate(done, start=1):
            problem = None if kind is None else CommandProblem.model_validate({"kind": kind, "message": "no memory"})
            result = CommandResult(number=number, kind=asked.kind, problem=problem)
            host.store.put_bytes(KEYS.command(number), stored_form(asked))
            host.store.put_bytes(KEYS.command_result(number), result.model_dump_json().encode())
        with applying(host, tmp_path, num_steps=100, next_command=len(done) + 1) as session:
            wait_until(lambda: (session.given / f"{len(done):08d}.json").exists(), "the last command's file")
            given = [(session.given / f"{number:08d}.json").read_bytes() for number in range(1, len(done) + 1)]
    assert given == [stored_form(each) for each in expected], "to the byte"
