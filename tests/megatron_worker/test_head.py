"""The head by both of its ways, kernels and torch, against float64: values, gradients, likeliest ids, parts, shards.

Kernels run on CUDA if there is some, else interpreted; test_kernels.py has them by themselves. Torch's way is run on
the CPU.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_worker.engine import Outputs
from megatron_worker.forwards import logits_of, ranked
from megatron_worker.head import torch_tiles
from megatron_worker.head.logprobs import VocabShard, policy, score_targets, whole_vocabulary
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.head.torch_tiles import TileSize
from shared.errors import InvalidInput
from tests.depth import drawn
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.live_bytes import LiveBytes

# The interpreter computes both sides of every choice, and numpy warns of the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = {"torch": "cpu", "strict": DEVICE}
NUM_TARGETS, VOCAB_SIZE, HIDDEN_SIZE = 37, 101, 12


def inputs(
    dtype: torch.dtype = torch.float32,
    num_targets: int = NUM_TARGETS,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = HIDDEN_SIZE,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_NH, weight_VH of logits of spread 2, label_N, and a gradient to send back."""
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(num_targets, hidden_size, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64)
    label_N = torch.randint(0, vocab_size, (num_targets,), generator=generator)
    grad_N = torch.randn(num_targets, generator=generator, dtype=torch.float64)
    hidden_NH *= 2 * hidden_size**-0.5
    leaves = (x.to(device, dtype).requires_grad_() for x in (hidden_NH, weight_VH))
    return *leaves, label_N.to(device), grad_N.to(device)


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


def close(ours: Tensor, theirs: Tensor, tolerance: float, scale: Tensor | None = None) -> None:
    """All in all. `scale`: what was added up, without signs, where a sum may cancel."""
    assert ours.shape == theirs.shape
    bound = tolerance * ((theirs if scale is None else scale).double().norm() + 1e-3)
    assert (ours.double() - theirs.double()).norm() <= bound


SETTINGS = {  # and float32's tolerance
    "plain": ({}, 5e-6),
    "entropy": ({"by_entropy": 0.7}, 2e-5),
    "cold": ({"by_entropy": 0.7, "temperature": 0.25}, 1e-4),
    "warm": ({"by_entropy": 0.7, "temperature": 3.0}, 1e-4),
    "capped": ({"by_entropy": 0.7, "cap": 2.0}, 2e-5),  # such that all logits feel it
    "capped and cold": ({"by_entropy": 0.7, "cap": 2.0, "temperature": 0.5}, 2e-5),
}


@dataclass(frozen=True)
class Scored:
    """What a way finds, of hidden states and of a weight that has gradients."""

    logprob_N: Tensor
    entropy_N: Tensor
    by_hidden: Tensor
    by_weight: Tensor
    top_id_NK: Tensor
    top_logprob_NK: Tensor

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return self.logprob_N, self.entropy_N, self.by_hidden, self.by_weight


def scored(
    way: str,
    given: tuple[Tensor, ...],
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    by_entropy: float = 0.0,
    top_k: int = 3,
    tile: TileSize | None = None,
) -> Scored:
    hidden_NH, weight_VH, label_N, grad_N = given
    outputs = Outputs(entropy=True, entropy_gradient=by_entropy > 0, temperature=temperature, top_k=top_k)
    with policy(way):
        scores = score_targets(hidden_NH, weight_VH, label_N, outputs, shard, tile)
        ((scores.logprob_N + by_entropy * scores.entropy_N) * grad_N).sum().backward()
    found = (scores.logprob_N.detach(), scores.entropy_N.detach(), hidden_NH.grad, weight_VH.grad)
    return Scored(*found, scores.top_id_NK, scores.top_logprob_NK)


@pytest.mark.parametrize("tile", [(1, 101), (5, 16), (37, 8), (256, 2048)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_are_those_of_log_softmax(dtype: torch.dtype, tile: tuple[int, int], name: str):
    (how, tolerance), given = SETTINGS[name], inputs(dtype)
    shard = VocabShard(0, VOCAB_SIZE, VOCAB_SIZE, logit_cap=how.get("cap"))
    asked = {setting: value for setting, value in how.items() if setting != "cap"}
    found = scored("torch", given, shard, tile=TileSize(*tile), **asked)
    tolerance = 1e-12 if dtype == torch.float64 else tolerance
    for ours, theirs in zip(found.numbers, reference(*given, **how), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    temperature = how.get("temperature", 1.0)
    exact_NV = all_logprobs(*(x.detach().double() for x in given[:2]), temperature, how.get("cap"))
    assert (found.top_logprob_NK - exact_NV.topk(3).values).abs().max() <= (1e-5 if temperature >= 0.5 else 1e-4)


@pytest.mark.parametrize("temperature", drawn([1.0, 0.6], 1))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_kernels_and_torch_find_the_same(dtype, tolerance, temperature):
    of = {}
    for way, device in DEVICES.items():
        given = inputs(dtype, 70, 301, 72, device=device)
        of[way] = scored(way, given, whole_vocabulary(301), temperature=temperature, by_entropy=0.7)
        assert of[way].logprob_N.dtype == of[way].top_logprob_NK.dtype == torch.float32
    truth = reference(*given, temperature, 0.7)
    for ours, theirs, true in zip(of["strict"].numbers, of["torch"].numbers, truth, strict=True):
        close(ours, true, tolerance)
        close(ours, theirs.to(ours.device), 2 * tolerance)
    if dtype == torch.bfloat16:  # torch rounds the logits, the kernels do not
        close(of["strict"].logprob_N, truth[0], 1e-5)
        assert (of["torch"].logprob_N.to(DEVICE) - truth[0]).norm() > 1e-4 * truth[0].norm()


@pytest.mark.parametrize(
    ("way", "tile", "tolerance"),
    [
        *(("torch", tile, 1e-12) for tile in ((5, 16), (256, 2048), (9, 16, 40))),
        ("strict", (9, 50, 40), 1e-5),
    ],
)
def test_an_adapter_beside_the_head_is_more_of_its_weight(way: str, tile: tuple[int, ...], tolerance: float):
    """Its values and gradients, the entropy's and a temperature's too, are those of W + B A; so of three parts of W."""
    dtype, device = torch.float64 if way == "torch" else torch.float32, DEVICES[way]
    hidden_NH, weight_VH, label_N, grad_N = inputs(dtype, device=device)
    label_N[0] = 95
    generator = torch.Generator().manual_seed(1)
    a_RH, b_VR = (torch.randn(*shape, generator=generator) for shape in ((3, HIDDEN_SIZE), (VOCAB_SIZE, 3)))
    given = [x.detach().to(device, dtype).requires_grad_() for x in (hidden_NH, a_RH, b_VR)]
    whole = [x.detach().double().requires_grad_() for x in given]
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=1.7, top_k=3)
    beside, shard = LmHeadLora(given[0] @ given[1].t() * 0.5, given[2]), whole_vocabulary(VOCAB_SIZE)
    with policy(way):
        found = score_targets(given[0], weight_VH.detach(), label_N, outputs, shard, TileSize(*tile), beside=beside)
        ((found.logprob_N + 0.7 * found.entropy_N) * grad_N).sum().backward()
    merged_VH = weight_VH.detach().double() + 0.5 * whole[2] @ whole[1]
    logprob_NV = all_logprobs(whole[0], merged_VH, 1.7)
    logprob_N = logprob_NV.gather(1, label_N[:, None])[:, 0]
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(dim=-1)
    ((logprob_N + 0.7 * entropy_N) * grad_N).sum().backward()
    close(found.logprob_N, logprob_N, tolerance)
    assert torch.equal(found.top_id_NK, logprob_NV.topk(3).indices)
    close(found.top_logprob_NK, logprob_NV.topk(3).values, 1e-5)
    for ours, theirs in zip(given, whole, strict=True):
        close(ours.grad, theirs.grad, tolerance)


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


@pytest.mark.parametrize("way", DEVICES)
def test_large_logits_stay_finite_and_a_nan_stays_its_own(way: str):
    hidden_NH, weight_VH, label_N, grad_N = inputs(device=DEVICES[way])
    large_NH = hidden_NH.detach() * 1e4
    logprob_N = reference(large_NH, weight_VH, label_N, grad_N)[0]
    large_NH[3] = torch.nan
    with policy(way):
        found = score_targets(
            large_NH.requires_grad_(), weight_VH, label_N, Outputs(entropy=True), whole_vocabulary(VOCAB_SIZE)
        )
        others = torch.arange(NUM_TARGETS, device=large_NH.device) != 3
        found.logprob_N[others].sum().backward()
    assert found.logprob_N.isnan().nonzero().tolist() == [[3]]
    assert found.entropy_N[3].isnan()
    torch.testing.assert_close(found.logprob_N[others].double(), logprob_N[others], rtol=1e-5, atol=0.1)
    assert large_NH.grad[others].isfinite().all()


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


def check_shards(way: str) -> None:
    """The last shard padded; and again with a second shard that is all padding. Each shard has maxima of its own.

    Of kernels, small whole numbers and a few of them: many logits are equal, within a shard and between shards.
    """
    sizes = ((51, TileSize(10, 16)), (VOCAB_SIZE, TileSize(256, 2048)))
    dtypes = ((torch.float64, 1e-12),) if way == "torch" else ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))
    for (rows_per_rank, tile), (dtype, tolerance), (temperature, by_entropy) in product(
        sizes, dtypes, ((1.0, 0.0), (1.0, 0.7), (0.4, 0.7))
    ):
        hidden_NH, weight_VH, label_N, grad_N = inputs(dtype)
        if way == "strict":
            hidden_NH, weight_VH = (x.detach().sign().requires_grad_() for x in (hidden_NH, weight_VH))
        *expected, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N, temperature, by_entropy)
        shard_VH, shard, own_rows = shard_of(weight_VH, rows_per_rank)
        given = hidden_NH, shard_VH, label_N, grad_N
        found = scored(way, given, shard, temperature=temperature, by_entropy=by_entropy, top_k=7, tile=tile)
        for ours, theirs in zip(found.numbers, (*expected, own_rows(by_weight)), strict=True):
            close(ours, theirs, tolerance)
        logit_NV = hidden_NH.detach().double() @ weight_VH.detach().double().t() / temperature
        assert torch.equal(found.top_id_NK, logit_NV.sort(dim=1, descending=True, stable=True).indices[:, :7])
        close(found.top_logprob_NK, logit_NV.log_softmax(1).gather(1, found.top_id_NK), 1e-5)


@pytest.mark.parametrize("way", DEVICES)
def test_two_ranks_with_a_shard_each_agree_with_one(way: str):
    """Over gloo: two ranks may not share one device with NCCL."""
    if way == "strict" and DEVICE == "cuda":
        pytest.skip("its ranks run on the CPU, interpreted, and Triton is not interpreted in this session")
    on_ranks(2, check_shards, way)


def test_padded_rows_never_win():
    hidden_NH, weight_VH, label_N, grad_N = inputs(device=DEVICE)
    padding = torch.full((11, HIDDEN_SIZE), 100.0, device=DEVICE)
    padded_VH = torch.cat([weight_VH.detach(), padding]).requires_grad_()
    shard = VocabShard(first=0, size=VOCAB_SIZE + 11, vocab_size=VOCAB_SIZE)
    found = scored("strict", (hidden_NH, padded_VH, label_N, grad_N), shard, top_k=VOCAB_SIZE)
    logprob_N, entropy_N, _, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N)
    close(found.logprob_N, logprob_N, 1e-5)
    close(found.entropy_N, entropy_N, 1e-5)
    close(found.by_weight[:VOCAB_SIZE], by_weight, 1e-5)
    assert not found.by_weight[VOCAB_SIZE:].any()
    assert found.top_id_NK.sort().values.tolist() == [list(range(VOCAB_SIZE))] * NUM_TARGETS


def test_peak_memory_at_a_large_vocabulary():
    """At most a fifth of what the logits alone would take; log_softmax holds three of their size."""
    num_targets, vocab_size = 512, 151_936
    command = [sys.executable, "-m", "benchmarks.head_memory", "--way", "longshore", "--hidden", "32"]
    command += ["--targets", str(num_targets), "--vocabulary", str(vocab_size)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0 < 1e9 * result["peak_gb"] <= 4 * num_targets * vocab_size / 5


# The k greatest logits: keys in the order of logits and ids, however a row is cut.

logits = st.floats(width=32, allow_nan=False, allow_infinity=False)
ids = st.integers(0, (1 << 31) - 1)


@given(st.tuples(logits, ids), st.tuples(logits, ids))
def test_a_key_is_greater_when_the_logit_is_or_when_it_is_equal_and_the_id_lower(one, other):
    keys = torch_tiles.pack_keys(torch.tensor([one[0], other[0]]), torch.tensor([one[1], other[1]]))
    assert (keys[0] > keys[1]).item() == ((one[0], -one[1]) > (other[0], -other[1]))
    value, id = torch_tiles.unpack_keys(keys)
    assert value.tolist() == [one[0], other[0]]
    assert id.tolist() == [one[1], other[1]]


@settings(max_examples=50, deadline=None)
@given(
    row=st.lists(st.sampled_from([-torch.inf, -1.5, -0.0, 0.0, 2.0, 2.0**127]), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    k=st.integers(1, 12),
)
def test_cutting_a_row_changes_nothing(row, cuts, k):
    """Against a stable sort; parts of any length, shorter than k and empty ones too."""
    logit_1V = torch.tensor([row])
    bounds = [0, *sorted(min(cut, len(row)) for cut in cuts), len(row)]
    parts = [
        torch_tiles.shifted(torch_tiles.of_logits(logit_1V[:, begin:end], k), begin)
        for begin, end in itertools.pairwise(bounds)
        if end > begin
    ]
    value_1K, id_1K = torch_tiles.unpack_keys(torch_tiles.greatest(torch.cat(parts, dim=1), k))
    expected = sorted((-logit, id) for id, logit in enumerate(row) if logit != -torch.inf)[:k]
    expected += [(torch.inf, -1)] * (k - len(expected))
    assert value_1K[0].tolist() == [-negated for negated, _ in expected]
    assert id_1K[0].tolist() == [id for _, id in expected]


@pytest.mark.parametrize("way", DEVICES)
@pytest.mark.parametrize("k", [1, 6, 90])
def test_of_equally_likely_ids_the_lower_comes_first(way, k):
    """Whole numbers, so that many logits are equal; k up to the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = (torch.randint(-1, 2, (n, 8), generator=generator).float().to(DEVICE) for n in (9, 90))
    label_N = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    outputs = Outputs(logprob=False, temperature=2.0, top_k=k)
    with policy(way):
        scores = score_targets(hidden_NH, weight_VH, label_N, outputs, whole_vocabulary(90))
    logprob_NV = (hidden_NH @ weight_VH.t() / 2).double().log_softmax(1)
    expected = (hidden_NH @ weight_VH.t()).sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(scores.top_id_NK, expected)
    torch.testing.assert_close(scores.top_logprob_NK.double(), logprob_NV.gather(1, expected), rtol=1e-5, atol=1e-5)
    assert scores.logprob_N is None
    assert scores.entropy_N is None


def test_top_k_are_constants_and_leave_the_logprobs_as_they_are():
    hidden_NH = torch.randn(5, 8, device=DEVICE).requires_grad_()
    weight_VH, label_N = torch.randn(20, 8, device=DEVICE), torch.arange(5, device=DEVICE)
    with_k = score_targets(hidden_NH, weight_VH, label_N, Outputs(top_k=4), whole_vocabulary(20))
    without = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(20))
    assert torch.equal(with_k.logprob_N, without.logprob_N)
    assert not with_k.top_logprob_NK.requires_grad
    assert without.top_id_NK is None
