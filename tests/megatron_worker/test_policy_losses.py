"""Policy losses against their papers' formulas in float64, a token at a time, without torch (policy_reference.py)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from longshore.fields import Artifact
from longshore.losses import (
    CISPO,
    DRO,
    GMPO,
    GSPO,
    PPO,
    PRESETS,
    SAPO,
    Kl,
    PolicyLoss,
    Reinforce,
    TruncatedReinforce,
    preset,
)
from megatron_worker.engine import reported
from megatron_worker.losses import loss_function
from megatron_worker.losses.targets import divergence
from megatron_worker.training.batches import Sums
from tests.megatron_worker.policy_reference import ROWS, as_batch, gradient_of, k, ours, reference, rows

TERMS = {
    "plain": {},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "constant_length": {"aggregation": "constant_length", "constant": 50},
    "k1": {"kl": Kl(coefficient=0.3, estimator="k1")},
    "k2": {"kl": Kl(coefficient=0.3, estimator="k2")},
    "k3": {"kl": Kl(coefficient=0.3, estimator="k3"), "entropy_coefficient": 0.2},
    "k1-reward": {"kl": Kl(coefficient=0.3, estimator="k1", placement="reward")},
    "k3-reward": {"kl": Kl(coefficient=0.3, estimator="k3", placement="reward"), "aggregation": "sequence_mean"},
    "truncated": {"truncated_importance": 1.1, "old": "trainer"},
    "truncated-sequence": {"truncated_importance": 1.1, "importance_level": "sequence", "old": "trainer"},
    "masked": {"truncated_importance": 1.3, "importance_beyond": "mask", "importance_floor": 0.8, "old": "trainer"},
    "off-policy": {"off_policy_bound": 0.05},
    "off-policy-of-trainer": {"off_policy_bound": 0.05, "old": "trainer"},
}
ALGORITHMS = {
    "reinforce": (Reinforce, {}),
    "ppo": (PPO, {"clip_low": 0.1, "clip_high": 0.3}),
    "ppo-dual": (PPO, {"dual_clip": 1.5}),
    "cispo": (CISPO, {"clip_low": 0.2, "clip_high": 0.2}),
    "cispo-open": (CISPO, {"clip_high": 0.3}),
    "gspo": (GSPO, {"clip_low": 0.05, "clip_high": 0.1}),
    "gspo-sequence": (GSPO, {"clip_low": 0.05, "clip_high": 0.1, "level": "sequence"}),
    "gmpo": (GMPO, {"clip_low": 0.1, "clip_high": 0.2}),
    "sapo": (SAPO, {"tau_positive": 1.5, "tau_negative": 2.5}),
    "dro": (DRO, {"beta": 0.3}),
    "truncated-reinforce": (TruncatedReinforce, {"truncation": 1.1, "old_kl_coefficient": 0.3}),
}
WEIGHED = [name for name, terms in TERMS.items() if "truncated_importance" in terms]
MASKS = (
    "truncated-sequence",
    "masked",
    "off-policy",
    "off-policy-of-trainer",
)  # of the ratios, whatever the surrogate is: two tell enough
CASES = [
    (a, t)
    for a in ALGORITHMS
    for t in TERMS
    if (a != "dro" or t not in WEIGHED) and (a in ("ppo", "gmpo") or t not in MASKS)
]


def a_loss(algorithm: str, terms: str) -> PolicyLoss:
    kind, fields = ALGORITHMS[algorithm]
    return kind(**fields, **TERMS[terms])


@pytest.mark.parametrize(("algorithm", "terms"), CASES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), num_targets=st.integers(1, 14), spread=st.sampled_from([0.05, 0.4, 1.5]))
def test_loss_and_gradient_are_the_papers(algorithm: str, terms: str, seed: int, num_targets: int, spread: float):
    loss, columns = a_loss(algorithm, terms), rows(seed, num_targets, spread)
    value, weight, gradient = ours(loss, columns)
    logprob = columns["logprob"]
    expected, normaliser = reference(loss, columns, logprob, logprob)
    assert weight == pytest.approx(normaliser, abs=1e-12)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)
    by_formula = gradient_of(lambda moved: reference(loss, columns, moved, logprob)[0], logprob)
    np.testing.assert_allclose(gradient, by_formula, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_at_ratio_one_every_loss_has_the_policy_gradient(algorithm: str):
    """Where the policy is the old one, d loss / d log p = -w A, whatever is clipped elsewhere."""
    columns = rows(1, 30, constant_advantage=True)
    columns["old"] = columns["logprob"].copy()
    kind, fields = ALGORITHMS[algorithm]
    _, _, gradient = ours(kind(**fields, aggregation="token_mean"), columns)
    np.testing.assert_allclose(gradient, -columns["weight"] * columns["advantage"], rtol=1e-12)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_one_token_is_a_sequence_and_a_batch(algorithm: str):
    """Of a single token all aggregations are the same, and GSPO's ratio is the token's."""
    columns = rows(3, 1)
    columns["weight"][:] = 1.0
    kind, fields = ALGORITHMS[algorithm]
    by_token, by_sequence = (ours(kind(**fields, aggregation=how), columns) for how in ("token_mean", "sequence_mean"))
    assert by_token[0] == pytest.approx(by_sequence[0], rel=1e-12)
    assert by_token[2] == pytest.approx(by_sequence[2], rel=1e-12)
    if algorithm == "gspo":
        assert by_token[0] == pytest.approx(ours(PPO(clip_low=0.05, clip_high=0.1), columns)[0], rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [
        (1.0, 2.0, -2.0),  # on the upper bound: it still learns
        (1.0, 2.0 + 1e-6, 0.0),
        (1.0, 0.25, -0.25),  # a good token that has become too rare is not clipped
        (-1.0, 0.5, 0.5),  # on the lower bound
        (-1.0, 0.5 - 1e-6, 0.0),
        (-1.0, 4.0, 4.0),  # nor is a bad one that has become too common
        (-1.0, 4.0 + 1e-6, 0.0),  # but by the dual clip
    ],
)
def test_the_edges_of_ppos_clip(advantage: float, ratio: float, gradient: float):
    columns = rows(0, 1) | {"logprob": np.array([math.log(ratio)]), "old": np.zeros(1)}
    columns |= {"advantage": np.array([advantage]), "weight": np.ones(1)}
    got = ours(PPO(clip_low=0.5, clip_high=1.0, dual_clip=4.0), columns)[2][0]
    assert got == pytest.approx(gradient, rel=1e-12)


def test_gspo_is_the_gradient_of_one_ratio_for_a_sequence():
    """Equation 5 of the paper, differentiated by torch: s_i = exp(mean log ratio), no token's own ratio in it."""
    columns = rows(5, 12, spread=0.05, constant_advantage=True)
    columns["weight"][:] = 1.0
    logprob_N = torch.tensor(columns["logprob"], requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for s in np.unique(columns["sequence"]):
        own = torch.tensor(columns["sequence"] == s)
        ratio = (logprob_N[own] - torch.tensor(columns["old"])[own]).mean().exp()
        advantage = columns["advantage"][columns["sequence"] == s][0]
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.03) * advantage)
    total.backward()
    value, _, gradient = ours(GSPO(clip_low=0.02, clip_high=0.03), columns)
    assert value == pytest.approx(total.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, logprob_N.grad.numpy(), rtol=1e-9, atol=1e-15)


def test_gspo_by_sequence_has_the_gradient_of_the_whole_ratio_under_any_aggregation():
    """Where sequences are averaged both levels are the same; where tokens are, a token's part is its sequence's."""
    columns = rows(5, 12, spread=0.05, constant_advantage=True)
    one, other = (ours(GSPO(clip_low=0.5, clip_high=0.5, level=level), columns) for level in ("token", "sequence"))
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    np.testing.assert_allclose(one[2], other[2], rtol=1e-9, atol=1e-15)


def test_k1_as_reward_is_k2_as_loss_on_policy():
    """A known identity (Tang & Munos 2025, arXiv:2506.09477), and why k1 as a loss does not pull at all."""
    columns = rows(2, 40)
    columns["old"] = columns["logprob"].copy()
    plain, reward, loss, k1 = (
        ours(Reinforce(kl=kl), columns)[2]
        for kl in (
            None,
            Kl(coefficient=0.3, estimator="k1", placement="reward"),
            Kl(coefficient=0.3, estimator="k2"),
            Kl(coefficient=0.3, estimator="k1"),
        )
    )
    np.testing.assert_allclose(reward, loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(k1 - plain, 0.3 * columns["weight"], rtol=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_tell_the_divergence_of_near_distributions(estimator: str):
    """Over all outcomes of two near categorical distributions, weighed by the first: exact for k1 and k3."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.48, 0.33, 0.19])
    exact = float((p * np.log(p / q)).sum())
    estimate = sum(p[i] * k(estimator, math.log(p[i]), math.log(q[i])) for i in range(3))
    assert estimate == pytest.approx(exact, rel=0.03 if estimator == "k2" else 1e-9)
    columns = rows(0, 3)
    columns |= {"logprob": np.log(p), "old": np.log(p), "ref": np.log(q), "weight": p, "advantage": np.zeros(3)}
    value, weight, _ = ours(Reinforce(kl=Kl(coefficient=1.0, estimator=estimator)), columns)
    assert value / weight == pytest.approx(estimate, rel=1e-9)


@pytest.mark.parametrize(("algorithm", "terms"), CASES)
def test_masked_rows_count_for_nothing_whatever_they_hold(algorithm: str, terms: str):
    loss, columns = a_loss(algorithm, terms), rows(7, 25)
    masked = columns["weight"] == 0
    assert masked.any()
    ruined = {name: values.copy() for name, values in columns.items()}
    for name, value in (
        ("logprob", -np.inf),
        ("old", np.nan),
        ("ref", np.inf),
        ("sampler", np.nan),
        ("entropy", np.nan),
    ):
        ruined[name][masked] = value
    one, other = ours(loss, columns), ours(loss, ruined)
    assert one[:2] == other[:2]
    np.testing.assert_array_equal(one[2], other[2])
    assert not other[2][masked].any()


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_ratio_beyond_all_bounds_leaves_the_gradient_finite(algorithm: str):
    columns = rows(4, 6)
    columns["old"] = columns["logprob"] + np.array([200.0, -200.0] * 3)
    value, _, gradient = ours(a_loss(algorithm, "k3"), columns)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def in_bins(loss: PolicyLoss, columns: ROWS, bins: list[list[int]], dtype: torch.dtype) -> tuple[dict, np.ndarray]:
    """Metrics and gradient, the sequences dealt into bins and normalised once."""
    function = loss_function(loss)
    sums, gradient = Sums(function, torch.device("cpu")), np.zeros(len(columns["logprob"]))
    for sequences in bins:
        own = np.isin(columns["sequence"], sequences)
        scores, batch, logprob_N = as_batch({name: values[own] for name, values in columns.items()}, dtype)
        result = function.sums(scores, batch)
        result.loss.backward()
        gradient[own] = logprob_N.grad.double().numpy()
        sums.add(result.detached(), batch)
    totals = {name: value.item() for name, value in sums.totals.items()}
    return reported(totals) | {"mean": totals["loss"] / totals["weight"]}, gradient / totals["weight"]


@pytest.mark.parametrize(("algorithm", "terms"), CASES)
def test_the_result_does_not_depend_on_how_a_batch_is_cut(algorithm: str, terms: str):
    """In float32, to 1e-6: a sequence lies whole in a bin, sums add up, maxima are the greatest."""
    loss, columns = a_loss(algorithm, terms), rows(9, 60)
    sequences = sorted({int(s) for s in columns["sequence"]})
    whole, gradient = in_bins(loss, columns, [sequences], torch.float32)
    for bins in ([[s] for s in sequences], [sequences[::2], sequences[1::2]], [sequences[:1], [], sequences[1:]]):
        cut, parts = in_bins(loss, columns, bins, torch.float32)
        assert set(cut) == set(whole)
        for name in set(cut) - {"num_bins", "tokens"}:
            assert cut[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-6), name
        np.testing.assert_allclose(parts, gradient, rtol=1e-6, atol=1e-8)


def test_metrics_say_what_happened():
    columns = rows(11, 50)
    loss = PPO(
        clip_low=0.1, clip_high=0.2, dual_clip=1.5, kl=Kl(coefficient=0.1), truncated_importance=1.2, old="trainer"
    )
    metrics, _ = in_bins(loss, columns, [sorted({int(s) for s in columns["sequence"]})], torch.float64)
    w, a = columns["weight"], columns["advantage"]
    ratio, importance = np.exp(columns["logprob"] - columns["old"]), np.exp(columns["old"] - columns["sampler"])

    def mean(values: np.ndarray) -> float:
        return float((w * values).sum() / w.sum())

    def k3(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        return np.array([k("k3", p, q) for p, q in zip(log_p, log_q, strict=True)])

    expected = {
        "ratio_mean": mean(ratio),
        "ratio_max": ratio[w > 0].max(),
        "clip_high_fraction": mean((a > 0) & (ratio > 1.2)),
        "clip_low_fraction": mean((a < 0) & (ratio < 0.9)),
        "clip_dual_fraction": mean((a < 0) & (ratio > 1.5)),
        "kl_sampler_trainer": mean(k3(columns["sampler"], columns["old"])),
        "kl_old_new": mean(k3(columns["old"], columns["logprob"])),
        "kl_reference": mean(k3(columns["logprob"], columns["ref"])),
        "entropy": mean(columns["entropy"]),
        "importance_mean": mean(importance),
        "truncated_fraction": mean(importance > 1.2),
        "sequences": len(set(columns["sequence"][w > 0])),
    }
    assert set(expected) == set(metrics) - {"loss", "weight", "mean", "tokens", "target_tokens", "num_bins"}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9), name
    assert 0 < metrics["clip_dual_fraction"] < 1


def test_a_sampler_that_told_nothing_is_left_out_of_the_mismatch():
    columns = rows(11, 20)
    columns["sampler"][:10] = np.nan
    metrics, _ = in_bins(PPO(old="trainer"), columns, [list(range(20))], torch.float64)
    w = columns["weight"][10:]
    known = [k("k3", s, o) for s, o in zip(columns["sampler"][10:], columns["old"][10:], strict=True)]
    assert metrics["kl_sampler_trainer"] == pytest.approx((w * known).sum() / w.sum())
    columns["sampler"][:] = np.nan
    assert "kl_sampler_trainer" not in in_bins(PPO(old="trainer"), columns, [list(range(20))], torch.float64)[0]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_rank_without_bins_has_the_names_of_its_peers(algorithm: str):
    function = loss_function(a_loss(algorithm, "k3"))
    idle, busy = Sums(function, torch.device("cpu")), Sums(function, torch.device("cpu"))
    scores, batch, _ = as_batch(rows(0, 5))
    busy.add(function.sums(scores, batch).detached(), batch)
    assert set(idle.totals) == set(busy.totals)
    assert not any(idle.totals.values())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Reinforce(truncated_importance=2.0), "it would be ignored"),
        (lambda: PPO(importance_beyond="mask"), "give it, too"),
        (lambda: PPO(importance_floor=0.5, truncated_importance=2.0, old="trainer"), "belongs to"),
        (
            lambda: PPO(importance_floor=3.0, truncated_importance=2.0, importance_beyond="mask", old="trainer"),
            "lies below",
        ),
        (lambda: PPO(constant=10), "constant belongs to"),
        (lambda: PPO(aggregation="constant_length"), "which needs it"),
        (lambda: Kl(coefficient=0.0), "greater than 0"),
        (lambda: PPO(dual_clip=1.1), "above 1"),
        (lambda: DRO(truncated_importance=2.0, old="trainer"), "no meaning"),
        (lambda: GSPO(dual_clip=3.0), "dual_clip"),
        (lambda: Reinforce(clip_low=0.1), "clip_low"),
    ],
)
def test_a_coefficient_that_would_be_ignored_is_refused(make, rule: str):
    with pytest.raises(ValidationError, match=rule):
        make()


def test_an_entropy_bonus_asks_for_its_gradient_and_nothing_else_does():
    assert loss_function(PPO(entropy_coefficient=0.1)).outputs.entropy_gradient
    assert not loss_function(PPO()).outputs.entropy_gradient


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_losses_that_read_back(name):
    loss = preset(name, max_completion_tokens=128).loss
    assert type(loss).model_validate_json(loss.model_dump_json()) == loss
    assert getattr(loss, "constant", None) == ({"dr_grpo": 128, "rloo": 1}.get(name))


def test_a_reference_adapter_reads_back():
    kl = Kl(coefficient=0.1, reference=Artifact(uri="file:///a", sha256="0" * 64))
    assert Kl.model_validate_json(kl.model_dump_json()) == kl


def test_k3_pulls_towards_the_reference_however_far_away_it_is():
    """Its gradient by l is 1 - exp(l_ref - l): exact to 20 nats, of the same sign and finite beyond."""
    gap_N = torch.tensor([-60.0, -20.0, -1.0, 0.0, 1.0, 19.9, 20.0, 20.1, 25.0, 300.0])
    logprob_N = torch.zeros(len(gap_N), requires_grad=True)
    value_N = divergence(logprob_N, gap_N, "k3")
    value_N.sum().backward()
    exact_N = torch.zeros(len(gap_N), dtype=torch.float64, requires_grad=True)
    (torch.exp(gap_N.double() - exact_N) - 1 - (gap_N.double() - exact_N)).sum().backward()
    assert torch.isfinite(value_N).all()
    assert (value_N >= 0).all()
    assert torch.equal(logprob_N.grad.sign(), exact_N.grad.sign().float())
    near_N = gap_N <= 20
    assert torch.allclose(logprob_N.grad.double()[near_N], exact_N.grad[near_N], rtol=1e-5)
    assert (value_N.diff()[gap_N[1:] > 0] > 0).all(), "and it still grows there"
