"""The head's kernels, compiled, at the size of Qwen3's vocabulary: against float64, against torch, and their memory.

tests/megatron_worker/test_kernels.py has every size and edge; on a machine with CUDA it runs compiled too.
"""

import pytest
import torch

from megatron_worker.engine import Outputs
from megatron_worker.head.kernels import WORKSPACE_BYTES
from megatron_worker.head.logprobs import policy, score_targets, whole_vocabulary
from tests.gpu.cuda import NEEDS_CUDA
from tests.megatron_worker.test_head import reference

pytestmark = NEEDS_CUDA

VOCAB_SIZE = 151_936


def inputs(num_targets, hidden_size, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_NH = torch.randn(num_targets, hidden_size, device="cuda", generator=generator) * 2
    weight_VH = torch.randn(VOCAB_SIZE, hidden_size, device="cuda", generator=generator) * hidden_size**-0.5
    label_N = torch.randint(0, VOCAB_SIZE, (num_targets,), device="cuda", generator=generator)
    grad_N = torch.randn(num_targets, device="cuda", generator=generator)
    return hidden_NH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_(), label_N, grad_N


def scored(way, hidden_NH, weight_VH, label_N, grad_N, outputs):
    """Scores, and gradients of log-probability and 0.7 entropy."""
    hidden, weight = (x.detach().requires_grad_() for x in (hidden_NH, weight_VH))
    with policy(way):
        scores = score_targets(hidden, weight, label_N, outputs, whole_vocabulary(VOCAB_SIZE))
        ((scores.logprob_N + 0.7 * scores.entropy_N) * grad_N).sum().backward()
    return scores, hidden.grad, weight.grad


def distance(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("dtype", "num_targets", "hidden_size"),
    [(torch.bfloat16, 777, 1024), (torch.bfloat16, 130, 1000), (torch.float16, 256, 512), (torch.float32, 200, 256)],
)
def test_values_and_gradients_are_those_of_float64(dtype, num_targets, hidden_size, temperature):
    hidden_NH, weight_VH, label_N, grad_N = inputs(num_targets, hidden_size, dtype)
    outputs = Outputs(entropy=True, entropy_gradient=True, temperature=temperature, top_k=20)
    scores, by_hidden, by_weight = scored("strict", hidden_NH, weight_VH, label_N, grad_N, outputs)
    exact = reference(hidden_NH, weight_VH, label_N, grad_N, temperature, by_entropy=0.7)
    logprob_N, entropy_N, exact_by_hidden, exact_by_weight = exact
    assert distance(scores.logprob_N, logprob_N) < 1e-5
    assert distance(scores.entropy_N, entropy_N) < 1e-5
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    assert distance(by_hidden, exact_by_hidden) < bound
    assert distance(by_weight, exact_by_weight) < bound
    logprob_NV = (hidden_NH.detach().double() @ weight_VH.detach().double().t() / temperature).log_softmax(1)
    torch.testing.assert_close(scores.top_logprob_NK.double(), logprob_NV.topk(20).values, rtol=1e-5, atol=1e-4)
    picked_NK = logprob_NV.gather(1, scores.top_id_NK)
    torch.testing.assert_close(scores.top_logprob_NK.double(), picked_NK, rtol=1e-5, atol=1e-4)


def test_the_same_inputs_give_the_same_bits():
    inputs_ = inputs(1500, 512)
    outputs = Outputs(entropy=True, entropy_gradient=True, top_k=8)
    one, other = (scored("strict", *inputs_, outputs) for _ in range(2))
    assert torch.equal(one[0].logprob_N, other[0].logprob_N)
    assert torch.equal(one[0].entropy_N, other[0].entropy_N)
    assert torch.equal(one[0].top_id_NK, other[0].top_id_NK)
    assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def test_peak_memory_is_the_workspace_and_not_the_logits():
    """8,192 targets, whose logits are 2.5 GB: scored in a twentieth; with gradients, in the workspace and the rows."""
    hidden_NH, weight_VH, label_N, grad_N = inputs(8192, 256)
    frozen_VH = weight_VH.detach()
    logits_bytes = 8192 * VOCAB_SIZE * 2
    peaks = []
    for outputs, trained in ((Outputs(), False), (Outputs(), True)):
        with policy("strict"), torch.set_grad_enabled(trained):
            for _ in range(2):  # the first compiles
                hidden = hidden_NH.detach().requires_grad_(trained)
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                scores = score_targets(hidden, frozen_VH, label_N, outputs, whole_vocabulary(VOCAB_SIZE))
                if trained:
                    scores.logprob_N.backward(grad_N)
                peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    rows_bytes = 8192 * 256 * 4
    assert peaks[0] < logits_bytes / 20, peaks
    assert peaks[1] < WORKSPACE_BYTES + 8 * rows_bytes + logits_bytes / 20, peaks
