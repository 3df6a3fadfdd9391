"""DPO against the paper's equation in float64, pairs cut anyhow; and pairs that are none, refused."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.losses import PPO, CrossEntropy, Reinforce
from megatron_worker.engine import Scores
from megatron_worker.losses import check_columns, loss_function
from shared.errors import InvalidInput
from shared.jobs.losses import DPO
from shared.jobs.packed import TARGET_COLUMNS, TOKEN_COLUMNS, Units, UnitsWriter
from tests.megatron_worker.training.test_batches import a_batch

Columns = dict[str, np.ndarray]


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
    batch = dataclasses.replace(
        a_batch(weight=torch.tensor(c["weight"])),
        advantage_N=torch.tensor(c["advantage"]),
        ref_logprob_N=torch.tensor(c["ref"]),
        sequence_N=torch.tensor(c["sequence"].astype(np.int64)),
    )
    sums = loss_function(dpo).sums(Scores(logprob_N), batch)
    sums.loss.backward()
    return {name: value.item() for name, value in sums.detached().items()}, logprob_N.grad.numpy()


def papers(dpo: DPO, c: Columns, logprob: np.ndarray) -> float:
    """Equation 7, a pair at a time."""
    total = 0.0
    for pair in sorted({int(s) // 2 for s in c["sequence"]}):
        own = (c["sequence"] // 2 == pair) & (c["weight"] > 0)
        chosen, rejected = own & (c["advantage"] > 0), own & (c["advantage"] < 0)
        log_ratio = logprob - c["ref"]
        margin = dpo.beta * (log_ratio[chosen].sum() - log_ratio[rejected].sum())
        total -= (1 - dpo.label_smoothing) * math.log(1 / (1 + math.exp(-margin)))
        total -= dpo.label_smoothing * math.log(1 / (1 + math.exp(margin)))
    return total


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_pairs=st.integers(1, 6), smoothing=st.sampled_from([0.0, 0.1]))
def test_loss_and_gradient_are_the_papers(seed: int, num_pairs: int, smoothing: float):
    dpo, columns = DPO(beta=0.3, label_smoothing=smoothing), pairs(seed, num_pairs)
    sums, gradient = ours(dpo, columns)
    assert sums["weight"] == num_pairs
    assert sums["loss"] == pytest.approx(papers(dpo, columns, columns["logprob"]), rel=1e-12)
    for n in range(len(gradient)):
        moved = np.zeros_like(gradient)
        moved[n] = 1e-6
        slope = papers(dpo, columns, columns["logprob"] + moved) - papers(dpo, columns, columns["logprob"] - moved)
        assert gradient[n] == pytest.approx(slope / 2e-6, rel=1e-6, abs=1e-8)


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


def test_pairs_add_up_however_they_are_cut():
    columns = pairs(3, 6)
    whole, gradient = ours(DPO(), columns)
    total, parts = 0.0, np.zeros_like(gradient)
    for pair in range(6):
        own = columns["sequence"] // 2 == pair
        sums, parts[own] = ours(DPO(), {name: values[own] for name, values in columns.items()})
        total += sums["loss"]
    assert total == pytest.approx(whole["loss"], rel=1e-12)
    np.testing.assert_allclose(parts, gradient, rtol=1e-12)


def units_of(folder: Path, sequences: list[int], advantages: list[float], weights: list[float], **more: list) -> Units:
    """One good unit, then one of these targets."""
    writer = UnitsWriter(folder, ("token_id", "hidden_index", "label", "weight", "advantage", "sequence", *more))
    for own in ({"sequence": [0, 1], "advantage": [1, -1], "weight": [1, 1]}, None):
        c = own or {"sequence": sequences, "advantage": advantages, "weight": weights}
        count = len(c["sequence"])
        extra = {name: np.zeros(2) if own else np.array(values) for name, values in more.items()}
        ids = np.arange(count + 1)
        writer.append(
            token_id=ids,
            hidden_index=ids[:-1],
            label=ids[1:],
            **{name: np.array(values) for name, values in c.items()},
            **extra,
        )
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
