"""Which of kernels and torch does the head's work, what is said of that, and that the kernels compile."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_worker.engine import Outputs
from megatron_worker.head.kernels import blocks_for
from megatron_worker.head.logprobs import policy, score_targets, whole_vocabulary
from shared.errors import InvalidInput
from tests.megatron_worker.launch import REPOSITORY
from tests.megatron_worker.test_head import inputs

LARGEST_SHARED_BYTES = 227 << 10  # of a thread block on compute capability 9.0


def test_on_the_cpu_torch_does_the_work_and_nobody_is_warned():
    hidden_NH, weight_VH, label_N, _ = (x.detach() for x in inputs(torch.float32, 5, 30, 16))
    with warnings.catch_warnings(), policy("auto"):
        warnings.simplefilter("error")
        auto = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(30))
    with policy("torch"):
        torchs = score_targets(hidden_NH, weight_VH, label_N, Outputs(), whole_vocabulary(30))
    assert torch.equal(auto.logprob_N, torchs.logprob_N)


def test_a_fallback_on_cuda_says_why_once_and_is_an_error_when_strict():
    """float64, which the kernels do not know; a fake tensor is of CUDA without any."""
    from megatron_worker.head.logprobs import kernels_do

    with FakeTensorMode():
        on_cuda = torch.empty(3, 4, dtype=torch.float64, device="cuda")
    with policy("auto"), pytest.warns(UserWarning, match="torch does its work: it knows no float64"):
        assert not kernels_do(on_cuda)
    with policy("auto"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels_do(on_cuda)
    with policy("torch"):
        assert not kernels_do(on_cuda)
    with policy("strict"), pytest.raises(InvalidInput, match=r"LONGSHORE_KERNELS.*strict: it knows no float64"):
        kernels_do(on_cuda)


def test_strict_without_cuda_and_without_the_interpreter_is_an_error():
    code = """
import torch
from megatron_worker.engine import Outputs
from megatron_worker.head.logprobs import score_targets, whole_vocabulary
from megatron_worker.head.logprobs import set_policy
set_policy("strict")
score_targets(torch.ones(2, 4), torch.ones(3, 4), torch.zeros(2, dtype=torch.int64), Outputs(), whole_vocabulary(3))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=compiled(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "kernels are strict: it needs CUDA, and the tensors are on cpu" in done.stderr


def compiled() -> dict[str, str]:
    """An environment in which Triton compiles."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.slow
def test_the_kernels_compile_for_hopper():
    """With the blocks that are used, by Triton's compiler, which needs no device: they fit, and spill no registers."""
    command = [sys.executable, "-m", "tests.megatron_worker.compile_kernels"]
    done = subprocess.run(command, cwd=REPOSITORY, env=compiled(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert {kernel["name"] for kernel in made} == {"scan_tile", "merge_tiles", "rescale", "logit_gradient_tile"}
    for kernel in made:
        assert kernel["shared_bytes"] <= LARGEST_SHARED_BYTES, kernel
        assert kernel["spilled_bytes"] == 0, kernel
        is_product = kernel["name"] in ("scan_tile", "logit_gradient_tile")
        assert kernel["tensor_cores"] == (is_product and kernel["dtype"] == "bf16"), kernel


def test_blocks_are_whole_tiles_of_the_interpreter_too():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        blocks = blocks_for(dtype)
        assert all(n >= 16 and n & (n - 1) == 0 for n in (blocks.targets, blocks.rows, blocks.hidden))
