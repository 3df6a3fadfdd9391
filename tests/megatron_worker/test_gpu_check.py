"""`make gpu-check` where there is no CUDA: it says so and writes nothing; what it is made of works on the CPU."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_check import run_tests
from benchmarks.gpu_weight_sync import Device
from benchmarks.gpu_weight_sync import measure as measure_weight_sync
from benchmarks.head_kernel import CASES, measure
from benchmarks.qwen3_8b import TINY_WORK, rl_step, run, sft_step
from benchmarks.qwen3_8b import main as train_qwen3_8b
from benchmarks.qwen3_8b import measure as measure_training
from benchmarks.random_model import QWEN3_8B, TINY, RandomFsdp, RandomMegatron, flops, write_config
from longshore.training import Layout, Lora
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


# The training of Qwen3-8B's shape, on a shape that is tiny.

CPU = torch.device("cpu")


@NO_CUDA
def test_training_says_that_it_was_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["qwen3_8b"])
    with pytest.raises(SystemExit, match=r"^not measured: there is no CUDA device here$"):
        train_qwen3_8b()
    assert not capsys.readouterr().out


def test_training_and_offload_are_measured_by_the_same_code_on_a_tiny_shape():
    figures = measure_training(TINY, TINY_WORK, 2, CPU, peak_tflops=0.5)
    for name in ("sft", "rl"):
        part = figures[name]
        assert "failed" not in part
        seconds = part["step_s"]["median"]
        assert part["tokens_per_s"] == pytest.approx(part["tokens"] / seconds)
        assert part["mfu"] == pytest.approx(sum(part["flop"].values()) / seconds / 0.5e12)
    group = TINY_WORK.prompt + TINY_WORK.group * TINY_WORK.completion
    assert figures["rl"]["tokens"] == TINY_WORK.bins * group
    unshared = TINY_WORK.group * (TINY_WORK.prompt + TINY_WORK.completion)
    assert figures["rl"]["logical_tokens_per_s"] / figures["rl"]["tokens_per_s"] == pytest.approx(unshared / group)
    offload = figures["offload"]
    assert offload["device_gb_after"] == 0
    assert offload["host_gb"] == pytest.approx(offload["device_gb_before"])


@NO_CUDA
def test_a_sampler_beside_its_trainer_is_measured_by_the_same_code_on_a_tiny_shape(tmp_path):
    figures = measure_weight_sync(TINY, tmp_path, Device(CPU), 2)
    assert set(figures) == {"colocated", "sleep", "cuda_ipc", "shared_memory", "tcp", "collective"}
    assert figures["cuda_ipc"]["not_possible"].startswith("cuda_ipc needs cuda")
    assert figures["sleep"]["freed_share_of_parts"] == 1
    for way in ("shared_memory", "tcp", "collective"):
        assert "failed" not in figures[way]
        assert figures[way]["gb"] == pytest.approx(2 * TINY.num_weights / 1e9, rel=0.01)  # norms beside them
        assert figures[way]["blocked_s"] < figures[way]["update_s"] < figures[way]["serving_s"]


def test_a_part_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(RandomMegatron, "place", lambda engine, where: torch.empty(-1))
    figures = measure_training(TINY, TINY_WORK, 1, CPU, None)
    assert set(figures["offload"]) == {"failed"}
    assert figures["rl"]["tokens_per_s"] > 0


@pytest.mark.parametrize("make", [sft_step, rl_step])
def test_flops_are_those_that_torch_counts(make, tmp_path):
    """But for attention, products added in place (it sees neither), and zeros between the fused linears' adapters."""
    engine = RandomMegatron(write_config(tmp_path, TINY), Layout(), "float32", CPU)
    engine.add_adapter("run", Lora(rank=16, alpha=32), seed=0)
    step = make(TINY_WORK, TINY.vocab, CPU)
    with FlopCounterMode(display=False) as counter:
        run(engine, step)
    ours = flops(TINY, 16, step.num_tokens, step.num_pairs, step.num_targets)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    seen = ours["linears"] + ours["head"] / 2  # the rows that are the targets' gradients are added up in place
    assert seen == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("engine", [RandomMegatron, RandomFsdp])
def test_drawn_weights_are_as_many_as_the_shape_says_and_come_again(engine, tmp_path):
    folder = write_config(tmp_path, TINY)
    drawn = [
        {name: weight.clone() for name, weight in engine(folder, Layout(), "float32").named_weights()} for _ in range(2)
    ]
    assert all(torch.equal(weight, drawn[1][name]) for name, weight in drawn[0].items())
    matrices = [weight for weight in drawn[0].values() if weight.dim() == 2]
    assert sum(weight.numel() for weight in matrices) == TINY.num_weights
    assert all(0.015 < float(weight.std()) < 0.025 for weight in matrices)
    assert all(bool((weight == 1).all()) for weight in drawn[0].values() if weight.dim() == 1)
    assert 8.1e9 < QWEN3_8B.num_weights < 8.2e9
