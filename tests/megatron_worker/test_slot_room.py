"""More slots than fit on a device: who waits, who is refused, and what is offloaded; every run ends in its own bits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from longshore.events import Cancelled, Failed, Started, Succeeded
from longshore.fields import Fence
from longshore.training import Lora
from megatron_worker.worker import Worker
from shared.jobs.commands import stored_form
from shared.jobs.job import Job
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.megatron_worker.session_jobs import do_all, session_plan, sft_commands
from tests.megatron_worker.test_protocol import Host
from tests.megatron_worker.test_run_of_jobs import two_jobs
from tests.megatron_worker.tiny_engine import TinyEngine
from tests.megatron_worker.tiny_jobs import (
    adapter_sha256,
    checkpoint,
    do,
    failure,
    has_ended,
    losses,
    new_worker,
    noted_in,
)
from tests.megatron_worker.workshop import Workshop, read_log, submit
from tests.waiting import wait_until

SLOT = 4 * 4 * (4 * (16 + 64))
"""Bytes of a slot of rank 4 of the tiny engine: weights, gradients and two moments in float32."""


def test_runs_that_do_not_fit_at_once_end_as_alone_and_one_that_never_fits_says_so(workshop: Workshop, tmp_path: Path):
    """A real worker, and a host that does with a crowded run what the workflow does: ask again when there is room."""
    host = Host(tmp_path / "worker", 1, LONGSHORE_SLOT_BYTES=f"{2 * SLOT + 8}", TINY_ENGINE_SECONDS_PER_BIN="0.05")
    try:
        plans = [workshop.plan(run_id=f"run-{number}", seed=number) for number in (1, 2, 3)]
        too_large = submit(host.paths, workshop.plan(run_id="large", trainable=Lora(rank=16)))
        jobs = [submit(host.paths, plan) for plan in plans]
        crowded: list[Job] = []
        while jobs:
            job = jobs.pop(0)
            host.wait_for_end(job)
            match read_log(job.log_path):
                case [*_, Failed(kind="crowded") as refused]:
                    assert f"takes {SLOT:,} bytes" in refused.message and "2 of its kind fit at once" in refused.message
                    crowded.append(job)
                    jobs.append(submit(host.paths, job.plan, Fence(epoch=job.fence.epoch + 1)))
                case [*_, Succeeded()]:
                    alone = do(workshop, f"alone-{job.plan.run_id}", job.plan)
                    assert adapter_sha256(job, 6) == adapter_sha256(alone, 6)
                    assert losses(job) == losses(alone)
                case events:
                    raise AssertionError(events[-1])
        assert crowded, "there was no room for three"
        refused = failure(too_large)
        assert refused.kind == "invalid_input"
        assert refused.message == (
            "trainable: a slot of rank 16 beside every linear takes "
            "20,480 bytes on a rank (weights 5,120, gradients 5,120, optimizer state 10,240), and there are 10,248 for "
            "slots: none of its kind fits"
        )
        assert "Traceback" not in host.paths.output.read_text()
    finally:
        host.close()


def on_device(engine: TinyEngine) -> set[str]:
    """The runs whose slots have memory on the device."""
    return {str(s) for s in engine._slots if any(t.untyped_storage().nbytes() for t in engine._tensors(s))}


def test_kept_slots_are_offloaded_then_dropped_and_their_runs_go_on_to_the_same_bits(workshop: Workshop):
    """Those that were used least recently, and none while there is room."""
    engines: list[TinyEngine] = []
    worker = new_worker(workshop.root, noted_in(engines), slot_bytes=2 * SLOT)
    cold_first, cold = two_jobs(workshop)

    def begin(run_id: str) -> Job:
        plan = cold_first.plan.model_copy(update={"run_id": run_id, "after": "keep"})
        job = do(workshop, f"first-{run_id}", plan, worker=worker)
        assert isinstance(read_log(job.log_path)[-1], Succeeded)
        return job

    def goes_on(first: Job) -> str:
        begins_with = checkpoint(first, 2)
        plan = cold.plan.model_copy(update={"run_id": first.plan.run_id, "initial_checkpoint": begins_with})
        return adapter_sha256(do(workshop, f"second-{plan.run_id}", plan, worker=worker), 6)

    first = {"a": begin("a")}
    first["b"] = begin("b")
    assert on_device(engines[0]) == {"a", "b"}
    engine = engines[0]
    during: list[set[str]] = []

    def noted_step(*args):
        during.append(on_device(engine))
        return TinyEngine.optim_step(engine, *args)

    engine.optim_step = noted_step
    passing = do(workshop, "passing", workshop.plan(run_id="passing"), worker=worker)
    assert isinstance(read_log(passing.log_path)[-1], Succeeded)
    assert set(map(frozenset, during)) == {frozenset({"b", "passing"})}, "a was used before b"
    assert set(engine._slots) == {"a", "b"}, "a is kept on the host"
    first["c"] = begin("c")
    assert set(engine._slots) == {"b", "c"}, "three would take more than there is for slots"
    expected = adapter_sha256(cold, 6)
    assert {run_id: goes_on(job) for run_id, job in first.items()} == dict.fromkeys("abc", expected)


@contextmanager
def serving(worker: Worker, paths: WorkerPaths) -> Iterator[None]:
    """A worker on a thread, until the block ends; all its jobs must have ended by then."""
    thread = threading.Thread(target=worker.serve, args=[paths], daemon=True)
    thread.start()
    yield
    write_atomically(paths.stop, b"")
    thread.join(300)
    assert not thread.is_alive()


wait_for = partial(wait_until, what="the worker has done it", every_s=0.005)


def has_begun(job: Job) -> bool:
    return Path(job.log_path).exists() and any(isinstance(e, Started) for e in read_log(job.log_path))


def test_an_idle_session_gives_its_room_to_a_newcomer_and_goes_on_elsewhere_in_the_same_bits(
    workshop: Workshop, tmp_path: Path
):
    engines: list[TinyEngine] = []
    paths, commands = WorkerPaths(tmp_path / "worker"), sft_commands(workshop)
    worker = new_worker(workshop.root, noted_in(engines), slot_bytes=SLOT)

    def give(job: Job, numbers: range) -> None:
        for number in numbers:
            path = Path(job.commands_dir or "") / f"{number:08d}.json"
            write_atomically(path, stored_form(commands[number - 1]))

    def cancel(job: Job) -> None:
        write_atomically(paths.cancel(job.plan.run_id, job.plan.job_id, job.fence), b"")
        wait_for(lambda: has_ended(job))
        assert isinstance(read_log(job.log_path)[-1], Cancelled)

    with serving(worker, paths):
        session = submit(paths, session_plan(workshop, offload_after_s=0.05))
        give(session, range(1, 4))
        wait_for(lambda: has_begun(session) and bool(engines) and not on_device(engines[0]))
        busy = submit(paths, session_plan(workshop, run_id="busy", offload_after_s=1000.0))
        wait_for(lambda: has_begun(busy))
        give(session, range(4, 5))
        wait_for(lambda: has_ended(session))
        assert failure(session).kind == "crowded"
        refused = submit(paths, session_plan(workshop, run_id="refused"))
        wait_for(lambda: has_ended(refused))
        assert failure(refused).kind == "crowded"
        assert failure(refused).message == (
            "a slot of rank 4 beside every linear takes 5,120 bytes "
            "on a rank (weights 1,280, gradients 1,280, optimizer state 2,560); of 5,120 for slots other runs have "
            "5,120: 1 of its kind fit at once"
        )
        assert not has_ended(busy), "who was there first goes on"
        large = submit(paths, session_plan(workshop, run_id="large", trainable=Lora(rank=5)))
        wait_for(lambda: has_ended(large))
        assert failure(large).kind == "invalid_input"
        assert failure(large).message.endswith("and there are 5,120 for slots: none of its kind fits")
        cancel(busy)
        again = submit(paths, session.plan, Fence(epoch=2))
        give(again, range(1, len(commands) + 1))
        wait_for(
            lambda: has_begun(again) and (Path(again.commands_dir or "") / f"{len(commands):08d}.result.json").exists()
        )
        cancel(again)
    alone = do_all(workshop, tmp_path / "alone", commands)
    assert adapter_sha256(again, len(commands)) == adapter_sha256(alone, len(commands))
