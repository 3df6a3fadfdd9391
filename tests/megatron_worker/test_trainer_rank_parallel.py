"""TrainerRank on two and four ranks against one: outputs, micro-batches, norms, stepped weights, refusals. What of it
can be said in commands is done by a session of the same layout as well.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from longshore.training import Layout
from tests.depth import drawn
from tests.megatron_worker import trainer_ranks
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.ranks import write_adapters
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.trainer_ranks import Trial

# The experts' layouts, and all of fsdp's, are of ranks that go in step.
ALL_TRIALS = [
    *(Trial(model="dense", layout=layout) for layout in (Layout(dp=2), Layout(tp=2, sp=True))),
    *(Trial(model="dense", layout=layout) for layout in (Layout(cp=2), Layout(tp=2, dp=2))),
    Trial(model="dense", engine="fsdp", layout=Layout(dp=2)),
    Trial(model="experts", layout=Layout(ep=2, dp=2)),
    Trial(model="experts", layout=Layout(ep=2, dp=4)),
    Trial(model="experts", layout=Layout(tp=2, sp=True, ep=4, dp=2)),
]
TRIALS = drawn(ALL_TRIALS, 1)
MODELS = {"dense": {}, "experts": {"family": "qwen3_moe", "tied": False}}
pytestmark = [pytest.mark.drawn, pytest.mark.timeout(600)]  # two launches of several ranks


def single(name: str) -> str:
    """The results of one rank that a trial's are to be like."""
    model, _, *rest = name.split("/")
    return "/".join((Trial(model=model).name, *rest))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results for each trial, those of one rank among them. One launch for each number of ranks."""
    out = tmp_path_factory.mktemp("ranks")
    for name in {trial.model for trial in TRIALS}:
        model = distinct_model(out / name / "model", **MODELS[name])
        write_adapters(model, out / name / "adapters")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        trainer_ranks.run(Trial(model=name), out)
        torch.set_num_threads(threads)
    for world in sorted({trial.layout.world_size for trial in TRIALS}):
        trials = [trial for trial in TRIALS if trial.layout.world_size == world]
        on_ranks(world, in_turn, trainer_ranks.run, [(trial, out) for trial in trials], timeout_s=500)
    return out


def notes(results, trial, name):
    return [json.loads(path.read_text()) for path in sorted((results / trial).glob(f"{name}-*.json"))]


def furthest(ours, theirs):
    """The largest difference of any output of two that are named alike."""
    assert set(ours) == set(theirs)
    differences = [0.0]
    for name in ours:
        if ours[name] and ours[name][0] != []:
            differences.append(float((torch.tensor(ours[name]) - torch.tensor(theirs[name])).abs().max()))
    return max(differences)


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
class TestAgainstOneRank:
    @pytest.mark.parametrize("way", ["name", "session"], ids=["direct", "session"])
    def test_outputs_of_own_inputs(self, results, trial, way):
        name = getattr(trial, way)
        expected, seen, relative = notes(results, single(name), "own")[0], set(), []
        for own in notes(results, name, "own"):
            for place, outputs in own.items():
                assert furthest(outputs, expected[place]) <= 2e-5
                seen.add(place)
                if "target_logprob_P" in outputs:
                    ours, theirs = (torch.tensor(x["target_logprob_P"]) for x in (outputs, expected[place]))
                    relative.append(((ours - theirs) / theirs).abs())
        assert seen == set(expected)
        mean_relative = float(torch.cat(relative).mean())
        print(name, "mean relative difference of target logprobs", mean_relative)
        assert mean_relative <= 2e-6

    def test_micro_batches_deal_out_each_item_once_and_alike(self, results, trial):
        expected = notes(results, single(trial.name), "micro_batches")[0]["outputs"]
        everyone = notes(results, trial.name, "micro_batches")
        num_replicas = trial.layout.tp * trial.layout.cp
        places = [place for ranks in everyone for place in ranks["outputs"]]
        assert sorted(places) == sorted(list(expected) * num_replicas)
        assert len({len(rank["indices"]) for rank in everyone}) == 1
        assert len(everyone[0]["indices"]) > 1 or trial.layout.world_size > 2
        assert len({tuple(rank["budgets"]) for rank in everyone}) == 1
        for rank in everyone:
            for place, item in rank["outputs"].items():
                for ours, theirs in zip(item, expected[place], strict=True):
                    assert furthest(ours, theirs) <= 2e-5

    @pytest.mark.parametrize("way", ["name", "session"], ids=["direct", "session"])
    def test_norms_and_stepped_weights(self, results, trial, way):
        result = getattr(trial, way)
        expected = notes(results, single(result), "norms")[0]
        for norms in notes(results, result, "norms"):
            for (ours, clipped), (theirs, theirs_clipped) in zip(norms, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5) and clipped == theirs_clipped
        assert any(clipped for _, clipped in expected)
        for name in ("one", "two"):
            file = f"{name}/adapter_model.safetensors"
            ours, theirs = load_file(results / result / file), load_file(results / single(result) / file)
            assert set(ours) == set(theirs)
            assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) <= 1e-5

    def test_the_base_s_norm_and_stepped_weights(self, results, trial):
        expected = notes(results, single(trial.name), "base")[0]
        for norm in notes(results, trial.name, "base"):
            assert norm == pytest.approx(expected, rel=1e-5)
        ours, theirs = (
            load_file(results / name / "base/model.safetensors") for name in (trial.name, single(trial.name))
        )
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) <= 1e-5

    def test_what_one_must_refuse_all_refuse(self, results, trial):
        everyone = notes(results, trial.name, "refusals")
        assert all(said == everyone[0] for said in everyone)
        assert everyone[0] == [
            "items[1]: it alone needs about ",
            "items: every rank must give ",
            "items[1][0].tokens: 999 to 999 are not al",
            "adapter 'one': d, or let its outputs go",
            "adapter 'one': d, or let its outputs go",
            "adapter 'one': n; no weight has changed",
        ]

    def test_forwards_and_backwards_need_not_be_alike(self, results, trial):
        """Ranks ask different slots, drop outputs, and go backward with the later forward first."""
        (size,) = notes(results, trial.name, "uneven")[0]
        expected = notes(results, single(trial.name), "uneven")[0][size]
        assert all(norm > 0.01 for norm in expected.values())
        for norms in notes(results, trial.name, "uneven"):
            assert norms[size] == pytest.approx(expected, rel=1e-5)

    def test_a_rank_out_of_step_is_refused_by_all(self, results, trial):
        everyone = notes(results, trial.name, "refused_in_step")
        goes_in_step = trial.engine == "fsdp" or trial.model == "experts"
        assert len(everyone) == (trial.layout.world_size if goes_in_step else 0)
        for said in everyone:
            assert said == [
                "forward: some ranks keep a gra",
                "loss: the backbone of these",
                "inputs[0].tokens: 999 to 999 are not al",
            ]
