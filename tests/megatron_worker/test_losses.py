"""Cross-entropy against torch's own, and what must not leak into it."""

import torch

from longshore.losses import CrossEntropy
from megatron_worker.engine import Scores
from megatron_worker.losses import loss_function
from megatron_worker.training.batches import Sums
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
