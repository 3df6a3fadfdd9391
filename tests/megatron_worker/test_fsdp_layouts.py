"""Layouts of the FSDP engine give what one rank gives: linears split by plans, experts shared out over ranks."""

from pathlib import Path

import pytest
import torch

from longshore.layout import Layout
from megatron_worker.fsdp import adapter
from tests.depth import drawn
from tests.megatron_worker import fsdp_layout_ranks, fsdp_ranks
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import checkpoint_bytes, furthest, start
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.rows import bin_of, distinct_model, model_with_tower, random_rows
from tests.megatron_worker.scores import logprobs
from tests.megatron_worker.test_fsdp_ranks import notes, tensors
from tests.megatron_worker.trees import as_tree, random_sequences
from tests.megatron_worker.unknown_models import COMPUTED, unknown_model

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = [[rows[:2], rows[2:]] for rows in (random_rows([40, 17, 90, 25, 60, 8], seed=step) for step in range(5))]
LAYOUTS = {
    "qwen3": [Layout(tp=2, dp=2)],  # norms of heads
    "qwen2": [Layout(tp=2)],  # biases
    "phi3": [Layout(tp=2)],  # fused linears, whose outputs are gathered
    "mistral3": [Layout(tp=2)],  # a decoder within a model that reads images
    "qwen3_moe": [Layout(dp=3)],  # four experts: ranks have two, two and none
}
RUNS = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]


def made(folder: Path, family: str) -> Path:
    if family == "mistral3":
        return model_with_tower(folder, "mistral")[1]
    return unknown_model(folder, family) if family in COMPUTED else distinct_model(folder, family, tied=False)


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """By family: a model, and what one rank gives."""
    found = {}

    def of(family):
        if family not in found:
            folder = tmp_path_factory.mktemp(family)
            model, out = made(folder / "model", family), folder / "single"
            torch.set_num_threads(1)
            fsdp_ranks.run(model, Layout(), out)
            fsdp_ranks.run_trees(model, Layout(), out / "lora" / "end" / "weights", out / "trees")
            found[family] = model, out
        return found[family]

    return of


@pytest.mark.parametrize("num_ranks", drawn([2, 4], 1))
def test_an_adapter_of_the_output_layer_counts_once_on_tensor_parallel_ranks(tmp_path, num_ranks):
    model = distinct_model(tmp_path / "model", tied=False)
    fsdp_layout_ranks.train_head(model, Layout(), tmp_path / "single")
    fork_ranks(
        "tests.megatron_worker.fsdp_layout_ranks", "head", str(model), str(tmp_path / "ranks"), num_ranks=num_ranks
    )
    ours, theirs = tmp_path / "ranks", tmp_path / "single"
    for history in notes(ours, "history"):
        for step, of_one in zip(history, notes(theirs, "history")[0], strict=True):
            assert step == pytest.approx(of_one, rel=1e-5)
    assert furthest(tensors(ours / "end"), tensors(theirs / "end")) <= 1e-5


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "layout"), drawn(RUNS, 1), ids=lambda value: getattr(value, "label", value))
def test_layouts_give_what_one_rank_gives(single, tmp_path, family, layout):
    """Losses, norms, scores, weights, moments, gradients of trees; checkpoints move, and resume to the bit."""
    model, expected = single(family)
    arguments = [str(model), str(tmp_path), layout.model_dump_json(), str(expected)]
    fork_ranks("tests.megatron_worker.fsdp_layout_ranks", *arguments, num_ranks=layout.world_size, timeout_s=500)
    for kind in fsdp_ranks.RATES:
        ours, theirs = tmp_path / kind, expected / kind
        histories = notes(ours, "history")
        assert len(histories) == layout.world_size
        for history in histories:
            for step, of_one in zip(history, notes(theirs, "history")[0], strict=True):
                assert step == pytest.approx(of_one, rel=1e-5)
        for scores in notes(ours, "logprob"):
            assert (torch.tensor(scores) - torch.tensor(notes(theirs, "logprob")[0])).abs().max() <= 1e-5
        assert notes(ours, "greedy") == notes(theirs, "greedy") * layout.world_size
        for sums in notes(ours, "weights"):
            assert sums == pytest.approx(notes(theirs, "weights")[0], rel=1e-5, abs=1e-4)
        fsdp_ranks.go_on(model, Layout(), ours / "middle", kind, ours / "to-single")
        for name in ("end", "from-single", "to-single"):
            assert furthest(tensors(ours / name), tensors(theirs / "end")) <= 1e-5
        assert checkpoint_bytes(ours / "end") == checkpoint_bytes(ours / "resumed")
    ours, theirs = (tensors(folder / "trees" / "optimizer") for folder in (tmp_path, expected))
    assert furthest(ours, theirs) <= 1e-5 * max(1.0, *(float(t.abs().max()) for t in theirs.values()))


# Tensor parallelism.


def test_a_model_without_a_plan_and_sizes_that_do_not_split_are_refused(tmp_path):
    folder = unknown_model(tmp_path / "stablelm", "stablelm")
    fork_ranks("tests.megatron_worker.fsdp_layout_ranks", "refused", str(folder), "no `tp_plan`", num_ranks=2)
    odd = unknown_model(tmp_path / "granite", "granite", intermediate_size=190)
    rule = "tp * dp = 4 does not divide the 190 of model.layers.0.mlp.gate_proj.weight that are split"
    fork_ranks("tests.megatron_worker.fsdp_layout_ranks", "refused", str(odd), rule, num_ranks=4)


# Experts.


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tied=False)


@pytest.mark.parametrize(("kind", "rate"), drawn([("lora", 3e-3), ("full", 3e-4)], 1))
def test_a_mixture_is_trained_as_by_the_other_engine(mixture, tmp_path, kind, rate):
    engines = {name: start(name, mixture, kind) for name in ("fsdp", "megatron")}
    for batch in (bin_of(STEPS[0][1]), as_tree(random_sequences(1))):
        ours, theirs = (logprobs(engine, batch) for engine in engines.values())
        assert (ours - theirs).abs().max() <= 1e-5
    ours, theirs = (train(engine, STEPS, learning_rate=rate) for engine in engines.values())
    for step, other in zip(ours, theirs, strict=True):
        assert step == pytest.approx(other, rel=1e-5)
    for name, engine in engines.items():
        engine.save(tmp_path / name)
    assert furthest(tensors(tmp_path / "fsdp"), tensors(tmp_path / "megatron")) <= 1e-5
    engines["fsdp"].load(tmp_path / "megatron")
    engines["megatron"].load(tmp_path / "fsdp")


def test_experts_of_swapped_halves_show(mixture, monkeypatch):
    """The comparison above would fail."""
    expected = logprobs(start("megatron", mixture), bin_of(STEPS[0][1]))
    monkeypatch.setitem(adapter._PARTS, "gate_up_proj", ("up_proj", "gate_proj"))
    assert (logprobs(start("fsdp", mixture), bin_of(STEPS[0][1])) - expected).abs().max() > 1e-3
