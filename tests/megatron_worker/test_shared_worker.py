"""One worker, several runs: in turn, with more slots than fit, beside slow inputs; each ends as it would alone."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from longshore.events import Cancelled, Event, Failed, Started, Succeeded
from longshore.fields import Fence
from longshore.training import Full, Lora
from megatron_worker.engine import LossFunction
from megatron_worker.worker import FairTurns, Worker
from shared.jobs.commands import stored_form
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, PackedData, Schedule
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.megatron_worker.session_jobs import do_all, session_plan, sft_commands
from tests.megatron_worker.slow_store import SlowStore, slow_store
from tests.megatron_worker.test_policy_jobs import ROLLOUT, TRAINER, rollouts
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
    serve,
)
from tests.megatron_worker.workshop import FIRST, Workshop, make_workshop, read_log, submit
from tests.waiting import wait_until


def plans(workshop: Workshop) -> list[JobPlan]:
    """Runs that differ in rank, seed, rate, evaluation and checkpoints."""
    evaluation = Evaluation(data=workshop.held_out, every_steps=2, num_samples=1, sample_tokens=3)
    return [
        workshop.plan(run_id="run-1"),
        workshop.plan(run_id="run-2", trainable=Lora(rank=2, alpha=4), seed=11, evaluation=evaluation),
        workshop.plan(run_id="run-3", trainable=Lora(rank=8, alpha=8), checkpointing=Checkpointing(every_steps=2)),
    ]


class Noted(TinyEngine):
    """Notes what was computed for whom, and when."""

    def __init__(self, *args, order: list[str]) -> None:
        super().__init__(*args)
        self.order = order

    def forward(self, *args, **kwargs):
        self.order.append(f"{'bin' if torch.is_grad_enabled() else 'score'} of {self._active}")
        return super().forward(*args, **kwargs)

    def optim_step(self, *args, **kwargs):
        self.order.append(f"update of {self._active}")
        return super().optim_step(*args, **kwargs)


def test_jobs_in_turn_end_in_the_bits_of_each_alone(workshop: Workshop):
    order: list[str] = []
    jobs = serve(workshop, plans(workshop), lambda plan, model: Noted(model, order=order))
    for job in jobs:
        alone = do(workshop, f"alone-{job.plan.run_id}", job.plan)
        assert losses(job) == losses(alone)
        assert checkpoint(job, 6).sha256 == checkpoint(alone, 6).sha256
    updates = [name for name in order if name.startswith("update")]
    assert len(updates) == 18 and sum(a != b for a, b in pairwise(updates)) >= 12, f"in turn: {updates}"


def test_others_have_their_turn_between_the_bins_of_a_step_an_evaluation_or_scoring(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    """However much a run trains on at once, evaluates, or scores before its first step: nobody waits for all of it."""
    monkeypatch.setattr("megatron_worker.dispatch.BINS_A_PASS", 1)
    data = rollouts(workshop.root)
    order: list[str] = []
    jobs = serve(
        workshop,
        [
            workshop.plan(run_id="evaluated", evaluation=Evaluation(data=workshop.held_out)),
            workshop.plan(run_id="scored", loss=TRAINER, data=data, num_steps=len(ROLLOUT)),
            workshop.plan(run_id="trained"),
        ],
        lambda plan, model: Noted(model, order=order),
    )
    # None: the reference is the base. A step of "trained" has three bins.
    for of in ("score of evaluated", "score of None", "score of scored", "bin of trained"):
        places = [place for place, name in enumerate(order) if name == of]
        assert len(places) >= 2
        between = [order[earlier + 1 : later] for earlier, later in pairwise(places)]
        mine = f"update of {of.split()[-1]}"
        assert any(names and mine not in names for names in between), f"{of}: {order}"
    for job in jobs:
        assert losses(job) == losses(do(workshop, f"alone-{job.plan.run_id}", job.plan))


def test_tenants_have_equal_shares_however_many_runs_they_have():
    turns, waiting, had = FairTurns(), [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")], Counter[str]()
    seconds = {"a1": 2.0, "a2": 1.0, "a3": 1.0, "b1": 0.5}
    order = []
    for _ in range(60):
        run_id = turns.next(waiting)
        order.append(run_id)
        tenant = dict(waiting)[run_id]
        turns.count(tenant, seconds[run_id])
        had[tenant] += seconds[run_id]
        waiting.append(waiting.pop(waiting.index((run_id, tenant))))
    assert abs(had["a"] - had["b"]) <= 2.0
    assert [run_id for run_id in order if run_id != "b1"][:6] == ["a1", "a2", "a3"] * 2
    of_b = [place for place, run_id in enumerate(order) if run_id == "b1"]
    assert max(later - earlier for earlier, later in pairwise(of_b)) <= 2, "b waits for one pass of a at most"
    waiting.append(("c1", "c"))
    passes = []
    for _ in range(12):
        passes.append(turns.next(waiting))
        turns.count(dict(waiting)[passes[-1]], 1.0)
    assert 3 <= passes.count("c1") <= 5, "a newcomer has its third from now on, and nothing for the time before"


@pytest.mark.parametrize("seed", range(20))
def test_a_single_command_waits_for_no_queue_of_another_tenant_s(seed: int) -> None:
    """Beside one that always has commands: for two passes where passes are alike, whatever both have done before.

    Else for as much time of the other's as twice the longest pass.
    """
    rng, turns, longest_s = random.Random(seed), FairTurns(), 0.0

    def do(*waiting: str) -> tuple[str, float]:
        """One pass of the tenants that wait, and the seconds that it took."""
        nonlocal longest_s
        tenant = turns.next([(each, each) for each in waiting])
        pass_s = 1.0 if seed % 2 == 0 else rng.uniform(0.1, 5.0)
        longest_s = max(longest_s, pass_s)
        turns.count(tenant, pass_s)
        return tenant, pass_s

    for _ in range(rng.randrange(1, 50)):  # what they did before
        do(*rng.choice([("many",), ("single",), ("many", "single")]))
    for _ in range(100):
        waited = []
        while (done := do("many", "single"))[0] == "many":
            waited.append(done[1])
        assert len(waited) <= 2 or seed % 2
        assert sum(waited) <= 2 * longest_s
        for _ in range(rng.randrange(5)):  # it sends nothing for a while
            do("many")


@pytest.mark.parametrize("weight", [0.5, 1.0, 3.0])
def test_a_tenant_has_time_by_its_weight(weight):
    turns, had = FairTurns(), Counter[str]()
    for _ in range(400):
        tenant = turns.next([("a1", "a"), ("a2", "a"), ("b1", "b")])[0]
        turns.count(tenant, 1.0, weight if tenant == "a" else 1.0)
        had[tenant] += 1
    assert had["a"] / had["b"] == pytest.approx(weight, rel=0.02)


def test_nobody_gains_by_going_away_and_nobody_loses():
    """As a tenant does whose jobs are short, or whose inputs take their time to come."""
    turns, had = FairTurns(), Counter[str]()
    for number in range(300):
        waiting = [("a", "a"), ("b", "b")] if number % 3 else [("a", "a")]
        tenant = turns.next(waiting)
        turns.count(tenant, 1.0 if tenant == "a" else 5.0)
        had[tenant] += 1 if tenant == "a" else 5
    assert abs(had["a"] - had["b"]) <= 6, had
    for _ in range(1000):
        turns.count(turns.next([("a", "a")]), 1.0)
    passes = [turns.next([("a", "a"), ("b", "b")])]
    for _ in range(9):
        turns.count(passes[-1], 1.0)
        passes.append(turns.next([("a", "a"), ("b", "b")]))
    assert 4 <= passes.count("b") <= 6, "nothing is made up for"


def test_a_job_that_ends_leaves_the_others_their_engine_and_takes_its_own_away(workshop: Workshop):
    short = workshop.plan(run_id="short", num_steps=1)
    engines: list[TinyEngine] = []
    first, *others = serve(workshop, [short, *plans(workshop)], noted_in(engines))
    assert [e.event for e in read_log(first.log_path)][-2:] == ["offloaded", "succeeded"]
    assert read_log(first.log_path)[-1].device == "released"
    assert all(isinstance(read_log(job.log_path)[-1], Succeeded) for job in others)
    assert len(engines) == 1
    assert engines[0].memory().device_bytes == 0
    assert not engines[0]._slots


def test_a_run_that_trains_all_weights_waits_until_it_is_alone(workshop: Workshop):
    first, full, last = serve(
        workshop, [workshop.plan(run_id="a"), workshop.plan(run_id="b", trainable=Full()), workshop.plan(run_id="c")]
    )
    ends = {job.plan.run_id: read_log(job.log_path)[-1].time for job in (first, full, last)}
    begins = {
        job.plan.run_id: next(e.time for e in read_log(job.log_path) if isinstance(e, Started)) for job in (full, last)
    }
    assert ends["a"] <= begins["b"] < ends["b"] <= begins["c"]
    alone = do(workshop, "alone", full.plan)
    assert losses(full) == losses(alone)
    assert adapter_sha256(last, 6) == adapter_sha256(do(workshop, "alone-c", last.plan), 6)


def test_a_fault_of_one_run_is_its_own(workshop: Workshop):
    wild = workshop.plan(run_id="wild", schedule=Schedule(kind="constant", learning_rate=1e36))
    broken, *others = serve(workshop, [wild, *plans(workshop)])
    failed = read_log(broken.log_path)[-1]
    assert isinstance(failed, Failed)
    assert failed.kind == "not_finite"
    for job in others:
        assert adapter_sha256(job, 6) == adapter_sha256(do(workshop, f"alone-{job.plan.run_id}", job.plan), 6)


def test_a_cancel_is_of_one_run(workshop: Workshop):
    paths = WorkerPaths(workshop.root / "shared")

    class Cancelling(TinyEngine):
        def forward_backward(self, batch, loss: LossFunction):
            if self._active == "run-2":
                write_atomically(paths.cancel("run-2", "000001", fence), b"")
            return super().forward_backward(batch, loss)

    fence = workshop.job("any", workshop.plan()).fence
    jobs = serve(workshop, plans(workshop), lambda plan, model: Cancelling(model))
    ended = [read_log(job.log_path)[-1] for job in jobs]
    assert [type(end) for end in ended] == [Succeeded, Cancelled, Succeeded]
    assert ended[1].step == 1


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


_PATIENCE_S = 300.0


@pytest.fixture
def slow_workshop(tmp_path: Path) -> Workshop:
    return make_workshop(tmp_path)


@pytest.fixture
def store(slow_workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    with slow_store(slow_workshop.root, "units", monkeypatch) as store:
        yield store


def slow_plan(slow_workshop: Workshop, store: SlowStore, **changes: object) -> JobPlan:
    data = PackedData(units=store.artifact(slow_workshop.data.units), plan=slow_workshop.data.plan)
    return slow_workshop.plan(**{"run_id": "slow", "data": data, **changes})


def log_of(slow_workshop: Workshop, run_id: str, job_id: str = "000001") -> list[Event]:
    path = WorkerPaths(slow_workshop.root / "shared").outputs(run_id, job_id, FIRST) / "log.jsonl"
    return read_log(path) if path.exists() else []


def is_over(slow_workshop: Workshop, run_id: str, job_id: str = "000001") -> bool:
    events = log_of(slow_workshop, run_id, job_id)
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


def cancel(slow_workshop: Workshop, run_id: str) -> None:
    write_atomically(WorkerPaths(slow_workshop.root / "shared").cancel(run_id, "000001", FIRST), b"")


def transfers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "staging"]


def in_cache(slow_workshop: Workshop) -> list[Path]:
    return list((slow_workshop.root / "cache" / "artifacts").glob("*"))


def assert_as_alone(slow_workshop: Workshop, job: Job) -> None:
    """The data's SHA-256 is that of the same files where they are at hand."""
    alone = do(slow_workshop, f"alone-{job.plan.run_id}", job.plan.model_copy(update={"data": slow_workshop.data}))
    assert losses(job) == losses(alone)
    assert checkpoint(job, 6).sha256 == checkpoint(alone, 6).sha256


def test_others_train_while_a_jobs_inputs_come(slow_workshop: Workshop, store: SlowStore):
    """The input comes when the other run, whose job came later, has ended."""
    when(lambda: is_over(slow_workshop, "quick"), store.let_go.set)
    slow, quick = serve(
        slow_workshop, [slow_plan(slow_workshop, store), slow_workshop.plan(run_id="quick")], s3=store.settings
    )
    ended = read_log(quick.log_path)[-1]
    began = next(event for event in read_log(slow.log_path) if isinstance(event, Started))
    assert isinstance(ended, Succeeded) and ended.time < began.time
    for job in (slow, quick):
        assert_as_alone(slow_workshop, job)


def test_a_cancel_does_not_wait_for_the_inputs(slow_workshop: Workshop, store: SlowStore):
    when(lambda: bool(store.asked), lambda: cancel(slow_workshop, "slow"))
    slow, quick = serve(
        slow_workshop, [slow_plan(slow_workshop, store), slow_workshop.plan(run_id="quick")], s3=store.settings
    )
    assert [type(event) for event in read_log(slow.log_path)] == [Cancelled]
    assert isinstance(read_log(quick.log_path)[-1], Succeeded)
    assert not store.let_go.is_set()
    store.let_go.set()  # the transfer looks up when it has a part
    deadline = time.monotonic() + _PATIENCE_S
    while transfers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not transfers() and in_cache(slow_workshop) == [], "what nobody wants any more is not kept"


def test_inputs_that_do_not_come_are_the_fault_of_their_job(slow_workshop: Workshop, store: SlowStore):
    store.refuses = True
    slow, quick = serve(
        slow_workshop, [slow_plan(slow_workshop, store), slow_workshop.plan(run_id="quick")], s3=store.settings
    )
    failed = read_log(slow.log_path)[-1]
    assert isinstance(failed, Failed) and failed.kind == "error" and "refuses our credentials" in failed.message
    assert isinstance(read_log(quick.log_path)[-1], Succeeded)


def test_what_two_jobs_want_comes_once_and_a_cancel_of_one_is_not_the_others(slow_workshop: Workshop, store: SlowStore):
    """Three want it: one fetches it and is cancelled, one fetches it, and one finds it. (Or the first has it whole,
    before it hears of the cancel, and the others find it.)"""
    when(lambda: bool(store.asked), lambda: cancel(slow_workshop, "first"))
    when(lambda: is_over(slow_workshop, "first"), store.let_go.set)
    jobs = [slow_plan(slow_workshop, store, run_id=run_id) for run_id in ("first", "second", "third")]
    first, *others = serve(slow_workshop, jobs, s3=store.settings)
    assert isinstance(read_log(first.log_path)[-1], Cancelled)
    for job in others:
        assert_as_alone(slow_workshop, job)
    num_files = sum(path.is_file() for path in (slow_workshop.root / "units").glob("*")) - 1  # the manifest
    assert num_files <= len(store.asked) <= 2 * num_files and set(store.asked[-num_files:]) == set(store.asked)


def test_a_worker_by_hand_fetches_what_is_not_in_the_cache(slow_workshop: Workshop, store: SlowStore):
    store.let_go.set()
    job = do(
        slow_workshop, "slow", slow_plan(slow_workshop, store), worker=new_worker(slow_workshop.root, s3=store.settings)
    )
    num_asked = len(store.asked)
    assert num_asked and in_cache(slow_workshop)
    assert_as_alone(slow_workshop, job)
    do(slow_workshop, "again", slow_plan(slow_workshop, store), worker=new_worker(slow_workshop.root, s3=None))
    assert len(store.asked) == num_asked, "in the cache it is found without a store or a host"


def test_a_worker_without_another_job_waits_idly(slow_workshop: Workshop, store: SlowStore):
    used: list[tuple[float, float]] = []

    def measure() -> None:
        time.sleep(0.5)
        began, before = time.monotonic(), time.process_time()
        time.sleep(2.0)
        used.append((time.process_time() - before, time.monotonic() - began))
        store.let_go.set()

    when(lambda: bool(store.asked), measure)
    serve(slow_workshop, [slow_plan(slow_workshop, store)], s3=store.settings)
    ((cpu_s, wall_s),) = used
    assert cpu_s < 0.5 * wall_s


def test_a_run_that_trains_all_weights_has_the_worker_from_its_inputs_on(slow_workshop: Workshop, store: SlowStore):
    when(lambda: bool(store.asked), lambda: time.sleep(0.5) or store.let_go.set())
    jobs = [slow_plan(slow_workshop, store, trainable=Full()), slow_workshop.plan(run_id="adapter")]
    full, adapter = serve(slow_workshop, jobs, s3=store.settings)
    began = next(event for event in read_log(adapter.log_path) if isinstance(event, Started))
    ended = read_log(full.log_path)[-1]
    assert isinstance(ended, Succeeded) and ended.time <= began.time


def test_what_was_kept_may_have_gone_when_the_inputs_have_come(
    slow_workshop: Workshop, store: SlowStore, monkeypatch: pytest.MonkeyPatch
):
    """Then the job reads the checkpoint after all, and ends in the same bits."""
    monkeypatch.setattr("megatron_worker.warm_engine._MAX_KEPT", 1)
    first = do(slow_workshop, "first", slow_workshop.plan(run_id="slow", num_steps=2))
    begins = {"job_id": "000002", "first_step": 2, "num_steps": 4, "initial_checkpoint": checkpoint(first, 2)}
    when(lambda: is_over(slow_workshop, "other"), store.let_go.set)
    jobs = [
        slow_workshop.plan(run_id="slow", num_steps=2, after="keep"),
        slow_workshop.plan(run_id="other", after="keep"),
        slow_plan(slow_workshop, store, **begins),
    ]
    kept, _, slow = serve(slow_workshop, jobs, s3=store.settings)
    assert checkpoint(kept, 2).sha256 == checkpoint(first, 2).sha256 and has_ended(slow)
    alone = do(slow_workshop, "second", slow_workshop.plan(run_id="slow", **begins))
    assert adapter_sha256(slow, 6) == adapter_sha256(alone, 6)
