"""The head's kernels by themselves, against float64: on CUDA if there is some, else interpreted."""

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
from megatron_worker.head.kernels import Blocks, add_weight_gradient, scan
from megatron_worker.head.logprobs import policy, score_targets, whole_vocabulary
from megatron_worker.head.torch_tiles import LocalSums
from tests.depth import drawn
from tests.megatron_worker.test_head import DEVICE, close, inputs

# The interpreter computes both sides of every choice, and numpy warns of the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SMALL = Blocks(targets=16, rows=32, hidden=16, num_warps=4, num_stages=2)  # so that small sizes make many tiles
FOUR_ROUNDINGS = 4 * 2**-8  # to bfloat16, relative: two factors, their product, the sum

sizes = st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(1, 50))
temperatures = st.sampled_from([1.0, 0.5, 1.7])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


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
    hidden_NH, weight_VH, label_N, _ = inputs(dtype, *size, seed, DEVICE)
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
    hidden_NH, weight_VH, label_N, grad_N = inputs(dtype, *size, device=DEVICE)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden_NH, weight_VH))
    logit_NV = hidden @ weight.t() / temperature
    lse_N, p_NV = logit_NV.logsumexp(1), logit_NV.softmax(1)
    mean_N = (p_NV * logit_NV).sum(1)
    scored_N = logit_NV.gather(1, label_N[:, None])[:, 0] - lse_N + by_entropy * 0.7 * (lse_N - mean_N)
    (scored_N * grad_N).sum().backward()
    grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32).detach()
    divided_N = grad_N.float() / temperature
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
    hidden_NH, weight_VH, label_N, grad_N = inputs(dtype, 70, vocab_size, 40, device=DEVICE)
    outputs = Outputs(entropy=True, entropy_gradient=True, top_k=3)
    with policy("strict"):
        scores = score_targets(hidden_NH, weight_VH, label_N, outputs, whole_vocabulary(vocab_size))
        ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
    found = (scores.logprob_N, scores.entropy_N, scores.top_logprob_NK, hidden_NH.grad, weight_VH.grad)
    assert all(x.isfinite().all() for x in found)


def test_scores_without_gradients_are_the_same_bits():
    """What scores the policy before a step and what trains it must agree, or ratios begin beside 1."""
    hidden_NH, weight_VH, label_N, _ = inputs(torch.bfloat16, 70, 301, 72, device=DEVICE)
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
    hidden_NH, weight_VH, label_N, _ = (x.detach() for x in inputs(dtype, 45, 100, 40, device=DEVICE))
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
    hidden_NH, weight_VH, label_N, _ = (x.detach() for x in inputs(torch.bfloat16, 96, 3000, 4, device=DEVICE))
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
