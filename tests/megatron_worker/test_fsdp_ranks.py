"""Two and three FSDP ranks give what one gives, shards even or not; and the tests notice what is broken."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from longshore.layout import Layout
from shared.errors import InvalidInput
from tests.depth import drawn
from tests.megatron_worker import fsdp_ranks
from tests.megatron_worker.engines import checkpoint_bytes, furthest, start
from tests.megatron_worker.launch import fork_ranks
from tests.megatron_worker.rows import distinct_model

WORLDS = drawn([2, 3], 1)  # three divides none of the model's sizes but one
KINDS = list(fsdp_ranks.RATES)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results for each number of ranks, `single` among them."""
    out = tmp_path_factory.mktemp("fsdp")
    model, single = distinct_model(out / "model", tied=False), out / "single"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fsdp_ranks.run(model, Layout(), single)
    fsdp_ranks.run_trees(model, Layout(), single / "lora" / "end" / "weights", single / "trees")
    shutil.copytree(single / "lora" / "end" / "weights", single / "damaged")
    data = (single / "damaged" / "adapter_model.safetensors").read_bytes()
    (single / "damaged" / "adapter_model.safetensors").write_bytes(data[:-100])
    for world in WORLDS:
        arguments = [str(model), str(out / str(world)), str(single)]
        fork_ranks("tests.megatron_worker.fsdp_ranks", *arguments, num_ranks=world, timeout_s=500)
        for kind in KINDS:
            folder = out / str(world) / kind
            fsdp_ranks.go_on(model, Layout(), folder / "middle", kind, folder / "to-single")
    torch.set_num_threads(threads)
    return out


def notes(folder: Path, name: str) -> list:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    merged = {n: t for path in sorted(folder.rglob("*.safetensors")) for n, t in load_file(path).items()}
    assert merged
    return merged


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
class TestAgainstOneRank:
    def test_losses_and_norms(self, results, world, kind):
        expected = notes(results / "single" / kind, "history")[0]
        everyone = notes(results / str(world) / kind, "history")
        assert len(everyone) == world
        for history in everyone:
            for ours, theirs in zip(history, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5)

    def test_weights_and_moments(self, results, world, kind):
        for step in ("middle", "end"):
            ours, theirs = (tensors(results / name / kind / step) for name in (str(world), "single"))
            difference = furthest(ours, theirs)
            print(f"{world} ranks, {kind}, {step}: {difference:.1e}")
            assert difference <= 1e-5

    def test_logprobs_entropies_greedy_tokens_and_named_weights_on_every_rank(self, results, world, kind):
        expected = torch.tensor(notes(results / "single" / kind, "logprob")[0])
        for scores in notes(results / str(world) / kind, "logprob"):
            assert (torch.tensor(scores) - expected).abs().max() <= 1e-5
        for completions in notes(results / str(world) / kind, "greedy"):
            assert completions == notes(results / "single" / kind, "greedy")[0]
        for sums in notes(results / str(world) / kind, "weights"):
            assert sums == pytest.approx(notes(results / "single" / kind, "weights")[0], rel=1e-5, abs=1e-4)

    def test_as_many_ranks_resume_to_the_bit(self, results, world, kind):
        folder = results / str(world) / kind
        assert checkpoint_bytes(folder / "end") == checkpoint_bytes(folder / "resumed")

    def test_checkpoints_move_between_numbers_of_ranks(self, results, world, kind):
        for moved in ("from-single", "to-single"):
            ours, theirs = tensors(results / str(world) / kind / moved), tensors(results / "single" / kind / "end")
            assert furthest(ours, theirs) <= 1e-5

    def test_offload_leaves_declared_host_buffers_and_every_bit(self, results, world, kind):
        for undeclared, on_device, same in notes(results / str(world), f"offload-{kind}"):
            assert (undeclared, on_device, same) == (0, 0, True)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_trees(results, world):
    ours, theirs = (tensors(results / name / "trees" / "optimizer") for name in (str(world), "single"))
    assert furthest(ours, theirs) <= 1e-5 * max(1.0, *(float(t.abs().max()) for t in theirs.values()))


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_hears_what_one_cannot_read_or_write(results, world):
    refused, unsaved = notes(results / str(world), "refused"), notes(results / str(world), "unsaved")
    assert len(refused) == world and all("damaged or truncated" in said for said in refused)
    assert unsaved == ["Not a directory"] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "fault", ["lora-skip-sum", "lora-average", "full-local-norm", "full-average", "full-drop-shard"]
)
def test_a_fault_shows(results, world, fault):
    """The comparisons above would fail under each of these."""
    folder, kind = results / str(world) / "mutated" / fault, fault.split("-")[0]
    if fault.endswith("drop-shard"):
        assert furthest(tensors(folder / "middle"), tensors(results / "single" / kind / "middle")) > 1e-3
        return
    expected = [value for step in notes(results / "single" / kind, "history")[0][:3] for value in step]
    for history in notes(folder, "history"):
        assert [value for step in history for value in step] != pytest.approx(expected, rel=1e-4)


def test_a_layout_of_pipeline_stages_is_refused(results):
    with pytest.raises(InvalidInput, match=r"by tp alone.*pp2"):
        start("fsdp", results / "model", layout=Layout(pp=2))


def test_a_family_of_recurrent_layers_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path, ["hello there"], family="qwen3_5")
    with pytest.raises(InvalidInput, match=r"fsdp trains qwen3, qwen3_moe, .*, olmo3, phi3, not qwen3_5: use megatron"):
        start("fsdp", folder)
