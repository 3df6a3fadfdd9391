"""The engines against each other: per token, after ten steps, and one going on from the other's checkpoint."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from megatron_worker.engine import Outputs
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import ENGINES, furthest, start
from tests.megatron_worker.launch import REPOSITORY, environment
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.trees import as_tree, random_sequences

STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25, 60, 8], seed=s % 4) for s in range(10))]
RATES = {"lora": 3e-3, "full": 3e-4}
FAMILIES = [("qwen3", True), ("qwen2", False), ("llama", True)]  # and whether their embeddings are tied


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: p[0])
def model(request, tmp_path_factory):
    family, tied = request.param
    return distinct_model(tmp_path_factory.mktemp(family), family, tied)


@pytest.fixture(scope="module")
def ten_steps(model, tmp_path_factory):
    """By engine and kind of training: losses and norms of ten steps, and a folder with the checkpoint of each half."""
    results = {}
    for name in ENGINES:
        for kind in RATES:
            folder, driven = tmp_path_factory.mktemp(f"{name}-{kind}"), start(name, model, kind)
            history = train(driven, STEPS[:5], learning_rate=RATES[kind])
            driven.save(folder / "middle")
            history += train(driven, STEPS[5:], learning_rate=RATES[kind])
            driven.save(folder / "end")
            results[name, kind] = history, folder
    return results


def tensors(checkpoint):
    return {n: t for path in sorted(checkpoint.rglob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "megatron"])
def test_engines_agree_per_token(model, name):
    ours, theirs = start(name, model), start("megatron", model)
    for batch in (bin_of(STEPS[0][0] + STEPS[0][1]), as_tree(random_sequences(1))):
        with torch.no_grad():
            mine, other = (e.forward(batch, Outputs(entropy=True)) for e in (ours, theirs))
        assert (mine.logprob_N - other.logprob_N).abs().max() <= 1e-5
        assert (mine.entropy_N - other.entropy_N).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("family", "tied"), [("ministral", False), ("smollm3", True), ("granite", False), ("olmo3", False)]
)
def test_engines_agree_on_families_that_differ_by_a_switch(tmp_path, family, tied):
    folder = distinct_model(tmp_path, family, tied)
    ours, theirs = (start(name, folder) for name in ENGINES)
    for batch in (bin_of(STEPS[0][0] + STEPS[0][1]), as_tree(random_sequences(1))):
        with torch.no_grad():
            mine, other = (e.forward(batch, Outputs()) for e in (ours, theirs))
        assert (mine.logprob_N - other.logprob_N).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "megatron"])
def test_engines_agree_after_ten_steps(ten_steps, name, kind):
    (ours, folder), (theirs, other) = ten_steps[name, kind], ten_steps["megatron", kind]
    assert ours[-1][0] < ours[0][0]
    for (loss, norm), (expected, expected_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    difference = furthest(tensors(folder / "end"), tensors(other / "end"))
    print(f"{name} {kind}: largest difference of a weight or moment {difference:.1e}")
    assert difference <= 2e-5
    assert [p.name for p in sorted(folder.rglob("*"))] == [p.name for p in sorted(other.rglob("*"))]


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "megatron"])
def test_an_engine_goes_on_from_the_other_s_checkpoint(model, ten_steps, tmp_path, name, kind):
    for ours, theirs in ((name, "megatron"), ("megatron", name)):
        driven = start(ours, model, kind)
        driven.load(ten_steps[theirs, kind][1] / "middle")
        train(driven, STEPS[5:], learning_rate=RATES[kind])
        driven.save(tmp_path / ours)
        assert furthest(tensors(tmp_path / ours), tensors(ten_steps[theirs, kind][1] / "end")) <= 2e-5


def test_the_fsdp_engine_needs_no_megatron(tmp_path):
    """With any family it is torch and transformers alone: what megatron-core asks of a machine, it does not.

    Nor does a job's beginning load torch's compiler, which nothing uses without CUDA.
    """
    folders = [str(distinct_model(tmp_path / family, family, tied)) for family, tied in FAMILIES]
    program = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from megatron_worker.worker import make_deterministic
make_deterministic(SimpleNamespace(threads_per_rank=1, seed=0))
assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
assert torch.cuda.is_available() or "torch._dynamo" not in sys.modules
from megatron_worker.fsdp.engine import FsdpEngine
from shared.jobs.job import Layout
for folder in {folders!r}:
    FsdpEngine(Path(folder), Layout(), "float32").greedy([[5, 6]], 2, frozenset())
print(sorted(name for name in sys.modules if name.split(".")[0] in ("megatron", "peft")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
