"""Nemotron-H: Mamba-2, attention, MLPs and experts, a layer each. States do not leak, branches go on from their own."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.layout import Layout
from longshore.training import LATENT_EXPERTS, LINEARS, MAMBA, Full, Lora
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.sampler.decoder import Decoder
from shared.errors import InvalidInput
from shared.families import read_architecture, read_config
from shared.families.nemotron_h import corrections
from shared.models.merging import Merger
from shared.models.shape import check_layout, shape_of
from tests.depth import drawn
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs, logprobs_in_transformers, transformers_model
from tests.megatron_worker.state_faults import STATE_FAULTS, changed_by
from tests.megatron_worker.trained_beside import train_beside_peft, train_beside_torch
from tests.megatron_worker.trees import (
    trees_beside_chains,
)

STEPS = [random_rows([40, 17, 90, 25, 60, 8], seed=step % 4) for step in range(20)]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Whose layers are those of published models without experts, and with them; what PEFT sees linears for.
BLOCKS = {
    "dense": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "experts": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "moe"],
}
TARGETS = {"dense": (*ATTENTION, "up_proj", "down_proj", *MAMBA), "experts": (*ATTENTION, *MAMBA, *LATENT_EXPERTS)}


def made_model(folder, **changes):
    return distinct_model(folder, "nemotron_h", num_layers=4, config=changes)


@pytest.fixture(scope="module", params=drawn([*BLOCKS], 1))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    return made_model(tmp_path_factory.mktemp(kind), layers_block_type=BLOCKS[kind])


def furthest_from_transformers(folder):
    rows = random_rows((90, 2, 300, 33))
    found = logprobs(start("megatron", folder), bin_of(rows))
    return float((found - logprobs_in_transformers(transformers_model(folder), rows)).abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_latent_size": None},
        {"time_step_min": 0.6},  # some steps are smaller
        {"use_conv_bias": False, "conv_kernel": 3},
        {"n_groups": 4, "ssm_state_size": 8},
        {"n_groups": 1, "mamba_head_dim": 24},
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        {"n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
        {"layer_norm_epsilon": 0.1},
    ],
    ids=str,
)
def test_settings_are_those_of_transformers(tmp_path, changes):
    assert furthest_from_transformers(made_model(tmp_path, **changes)) <= 1e-5


def test_the_settings_matter(tmp_path):
    """Were one of them not read, the test above would show it."""
    row = random_rows([300])
    plain = logprobs_in_transformers(transformers_model(made_model(tmp_path / "plain")), row)
    for number, change in enumerate(
        ({"time_step_min": 0.6}, {"n_group": 1}, {"routed_scaling_factor": 2.5}, {"norm_topk_prob": False})
    ):
        folder = made_model(tmp_path / str(number), **change)
        assert (logprobs_in_transformers(transformers_model(folder), row) - plain).abs().max() > 1e-3, change


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


def test_twenty_lora_steps_equal_those_of_peft(model, kind, tmp_path):
    from peft import PeftModel

    driven = start("megatron", model)
    lora = Lora(rank=4, alpha=8, targets=TARGETS[kind])
    reference = train_beside_peft(driven, model, lora, STEPS, tmp_path / "start")
    assert {n.split(".")[-4] for n, p in reference.named_parameters() if p.requires_grad} == set(TARGETS[kind])
    driven.save(tmp_path / "end")
    reloaded = PeftModel.from_pretrained(transformers_model(model), tmp_path / "end" / "weights")
    row = [STEPS[0][2]]
    expected_N = logprobs_in_transformers(reloaded, row)
    assert (logprobs(driven, bin_of(row)) - expected_N).abs().max() <= 1e-5
    merged = shutil.copytree(model, tmp_path / "merged")
    with (tmp_path / "end/weights/adapter_model.safetensors").open("rb") as weights:
        merger = Merger.of(lora, weights, "adapter")
    with (model / "model.safetensors").open("rb") as source, (merged / "model.safetensors").open("wb") as target:
        merger.merge(source, target, "base")
    merger.check_used("base")
    assert (logprobs_in_transformers(transformers_model(merged), row) - expected_N).abs().max() <= 1e-5


def test_twenty_full_steps_equal_those_of_torch(model, tmp_path):
    driven = start("megatron", model, "full")
    reference = train_beside_torch(driven, model, STEPS, tmp_path)
    reloaded = transformers_model(tmp_path / "weights")
    ids = torch.tensor([STEPS[0][2].ids])
    with torch.no_grad():
        assert (reloaded(ids).logits - reference(ids).logits).abs().max() <= 2e-3
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "weights" / "model.safetensors")
    assert set(before) == set(after)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {s.name for s in corrections(read_architecture(model))}


def test_every_linear_but_those_that_peft_refuses_has_an_adapter_by_default(model, kind, tmp_path):
    driven = start("megatron", model, "lora")
    driven.save(tmp_path)
    targets = json.loads((tmp_path / "weights/adapter_config.json").read_text())["target_modules"]
    assert set(targets) == {*TARGETS["dense"], *(LATENT_EXPERTS if kind == "experts" else ())}
    found = load_file(tmp_path / "weights/adapter_model.safetensors")
    assert len(found) == 2 * shape_of(read_config(model)).num_linears(LINEARS)
    assert all(re.match(r"base_model\.model\.model\.layers\.\d+\.mixer\.", name) for name in found)
    with pytest.raises(InvalidInput, match="no linear out_proj"):
        driven.add_adapter("b", Lora(targets=("out_proj",)), seed=0)
    driven.load_adapter("again", tmp_path / "weights", Lora(rank=4, alpha=8), trainable=False)  # all, too


def test_correction_biases_are_exact_in_bfloat16(tmp_path):
    folder = made_model(tmp_path / "model")
    files = load_file(folder / "model.safetensors")
    (name,) = (s.name for s in corrections(read_architecture(folder)))
    files[name] += 30  # as published ones: bfloat16 would tell none of them apart
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    driven = MegatronEngine(folder, Layout(), "bfloat16")
    (constant,) = driven._model.constants.values()
    assert torch.equal(constant, files[name])
    driven.train_full(Full())
    driven.save(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved/weights/model.safetensors")[name], files[name])


# Files.


def test_published_names_are_read(model, kind, tmp_path):
    """Of tensors `model`, which transformers reads as `backbone`; of layers the letters of published files."""
    folder = shutil.copytree(model, tmp_path / "model")
    files = load_file(folder / "model.safetensors")
    renamed = {re.sub(r"^backbone\.", "model.", name): tensor for name, tensor in files.items()}
    save_file(renamed | {"mtp.norm.weight": torch.ones(64)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    config["hybrid_override_pattern"] = "".join(letters[block] for block in config.pop("layers_block_type"))
    config |= {"num_hidden_layers": len(config["hybrid_override_pattern"]), "time_step_limit": [0.0, float("inf")]}
    (folder / "config.json").write_text(json.dumps(config))
    driven, row = start("megatron", folder, "full"), [STEPS[0][2]]
    assert torch.equal(logprobs(driven, bin_of(row)), logprobs(start("megatron", model), bin_of(row)))
    driven.save(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved/weights/model.safetensors")) == {*renamed, "mtp.norm.weight"}
    reloaded = transformers_model(tmp_path / "saved" / "weights")
    assert (logprobs(driven, bin_of(row)) - logprobs_in_transformers(reloaded, row)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers_block_type": None}, "layers_block_type or hybrid_override_pattern"),
        ({"layers_block_type": ["linear_attention", "conv"]}, "kind 'conv' is not known"),
        ({"layers_block_type": ["linear_attention"] * 4}, "at least one layer of attention"),
        ({"layers_block_type": ["full_attention"] * 4}, "lack the tensor .*q_proj"),
        ({"n_groups": 3}, "3 groups do not divide 4 heads"),
        ({"n_groups": 4}, "config.json says"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"use_bias": True}, "use_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 128}, "a sliding_window, here of 128"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"n_group": 8}, "8 experts in 8 groups"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "1 of 4 groups, for 3 experts"),
    ],
    ids=str,
)
def test_settings_that_are_not_computed_are_refused(tmp_path, change, words):
    folder = made_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


def test_a_correction_bias_that_is_missing_is_named(tmp_path):
    folder = made_model(tmp_path)
    files = load_file(folder / "model.safetensors")
    (name,) = (s.name for s in corrections(read_architecture(folder)))
    files.pop(name)
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=f"lack the tensor {re.escape(name)}"):
        MegatronEngine(folder, Layout(), "float32")


def test_what_cannot_hold_the_model_is_refused(tmp_path):
    folder = made_model(tmp_path)
    shape = shape_of(read_config(folder))
    for layout, words in (
        (Layout(cp=2), "recurrent"),
        (Layout(tp=4, sp=True), "4 does not divide the model's 2 "),
        (Layout(ep=3, dp=3), "ep=3"),
    ):
        with pytest.raises(InvalidInput, match=words):
            check_layout(layout, shape)
    with pytest.raises(InvalidInput, match="fsdp trains"):
        check_layout(Layout(), shape, "fsdp")
    with pytest.raises(InvalidInput, match="no decoder of its own for nemotron_h"):
        Decoder(folder, torch.float32, torch.device("cpu"))
