"""Hybrid models: no state passes from one sequence to another, branches start from their prefix's, towers are kept."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from longshore.layout import Layout
from longshore.training import DELTA_NET, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.adapters import load_adapter
from megatron_worker.sampler.decoders import open_decoder
from shared.errors import InvalidInput
from shared.families import read_architecture, read_config
from shared.families.model_slices import slices_of
from shared.models.shape import check_layout, shape_of
from tests.depth import drawn
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import Row, bin_of, distinct_model, model_with_tower, random_rows
from tests.megatron_worker.scores import logprobs, logprobs_by_steps, logprobs_in_transformers, transformers_model
from tests.megatron_worker.state_faults import STATE_FAULTS, changed_by
from tests.megatron_worker.trained_beside import train_beside_peft, train_beside_torch
from tests.megatron_worker.trees import (
    trees_beside_chains,
)

STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=drawn(["qwen3_5", "qwen3_5_moe"], 1))
def model(request, tmp_path_factory):
    return distinct_model(tmp_path_factory.mktemp("hybrid"), request.param, tied=False, num_layers=4)


# States.


def test_trees_score_and_learn_as_their_sequences_alone(model, tmp_path):
    of_logprobs, of_gradients = trees_beside_chains(start("megatron", model, "full"), tmp_path)
    assert of_logprobs <= 1e-5
    assert of_gradients <= 1e-5


def test_a_row_s_scores_do_not_depend_on_the_rows_beside_it(model):
    driven, rows = start("megatron", model), random_rows([70, 3, 150, 64, 1, 65])
    alone = {id(row): logprobs(driven, bin_of([row])) for row in rows if len(row.ids) > 1}
    for order in ([0, 1, 2, 3, 4, 5], [4, 5, 3, 0, 2, 1], [2, 0]):
        found = logprobs(driven, bin_of([rows[i] for i in order]))
        expected = torch.cat([alone[id(rows[i])] for i in order if len(rows[i].ids) > 1])
        assert (found - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_states_that_leak_or_are_lost_show(model, monkeypatch, fault):
    assert changed_by(start("megatron", model), monkeypatch, fault) > 1e-3


# Training.


def test_twenty_lora_steps_equal_those_of_peft(model, tmp_path):
    """Beside attention and delta nets alone where there are experts: PEFT sees no linears in those of transformers."""

    is_mixture = read_architecture(model).num_experts > 0
    of_mlps = () if is_mixture else ("gate_proj", "up_proj", "down_proj")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", *of_mlps, *DELTA_NET)
    driven = start("megatron", model)
    reference = train_beside_peft(driven, model, Lora(rank=4, alpha=8, targets=targets), STEPS, tmp_path / "start")
    own = {s.name.split(".")[-2] for s in slices_of(read_architecture(model), 1)}
    assert {name.split(".")[-4] for name, p in reference.named_parameters() if p.requires_grad} == set(targets) & own


def test_twenty_full_steps_equal_those_of_torch(model, tmp_path):
    driven = start("megatron", model, "full")
    reference = train_beside_torch(driven, model, STEPS, tmp_path)
    reloaded = transformers_model(tmp_path / "weights")
    ids = torch.tensor([STEPS[0][2].ids])
    with torch.no_grad():
        assert (reloaded(ids).logits - reference(ids).logits).abs().max() <= 2e-3


def test_targets_that_a_model_has_not_are_left_out(model, tmp_path):
    dense = distinct_model(tmp_path / "dense")
    driven = start("megatron", dense)
    driven.add_adapter("a", Lora(), seed=0)
    driven.save(tmp_path / "saved")
    assert (
        "in_proj_qkv" not in json.loads((tmp_path / "saved/weights/adapter_config.json").read_text())["target_modules"]
    )
    with pytest.raises(InvalidInput, match="no linear in_proj_z"):
        driven.add_adapter("b", Lora(targets=("in_proj_z",)), seed=0)


# Models that read images, too.


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe"])
def with_tower(request, tmp_path):
    return model_with_tower(tmp_path, request.param)


def test_a_decoder_is_trained_beside_its_tower(with_tower, tmp_path):
    alone, folder = with_tower
    (folder / "preprocessor_config.json").write_text("{}")
    driven, text = start("megatron", folder, "full"), start("megatron", alone, "full")
    assert torch.equal(logprobs(driven, bin_of(STEPS[0])), logprobs(text, bin_of(STEPS[0])))
    train(driven, [[STEPS[0]]])
    driven.save(tmp_path / "saved")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved/weights/model.safetensors")
    assert set(before) == set(after)
    assert (tmp_path / "saved/weights/preprocessor_config.json").exists()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith(("model.visual.", "mtp."))}
    reloaded = transformers_model(tmp_path / "saved" / "weights", "AutoModelForImageTextToText")
    row = [STEPS[0][2]]
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, "text_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(with_tower, change, words):
    _, folder = with_tower
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"linear_num_key_heads": 3}, "3 key heads do not divide"),
        ({"linear_conv_kernel_dim": 5}, r"conv1d\.weight is .*config\.json says"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.05}}, "rotates 0 of 16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, tmp_path, change, words):
    folder = shutil.copytree(model, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


def test_layouts_that_cannot_hold_the_states_are_refused(model):
    shape = shape_of(read_config(model))
    with pytest.raises(InvalidInput, match="recurrent"):
        check_layout(Layout(cp=2), shape)
    with pytest.raises(InvalidInput, match="fsdp trains"):
        check_layout(Layout(), shape, "fsdp")


# The sampler.


def test_the_sampler_s_steps_are_the_trainer_s_scores(model, tmp_path):
    driven = start("megatron", model, "lora")
    train(driven, [[STEPS[0]], [STEPS[1]]])
    driven.save(tmp_path)
    decoder = open_decoder(model, torch.float32, CPU)
    lora = load_adapter("a", tmp_path / "weights", decoder).lora_weights
    ids = random_rows([300])[0].ids
    expected = logprobs(driven, bin_of([Row(ids, [0.0] + [1.0] * 299)]))
    for cut in (1, 2, 5, 64, 130, 270):  # the last is read in two parts
        found = logprobs_by_steps(decoder, ids, range(cut, cut + 20), lora)
        assert (found - expected[cut - 1 : cut + 19]).abs().max() <= 1e-5


def test_the_sampler_takes_a_model_with_a_tower(with_tower):
    alone, folder = with_tower
    tokens = tuple(random_rows([50])[0].ids)
    hidden = [open_decoder(one, torch.float32, CPU).prefill(tokens, {}).hidden_H for one in (alone, folder)]
    assert torch.equal(*hidden)
