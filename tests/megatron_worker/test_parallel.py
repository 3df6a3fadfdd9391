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
from tests.megatron_worker.differences import furthest, furthest_gradient, notes, rounding, scores_of
from tests.megatron_worker.launch import on_ranks
from tests.megatron_worker.parallel_ranks import KINDS, Trial
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
    4: [Layout(cp=4, ep=4), Layout(tp=2, sp=True, cp=2, ep=2)],
}
WINDOWS = {2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True, ep=2), Layout(pp=2), Layout(cp=2)]}
LATENT = {
    2: [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2)],
    4: [Layout(tp=2, sp=True, cp=2, ep=2)],
}
MAMBA = {2: [Layout(tp=2), Layout(tp=2, sp=True), Layout(dp=2), Layout(cp=2)], 4: [Layout(cp=4)]}
MAMBA_EXPERTS = {
    2: [Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2), Layout(pp=2), Layout(cp=2, ep=2)],
    4: [Layout(pp=2, ep=2, dp=2), Layout(tp=2, sp=True, cp=2, ep=2)],
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
FIRST = {2: ("dense", Layout(tp=2)), 4: ("dense", Layout(tp=2, dp=2))}  # where what no layout changes is tried
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
TRIALS = drawn(ALL_TRIALS, 2, always=[*FIRST.values(), *EXACT])
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
    parallel_ranks.run(folder, Layout(), single)
    for kind in KINDS:
        parallel_ranks.go_on(folder, Layout(), single / kind / "middle", kind, single / kind / "from-single")
    if name == FIRST[2][0]:
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
class TestAgainstOneRank:
    def test_losses_and_norms(self, results, name, kind):
        expected = notes(single_of(results, name) / kind, "history")[0]
        everyone = notes(results / name / kind, "history")
        assert len(everyone) == dict(zip(NAMES, TRIALS, strict=True))[name][1].world_size
        for history in everyone:
            for ours, theirs in zip(history, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5)

    @pytest.mark.parametrize("data", ["sft", "rl"])
    def test_every_gradient(self, results, name, kind, data):
        ours, theirs = results / name / kind, single_of(results, name) / kind
        path = f"from-single/{data}-gradients.safetensors"
        assert furthest_gradient(ours / path, theirs / path) <= 1e-5

    def test_weights_and_moments(self, results, name, kind):
        for step in ("middle", "end"):
            assert furthest(results / name / kind / step, single_of(results, name) / kind / step) <= 1e-5

    def test_logprobs_entropies_and_greedy_tokens_on_every_rank(self, results, name, kind):
        single = single_of(results, name) / kind
        expected = notes(single, "scores")[0]
        for found in notes(results / name / kind, "scores"):
            for ours, theirs in zip(found, expected, strict=True):  # of rows, of trees
                assert (torch.tensor(ours) - torch.tensor(theirs)).abs().max() <= 1e-5
        for completions in notes(results / name / kind, "greedy"):
            assert completions == notes(single, "greedy")[0]

    def test_the_same_layout_resumes_to_the_bit(self, results, name, kind):
        end = results / name / kind / "end"
        files = [p for p in end.rglob("*") if p.is_file()]
        assert len(files) >= 3
        for file in files:
            again = results / name / kind / "resumed" / "end" / file.relative_to(end)
            assert file.read_bytes() == again.read_bytes(), file

    def test_one_rank_s_checkpoint_goes_on(self, results, name, kind):
        ours, theirs = results / name / kind / "from-single", single_of(results, name) / kind / "from-single"
        assert furthest(ours / "end", theirs / "end") <= 1e-5
        for history in notes(ours, "history"):
            for step, expected in zip(history, notes(theirs, "history")[0], strict=True):
                assert step == pytest.approx(expected, rel=1e-5)


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
    expected = notes(single_of(results, name), "named")[0]
    for found in notes(results / name, "named"):
        assert found == expected


@pytest.mark.parametrize(
    ("name", "kind"), [(name, KINDS[place % 2]) for place, name in enumerate(NAMES) if name not in OF_TWO]
)
def test_a_checkpoint_of_many_ranks_goes_on_on_one(results, tmp_path, name, kind):
    model, _label = name.split("/")
    parallel_ranks.resume(results / "models" / model, Layout(), results / name / kind / "middle", kind, tmp_path)
    assert furthest(tmp_path / "end", single_of(results, name) / kind / "end") <= 1e-5


@pytest.mark.parametrize("world", FIRST)
def test_every_rank_refuses_what_one_cannot_read(results, world):
    model, layout = FIRST[world]
    everyone = notes(results / model / layout.label, "refused")
    assert len(everyone) == world
    assert all("damaged or truncated" in said for said in everyone)


def test_tensor_parallel_ranks_drop_the_same_of_an_input_that_they_share(results):
    model, layout = FIRST[2]
    (expected,) = notes(single_of(results, model), "dropping")
    for found in notes(results / model / layout.label, "dropping"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world", FIRST)
def test_every_rank_hears_that_one_cannot_write(results, world):
    model, layout = FIRST[world]
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
            assert furthest(folder / kind / "middle", single / kind / "middle") > 1e-3
            continue
        expected = [value for step in notes(single / kind, "history")[0][:2] for value in step]
        for history in notes(folder / kind, "history"):
            assert [value for step in history for value in step] != pytest.approx(expected, rel=1e-4)
