"""Policy and preference jobs on a small real engine: each step as in the papers; old and reference are frozen."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from activities.tokenizing.units import PAIR_COLUMNS, LabelledAnswers, TokenBlock, pair_unit
from longshore.events import Evaluated, Step, Succeeded
from longshore.fields import Artifact
from longshore.losses import DPO, KTO, PPO, CrossEntropy, Kl, Loss, Reinforce
from longshore.training import Full, Lora
from megatron_worker.engine import Batch, Outputs, Scores
from megatron_worker.training.batches import PackedBatches, bins_to_score
from megatron_worker.training.evaluation import held_out_loss
from shared.jobs.job import Checkpointing, Evaluation, Job, JobPlan, PackedData, Schedule
from shared.jobs.packed import UnitsWriter
from tests.megatron_worker.tiny_engine import HIDDEN_SIZE, VOCAB_SIZE, TinyEngine
from tests.megatron_worker.tiny_jobs import adapter_sha256, checkpoint, do, failure, losses, new_worker
from tests.megatron_worker.workshop import Workshop, make_workshop, packed, read_log, sealed

COLUMNS = ("token_id", "hidden_index", "label", "weight", "advantage", "old_logprob", "sequence")
# Two epochs of two mini-batches over six units, two bins each.
ROLLOUT = [[[0, 1], [2]], [[3], [4, 5]], [[5, 0], [3]], [[1, 2], [4]]]
TRAINER = PPO(old="trainer", clip_low=0.05, clip_high=0.1, kl=Kl(coefficient=0.1), entropy_coefficient=0.01)


def write_rollouts(folder: Path, num_units: int, columns: tuple[str, ...] = COLUMNS, vocab_size: int = VOCAB_SIZE):
    """Each unit one sampled sequence of 4 to 8 tokens, its prompt of two tokens no target."""
    random = np.random.default_rng(4)
    writer = UnitsWriter(folder, columns)
    for unit in range(num_units):
        ids = random.integers(0, vocab_size, random.integers(4, 9))
        index = np.arange(1, len(ids) - 1)
        values = {
            "token_id": ids,
            "hidden_index": index,
            "label": ids[2:],
            "weight": np.ones(len(index)),
            "advantage": np.full(len(index), (-1.0) ** unit),
            "old_logprob": -4 + 0.1 * random.normal(size=len(index)),
            "sequence": np.zeros(len(index)),
        }
        writer.append(**{name: values[name] for name in columns})
    writer.close()


def rollouts(root: Path, vocab_size: int = VOCAB_SIZE) -> PackedData:
    write_rollouts(root / "rollouts", 6, vocab_size=vocab_size)
    return packed(root, "rollouts", "rollouts-plan", ROLLOUT)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return replace(make_workshop(tmp_path), data=rollouts(tmp_path), num_steps=len(ROLLOUT))


def a_plan(workshop: Workshop, loss: Loss, **changes: object) -> JobPlan:
    fields: dict[str, object] = {
        "loss": loss,
        "schedule": Schedule(kind="constant", learning_rate=0.05),
        "checkpointing": Checkpointing(every_steps=1),
    }
    return workshop.plan(**(fields | changes))


def metrics_of(job: Job) -> list[dict[str, float]]:
    events = read_log(job.log_path)
    assert isinstance(events[-1], Succeeded), events[-1]
    return [e.metrics for e in events if isinstance(e, Step)]


def published(workshop: Workshop, job: Job, name: str) -> Artifact:
    """A job's last adapter, as a folder of its own."""
    folder = workshop.root / name
    folder.mkdir()
    weights = Path(job.checkpoint_dir) / f"step-{workshop.num_steps:08d}" / "weights" / "adapter_model.safetensors"
    (folder / weights.name).write_bytes(weights.read_bytes())
    return sealed(folder)


class PlainLoop:
    """The tiny model in float64, PPO's formula written out, torch's AdamW: what the job must come to."""

    def __init__(self, workshop: Workshop) -> None:
        base = load_file(workshop.root / "model" / "model.safetensors")
        self.embed_VH, self.out_VH = base["embed"].double(), base["out"].double()
        generator = torch.Generator().manual_seed(7)
        bound = HIDDEN_SIZE**-0.5
        a_RH = torch.empty(4, HIDDEN_SIZE).uniform_(-bound, bound, generator=generator)
        self.a_RH, self.b_VR = a_RH.double().requires_grad_(), torch.zeros(VOCAB_SIZE, 4).double().requires_grad_()
        self.data = PackedBatches.open(workshop.root / "rollouts", workshop.root / "rollouts-plan")

    def logprobs(self, units: list[int], adapted: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probability [N], entropy [N] and advantage [N] of units' targets."""
        batch = self.data.batch(np.array(units), torch.device("cpu"))
        token_TH = self.embed_VH[batch.token_id_T]
        parent_TH = token_TH[batch.parent_T.clamp(min=0)] * (batch.parent_T >= 0)[:, None]
        hidden_NH = (token_TH + 0.5 * parent_TH)[batch.hidden_index_N]
        out_VH = self.out_VH + 2.0 * self.b_VR @ self.a_RH if adapted else self.out_VH
        logprob_NV = (hidden_NH @ out_VH.t()).log_softmax(-1)
        entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
        return logprob_NV.gather(1, batch.label_N[:, None])[:, 0], entropy_N, batch.advantage_N.double()

    def ratios(self, units: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability less the base's, and advantage, of units' targets."""
        logprob, _, advantage = self.logprobs(units)
        with torch.no_grad():
            base, _, _ = self.logprobs(units, adapted=False)
        return logprob - base, advantage

    def descend(
        self, steps: list[list[list[int]]], loss_of: Callable[[list[int]], tuple[torch.Tensor, float]]
    ) -> Iterator[tuple[float, float, float]]:
        """Loss, gradient norm, and what else the loss says of each step."""
        optimizer = torch.optim.AdamW([self.a_RH, self.b_VR], lr=0.05, weight_decay=0.0)
        for bins in steps:
            optimizer.zero_grad()
            loss, told = loss_of([unit for units in bins for unit in units])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_([self.a_RH, self.b_VR], 1.0)
            optimizer.step()
            yield loss.item(), norm.item(), told

    def steps(self) -> Iterator[tuple[float, float, float]]:
        """Loss, gradient norm and largest ratio of each step."""
        with torch.no_grad():
            old = {unit: self.logprobs([unit])[0] for unit in range(6)}
            ref = {unit: self.logprobs([unit], adapted=False)[0] for unit in range(6)}

        def loss_of(units: list[int]) -> tuple[torch.Tensor, float]:
            logprob, entropy, advantage = self.logprobs(units)
            log_ratio = logprob - torch.cat([old[unit] for unit in units])
            ratio, behind = log_ratio.exp(), torch.cat([ref[unit] for unit in units]) - logprob
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.1) * advantage)
            return (-surrogate + 0.1 * (behind.exp() - 1 - behind) - 0.01 * entropy).mean(), ratio.max().item()

        return self.descend(ROLLOUT, loss_of)


def test_several_steps_a_rollout_are_those_of_a_plain_loop(workshop: Workshop):
    """Two epochs of two mini-batches; the ratio is against the policy that the job began with, in every one."""
    metrics = metrics_of(do(workshop, "a", a_plan(workshop, TRAINER)))
    expected = list(PlainLoop(workshop).steps())
    for ours, (loss, norm, ratio_max) in zip(metrics, expected, strict=True):
        assert ours["loss"] == pytest.approx(loss, rel=2e-5, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(norm, rel=2e-5)
        assert ours["ratio_max"] == pytest.approx(ratio_max, rel=2e-5)
    assert metrics[0]["ratio_max"] == metrics[0]["ratio_mean"] == 1.0
    assert metrics[0]["kl_old_new"] == metrics[0]["kl_reference"] == 0.0
    assert metrics[-1]["ratio_max"] > 1.1
    assert metrics[-1]["kl_reference"] > 0
    assert metrics[-1]["clip_high_fraction"] > 0


@pytest.mark.parametrize("trainable", [Lora(rank=4, alpha=8), Full()], ids=["lora", "full"])
def test_a_job_that_goes_on_is_scored_by_the_weights_it_began_with(workshop: Workshop, trainable: Lora | Full):
    plan = a_plan(workshop, TRAINER, trainable=trainable)
    whole = do(workshop, "whole", plan)
    for step in range(1, 4):
        resumed = do(workshop, f"from-{step}", plan, start=checkpoint(whole, step))
        assert losses(resumed) == losses(whole)[step:]
        assert checkpoint(resumed, 4).sha256 == checkpoint(whole, 4).sha256


def test_the_reference_of_full_training_is_the_base_as_it_was_published(workshop: Workshop):
    metrics = metrics_of(do(workshop, "a", a_plan(workshop, TRAINER, trainable=Full())))
    assert metrics[0]["kl_reference"] == 0.0
    assert metrics[-1]["kl_reference"] == pytest.approx(metrics[-1]["kl_old_new"], rel=0.5)
    assert metrics[-1]["kl_reference"] > 1e-3


def test_an_initial_adapter_is_the_old_policy_and_the_base_the_reference(workshop: Workshop):
    first = do(workshop, "first", a_plan(workshop, TRAINER))
    adapter = published(workshop, first, "published")
    plan = a_plan(workshop, TRAINER, initial_adapter=adapter)
    whole = do(workshop, "whole", plan)
    metrics = metrics_of(whole)
    assert metrics[0]["ratio_max"] == 1.0
    assert metrics[0]["kl_reference"] > 1e-3
    resumed = do(workshop, "resumed", plan, start=checkpoint(whole, 2))
    assert adapter_sha256(resumed, 4) == adapter_sha256(whole, 4)


def test_a_named_adapter_can_be_the_reference(workshop: Workshop):
    adapter = published(workshop, do(workshop, "first", a_plan(workshop, TRAINER)), "published")
    near = TRAINER.model_copy(update={"kl": Kl(coefficient=0.1, reference=adapter)})
    metrics = metrics_of(do(workshop, "a", a_plan(workshop, near, initial_adapter=adapter)))
    assert metrics[0]["kl_reference"] == 0.0 < metrics[-1]["kl_reference"]
    from_base = metrics_of(do(workshop, "b", a_plan(workshop, near)))
    assert from_base[0]["kl_reference"] > 1e-3
    assert from_base[0]["ratio_max"] == 1.0


def test_a_later_job_of_a_run_freezes_the_policy_it_begins_with(workshop: Workshop):
    """Weights, moments and random state of the job before; ratios of 1 again; the same bits when gone on with."""
    first = do(workshop, "first", a_plan(workshop, TRAINER))
    plan = a_plan(
        workshop, TRAINER, job_id="000002", initial_checkpoint=checkpoint(first, 4), first_step=workshop.num_steps
    )
    whole = do(workshop, "second", plan)
    metrics = metrics_of(whole)
    assert metrics[0]["ratio_max"] == 1.0
    assert metrics[0]["kl_reference"] > 1e-3
    resumed = do(workshop, "resumed", plan, start=checkpoint(whole, 6))
    assert losses(resumed) == losses(whole)[2:]
    assert adapter_sha256(resumed, 8) == adapter_sha256(whole, 8)


def test_the_samplers_log_probabilities_are_used_as_they_were_sent(workshop: Workshop):
    metrics = metrics_of(do(workshop, "a", a_plan(workshop, Reinforce())))
    loop = PlainLoop(workshop)
    with torch.no_grad():
        logprob, _, advantage = loop.logprobs([0, 1, 2])
    sent = loop.data.batch(np.array([0, 1, 2]), torch.device("cpu")).old_logprob_N.double()
    ratio = (logprob - sent).exp()
    assert metrics[0]["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert metrics[0]["loss"] == pytest.approx(-(ratio * advantage).mean().item(), rel=1e-5)


def test_rewarded_tokens_become_likely_and_punished_ones_rare(workshop: Workshop):
    data = packed(workshop.root, "rollouts", "again", [[[0, 1, 2, 3, 4, 5]]] * 20)
    metrics = metrics_of(do(workshop, "a", a_plan(workshop, Reinforce(old="trainer"), num_steps=20, data=data)))
    assert metrics[0]["loss"] == pytest.approx(0, abs=0.2)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5


def test_held_out_loss_is_of_the_text_whatever_is_trained_for(workshop: Workshop):
    evaluation = Evaluation(data=workshop.held_out)
    policy = do(workshop, "policy", a_plan(workshop, TRAINER, evaluation=evaluation))
    text = do(workshop, "text", workshop.plan(evaluation=evaluation))
    first = [next(e for e in read_log(j.log_path) if e.event == "evaluated").metrics for j in (policy, text)]
    assert first[0] == first[1]


def test_data_without_what_the_loss_learns_from_is_refused_before_any_step(workshop: Workshop):
    write_rollouts(workshop.root / "bare", 6, COLUMNS[:4])
    bare = PackedData(units=sealed(workshop.root / "bare"), plan=workshop.data.plan)
    failed = failure(do(workshop, "a", a_plan(workshop, TRAINER, data=bare)))
    assert (failed.kind, failed.step) == ("invalid_input", 0)
    assert "the units have no column advantage; the loss ppo learns from it" in failed.message


def test_a_missing_reference_adapter_fails_before_any_step(workshop: Workshop):
    nowhere = Artifact(uri=f"file://{workshop.root}/nowhere", sha256="0" * 64)
    loss = PPO(kl=Kl(coefficient=0.1, reference=nowhere))
    assert failure(do(workshop, "a", a_plan(workshop, loss))).kind == "corrupt_artifact"


def test_every_unit_is_scored_once_and_a_resumed_job_in_the_same_turns(workshop: Workshop):
    with PackedBatches.open(workshop.root / "rollouts", workshop.root / "rollouts-plan") as data:
        whole = [units.tolist() for units in bins_to_score(data, 0, 4, 0, 1)]
        assert whole == [[0, 1], [2], [3], [4, 5]]
        assert [units.tolist() for units in bins_to_score(data, 3, 4, 0, 1)] == [[0, 1], [2], [4, 5]]
        for first_step in range(4):
            for rank in range(2):
                mine = {int(u) for units in bins_to_score(data, first_step, 4, rank, 2) for u in units}
                wanted = {int(u) for s in range(first_step, 4) for b in data.bins_of_rank(s, rank, 2) for u in b}
                assert wanted <= mine


def test_what_only_the_first_step_trains_on_is_not_scored(workshop: Workshop):
    """One step on policy costs no pass more; the result is that of a job whose units are scored for a second step."""
    scored = []

    class Counting(TinyEngine):
        def forward(self, batch: Batch, outputs: Outputs) -> Scores:
            if not torch.is_grad_enabled():
                scored.append(len(batch.token_id_T))
            return super().forward(batch, outputs)

    loss = PPO(old="trainer", truncated_importance=1.05)
    job = workshop.job("one", a_plan(workshop, loss, num_steps=1))
    new_worker(workshop.root, lambda plan, model: Counting(model)).do_one(job)
    assert not scored
    whole = workshop.job("whole", a_plan(workshop, loss))
    new_worker(workshop.root, lambda plan, model: Counting(model)).do_one(whole)
    assert len(scored) == 4
    assert checkpoint_bytes(job) == checkpoint_bytes(whole)


def checkpoint_bytes(job: Job) -> bytes:
    return (Path(job.checkpoint_dir) / "step-00000001" / "weights" / "adapter_model.safetensors").read_bytes()


# Two epochs of three steps over eight pairs, two bins each.
PAIR_STEPS = [[[0, 1], [2]], [[3], [4, 5]], [[6], [7]], [[5, 0], [3]], [[1, 2], [7]], [[4], [6]]]
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
def pairs(tmp_path: Path) -> Workshop:
    made = make_workshop(tmp_path)
    write_pairs(tmp_path / "rollouts", 8, seed=4)  # named so for PlainLoop
    write_pairs(tmp_path / "held-out-pairs", 5, seed=5)
    data = packed(tmp_path, "rollouts", "rollouts-plan", PAIR_STEPS)
    held_out = packed(tmp_path, "held-out-pairs", "held-out-pairs-plan", [[[0, 1], [2], [3, 4]]])
    return replace(made, data=data, held_out=held_out, num_steps=len(PAIR_STEPS))


def plan_of_pairs(pairs: Workshop, **changes: object) -> JobPlan:
    fields: dict[str, object] = {
        "loss": DPO(beta=BETA),
        "schedule": Schedule(kind="constant", learning_rate=0.05),
        "checkpointing": Checkpointing(every_steps=1),
        "evaluation": Evaluation(data=pairs.held_out, every_steps=2),
    }
    return pairs.plan(**(fields | changes))


def held_out_metrics(job: Job) -> dict[int, dict[str, float]]:
    return {e.step: e.metrics for e in read_log(job.log_path) if isinstance(e, Evaluated)}


def test_each_named_evaluation_is_scored_by_the_reference(pairs: Workshop):
    alone = held_out_metrics(do(pairs, "alone", plan_of_pairs(pairs)))
    sets = Evaluation(sets={"first": pairs.held_out, "second": pairs.held_out}, every_steps=2)
    named = held_out_metrics(do(pairs, "named", plan_of_pairs(pairs, evaluation=sets)))
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

        return self.descend(PAIR_STEPS, loss_of)


def test_every_step_is_the_papers(pairs: Workshop):
    metrics = metrics_of(do(pairs, "a", plan_of_pairs(pairs)))
    expected = list(PaperLoop(pairs).steps())
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert [(m["loss"], m["grad_norm"]) for m in metrics] == [pytest.approx(e[:2], rel=2e-4) for e in expected]
    assert metrics[-1]["reward_margin"] > 0.1


def test_held_out_pairs_are_scored_by_the_same_loss_against_the_same_reference(pairs: Workshop):
    job = do(pairs, "a", plan_of_pairs(pairs))
    found = held_out_metrics(job)
    assert sorted(found) == [0, 2, 4, 6]
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and found[0]["reward_margin"] == 0
    loop = PaperLoop(pairs)
    for _ in loop.steps():
        pass
    loop.data = PackedBatches.open(pairs.root / "held-out-pairs", pairs.root / "held-out-pairs-plan")
    with torch.no_grad():
        margins = torch.stack(loop.margins([0, 1, 2, 3, 4]))
    last = found[6]
    assert last["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), rel=1e-3)
    assert last["reward_margin"] == pytest.approx(margins.mean().item(), rel=2e-3, abs=1e-4)
    assert last["preference_accuracy"] == pytest.approx((margins > 0).double().mean().item())
    assert last["reward_chosen"] - last["reward_rejected"] == pytest.approx(last["reward_margin"], abs=1e-6)
    assert "perplexity" not in last


@pytest.mark.parametrize("trainable", [None, Full()], ids=["lora", "full"])
def test_a_job_that_is_gone_on_with_ends_in_the_same_bits(pairs: Workshop, trainable: Full | None):
    """The reference is scored by what stood before the first step, though the job goes on behind the third."""
    plan = plan_of_pairs(pairs, **({"trainable": trainable} if trainable else {}))
    whole = do(pairs, "whole", plan)
    resumed = do(pairs, "resumed", plan, start=checkpoint(whole, 3))
    assert losses(resumed) == losses(whole)[3:]
    assert [held_out_metrics(resumed)[step] for step in (4, 6)] == [held_out_metrics(whole)[step] for step in (4, 6)]
    if trainable is None:
        assert adapter_sha256(resumed, 6) == adapter_sha256(whole, 6)


def test_held_out_rows_that_are_no_pairs_are_refused_before_any_step(pairs: Workshop):
    plain = make_workshop(pairs.root / "other").held_out
    failed = failure(do(pairs, "a", plan_of_pairs(pairs, evaluation=Evaluation(data=plain))))
    assert (failed.kind, failed.step) == ("invalid_input", 0)
    assert "no column advantage; dpo tells the chosen from the rejected by it" in failed.message


def test_only_pairs_are_evaluated_by_what_is_trained_for():
    assert held_out_loss(DPO(beta=0.3)) == DPO(beta=0.3)
    assert held_out_loss(PPO()) == held_out_loss(CrossEntropy()) == CrossEntropy()


OF_ANSWERS = KTO(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7)
# The same steps in other bins.
REPACKED = [[[unit] for units in bins for unit in units] for bins in PAIR_STEPS]


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
def answers(tmp_path: Path) -> Workshop:
    made = make_workshop(tmp_path)
    write_answers(tmp_path / "rollouts", 8, seed=4)  # named so for PlainLoop
    write_answers(tmp_path / "held-out-answers", 5, seed=5)
    data = packed(tmp_path, "rollouts", "rollouts-plan", PAIR_STEPS)
    held_out = packed(tmp_path, "held-out-answers", "held-out-plan", [[[0, 1], [2], [3, 4]]])
    return replace(made, data=data, held_out=held_out, num_steps=len(PAIR_STEPS))


def plan_of_answers(answers: Workshop, **changes: object) -> JobPlan:
    return plan_of_pairs(answers, **{"loss": OF_ANSWERS} | changes)


class LoopOfAnswers(PlainLoop):
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
        return self.descend(PAIR_STEPS, self.loss)


def test_every_step_is_the_papers_and_held_out_answers_are_scored_alike(answers: Workshop):
    job = do(answers, "a", plan_of_answers(answers))
    metrics, loop = metrics_of(job), LoopOfAnswers(answers)
    expected = list(loop.steps())
    assert [(m["loss"], m["grad_norm"], m["kl"]) for m in metrics] == [
        pytest.approx(each, rel=2e-4, abs=1e-6) for each in expected
    ]
    assert max(baseline for _, _, baseline in expected) > 0.01
    loop.data = PackedBatches.open(answers.root / "held-out-answers", answers.root / "held-out-plan")
    with torch.no_grad():
        loss, baseline = loop.loss([0, 1, 2, 3, 4])
    first, last = held_out_metrics(job)[0], held_out_metrics(job)[6]
    assert first["reward_chosen"] == first["reward_rejected"] == first["kl"] == 0
    assert last["reward_chosen"] != 0 != last["reward_rejected"] and 0 <= last["label_accuracy"] <= 1
    assert (last["loss"], last["kl"]) == (
        pytest.approx(loss.item(), rel=1e-3),
        pytest.approx(baseline, rel=2e-3, abs=1e-5),
    )


def test_a_step_is_the_same_however_it_is_packed(answers: Workshop):
    whole = metrics_of(do(answers, "a", plan_of_answers(answers)))
    data = packed(answers.root, "rollouts", "repacked", REPACKED)
    cut = metrics_of(do(answers, "cut", plan_of_answers(answers, data=data)))
    for name in ("loss", "grad_norm", "kl", "label_accuracy"):
        assert [m[name] for m in cut] == pytest.approx([m[name] for m in whole], rel=2e-5, abs=1e-7), name


def test_an_objective_without_a_reference_scores_nothing_before_its_steps(answers: Workshop):
    """Passes without gradients, counted on the engine: those of the reference alone, as nothing is evaluated."""
    write_pairs(answers.root / "pairs", 8, seed=4)
    data = packed(answers.root, "pairs", "pairs-plan", PAIR_STEPS)

    class Counting(TinyEngine):
        passes = 0

        def forward(self, *arguments, **named):
            Counting.passes += not torch.is_grad_enabled()
            return super().forward(*arguments, **named)

    found = {}
    for objective in ("sigmoid", "simpo", "orpo"):
        Counting.passes = 0
        plan = plan_of_answers(answers, loss=DPO(objective=objective), data=data, evaluation=Evaluation())
        worker = new_worker(answers.root, lambda plan, model: Counting(model))
        metrics = metrics_of(do(answers, objective, plan, worker=worker))
        found[objective] = Counting.passes
        assert metrics[-1]["loss"] < metrics[0]["loss"] and len(metrics) == len(PAIR_STEPS)
    assert found["sigmoid"] > 0 and found["simpo"] == found["orpo"] == 0
