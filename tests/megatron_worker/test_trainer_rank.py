"""TrainerRank on one rank: what it answers, and its training of the base, as transformers and torch's own heads do.

What a session's commands answer and learn is compared with it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from benchmarks import trainer_rank_step
from benchmarks.random_model import TINY
from examples.tiny_model import make_tiny_model
from longshore.commands import Datum, Forward, ForwardBackward, OptimStep
from longshore.training import Adam, Layout
from megatron_worker.head.logprobs import policy
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.trainer_rank import ForwardInput, ForwardOutput, TrainerRank, start
from megatron_worker.warm_engine import build_engine
from shared.errors import InvalidInput
from tests.megatron_worker.engines import ENGINES, moments
from tests.megatron_worker.live_bytes import LiveBytes
from tests.megatron_worker.ranks import (
    LORAS,
    gradient,
    load_adapters,
    random_ids,
    random_input,
    reference_logits,
    some_loss,
    tensors_of,
)
from tests.megatron_worker.rows import VOCAB_SIZE, distinct_model
from tests.megatron_worker.session_jobs import do_all, result
from tests.megatron_worker.tiny_jobs import new_worker
from tests.megatron_worker.workshop import Workshop, sealed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shared_rank(model, folders):
    """For tests that leave weights and gradients as they were."""
    rank = TrainerRank(MegatronEngine(model, Layout(), "float32"), least_saved_tokens=4)
    load_adapters(rank, folders)
    return rank


@pytest.fixture
def rank(shared_rank):
    yield shared_rank
    shared_rank.zero_grad()
    shared_rank.set_adapter(None)


def embedding(rank):
    """The output embedding, [V, H]."""
    weights = dict(rank.engine.named_weights())
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


class TestAnswers:
    @pytest.mark.parametrize("name", ["one", "two", None])
    def test_every_answer_is_what_transformers_and_peft_say(self, rank, model, folders, name):
        generator = np.random.default_rng(0)
        ids, positions = random_ids(generator, 30), [0, 3, 4, 17, 28]
        labels = generator.integers(0, VOCAB_SIZE, (5, 4))
        expected = reference_logits(model, name and folders[name], ids)[positions]
        with torch.no_grad():
            plain = rank.forward(
                [
                    ForwardInput(ids, positions, True, True, labels, 6, True, True, adapter=name),
                    ForwardInput(ids, positions, True, True, labels, 6, adapter=name, temperature=0.5),
                ]
            )
        for output, temperature in zip(plain, (1.0, 0.5), strict=True):
            logprob_PV = (expected / temperature).log_softmax(-1)
            targets = logprob_PV.gather(1, torch.tensor(ids)[torch.tensor(positions) + 1, None])[:, 0]
            assert (output.target_logprob_P - targets).abs().max() <= 2e-5
            assert (output.entropy_P + (logprob_PV.exp() * logprob_PV).sum(1)).abs().max() <= 2e-5
            assert (output.label_logprob_PK - logprob_PV.gather(1, torch.from_numpy(labels))).abs().max() <= 2e-5
            best = logprob_PV.topk(6)
            assert (output.top_k.logprob_PK - best.values).abs().max() <= 2e-5
            assert torch.equal(output.top_k.id_PK, best.indices)
        assert (plain[0].logit_PV - expected).abs().max() <= 2e-5
        again = plain[0].hidden_PH @ embedding(rank).t()
        assert (again - expected).abs().max() <= 2e-5

    def test_outputs_stand_as_their_inputs_do(self, rank):
        pair = {"chosen": ForwardInput([1, 2, 3], top_k=2), "rejected": [ForwardInput([1, 2, 4], target_logprobs=True)]}
        chosen, other = rank.forward([pair["chosen"], *pair["rejected"]])
        [found] = rank.forward([pair])
        assert torch.equal(found["chosen"].top_k.id_PK, chosen.top_k.id_PK)
        assert torch.equal(found["rejected"][0].target_logprob_P, other.target_logprob_P)
        with pytest.raises(InvalidInput, match=r"entropy_P.*entropy=True"):
            _ = chosen.entropy_P
        with pytest.raises(InvalidInput, match=r"inputs\[0\]\.chosen"):
            rank.forward([{"chosen": [1, 2, 3]}])

    def test_nothing_requested_nothing_executed(self, model, folders):
        class Counting(MegatronEngine):
            num_tokens = 0

            def hidden_states(self, batch):
                self.num_tokens += len(batch.token_id_T)
                return super().hidden_states(batch)

        rank = TrainerRank(Counting(model, Layout(), "float32"))
        load_adapters(rank, folders)
        assert tensors_of(rank.forward([ForwardInput([1, 2, 3])])[0]) == {}
        assert rank.forward(ForwardInput([1, 2, 3], positions=[], logits=True)).logit_PV.shape == (0, VOCAB_SIZE)
        assert rank.forward([]) == []
        assert rank.engine.num_tokens == 0
        # what is shared is computed once, and only what is asked about meets a head
        prompt = list(range(3, 53))
        asked = [ForwardInput([*prompt, i], positions=[49], target_logprobs=True) for i in range(100, 104)]
        outputs = rank.forward([*asked, ForwardInput([7] * 90)])
        assert rank.engine.num_tokens == 54
        assert all(set(tensors_of(o)) == {"target_logprob_P"} for o in outputs[:4]) and not tensors_of(outputs[4])

    @pytest.mark.parametrize(
        ("asked", "place", "rule"),
        [
            (ForwardInput([], logits=True), "inputs[1].tokens", "at least one token"),
            (ForwardInput([1.5], logits=True), "inputs[1].tokens", "whole numbers"),
            (ForwardInput([1, VOCAB_SIZE], logits=True), "inputs[1].tokens", "from 0 to 300"),
            (ForwardInput([1, 2], positions=[1], target_logprobs=True), "inputs[1].positions", "from 0 to 0"),
            (ForwardInput([1, 2], positions=[1, 0], logits=True), "inputs[1].positions", "rise"),
            (ForwardInput([1, 2], labels=[[1, 2]]), "inputs[1].labels", "each of 2 positions"),
            (ForwardInput([1, 2], top_k=302), "inputs[1].top_k", "between 0 and"),
            (ForwardInput([1, 2], logits=True, temperature=0.0), "inputs[1].temperature", "positive"),
            (ForwardInput([1, 2], logits=True, adapter="absent"), "inputs[1].adapter", "no adapter 'absent'"),
        ],
    )
    def test_a_wrong_input_is_named_with_its_rule(self, rank, asked, place, rule):
        with pytest.raises(InvalidInput, match=rule) as refused:
            rank.forward([ForwardInput([1, 2, 3], logits=True), asked])
        assert refused.value.place == place


def test_200_random_jobs_with_mixed_slots_equal_one_by_one(rank):
    """Outputs, and the gradients of both trainable slots, of a batch of several slots and of its inputs alone."""
    generator = np.random.default_rng(7)
    furthest = {"output": 0.0, "gradient": 0.0}
    for _ in range(200):
        prefix = random_ids(generator, int(generator.integers(0, 20)))
        inputs = [
            random_input(generator, prefix if generator.random() < 0.5 else (), longest=20)
            for _ in range(generator.integers(1, 6))
        ]
        gradients = []
        rank.zero_grad()
        together = rank.forward(inputs)
        rank.backward(some_loss(together))
        gradients.append({name: gradient(rank, name) for name in ("one", "two")})
        rank.zero_grad()
        alone = [rank.forward([asked])[0] for asked in inputs]
        rank.backward(some_loss(alone))
        gradients.append({name: gradient(rank, name) for name in ("one", "two")})
        for ours, theirs in zip(together, alone, strict=True):
            ours, theirs = tensors_of(ours), tensors_of(theirs)
            assert set(ours) == set(theirs)
            for name in ours:
                assert ours[name].shape == theirs[name].shape
                if ours[name].numel():
                    difference = (ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1)
                    furthest["output"] = max(furthest["output"], float(difference))
        for name in ("one", "two"):
            difference = (gradients[0][name] - gradients[1][name]).norm()
            furthest["gradient"] = max(furthest["gradient"], float(difference / gradients[1][name].norm().clamp(min=1)))
    print(furthest)
    assert furthest["output"] <= 1e-5
    assert furthest["gradient"] <= 1e-5


def test_a_session_s_commands_answer_and_learn_what_it_does(rank, model, folders, tmp_path):
    """Scores of several labels, entropies and likeliest ids, with the adapter and without; and a step by weights."""
    generator = np.random.default_rng(3)
    ids, labels = random_ids(generator, 12), generator.integers(0, VOCAB_SIZE, (11, 3))
    asked = [
        ForwardInput(ids, range(11), True, True, labels, 5, temperature=0.7, adapter=each) for each in ("one", None)
    ]
    plain, several = Datum(tokens=ids), Datum.model_validate({"tokens": ids, "labels": labels.tolist()})
    weights = generator.normal(size=labels.shape)
    weighed = several.model_copy(update={"label_weights": tuple(map(tuple, weights.tolist()))})
    commands = [
        *(Forward(data=(plain,), entropy=True, top_k=5, temperature=0.7, adapter=each) for each in (True, False)),
        *(Forward(data=(several,), temperature=0.7, adapter=each) for each in (True, False)),
        ForwardBackward(data=(weighed,), temperature=0.7),
        OptimStep(learning_rate=0.05, denominator=1),
    ]
    workshop = Workshop(tmp_path, sealed(model), data=None, held_out=None, num_steps=0)
    worker = new_worker(tmp_path, build_engine)
    lora = {"trainable": LORAS["one"], "initial_adapter": sealed(folders["one"])}
    job = do_all(workshop, tmp_path / "session", commands, worker, **lora)
    for number, output in enumerate(rank.forward(asked), start=1):
        (scores,), (of_labels,) = (result(job, n).data for n in (number, number + 2))
        found = [*(getattr(scores, name) for name in ("logprobs", "entropies", "top_logprobs")), of_labels.logprobs]
        expected = output.target_logprob_P, output.entropy_P, output.top_k.logprob_PK, output.label_logprob_PK.flatten()
        for ours, theirs in zip(found, expected, strict=True):
            assert (torch.tensor(ours) - theirs).abs().max() <= 1e-5
        assert scores.top_ids == tuple(map(tuple, output.top_k.id_PK.tolist()))
    (output,) = rank.forward(asked[:1])
    rank.backward(-(output.label_logprob_PK * torch.from_numpy(weights)).sum().float())
    assert result(job, 6).metrics["grad_norm"] == pytest.approx(float(gradient(rank, "one").norm()), rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_input_without_a_graph_goes_beside_one_with_it(model, folders, engine):
    rank = start(model, engine=engine)
    load_adapters(rank, folders)
    scored, trained = (ForwardInput([5, 6, 7, last], target_logprobs=True, adapter="one") for last in (8, 9))
    with torch.no_grad():
        expected = rank.forward(scored).target_logprob_P
        both = rank.forward([scored, scored])
    rank.backward(rank.forward(trained).target_logprob_P.sum())
    alone = gradient(rank, "one")
    rank.zero_grad()
    found, other = rank.forward([replace(scored, no_grad=True), trained])
    assert torch.equal(found.target_logprob_P, expected) and not found.target_logprob_P.requires_grad
    rank.backward(other.target_logprob_P.sum() + found.target_logprob_P.sum())
    assert torch.equal(gradient(rank, "one"), alone)
    items = [[replace(scored, no_grad=True), trained]] * 2
    [micro_batch] = rank.forward_micro_batches(items)
    for (found, _), one in zip(micro_batch.outputs, both, strict=True):
        assert torch.equal(found.target_logprob_P, one.target_logprob_P)


def test_memory_figures(rank, model):
    weights = sum(tensor.numel() * 4 for tensor in load_file(model / "model.safetensors").values())
    figures = rank.memory()
    assert weights <= figures.allocated <= figures.reserved <= figures.process_peak


def test_a_pipeline_is_refused_with_a_reason(model):
    engine = MegatronEngine(model, Layout(), "float32")
    object.__setattr__(engine.facts, "layout", Layout.model_construct(pp=2))
    with pytest.raises(InvalidInput, match="never hold all outputs") as refused:
        TrainerRank(engine)
    assert refused.value.place == "layout.pp"


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_no_tensor_of_tokens_by_vocabulary_unless_logits_are_asked_for(tmp_path):
    """Neither forward nor backward, of a pack of several chunks, of a vocabulary wider than the model's own tensors."""
    folder = make_tiny_model(tmp_path / "model", ["hello there"], vocab_size=3000)
    rank = TrainerRank(MegatronEngine(folder, Layout(), "float32"))
    rank.create_adapter("one", LORAS["one"], seed=0)
    generator = np.random.default_rng(4)
    ids, labels = random_ids(generator, 1200), generator.integers(0, VOCAB_SIZE, (1199, 3))

    def largest(asked):
        with Largest() as seen:
            rank.backward(some_loss(rank.forward([asked])))
        return seen.num_elements

    everything = ForwardInput(ids, range(1199), True, True, labels, 5, False, True, temperature=0.7)
    assert largest(everything) < 1199 * 3000 / 3
    assert largest(ForwardInput(ids, logits=True)) >= 1199 * 3000


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_heads_take_kernels_where_there_are_some(rank):
    """Labels, top-k and targets by Triton's head (on the CPU interpreted) as by torch's, and their gradients."""
    generator = np.random.default_rng(5)
    ids = random_ids(generator, 25)
    labels = generator.integers(0, VOCAB_SIZE, (24, 3))
    asked = [
        ForwardInput(ids, range(24), True, True, labels, 4, adapter="one", temperature=0.7),
        ForwardInput(ids[:9], labels=labels[:9, :1], adapter="two"),
        ForwardInput(ids[:9], top_k=VOCAB_SIZE, adapter="two"),
    ]

    def answers(kernels):
        rank.zero_grad()
        with policy(kernels):
            outputs = rank.forward(asked)
            rank.backward(some_loss(outputs))
        return outputs, [gradient(rank, name) for name in ("one", "two")]

    outputs, gradients = answers("strict")
    expected, expected_gradients = answers("torch")
    for ours, theirs in zip(outputs, expected, strict=True):
        for name, tensor in tensors_of(ours).items():
            assert (tensor - tensors_of(theirs)[name]).abs().max() <= 1e-5, name
        if "top_k" in ours.found:
            assert torch.equal(ours.top_k.id_PK, theirs.top_k.id_PK)
            assert (ours.top_k.logprob_PK.diff(dim=1) <= 0).all()
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_bfloat16_answers_in_float32_and_learns(rank, model, folders):
    """Near what float32 says; the gradient points the same way."""
    rounded = TrainerRank(MegatronEngine(model, Layout(), "bfloat16"))
    load_adapters(rounded, folders)
    ids = random_ids(np.random.default_rng(2), 40)
    asked = [ForwardInput(ids, None, True, True, np.full((39, 2), 7), 3, True, adapter="one")]
    exact, near = rank.forward(asked)[0], rounded.forward(asked)[0]
    for name, tensor in tensors_of(near).items():
        assert tensor.dtype == torch.float32
        assert (tensor - tensors_of(exact)[name]).abs().mean() <= 0.1, name
    rank.backward(some_loss([exact]))
    rounded.backward(some_loss([near]))
    ours, theirs = gradient(rounded, "one"), gradient(rank, "one")
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) >= 0.95


@pytest.mark.parametrize("case", trainer_rank_step.CASES)
def test_the_benchmark_s_two_steps_do_the_same(case, benchmark_rank):
    """It says so itself where loss or norm differ; what is shared is computed once by both, or by TrainerRank alone."""
    found = trainer_rank_step.measure(benchmark_rank, case, trainer_rank_step.LITTLE, bin_tokens=44, rounds=1)
    assert found["tokens"]["native_bins"] > 1 and found["ratio"]["wall"] > 0
    assert benchmark_rank.adapters == {}


@pytest.fixture(scope="module")
def benchmark_rank():
    return trainer_rank_step.start(TINY, "float32")


@pytest.mark.parametrize("engine", ENGINES)
def test_it_starts_around_either_engine(model, folders, engine):
    """Both say the same, of slots side by side; fsdp refuses what it cannot split."""
    rank = start(model, engine=engine)
    load_adapters(rank, folders)
    labels = [list(range(100, 200))] * 4
    outputs = rank.forward([ForwardInput([5, 6, 7, 8], labels=labels, adapter=name) for name in ("one", "two")])
    for output, name in zip(outputs, ("one", "two"), strict=True):
        expected = reference_logits(model, folders[name], [5, 6, 7, 8]).log_softmax(-1)[:, 100:200]
        assert (output.label_logprob_PK - expected).abs().max() <= 2e-5
    rank.backward(some_loss(outputs))
    norms = rank.optim_step(Adam(), 1e-3, adapters=["one", "two"])
    assert all(norm.grad_norm > 0 for norm in norms.values())
    rank.drop_adapter("one")
    assert rank.adapters == {"two": True, "frozen": False}
    if engine == "fsdp":
        with pytest.raises(InvalidInput, match="no cp2"):
            start(model, Layout(cp=2), engine=engine)


@pytest.fixture(params=ENGINES)
def base_rank(request, model):
    base_rank = start(model, engine=request.param)
    base_rank.train_base()
    return base_rank


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
    base_rank = start(folder, engine=engine)
    base_rank.train_base()
    for kind, (asked, loss_of, loss_of_model) in KINDS.items():
        reference = AutoModelForCausalLM.from_pretrained(folder)
        found = reference(torch.tensor([IDS]), output_hidden_states=True)
        loss_of_model(found.logits[0, :-1], found.hidden_states[-1][0, :-1]).backward()
        base_rank.backward(loss_of(base_rank.forward(ForwardInput(IDS, positions=range(299), **asked))))
        base_rank.optim_step(Adam(beta1=0.0, clip_norm=0.0), 0.0)  # the first moment is the gradient
        base_rank.save(None, tmp_path / kind)
        ours = moments(tmp_path / kind)
        for name, parameter in reference.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert (ours[name] - expected).norm() <= 2e-5 * expected.norm() + 1e-6, (kind, name)


def step(base_rank):
    output = base_rank.forward(ForwardInput(IDS[:30], target_logprobs=True))
    base_rank.backward(-output.target_logprob_P.sum())
    return base_rank.optim_step(Adam(), 1e-2, 29.0)


def weights(base_rank):
    return {name: tensor.clone() for name, tensor in base_rank.engine.named_weights()}


def equal(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_steps_go_on_to_the_bit_and_an_export_is_what_transformers_reads(base_rank, tmp_path):
    norms = step(base_rank)
    assert norms[None].grad_norm > 0
    base_rank.save(None, tmp_path / "middle")
    expected = step(base_rank)
    after = weights(base_rank)
    step(base_rank)
    base_rank.load(None, tmp_path / "middle")
    assert step(base_rank) == expected and equal(weights(base_rank), after)
    base_rank.export(None, tmp_path / "model")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(torch.tensor([IDS[:9]])).logits[0]
        ours = base_rank.forward(ForwardInput(IDS[:9], logits=True)).logit_PV
    assert (ours - logits).abs().max() <= 2e-5


def test_it_is_trained_alone_and_then_as_it_was_published(base_rank, folders, tmp_path):
    base_rank.load_adapter("frozen", folders["frozen"], trainable=False)
    for call in (
        lambda: base_rank.create_adapter("new", LORAS["one"], 0),
        lambda: base_rank.load_adapter("one", folders["one"], trainable=True),
        base_rank.train_base,
    ):
        with pytest.raises(InvalidInput, match="trained, alone"):
            call()
    output = base_rank.forward(
        ForwardInput(IDS[:30], target_logprobs=True)
    )  # by the adapter, with a gradient for the base
    with pytest.raises(InvalidInput, match="graph of it is alive") as refused:
        base_rank.optim_step(Adam(), 1e-2, adapters=[None])
    assert refused.value.place == "the base"
    base_rank.backward(output.target_logprob_P.sum())
    assert base_rank.optim_step(Adam(), 1e-2, adapters=[None])[None].grad_norm > 0
    changed = weights(base_rank)
    base_rank.drop_adapter(None)
    assert not base_rank.trains_base and base_rank.adapters == {"frozen": False}
    base_rank.set_adapter(None)
    with torch.no_grad():
        logits = base_rank.forward(ForwardInput(IDS[:9], logits=True)).logit_PV
        published = AutoModelForCausalLM.from_pretrained(base_rank.engine._folder)(torch.tensor([IDS[:9]])).logits[0]
    assert (logits - published).abs().max() <= 2e-5 and not equal(weights(base_rank), changed)
    with pytest.raises(InvalidInput, match="train_base first"):
        base_rank.optim_step(Adam(), 1e-2, adapters=[None])
    load_adapters(base_rank, folders)
    with pytest.raises(InvalidInput, match="drop one, two first"):
        base_rank.train_base()


@pytest.mark.parametrize(
    "asked", [{"target_logprobs": True}, {"labels": LABELS[:40, :2], "top_k": 2}, {"logits": True}]
)
def test_micro_batches_of_the_base_fit_and_give_what_one_forward_does(model, asked):
    base_rank = start(model, memory_budget_bytes=3_000_000)
    base_rank.train_base()
    items = [ForwardInput([n, *IDS[n : n + 39]], **asked) for n in range(60)]
    base_rank.backward(some_loss(base_rank.forward(items)))
    expected = gradient(base_rank, None)
    base_rank.zero_grad()
    peaks, outputs = [], 0
    with LiveBytes() as live:
        for micro_batch in base_rank.forward_micro_batches(items):
            # as `some_loss` of all: it weighs outputs by their number
            nothing = [ForwardOutput() for _ in range(outputs)]
            base_rank.backward(some_loss([*nothing, *micro_batch.outputs]))
            outputs += len(micro_batch.outputs)
            del micro_batch
            peaks.append(live.take_peak())
    print(asked.keys(), len(peaks), max(peaks) / 3_000_000)
    assert len(peaks) > 2 and 0.85 * 3_000_000 <= max(peaks) <= 3_000_000
    assert (gradient(base_rank, None) - expected).norm() <= 1e-5 * expected.norm()
