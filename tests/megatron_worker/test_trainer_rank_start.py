"""What `start` takes beside a model: how the base and the moments are held, and layers that are computed again."""

import numpy as np
import pytest
import torch

from longshore.training import Adam, Layout, Lora
from megatron_worker.trainer_rank import ForwardInput, TrainerRank, start
from shared.errors import InvalidInput
from tests.megatron_worker.engines import ENGINES
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.ranks import gradient, load_adapters, random_ids, random_input, some_loss, write_adapters
from tests.megatron_worker.rows import distinct_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("model"), num_layers=4)


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    return write_adapters(model, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("engine", ENGINES)
def test_forwards_of_several_adapters_are_computed_again_with_their_own(model, folders, engine):
    """One backward of two forwards, whose slots are mixed; then the base, with a frozen adapter beside it."""
    found = {}
    for recompute in ("off", "on"):
        rank = start(model, engine=engine, recompute=recompute)
        load_adapters(rank, folders)
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


def test_micro_batches_recompute_where_an_item_fits_in_no_other_way(model, folders):
    items = [[ForwardInput([5 + n] * length, hidden=True, adapter="one")] for n, length in enumerate((30, 9, 120, 9))]
    estimates, peaks, gradients = {}, {}, {}
    for recompute, budget in (("off", 1 << 30), ("on", 1 << 30), ("auto", None)):
        budget = budget or (estimates["off"] + estimates["on"]) // 2  # of the longest
        rank = TrainerRank(ENGINES["megatron"](model, Layout(), "float32"), budget, recompute=recompute)
        load_adapters(rank, folders)
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


def test_a_quantized_base_and_moments_of_eight_bits(model):
    rank = start(model, quantize_base="nf4", optimizer_states="8bit")
    rank.create_adapter("one", Lora(rank=4), seed=0)
    asked = ForwardInput([5, 9, 7, 11, 6], target_logprobs=True)
    losses = []
    for _ in range(3):
        loss = -rank.forward([asked])[0].target_logprob_P.sum()
        rank.backward(loss)
        rank.optim_step(Adam(), 1e-2)
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    plain = start(model)
    plain.create_adapter("one", Lora(rank=4), seed=0)
    held, whole = (each.engine.memory().parts for each in (rank, plain))
    assert held["weights"].device < 0.9 * whole["weights"].device
    assert held["optimizer"].device < 0.7 * whole["optimizer"].device
    rank.drop_adapter("one")
    with pytest.raises(InvalidInput, match="the base: quantized weights are frozen"):
        rank.train_base()
    rank.create_adapter("one", Lora(rank=4), seed=0)
    with pytest.raises(InvalidInput, match="quantize_base: the engine fsdp holds weights as they are"):
        start(model, engine="fsdp", quantize_base="int8")
