"""Losses against torch's own and the papers' formulas in float64, and what must not leak into them."""

import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from longshore.losses import DPO, KTO, PPO, CrossEntropy, PairObjective, Reinforce, reference_of
from megatron_worker.engine import Batch, LossFunction, Scores
from megatron_worker.losses import check_columns, loss_function
from megatron_worker.training.batches import Sums
from shared.errors import InvalidInput
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from tests.megatron_worker.policy_reference import gradient_of, most
from tests.megatron_worker.training.test_batches import a_batch

LOSS = loss_function(CrossEntropy())


def test_it_is_the_weighted_sum_of_torchs_cross_entropy():
    logit_NV = torch.randn(9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    label_N, weight_N = torch.arange(9) % 7, torch.linspace(0, 2, 9)
    theirs = torch.nn.functional.cross_entropy(logit_NV, label_N, reduction="none") @ weight_N.double()
    logprob_N = logit_NV.log_softmax(-1)[torch.arange(9), label_N]
    sums = LOSS.sums(Scores(logprob_N), a_batch(weight=weight_N))
    torch.testing.assert_close(sums.loss, theirs)
    torch.testing.assert_close(sums.weight, weight_N.sum())


def test_a_label_of_weight_zero_counts_for_nothing_even_when_it_is_impossible():
    logprob_N = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    sums = LOSS.sums(Scores(logprob_N), a_batch(weight=torch.tensor([2.0, 0.0])))
    sums.loss.backward()
    assert sums.loss.item() == 2.0
    assert logprob_N.grad.tolist() == [-2.0, 0.0]


def test_it_asks_for_log_probabilities_alone():
    assert LOSS.outputs.logprob
    assert not LOSS.outputs.entropy


def test_a_rank_without_bins_has_the_names_of_its_peers():
    idle, busy = (Sums(LOSS, torch.device("cpu")) for _ in range(2))
    batch = a_batch(weight=torch.tensor([1.0, 0.0, 0.5]))
    busy.add(LOSS.sums(Scores(torch.zeros(3)), batch).detached(), batch)
    assert set(idle.totals) == set(busy.totals) == {"loss", "weight", "tokens", "target_tokens", "num_bins"}
    assert not any(idle.totals.values())
    assert {name: busy.totals[name].item() for name in ("weight", "tokens", "target_tokens", "num_bins")} == {
        "weight": 1.5,
        "tokens": 4,
        "target_tokens": 2,
        "num_bins": 1,
    }


def test_running_sums_do_not_depend_on_how_they_are_cut():
    """Small values beside a large one: float32 would lose them all."""
    batch, sums = a_batch(weight=torch.tensor([1.0])), Sums(LOSS, torch.device("cpu"))
    sums.add({"loss": torch.tensor(1e8), "weight": torch.tensor(1.0)}, batch)
    for _ in range(100):
        sums.add({"loss": torch.tensor(0.25), "weight": torch.tensor(1.0)}, batch)
    assert sums.totals["loss"].item() == 1e8 + 25


Columns = dict[str, np.ndarray]
OBJECTIVES = get_args(PairObjective)
BETA, GAMMA = 0.3, 0.4


def batch_of(c: Columns) -> Batch:
    return dataclasses.replace(
        a_batch(weight=torch.tensor(c["weight"])),
        advantage_N=torch.tensor(c["advantage"]),
        ref_logprob_N=torch.tensor(c["ref"]),
        sequence_N=torch.tensor(c["sequence"].astype(np.int64)),
    )


def pairs(seed: int, num_pairs: int) -> Columns:
    """Pairs of sequences of 1 to 4 targets, the rejected sometimes first, rows in no order, some masked."""
    random = np.random.default_rng(seed)
    rows = []
    for pair in range(num_pairs):
        first = random.choice([1.0, -1.0])
        for place, sign in enumerate((first, -first)):
            for n in range(random.integers(1, 5)):
                weight = 1.0 if n == 0 else random.choice([0.0, 1.0])
                rows.append((2 * pair + place, sign, weight, random.normal() - 2, random.normal() - 2))
    order = random.permutation(len(rows))
    columns = np.array(rows)[order].T
    return dict(zip(("sequence", "advantage", "weight", "logprob", "ref"), columns, strict=True))


def ours(dpo: DPO, c: Columns) -> tuple[dict[str, float], np.ndarray]:
    logprob_N = torch.tensor(c["logprob"], requires_grad=True)
    sums = loss_function(dpo).sums(Scores(logprob_N), batch_of(c))
    sums.loss.backward()
    return {name: value.item() for name, value in sums.detached().items()}, logprob_N.grad.numpy()


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def of_pair(loss: DPO, ratio: dict[int, np.ndarray], logprob: dict[int, np.ndarray]) -> float:
    """A pair's loss. `ratio`: log p - log p_ref of the tokens of the chosen (1) and of the rejected answer (-1)."""
    nll = -logprob[1].mean()
    h, mean, p = ({s: f(of[s]) for s in (1, -1)} for f, of in ((np.sum, ratio), (np.mean, ratio), (np.mean, logprob)))
    delta, share = h[1] - h[-1], loss.label_smoothing
    match loss.objective:
        case "sigmoid":
            value = -(1 - share) * np.log(sigmoid(BETA * delta)) - share * np.log(sigmoid(-BETA * delta))
        case "robust":
            noisy = [-np.log(sigmoid(BETA * delta)), -np.log(sigmoid(-BETA * delta))]
            value = ((1 - share) * noisy[0] - share * noisy[1]) / (1 - 2 * share)
        case "hinge":
            value = most(0.0, 1 - BETA * delta)
        case "ipo":
            value = (mean[1] - mean[-1] - 1 / (2 * BETA)) ** 2
        case "apo_zero":
            value = 1 - sigmoid(BETA * h[1]) + sigmoid(BETA * h[-1])
        case "apo_down":
            value = sigmoid(BETA * h[1]) + 1 - sigmoid(BETA * delta)
        case "simpo":
            value = -np.log(sigmoid(BETA * p[1] - BETA * p[-1] - GAMMA))
        case "orpo":
            odds = {s: np.exp(p[s]) / (1 - np.exp(p[s])) for s in (1, -1)}
            value = nll - BETA * np.log(sigmoid(np.log(odds[1] / odds[-1])))
    return value + loss.rpo_alpha * nll


def papers(loss: DPO, c: Columns, logprob: np.ndarray) -> float:
    total = 0.0
    for pair in sorted({int(s) // 2 for s in c["sequence"]}):
        own = (c["sequence"] // 2 == pair) & (c["weight"] > 0)
        side = {sign: own & (c["advantage"] == sign) for sign in (1, -1)}
        total += of_pair(loss, *({s: v[side[s]] for s in (1, -1)} for v in (logprob - c["ref"], logprob)))
    return total


def a_loss(objective: PairObjective, rpo_alpha: float, smoothing: float = 0.1) -> DPO:
    own = {
        "sigmoid": {"label_smoothing": smoothing},
        "robust": {"label_smoothing": smoothing},
        "simpo": {"gamma": GAMMA},
    }
    alpha = {} if objective == "orpo" else {"rpo_alpha": rpo_alpha}
    return DPO(objective=objective, beta=BETA, **own.get(objective, {}), **alpha)


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pairs=st.integers(1, 6),
    rpo_alpha=st.sampled_from([0.0, 0.7]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_value_and_gradient_are_the_papers(
    objective: PairObjective, seed: int, num_pairs: int, rpo_alpha: float, smoothing: float
):
    loss, columns = a_loss(objective, rpo_alpha, smoothing), pairs(seed, num_pairs)
    columns["logprob"] = -np.abs(columns["logprob"]) - 0.01  # log-probabilities, as odds need them
    sums, gradient = ours(loss, columns)
    assert sums["weight"] == num_pairs
    assert sums["loss"] == pytest.approx(papers(loss, columns, columns["logprob"]), rel=1e-10)
    by_formula = gradient_of(lambda moved: papers(loss, columns, moved), columns["logprob"])
    np.testing.assert_allclose(gradient, by_formula, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_pairs_add_up_however_they_are_cut(objective: PairObjective):
    loss, columns = a_loss(objective, 0.5), pairs(3, 5)
    columns["logprob"] = -np.abs(columns["logprob"]) - 0.01
    whole, gradient = ours(loss, columns)
    total, parts = 0.0, np.zeros_like(gradient)
    for pair in range(5):
        own = columns["sequence"] // 2 == pair
        sums, parts[own] = ours(loss, {name: values[own] for name, values in columns.items()})
        total += sums["loss"]
    assert total == pytest.approx(whole["loss"], rel=1e-12)
    np.testing.assert_allclose(parts, gradient, rtol=1e-12)


def test_an_answer_that_is_certain_has_finite_odds_and_gradients():
    columns = pairs(4, 2)
    columns["logprob"] = np.where(columns["advantage"] > 0, -0.0, columns["logprob"])
    sums, gradient = ours(DPO(objective="orpo"), columns)
    assert np.isfinite(sums["loss"]) and np.isfinite(gradient).all()


def test_objectives_without_a_reference_name_none_and_do_not_read_one():
    for objective in OBJECTIVES:
        loss, columns = a_loss(objective, 0.0), pairs(5, 3)
        columns["logprob"] = -np.abs(columns["logprob"]) - 0.01
        other = columns["ref"] + np.random.default_rng(5).normal(size=len(columns["ref"]))
        (before, _), (after, _) = ours(loss, columns), ours(loss, columns | {"ref": other})
        is_free = objective in ("simpo", "orpo")
        assert (reference_of(loss) is None) == (before["loss"] == after["loss"]) == is_free


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"objective": "ipo", "label_smoothing": 0.1}, "label_smoothing would be ignored by ipo: .* sigmoid, robust"),
        ({"objective": "hinge", "gamma": 0.7}, "gamma would be ignored by hinge: it is read by simpo"),
        ({"objective": "orpo", "rpo_alpha": 0.5}, "rpo_alpha would be ignored by orpo"),
        ({"objective": "simpo", "reference": {"uri": "u", "sha256": "0" * 64}}, "reference would be ignored by simpo"),
        ({"objective": "robust", "label_smoothing": 0.5}, "label_smoothing"),
    ],
)
def test_a_field_that_an_objective_does_not_read_is_refused_by_name(fields: dict[str, Any], rule: str):
    with pytest.raises(ValidationError, match=rule):
        DPO.model_validate(fields)


def test_a_policy_that_is_its_reference_has_ln_2_and_half_beta():
    columns = pairs(1, 3)
    columns["ref"] = columns["logprob"].copy()
    sums, gradient = ours(DPO(beta=0.2), columns)
    assert sums["loss"] == pytest.approx(3 * math.log(2), rel=1e-12)
    np.testing.assert_allclose(gradient, -0.1 * columns["advantage"] * columns["weight"], rtol=1e-12)
    assert sums["preference_accuracy:sum"] == 0


def test_it_reports_rewards_margin_and_accuracy():
    columns = pairs(2, 4)
    sums, _ = ours(DPO(beta=0.3), columns)
    reward = 0.3 * columns["weight"] * (columns["logprob"] - columns["ref"])
    chosen, rejected = reward[columns["advantage"] > 0].sum(), reward[columns["advantage"] < 0].sum()
    assert sums["reward_chosen:sum"] == pytest.approx(chosen)
    assert sums["reward_rejected:sum"] == pytest.approx(rejected)
    assert sums["reward_margin:sum"] == pytest.approx(chosen - rejected)
    assert sums["preference_accuracy:count"] == 4


# KTO: answers, each beside one to another prompt.


def answers(seed: int, num_answers: int) -> Columns:
    """Answers of 1 to 4 tokens, good and bad, and as many to other prompts, in no order."""
    random, rows = np.random.default_rng(seed), []
    for number in range(num_answers):
        for place, sign in ((0, random.choice([1.0, -1.0])), (1, 0.0)):
            for _ in range(random.integers(1, 5)):
                weight = float(place == 0)
                rows.append((2 * number + place, sign, weight, random.normal() - 2, random.normal() - 2))
    columns = np.array(rows)[random.permutation(len(rows))].T
    return dict(zip(("sequence", "advantage", "weight", "logprob", "ref"), columns, strict=True))


def in_bins(kto: KTO, bins: list[Columns]) -> tuple[dict[str, float], list[np.ndarray]]:
    """What the dispatcher does with a step: the baseline over all bins, then the loss bin by bin."""
    tensors = [torch.tensor(c["logprob"], requires_grad=True) for c in bins]
    batches = [batch_of(c) for c in bins]

    def summed(loss: LossFunction, backward: bool) -> dict[str, float]:
        sums = Sums(loss, torch.device("cpu"))
        for tensor, batch in zip(tensors, batches, strict=True):
            found = loss.sums(Scores(tensor if backward else tensor.detach()), batch)
            if backward:
                found.loss.backward()
            sums.add(found.detached(), batch)
        return {name: value.item() for name, value in sums.totals.items()}

    whole = loss_function(kto)
    assert whole.baseline is not None
    scored, loss_of = whole.baseline
    loss = loss_of(summed(scored, backward=False))
    return summed(loss, backward=True), [tensor.grad.numpy() for tensor in tensors if tensor.grad is not None]


def papers_kto(kto: KTO, c: Columns, logprob: np.ndarray, baseline: float | None = None) -> float:
    """Equation 7, an answer at a time, with the baseline of section 4.1. `baseline`: held, since it has no gradient."""
    ratio, numbers = logprob - c["ref"], sorted({int(s) // 2 for s in c["sequence"]})
    others = [ratio[c["sequence"] == 2 * number + 1].sum() for number in numbers]
    z = max(0.0, float(np.mean(others))) if baseline is None else baseline
    total = 0.0
    for number in numbers:
        own = c["sequence"] == 2 * number
        is_good = c["advantage"][own][0] > 0
        value = sigmoid(kto.beta * (ratio[own].sum() - z) * (1 if is_good else -1))
        total += (kto.desirable_weight if is_good else kto.undesirable_weight) * (1 - value)
    return total


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_answers=st.integers(1, 6), num_bins=st.integers(1, 3), away=st.floats(-2, 2))
def test_ktos_value_and_gradient_are_the_papers_however_a_step_is_packed(
    seed: int, num_answers: int, num_bins: int, away: float
):
    kto, columns = KTO(beta=BETA, desirable_weight=1.3, undesirable_weight=0.6), answers(seed, num_answers)
    columns["logprob"] = columns["logprob"] + away
    bin_N = columns["sequence"] // 2 % num_bins
    bins = [{name: values[bin_N == each] for name, values in columns.items()} for each in range(num_bins)]
    sums, gradients = in_bins(kto, [c for c in bins if len(c["sequence"])])
    assert sums["weight"] == num_answers
    assert sums["loss"] == pytest.approx(papers_kto(kto, columns, columns["logprob"]), rel=1e-10)
    assert sums["reward_chosen:count"] + sums["reward_rejected:count"] == num_answers
    held = sums["kl:sum"] / sums["kl:count"]
    gradient = np.zeros_like(columns["logprob"])
    filled = (each for each in range(num_bins) if (bin_N == each).any())
    for each, found in zip(filled, gradients, strict=True):
        gradient[bin_N == each] = found
    by_formula = gradient_of(lambda moved: papers_kto(kto, columns, moved, held), columns["logprob"])
    np.testing.assert_allclose(gradient, by_formula, rtol=1e-9, atol=1e-12)


def test_the_baseline_is_never_below_zero_and_comes_of_the_answers_to_other_prompts():
    columns = answers(6, 5)
    is_other = columns["advantage"] == 0
    columns["logprob"] = np.where(is_other, columns["ref"] - 0.5, columns["logprob"])
    assert in_bins(KTO(), [columns])[0]["kl:sum"] == 0
    columns["logprob"] = np.where(is_other, columns["ref"] + 0.5, columns["logprob"])
    assert in_bins(KTO(), [columns])[0]["kl:sum"] == pytest.approx(0.5 * is_other.sum())


# What is refused before any step.

GOOD = {"pair": ([0, 1], [1, -1], [1, 1]), "answer": ([0, 1], [1, 0], [1, 0])}


def units_of(
    folder: Path, sequences: list, advantages: list, weights: list, first: str = "pair", **more: list
) -> Units:
    """One good unit, then one of these targets."""
    writer = UnitsWriter(folder, ("token_id", "hidden_index", "label", "weight", "advantage", "sequence", *more))
    others = {name: [0.0, 0.0] for name in more}, more
    for targets, other in zip((GOOD[first], (sequences, advantages, weights)), others, strict=True):
        given = dict(zip(("sequence", "advantage", "weight"), targets, strict=True)) | other
        ids = np.arange(len(targets[0]) + 1)
        columns = {name: np.array(values) for name, values in given.items()}
        writer.append(token_id=ids, hidden_index=ids[:-1], label=ids[1:], **columns)
    writer.close()
    return Units(folder)


def test_good_pairs_are_accepted_in_either_order_and_several_to_a_unit(tmp_path: Path):
    check_columns(units_of(tmp_path, [0, 0, 1, 2, 3], [-1, -1, 1, 1, -1], [1, 1, 1, 1, 1]), DPO())


@pytest.mark.parametrize(
    ("sequences", "advantages", "weights"),
    [
        ([0, 0], [1, 1], [1, 1]),  # nothing rejected
        ([0, 1], [1, 1], [1, 1]),  # both chosen
        ([0, 1], [1, -1], [1, 0]),  # the rejected one is masked
        ([0, 0, 1], [1, -1, -1], [1, 1, 1]),  # a sequence that is both
        ([0, 1, 2], [1, -1, 1], [1, 1, 1]),  # an odd one
    ],
)
def test_pairs_that_are_none_are_refused_by_their_unit(tmp_path: Path, sequences, advantages, weights):
    with pytest.raises(InvalidInput, match=r"unit 1: pair \d is not one chosen and one rejected"):
        check_columns(units_of(tmp_path, sequences, advantages, weights), DPO())


def test_an_advantage_that_is_no_sign_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInput, match=r"neither \+1 nor -1"):
        check_columns(units_of(tmp_path, [0, 1], [0.5, -1], [1, 1]), DPO())


def test_a_column_that_is_missing_is_never_taken_for_zeros(tmp_path: Path):
    units = units_of(tmp_path, [0, 1], [0.5, -1], [1, 1])
    check_columns(units, CrossEntropy())
    check_columns(units, Reinforce(old="trainer"))
    with pytest.raises(InvalidInput, match=r"no column old_logprob; old = sampler needs"):
        check_columns(units, Reinforce())
    with pytest.raises(InvalidInput, match="truncated_importance needs"):
        check_columns(units, PPO(old="trainer", truncated_importance=2.0))
    with pytest.raises(InvalidInput, match="off_policy_bound needs"):
        check_columns(units, PPO(old="trainer", off_policy_bound=0.1))


def test_a_logprob_that_is_no_number_is_refused_where_it_is_trained_on(tmp_path: Path):
    units = units_of(tmp_path / "live", [0, 1], [0.5, -1], [1, 1], old_logprob=[0.0, math.nan])
    with pytest.raises(InvalidInput, match="unit 1: old_logprob is no number for 1 trained tokens"):
        check_columns(units, Reinforce())
    check_columns(units, Reinforce(old="trainer"))
    check_columns(units_of(tmp_path / "dead", [0, 1], [0.5, -1], [1, 0], old_logprob=[0.0, math.nan]), Reinforce())


def test_absent_columns_are_told_apart_from_zeros(tmp_path: Path):
    """What nobody sent is no probability of one."""
    writer = UnitsWriter(tmp_path)
    writer.append(token_id=np.arange(3), hidden_index=np.arange(2), label=np.arange(2), weight=np.ones(2))
    writer.close()
    with Units(tmp_path) as units:
        assert np.isnan(units.read_bin(np.array([0])).old_logprob_N).all()
        assert "old_logprob" not in units.columns
        assert set(units.header.columns) < set(TOKEN_COLUMNS) | set(TARGET_COLUMNS)


def test_good_answers_beside_others_are_accepted_several_to_a_unit(tmp_path: Path):
    kto_units = units_of(tmp_path, [0, 0, 1, 2, 3], [-1, -1, 0, 1, 0], [1, 1, 0, 1, 0], first="answer")
    check_columns(kto_units, KTO())


@pytest.mark.parametrize(
    ("sequences", "advantages", "weights", "rule"),
    [
        ([0, 1], [1, -1], [1, 1], "an answer has advantage"),  # a pair
        ([0, 0], [1, 1], [1, 1], "example 0 is not one answer"),  # no answer to another prompt
        ([1, 1], [0, 0], [0, 0], "example 0 is not one answer"),  # nothing else
        ([0, 0, 1], [1, -1, 0], [1, 1, 0], "example 0 is not one answer"),  # good and bad
        ([0, 1], [1, 0], [0, 0], "an answer has advantage"),  # masked
    ],
)
def test_answers_that_are_none_are_refused_by_their_unit(tmp_path: Path, sequences, advantages, weights, rule):
    with pytest.raises(InvalidInput, match=f"unit 1: {rule}"):
        check_columns(units_of(tmp_path, sequences, advantages, weights, first="answer"), KTO())


def test_pairs_are_no_answers_and_the_reverse(tmp_path: Path):
    with pytest.raises(InvalidInput, match="unit 0: an answer has advantage"):
        check_columns(units_of(tmp_path / "pairs", [0, 1], [1, -1], [1, 1]), KTO())
    with pytest.raises(InvalidInput, match="unit 0"):
        check_columns(units_of(tmp_path / "answers", [0, 1], [1, 0], [1, 0], first="answer"), DPO())
