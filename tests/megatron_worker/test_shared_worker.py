"""One worker, several runs: jobs of adapters are done in turn, and each ends as it would alone."""

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from longshore.events import Cancelled, Failed, Started, Succeeded
from longshore.training import Full, Lora
from megatron_worker.engine import LossFunction
from megatron_worker.worker import FairTurns
from shared.jobs.job import Checkpointing, Evaluation, JobPlan, Schedule
from shared.storage.files import write_atomically
from shared.storage.paths import WorkerPaths
from tests.megatron_worker.test_policy_jobs import ROLLOUT, TRAINER, rollouts
from tests.megatron_worker.tiny_engine import TinyEngine
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, losses, noted_in, serve
from tests.megatron_worker.workshop import Workshop, read_log


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
