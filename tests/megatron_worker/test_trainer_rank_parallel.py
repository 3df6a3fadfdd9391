"""TrainerRank on two and four ranks against one: outputs, micro-batches, norms, stepped weights, refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file

from shared.layout import Layout
from tests.megatron_worker import trainer_ranks
from tests.megatron_worker.launch import torchrun
from tests.megatron_worker.ranks import write_adapters
from tests.megatron_worker.rows import distinct_model

LAYOUTS = {2: [Layout(dp=2), Layout(tp=2, sp=True), Layout(cp=2)], 4: [Layout(tp=2, dp=2), Layout(tp=2, cp=2)]}
pytestmark = pytest.mark.timeout(600)  # two launches of several ranks
LABELS = [layout.label for layouts in LAYOUTS.values() for layout in layouts]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results for each layout, `single` among them. One launch for each number of ranks."""
    out = tmp_path_factory.mktemp("ranks")
    model = distinct_model(out / "model")
    folders = write_adapters(model, out / "adapters")
    trainer_ranks.run(model, folders, Layout(), out / "single")
    for world, layouts in LAYOUTS.items():
        arguments = [str(model), str(out / "adapters"), str(out), *(layout.model_dump_json() for layout in layouts)]
        torchrun("tests.megatron_worker.trainer_ranks", *arguments, num_ranks=world, timeout_s=240)
    return out


def notes(results, label, name):
    return [json.loads(path.read_text()) for path in sorted((results / label).glob(f"{name}-*.json"))]


def furthest(ours, theirs):
    """The largest difference of any output of two that are named alike."""
    assert set(ours) == set(theirs)
    differences = [0.0]
    for name in ours:
        if ours[name] and ours[name][0] != []:
            differences.append(float((torch.tensor(ours[name]) - torch.tensor(theirs[name])).abs().max()))
    return max(differences)


@pytest.mark.parametrize("label", LABELS)
class TestAgainstOneRank:
    def test_outputs_of_own_inputs(self, results, label):
        single, seen, relative = notes(results, "single", "own")[0], set(), []
        for own in notes(results, label, "own"):
            for place, outputs in own.items():
                assert furthest(outputs, single[place]) <= 2e-5
                seen.add(place)
                if "target_logprob_P" in outputs:
                    ours, theirs = (torch.tensor(x["target_logprob_P"]) for x in (outputs, single[place]))
                    relative.append(((ours - theirs) / theirs).abs())
        assert seen == set(single)
        mean_relative = float(torch.cat(relative).mean())
        print(label, "mean relative difference of target logprobs", mean_relative)
        assert mean_relative <= 2e-6

    def test_micro_batches_deal_out_each_item_once_and_alike(self, results, label):
        single = notes(results, "single", "micro_batches")[0]["outputs"]
        everyone = notes(results, label, "micro_batches")
        layout = next(x for layouts in LAYOUTS.values() for x in layouts if x.label == label)
        places = [place for ranks in everyone for place in ranks["outputs"]]
        assert sorted(places) == sorted(list(single) * layout.tp * layout.cp)
        assert len({len(rank["indices"]) for rank in everyone}) == 1 < len(everyone[0]["indices"])
        assert len({tuple(rank["budgets"]) for rank in everyone}) == 1
        for rank in everyone:
            for place, item in rank["outputs"].items():
                for ours, theirs in zip(item, single[place], strict=True):
                    assert furthest(ours, theirs) <= 2e-5

    def test_norms_and_stepped_weights(self, results, label):
        expected = notes(results, "single", "norms")[0]
        for norms in notes(results, label, "norms"):
            for (ours, clipped), (theirs, theirs_clipped) in zip(norms, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5) and clipped == theirs_clipped
        assert any(clipped for _, clipped in expected)
        for name in ("one", "two"):
            file = f"{name}/adapter_model.safetensors"
            ours, theirs = load_file(results / label / file), load_file(results / "single" / file)
            assert set(ours) == set(theirs)
            assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) <= 1e-5

    def test_what_one_must_refuse_all_refuse(self, results, label):
        everyone = notes(results, label, "refusals")
        assert all(said == everyone[0] for said in everyone)
        assert everyone[0] == [
            "items[1]: it alone needs about ",
            "items: every rank must give ",
            "items[1][0].tokens: 999 to 999 are not al",
            "adapter 'one': d, or let its outputs go",
            "adapter 'one': d, or let its outputs go",
            "adapter 'one': n; no weight has changed",
        ]
