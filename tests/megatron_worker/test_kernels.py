"""The head's kernels against float64 and against the head's torch: on CUDA where there is some, else interpreted."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_worker.engine import Outputs
from megatron_worker.head import torch_tiles
from megatron_worker.head.kernels import (
    CANDIDATE_BYTES,
    WORKSPACE_BYTES,
    Blocks,
    add_weight_gradient,
    blocks_for,
    chunk_targets,
    padded,
    scan,
    scan_target_bytes,
)
from megatron_worker.head.logprobs import VocabShard, policy, score_targets, whole_vocabulary
from megatron_worker.head.scalar import LmHeadLora
from megatron_worker.head.torch_tiles import LocalSums, TileSize
from tests.depth import drawn
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.test_head import reference, shard_of

# The interpreter computes both sides of every choice, and numpy warns of the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Blocks(targets=16, rows=32, hidden=16, num_warps=4, num_stages=2)  # so that small sizes make many tiles
FOUR_ROUNDINGS = 4 * 2**-8  # to bfloat16, relative: two factors, their product, the sum
LARGEST_SHARED_BYTES = 227 << 10  # of a thread block on compute capability 9.0

sizes = st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(1, 50))
temperatures = st.sampled_from([1.0, 0.5, 1.7])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def inputs(num_targets: int, vocab_size: int, hidden_size: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """hidden_NH, weight_VH of logits of spread 2, label_N, and a gradient to send back."""
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(num_targets, hidden_size, generator=generator) * 2 * hidden_size**-0.5
    weight_VH = torch.randn(vocab_size, hidden_size, generator=generator)
    label_N = torch.randint(0, vocab_size, (num_targets,), generator=generator)
    grad_N = torch.randn(num_targets, generator=generator)
    hidden_NH, weight_VH = (x.to(DEVICE, dtype).requires_grad_() for x in (hidden_NH, weight_VH))
    return hidden_NH, weight_VH, label_N.to(DEVICE), grad_N.to(DEVICE)


def close(ours: Tensor, theirs: Tensor, tolerance: float, scale: Tensor | None = None) -> None:
    """All in all. `scale`: what was added up, without signs, where a sum may cancel."""
    assert ours.shape == theirs.shape
    bound = tolerance * ((theirs if scale is None else scale).double().norm() + 1e-3)
    assert (ours.double() - theirs.double()).norm() <= bound


@settings(max_examples=25, deadline=None)
@given(size=sizes, dtype=dtypes, temperature=temperatures, chunks=st.booleans(), seed=st.integers(0, 99))
def test_a_scan_is_what_float64_finds(size, dtype, temperature, chunks, seed):
    """Of any size, with as many chunks as the targets make, or with one."""
    check_scan(size, dtype, temperature, SMALL, 1 if chunks else 1 << 20, seed)


def test_many_tiles_are_merged_a_block_at_a_time():
    blocks = Blocks(targets=16, rows=16, hidden=16, num_warps=4, num_stages=2)
    check_scan((5, 2100, 20), torch.float32, 0.3, blocks, workspace_bytes=1, seed=0)


def check_scan(size, dtype, temperature, blocks, workspace_bytes, seed):
    """Every number and every row."""
    vocab_size = size[1]
    hidden_NH, weight_VH, label_N, _ = inputs(*size, dtype, seed)
    k = min(5, vocab_size)
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=temperature, top_k=k)
    found = LocalSums.none(hidden_NH, outputs, keep_rows=True)
    known_N = torch.where(label_N % 3 == 0, -1, label_N)
    scan(found, hidden_NH, weight_VH, known_N, outputs, 0, blocks=blocks, workspace_bytes=workspace_bytes)
    rows_NH, logit_rows_NH = found.weighted_rows_NH, found.logit_rows_NH
    logit_NV = (hidden_NH.double() @ weight_VH.double().t() / temperature).detach()
    max_N = logit_NV.amax(1)
    exp_NV = (logit_NV - max_N[:, None]).exp()
    exact, rounded = 1e-5, 1e-5 if dtype == torch.float32 else FOUR_ROUNDINGS
    close(found.max_N, max_N, exact)
    close(found.sum_exp_N, exp_NV.sum(1), exact)
    target_N = logit_NV.gather(1, label_N[:, None])[:, 0]
    close(found.target_N, target_N.where(label_N % 3 != 0, 0.0), exact)
    close(found.weighted_logit_N, (exp_NV * logit_NV).sum(1), exact)
    weight = weight_VH.detach().double()
    close(rows_NH, exp_NV @ weight, rounded, exp_NV @ weight.abs())
    below_NV = exp_NV * (logit_NV - max_N[:, None])
    close(logit_rows_NH, below_NV @ weight, rounded, below_NV.abs() @ weight.abs())
    value_NK, id_NK = torch_tiles.unpack_keys(found.top_NK)
    close(value_NK, logit_NV.topk(k).values, exact)
    assert (logit_NV.gather(1, id_NK) - value_NK).abs().max() < 1e-4
    assert all(len(set(row)) == k for row in id_NK.tolist())


@settings(max_examples=15, deadline=None)
@given(size=sizes, dtype=dtypes, temperature=temperatures, by_entropy=st.booleans(), chunks=st.booleans())
def test_the_weights_gradient_is_that_of_float64(size, dtype, temperature, by_entropy, chunks):
    hidden_NH, weight_VH, label_N, grad_N = inputs(*size, dtype)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden_NH, weight_VH))
    logit_NV = hidden @ weight.t() / temperature
    lse_N, p_NV = logit_NV.logsumexp(1), logit_NV.softmax(1)
    mean_N = (p_NV * logit_NV).sum(1)
    scored_N = logit_NV.gather(1, label_N[:, None])[:, 0] - lse_N + by_entropy * 0.7 * (lse_N - mean_N)
    (scored_N * grad_N).sum().backward()
    grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32).detach()
    divided_N = grad_N / temperature
    add_weight_gradient(
        grad_VH,
        hidden_NH.detach(),
        weight_VH.detach(),
        label_N,
        lse_N.detach().float(),
        divided_N,
        (mean_N.detach().float(), 0.7 * divided_N) if by_entropy else None,
        temperature,
        0,
        blocks=SMALL,
        workspace_bytes=1 if chunks else 1 << 20,
    )
    parts_NV = p_NV * (1 + (logit_NV - mean_N[:, None]).abs()) + torch.nn.functional.one_hot(label_N, size[1])
    scale = (parts_NV * divided_N[:, None].abs()).t() @ hidden.abs()
    close(grad_VH, weight.grad, 1e-5 if dtype == torch.float32 else FOUR_ROUNDINGS, scale)
    last_VR = torch.zeros_like(grad_VH[:, :1])
    add_weight_gradient(
        *(last_VR, hidden_NH.detach(), weight_VH.detach(), label_N, lse_N.detach().float(), divided_N),
        *((mean_N.detach().float(), 0.7 * divided_N) if by_entropy else None, temperature, 0),
        blocks=SMALL,
        workspace_bytes=1 if chunks else 1 << 20,
    )
    torch.testing.assert_close(last_VR, grad_VH[:, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", drawn([1.0, 0.6], 1))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_head_is_the_same_by_kernels(dtype, tolerance, temperature):
    """Values and both gradients through `score_targets`, against float64 and against torch's way."""
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=temperature, top_k=3)
    of: dict[str, tuple[Tensor, ...]] = {}
    for way in ("torch", "strict"):
        hidden_NH, weight_VH, label_N, grad_N = inputs(70, 301, 72, dtype)
        with policy(way):
            scores = score_targets(hidden_NH, weight_VH, label_N, outputs, whole_vocabulary(301))
            ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
        of[way] = (scores.logprob_N.detach(), scores.entropy_N.detach(), hidden_NH.grad, weight_VH.grad)
        assert scores.logprob_N.dtype == scores.top_logprob_NK.dtype == torch.float32
    truth = reference(hidden_NH, weight_VH, label_N, grad_N, temperature, 0.7)
    for ours, theirs, true in zip(of["strict"], of["torch"], truth, strict=True):
        close(ours, true, tolerance)
        close(ours, theirs, 2 * tolerance)
    if dtype == torch.bfloat16:  # torch rounds the logits, the kernels do not
        close(of["strict"][0], truth[0], 1e-5)
        assert (of["torch"][0] - truth[0]).norm() > 1e-4 * truth[0].norm()


def test_an_adapter_beside_the_head_is_scanned_by_kernels_in_parts():
    """Of a vocabulary of three parts; against torch's way, which has a float64 reference in test_head.py."""
    outputs, of = Outputs(entropy=True, entropy_gradient=True, top_k=3, temperature=0.7), {}
    shard = whole_vocabulary(301)
    for way in ("torch", "strict"):
        hidden_NH, weight_VH, label_N, grad_N = inputs(20, 301, 24)
        label_N[0] = 290
        b_VR = weight_VH.detach()[:, :2].clone().requires_grad_()
        beside = LmHeadLora(hidden_NH[:, 2:4] * 0.5, b_VR)
        with policy(way):
            scores = score_targets(hidden_NH, weight_VH, label_N, outputs, shard, TileSize(9, 50, 128), beside)
            ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
        of[way] = (scores.logprob_N.detach(), scores.entropy_N.detach(), hidden_NH.grad, b_VR.grad)
        of[way] += (scores.top_id_NK, scores.top_logprob_NK)
    for ours, theirs in zip(of["strict"], of["torch"], strict=True):
        close(ours, theirs, 1e-5)


@pytest.fixture
def nan_in_empty_tensors():
    """Memory that nobody has written holds NaN, as torch fills it when it is to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize(("dtype", "vocab_size"), drawn([*product((torch.float32, torch.bfloat16), (301, 128))], 1))
def test_nothing_is_read_before_it_is_written(nan_in_empty_tensors, dtype, vocab_size):
    hidden_NH, weight_VH, label_N, grad_N = inputs(70, vocab_size, 40, dtype)
    outputs = Outputs(entropy=True, entropy_gradient=True, top_k=3)
    with policy("strict"):
        scores = score_targets(hidden_NH, weight_VH, label_N, outputs, whole_vocabulary(vocab_size))
        ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
    found = (scores.logprob_N, scores.entropy_N, scores.top_logprob_NK, hidden_NH.grad, weight_VH.grad)
    assert all(x.isfinite().all() for x in found)


def test_scores_without_gradients_are_the_same_bits():
    """What scores the policy before a step and what trains it must agree, or ratios begin beside 1."""
    hidden_NH, weight_VH, label_N, _ = inputs(70, 301, 72, torch.bfloat16)
    with policy("strict"):
        trained = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(301))
        with torch.no_grad():
            scored = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(301))
    assert torch.equal(trained.logprob_N, scored.logprob_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_targets_bits_do_not_depend_on_its_company(dtype):
    """Products of eighths are exact, whatever order they are summed in: numpy's BLAS, which stands in for a device's
    matrix units here, gives a row other bits in another place of a block on some machines.
    """
    hidden_NH, weight_VH, label_N, _ = (x.detach() for x in inputs(45, 100, 40, dtype))
    hidden_NH, weight_VH = (hidden_NH * 8).round() / 8, (weight_VH * 8).round() / 8

    def found(chosen: slice, workspace_bytes: int) -> LocalSums:
        outputs = Outputs(entropy=True, temperature=1.3)
        sums, how = LocalSums.none(hidden_NH[chosen], outputs, keep_rows=True), {"workspace_bytes": workspace_bytes}
        scan(sums, hidden_NH[chosen], weight_VH, label_N[chosen], outputs, 0, blocks=SMALL, **how)
        return sums

    whole = found(slice(0, 45), 1 << 20)
    for part, workspace_bytes in ((slice(0, 45), 1), (slice(7, 8), 1 << 20), (slice(30, 45), 1 << 20)):
        some = found(part, workspace_bytes)
        assert torch.equal(some.max_N, whole.max_N[part])
        assert torch.equal(some.sum_exp_N, whole.sum_exp_N[part])
        assert torch.equal(some.target_N, whole.target_N[part])
        assert torch.equal(some.weighted_logit_N, whole.weighted_logit_N[part])


def test_padded_rows_never_win():
    hidden_NH, weight_VH, label_N, grad_N = inputs(20, 101, 24)
    padded_VH = torch.cat([weight_VH.detach(), torch.full((11, 24), 100.0, device=DEVICE)]).requires_grad_()
    shard = VocabShard(first=0, size=112, vocab_size=101)
    with policy("strict"):
        scores = score_targets(hidden_NH, padded_VH, label_N, Outputs(entropy=True, top_k=101), shard)
        scores.logprob_N.backward(grad_N)
    logprob_N, entropy_N, _, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N)
    close(scores.logprob_N, logprob_N, 1e-5)
    close(scores.entropy_N, entropy_N, 1e-5)
    close(padded_VH.grad[:101], by_weight, 1e-5)
    assert not padded_VH.grad[101:].any()
    assert scores.top_id_NK.sort().values.tolist() == [list(range(101))] * 20


def test_large_logits_stay_finite_and_a_nan_stays_its_own():
    hidden_NH, weight_VH, label_N, grad_N = inputs(20, 101, 24)
    large_NH = hidden_NH.detach() * 1e3
    logprob_N = reference(large_NH, weight_VH, label_N, grad_N)[0]
    large_NH[3] = torch.nan
    with policy("strict"):
        scores = score_targets(
            large_NH.requires_grad_(), weight_VH, label_N, Outputs(entropy=True), whole_vocabulary(101)
        )
        others = torch.arange(20, device=DEVICE) != 3
        scores.logprob_N[others].sum().backward()
    assert scores.logprob_N.isnan().nonzero().tolist() == [[3]]
    assert scores.entropy_N[3].isnan()
    torch.testing.assert_close(scores.logprob_N[others].double(), logprob_N[others], rtol=1e-5, atol=1e-2)
    assert large_NH.grad[others].isfinite().all()


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that any operation returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return result


def test_no_tensor_is_targets_by_vocabulary():
    """With a hidden size so small that the weights are none of it either."""
    hidden_NH, weight_VH, label_N, _ = (x.detach() for x in inputs(96, 3000, 4, torch.bfloat16))
    all_logits = 96 * 3000 * 2
    blocks = Blocks(16, 256, 16, num_warps=4, num_stages=2)
    wanted = [(Outputs(), False), (Outputs(), True), (Outputs(top_k=20, entropy=True), False)]
    for (outputs, keep_rows), bound in zip(wanted, (all_logits // 8, all_logits // 4, all_logits // 4), strict=True):
        sums = LocalSums.none(hidden_NH, outputs, keep_rows)
        with Largest() as largest:
            scan(sums, hidden_NH, weight_VH, label_N, outputs, 0, blocks=blocks, workspace_bytes=bound)
        assert 0 < largest.num_bytes <= bound
    with Largest() as largest:
        grad_VH, of_target_N = torch.zeros(3000, 4, device=DEVICE), torch.zeros(96, device=DEVICE)
        number = all_logits // 4
        add_weight_gradient(
            grad_VH,
            hidden_NH,
            weight_VH,
            label_N,
            of_target_N,
            of_target_N,
            None,
            1.0,
            0,
            blocks=blocks,
            workspace_bytes=number,
        )
    assert 0 < largest.num_bytes <= number


def check_shards() -> None:
    """Of small whole numbers and a few of them: many logits are equal, within a shard and between shards."""
    for rows_per_rank, dtype, tolerance, temperature in (
        (151, torch.float32, 1e-5, 1.0),  # one row of padding
        (301, torch.float32, 1e-5, 1.0),  # the second shard is all padding
        (160, torch.float32, 1e-5, 0.5),
        (151, torch.bfloat16, 1e-2, 1.0),
    ):
        generator = torch.Generator().manual_seed(0)
        hidden_NH = torch.randint(-1, 2, (37, 24), generator=generator).to(dtype).requires_grad_()
        weight_VH = torch.randint(-1, 2, (301, 24), generator=generator).to(dtype)
        label_N, grad_N = torch.randint(0, 301, (37,), generator=generator), torch.randn(37, generator=generator)
        *expected, by_weight = reference(hidden_NH, weight_VH, label_N, grad_N, temperature, 0.7)
        shard_VH, shard, own_rows = shard_of(weight_VH, rows_per_rank)
        outputs = Outputs(entropy=True, entropy_gradient=True, temperature=temperature, top_k=7)
        with policy("strict"):
            scores = score_targets(hidden_NH, shard_VH, label_N, outputs, shard)
            ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
        found = (scores.logprob_N, scores.entropy_N, hidden_NH.grad, shard_VH.grad)
        for ours, theirs in zip(found, (*expected, own_rows(by_weight)), strict=True):
            close(ours, theirs, tolerance)
        logit_NV = hidden_NH.detach().double() @ weight_VH.double().t() / temperature
        assert torch.equal(scores.top_id_NK, logit_NV.sort(dim=1, descending=True, stable=True).indices[:, :7])
        best_NK = logit_NV.log_softmax(1).gather(1, scores.top_id_NK)
        torch.testing.assert_close(scores.top_logprob_NK.double(), best_NK, rtol=1e-5, atol=1e-5)


def test_two_ranks_with_a_shard_each_agree_with_one():
    """Over gloo (two ranks may not share one device with NCCL): maxima, rows and top-k with ties, merged."""
    if DEVICE == "cuda":
        pytest.skip("this test's ranks run on the CPU, interpreted, and Triton is not interpreted in this session")
    on_ranks(2, check_shards)


def scan_bytes(
    num_targets: int,
    num_rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    *,
    num_buffers: int,
    top_k: int = 0,
    blocks: Blocks | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> int:
    """Return the most bytes that a scan (kernels.py) holds beside its arguments.

    Args:
        num_buffers: how many of `rows_NH` and `logit_rows_NH` it writes.
    """
    if not num_targets:
        return 0
    blocks, element = blocks or blocks_for(dtype), dtype.itemsize
    num_tiles, kept = -(-num_rows // blocks.rows), min(top_k, blocks.rows)
    target = scan_target_bytes(num_rows, element, num_buffers, top_k, blocks)
    size = chunk_targets(num_targets, target, blocks, workspace_bytes)
    results = num_targets * (4 * 4 + 8)  # sums, and the labels' rows
    space = size * (num_tiles * (4 * 4 + kept * (4 + 4)) + num_buffers * padded(num_rows) * element)
    # Keys in the making, those of the chunk before being held still.
    candidates = num_tiles * kept * size * (CANDIDATE_BYTES - 8)
    if num_targets > size:
        next_size = min(size, num_targets - size)
        candidates = max(candidates, num_tiles * kept * (size * 8 + next_size * (CANDIDATE_BYTES - 8)))
    products = size * hidden_size * element * (num_buffers > 0)
    return results + space + max(candidates, products)


@pytest.mark.parametrize(("num_targets", "top_k", "workspace_bytes"), [(40, 0, 1 << 20), (40, 7, 1 << 20), (70, 40, 1)])
@pytest.mark.parametrize(("keep_rows", "dtype"), drawn([*product((False, True), (torch.float32, torch.bfloat16))], 1))
def test_a_scan_takes_the_memory_that_is_planned_for(num_targets, top_k, workspace_bytes, keep_rows, dtype):
    hidden_NH, weight_VH, label_N, _ = (x.detach() for x in inputs(num_targets, 200, 32, dtype))
    outputs, how = Outputs(top_k=top_k), {"blocks": SMALL, "workspace_bytes": workspace_bytes}
    sums = LocalSums.none(hidden_NH, outputs, keep_rows)
    with LiveBytes() as live:
        scan(sums, hidden_NH, weight_VH, label_N, outputs, 0, **how)
    planned = scan_bytes(num_targets, 200, 32, dtype, num_buffers=int(keep_rows), top_k=top_k, **how)
    print(live.peak, planned, live.peak / planned)
    assert 0.99 * planned <= live.peak <= planned
