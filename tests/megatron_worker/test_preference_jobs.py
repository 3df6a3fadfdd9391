"""Preference jobs through the runner on a small real engine: the paper's loss, step by step, on held-out pairs too."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.tokenizing.units import PAIR_COLUMNS, pair_unit
from longshore.fields import Artifact
from longshore.losses import PPO, CrossEntropy
from longshore.training import Full
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.evaluation import held_out_loss
from shared.jobs.events import Evaluated, Saved
from shared.jobs.job import (
    Checkpointing,
    Evaluation,
    Job,
    JobPlan,
    PackedData,
    Schedule,
)
from shared.jobs.losses import DPO
from shared.jobs.packed import UnitsWriter
from tests.megatron_worker.test_policy_jobs import PlainLoop, metrics_of
from tests.megatron_worker.tiny_engine import VOCAB_SIZE
from tests.megatron_worker.tiny_jobs import adapter_sha256, do, failure, losses
from tests.megatron_worker.workshop import Workshop, make_workshop, read_log, sealed, write_plan

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
    write_plan(tmp_path / "rollouts-plan", tmp_path / "rollouts", STEPS)
    write_pairs(tmp_path / "held-out-pairs", 5, seed=5)
    write_plan(tmp_path / "held-out-pairs-plan", tmp_path / "held-out-pairs", [[[0, 1], [2], [3, 4]]])
    data, held_out = (
        PackedData(units=sealed(tmp_path / name), plan=sealed(tmp_path / f"{name}-plan"))
        for name in ("rollouts", "held-out-pairs")
    )
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


class PaperLoop(PlainLoop):
    """Equation 7 a pair at a time in float64, torch's AdamW: what the job must come to."""

    def margins(self, units: list[int]) -> list[torch.Tensor]:
        found = []
        for unit in units:
            logprob, _, sign = self.logprobs([unit])
            with torch.no_grad():
                base, _, _ = self.logprobs([unit], adapted=False)
            found.append(BETA * (sign * (logprob - base)).sum())
        return found

    def steps(self) -> Iterator[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        optimizer = torch.optim.AdamW([self.a_RH, self.b_VR], lr=0.05, weight_decay=0.0)
        for bins in STEPS:
            optimizer.zero_grad()
            margins = self.margins([unit for units in bins for unit in units])
            loss = torch.stack([-torch.nn.functional.logsigmoid(margin) for margin in margins]).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_([self.a_RH, self.b_VR], 1.0)
            optimizer.step()
            yield loss.item(), norm.item()


def test_every_step_is_the_papers(workshop: Workshop):
    metrics = metrics_of(do(workshop, "a", a_plan(workshop)))
    expected = list(PaperLoop(workshop).steps())
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert [(m["loss"], m["grad_norm"]) for m in metrics] == [pytest.approx(e, rel=2e-4) for e in expected]
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
    middle = next(e for e in read_log(whole.log_path) if isinstance(e, Saved) and e.step == 3)
    start = Artifact(uri=f"file://{middle.path}", sha256=middle.manifest_sha256)
    resumed = do(workshop, "resumed", plan, start=start)
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
