"""Gemma 3 and 4: windows, norms around blocks, shared keys and values, embeddings of each layer, towers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.families import sampled
from longshore.layout import Layout
from longshore.training import LINEARS, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.families import read_architecture, read_config
from shared.models.shape import check_layout, shape_of
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import (
    EXPERTS_BESIDE,
    bin_of,
    distinct_model,
    model_with_tower,
    random_rows,
)
from tests.megatron_worker.scores import logprobs, logprobs_in_transformers, transformers_model
from tests.megatron_worker.trained_beside import train_beside_peft, train_beside_torch
from tests.megatron_worker.trees import trees_beside_chains

STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]


@pytest.fixture(scope="module", params=drawn(["gemma3", "gemma4", "gemma4 with experts"], 1))
def model(request, tmp_path_factory):
    family, *experts = request.param.split(maxsplit=1)
    folder, config = tmp_path_factory.mktemp("gemma"), EXPERTS_BESIDE if experts else None
    return distinct_model(folder, family, tied=False, num_layers=4, config=config)


def changed(folder, to, **settings):
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | settings))
    return to


def test_rows_of_a_bin_score_as_in_transformers(model):
    rows = random_rows((90, 2, 300, 33))
    found = logprobs(MegatronEngine(model, Layout(), "float32"), bin_of(rows))
    assert (found - logprobs_in_transformers(transformers_model(model), rows)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": None},
        {"sliding_window": 1},
        {"rope_parameters": None},
    ],
    ids=str,
)
def test_settings_mean_what_they_do_in_transformers(model, tmp_path, change):
    folder, rows = changed(model, tmp_path / "changed", **change), random_rows((90, 33))
    found = logprobs(MegatronEngine(folder, Layout(), "float32"), bin_of(rows))
    assert (found - logprobs_in_transformers(transformers_model(folder), rows)).abs().max() <= 1e-5
    before = logprobs(MegatronEngine(model, Layout(), "float32"), bin_of(rows))
    assert (found - before).abs().max() > 1e-3 or change == {"rope_parameters": None}


SIZES = {
    **{"vocab_size": 301, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "pad_token_id": None},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 310},
}
VARIANTS = {
    "as 31B": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "as E2B": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "as 26B": EXPERTS_BESIDE
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "embeddings alone": {"hidden_size_per_layer_input": 8},
    "one shared": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "attention_k_eq_v": True},
    "scaled": {
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0},
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0}
            },
        },
    },
}


@pytest.mark.parametrize("variant", drawn([*VARIANTS], 3))
def test_variants_of_gemma4_score_as_in_transformers(tmp_path, variant):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    model, rows = Gemma4ForCausalLM(Gemma4TextConfig(**SIZES | VARIANTS[variant])), random_rows((90, 2, 33))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(0.3 if "q_norm" in name else 1 if "norm" in name else 5)
    model.save_pretrained(tmp_path)
    found = logprobs(MegatronEngine(tmp_path, Layout(), "float32"), bin_of(rows))
    assert (found - logprobs_in_transformers(model.eval(), rows)).abs().max() <= 1e-5


def test_the_sampler_draws_by_the_trainer_s_logprobs(model):
    assert sampled(model, MegatronEngine(model, Layout(), "float32")) <= 1e-5


def test_trees_score_and_learn_as_their_sequences_alone(model, tmp_path):
    of_logprobs, of_gradients = trees_beside_chains(start("megatron", model, "full"), tmp_path)
    assert of_logprobs <= 1e-5
    assert of_gradients <= 1e-5


def test_twenty_lora_steps_equal_those_of_peft(model, tmp_path):
    from peft import PeftModel

    driven = start("megatron", model)
    reference = train_beside_peft(driven, model, Lora(rank=4, alpha=8, targets=LINEARS), STEPS, tmp_path / "start")
    adapted = {name.removesuffix(".default.weight") for name, p in reference.named_parameters() if p.requires_grad}
    assert adapted == {
        n.removesuffix(".weight") for n in load_file(tmp_path / "start/weights/adapter_model.safetensors")
    }
    assert len(adapted) == 2 * shape_of(read_config(model)).num_linears(LINEARS)
    driven.save(tmp_path / "end")
    reloaded = PeftModel.from_pretrained(transformers_model(model), tmp_path / "end" / "weights")
    row = [STEPS[0][2]]
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5


def test_twenty_full_steps_equal_those_of_torch(model, tmp_path):
    """The numbers that layers are multiplied by are not trained, and saved as they were."""
    driven = start("megatron", model, "full")
    train_beside_torch(driven, model, STEPS, tmp_path)
    reloaded = transformers_model(tmp_path / "weights")
    row = [STEPS[0][2]]
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5


def test_keys_and_values_that_nobody_takes_are_kept(tmp_path):
    folder = distinct_model(tmp_path / "model", "gemma4", num_layers=4)
    tensors = load_file(folder / "model.safetensors")
    unused = {"model.layers.3.self_attn.k_proj.weight": torch.ones(64, 64)}
    save_file(tensors | unused, folder / "model.safetensors", {"format": "pt"})
    driven = start("megatron", folder, "full")
    driven.save(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved/weights/model.safetensors")) == set(tensors) | set(unused)


# Models that read images, too.


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_decoder_is_trained_beside_its_tower(tmp_path, family):
    from peft import PeftModel

    alone, folder = model_with_tower(tmp_path, family)
    driven, text = start("megatron", folder, "full"), start("megatron", alone, "full")
    assert torch.equal(logprobs(driven, bin_of(STEPS[0])), logprobs(text, bin_of(STEPS[0])))
    train(driven, [[STEPS[0]]])
    driven.save(tmp_path / "saved")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved/weights/model.safetensors")
    assert set(before) == set(after)
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    assert differing == {name for name in before if "language_model" in name and "layer_scalar" not in name}
    reloaded = transformers_model(tmp_path / "saved" / "weights", "AutoModelForImageTextToText")
    row = [STEPS[0][2]]
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5
    adapted = start("megatron", folder, "lora")
    train(adapted, [[STEPS[0]], [STEPS[1]]])
    adapted.save(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter/weights/adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    whole = transformers_model(folder, "AutoModelForImageTextToText")
    with_adapter = PeftModel.from_pretrained(whole, tmp_path / "adapter" / "weights")
    assert (logprobs(adapted, bin_of(row)) - logprobs_in_transformers(with_adapter, row)).abs().max() <= 1e-5


# What is refused.


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, "names 3 layers"),
        ("gemma3", {"sliding_window": None}, "there is no sliding_window"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "neither full_attention nor"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "'proportional'"),
        ("gemma3", {"tie_word_embeddings": True}, "differ"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block=true needs"),
        ("gemma4", {"num_kv_shared_layers": 3}, "leaves no layer that makes"),
        ("gemma4", {"num_kv_shared_layers": 1}, r"2\.mlp\.gate_proj\.weight is \(384, 64\), config\.json says"),
        (
            "gemma4",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "cannot be used: Input should be None",
        ),
        ("gemma4", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "needs rope_theta"),
        ("gemma4", {"vocab_size_per_layer_input": 300}, "is less than"),
        ("gemma4", {"per_layer_config": {"1": {"intermediate_size": 3}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {}}, "config.json says"),
        ("gemma4", {"use_double_wide_mlp": False}, "config.json says"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, family, change, words):
    folder = distinct_model(tmp_path / "model", family, tied=False, num_layers=4)
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(changed(folder, tmp_path / "changed", **change), Layout(), "float32")


def test_a_layer_without_its_number_is_refused(tmp_path):
    folder = distinct_model(tmp_path, "gemma4", num_layers=4)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.layer_scalar"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"lack the tensor model\.layers\.1\.layer_scalar"):
        MegatronEngine(folder, Layout(), "float32")


def test_layouts_and_engines_that_cannot_hold_them_are_refused(tmp_path):
    shape = shape_of(read_config(distinct_model(tmp_path / "shared", "gemma4", num_layers=4)))
    with pytest.raises(InvalidInput, match="stages do not pass on keys and values that layers share"):
        check_layout(Layout(pp=2), shape)
    with pytest.raises(InvalidInput, match=r"tp=4 does not divide the model's 2 key/value heads"):
        check_layout(Layout(tp=4), shape)
    with pytest.raises(InvalidInput, match="and embeddings of each layer"):
        check_layout(Layout(pp=2), shape_of(read_config(distinct_model(tmp_path / "own", "gemma4"))))
    with pytest.raises(InvalidInput, match="fsdp trains"):
        check_layout(Layout(), shape, "fsdp")


def test_the_sampler_s_own_decoder_refuses_them(model):
    with pytest.raises(InvalidInput, match="no decoder of its own for gemma"):
        Decoder(model, torch.float32, torch.device("cpu"))


def test_what_transformers_takes_for_settings_that_a_file_leaves_out(tmp_path):
    """As published files do: only sizes that are not the default's."""
    from transformers import Gemma3TextConfig, Gemma4TextConfig

    for family, kind in (("gemma3_text", Gemma3TextConfig), ("gemma4_text", Gemma4TextConfig)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        ours, theirs = read_architecture(tmp_path), kind()
        assert [mixer.window is not None for mixer in ours.mixers] == [
            one == "sliding_attention" for one in theirs.layer_types
        ]
        assert {mixer.window for mixer in ours.mixers} == {theirs.sliding_window, None}
        assert (ours.vocab_size, ours.hidden_size, ours.tied) == (theirs.vocab_size, theirs.hidden_size, True)
        for number, mixer in enumerate(ours.mixers):
            rope = theirs.rope_parameters[theirs.layer_types[number]]
            own = theirs.per_layer_config[number] if family == "gemma4_text" else theirs
            assert (mixer.head_dim, mixer.num_kv_heads) == (own.head_dim, own.num_key_value_heads)
            assert (mixer.rope.theta, mixer.num_heads) == (rope["rope_theta"], theirs.num_attention_heads)
