"""TrainerRank trains every weight of the base: gradients as transformers', steps, files, and what stands beside it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from longshore.training import Adam
from megatron_worker.trainer_rank import ForwardInput, ForwardOutput, start
from shared.errors import InvalidInput
from tests.megatron_worker.engines import ENGINES, moments
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.ranks import LORAS, gradient, load_adapters, random_ids, some_loss
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=ENGINES)
def rank(request, model):
    rank = start(model, engine=request.param)
    rank.train_base()
    return rank


IDS = random_ids(np.random.default_rng(0), 300)  # more than one chunk of rows
LABELS = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB_SIZE, (299, 3)))
WEIGHTS = torch.linspace(-1, 1, 299)


def picked(logit_PV, id_PK):
    return (logit_PV / 0.7).log_softmax(-1).gather(1, id_PK)


# Each kind of output, and the same of a model's logits [P, V] and hidden states [P, H].
KINDS = {
    "targets": (
        {"target_logprobs": True, "temperature": 0.7},
        lambda o: (WEIGHTS * o.target_logprob_P).sum(),
        lambda logits, _: (WEIGHTS * picked(logits, torch.tensor(IDS)[1:, None])[:, 0]).sum(),
    ),
    "labels": (
        {"labels": LABELS, "temperature": 0.7},
        lambda o: (WEIGHTS[:, None] * o.label_logprob_PK).sum(),
        lambda logits, _: (WEIGHTS[:, None] * picked(logits, LABELS)).sum(),
    ),
    "top": (
        {"top_k": 3, "temperature": 0.7},
        lambda o: (WEIGHTS[:, None] * o.top_k.logprob_PK).sum(),
        lambda logits, _: (WEIGHTS[:, None] * picked(logits, logits.topk(3).indices)).sum(),
    ),
    "logits": (
        {"logits": True},
        lambda o: (WEIGHTS[:, None] * o.logit_PV.sin()).sum(),
        lambda logits, _: (WEIGHTS[:, None] * logits.sin()).sum(),
    ),
    "hidden": (
        {"hidden": True},
        lambda o: (WEIGHTS[:, None] * o.hidden_PH).sum(),
        lambda _, hidden: (WEIGHTS[:, None] * hidden).sum(),
    ),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_every_output_are_transformers(tmp_path, engine, tied):
    folder = distinct_model(tmp_path / "model", tied=tied)
    rank = start(folder, engine=engine)
    rank.train_base()
    for kind, (asked, loss_of, loss_of_model) in KINDS.items():
        reference = AutoModelForCausalLM.from_pretrained(folder)
        found = reference(torch.tensor([IDS]), output_hidden_states=True)
        loss_of_model(found.logits[0, :-1], found.hidden_states[-1][0, :-1]).backward()
        rank.backward(loss_of(rank.forward(ForwardInput(IDS, positions=range(299), **asked))))
        rank.optim_step(Adam(beta1=0.0, clip_norm=0.0), 0.0)  # the first moment is the gradient
        rank.save(None, tmp_path / kind)
        ours = moments(tmp_path / kind)
        for name, parameter in reference.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert (ours[name] - expected).norm() <= 2e-5 * expected.norm() + 1e-6, (kind, name)


def step(rank):
    output = rank.forward(ForwardInput(IDS[:30], target_logprobs=True))
    rank.backward(-output.target_logprob_P.sum())
    return rank.optim_step(Adam(), 1e-2, 29.0)


def weights(rank):
    return {name: tensor.clone() for name, tensor in rank.engine.named_weights()}


def equal(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_steps_go_on_to_the_bit_and_an_export_is_what_transformers_reads(rank, tmp_path):
    norms = step(rank)
    assert norms[None].grad_norm > 0
    rank.save(None, tmp_path / "middle")
    expected = step(rank)
    after = weights(rank)
    step(rank)
    rank.load(None, tmp_path / "middle")
    assert step(rank) == expected and equal(weights(rank), after)
    rank.export(None, tmp_path / "model")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(torch.tensor([IDS[:9]])).logits[0]
        ours = rank.forward(ForwardInput(IDS[:9], logits=True)).logit_PV
    assert (ours - logits).abs().max() <= 2e-5


def test_it_is_trained_alone_and_then_as_it_was_published(rank, folders, tmp_path):
    rank.load_adapter("frozen", folders["frozen"], trainable=False)
    for call in (
        lambda: rank.create_adapter("new", LORAS["one"], 0),
        lambda: rank.load_adapter("one", folders["one"], trainable=True),
        rank.train_base,
    ):
        with pytest.raises(InvalidInput, match="trained, alone"):
            call()
    output = rank.forward(ForwardInput(IDS[:30], target_logprobs=True))  # by the adapter, with a gradient for the base
    with pytest.raises(InvalidInput, match="graph of it is alive") as refused:
        rank.optim_step(Adam(), 1e-2, adapters=[None])
    assert refused.value.place == "the base"
    rank.backward(output.target_logprob_P.sum())
    assert rank.optim_step(Adam(), 1e-2, adapters=[None])[None].grad_norm > 0
    changed = weights(rank)
    rank.drop_adapter(None)
    assert not rank.trains_base and rank.adapters == {"frozen": False}
    rank.set_adapter(None)
    with torch.no_grad():
        logits = rank.forward(ForwardInput(IDS[:9], logits=True)).logit_PV
        published = AutoModelForCausalLM.from_pretrained(rank.engine._folder)(torch.tensor([IDS[:9]])).logits[0]
    assert (logits - published).abs().max() <= 2e-5 and not equal(weights(rank), changed)
    with pytest.raises(InvalidInput, match="train_base first"):
        rank.optim_step(Adam(), 1e-2, adapters=[None])
    load_adapters(rank, folders)
    with pytest.raises(InvalidInput, match="drop one, two first"):
        rank.train_base()


@pytest.mark.parametrize(
    "asked", [{"target_logprobs": True}, {"labels": LABELS[:40, :2], "top_k": 2}, {"logits": True}]
)
def test_micro_batches_of_the_base_fit_and_give_what_one_forward_does(model, asked):
    rank = start(model, memory_budget_bytes=3_000_000)
    rank.train_base()
    items = [ForwardInput([n, *IDS[n : n + 39]], **asked) for n in range(60)]
    rank.backward(some_loss(rank.forward(items)))
    expected = gradient(rank, None)
    rank.zero_grad()
    peaks, outputs = [], 0
    with LiveBytes() as live:
        for micro_batch in rank.forward_micro_batches(items):
            # as `some_loss` of all: it weighs outputs by their number
            nothing = [ForwardOutput() for _ in range(outputs)]
            rank.backward(some_loss([*nothing, *micro_batch.outputs]))
            outputs += len(micro_batch.outputs)
            del micro_batch
            peaks.append(live.take_peak())
    print(asked.keys(), len(peaks), max(peaks) / 3_000_000)
    assert len(peaks) > 2 and 0.85 * 3_000_000 <= max(peaks) <= 3_000_000
    assert (gradient(rank, None) - expected).norm() <= 1e-5 * expected.norm()
