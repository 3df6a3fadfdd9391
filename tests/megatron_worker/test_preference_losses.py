"""Losses of preferences against their papers' formulas, written again with numpy in float64; and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_worker.engine import LossFunction, Scores
from megatron_worker.losses import check_columns, loss_function
from megatron_worker.training.batches import Sums
from shared.errors import InvalidInput
from shared.jobs.losses import DPO, KTO, PairObjective, reference_of
from shared.jobs.packed import Units, UnitsWriter
from tests.megatron_worker.test_dpo import Columns, ours, pairs, units_of
from tests.megatron_worker.training.test_batches import a_batch

OBJECTIVES = get_args(PairObjective)
BETA, GAMMA, SHARE = 0.3, 0.4, 0.1


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def of_pair(loss: DPO, ratio: dict[int, np.ndarray], logprob: dict[int, np.ndarray]) -> float:
    """A pair's loss. `ratio`: log p - log p_ref of the tokens of the chosen (1) and of the rejected answer (-1)."""
    nll = -logprob[1].mean()
    h, mean, p = ({s: f(of[s]) for s in (1, -1)} for f, of in ((np.sum, ratio), (np.mean, ratio), (np.mean, logprob)))
    delta = h[1] - h[-1]
    match loss.objective:
        case "sigmoid":
            value = -(1 - SHARE) * np.log(sigmoid(BETA * delta)) - SHARE * np.log(sigmoid(-BETA * delta))
        case "robust":
            noisy = [-np.log(sigmoid(BETA * delta)), -np.log(sigmoid(-BETA * delta))]
            value = ((1 - SHARE) * noisy[0] - SHARE * noisy[1]) / (1 - 2 * SHARE)
        case "hinge":
            value = max(0.0, 1 - BETA * delta)
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


def a_loss(objective: PairObjective, rpo_alpha: float) -> DPO:
    own = {"sigmoid": {"label_smoothing": SHARE}, "robust": {"label_smoothing": SHARE}, "simpo": {"gamma": GAMMA}}
    alpha = {} if objective == "orpo" else {"rpo_alpha": rpo_alpha}
    return DPO(objective=objective, beta=BETA, **own.get(objective, {}), **alpha)


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_pairs=st.integers(1, 5), rpo_alpha=st.sampled_from([0.0, 0.7]))
def test_value_and_gradient_are_the_papers(objective: PairObjective, seed: int, num_pairs: int, rpo_alpha: float):
    loss, columns = a_loss(objective, rpo_alpha), pairs(seed, num_pairs)
    columns["logprob"] = -np.abs(columns["logprob"]) - 0.01  # log-probabilities, as odds need them
    sums, gradient = ours(loss, columns)
    assert sums["weight"] == num_pairs
    assert sums["loss"] == pytest.approx(papers(loss, columns, columns["logprob"]), rel=1e-10)
    for n in range(len(gradient)):
        moved = np.zeros_like(gradient)
        moved[n] = 1e-6
        slope = papers(loss, columns, columns["logprob"] + moved) - papers(loss, columns, columns["logprob"] - moved)
        assert gradient[n] == pytest.approx(slope / 2e-6, rel=1e-6, abs=1e-7)


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
    batches = [
        dataclasses.replace(
            a_batch(weight=torch.tensor(c["weight"])),
            advantage_N=torch.tensor(c["advantage"]),
            ref_logprob_N=torch.tensor(c["ref"]),
            sequence_N=torch.tensor(c["sequence"].astype(np.int64)),
        )
        for c in bins
    ]

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
    for n in range(len(gradient)):
        moved = np.zeros_like(gradient)
        moved[n] = 1e-6
        up, down = (papers_kto(kto, columns, columns["logprob"] + sign * moved, held) for sign in (1, -1))
        assert gradient[n] == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)


def test_the_baseline_is_never_below_zero_and_comes_of_the_answers_to_other_prompts():
    columns = answers(6, 5)
    is_other = columns["advantage"] == 0
    columns["logprob"] = np.where(is_other, columns["ref"] - 0.5, columns["logprob"])
    assert in_bins(KTO(), [columns])[0]["kl:sum"] == 0
    columns["logprob"] = np.where(is_other, columns["ref"] + 0.5, columns["logprob"])
    assert in_bins(KTO(), [columns])[0]["kl:sum"] == pytest.approx(0.5 * is_other.sum())


def test_good_answers_beside_others_are_accepted_several_to_a_unit(tmp_path: Path):
    kto_units = kto_units_of(tmp_path, [0, 0, 1, 2, 3], [-1, -1, 0, 1, 0], [1, 1, 0, 1, 0])
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
        check_columns(kto_units_of(tmp_path, sequences, advantages, weights), KTO())


def test_pairs_are_no_answers_and_the_reverse(tmp_path: Path):
    with pytest.raises(InvalidInput, match="unit 0: an answer has advantage"):
        check_columns(units_of(tmp_path / "pairs", [0, 1], [1, -1], [1, 1]), KTO())
    with pytest.raises(InvalidInput, match="unit 0"):
        check_columns(kto_units_of(tmp_path / "answers", [0, 1], [1, 0], [1, 0]), DPO())


def kto_units_of(folder: Path, sequences: list[int], advantages: list[float], weights: list[float]) -> Units:
    """One good unit, then one of these targets."""
    writer = UnitsWriter(folder, ("token_id", "hidden_index", "label", "weight", "advantage", "sequence"))
    for s, a, w in (([0, 1], [1, 0], [1, 0]), (sequences, advantages, weights)):
        ids = np.arange(len(s) + 1)
        given = {"sequence": np.array(s), "advantage": np.array(a), "weight": np.array(w)}
        writer.append(token_id=ids, hidden_index=ids[:-1], label=ids[1:], **given)
    writer.close()
    return Units(folder)
