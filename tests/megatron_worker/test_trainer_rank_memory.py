"""TrainerRank's micro-batches within a memory budget, and its answers on two and four ranks.

Live bytes are counted here, backward included, by a mode of the test's own.

    LONGSHORE_TEST_PLANNER_WORKLOADS=1000 python -m pytest -s tests/megatron_worker/test_trainer_rank_memory.py

Workloads are drawn by the commit (tests/run.sh); LONGSHORE_TEST_SEED repeats one.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from longshore.training import Adam, Layout
from megatron_worker.forwards import LEAST_SAVED, pack
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.mixers.tree_attention import plan_forest
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from shared.errors import InvalidInput
from tests.depth import SEED, drawn
from tests.megatron_worker import trainer_ranks
from tests.megatron_worker.launch import in_turn, on_ranks
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.ranks import (
    gradient,
    load_adapters,
    random_ids,
    random_input,
    some_loss,
    tensors_of,
    write_adapters,
)
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model
from tests.megatron_worker.trainer_ranks import Trial


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One layer: a token of a forward and backward holds about 7 kB."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield MegatronEngine(distinct_model(tmp_path_factory.mktemp("model"), num_layers=1), Layout(), "float32")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(engine, tmp_path_factory):
    return write_adapters(engine._folder, tmp_path_factory.mktemp("adapters"))


def new_rank(engine, folders, budget_bytes):
    for slot in list(engine.adapters):
        engine.drop_slot(slot)
    rank = TrainerRank(engine, memory_budget_bytes=budget_bytes)
    load_adapters(rank, folders)
    return rank


def group(generator, longest, **asked):
    prompt = random_ids(generator, int(generator.integers(16, 17 + longest)))
    return [
        ForwardInput(prompt + random_ids(generator, int(generator.integers(1, longest // 4))), adapter="one", **asked)
        for _ in range(6)
    ]


def row(generator, longest, adapter, **asked):
    return [ForwardInput(random_ids(generator, int(generator.integers(5, longest))), adapter=adapter, **asked)]


def labelled(generator, longest):
    length = int(generator.integers(5, longest))
    labels = generator.integers(0, VOCAB_SIZE, (length, 4))
    return [ForwardInput(random_ids(generator, length), labels=labels, top_k=8, adapter="two")]


WORKLOADS = {
    "rows": lambda g, longest: row(g, longest, "one", target_logprobs=True),
    "groups": lambda g, longest: group(g, longest, target_logprobs=True, entropy=True),
    "labels": labelled,
    "logits": lambda g, longest: row(g, longest, "one", logits=True),
    "hidden": lambda g, longest: row(g, longest, "two", hidden=True),
    "frozen": lambda g, longest: row(g, longest, "frozen", target_logprobs=True),
    "mixed": lambda g, longest: [random_input(g, longest=longest // 2) for _ in range(g.integers(1, 4))],
    "bushy": lambda g, longest: group(g, longest // 2, target_logprobs=True) + group(g, longest // 2, top_k=2),
}


NUM_WORKLOADS = int(os.environ.get("LONGSHORE_TEST_PLANNER_WORKLOADS") or 5 * len(WORKLOADS))  # one in five is large
LEAST_TOKEN_BYTES = {"frozen": 4_000, "mixed": 3_500, "bushy": 10_000}  # others: 7,000
LARGE_BUDGETS_MB = {"bushy": (9, 12)}  # one item of these is up to 2 MB; others: 3 or 4


def run(rank, items):
    """A loop of micro-batches with their backwards. Returns the peak of live bytes in each, and what was planned."""
    peaks, plans = [], []
    with LiveBytes() as live:
        for micro_batch in rank.forward_micro_batches(items):
            rank.backward(some_loss([output for item in micro_batch.outputs for output in item]))
            peaks.append(live.take_peak())
            plans.append(micro_batch.planning)
    return peaks, plans


@pytest.mark.slow
def test_no_budget_is_exceeded_and_large_ones_are_used(engine, folders):
    """Random workloads, five in a row on a rank; the first of them is large: more than four budgets of
    items, each a small part of one. The budget counts as used as far as the largest of a workload's micro-batches did:
    the last one is what was left, and others stand beside outputs that the loop still holds of the one before.
    """
    seed = SEED
    print(f"seed {seed} (LONGSHORE_TEST_SEED={seed} repeats it)")
    generator = np.random.default_rng(seed)
    largest, means, highest = {}, [], 0.0
    for number in range(NUM_WORKLOADS):
        is_large = number % 5 == 0
        kind = list(WORKLOADS)[(number // 5 if is_large else number) % len(WORKLOADS)]
        budget_mb = generator.choice(LARGE_BUDGETS_MB.get(kind, (3, 4)) if is_large else (3, 6))
        budget_bytes = int(budget_mb) * 1_000_000
        if is_large:
            rank = new_rank(engine, folders, budget_bytes)
        rank.memory_budget_bytes = budget_bytes
        items = [WORKLOADS[kind](generator, 24 if is_large else 40) for _ in range(generator.integers(1, 5))]
        if is_large:
            while rank_tokens(items) < 4.5 * budget_bytes / LEAST_TOKEN_BYTES.get(kind, 7_000):
                items += [WORKLOADS[kind](generator, 24) for _ in range(10)]
        peaks, plans = run(rank, items)
        highest = max(highest, max(peaks) / budget_bytes)
        assert max(peaks) <= budget_bytes, (seed, number, kind, max(peaks) / budget_bytes)
        if is_large:
            assert len(plans) > 4, (seed, number, kind)
            largest[number, kind] = max(peaks) / budget_bytes
            means += [peak / budget_bytes for peak in peaks[:-1]]
        rank.zero_grad()
    least = min(largest, key=largest.__getitem__)
    print(f"{NUM_WORKLOADS} workloads: at most {highest:.3f} of a budget; large ones used {largest[least]:.3f} or more")
    print(f"(the least: {least}); their micro-batches but the last {np.mean(means):.3f} on average")
    assert largest[least] >= 0.85, (seed, least)


def rank_tokens(items):
    """Of items on their own: what they share among each other is not counted."""
    return sum(len(pack([np.array(asked.tokens) for asked in item], 16).token_id_T) for item in items)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts in bfloat16, two layers."""
    model = distinct_model(tmp_path_factory.mktemp("mixture"), family="qwen3_moe")
    adapters = write_adapters(model, tmp_path_factory.mktemp("adapters"))
    return MegatronEngine(model, Layout(), "bfloat16"), adapters


@pytest.mark.parametrize("kind", drawn([*WORKLOADS], 3))
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_the_estimate_is_what_a_micro_batch_holds(engine, folders, mixture, model, kind):
    """Of few tokens, and of so many that the vocabulary is met in chunks of rows."""
    rank = new_rank(*((engine, folders) if model == "dense" else mixture), 100_000_000)
    generator = np.random.default_rng(1)
    found = []
    for longest, num_items in ((16, 1), (60, 2), (60, 20)):
        items = [WORKLOADS[kind](generator, longest) for _ in range(num_items)]
        next(rank.forward_micro_batches(items))  # measures what is not known yet
        ((peak,), (planning,)) = run(rank, items)
        found.append(peak / planning.estimated_bytes)
    print(kind, model, [round(ratio, 4) for ratio in found], peak)
    assert max(found) <= 1
    assert found[-1] >= 0.88


def test_both_counts_of_live_bytes_agree(engine, folders):
    """TrainerRank's own, which it measures with, and this test's."""
    rank = new_rank(engine, folders, 3_000_000)
    generator = np.random.default_rng(2)
    items = [[ForwardInput(random_ids(generator, 40), target_logprobs=True, adapter="one")] for _ in range(20)]
    next(rank.forward_micro_batches(items))
    with LiveBytes() as live:
        loop = rank.forward_micro_batches(items)
        rank.backward(some_loss([output for item in next(loop).outputs for output in item]))
        peak = live.take_peak()
        assert abs(peak - next(loop).planning.previous_peak_bytes) <= 0.002 * peak


def planned(rank, generator):
    """What a new rank plans for some items of all kinds, and the bytes that it measured on the way."""
    found = []
    for kind in WORKLOADS:
        items = [WORKLOADS[kind](generator, 24) for _ in range(20)]
        for micro_batch in rank.forward_micro_batches(items):
            rank.backward(some_loss([output for item in micro_batch.outputs for output in item]))
            found.append((micro_batch.indices, micro_batch.planning))
            del micro_batch
    return found


def test_eight_busy_processes_beside_it_change_no_plan(engine, folders):
    alone = planned(new_rank(engine, folders, 3_000_000), np.random.default_rng(4))
    program = "import os; os.nice(19)\nwhile True: bytearray(1 << 20)"  # busy, and the first to wait for a processor
    busy = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(8)]
    try:
        beside = planned(new_rank(engine, folders, 3_000_000), np.random.default_rng(4))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert beside == alone
    assert len(alone) > 3 * len(WORKLOADS)


def test_a_loss_that_takes_more_than_was_planned_for_is_learned(engine, folders):
    """It passes its budget once."""
    rank = new_rank(engine, folders, 3_000_000)
    items = [[ForwardInput([5 + i] * 20, logits=True, adapter="one")] for i in range(200)]
    peaks = []
    with LiveBytes() as live:
        for micro_batch in rank.forward_micro_batches(items):
            logits = torch.cat([output.logit_PV for item in micro_batch.outputs for output in item])
            copies = [logits * factor for factor in range(1, 6)]
            del micro_batch, logits
            rank.backward(sum(copy.square().mean() for copy in copies))
            del copies
            peaks.append(live.take_peak())
    assert peaks[0] > 3_000_000 * 1.2
    assert max(peaks[1:]) <= 3_000_000 * 1.01 and len(peaks) > 4


class SmallDevice(MegatronEngine):
    """It is out of memory beyond so many tokens."""

    def hidden_states(self, batch):
        if len(batch.token_id_T) > 300:
            raise torch.OutOfMemoryError("a device of 300 tokens")
        return super().hidden_states(batch)


def test_a_micro_batch_that_a_device_cannot_hold_is_halved(engine, folders):
    """To the same gradients, and an item that it cannot hold alone is refused."""
    generator = np.random.default_rng(7)
    items = [row(generator, 60, "one", target_logprobs=True) for _ in range(30)]
    gradients, shares = [], []
    for kind in (MegatronEngine, SmallDevice):
        rank = new_rank(kind(engine._folder, Layout(), "float32"), folders, 100_000_000)
        for micro_batch in rank.forward_micro_batches(items):
            outputs = [output for item in micro_batch.outputs for output in item]
            rank.backward(torch.stack([some_loss([output]) for output in outputs]).sum())
            shares.append(micro_batch.indices)
        gradients.append(gradient(rank, "one"))
    assert shares[0] == tuple(range(30)) and [place for share in shares[1:] for place in share] == list(range(30))
    assert len(shares) > 3
    assert (gradients[1] - gradients[0]).norm() <= 1e-6 * gradients[0].norm() > 0
    with pytest.raises(InvalidInput, match=r"items\[0\]: it alone takes more memory"):
        next(rank.forward_micro_batches([[ForwardInput([5] * 400, target_logprobs=True)]]))


def test_micro_batches_give_what_one_forward_does(engine, folders):
    rank = new_rank(engine, folders, 2_000_000)
    generator = np.random.default_rng(5)
    items = [[random_input(generator) for _ in range(generator.integers(1, 4))] for _ in range(25)]
    inputs = [asked for item in items for asked in item]
    whole = rank.forward(inputs)
    rank.backward(sum((some_loss([output]) for output in whole), start=torch.zeros(())))
    expected = {name: gradient(rank, name) for name in ("one", "two")}
    rank.zero_grad()
    indices, outputs, plans = [], [], []
    for micro_batch in rank.forward_micro_batches(items):
        assert micro_batch.inputs == micro_batch.select(items)
        flat = [output for item in micro_batch.outputs for output in item]
        rank.backward(sum((some_loss([output]) for output in flat), start=torch.zeros(())))
        indices += micro_batch.indices
        outputs += flat
        plans.append(micro_batch.planning)
    assert indices == list(range(25)) and len(plans) > 2
    assert [plan.num_items_left for plan in plans][-1] == 0
    assert [plan.number for plan in plans] == list(range(len(plans)))
    for ours, theirs in zip(outputs, whole, strict=True):
        ours, theirs = tensors_of(ours), tensors_of(theirs)
        assert set(ours) == set(theirs)
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5) for name in ours)
    for name, gradient_then in expected.items():
        assert (gradient(rank, name) - gradient_then).norm() <= 1e-6 * gradient_then.norm()


def test_an_item_that_cannot_fit_is_refused_before_anything_is_packed(engine, folders):
    rank = new_rank(engine, folders, 2_000_000)
    small = [ForwardInput(list(range(3, 43)), target_logprobs=True, adapter="one")]
    large = [ForwardInput([5] * 1000, target_logprobs=True, adapter="one")]
    loop = rank.forward_micro_batches([small, large, small])
    assert next(loop).indices == (0,)
    with LiveBytes() as live, pytest.raises(InvalidInput, match="it alone needs about") as refused:
        next(loop)
    assert refused.value.place == "items[1]"
    assert live.peak < 2_000_000 / 10
    assert rank.forward([*small])[0].target_logprob_P is not None  # the rank is as good as before


@pytest.mark.parametrize("no_grad", [False, True])
def test_the_inputs_of_an_item_go_through_in_several_passes_if_they_fit_so_alone(engine, folders, no_grad):
    """With equal outputs and gradients, within what was planned; in one pass the item is refused."""
    generator = np.random.default_rng(5)
    asked = {"target_logprobs": True, "adapter": "one", "no_grad": no_grad}
    scored = [ForwardInput(random_ids(generator, 50), **asked) for _ in range(24)]
    trained = ForwardInput(random_ids(generator, 50), target_logprobs=True, adapter="two")
    items = [[trained, *scored], [trained]]
    large = new_rank(engine, folders, 1 << 30)
    (micro_batch,) = large.forward_micro_batches(items)
    needed = micro_batch.planning.estimated_bytes
    expected = [output.target_logprob_P for item in micro_batch.outputs for output in item]
    large.backward(some_loss([output for item in micro_batch.outputs for output in item]))
    gradients = {name: gradient(large, name) for name in ("one", "two")}
    budget = int(needed * (0.3 if no_grad else 0.95))
    rank, passes, found = new_rank(engine, folders, budget), [], []
    rank.recompute = "off"
    hidden_states = rank.engine.hidden_states
    rank.engine.hidden_states = lambda batch: (passes.append(len(batch.token_id_T)), hidden_states(batch))[1]
    try:
        with LiveBytes() as live:
            for micro_batch in rank.forward_micro_batches(items):
                outputs = [output for item in micro_batch.outputs for output in item]
                found += [output.target_logprob_P.detach().clone() for output in outputs]
                rank.backward(some_loss(outputs))
                assert micro_batch.planning.estimated_bytes <= budget
                del micro_batch, outputs
    finally:
        del rank.engine.hidden_states
    assert live.peak <= budget and len(passes) > 3
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(found, expected, strict=True))
    for name, whole in gradients.items():
        assert (gradient(rank, name) - whole).norm() <= 1e-5 * whole.norm()
    rank.memory_budget_bytes = budget // 40
    with pytest.raises(InvalidInput, match=r"items\[0\]: it alone needs about"):
        next(rank.forward_micro_batches(items))


def test_without_gradients_more_fits(engine, folders):
    rank = new_rank(engine, folders, 2_000_000)
    items = [[ForwardInput([5 + i] * 60, target_logprobs=True, adapter="one")] for i in range(60)]
    with torch.no_grad():
        scored = [len(m.indices) for m in rank.forward_micro_batches(items)]
    trained = []
    for micro_batch in rank.forward_micro_batches(items):
        trained.append(len(micro_batch.indices))
        rank.backward(some_loss([item[0] for item in micro_batch.outputs]))
    assert len(scored) < len(trained)


def test_a_loop_that_is_left_leaves_nothing_behind(engine, folders):
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    rank = new_rank(engine, folders, 2_000_000)
    items = [[ForwardInput([5 + i] * 60, target_logprobs=True, adapter="one")] for i in range(60)]
    for micro_batch in rank.forward_micro_batches(items):
        assert micro_batch.indices
        break
    del micro_batch  # its graph goes with it
    assert not _get_current_dispatch_mode_stack()
    rank.backward(rank.forward(items[0])[0].target_logprob_P.sum())
    rank.optim_step(Adam(), 1e-3, adapters=["one"])


def branches(prefix, num_branches):
    return [[*prefix, 100 + number] for number in range(num_branches)]


@pytest.mark.parametrize(
    ("sequences", "num_tokens"),
    [
        (branches([1] * 7, 2), 16),
        (branches([1] * 8, 2), 10),
        (branches([1] * 2, 4), 12),
        (branches([1] * 2, 5), 7),  # the more branches, the shorter a prefix may be
        (branches([1] + [2] * 8, 3) + branches([1], 2), 12 + 4),  # each subtree for itself
        (branches([1] + [2] * 8, 3) + branches([1], 8), 1 + 11 + 8),
        ([[1, 2], [1, 2], [1, 3]], 4),  # equal sequences cost no branching
    ],
)
def test_a_prefix_is_shared_where_that_saves_eight_tokens(sequences, num_tokens):
    assert len(pack(list(map(np.array, sequences)), LEAST_SAVED).token_id_T) == num_tokens


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 4))
def test_a_pack_holds_every_sequence(sequences, least_saved_tokens):
    arrays = [np.array(ids) for ids in sequences]
    packed = pack(arrays, least_saved_tokens)
    assert sorted(packed.order) == list(range(len(sequences)))
    for ids, index_L in zip(sequences, packed.index_of, strict=True):
        assert packed.token_id_T[index_L].tolist() == ids
        assert packed.position_T[index_L].tolist() == list(range(len(ids)))
        assert packed.parent_T[index_L].tolist() == [-1, *index_L[:-1].tolist()]
    plan_forest(torch.from_numpy(packed.parent_T), torch.float32)  # depth first, else it raises
    num_branchings = np.count_nonzero(np.bincount(packed.parent_T[packed.parent_T >= 0]) > 1)
    assert sum(map(len, sequences)) - len(packed.token_id_T) >= num_branchings * least_saved_tokens


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


@pytest.mark.timeout(600)  # two launches of several ranks
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
class TestAgainstOneRank:
    def test_outputs_of_own_inputs(self, results, trial):
        name = trial.name
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

    @pytest.mark.parametrize("dealt", ["micro_batches", "in_parts"])
    def test_micro_batches_deal_out_each_item_once_and_alike(self, results, trial, dealt):
        expected = notes(results, single(trial.name), dealt)[0]["outputs"]
        everyone = notes(results, trial.name, dealt)
        num_replicas = trial.layout.tp * trial.layout.cp
        places = [place for ranks in everyone for place in ranks["outputs"]]
        assert sorted(places) == sorted(list(expected) * num_replicas)
        assert len({len(rank["indices"]) for rank in everyone}) == 1
        assert len(everyone[0]["indices"]) > 1 or trial.layout.world_size > 2 or dealt == "in_parts"
        assert len({tuple(rank["budgets"]) for rank in everyone}) == 1
        for rank in everyone:
            for place, item in rank["outputs"].items():
                for ours, theirs in zip(item, expected[place], strict=True):
                    assert furthest(ours, theirs) <= 2e-5

    def test_norms_and_stepped_weights(self, results, trial):
        result = trial.name
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
