"""Micro-batches within a memory budget: live bytes are counted here, backward included, by a mode of the test's own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank import ForwardInput, TrainerRank
from megatron_worker.trainer_rank.packing import PackSize, pack
from shared.errors import InvalidInput
from shared.layout import Layout
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return MegatronEngine(distinct_model(tmp_path_factory.mktemp("model")), Layout(), "float32")


@pytest.fixture(scope="module")
def folders(engine, tmp_path_factory):
    return write_adapters(engine._folder, tmp_path_factory.mktemp("adapters"))


def new_rank(engine, folders, budget_bytes):
    engine.drop_training_state()
    rank = TrainerRank(engine, memory_budget_bytes=budget_bytes)
    load_adapters(rank, folders)
    return rank


def group(generator, longest, **asked):
    prompt = random_ids(generator, int(generator.integers(20, longest)))
    return [
        ForwardInput(prompt + random_ids(generator, int(generator.integers(5, longest))), adapter="one", **asked)
        for _ in range(6)
    ]


def labelled(generator, length):
    labels = generator.integers(0, VOCAB_SIZE, (length, 4))
    return [ForwardInput(random_ids(generator, length), labels=labels, top_k=8, adapter="two")]


WORKLOADS = {
    "rows": lambda g: [ForwardInput(random_ids(g, int(g.integers(5, 120))), target_logprobs=True, adapter="one")],
    "groups": lambda g: group(g, 60, target_logprobs=True, entropy=True),
    "labels": lambda g: labelled(g, int(g.integers(10, 100))),
    "logits": lambda g: [ForwardInput(random_ids(g, int(g.integers(5, 100))), logits=True, adapter="one")],
    "hidden": lambda g: [ForwardInput(random_ids(g, int(g.integers(5, 100))), hidden=True, adapter="two")],
    "frozen": lambda g: [ForwardInput(random_ids(g, int(g.integers(5, 200))), target_logprobs=True, adapter="frozen")],
    "mixed": lambda g: [random_input(g, longest=60) for _ in range(g.integers(1, 4))],
    "bushy": lambda g: group(g, 21, target_logprobs=True) + group(g, 21, top_k=2),
}


def run(rank, items):
    """A loop of micro-batches with their backwards. Returns the peak of live bytes, and what was planned."""
    plans = []
    with LiveBytes() as live:
        for micro_batch in rank.forward_micro_batches(items):
            rank.backward(some_loss([output for item in micro_batch.outputs for output in item]))
            plans.append(micro_batch.planning)
    return live.peak, plans


def test_no_budget_is_exceeded_and_large_ones_are_used(engine, folders):
    """200 random workloads. What is planned for one rank teaches the next loop, so each begins anew with its own."""
    generator = np.random.default_rng(11)
    shares = []
    for number in range(200):
        kind = list(WORKLOADS)[number % len(WORKLOADS)]
        budget_bytes = int(generator.choice([6, 12, 24])) * 1_000_000
        is_large = number % 5 == 0
        if number % 10 == 0 or not shares:
            rank = new_rank(engine, folders, budget_bytes)
        rank._budget_bytes = budget_bytes
        items = [WORKLOADS[kind](generator) for _ in range(generator.integers(1, 6))]
        if is_large:
            size = sum(len(asked.tokens) for item in items for asked in item) / len(items)
            items += [WORKLOADS[kind](generator) for _ in range(int(2.5 * budget_bytes / 13_000 / size))]
        peak, plans = run(rank, items)
        print(number, kind, len(plans), round(peak / budget_bytes, 3), [(p.estimated_bytes, p.previous_height_bytes) for p in plans][:6])
        if peak > budget_bytes: print("OVER")
        if len(plans) > 1:
            shares.append((kind, peak / budget_bytes))
        rank.zero_grad()
    print({kind: (min(s), max(s)) for kind in WORKLOADS if (s := [share for k, share in shares if k == kind])})
    assert len(shares) >= 30
    assert min(share for _, share in shares) >= 0.8


def test_micro_batches_give_what_one_forward_does(engine, folders):
    rank = new_rank(engine, folders, 4_000_000)
    generator = np.random.default_rng(5)
    items = [[random_input(generator) for _ in range(generator.integers(1, 4))] for _ in range(25)]
    inputs = [asked for item in items for asked in item]
    whole = rank.forward(inputs)
    rank.backward(sum((some_loss([output]) for output in whole), start=torch.zeros(())))
    expected = {name: gradient(rank, name) for name in ("one", "two")}
    rank.zero_grad()
    indices, outputs, plans = [], [], []
    for micro_batch in rank.forward_micro_batches(items):
        assert [tuple(items[place]) for place in micro_batch.indices] == list(micro_batch.inputs)
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
        assert (gradient(rank, name) - gradient_then).norm() <= 1e-5 * gradient_then.norm()


def test_an_item_that_cannot_fit_is_refused_before_anything_is_packed(engine, folders):
    rank = new_rank(engine, folders, 4_000_000)
    small = [ForwardInput(list(range(3, 43)), target_logprobs=True, adapter="one")]
    large = [ForwardInput([5] * 1000, target_logprobs=True, adapter="one")]
    loop = rank.forward_micro_batches([small, large, small])
    assert next(loop).indices == (0,)
    with LiveBytes() as live, pytest.raises(InvalidInput, match="it alone needs about") as refused:
        next(loop)
    assert refused.value.place == "items[1]"
    assert live.peak < 4_000_000 / 10
    assert rank.forward([*small])[0].target_logprob_P is not None  # the rank is as good as before


def test_without_gradients_more_fits(engine, folders):
    rank = new_rank(engine, folders, 4_000_000)
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

    rank = new_rank(engine, folders, 4_000_000)
    items = [[ForwardInput([5 + i] * 60, target_logprobs=True, adapter="one")] for i in range(60)]
    for _ in rank.forward_micro_batches(items):
        break
    assert not _get_current_dispatch_mode_stack()
    rank.optim_step(__import__("shared.jobs").jobs.Adam(), 1e-3, adapters=["one"])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 4))
def test_a_pack_is_as_large_as_planned_and_holds_every_sequence(sequences, min_shared_tokens):
    arrays = [np.array(ids) for ids in sequences]
    packed, size = pack(arrays, min_shared_tokens), PackSize(min_shared_tokens)
    for array in arrays:
        size.add(array)
    assert size.num_tokens == len(packed.token_id_T)
    assert size.num_tokens + size.num_shared == sum(map(len, sequences))
    assert sorted(packed.order) == list(range(len(sequences)))
    for ids, index_L in zip(sequences, packed.index_of, strict=True):
        assert packed.token_id_T[index_L].tolist() == ids
        assert packed.position_T[index_L].tolist() == list(range(len(ids)))
        assert packed.parent_T[index_L].tolist() == [-1, *index_L[:-1].tolist()]
