"""Preference jobs through the runner on a small real engine: the paper's loss, step by step, on held-out pairs too."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.tokenizing.units import PAIR_COLUMNS, pair_unit
from longshore.events import Evaluated
from longshore.losses import DPO, PPO, CrossEntropy
from longshore.training import Full
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.evaluation import held_out_loss
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, Schedule
from shared.jobs.packed import UnitsWriter
from tests.megatron_worker.test_policy_jobs import PlainLoop, metrics_of
from tests.megatron_worker.tiny_engine import VOCAB_SIZE
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, losses
from tests.megatron_worker.workshop import Workshop, make_workshop, packed, read_log

# Two epochs of three steps over eight pairs, two bins each.
STEPS = [[[0, 1], [2]], [[3], [4, 5]], [[6], [7]], [[5, 0], [3]], [[1, 2], [7]], [[4], [6]]]
BETA = 0.5


def write_pairs(folder: Path, num_pairs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    writer = UnitsWriter(folder, PAIR_COLUMNS)
    for _ in range(num_pairs):
        prompt, *answers = (random.integers(0, VOCAB_SIZE, random.integers(2, 6)) for _ in range(3))
        rows = [np.concatenate([prompt, answer]) for answer in answers]
        masks = [np.arange(len(ids)) >= len(prompt) for ids in rows]
        unit = pair_unit(rows[0], masks[0], rows[1], masks[1]).columns()
        writer.append(**{name: unit[name] for name in PAIR_COLUMNS})
    writer.close()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    made = make_workshop(tmp_path)
    write_pairs(tmp_path / "rollouts", 8, seed=4)  # named so for PlainLoop
    write_pairs(tmp_path / "held-out-pairs", 5, seed=5)
    data = packed(tmp_path, "rollouts", "rollouts-plan", STEPS)
    held_out = packed(tmp_path, "held-out-pairs", "held-out-pairs-plan", [[[0, 1], [2], [3, 4]]])
    return replace(made, data=data, held_out=held_out, num_steps=len(STEPS))


def a_plan(workshop: Workshop, **changes: object) -> JobPlan:
    fields: dict[str, object] = {
        "loss": DPO(beta=BETA),
        "schedule": Schedule(kind="constant", learning_rate=0.05),
        "checkpointing": Checkpointing(every_steps=1),
        "evaluation": Evaluation(data=workshop.held_out, every_steps=2),
    }
    return workshop.plan(**(fields | changes))


def held_out_metrics(job: Job) -> dict[int, dict[str, float]]:
    return {e.step: e.metrics for e in read_log(job.log_path) if isinstance(e, Evaluated)}


def test_each_named_evaluation_is_scored_by_the_reference(workshop: Workshop):
    alone = held_out_metrics(do(workshop, "alone", a_plan(workshop)))
    sets = Evaluation(sets={"first": workshop.held_out, "second": workshop.held_out}, every_steps=2)
    named = held_out_metrics(do(workshop, "named", a_plan(workshop, evaluation=sets)))
    assert alone[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and set(named) == {0, 2, 4, 6}
    for step, metrics in named.items():
        for name in ("first", "second"):
            assert {metric: metrics[f"{name}_{metric}"] for metric in alone[step]} == alone[step]


class PaperLoop(PlainLoop):
    """Equation 7 a pair at a time in float64, torch's AdamW: what the job must come to."""

    def margins(self, units: list[int]) -> list[torch.Tensor]:
        return [BETA * (sign * ratio).sum() for ratio, sign in (self.ratios([unit]) for unit in units)]

    def steps(self) -> Iterator[tuple[float, float, float]]:
        """Loss, gradient norm and margin of each step."""

        def loss_of(units: list[int]) -> tuple[torch.Tensor, float]:
            margin = torch.stack(self.margins(units))
            return -torch.nn.functional.logsigmoid(margin).mean(), margin.mean().item()

        return self.descend(STEPS, loss_of)


def test_every_step_is_the_papers(workshop: Workshop):
    metrics = metrics_of(do(workshop, "a", a_plan(workshop)))
    expected = list(PaperLoop(workshop).steps())
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert [(m["loss"], m["grad_norm"]) for m in metrics] == [pytest.approx(e[:2], rel=2e-4) for e in expected]
    assert metrics[-1]["reward_margin"] > 0.1


def test_held_out_pairs_are_scored_by_the_same_loss_against_the_same_reference(workshop: Workshop):
    job = do(workshop, "a", a_plan(workshop))
    found = held_out_metrics(job)
    assert sorted(found) == [0, 2, 4, 6]
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and found[0]["reward_margin"] == 0
    loop = PaperLoop(workshop)
    for _ in loop.steps():
        pass
    loop.data = PackedBatches.open(workshop.root / "held-out-pairs", workshop.root / "held-out-pairs-plan")
    with torch.no_grad():
        margins = torch.stack(loop.margins([0, 1, 2, 3, 4]))
    last = found[6]
    assert last["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), rel=1e-3)
    assert last["reward_margin"] == pytest.approx(margins.mean().item(), rel=2e-3, abs=1e-4)
    assert last["preference_accuracy"] == pytest.approx((margins > 0).double().mean().item())
    assert last["reward_chosen"] - last["reward_rejected"] == pytest.approx(last["reward_margin"], abs=1e-6)
    assert "perplexity" not in last


@pytest.mark.parametrize("trainable", [None, Full()], ids=["lora", "full"])
def test_a_job_that_is_gone_on_with_ends_in_the_same_bits(workshop: Workshop, trainable: Full | None):
    """The reference is scored by what stood before the first step, though the job goes on behind the third."""
    plan = a_plan(workshop, **({"trainable": trainable} if trainable else {}))
    whole = do(workshop, "whole", plan)
    resumed = do(workshop, "resumed", plan, start=checkpoint(whole, 3))
    assert losses(resumed) == losses(whole)[3:]
    assert [held_out_metrics(resumed)[step] for step in (4, 6)] == [held_out_metrics(whole)[step] for step in (4, 6)]
    if trainable is None:
        assert adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)


def test_held_out_rows_that_are_no_pairs_are_refused_before_any_step(workshop: Workshop):
    plain = make_workshop(workshop.root / "other").held_out
    failed = failure(do(workshop, "a", a_plan(workshop, evaluation=Evaluation(data=plain))))
    assert (failed.kind, failed.step) == ("invalid_input", 0)
    assert "no column advantage; dpo tells the chosen from the rejected by it" in failed.message


def test_only_pairs_are_evaluated_by_what_is_trained_for():
    assert held_out_loss(DPO(beta=0.3)) == DPO(beta=0.3)
    assert held_out_loss(PPO()) == held_out_loss(CrossEntropy()) == CrossEntropy()
