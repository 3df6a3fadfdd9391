"""Multi-head latent attention, and experts chosen among groups by corrected scores: as transformers computes them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.layout import Layout
from longshore.training import LATENT, LINEARS, Lora
from megatron_worker.megatron import experts
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.families import read_architecture, read_config
from shared.models.peft import layer_of
from shared.models.shape import check_layout, shape_of
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs, logprobs_in_transformers, transformers_model
from tests.megatron_worker.trained_beside import train_beside_peft, train_beside_torch
from tests.megatron_worker.trees import trees_beside_chains

STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]
OF_ATTENTION = (*LATENT, "o_proj")
CORRECTION = "model.layers.2.mlp.gate.e_score_correction_bias"
YARN = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0},
}


@pytest.fixture(scope="module", params=drawn(["deepseek_v3", "glm4_moe_lite"], 1))
def model(request, tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("latent"), request.param, tied=False, num_layers=4)


@pytest.fixture
def changed(model, tmp_path):
    """Copies of the model whose config says something else."""

    def change(**values):
        folder = shutil.copytree(model, tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
        return folder

    return change


# What is computed.


@pytest.mark.parametrize(
    "values",
    [
        {"q_lora_rank": None, "norm_topk_prob": False},
        {"rope_interleave": False, "v_head_dim": 40, "rope_parameters": YARN},
        {"rope_parameters": {**YARN, "mscale_all_dim": 0}, "n_group": 1, "topk_group": 1},
        {"n_shared_experts": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    ids=str,
)
def test_every_switch_is_that_of_transformers(model, changed, values):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, generator = changed(**values), torch.Generator().manual_seed(1)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, weight in [*reference.named_parameters(), *reference.named_buffers()]:
            if "inv_freq" not in name:
                weight.copy_(("norm" in name) + 0.1 * torch.randn(weight.shape, generator=generator))
    reference.save_pretrained(folder)
    driven, rows = start("megatron", folder), random_rows((90, 2, 300))
    assert (logprobs(driven, bin_of(rows)) - logprobs_in_transformers(reference, rows)).abs().max() <= 1e-5


def test_trees_score_and_learn_as_their_sequences_alone(model, tmp_path):
    of_logprobs, of_gradients = trees_beside_chains(start("megatron", model, "full"), tmp_path)
    assert of_logprobs <= 1e-5
    assert of_gradients <= 1e-5


@pytest.mark.parametrize(
    "forgotten", ["the correction", "the groups", "the scale"], ids=lambda name: name.replace(" ", "-")
)
def test_what_is_forgotten_of_the_routing_shows(model, monkeypatch, forgotten):
    driven, batch = start("megatron", model), bin_of(STEPS[0])
    expected, choose, weights = logprobs(driven, batch), experts.families.choose, experts.families.weights
    if forgotten == "the correction":
        monkeypatch.setattr(experts.families, "choose", lambda score, mixture, _: choose(score, mixture))
    elif forgotten == "the scale":
        monkeypatch.setattr(experts.families, "weights", lambda *args: weights(*args) / args[2].scale)
    else:
        monkeypatch.setattr(
            experts.families, "choose", lambda score, mixture, by: (score + by).topk(mixture.experts_per_token).indices
        )
        if read_config(model).n_group == 1:
            assert torch.equal(logprobs(driven, batch), expected)
            return
    assert (logprobs(driven, batch) - expected).abs().max() > 1e-3


# Training.


@pytest.mark.parametrize("model", ["glm4_moe_lite"], indirect=True)  # the other's: benchmarks/families.py
def test_twenty_lora_steps_equal_those_of_peft(model, tmp_path):
    from peft import PeftModel

    driven = start("megatron", model)
    reference = train_beside_peft(driven, model, Lora(rank=4, alpha=8, targets=OF_ATTENTION), STEPS, tmp_path / "start")
    trained = {name.split(".")[-4] for name, p in reference.named_parameters() if p.requires_grad}
    assert trained == set(OF_ATTENTION)
    driven.save(tmp_path / "end")
    again = PeftModel.from_pretrained(transformers_model(model), tmp_path / "end" / "weights")
    assert (logprobs(driven, bin_of(STEPS[0])) - logprobs_in_transformers(again, STEPS[0])).abs().max() <= 1e-5


@pytest.mark.parametrize("model", ["deepseek_v3"], indirect=True)
def test_twenty_full_steps_equal_those_of_torch(model, tmp_path):
    driven = start("megatron", model, "full")
    reference = train_beside_torch(driven, model, STEPS, tmp_path)
    saved, before = (load_file(one / "model.safetensors") for one in (tmp_path / "weights", model))
    assert saved.keys() == before.keys()
    assert torch.equal(saved[CORRECTION], before[CORRECTION])
    reloaded = transformers_model(tmp_path / "weights")
    ids = torch.tensor([STEPS[0][2].ids])
    with torch.no_grad():
        assert (reloaded(ids).logits - reference(ids).logits).abs().max() <= 2e-3


def test_a_correction_stays_in_float32(model, tmp_path):
    """In bfloat16 other experts would be chosen than transformers chooses, which keeps it too."""
    driven, before = start("megatron", model, "full", dtype="bfloat16"), load_file(model / "model.safetensors")
    assert torch.equal(driven._model.constants["decoder.layers.2.mlp.router.correction"], before[CORRECTION])
    driven.save(tmp_path)
    after = load_file(tmp_path / "weights" / "model.safetensors")
    assert after["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert torch.equal(after[CORRECTION], before[CORRECTION])


def test_an_adapter_beside_all_linears_is_loaded_as_one_of_all(model, tmp_path):
    driven = start("megatron", model)
    driven.add_adapter("a", Lora(), seed=0)
    driven.save(tmp_path)
    config = json.loads((tmp_path / "weights" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {*OF_ATTENTION, "gate_proj", "up_proj", "down_proj"}
    driven.load_adapter("b", tmp_path / "weights", Lora(), trainable=True)
    for others in (("q_proj", "o_proj"), OF_ATTENTION):
        with pytest.raises(InvalidInput, match="the adapter's targets is"):
            driven.load_adapter("c", tmp_path / "weights", Lora(targets=others), trainable=True)
    with pytest.raises(InvalidInput, match="no linear k_proj"):
        driven.add_adapter("d", Lora(targets=("k_proj",)), seed=0)


# What belongs to the model and is not computed; what is refused.


def test_layers_of_multi_token_prediction_are_carried(model, changed, tmp_path):
    folder = changed(num_nextn_predict_layers=1)
    tensors, behind = load_file(folder / "model.safetensors"), {"model.layers.4.eh_proj.weight": torch.randn(64, 128)}
    save_file(tensors | behind, folder / "model.safetensors", {"format": "pt"})
    driven = start("megatron", folder, "full")
    train(driven, [[STEPS[0]]])
    driven.save(tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "weights" / "model.safetensors")
    assert after.keys() == tensors.keys() | behind.keys()
    assert {name for name in after if torch.equal(after[name], (tensors | behind)[name])} == {
        name for name in after if name.startswith("model.layers.4.") or name.endswith("correction_bias")
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_key_value_heads": 2}, "each head has keys of its own"),
        ({"n_group": 3, "topk_group": 1}, "n_group is 3"),
        ({"n_group": 2, "topk_group": 3}, "topk_group is 3 of 2 groups"),
        ({"qk_rope_head_dim": 7}, "by pairs"),
        ({"partial_rotary_factor": 0.5}, "all of it must be rotated"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers of 4"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2, "first_k_dense_replace": 1}, "another part of the layers"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"kv_lora_rank": 21}, "config.json says"),
        ({"num_hidden_layers": 3, "num_nextn_predict_layers": 0}, "not of this family|4 layers of 3"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weights that fp8 has"),
    ],
)
def test_settings_that_are_not_computed_are_refused(changed, values, words):
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(changed(**values), Layout(), "float32")


@pytest.mark.parametrize("missing", [CORRECTION, "model.layers.1.self_attn.kv_a_layernorm.weight"])
def test_a_tensor_that_is_missing_is_named(changed, missing):
    folder = changed()
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=f"lack the tensor {missing}"):
        MegatronEngine(folder, Layout(), "float32")


def test_layouts_and_engines_that_cannot_hold_it_are_refused(model):
    shape = shape_of(read_config(model))
    for layout in (Layout(tp=2, sp=True), Layout(cp=2), Layout(ep=2, dp=2), Layout(tp=2, sp=True, etp=2)):
        check_layout(layout, shape)
    for layout, rule in ((Layout(tp=2), "needs sp"), (Layout(tp=3, sp=True), "does not divide")):
        with pytest.raises(InvalidInput, match=rule):
            check_layout(layout, shape)
    with pytest.raises(InvalidInput, match="tp=2 does not divide the model's 193 feed-forward size"):
        check_layout(Layout(tp=2, sp=True), shape.model_copy(update={"ffn_size": 193}))
    with pytest.raises(InvalidInput, match="fsdp trains"):
        check_layout(Layout(), shape, "fsdp")


def test_the_sizes_of_every_linear_are_the_models_own(model):
    shape, found = shape_of(read_config(model)), {}
    for name, tensor in load_file(model / "model.safetensors").items():
        *_, module, linear, _ = f"model.{name}".split(".")
        if linear in LINEARS:
            kind = "experts" if ".experts." in name else "shared" if module == "shared_experts" else ""
            found.setdefault((linear, kind, layer_of(name)), []).append(tuple(tensor.shape))
    assert {key: shape.linear_size(*key)[::-1] for key in found} == {key: each[0] for key, each in found.items()}
    assert shape.num_linears(LINEARS) == sum(map(len, found.values()))
    assert set(shape.linears) == {linear for linear, *_ in found}


def test_the_sampler_s_own_decoder_refuses_it_by_name(model):
    assert read_architecture(model).attention.query_rank == 24
    with pytest.raises(InvalidInput, match="no decoder of its own for"):
        Decoder(model, torch.float32, torch.device("cpu"))
