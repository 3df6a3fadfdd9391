"""Attention over trees by flex_attention, compiled, with its mask from intervals: against the CPU's way in float64."""

import pytest
import torch

from megatron_worker.mixers.tree_attention import attend_forest, plan_forest
from tests.gpu.cuda import NEEDS_CUDA
from tests.megatron_worker.test_tree_attention import random_forest

pytestmark = NEEDS_CUDA

NUM_HEADS, NUM_GROUPS, HEAD_SIZE = 8, 2, 64


def attended(parent_T, heads, grad_THD, dtype, device):
    """Output, and the gradients of queries, keys and values."""
    forest = plan_forest(parent_T.to(device), dtype)
    inputs = [x.to(device, dtype).requires_grad_() for x in heads]
    output_THD = attend_forest(*inputs, forest)
    output_THD.backward(grad_THD.to(device, dtype))
    return [x.detach().double().cpu() for x in (output_THD, *(x.grad for x in inputs))]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_nodes", "longest"), [(1, 900), (40, 60), (12, 300)])
def test_trees_on_cuda_are_those_of_the_cpu(num_nodes, longest, dtype, tolerance):
    parent_T = random_forest(num_nodes, num_nodes, longest)
    generator = torch.Generator().manual_seed(1)
    sizes = (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    heads = [torch.randn(len(parent_T), n, HEAD_SIZE, generator=generator).to(dtype) for n in sizes]
    grad_THD = torch.randn(len(parent_T), NUM_HEADS, HEAD_SIZE, generator=generator).to(dtype)
    ours = attended(parent_T, heads, grad_THD, dtype, "cuda")
    theirs = attended(parent_T, heads, grad_THD, torch.float64, "cpu")
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
