"""The sampler's mixture of experts against transformers, PEFT and the trainer; equal bits whatever others choose."""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from longshore.training import Layout
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Outputs
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.adapters import LoadedAdapter, load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, Generator, RequestGroup, Sequence, reliable_width, shapes_of
from shared.chat.completions import Sampling
from shared.errors import InvalidInput
from tests.megatron_worker.ranks import LORAS, reference_logits, write_adapters
from tests.megatron_worker.rows import VOCAB_SIZE, Row, bin_of, distinct_model

pytestmark = pytest.mark.usefixtures("one_thread")

AGREEMENT = 1e-5  # as in test_sampler.py
CPU = torch.device("cpu")
SAMPLED = Sampling(max_tokens=24, ignore_eos=True)


def ids_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two layers of four experts, two a token."""
    return distinct_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tied=False)


@pytest.fixture(scope="module")
def decoder(mixture):
    return Decoder(mixture, torch.float32, CPU)


@pytest.fixture(scope="module")
def folders(mixture, tmp_path_factory):
    """Adapters as the trainer writes them: on all linears of all experts, and on their down_proj and some others."""
    return write_adapters(mixture, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def adapters(decoder, folders):
    loaded = {name: load_adapter(name, folders[name], decoder) for name in LORAS}
    return {None: LoadedAdapter("base", "", {}), **loaded}


def logprobs_of(decoder, ids, lora_weights):
    """Log-probabilities after each token, [T, V]: of the first half read as a prompt, of the others drawn in slot 3."""
    half = len(ids) // 2
    prompt = decoder.prefill(tuple(ids[:half]), lora_weights)
    cache = decoder.new_cache(5)
    cache.reserve(len(ids))
    cache.fill(3, prompt)
    hidden = [decoder._model.final_norm(prompt.stream_TH)]
    for position, token in enumerate(ids[half:], start=half):
        token_B, position_B = torch.arange(5) + position, torch.zeros(5, dtype=torch.int64)
        token_B[3], position_B[3] = token, position
        hidden.append(decoder.step(token_B, position_B, 1, cache, lora_weights)[3:4])
    return torch.cat([decoder.logits(hidden_TH, lora_weights) for hidden_TH in hidden]).log_softmax(-1)


# Against others.


@pytest.mark.parametrize(
    "change",
    [{}, {"norm_topk_prob": False, "num_experts_per_tok": 3}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 4}],
    ids=str,
)
def test_logprobs_are_those_of_transformers(mixture, tmp_path, change):
    shutil.copytree(mixture, tmp_path / "model")
    config = json.loads((mixture / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | change))
    ids = ids_of(40)
    expected_TV = reference_logits(tmp_path / "model", None, ids).log_softmax(-1)
    found_TV = logprobs_of(Decoder(tmp_path / "model", torch.float32, CPU), ids, {})
    assert (found_TV - expected_TV).abs().max() <= AGREEMENT


@pytest.mark.parametrize("name", ["one", "two"])
def test_logprobs_with_an_adapter_are_those_of_peft(mixture, decoder, folders, adapters, name):
    ids = ids_of(40)
    expected_TV = reference_logits(mixture, folders[name], ids).log_softmax(-1)
    assert (logprobs_of(decoder, ids, adapters[name].lora_weights) - expected_TV).abs().max() <= AGREEMENT
    assert (logprobs_of(decoder, ids, {}) - expected_TV).abs().max() > 0.1


@pytest.mark.parametrize("name", [None, "one", "two"])
def test_scores_and_samples_are_the_trainers(mixture, decoder, folders, adapters, name):
    engine = MegatronEngine(mixture, Layout(), "float32")
    if name:
        engine.load_adapter(name, folders[name], None, trainable=False)
    for length in (2, 7, 65, 320):
        ids = tuple(ids_of(length, length))
        scores = decoder.score(ids, decoder.prefill(ids, adapters[name].lora_weights)).logprobs
        assert torch.tensor(scores).sub(torch.tensor(Dispatcher(engine).probe(name, ids))).abs().max() <= AGREEMENT
    sequences = [sequence_of(mixture, tuple(ids_of(length, length)), seed) for seed, length in enumerate((5, 5, 200))]
    draw(decoder, [(adapters[name], sequences)])
    rows = [Row([*s.prompt, *s.token_ids], [0.0] * len(s.prompt) + [1.0] * len(s.token_ids)) for s in sequences]
    with torch.no_grad():
        logprob_N = engine.forward(bin_of(rows), Outputs()).logprob_N
    assert logprob_N.sub(torch.tensor([value for s in sequences for value in s.raw])).abs().max() <= AGREEMENT


# The same bits whatever else goes on.


def sequence_of(model, prompt, seed):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return Sequence(prompt, SAMPLED, seed, Ending(SAMPLED, frozenset(), tokenizer), num_prompt_top=0)


def draw(decoder, asked):
    """Draw the sequences of each adapter, all at once, in four slots for each of them."""
    generator = Generator(decoder, 4)
    loop = threading.Thread(target=generator.run, daemon=True)
    tickets = [RequestGroup(adapter, sequences) for adapter, sequences in asked]
    for ticket in tickets:
        generator.submit(ticket)
    loop.start()
    assert all(ticket.done.wait(300) for ticket in tickets)
    generator.stop()
    loop.join(300)


@pytest.mark.parametrize("name", [None, "one"])
def test_a_slot_has_the_same_bits_whatever_experts_the_others_choose(decoder, adapters, name):
    """Four slots: of so few rows, a product of just those that chose an expert has other bits."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(20):
        cache = decoder.new_cache(4)
        cache.reserve(3)
        for position, token in enumerate((5, 6, 7)):
            token_B = torch.randint(3, VOCAB_SIZE, (4,), generator=generator)
            token_B[2] = token
            position_B = torch.full((4,), position)
            hidden_BH = decoder.step(token_B, position_B, 1, cache, adapters[name].lora_weights)
        found.append(decoder.logits(hidden_BH, adapters[name].lora_weights)[2])
    assert all(torch.equal(logit_V, found[0]) for logit_V in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_do_not_depend_on_what_else_is_drawn(mixture, folders, dtype):
    decoder = Decoder(mixture, dtype, CPU)
    adapter, base = load_adapter("one", folders["one"], decoder), LoadedAdapter("base", "", {})

    def wanted():
        return [sequence_of(mixture, tuple(ids_of(length, length)), length) for length in (1, 30, 60)]

    alone, with_adapter = wanted(), wanted()
    for one in alone:
        draw(decoder, [(base, [one])])
    for one in with_adapter:
        draw(decoder, [(adapter, [one])])
    noise = [[sequence_of(mixture, tuple(ids_of(1 + i, i)), i) for i in range(11)] for _ in range(2)]
    among, among_with_adapter = wanted(), wanted()
    draw(decoder, [(base, [*noise[0], *among]), (adapter, [*noise[1][:5], *among_with_adapter, *noise[1][5:]])])
    for ours, theirs in zip(alone + with_adapter, among + among_with_adapter, strict=True):
        assert (ours.token_ids, ours.raw, ours.prompt_scores) == (theirs.token_ids, theirs.raw, theirs.prompt_scores)


def test_all_slots_are_equal_on_this_machine(decoder, adapters):
    for num_slots in (4, 32):
        assert reliable_width(decoder, (), num_slots) == num_slots
        assert reliable_width(decoder, shapes_of(adapters["one"].lora_weights), num_slots) == num_slots


# Names.


def test_every_linear_of_every_expert_has_its_hugging_face_name(mixture, decoder):
    files, found = load_file(mixture / "model.safetensors"), set()
    for linear in decoder._model._held.linears:
        blocks = linear.weight_OI.split([part.shape[0] for part in linear.parts])
        for part, block_OI in zip(linear.parts, blocks, strict=True):
            assert torch.equal(block_OI, files[part.name])
            found.add(part.name)
    assert found == {name for name in files if name.endswith("_proj.weight")}


def without_an_expert(folder):
    """Two of the adapter's tensors less, as if the last expert's down_proj were not adapted."""
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".1.mlp.experts.3.down_proj." not in n}, folder / "new")
    (folder / "new").replace(folder / "adapter_model.safetensors")


def with_a_router(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    for matrix, shape in (("A", (4, 64)), ("B", (4, 4))):
        tensors[f"base_model.model.model.layers.0.mlp.gate.lora_{matrix}.weight"] = torch.ones(shape)
    save_file(tensors, folder / "adapter_model.safetensors")


def with_config(**change):
    def edit(folder):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | change))

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without_an_expert, "2 tensors are missing, the first is .*layers.1.mlp.experts.3.down_proj.lora_A.weight"),
        (with_a_router, "2 tensors do not belong here, the first is .*layers.0.mlp.gate.lora_A.weight"),
        (with_config(target_modules=["q_proj", "gate"]), "target_modules.1 = 'gate' cannot be used"),
        (with_config(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters = .* cannot be used"),
    ],
    ids=["without an expert", "with a router", "targets the router", "targets parameters"],
)
def test_adapters_of_experts_that_the_trainer_does_not_write_are_refused(decoder, folders, tmp_path, edit, words):
    shutil.copytree(folders["one"], tmp_path / "bad")
    edit(tmp_path / "bad")
    with pytest.raises(InvalidInput, match=words):
        load_adapter("bad", tmp_path / "bad", decoder)
