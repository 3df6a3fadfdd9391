"""`make gpu-check` where there is no CUDA: it says so and writes nothing; what it is made of works on the CPU."""

import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_check import run_tests
from benchmarks.head_kernel import CASES, measure
from tests.megatron_worker.launch import REPOSITORY

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and this is about having none")


@NO_CUDA
@pytest.mark.parametrize("module", ["gpu_check", "head_kernel"])
def test_without_cuda_nothing_is_measured_and_that_is_said(module, tmp_path):
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{module}",
        *(["--into", str(tmp_path)] if module == "gpu_check" else []),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "not measured: there is no CUDA device here\n"
    assert not done.stdout
    assert not list(tmp_path.iterdir())


@NO_CUDA
def test_tests_are_listed_with_their_outcome_and_the_reason():
    tested = run_tests(("tests/gpu/test_head.py",))
    assert tested["exit_status"] == 0
    assert tested["counts"] == {"passed": 0, "failed": 0, "skipped": len(tested["tests"])}
    assert all(test["reason"].startswith("there is no CUDA device") for test in tested["tests"])
    assert any("test_peak_memory" in test["test"] for test in tested["tests"])


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("case", CASES)
def test_all_ways_of_the_benchmark_come_to_the_same_sum(case):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = {row["way"]: row for row in measure(case, 20, 150, 32, 1, device)}
    assert {"kernel", "torch", "log_softmax"} <= set(rows)
    for name, row in rows.items():
        if "failed" in row:
            assert name not in ("kernel", "torch", "log_softmax")
        else:
            assert row["logprob_sum"] == pytest.approx(rows["kernel"]["logprob_sum"], rel=1e-2)
            assert row["ms"] > 0
