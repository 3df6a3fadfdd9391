"""KTO through the runner on a small real engine: the paper's loss step by step, its baseline over the whole step."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.tokenizing.units import PAIR_COLUMNS, LabelledAnswers, TokenBlock
from longshore.losses import DPO, KTO
from megatron_worker.training.batches import PackedBatches
from shared.jobs.job import Evaluation, JobPlan
from shared.jobs.packed import UnitsWriter
from tests.megatron_worker.test_policy_jobs import PlainLoop, metrics_of
from tests.megatron_worker.test_preference_jobs import STEPS, held_out_metrics, write_pairs
from tests.megatron_worker.test_preference_jobs import a_plan as plan_of_pairs
from tests.megatron_worker.tiny_engine import VOCAB_SIZE, TinyEngine
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, losses, new_worker
from tests.megatron_worker.workshop import Workshop, make_workshop, packed

LOSS = KTO(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7)
# The same steps in other bins.
REPACKED = [[[unit] for units in bins for unit in units] for bins in STEPS]


def write_answers(folder: Path, num_answers: int, seed: int) -> None:
    """Answers, good and bad, as the tokenizer leaves them."""
    random, writer = np.random.default_rng(seed), UnitsWriter(folder, PAIR_COLUMNS)
    answers = LabelledAnswers(1000, are_pairs=False)
    rows = [[random.integers(0, VOCAB_SIZE, random.integers(2, 6)) for _ in range(2)] for _ in range(num_answers)]
    signs = [np.repeat([0.0, (-1.0) ** number], [len(prompt), len(ids)]) for number, (prompt, ids) in enumerate(rows)]
    ids = np.concatenate(list(itertools.chain.from_iterable(rows)))
    lengths = np.array([len(prompt) + len(own) for prompt, own in rows])
    block = TokenBlock([f"r:{n}" for n in range(num_answers)], ids, ids, np.concatenate(signs), lengths)
    for kept in (answers.keep(block), answers.rest()):
        kept.write(writer)
    writer.close()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    made = make_workshop(tmp_path)
    write_answers(tmp_path / "rollouts", 8, seed=4)  # named so for PlainLoop
    write_answers(tmp_path / "held-out-answers", 5, seed=5)
    data = packed(tmp_path, "rollouts", "rollouts-plan", STEPS)
    held_out = packed(tmp_path, "held-out-answers", "held-out-plan", [[[0, 1], [2], [3, 4]]])
    return replace(made, data=data, held_out=held_out, num_steps=len(STEPS))


def a_plan(workshop: Workshop, **changes: object) -> JobPlan:
    return plan_of_pairs(workshop, **{"loss": LOSS} | changes)


class PaperLoop(PlainLoop):
    """Equation 7 an answer at a time in float64, torch's AdamW: what the job must come to."""

    def loss(self, units: list[int]) -> tuple[torch.Tensor, float]:
        """Mean loss of some units, and the baseline."""
        ratios, signs, others = [], [], []
        for unit in units:
            ratio_N, sign_N = self.ratios([unit])
            ratios.append(ratio_N[sign_N != 0].sum())
            others.append(ratio_N[sign_N == 0].sum().detach())
            signs.append(sign_N.sum().sign())
        baseline = torch.stack(others).mean().clamp(min=0)
        weights = torch.stack([torch.tensor(1.2 if sign > 0 else 0.7).double() for sign in signs])
        value = torch.sigmoid(0.5 * torch.stack(signs) * (torch.stack(ratios) - baseline))
        return (weights * (1 - value)).mean(), baseline.item()

    def steps(self) -> Iterator[tuple[float, float, float]]:
        """Loss, gradient norm and baseline of each step."""
        return self.descend(STEPS, self.loss)


def test_every_step_is_the_papers_and_held_out_answers_are_scored_alike(workshop: Workshop):
    job = do(workshop, "a", a_plan(workshop))
    metrics, loop = metrics_of(job), PaperLoop(workshop)
    expected = list(loop.steps())
    assert [(m["loss"], m["grad_norm"], m["kl"]) for m in metrics] == [
        pytest.approx(each, rel=2e-4, abs=1e-6) for each in expected
    ]
    assert max(baseline for _, _, baseline in expected) > 0.01
    loop.data = PackedBatches.open(workshop.root / "held-out-answers", workshop.root / "held-out-plan")
    with torch.no_grad():
        loss, baseline = loop.loss([0, 1, 2, 3, 4])
    first, last = held_out_metrics(job)[0], held_out_metrics(job)[6]
    assert first["reward_chosen"] == first["reward_rejected"] == first["kl"] == 0
    assert last["reward_chosen"] != 0 != last["reward_rejected"] and 0 <= last["label_accuracy"] <= 1
    assert (last["loss"], last["kl"]) == (
        pytest.approx(loss.item(), rel=1e-3),
        pytest.approx(baseline, rel=2e-3, abs=1e-5),
    )


def test_a_step_is_the_same_however_it_is_packed(workshop: Workshop):
    whole = metrics_of(do(workshop, "a", a_plan(workshop)))
    data = packed(workshop.root, "rollouts", "repacked", REPACKED)
    cut = metrics_of(do(workshop, "cut", a_plan(workshop, data=data)))
    for name in ("loss", "grad_norm", "kl", "label_accuracy"):
        assert [m[name] for m in cut] == pytest.approx([m[name] for m in whole], rel=2e-5, abs=1e-7), name


def test_a_job_that_is_gone_on_with_ends_in_the_same_bits(workshop: Workshop):
    whole = do(workshop, "whole", a_plan(workshop))
    resumed = do(workshop, "resumed", a_plan(workshop), start=checkpoint(whole, 3))
    assert losses(resumed) == losses(whole)[3:] and adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)


def test_an_objective_without_a_reference_scores_nothing_before_its_steps(workshop: Workshop):
    """Passes without gradients, counted on the engine: those of the reference alone, as nothing is evaluated."""
    write_pairs(workshop.root / "pairs", 8, seed=4)
    data = packed(workshop.root, "pairs", "pairs-plan", STEPS)

    class Counting(TinyEngine):
        passes = 0

        def forward(self, *arguments, **named):
            Counting.passes += not torch.is_grad_enabled()
            return super().forward(*arguments, **named)

    found = {}
    for objective in ("sigmoid", "simpo", "orpo"):
        Counting.passes = 0
        plan = a_plan(workshop, loss=DPO(objective=objective), data=data, evaluation=Evaluation())
        worker = new_worker(workshop.root, lambda plan, model: Counting(model))
        metrics = metrics_of(do(workshop, objective, plan, worker=worker))
        found[objective] = Counting.passes
        assert metrics[-1]["loss"] < metrics[0]["loss"] and len(metrics) == len(STEPS)
    assert found["sigmoid"] > 0 and found["simpo"] == found["orpo"] == 0
