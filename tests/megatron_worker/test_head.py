"""The head against float64 log_softmax: values, gradients, chunks, shards, padding, memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_worker.engine import Outputs
from megatron_worker.forwards import logits_of, ranked
from megatron_worker.head.logprobs import VocabShard, policy, score_targets, whole_vocabulary
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.head.torch_tiles import TileSize
from shared.errors import InvalidInput
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.live_bytes import LiveBytes

NUM_TARGETS, VOCAB_SIZE, HIDDEN_SIZE = 37, 101, 12


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_NH, weight_VH, label_N, and a gradient to send back."""
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(NUM_TARGETS, HIDDEN_SIZE, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64).to(dtype)
    label_N = torch.randint(0, VOCAB_SIZE, (NUM_TARGETS,), generator=generator)
    grad_N = torch.randn(NUM_TARGETS, generator=generator, dtype=torch.float64)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), label_N, grad_N


def all_logprobs(hidden_NH: Tensor, weight_VH: Tensor, temperature: float = 1.0, cap: float | None = None) -> Tensor:
    logit_NV = hidden_NH @ weight_VH.t()
    capped_NV = logit_NV if cap is None else cap * (logit_NV / cap).tanh()
    return (capped_NV / temperature).log_softmax(dim=-1)


def reference(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    label_N: Tensor,
    grad_N: Tensor,
    temperature: float = 1.0,
    by_entropy: float = 0.0,
    cap: float | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability, entropy, and the gradients of grad_N * (log-probability + by_entropy * entropy), in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden_NH, weight_VH))
    logprob_NV = all_logprobs(hidden, weight, temperature, cap)
    logprob_N = logprob_NV.gather(1, label_N[:, None])[:, 0]
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(dim=-1)
    ((logprob_N + by_entropy * entropy_N) * grad_N).sum().backward()
    return logprob_N.detach(), entropy_N.detach(), hidden.grad, weight.grad


SETTINGS = {  # and float32's tolerance
    "plain": ({}, 5e-6),
    "entropy": ({"by_entropy": 0.7}, 2e-5),
    "cold": ({"by_entropy": 0.7, "temperature": 0.25}, 1e-4),
    "warm": ({"by_entropy": 0.7, "temperature": 3.0}, 1e-4),
    "capped": ({"by_entropy": 0.7, "cap": 2.0}, 2e-5),  # such that all logits feel it
    "capped and cold": ({"by_entropy": 0.7, "cap": 2.0, "temperature": 0.5}, 2e-5),
}


@pytest.mark.parametrize("tile", [(1, 101), (5, 16), (37, 8), (256, 2048)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_are_those_of_log_softmax(dtype: torch.dtype, tile: tuple[int, int], name: str):
    (how, tolerance), given = SETTINGS[name], inputs(dtype)
    hidden_NH, weight_VH, label_N, grad_N = given
    temperature, by_entropy = how.get("temperature", 1.0), how.get("by_entropy", 0.0)
    outputs = Outputs(entropy=True, entropy_gradient=by_entropy > 0, temperature=temperature, top_k=3)
    shard = VocabShard(0, VOCAB_SIZE, VOCAB_SIZE, logit_cap=how.get("cap"))
    scores = score_targets(hidden_NH, weight_VH, label_N, outputs, shard, TileSize(*tile))
    ((scores.logprob_N + by_entropy * scores.entropy_N) * grad_N).sum().backward()
    found = (scores.logprob_N, scores.entropy_N, hidden_NH.grad, weight_VH.grad)
    tolerance = 1e-12 if dtype == torch.float64 else tolerance
    for ours, theirs in zip(found, reference(*given, **how), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    logprob_NV = all_logprobs(hidden_NH.detach().double(), weight_VH.detach().double(), temperature, how.get("cap"))
    assert (scores.top_logprob_NK - logprob_NV.topk(3).values).abs().max() <= (1e-5 if temperature >= 0.5 else 1e-4)


@pytest.mark.parametrize("tile", [(5, 16), (256, 2048), (9, 16, 40)])
def test_an_adapter_beside_the_head_is_more_of_its_weight(tile: tuple[int, ...]):
    """Its values and gradients, the entropy's and a temperature's too, are those of W + B A; so of three parts of W."""
    hidden_NH, weight_VH, label_N, grad_N = inputs(torch.float64)
    a_RH, b_VR = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, HIDDEN_SIZE), (VOCAB_SIZE, 3)))
    given = [x.detach().clone().requires_grad_() for x in (hidden_NH, a_RH, b_VR)]
    whole = [x.detach().clone().requires_grad_() for x in (hidden_NH, a_RH, b_VR)]
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=1.7, top_k=3)
    beside, shard = LmHeadLora(given[0] @ given[1].t() * 0.5, given[2]), whole_vocabulary(VOCAB_SIZE)
    found = score_targets(given[0], weight_VH.detach(), label_N, outputs, shard, TileSize(*tile), beside=beside)
    merged_VH = weight_VH.detach() + 0.5 * whole[2] @ whole[1]
    logprob_NV = all_logprobs(whole[0], merged_VH, 1.7)
    logprob_N = logprob_NV.gather(1, label_N[:, None])[:, 0]
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(dim=-1)
    for scored in ((found.logprob_N, found.entropy_N), (logprob_N, entropy_N)):
        ((scored[0] + 0.7 * scored[1]) * grad_N).sum().backward()
    torch.testing.assert_close(found.logprob_N, logprob_N, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.top_id_NK, logprob_NV.topk(3).indices)
    for ours, theirs in zip(given, whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_no_copy_of_the_output_embedding_is_made_beside_an_adapter():
    """Of 150,000 rows: part by part."""
    weight_VH, b_VR = torch.randn(150_000, 64), torch.zeros(150_000, 2, requires_grad=True)
    hidden_NH, label_N = torch.randn(4, 64, requires_grad=True), torch.arange(4)
    with LiveBytes() as live:
        beside = LmHeadLora(hidden_NH[:, :2] * 1, b_VR)
        scores = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(150_000), beside=beside)
        assert live.take_peak() < weight_VH.nbytes / 3
        scores.logprob_N.sum().backward()
    assert live.peak < weight_VH.nbytes / 3 + 2 * b_VR.nbytes


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_every_head_caps_logits_and_divides_them(temperature: float):
    """Scores of one label, of several, the likeliest ids and whole logits, with their gradients."""
    hidden_NH, weight_VH, label_N, grad_N = inputs(torch.float64)
    shard = VocabShard(0, VOCAB_SIZE, VOCAB_SIZE, logit_cap=2.0, logit_divisor=3.0)
    hidden, weight = (t.detach().requires_grad_() for t in (hidden_NH, weight_VH))
    logit_NV = 2.0 * (hidden @ weight.t() / 2.0).tanh() / 3.0
    logprob_NV = (logit_NV / temperature).log_softmax(dim=-1)
    label_NK = torch.stack([label_N, (label_N + 1) % VOCAB_SIZE], dim=1)
    expected_NK = logprob_NV.gather(1, label_NK)
    found_NK, top_id_NK, top_logprob_NK = ranked(hidden_NH, weight_VH, label_NK, 3, shard, temperature)
    torch.testing.assert_close(found_NK, expected_NK)
    torch.testing.assert_close(top_logprob_NK, logprob_NV.gather(1, top_id_NK))
    torch.testing.assert_close(logits_of(hidden_NH, weight_VH, shard), logit_NV)
    scores = score_targets(hidden_NH, weight_VH, label_N, Outputs(temperature=temperature), shard)
    torch.testing.assert_close(scores.logprob_N, expected_NK[:, 0])
    own_N = scores.logprob_N + found_NK.sum(dim=1) + logits_of(hidden_NH, weight_VH, shard)[:, 5]
    (own_N * grad_N).sum().backward()
    ((expected_NK[:, 0] + expected_NK.sum(dim=1) + logit_NV[:, 5]) * grad_N).sum().backward()
    for ours, theirs in ((hidden_NH, hidden), (weight_VH, weight)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


def test_capped_logits_without_kernels_are_refused_where_kernels_are_strict():
    hidden_NH, weight_VH, label_N, _ = inputs()
    shard = VocabShard(0, VOCAB_SIZE, VOCAB_SIZE, logit_cap=2.0)
    with policy("strict"), pytest.raises(InvalidInput, match="'head' cannot be used"):
        score_targets(hidden_NH, weight_VH, label_N, Outputs(), shard)


def test_a_temperature_does_not_round_bfloat16_once_more():
    """Logits are divided in float32: at a power of two, exactly what dividing the hidden states gives."""
    hidden_NH, weight_VH, label_N, _ = inputs(torch.bfloat16)
    shard, outputs = whole_vocabulary(VOCAB_SIZE), Outputs(temperature=2.0)
    divided = score_targets(hidden_NH / 2, weight_VH, label_N, Outputs(), shard)
    assert torch.equal(score_targets(hidden_NH, weight_VH, label_N, outputs, shard).logprob_N, divided.logprob_N)


def test_bfloat16_is_as_close_as_its_logits_are():
    """The reference sees the same bfloat16 inputs. Logits are rounded once, by 2^-9 of themselves: the label's own, and
    those in the normaliser."""
    hidden_NH, weight_VH, label_N, grad_N = inputs(torch.bfloat16)
    logprob_N, _, by_hidden, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N)
    scores = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(VOCAB_SIZE), TileSize(8, 32))
    assert scores.logprob_N.dtype == torch.float32
    scores.logprob_N.backward(grad_N.float())
    largest_logit = float((hidden_NH.double() @ weight_VH.double().t()).abs().max())
    torch.testing.assert_close(scores.logprob_N.double(), logprob_N, rtol=0.0, atol=2 * 2**-9 * largest_logit)
    for ours, theirs in ((hidden_NH.grad, by_hidden), (weight_VH.grad, by_weight)):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 0.02


def test_large_logits_stay_finite():
    hidden_NH, weight_VH, label_N, grad_N = inputs()
    large_NH = (hidden_NH.detach() * 1e4).requires_grad_()
    logprob_N, _, _, _ = reference(large_NH, weight_VH, label_N, grad_N)
    scores = score_targets(large_NH, weight_VH, label_N, Outputs(), whole_vocabulary(VOCAB_SIZE))
    torch.testing.assert_close(scores.logprob_N.double(), logprob_N, rtol=1e-5, atol=0.1)


def test_no_targets_give_empty_scores_and_zero_gradients():
    hidden_NH, weight_VH, label_N, _ = inputs()
    none_NH = hidden_NH.detach()[:0].requires_grad_()
    scores = score_targets(none_NH, weight_VH, label_N[:0], Outputs(entropy=True), whole_vocabulary(VOCAB_SIZE))
    assert scores.logprob_N.shape == scores.entropy_N.shape == (0,)
    scores.logprob_N.sum().backward()
    assert not weight_VH.grad.any()


def shard_of(weight_VH: Tensor, rows_per_rank: int) -> tuple[Tensor, VocabShard, Callable[[Tensor], Tensor]]:
    """This rank's rows, with padding as tempting as can be behind the last ones; and its rows of a whole gradient."""
    own = slice(dist.get_rank() * rows_per_rank, (dist.get_rank() + 1) * rows_per_rank)
    padding = weight_VH.new_full((rows_per_rank * dist.get_world_size() - len(weight_VH), weight_VH.shape[1]), 50.0)
    shard_VH = torch.cat([weight_VH.detach(), padding])[own].clone().requires_grad_()
    shard = VocabShard(own.start, rows_per_rank, len(weight_VH), group=dist.group.WORLD)
    return shard_VH, shard, lambda whole: torch.cat([whole, whole.new_zeros(padding.shape)])[own]


def check_shards() -> None:
    """The last shard padded; and again with a second shard that is all padding. Each shard has maxima of its own."""
    for (rows_per_rank, tile), (temperature, by_entropy) in product(
        ((51, TileSize(10, 16)), (VOCAB_SIZE, TileSize(256, 2048))), ((1.0, 0.0), (1.0, 0.7), (0.4, 0.7))
    ):
        hidden_NH, weight_VH, label_N, grad_N = inputs(torch.float64)
        *expected, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N, temperature, by_entropy)
        shard_VH, shard, own_rows = shard_of(weight_VH, rows_per_rank)
        outputs = Outputs(entropy=True, entropy_gradient=by_entropy > 0, temperature=temperature)
        scores = score_targets(hidden_NH, shard_VH, label_N, outputs, shard, tile)
        ((scores.logprob_N + by_entropy * scores.entropy_N) * grad_N).sum().backward()
        found = (scores.logprob_N, scores.entropy_N, hidden_NH.grad, shard_VH.grad)
        for ours, theirs in zip(found, (*expected, own_rows(by_weight)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_two_ranks_with_a_shard_each_agree_with_one():
    on_ranks(2, check_shards)


def test_peak_memory_at_a_large_vocabulary():
    """At most a fifth of what the logits alone would take; log_softmax holds three of their size."""
    num_targets, vocab_size = 512, 151_936
    command = [sys.executable, "-m", "benchmarks.head_memory", "--way", "longshore", "--hidden", "32"]
    command += ["--targets", str(num_targets), "--vocabulary", str(vocab_size)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0 < 1e9 * result["peak_gb"] <= 4 * num_targets * vocab_size / 5
