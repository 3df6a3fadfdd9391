"""The head's kernels by themselves, against float64: on CUDA if there is some, else interpreted."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_worker.engine import Outputs
from megatron_worker.head import kernels
from megatron_worker.head.kernels import Blocks, add_weight_gradient, scan
from megatron_worker.head.logprobs import VocabShard, policy, score_targets, whole_vocabulary
from megatron_worker.head.torch_tiles import LocalSums
from tests.depth import drawn
from tests.megatron_worker.test_head import DEVICE, close, inputs, scored

# The interpreter computes both sides of every choice, and numpy warns of the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SMALL = Blocks(targets=16, rows=32, hidden=16, num_warps=4, num_stages=2)  # so that small sizes make many tiles
FOUR_ROUNDINGS = 4 * 2**-8  # to bfloat16, relative: two factors, their product, the sum

CHUNK_TARGETS = kernels.chunk_targets

sizes = st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(1, 50))
temperatures = st.sampled_from([1.0, 0.5, 1.7])
dtypes, seeds = st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99)


@settings(max_examples=40, deadline=None)
@given(size=sizes, dtype=dtypes, temperature=temperatures, by_entropy=st.booleans(), chunks=st.booleans(), seed=seeds)
@example((5, 4000, 20), torch.float32, 0.3, True, True, 0)  # many tiles, which are merged a block at a time
def test_every_number_and_gradient_is_what_float64_finds(size, dtype, temperature, by_entropy, chunks, seed):
    """Of any size, with as many chunks as the targets make, or with one; some labels are of another shard."""
    vocab_size, k = size[1], min(5, size[1])
    given = hidden_NH, weight_VH, label_N, grad_N = inputs(dtype, *size, seed, DEVICE)
    shard = VocabShard(first=vocab_size // 3, size=vocab_size, vocab_size=2 * vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "blocks_for", lambda dtype: SMALL)
        patch.setattr(kernels, "chunk_targets", partial(_chunks, 1 if chunks else 1 << 20))
        found = scored("strict", given, shard, temperature=temperature, by_entropy=0.7 * by_entropy, top_k=k)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden_NH, weight_VH))
    logit_NV = hidden @ weight.t() / temperature
    row_N = label_N - shard.first
    label_NV = F.one_hot(row_N.clamp(min=0), vocab_size) * (row_N >= 0)[:, None]
    lse_N, p_NV = logit_NV.logsumexp(1), logit_NV.softmax(1)
    logprob_N, entropy_N = (label_NV * logit_NV).sum(1) - lse_N, lse_N - (p_NV * logit_NV).sum(1)
    ((logprob_N + 0.7 * by_entropy * entropy_N) * grad_N).sum().backward()
    # What is added up in a gradient, without signs: a sum may cancel.
    parts_NV = label_NV + p_NV * (1 + (logit_NV - (lse_N - entropy_N)[:, None]).abs())
    parts_NV = (parts_NV * (grad_N.double() / temperature).abs()[:, None]).detach()
    rounded = 1e-5 if dtype == torch.float32 else FOUR_ROUNDINGS
    close(found.logprob_N, logprob_N, 1e-5)  # of bfloat16 too: logits are not rounded, as torch's are
    close(found.entropy_N, entropy_N, 1e-5, lse_N)
    close(found.by_hidden, hidden.grad, rounded, parts_NV @ weight.detach().abs())
    close(found.by_weight, weight.grad, rounded, parts_NV.t() @ hidden.detach().abs())
    close(found.top_logprob_NK, logit_NV.topk(k).values - lse_N[:, None], 1e-5)
    exact_NK = (logit_NV - lse_N[:, None]).gather(1, found.top_id_NK - shard.first)
    assert (exact_NK - found.top_logprob_NK).abs().max() < 1e-4
    assert all(len(set(row)) == k for row in found.top_id_NK.tolist())


def _chunks(workspace_bytes, num_targets, target_bytes, blocks, _):
    return CHUNK_TARGETS(num_targets, target_bytes, blocks, workspace_bytes)


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
