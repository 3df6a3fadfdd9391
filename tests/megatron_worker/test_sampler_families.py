"""The decoder in every family: the trainer's numbers, bits that depend on no other slot, weights that come and go."""

import json
import re
import shutil
import threading
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from examples.tiny_model import train_tokenizer
from longshore.training import DELTA_NET, LATENT, LATENT_EXPERTS, LINEARS, MAMBA, Lora
from megatron_worker.sampler.adapters import LoadedAdapter, adapter_of, adapter_shapes, load_adapter
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.generation import Ending, Generator, RequestGroup, Sequence, reliable_width, shapes_of
from megatron_worker.sampler.models import Sleep
from megatron_worker.weight_sync.buckets import weights_sha256
from megatron_worker.weight_sync.sender import DeltaBase
from shared.chat.completions import Sampling
from shared.errors import InvalidInput
from shared.families import FAMILIES
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.ranks import reference_logits, write_adapters
from tests.megatron_worker.rows import (
    EXPERTS_BESIDE,
    GRANITE_DENSE,
    VOCAB_SIZE,
    Row,
    bin_of,
    distinct_model,
    random_rows,
)
from tests.megatron_worker.scores import logprobs, logprobs_by_steps
from tests.megatron_worker.unknown_models import COMPUTED, unknown_model
from tests.megatron_worker.weight_sync.samplers import listening
from tests.megatron_worker.weight_sync.test_sync import sync

pytestmark = pytest.mark.usefixtures("one_thread")

AGREEMENT = 1e-5  # as in test_sampler.py
CPU = torch.device("cpu")
SAMPLED = Sampling(max_tokens=24, ignore_eos=True)
BUCKET = 1 << 16  # gpt-oss has longer rows than the others
OF_ALL = (*LINEARS, *DELTA_NET, *LATENT, *MAMBA, *LATENT_EXPERTS)
LORAS = {
    "all": Lora(rank=4, alpha=8, targets=(*dict.fromkeys(OF_ALL), "lm_head")),
    "some": Lora(
        **{"rank": 2, "alpha": 8, "targets": ("q_proj", "o_proj", "down_proj", "lm_head"), "dora": True},
        **{"rank_pattern": {"lm_head": 3, r"layers\.1\..*": 5}, "alpha_pattern": {"o_proj": 3}},
    ),
}
OTHERS = {"gemma4 with experts": ("gemma4", EXPERTS_BESIDE)}
OTHERS["granitemoehybrid without experts"] = "granitemoehybrid", GRANITE_DENSE
ALL = [*FAMILIES, *OTHERS, *COMPUTED]


def ids_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def sequence_of(folder, prompt, seed):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
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


def made(folder, family):
    if family in COMPUTED and family not in FAMILIES:
        unknown_model(folder, family)
        train_tokenizer(["hello there"], VOCAB_SIZE).save(str(folder / "tokenizer.json"))
        return folder
    name, config = OTHERS.get(family, (family, None))
    return distinct_model(folder, name, tied=False, num_layers=4, config=config)


@pytest.fixture(scope="module", params=drawn(ALL, 2, always=["qwen3_moe"]))
def model(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp(request.param.split()[-1]), request.param)


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model, torch.float32, CPU)


def adapters_of(decoder):
    generator, adapters = torch.Generator().manual_seed(0), {None: LoadedAdapter("base", "", {})}
    for name, lora in LORAS.items():
        shapes = adapter_shapes(decoder, lora)
        tensors = {n: torch.randn(shape, generator=generator).abs() / 32 for n, shape in shapes.items()}
        adapters[name] = adapter_of(name, "", lora, decoder, tensors)
    return adapters


# Numbers.


def test_a_prompt_and_steps_score_as_the_trainer_does(model, decoder):
    """Windows, convolutions and chunks of recurrences end within the prompt, and within the steps."""
    trainer = start("fsdp" if decoder.architecture.is_generic else "megatron", model)
    for length, cut in ((2, 1), (40, 3), (300, 250)):
        ids = ids_of(length, length)
        expected = logprobs(trainer, bin_of([Row(ids, [0.0] + [1.0] * (length - 1))]))
        read = decoder.score(tuple(ids), decoder.prefill(tuple(ids), {}), 3)
        assert (torch.tensor(read.logprobs) - expected).abs().max() <= AGREEMENT
        steps = logprobs_by_steps(decoder, ids, range(cut, length), {})
        assert (steps - expected[cut - 1 :]).abs().max() <= AGREEMENT


@pytest.mark.parametrize("name", LORAS)
def test_steps_with_an_adapter_are_what_a_prompt_with_it_scores(decoder, name):
    adapter, ids = adapters_of(decoder)[name], ids_of(90)
    assert adapter.lora_weights
    scored = [decoder.score(tuple(ids), decoder.prefill(tuple(ids), each)) for each in (adapter.lora_weights, {})]
    whole, without = (torch.tensor(each.logprobs) for each in scored)
    assert (logprobs_by_steps(decoder, ids, range(20, 90), adapter.lora_weights) - whole[19:]).abs().max() <= AGREEMENT
    assert (whole - without).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_depends_on_what_else_is_drawn(model, dtype):
    """Groups of a prompt begin at the same state, and go on from it in slots of their own; adapters side by side."""
    decoder = Decoder(model, dtype, CPU)
    adapters = adapters_of(decoder)

    def wanted():
        return [sequence_of(model, tuple(ids_of(length, length)), seed) for length in (1, 40) for seed in range(3)]

    together = {name: wanted() for name in adapters}
    draw(decoder, [(adapters[name], sequences) for name, sequences in together.items()])
    for name, adapter in adapters.items():
        *_, alone = wanted()
        draw(decoder, [(adapter, [alone])])
        one = together[name][-1]
        assert (one.token_ids, one.raw, one.prompt_scores) == (alone.token_ids, alone.raw, alone.prompt_scores)
        assert reliable_width(decoder, shapes_of(adapter.lora_weights), 32) == 32
    assert len({tuple(one.token_ids) for sequences in together.values() for one in sequences}) > 6


def test_every_tensor_has_its_name_and_is_computed_with(model, decoder):
    ids = tuple(ids_of(20))
    sha256 = weights_sha256(decoder.named_weights().items())
    before = torch.tensor(decoder.score(ids, decoder.prefill(ids, {})).logprobs)
    groups = defaultdict(list)
    for name, tensor in decoder.named_weights().items():  # an expert may be chosen by no token, but not all of a layer
        groups[re.sub(r"experts\.\d+", "experts", name)].append(tensor)
    for name, tensors in groups.items():
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor += 0.5 * (1 + tensor.abs()) * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        after = torch.tensor(decoder.score(ids, decoder.prefill(ids, {})).logprobs)
        assert not torch.equal(after, before), name
        for tensor, old in zip(tensors, kept, strict=True):
            tensor.copy_(old)
    decoder.read_weights(model)
    assert weights_sha256(decoder.named_weights().items()) == sha256


# Weights that come, and go.


@pytest.mark.parametrize(
    "family", drawn(["qwen3_moe", "qwen3_5", "gemma4", "nemotron_h", "gpt_oss", "granitemoehybrid", "lfm2"], 2)
)
def test_weights_and_adapters_come_by_a_sync(tmp_path, family):
    model = distinct_model(tmp_path / "model", family, tied=False)
    full, lora, rows = start("megatron", model, "full"), start("megatron", model, "lora"), [[random_rows([40, 17])]]
    with listening(model, tmp_path, 1) as [one]:
        train(full, rows, learning_rate=1e-3)
        assert sync(full, None, [one], 1, bucket_bytes=BUCKET).problems == {}
        expected, found = dict(full.named_weights()), one.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        train(lora, rows, learning_rate=1e-3)
        lora.save(tmp_path / "saved")
        digest = sync(lora, "run", [one], 1, bucket_bytes=BUCKET).digest
        one.models.name_weights(json.dumps({"name": "a", "digest": digest}).encode())
        loaded = load_adapter("a", tmp_path / "saved" / "weights", one.decoder)
        assert one.models.find("a").weights_sha256() == loaded.weights_sha256()


def test_changes_apply_to_tensors_that_are_kept_wider_than_they_are_sent(tmp_path):
    model = distinct_model(tmp_path / "model")
    driven, sent = start("megatron", model, "full", "bfloat16"), DeltaBase()
    with listening(model, tmp_path, 1, torch.float32) as [one]:
        for version in range(3):
            train(driven, [[random_rows([40, 17])]], learning_rate=1e-5)
            done = sync(driven, None, [one], version, "delta", sent)
            assert done.problems == {} and (done.num_bytes < done.weight_bytes) == (version > 0)
            found = one.tensors()
            assert all(torch.equal(found[name], tensor.float()) for name, tensor in driven.named_weights())


@pytest.mark.parametrize("family", drawn(["qwen3_moe", "gpt_oss", "stablelm"], 1))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_asleep_it_holds_no_weights_and_awake_the_same(tmp_path, family, dtype):
    model = made(tmp_path / "model", family)
    with listening(model, tmp_path, 1, dtype) as [one]:
        sleep, ids = Sleep(one.decoder, one.models, one.generator), tuple(ids_of(20))
        whole = sum(tensor.nbytes for tensor in one.tensors().values())
        before = one.decoder.score(ids, one.decoder.prefill(ids, {})).logprobs
        assert sleep.memory().weights.device == whole
        assert sleep.sleep(b'{"level": 2}').device_bytes == 0
        assert sleep.wake().weights.device == whole
        assert one.decoder.score(ids, one.decoder.prefill(ids, {})).logprobs == before


# Experts.


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two layers of four experts, two a token; and adapters of it as the trainer writes them."""
    model = distinct_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tied=False)
    return model, write_adapters(model, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    "change", [{"norm_topk_prob": False, "num_experts_per_tok": 3}, {"num_experts_per_tok": 1}], ids=str
)
def test_other_choices_of_experts_are_those_of_transformers(mixture, tmp_path, change):
    folder, ids = shutil.copytree(mixture[0], tmp_path / "model"), ids_of(40)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    decoder, expected_TV = Decoder(folder, torch.float32, CPU), reference_logits(folder, None, ids).log_softmax(-1)
    expected = expected_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    scored = torch.tensor(decoder.score(tuple(ids), decoder.prefill(tuple(ids), {})).logprobs)
    for found, wanted in ((scored, expected), (logprobs_by_steps(decoder, ids, range(20, 40), {}), expected[19:])):
        assert (found - wanted).abs().max() <= AGREEMENT


@pytest.mark.parametrize("name", [None, "one"])
def test_a_slot_has_the_same_bits_whatever_experts_the_others_choose(mixture, name):
    """Four slots: of so few rows, a product of just those that chose an expert has other bits."""
    decoder, generator, found = Decoder(mixture[0], torch.float32, CPU), torch.Generator().manual_seed(0), []
    lora_weights = load_adapter(name, mixture[1][name], decoder).lora_weights if name else {}
    for _ in range(20):
        cache = decoder.new_cache(4)
        cache.reserve(3)
        for position, token in enumerate((5, 6, 7)):
            token_B = torch.randint(3, VOCAB_SIZE, (4,), generator=generator)
            token_B[2] = token
            hidden_BH = decoder.step(token_B, torch.full((4,), position), cache, lora_weights)
        found.append(decoder.logits(hidden_BH, lora_weights)[2])
    assert all(torch.equal(logit_V, found[0]) for logit_V in found)


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
def test_adapters_of_experts_that_the_trainer_does_not_write_are_refused(mixture, tmp_path, edit, words):
    shutil.copytree(mixture[1]["one"], tmp_path / "bad")
    edit(tmp_path / "bad")
    with pytest.raises(InvalidInput, match=words):
        load_adapter("bad", tmp_path / "bad", Decoder(mixture[0], torch.float32, CPU))


# What is not computed.


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        (
            "recurrent_gemma",
            {"block_types": ["recurrent", "attention"], "lru_width": 64},
            "keeps more of earlier tokens than keys and values",
        ),
        ("mamba", {}, "attends by transformers' attention interface"),
        ("gemma2", {}, "its attention takes softcap"),
    ],
)
def test_what_the_trainer_refuses_is_refused(tmp_path, family, settings, words):
    with pytest.raises(InvalidInput, match=words):
        Decoder(unknown_model(tmp_path, family, **settings), torch.float32, CPU)


def test_weights_of_another_architecture_are_refused(tmp_path):
    one, other = (distinct_model(tmp_path / family, family) for family in ("qwen3", "gemma3"))
    with pytest.raises(InvalidInput, match="of another architecture"):
        Decoder(one, torch.float32, CPU).read_weights(other)
