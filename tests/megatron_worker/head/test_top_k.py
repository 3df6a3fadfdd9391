"""The k greatest logits: keys in the order of logits and ids, however a row is cut; the head's, by both its ways."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_worker.engine import Outputs
from megatron_worker.head import torch_tiles
from megatron_worker.head.logprobs import policy, score_targets, whole_vocabulary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


@pytest.mark.parametrize("way", ["torch", "strict"])
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
