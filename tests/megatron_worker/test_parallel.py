"""Two and four ranks give what one gives, under every layout: scores, losses, gradients, norms, weights, files.

One launch for each number of ranks. Of layouts and of faults each run of the suite tries a part.
`python -m benchmarks.layouts` measures many more layouts.
"""

import shutil
from pathlib import Path

import pytest
import torch

from longshore.training import Layout
from tests.depth import drawn
from tests.megatron_worker import parallel_ranks
from tests.megatron_worker.differences import from_one_rank, furthest, notes, rounding, scores_of
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.parallel_ranks import FIRST, KINDS, LEARNING_RATES, STEPS, Trial
from tests.megatron_worker.rows import EXPERTS_BESIDE, distinct_model

DENSE = {
    2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2)],
    4: [
        Layout(tp=2, dp=2),
        Layout(tp=2, sp=True, pp=2),
        Layout(tp=2, sp=True, cp=2),
        Layout(pp=2, cp=2),
    ],  # stages and contexts beside data: with experts
}
EXPERTS = {
    2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2)],
    4: [
        Layout(tp=2, sp=True, ep=2, dp=2),
        Layout(pp=2, ep=2, dp=2),
        Layout(cp=2, ep=2, dp=2),
        Layout(ep=2, etp=2, dp=4),
    ],
}
HYBRID = {
    2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)],
    4: [Layout(tp=2, dp=2), Layout(cp=4), Layout(cp=2, dp=2), Layout(pp=2, cp=2)],
}
HYBRID_EXPERTS = {
    2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2), Layout(cp=2, ep=2)],
    4: [
        Layout(cp=4, ep=4),
        Layout(tp=2, sp=True, cp=2, ep=2),
        Layout(cp=2, ep=2, dp=2),
        Layout(pp=2, cp=2, ep=2),
    ],
}
WINDOWS = {2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True, ep=2), Layout(pp=2), Layout(cp=2)]}
LATENT = {
    2: [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2)],
    4: [Layout(tp=2, sp=True, cp=2, ep=2)],
}
MAMBA = {2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(dp=2), Layout(cp=2)], 4: [Layout(cp=4)]}
MAMBA_EXPERTS = {
    2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2), Layout(pp=2), Layout(cp=2, ep=2)],
    4: [
        Layout(pp=2, ep=2, dp=2),
        Layout(tp=2, sp=True, cp=2, ep=2),
        Layout(cp=2, ep=2, dp=2),
        Layout(pp=2, cp=2, ep=2),
    ],
}
GEMMA3 = {2: [Layout(pp=2), Layout(cp=2)]}
GEMMA4 = {2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(cp=2)], 4: [Layout(tp=2, dp=2)]}
GEMMA4_EXPERTS = {2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True), Layout(tp=2, sp=True, ep=2)]}
GRANITE = {2: [Layout(tp=2), Layout(pp=2)]}
FUSED = {2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2)], 4: [Layout(tp=2, dp=2)]}
GRANITE_HYBRID = {
    2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2, ep=2)],
    4: [Layout(tp=2, sp=True, cp=2, ep=2)],
}
CONVOLUTIONS = {2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)], 4: [Layout(cp=4)]}
OLMO = {2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)], 4: [Layout(tp=2, dp=2)]}
MODELS: dict[str, dict] = {
    "dense": {"num_layers": 3},
    "experts": {"family": "qwen3_moe", "tied": False},
    "hybrid": {"family": "qwen3_5", "tied": False},
    "hybrid-experts": {"family": "qwen3_5_moe", "tied": False},
    "windows": {"family": "gpt_oss", "tied": False},
    "latent": {"family": "deepseek_v3", "tied": False},
    "mamba": {"family": "nemotron_h", "config": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}},
    "mamba-experts": {"family": "nemotron_h"},
    "gemma3": {"family": "gemma3"},
    "gemma4": {"family": "gemma4", "num_layers": 4},
    "gemma4-experts": {"family": "gemma4", "config": EXPERTS_BESIDE},
    "granite": {"family": "granite"},
    "olmo": {"family": "olmo3", "tied": False},
    "fused": {"family": "phi3", "tied": False},
    "granite-hybrid": {"family": "granitemoehybrid", "num_layers": 4},
    "convolutions": {"family": "lfm2", "num_layers": 4},
}
# By model and layout: what is broken there, and in what it must show.
ALL_FAULTS = {
    ("dense", "dp2"): {"skip-reduce": "history", "average-for-sum": "history", "local-count": "history"},
    ("dense", "tp2"): {"drop-shard": "lora weights", "local-norm": "history", "same-shard": "lora history"},
    ("dense", "tp2-sp"): {"forget-finalize": "full history"},
    ("dense", "pp2"): {"forget-tied": "full history", "local-norm": "history"},
    ("dense", "cp2"): {"skip-reduce": "history", "own-context": "history"},
    ("experts", "ep2-dp2"): {"forget-copies": "full history", "own-tokens": "history"},
    ("experts", "tp2-sp-etp2"): {"forget-finalize": "full history", "drop-shard": "lora weights"},
}  # of two ranks: four show the same ones, for three times the work
OF_WORLD = {2: ("dense", Layout(tp=2)), 4: ("dense", Layout(tp=2, dp=2))}  # where what no layout changes is tried
ALL_TRIALS = [
    (name, layout)
    for name, worlds in zip(
        MODELS,
        (
            DENSE,
            EXPERTS,
            HYBRID,
            HYBRID_EXPERTS,
            WINDOWS,
            LATENT,
            MAMBA,
            MAMBA_EXPERTS,
            GEMMA3,
            GEMMA4,
            GEMMA4_EXPERTS,
            GRANITE,
            OLMO,
            FUSED,
            GRANITE_HYBRID,
            CONVOLUTIONS,
        ),
        strict=True,
    )
    for own in worlds.values()
    for layout in own
]
EXACT = [("dense", Layout(pp=2)), ("dense", Layout(dp=2))]  # they add no rounding
TRIALS = drawn(ALL_TRIALS, 2, always=[*OF_WORLD.values(), *EXACT])
NAMES, NOT_ROUNDING = ([f"{name}/{layout.label}" for name, layout in trials] for trials in (TRIALS, EXACT))
FAULTS = drawn(
    [
        (*place, fault, shows_in)
        for place, faults in ALL_FAULTS.items()
        if "/".join(place) in NAMES
        for fault, shows_in in faults.items()
    ],
    4,
)
OF_TWO = [name for name, (_, layout) in zip(NAMES, TRIALS, strict=True) if layout.world_size == 2]
ROUNDED = drawn(OF_TWO, 1, always=NOT_ROUNDING)  # in bfloat16, too
pytestmark = pytest.mark.drawn


def make_single(out: Path, name: str, **model: object) -> Path:
    """The model, and one rank's results."""
    folder = distinct_model(out / "models" / name, **model)
    parallel_ranks.round_weights(folder / "model.safetensors")
    threads, single = torch.get_num_threads(), out / name / "single"
    torch.set_num_threads(1)
    for kind in KINDS:
        parallel_ranks.begin(folder, Layout(), kind, single / kind)
        first, out_of_kind = single / kind / FIRST, single / kind
        parallel_ranks.measure(folder, Layout(), kind, first, STEPS[1:], out_of_kind, num_noted=2)
    if name == OF_WORLD[2][0]:
        parallel_ranks.drop(folder, Layout(), single)
    parallel_ranks.round_adapter(single / "lora" / "end" / "weights", single / "rounded")
    for folder_name, dtype in (("bfloat16", "bfloat16"), ("exact", "float32")):
        parallel_ranks.run_rounded(folder, Layout(), single / "rounded", single / folder_name, dtype)
    torch.set_num_threads(threads)
    shutil.copytree(single / "lora" / "end" / "weights", single / "damaged")
    weights = single / "damaged" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results for each model and layout, `single` among them."""
    out = tmp_path_factory.mktemp("parallel")
    models = {name: make_single(out, name, **MODELS[name]) for name in dict.fromkeys(name for name, _ in TRIALS)}
    for world in (2, 4):
        trials = [
            Trial(
                model=models[name],
                layout=layout,
                faults={fault: shows_in for *place, fault, shows_in in FAULTS if place == [name, layout.label]},
                rounds=f"{name}/{layout.label}" in ROUNDED,
            )
            for name, layout in TRIALS
            if layout.world_size == world
        ]
        on_ranks(world, parallel_ranks.do_trials, trials, out, timeout_s=350)
    return out


def single_of(results: Path, name: str) -> Path:
    return results / name.split("/")[0] / "single"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_layout_begins_goes_on_and_resumes_as_one_rank_does(results, name, kind):
    """A first step of fresh weights, and steps of rows and of trees from one rank's checkpoint of it."""
    ours, theirs = results / name / kind, single_of(results, name) / kind
    everyone, (expected,) = notes(ours, "first"), notes(theirs, "first")
    assert len(everyone) == dict(zip(NAMES, TRIALS, strict=True))[name][1].world_size
    for ((loss, norm),) in everyone:
        assert (loss, norm) == pytest.approx(tuple(expected[0]), rel=1e-5)
    for checkpoint in (FIRST, "middle"):
        assert furthest(ours / checkpoint, theirs / checkpoint) <= 1e-5
    found = from_one_rank(ours, theirs)
    print(name, kind, found)
    assert found.pop("resumes")
    assert max(found.values()) <= 1e-5
    assert all(completions == notes(theirs, "greedy")[0] for completions in notes(ours, "greedy"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_rounds_no_worse_than_on_one_rank(results, name, kind):
    ours, single = results / name / "bfloat16" / kind, single_of(results, name)
    layout = dict(zip(NAMES, TRIALS, strict=True))[name][1]
    found = rounding(layout, ours, single / "bfloat16" / kind, single / "exact" / kind)
    print(name, kind, found)
    for what in ("logprob", "gradient"):
        assert 1e-4 < found[what] <= found["bound"] * found[f"one_rank_{what}"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NOT_ROUNDING)
def test_stages_and_data_add_no_rounding(results, name, kind):
    """What crosses ranks there is handed on as it is, or summed in float32."""
    expected = scores_of(notes(single_of(results, name) / "bfloat16" / kind, "scores")[0], 0)
    for noted in notes(results / name / "bfloat16" / kind, "scores"):
        assert torch.equal(scores_of(noted, 0), expected)


@pytest.mark.parametrize("name", NAMES)
def test_named_weights_are_whole_on_every_rank(results, name):
    expected = notes(single_of(results, name) / "full", "named")[0]
    for found in notes(results / name / "full", "named"):
        assert found == expected


@pytest.mark.parametrize(
    ("name", "kind"), [(name, KINDS[place % 2]) for place, name in enumerate(NAMES) if name not in OF_TWO]
)
def test_a_checkpoint_of_many_ranks_goes_on_on_one(results, tmp_path, name, kind):
    model, _label = name.split("/")
    engine = parallel_ranks.start(results / "models" / model, Layout(), kind)
    engine.load(results / name / kind / "middle")
    parallel_ranks.step(engine, *STEPS[2], LEARNING_RATES[kind])
    engine.save(tmp_path / "end")
    assert furthest(tmp_path / "end", single_of(results, name) / kind / "end") <= 1e-5


@pytest.mark.parametrize("world", OF_WORLD)
def test_every_rank_refuses_what_one_cannot_read(results, world):
    model, layout = OF_WORLD[world]
    everyone = notes(results / model / layout.label, "refused")
    assert len(everyone) == world
    assert all("damaged or truncated" in said for said in everyone)


def test_tensor_parallel_ranks_drop_the_same_of_an_input_that_they_share(results):
    model, layout = OF_WORLD[2]
    (expected,) = notes(single_of(results, model), "dropping")
    for found in notes(results / model / layout.label, "dropping"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world", OF_WORLD)
def test_every_rank_hears_that_one_cannot_write(results, world):
    model, layout = OF_WORLD[world]
    for kind in KINDS:
        assert notes(results / model / layout.label, f"{kind}-unsaved") == ["Not a directory"] * world


@pytest.mark.parametrize(
    ("name", "fault", "shows_in"), [(f"{model}/{label}", fault, shows_in) for model, label, fault, shows_in in FAULTS]
)
def test_a_fault_shows(results, name, fault, shows_in):
    """The comparisons above would fail under each of these."""
    folder, single = results / name / "faults" / fault, single_of(results, name)
    for kind in parallel_ranks.kinds_shown(shows_in):
        if "weights" in shows_in:
            assert furthest(folder / kind / FIRST, single / kind / FIRST) > 1e-3
            continue
        steps = [notes(single / kind, name)[0][0] for name in ("first", "history")]
        expected = [value for step in steps for value in step]
        for history in notes(folder / kind, "history"):
            assert [value for step in history for value in step] != pytest.approx(expected, rel=1e-4)
