"""TrainerRank's adapters on one rank: which one answers, what steps change and keep; and what `start` takes."""

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.losses import PPO
from longshore.training import Adam, Layout, Lora
from megatron_worker.engine import Scores
from megatron_worker.losses import loss_function
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank import ForwardInput, TrainerRank, prefetch, start, train_head
from megatron_worker.trainer_rank.rank import _WRITING
from shared.errors import InvalidInput
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.ranks import (
    LORAS,
    gradient,
    load_adapters,
    random_ids,
    random_input,
    reference_logits,
    some_loss,
    write_adapters,
)
from tests.megatron_worker.rows import distinct_model
from tests.megatron_worker.trees import as_tree, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = [list(range(100, 200))] * 4
"""A hundred of the vocabulary, to be scored at four positions."""


@pytest.fixture
def own_rank(model, folders):
    """For tests that step, load or drop."""
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"))
    load_adapters(rank, folders)
    rank.set_adapter("one")
    return rank


class Value(torch.nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(hidden_size, 1)

    def scores(self, hidden_NH: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"value": self.out(hidden_NH)[:, 0]}


def not_finite(adapter: Path, folder: Path, number: float) -> tuple[Path, str]:
    """A copy of an adapter with this number as the last of its last tensor; and that tensor's name."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = number
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder, name


class TestAdapters:
    def test_the_with_block_switches_for_its_length_alone(self, own_rank):
        asked = [ForwardInput([5, 6, 7], logits=True)]
        with torch.no_grad():
            expected = {
                name: own_rank.forward([ForwardInput([5, 6, 7], logits=True, adapter=name)])[0].logit_PV
                for name in ("one", "two", None)
            }
            with own_rank.adapter("two"):
                with own_rank.adapter(None):
                    assert torch.equal(own_rank.forward(asked)[0].logit_PV, expected[None])
                assert torch.equal(own_rank.forward(asked)[0].logit_PV, expected["two"])
            assert torch.equal(own_rank.forward(asked)[0].logit_PV, expected["one"])
            with pytest.raises(RuntimeError, match="on purpose"), own_rank.adapter("two"):
                raise RuntimeError("on purpose")
        assert own_rank.active_adapter == "one"

    def test_a_missing_or_mismatched_adapter_changes_nothing(self, own_rank, folders, tmp_path):
        before = own_rank.snapshot("one").tensors
        with pytest.raises(InvalidInput, match="missing"):
            own_rank.load_adapter("one", tmp_path / "absent", trainable=True)
        with pytest.raises(InvalidInput, match="rank is 2, 4 is asked for"):
            own_rank.load_adapter("one", folders["two"], trainable=True, lora=LORAS["one"])
        other = distinct_model(tmp_path / "wider", hidden_size=32)
        narrow = write_adapters(other, tmp_path / "narrow")
        with pytest.raises(InvalidInput, match="has shape"):
            own_rank.load_adapter("one", narrow["one"], trainable=True)
        for number in (torch.nan, torch.inf, -torch.inf):
            broken, name = not_finite(folders["one"], tmp_path / f"broken{number}", number)
            rule = f"{broken}/adapter_model.safetensors: tensor {name} holds a number that is not finite"
            with pytest.raises(InvalidInput, match=re.escape(rule)):
                own_rank.load_adapter("one", broken, trainable=True)
        assert own_rank.active_adapter == "one"
        after = own_rank.snapshot("one").tensors
        assert all(torch.equal(before[name], after[name]) for name in before)
        for call in (own_rank.set_adapter, own_rank.drop_adapter, own_rank.snapshot):
            with pytest.raises(InvalidInput, match="no adapter 'absent'; loaded: frozen, one, two"):
                call("absent")

    def test_loading_again_replaces_weights_and_moments(self, own_rank, folders):
        step(own_rank, ["one"])
        own_rank.load_adapter("one", folders["one"], trainable=True)
        first = step(own_rank, ["one"])
        fresh = own_rank.snapshot("one").tensors
        own_rank.load_adapter("one", folders["one"], trainable=True)
        assert step(own_rank, ["one"]) == first
        assert all(torch.equal(fresh[name], t) for name, t in own_rank.snapshot("one").tensors.items())

    def test_a_slot_whose_graph_is_alive_is_neither_stepped_nor_loaded(self, own_rank, folders):
        refused = pytest.raises(InvalidInput, match="graph of it is alive")
        outputs = own_rank.forward([ForwardInput([5, 6, 7], target_logprobs=True)])
        for call in (
            lambda: own_rank.optim_step(Adam(), 1e-3),
            lambda: own_rank.load_adapter("one", folders["one"], trainable=True),
            lambda: own_rank.create_adapter("one", LORAS["one"], 0),
            lambda: own_rank.drop_adapter("one"),
        ):
            with refused:
                call()
        step(own_rank, ["two"])  # another slot's graph is another matter
        outputs[0].target_logprob_P.sum().backward(retain_graph=True)
        with refused:
            own_rank.optim_step(Adam(), 1e-3)
        own_rank.backward(outputs[0].target_logprob_P.sum())
        own_rank.optim_step(Adam(), 1e-3)  # its backward is done, though its outputs are held
        outputs = own_rank.forward([ForwardInput([5, 6, 7], target_logprobs=True)])
        kept = outputs[0].target_logprob_P.detach()
        del outputs
        own_rank.load_adapter("one", folders["one"], trainable=True)  # nobody holds what came of it
        assert kept.isfinite().all()

    def test_frozen_slots_and_the_base_are_not_trained(self, own_rank):
        outputs = own_rank.forward([ForwardInput([5, 6], logits=True, adapter=name) for name in ("frozen", None)])
        assert not any(output.logit_PV.requires_grad for output in outputs)
        with pytest.raises(InvalidInput, match="not trainable"):
            own_rank.optim_step(Adam(), 1e-3, adapters=["frozen"])
        with pytest.raises(InvalidInput, match="no adapter is active"), own_rank.adapter(None):
            own_rank.optim_step(Adam(), 1e-3)


def step(rank, names, scale=1.0, adam=None):
    """One step of some adapters on inputs of their own."""
    outputs = rank.forward(
        [ForwardInput(list(range(5 + i, 25 + i)), target_logprobs=True, adapter=n) for i, n in enumerate(names)]
    )
    rank.backward(sum((-scale * output.target_logprob_P.sum() for output in outputs), start=torch.zeros(())))
    return rank.optim_step(adam or Adam(), 1e-3, 19.0, adapters=names)


class TestSteps:
    def test_norm_and_clip_are_of_each_adapter(self, own_rank, model, folders):
        together = step(own_rank, ["one", "two"], adam=Adam(clip_norm=0.5))
        assert together["one"].grad_norm != together["two"].grad_norm
        for number, name in enumerate(("one", "two")):
            rank = TrainerRank(MegatronEngine(model, Layout(), "float32"))
            load_adapters(rank, folders)
            outputs = rank.forward(
                [ForwardInput(list(range(5 + number, 25 + number)), target_logprobs=True, adapter=name)]
            )
            rank.backward(-outputs[0].target_logprob_P.sum())
            expected = gradient(rank, name).norm() / 19
            alone = rank.optim_step(Adam(clip_norm=0.5), 1e-3, 19.0, adapters=[name])
            assert together[name] == alone[name] and together[name].clipped
            assert alone[name].grad_norm == pytest.approx(float(expected), rel=1e-6)
            ours, theirs = own_rank.snapshot(name).tensors, rank.snapshot(name).tensors
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    def test_a_gradient_that_is_not_finite_changes_no_weight_of_any(self, own_rank):
        before = {name: own_rank.snapshot(name).tensors for name in ("one", "two")}
        outputs = own_rank.forward(
            [ForwardInput([5, 6, 7], target_logprobs=True, adapter=name) for name in ("one", "two")]
        )
        own_rank.backward(outputs[0].target_logprob_P.sum() + float("inf") * outputs[1].target_logprob_P.sum())
        with pytest.raises(InvalidInput, match="no weight has changed") as refused:
            own_rank.optim_step(Adam(), 1e-3, adapters=["one", "two"])
        assert refused.value.place == "adapter 'two'"
        for name, tensors in before.items():
            after = own_rank.snapshot(name).tensors
            assert all(torch.equal(tensors[key], after[key]) for key in tensors)
            assert not gradient(own_rank, name).any()
        assert step(own_rank, ["one", "two"])["one"].grad_norm > 0

    def test_a_detached_loss_is_refused_where_there_was_a_graph(self, own_rank):
        outputs = own_rank.forward([ForwardInput([5, 6, 7], target_logprobs=True)])
        with pytest.raises(InvalidInput, match="detached"):
            own_rank.backward(outputs[0].target_logprob_P.detach().sum())
        own_rank.backward(outputs[0].target_logprob_P.sum())
        own_rank.backward(torch.zeros(()))  # nothing to learn from, and nothing forgotten

    @pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan")])
    def test_a_denominator_must_be_positive(self, own_rank, denominator):
        with pytest.raises(InvalidInput, match=r"positive number|greater than 0|finite"):
            own_rank.optim_step(Adam(), 1e-3, denominator)


class TestState:
    def test_an_export_is_what_peft_reads(self, own_rank, model, tmp_path):
        step(own_rank, ["two"])
        own_rank.export("two", tmp_path / "two")
        with torch.no_grad():
            (ours,) = own_rank.forward([ForwardInput([9, 8, 7, 6], labels=LABELS, adapter="two")])
        expected = reference_logits(model, tmp_path / "two", [9, 8, 7, 6]).log_softmax(-1)[:, LABELS[0]]
        assert (ours.label_logprob_PK - expected).abs().max() <= 2e-5

    def test_a_snapshot_stays_as_it_was(self, own_rank, folders, tmp_path):
        snapshot = own_rank.snapshot("one")
        step(own_rank, ["one"])
        snapshot.write(tmp_path / "then")
        stored = load_file(folders["one"] / "adapter_model.safetensors")
        then, now = load_file(tmp_path / "then" / "adapter_model.safetensors"), own_rank.snapshot("one").tensors
        assert all(torch.equal(stored[name], then[name]) for name in stored)
        assert any(not torch.equal(stored[name], now[name]) for name in stored)

    def test_saved_and_loaded_steps_go_on_to_the_bit(self, own_rank, tmp_path):
        step(own_rank, ["one", "two"])
        own_rank.save("two", tmp_path / "middle")
        expected = step(own_rank, ["two"])
        tensors = own_rank.snapshot("two").tensors
        step(own_rank, ["two"])
        own_rank.load("two", tmp_path / "middle")
        assert step(own_rank, ["two"]) == expected
        again = own_rank.snapshot("two").tensors
        assert all(torch.equal(tensors[name], again[name]) for name in tensors)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_state_is_copied_and_written_beside_later_steps(model, folders, tmp_path, engine):
    """What is written is what `save` wrote then, with a head of the caller's, and steps continue from it to the bit."""
    torch.manual_seed(3)
    rank = TrainerRank(ENGINES[engine](model, Layout(), "float32"))
    load_adapters(rank, folders)
    head = Value(rank.facts.hidden_size)
    train_head(rank, "two", head)
    step(rank, ["one", "two"])
    rank.save("two", tmp_path / "at-once")
    has_stepped = threading.Event()
    _WRITING.submit(has_stepped.wait)  # one thread writes: nothing is written before
    copied = rank.save_in_background("two", tmp_path / "background")
    expected = step(rank, ["two"])
    has_stepped.set()
    assert copied.result() is None
    names = [path.relative_to(tmp_path / "at-once") for path in (tmp_path / "at-once").rglob("*") if path.is_file()]
    assert len(names) == 3
    for name in names:
        assert (tmp_path / "at-once" / name).read_bytes() == (tmp_path / "background" / name).read_bytes(), name
    step(rank, ["two"])
    rank.load("two", tmp_path / "background")
    assert step(rank, ["two"]) == expected
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        rank.save_in_background("two", tmp_path / "file" / "below").result()
    with pytest.raises(InvalidInput, match="the base: a copy of all weights"):
        rank.save_in_background(None, tmp_path / "base")


def test_the_next_adapter_is_read_ahead(own_rank, folders):
    read = prefetch(folders["two"])
    assert read.result() == sum(path.stat().st_size for path in folders["two"].iterdir()) > 0
    own_rank.load_adapter("next", folders["two"], trainable=False)
    asked = [ForwardInput([9, 8, 7, 6], target_logprobs=True, adapter=name) for name in ("two", "next")]
    two, again = own_rank.forward(asked)
    assert torch.equal(two.target_logprob_P, again.target_logprob_P)
    with pytest.raises(FileNotFoundError):
        prefetch(folders["two"] / "absent").result()


def test_the_gradient_of_a_bin_of_trees_is_the_runners_to_the_bit(model, folders):
    """PPO over groups that share prefixes: `engine.forward_backward` as the runner calls it, and TrainerRank."""
    loss = loss_function(PPO(), temperature=0.8)
    rows = random_sequences(3, num_groups=1)[1:]
    batch = as_tree(rows)
    engine = MegatronEngine(model, Layout(), "float32")
    engine.load_adapter("one", folders["one"], None, trainable=True)
    sums = engine.forward_backward(batch, loss)
    expected = engine.trained.optimizer.grad.buffer
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"), least_saved_tokens=1)
    load_adapters(rank, folders)
    outputs = rank.forward(
        [
            ForwardInput(
                row.token_ids,
                np.flatnonzero(row.target_mask) - 1,
                target_logprobs=True,
                entropy=True,
                adapter="one",
                temperature=0.8,
            )
            for row in rows
        ]
    )
    scores = Scores(torch.cat([o.target_logprob_P for o in outputs]), torch.cat([o.entropy_P for o in outputs]))
    ours = loss.sums(scores, batch)
    rank.backward(ours.loss)
    assert torch.equal(ours.loss.detach(), sums["loss"])
    assert expected.any() and torch.equal(gradient(rank, "one"), expected)


def test_a_fresh_adapter_changes_nothing_until_it_is_stepped(own_rank):
    own_rank.create_adapter("fresh", Lora(rank=4, alpha=8), seed=3)
    with torch.no_grad():
        asked = [ForwardInput([5, 6, 7, 8], labels=LABELS, adapter=adapter) for adapter in (None, "fresh")]
        base, fresh = (own_rank.forward([each])[0].label_logprob_PK for each in asked)
        assert torch.equal(fresh, base)
    before = {name: own_rank.snapshot(name).tensors for name in ("one", "fresh")}
    step(own_rank, ["fresh"])
    after = own_rank.snapshot("one").tensors
    assert all(torch.equal(before["one"][key], after[key]) for key in after)
    assert any(not torch.equal(before["fresh"][key], t) for key, t in own_rank.snapshot("fresh").tensors.items())


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("model"), num_layers=4)


@pytest.fixture(scope="module")
def deep_folders(deep_model, tmp_path_factory):
    return write_adapters(deep_model, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("engine", ENGINES)
def test_forwards_of_several_adapters_are_computed_again_with_their_own(deep_model, deep_folders, engine):
    """One backward of two forwards, whose slots are mixed; then the base, with a frozen adapter beside it."""
    found = {}
    for recompute in ("off", "on"):
        rank = start(deep_model, engine=engine, recompute=recompute)
        load_adapters(rank, deep_folders)
        generator = np.random.default_rng(3)
        outputs = [rank.forward([random_input(generator) for _ in range(12)]) for _ in range(2)]
        rank.backward(some_loss([output for of_call in outputs for output in of_call]))
        gradients = [gradient(rank, name) for name in ("one", "two")]
        rank.drop_adapter("one")
        rank.drop_adapter("two")
        rank.train_base()
        asked = [ForwardInput(random_ids(generator, 9), hidden=True, adapter=name) for name in (None, "frozen", None)]
        rank.backward(some_loss(rank.forward(asked)))
        found[recompute] = [*gradients, gradient(rank, None)]
    for ours, again in zip(*found.values(), strict=True):
        assert ours.any() and torch.equal(ours, again)


def test_micro_batches_recompute_where_an_item_fits_in_no_other_way(deep_model, deep_folders):
    items = [[ForwardInput([5 + n] * length, hidden=True, adapter="one")] for n, length in enumerate((30, 9, 120, 9))]
    estimates, peaks, gradients = {}, {}, {}
    for recompute, budget in (("off", 1 << 30), ("on", 1 << 30), ("auto", None)):
        budget = budget or (estimates["off"] + estimates["on"]) // 2  # of the longest
        rank = TrainerRank(ENGINES["megatron"](deep_model, Layout(), "float32"), budget, recompute=recompute)
        load_adapters(rank, deep_folders)
        if recompute != "auto":
            estimates[recompute] = next(rank.forward_micro_batches(items[2:3])).planning.estimated_bytes
        with LiveBytes() as live:
            for micro_batch in rank.forward_micro_batches(items):
                rank.backward(some_loss([item[0] for item in micro_batch.outputs]))
                del micro_batch
            peaks[recompute] = live.peak
        assert rank.recomputes == (recompute == "on")
        gradients[recompute] = gradient(rank, "one")
    assert estimates["on"] < 0.7 * estimates["off"] and peaks["on"] < 0.7 * peaks["off"]
    assert peaks["auto"] <= (estimates["off"] + estimates["on"]) // 2
    assert (gradients["auto"] - gradients["off"]).norm() <= 1e-6 * gradients["off"].norm()
    rank = TrainerRank(rank.engine, budget, recompute="off")
    with pytest.raises(InvalidInput, match=r"items\[0\]: it alone needs about"):
        next(rank.forward_micro_batches([[ForwardInput([5] * 4000, hidden=True)]]))


def test_a_quantized_base_and_moments_of_eight_bits(deep_model):
    rank = start(deep_model, quantize_base="nf4", optimizer_states="8bit")
    rank.create_adapter("one", Lora(rank=4), seed=0)
    asked = ForwardInput([5, 9, 7, 11, 6], target_logprobs=True)
    losses = []
    for _ in range(3):
        loss = -rank.forward([asked])[0].target_logprob_P.sum()
        rank.backward(loss)
        rank.optim_step(Adam(), 1e-2)
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    plain = start(deep_model)
    plain.create_adapter("one", Lora(rank=4), seed=0)
    held, whole = (each.engine.memory().parts for each in (rank, plain))
    assert held["weights"].device < 0.9 * whole["weights"].device
    assert held["optimizer"].device < 0.7 * whole["optimizer"].device
    rank.drop_adapter("one")
    with pytest.raises(InvalidInput, match="the base: quantized weights are frozen"):
        rank.train_base()
    rank.create_adapter("one", Lora(rank=4), seed=0)
    with pytest.raises(InvalidInput, match="quantize_base: the engine fsdp holds weights as they are"):
        start(deep_model, engine="fsdp", quantize_base="int8")
