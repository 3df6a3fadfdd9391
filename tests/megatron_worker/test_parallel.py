"""Two and four ranks give what one gives: losses, norms, weights, files; and the tests notice what is broken."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.layout import Layout
from tests.megatron_worker import parallel_ranks
from tests.megatron_worker.launch import torchrun
from tests.megatron_worker.rows import distinct_model

LAYOUTS = {2: [Layout(tp=2), Layout(dp=2)], 4: [Layout(tp=2, dp=2)]}
LABELS = [layout.label for layouts in LAYOUTS.values() for layout in layouts]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results for each layout, `single` among them. One launch for each number of ranks."""
    out = tmp_path_factory.mktemp("parallel")
    model = distinct_model(out / "model")
    single = out / "single"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parallel_ranks.run(model, Layout(), single)
    parallel_ranks.run_trees(model, Layout(), single / "lora" / "end" / "weights", single / "trees")
    torch.set_num_threads(threads)
    shutil.copytree(single / "lora" / "end" / "weights", single / "damaged")
    data = (single / "damaged" / "adapter_model.safetensors").read_bytes()
    (single / "damaged" / "adapter_model.safetensors").write_bytes(data[:-100])
    for world, layouts in LAYOUTS.items():
        arguments = [str(model), str(out), str(single), *(layout.model_dump_json() for layout in layouts)]
        torchrun("tests.megatron_worker.parallel_ranks", *arguments, num_ranks=world, timeout_s=240)
    for label in LABELS:
        for kind in parallel_ranks.KINDS:
            parallel_ranks.go_on(model, Layout(), out / label / kind / "middle", kind, out / label / kind / "to-single")
    return out


def notes(folder: Path, name: str) -> list:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    merged = {}
    for path in sorted(folder.rglob("*.safetensors")):
        merged |= load_file(path)
    assert merged
    return merged


def furthest(folder: Path, other: Path) -> float:
    """The largest difference of any tensor of two checkpoints."""
    ours, theirs = tensors(folder), tensors(other)
    assert set(ours) == set(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


@pytest.mark.parametrize("kind", parallel_ranks.KINDS)
@pytest.mark.parametrize("label", LABELS)
class TestAgainstOneRank:
    def test_losses_and_norms(self, results, label, kind):
        expected = notes(results / "single" / kind, "history")[0]
        everyone = notes(results / label / kind, "history")
        assert len(everyone) == (4 if label == "tp2-dp2" else 2)
        for history in everyone:
            for ours, theirs in zip(history, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5)

    def test_weights_and_moments(self, results, label, kind):
        for step in ("middle", "end"):
            assert furthest(results / label / kind / step, results / "single" / kind / step) <= 1e-5

    def test_logprobs_entropies_and_greedy_tokens_on_every_rank(self, results, label, kind):
        expected = torch.tensor(notes(results / "single" / kind, "logprob")[0])
        for scores in notes(results / label / kind, "logprob"):
            assert (torch.tensor(scores) - expected).abs().max() <= 1e-5
        completions = notes(results / label / kind, "greedy")
        assert all(completion == completions[0] for completion in completions)
        assert completions[0] == notes(results / "single" / kind, "greedy")[0]

    def test_the_same_layout_resumes_to_the_bit(self, results, label, kind):
        files = [p for p in (results / label / kind / "end").rglob("*") if p.is_file()]
        assert len(files) >= 3
        for file in files:
            again = results / label / kind / "resumed" / "end" / file.relative_to(results / label / kind / "end")
            assert file.read_bytes() == again.read_bytes(), file

    def test_checkpoints_move_between_layouts(self, results, label, kind):
        for moved in ("from-single", "to-single"):
            assert furthest(results / label / kind / moved / "end", results / "single" / kind / "end") <= 1e-5

    def test_replicated_tensors_are_stored_once_and_whole(self, results, label, kind):
        ours = {n: t.shape for n, t in tensors(results / label / kind / "end").items()}
        assert ours == {n: t.shape for n, t in tensors(results / "single" / kind / "end").items()}


@pytest.mark.parametrize("label", LABELS)
def test_trees_score_and_learn_as_sequences_alone_on_many_ranks(results, label):
    """On each layout against chains on the same, and log-probabilities against one rank."""
    for by_logprob, by_gradient in notes(results / label / "trees", "differences"):
        assert by_logprob <= 2e-6
        assert by_gradient <= 2e-6
    expected = torch.tensor(notes(results / "single" / "trees", "logprob")[0])
    for scores in notes(results / label / "trees", "logprob"):
        assert (torch.tensor(scores) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("label", LABELS)
def test_every_rank_refuses_what_one_cannot_read(results, label):
    for said in notes(results / label, "refused"):
        assert "damaged or truncated" in said


@pytest.mark.parametrize("label", LABELS)
def test_every_rank_hears_that_one_cannot_write(results, label):
    for kind in parallel_ranks.KINDS:
        everyone = notes(results / label, f"{kind}-unsaved")
        assert everyone == ["Not a directory"] * (4 if label == "tp2-dp2" else 2)


@pytest.mark.parametrize(
    ("label", "fault", "shows_in"),
    [
        ("dp2", "skip-dp", "history"),
        ("dp2", "average-dp", "history"),
        ("tp2-dp2", "skip-dp", "history"),
        ("tp2", "drop-shard", "weights"),
        ("tp2", "local-norm", "history"),
        ("tp2", "same-shard", "history"),
        ("tp2-dp2", "drop-shard", "weights"),
    ],
)
def test_a_fault_shows(results, label, fault, shows_in):
    """The comparisons above would fail under each of these."""
    folder = results / label / "mutated" / fault
    if shows_in == "weights":
        assert furthest(folder / "middle", results / "single" / "lora" / "middle") > 1e-3
        return
    expected = notes(results / "single" / "lora", "history")[0][:3]
    for history in notes(folder, "history"):
        values = [value for step in history for value in step]
        assert values != pytest.approx([value for step in expected for value in step], rel=1e-4)
