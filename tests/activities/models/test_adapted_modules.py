"""What an adapter is asked to be beside is refused before a run as the worker refuses it, in every family."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import HUB_PATTERNS, WEIGHTS, Resolve, check_weights, read_config
from activities.sources.models import locate
from longshore.training import LINEARS, Lora
from shared.errors import InvalidInput
from shared.families import FAMILIES, read_architecture
from shared.families import read_config as read_model
from shared.families.model_slices import shape_of
from shared.families.tensor_slices import modules_of
from shared.models.peft import OUTPUT, UNREAD, layer_of, module_of
from shared.runs.start import ModelRequest
from tests.activities.models.resolving import edit
from tests.megatron_worker.rows import distinct_model, model_with_tower

WITH_TOWERS = ("qwen3_5", "gemma3", "gemma4", "mistral")


def modules_before_a_run(config, model) -> dict[str, bool]:
    location = locate(str(model), "default", config, HUB_PATTERNS, lambda _: None)
    found = modules_of(check_weights(location, read_config(location)).slices)
    return {name: can_adapt for name, can_adapt in found.items() if name != OUTPUT}


def modules_in_the_worker(model) -> dict[str, bool]:
    found = modules_of(read_architecture(model).slices(1))
    return {name: can_adapt for name, can_adapt in found.items() if name != OUTPUT}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modules_of_a_model_are_those_that_its_worker_adapts(config, tmp_path, family) -> None:
    model = distinct_model(tmp_path / "model", family, tied=family.startswith("gemma"), num_layers=4)
    found = modules_before_a_run(config, model)
    assert found == modules_in_the_worker(model)
    assert True in found.values() and False in found.values()
    shape, sizes = shape_of(read_model(model)), {}
    for name, tensor in load_file(model / WEIGHTS).items():
        *_, outer, inner, linear, _ = f"...{name}".split(".")
        if (
            name.endswith(".weight")
            and found.get(module_of(name))
            and UNREAD not in name
            and layer_of(name) is not None
        ):
            of = "experts" if outer == "experts" else "shared" if inner.startswith("shared_expert") else ""
            sizes.setdefault((linear, of, layer_of(name)), []).append(tuple(tensor.shape))
    assert {key: [shape.linear_size(*key)[::-1]] * len(own) for key, own in sizes.items()} == sizes
    assert shape.num_linears(LINEARS) == sum(map(len, sizes.values()))


@pytest.mark.parametrize("family", WITH_TOWERS)
def test_linears_of_a_tower_are_not_the_decoder_s(config, tmp_path, family) -> None:
    _, whole = model_with_tower(tmp_path, family)
    assert modules_before_a_run(config, whole) == modules_in_the_worker(whole)


def test_layers_that_predict_more_tokens_are_not_adapted(config, tmp_path) -> None:
    model = distinct_model(tmp_path / "model", "deepseek_v3", tied=False, num_layers=4)
    before, tensors = modules_in_the_worker(model), load_file(model / WEIGHTS)
    behind = {f"model.layers.4.{name}.weight": torch.ones(8, 8) for name in ("eh_proj", "self_attn.o_proj")}
    save_file(tensors | behind, model / WEIGHTS, {"format": "pt"})
    edit(model / "config.json", num_nextn_predict_layers=1)
    assert modules_before_a_run(config, model) == before


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("qwen3", Lora(target_pattern=r".*\.mlp"), "model.layers.0.mlp, too, which takes no adapter"),
        ("nemotron_h", Lora(target_pattern=r".*\.(in|out)_proj"), "mixer.out_proj, too, which takes no adapter"),
        ("nemotron_h", Lora(targets=("out_proj",)), "no linear out_proj"),
        ("gpt_oss", Lora(targets=("up_proj",)), "no linear up_proj"),
        ("deepseek_v3", Lora(targets=("k_proj",)), "no linear k_proj"),
        ("deepseek_v3", Lora(rank_pattern={"k_proj": 2}), "like that: k_proj"),
        ("granitemoehybrid", Lora(target_pattern=r".*sparse_moe.*"), "sparse_moe.*, too, which takes no adapter"),
        ("lfm2", Lora(targets=("in_proj", "out_proj", "w2")), None),
        ("lfm2", Lora(targets=("o_proj",)), "no linear o_proj"),
        ("granitemoehybrid", Lora(targets=("input_linear", "out_proj")), None),
        ("nemotron_h", Lora(targets=("q_proj", "embed_tokens")), "embeddings are not called embed_tokens, and take no"),
        ("nemotron_h", Lora(target_pattern=r".*experts\..*up_proj"), r"mixer.experts.\d.up_proj, too, which takes no"),
        ("qwen3_moe", Lora(targets=("gate_proj", "o_proj")), "gate_proj and up_proj go together"),
        ("deepseek_v3", Lora(target_pattern=r".*\.experts\.[01]\..*_proj"), "go together, and a layer's experts"),
        ("deepseek_v3", Lora(layers=(0,)), "only dense MLPs of a mixture are meant"),
        ("qwen3_5_moe", Lora(rank_pattern={"down_proj": 2}), "leave MLPs out of rank_pattern"),
        ("glm4_moe_lite", Lora(dora=True, target_pattern=r".*shared_experts\..*"), "PEFT has no DoRA beside MLPs"),
        ("qwen3_5_moe", Lora(dora=True, target_pattern=r".*shared_expert\..*"), None),
        ("gemma4", Lora(layers=(0, 4)), "nothing to adapt in layer 4"),
        ("gemma4", Lora(targets=("lm_head",)), None),
    ],
    ids=str,
)
def test_a_run_is_refused_before_a_worker_is_leased(config, tmp_path, family, lora, words) -> None:
    model = distinct_model(tmp_path / "model", family, tied=family.startswith("gemma"), num_layers=4)
    request = ModelRequest(uri=str(model), tenant="default", trainable=lora)
    resolve = Resolve(HostContext(config)).resolve_model
    if words is None:
        ActivityEnvironment().run(resolve, request)
        return
    with pytest.raises(InvalidInput, match=words):
        ActivityEnvironment().run(resolve, request)
