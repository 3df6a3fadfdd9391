"""The decoder that is transformers' model: what our own computes, bits that depend on no other slot, syncs, sleep."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file

from activities.sampling.client import Sampler
from longshore.layout import Layout
from longshore.training import DELTA_NET, LINEARS, Lora
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import Outputs
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.adapters import LoadedAdapter, adapter_of, adapter_shapes, load_adapter
from megatron_worker.sampler.by_transformers import TransformersDecoder, bound_steps, find_views
from megatron_worker.sampler.decoder import Decoder, computes
from megatron_worker.sampler.decoders import AnyDecoder, open_decoder
from megatron_worker.sampler.generation import reliable_width
from megatron_worker.sampler.models import Sleep
from megatron_worker.weight_sync.buckets import weights_sha256
from megatron_worker.weight_sync.sender import LastSent
from shared.chat.completions import Sampling
from shared.errors import InvalidInput
from shared.families import read_architecture
from shared.families.architecture import ClampedGate, DeltaNet, Mamba2, Mixture, Mlp, NormedBlock
from shared.families.model_slices import slices_of
from shared.families.tensor_slices import TensorSlice
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import VOCAB_SIZE, Row, bin_of, distinct_model, model_with_tower, random_rows
from tests.megatron_worker.sampler_process import NAME, running, write_adapter
from tests.megatron_worker.scores import logprobs_by_steps
from tests.megatron_worker.test_sampler_experts import draw, ids_of, sequence_of
from tests.megatron_worker.weight_sync.samplers import listening
from tests.megatron_worker.weight_sync.test_sync import sync

pytestmark = pytest.mark.usefixtures("one_thread")

AGREEMENT = 1e-5  # as in test_sampler.py
CPU = torch.device("cpu")
LORAS = {
    "all": Lora(rank=4, alpha=8, targets=(*LINEARS, *DELTA_NET)),
    "some": Lora(
        **{"rank": 2, "alpha": 8, "targets": ("q_proj", "v_proj", "down_proj", "lm_head")},
        **{"rank_pattern": {"lm_head": 3, r"layers\.1\..*": 5}, "alpha_pattern": {"v_proj": 3}},
    ),
}


@dataclasses.dataclass
class Both:
    """A model in either decoder, and in each the same adapters: None is the model alone."""

    model: object
    own: AnyDecoder  # of families that we have no decoder for, one more of the other kind
    other: TransformersDecoder
    adapters: dict


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "smollm3"])
def both(request, tmp_path_factory):
    family = request.param
    model = distinct_model(tmp_path_factory.mktemp(family), family, tied=family in ("qwen3", "smollm3"))
    own, other = (made(model, torch.float32, CPU) for made in (open_decoder, TransformersDecoder))
    generator, adapters = torch.Generator().manual_seed(0), {None: [LoadedAdapter("base", "", {})] * 2}
    for name, lora in LORAS.items():
        shapes = adapter_shapes(own, lora)
        assert adapter_shapes(other, lora) == shapes
        tensors = {n: torch.randn(shape, generator=generator) / 8 for n, shape in shapes.items()}
        adapters[name] = [adapter_of(name, "", lora, decoder, tensors) for decoder in (own, other)]
    return Both(model, own, other, adapters)


# What our own decoder computes.


@pytest.mark.parametrize("name", [None, *LORAS])
def test_scores_and_steps_are_those_of_our_own(both, name):
    """A prompt of 600 tokens is read in three parts."""
    adapters = both.adapters[name]
    for length in (2, 65, 600):
        ids = tuple(ids_of(length, length))
        ours, theirs = (
            decoder.score(ids, decoder.prefill(ids, adapter.lora_weights), 3)
            for decoder, adapter in zip((both.own, both.other), adapters, strict=True)
        )
        assert torch.tensor(ours.logprobs).sub(torch.tensor(theirs.logprobs)).abs().max() <= AGREEMENT
        # Tokens may be equally likely but for the last bits.
        assert torch.tensor(ours.ranks).sub(torch.tensor(theirs.ranks)).abs().max() <= 1
        assert [len(top) for top in theirs.top] == [3] * (length - 1)
    ours, theirs = (
        logprobs_by_steps(decoder, ids, range(250, 280), adapter.lora_weights)
        for decoder, adapter in zip((both.own, both.other), adapters, strict=True)
    )
    assert (ours - theirs).abs().max() <= AGREEMENT


def test_samples_are_those_of_our_own_and_depend_on_nothing_else_that_is_drawn(both):
    """Groups of a prompt begin at the same state, and go on from it in slots of their own; adapters side by side."""

    def wanted():
        return [sequence_of(both.model, tuple(ids_of(length, length)), seed) for length in (1, 40) for seed in range(3)]

    drawn = [{name: wanted() for name in both.adapters} for _ in range(2)]
    for place, decoder in enumerate((both.own, both.other)):
        draw(decoder, [(both.adapters[name][place], sequences) for name, sequences in drawn[place].items()])
    for name, together in drawn[1].items():
        for ours, theirs in zip(drawn[0][name], together, strict=True):
            assert theirs.token_ids == ours.token_ids
            assert torch.tensor(theirs.raw).sub(torch.tensor(ours.raw)).abs().max() <= AGREEMENT
        *_, alone = wanted()
        draw(both.other, [(both.adapters[name][1], [alone])])
        one = together[-1]
        assert (one.token_ids, one.raw, one.prompt_scores) == (alone.token_ids, alone.raw, alone.prompt_scores)
    assert len({tuple(one.token_ids) for sequences in drawn[1].values() for one in sequences}) == 18


def test_every_tensor_has_its_name_and_is_computed_with(both):
    named = [decoder.named_weights() for decoder in (both.own, both.other)]
    files = load_file(both.model / "model.safetensors")
    assert named[1].keys() == named[0].keys()
    assert all(torch.equal(named[1][name], tensor) for name, tensor in files.items())
    sha256 = weights_sha256(named[0].items())
    assert weights_sha256(named[1].items()) == sha256
    generator, ids = torch.Generator().manual_seed(1), tuple(ids_of(20))
    before = both.own.score(ids, both.own.prefill(ids, {})).logprobs
    for name, tensor in named[0].items():
        tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
        named[1][name].copy_(tensor)
    scores = [torch.tensor(d.score(ids, d.prefill(ids, {})).logprobs) for d in (both.own, both.other)]
    assert (scores[0] - scores[1]).abs().max() <= AGREEMENT < (scores[0] - torch.tensor(before)).abs().max()
    for decoder in (both.own, both.other):
        decoder.read_weights(both.model)
        assert weights_sha256(decoder.named_weights().items()) == sha256


def test_slots_are_caches_of_their_own_and_empty_ones_cost_nothing(both):
    decoder, ids = both.other, tuple(ids_of(30))
    assert reliable_width(decoder, (), 32) == 32
    prompt, cache = decoder.prefill(ids, {}), decoder.new_cache(3)
    assert cache.num_bytes == 0
    for slot in (0, 2):
        cache.fill(slot, prompt)
    one_slot = cache.num_bytes / 2
    assert one_slot == prompt.num_bytes - sum(tensor.nbytes for tensor in (prompt.hidden_TH, *prompt.experts)) > 0
    kept = [tensor.clone() for layer in prompt.cache.layers for tensor in tensors_of(layer)]
    hidden_BH = decoder.step(torch.tensor([7, 0, 8]), torch.tensor([30, 0, 30]), 1, cache, {})
    assert all(map(torch.equal, kept, [tensor for layer in prompt.cache.layers for tensor in tensors_of(layer)]))
    assert not hidden_BH[1].any() and not torch.equal(hidden_BH[0], hidden_BH[2])
    assert not decoder.logits(hidden_BH, {})[1].any()
    decoder.step(torch.tensor([7, 0, 0]), torch.tensor([31, 0, 0]), 1, cache, {})
    assert one_slot < cache.num_bytes < 1.2 * one_slot
    with pytest.raises(AssertionError):
        decoder.step(torch.tensor([7, 0, 0]), torch.tensor([31, 0, 0]), 1, cache, {})


def tensors_of(layer):
    held = [v for value in vars(layer).values() for v in (value.values() if isinstance(value, dict) else [value])]
    return [value for value in held if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "mistral"])
def test_of_a_model_with_a_tower_the_text_model_is_taken(tmp_path, family):
    alone, whole = model_with_tower(tmp_path, family)
    ids, prefix = tuple(ids_of(50)), read_architecture(whole).tensor_prefix
    decoders = [TransformersDecoder(folder, torch.float32, CPU) for folder in (alone, whole)]
    assert torch.equal(*(decoder.prefill(ids, {}).hidden_H for decoder in decoders))
    assert f"{prefix}.embed_tokens.weight" in decoders[1].named_weights() and prefix != "model"


# Weights that come, and go.


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
def test_weights_and_adapters_come_by_a_sync(tmp_path, family):
    model = distinct_model(tmp_path / "model", family, tied=False)
    full, lora, rows = start("megatron", model, "full"), start("megatron", model, "lora"), [[random_rows([40, 17])]]
    with listening(model, tmp_path, 1, by_transformers=True) as [one]:
        train(full, rows, learning_rate=1e-3)
        assert sync(full, None, [one], 1).problems == {}
        expected, found = dict(full.named_weights()), one.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        train(lora, rows, learning_rate=1e-3)
        lora.save(tmp_path / "saved")
        digest = sync(lora, "run", [one], 1).digest
        one.models.name_weights(json.dumps({"name": "a", "digest": digest}).encode())
        loaded = load_adapter("a", tmp_path / "saved" / "weights", one.decoder)
        assert one.models.find("a").weights_sha256() == loaded.weights_sha256()


def test_changes_apply_to_tensors_that_are_kept_wider_than_they_are_sent(model, tmp_path):
    """As transformers keeps the biases of some routers in float32."""
    driven, sent = start("megatron", model, "full", "bfloat16"), LastSent()
    with listening(model, tmp_path, 1, torch.float32, by_transformers=True) as [one]:
        for version in range(3):
            train(driven, [[random_rows([40, 17])]], learning_rate=1e-5)
            done = sync(driven, None, [one], version, "delta", sent)
            assert done.problems == {} and (done.num_bytes < done.weight_bytes) == (version > 0)
            found = one.tensors()
            assert all(torch.equal(found[name], tensor.float()) for name, tensor in driven.named_weights())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_asleep_it_holds_no_weights_and_awake_the_same(tmp_path, dtype):
    model = distinct_model(tmp_path / "model", "qwen3_moe", tied=False)
    with listening(model, tmp_path, 1, dtype, by_transformers=True) as [one]:
        sleep, ids = Sleep(one.decoder, one.models, one.generator), tuple(ids_of(20))
        whole = sum(tensor.nbytes for tensor in one.tensors().values())
        before = one.decoder.score(ids, one.decoder.prefill(ids, {})).logprobs
        assert sleep.memory().weights.device == whole
        assert sleep.sleep(b'{"level": 2}').device_bytes == 0
        assert sleep.wake().weights.device == whole
        assert one.decoder.score(ids, one.decoder.prefill(ids, {})).logprobs == before


# Which models.


def test_our_own_decoder_is_taken_where_it_computes_the_model(model, tmp_path):
    a = read_architecture(model)
    assert computes(a) and isinstance(open_decoder(model, torch.float32, CPU), Decoder)
    assert isinstance(open_decoder(model, torch.float32, CPU, by_transformers=True), TransformersDecoder)
    for change in ({"window": 8}, {"has_sinks": True}, {"scale": 1.0}, {"is_gated": True}, {"norms_all_heads": True}):
        assert not computes(dataclasses.replace(a, mixers=(dataclasses.replace(a.attention, **change),))), change
    for change in (
        *({"logit_cap": 30.0}, {"logit_divisor": 2.0}, {"embedding_scale": 2.0}, {"residual_scale": 0.5}),
        {"zero_centred_norms": True},
        {"mixers": (DeltaNet(2, 4, 8, 8, 4),)},
        {"block": NormedBlock()},
        {"mixers": (None,)},
        {"mixers": (Mamba2(4, 8, 8, 2, 4, True, 0.001),)},
        {"mlps": (None,)},
        {"mlps": (Mlp(8, "gelu_tanh"),)},
        {"mlps": (Mlp(8, is_gated=False),)},
        {"mlps": (Mixture(4, 8, 2, scoring="sigmoid"),)},
        {"mlps": (Mixture(4, 8, 2, latent_size=4),)},
        {"mlps": (Mixture(4, 8, 2, shared_ffn_size=8),)},
        {"mlps": (Mixture(4, 8, 2, stacked=ClampedGate(1.7, 7.0)),)},
    ):
        assert not computes(dataclasses.replace(a, **change)), change
    for family in ("deepseek_v3", "gemma3", "gemma4", "nemotron_h"):
        folder = distinct_model(tmp_path / family, family, tied=family.startswith("gemma"))
        assert not computes(read_architecture(folder)), family


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
WINDOWS = {"head_dim": 8, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 32}
OTHERS = {
    "deepseek_v3": partial(
        transformers.DeepseekV3Config, **SIZES, **EXPERTS, **LATENT, num_hidden_layers=2, first_k_dense_replace=1
    ),
    "glm4_moe_lite": partial(transformers.Glm4MoeLiteConfig, **SIZES, **EXPERTS, **LATENT, num_hidden_layers=2),
    "nemotron_h": partial(
        transformers.NemotronHConfig,
        **SIZES,
        **EXPERTS,
        **MAMBA,
        layers_block_type=["mamba", "moe", "attention"],
        head_dim=8,
        moe_shared_expert_intermediate_size=16,
    ),
    "gpt_oss": partial(transformers.GptOssConfig, **SIZES, **WINDOWS, num_hidden_layers=2, num_local_experts=4),
    "gemma3": partial(transformers.Gemma3TextConfig, **SIZES, **WINDOWS, num_hidden_layers=2),
    "gemma4": partial(
        transformers.Gemma4TextConfig,
        **SIZES,
        **WINDOWS,
        num_hidden_layers=2,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
}


def saved(folder, config):
    """A model with random weights, its file, and the slices that this has."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    files = load_file(folder / "model.safetensors")
    slices = [TensorSlice(name, name, tuple(tensor.shape), None, 0, 1) for name, tensor in files.items()]
    return model, files, slices


@pytest.mark.parametrize("family", OTHERS)
def test_every_tensor_of_a_family_that_is_not_ours_has_a_place(model, tmp_path, family):
    other, files, slices = saved(tmp_path, OTHERS[family]())
    a = dataclasses.replace(read_architecture(model), family=family, tied="lm_head.weight" not in files)
    named = find_views(other, a, slices).named_weights()
    assert named.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(named[name], tensor), name
        named[name].copy_(tensor + 1)
    other.save_pretrained(tmp_path / "changed")
    for name, tensor in load_file(tmp_path / "changed" / "model.safetensors").items():
        assert torch.equal(tensor, files[name] + 1), name


def test_what_has_no_place_in_the_model_is_refused_by_name(model):
    a, reference = read_architecture(model), transformers.AutoModelForCausalLM.from_pretrained(model)
    slices = slices_of(a, 1)
    wide = dataclasses.replace(slices[0], shape=(VOCAB_SIZE, 65))
    for changed, words in (
        ([*slices, TensorSlice("model.sinks", "", (4,), None, 0, 1)], "^model.sinks: .*there is no model.sinks"),
        (slices[1:], "^model.embed_tokens.weight: .*no file has it"),
        ([wide, *slices[1:]], r"^model.embed_tokens.weight: .*its shape is \[301, 64\], expected \[301, 65\]"),
    ):
        with pytest.raises(InvalidInput, match="transformers' model of qwen3") as refused:
            find_views(reference, a, changed)
        assert refused.match(words)


def test_an_expert_that_is_not_whole_is_refused(tmp_path):
    folder = distinct_model(tmp_path, "qwen3_moe", tied=False)
    a, reference = read_architecture(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    slices = [s for s in slices_of(a, 1) if "experts.3.up_proj" not in s.name]
    words = (
        r"^model.layers.0.mlp.experts.gate_up_proj.3: .*\[128, 64\], and its rows are .*gate_proj.weight \[64, 64\]$"
    )
    with pytest.raises(InvalidInput, match=words):
        find_views(reference, a, slices)


def test_steps_of_mamba_are_bounded_for_one_token_as_for_several(tmp_path):
    """transformers leaves the bound out for one token; its weights here make steps below it."""
    other, *_ = saved(tmp_path, OTHERS["nemotron_h"](time_step_min=0.5))
    bound_steps(other.eval())
    ids, cache = torch.tensor([ids_of(40)]), transformers.DynamicCache(config=other.config)
    with torch.no_grad():
        whole = other(ids).logits[0]
        steps = [other(ids[:, place : place + 1], past_key_values=cache).logits[0, 0] for place in range(40)]
    assert (whole - torch.stack(steps)).abs().max() <= 1e-5


# A process that answers requests.


def test_the_sampler_draws_by_it(tmp_path):
    model = distinct_model(tmp_path / "model")
    folders = {
        name: write_adapter(tmp_path / name, model, seed, targets)
        for seed, (name, targets) in enumerate((("all", LINEARS), ("some", ("k_proj", "up_proj"))))
    }
    how, prompt = Sampling(max_tokens=20, ignore_eos=True), tuple(ids_of(30))
    with running(model, tmp_path, "--by-transformers") as ready, Sampler(ready.url, ready.api_key) as sampler:
        for name, folder in folders.items():
            sampler.load_adapter(name, str(folder))
        with ThreadPoolExecutor(3) as pool:
            asked = {name: pool.submit(sampler.sample, name, prompt, how, 4, 3) for name in (NAME, *folders)}
            drawn = {name: samples.result() for name, samples in asked.items()}
        scores = {name: sampler.score(name, prompt) for name in drawn}
    assert len({one.token_ids for samples in drawn.values() for one in samples}) == 12
    for name, samples in drawn.items():
        engine = MegatronEngine(model, Layout(), "float32")
        if name in folders:
            engine.load_adapter(name, folders[name], None, trainable=False)
        probed = Dispatcher(engine).probe(name if name in folders else None, prompt)
        assert torch.tensor(scores[name]).sub(torch.tensor(probed)).abs().max() <= AGREEMENT
        rows = [Row([*prompt, *one.token_ids], [0.0] * 30 + [1.0] * 20) for one in samples]
        with torch.no_grad():
            logprob_N = engine.forward(bin_of(rows), Outputs()).logprob_N
        assert (logprob_N - torch.tensor([v for one in samples for v in one.logprobs])).abs().max() <= AGREEMENT
