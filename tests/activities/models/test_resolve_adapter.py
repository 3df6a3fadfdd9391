"""Adapters resolved against a model, and what a run began with."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from temporalio.testing import ActivityEnvironment

from activities.host_context import HostContext
from activities.models.resolve import AdapterRequest, Resolve, ResolvedAdapter
from longshore.training import Lora, ScalarHead
from shared.errors import CorruptArtifact, InvalidInput
from shared.models.config import read_model_config
from shared.models.shape import ModelShape, shape_of
from shared.runs.models import ModelRequest, ResolvedModel
from shared.settings import Settings
from tests.activities.models.resolving import edit, stage

SIZES = {
    **{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    **{"intermediate_size": 192, "vocab_size": 512},
}


def shape_with(**settings) -> ModelShape:
    return shape_of(read_model_config(SIZES | settings, "config.json"))


SHAPE = shape_with()


def resolve_adapter(config: Settings, uri: str | Path, **wanted) -> ResolvedAdapter:
    request = AdapterRequest(uri=str(uri), tenant="default", **{"shape": SHAPE, **wanted})
    return ActivityEnvironment().run(Resolve(HostContext(config)).resolve_adapter, request)


def adapter_refusal(config: Settings, uri: str | Path, **wanted) -> str:
    with pytest.raises(InvalidInput) as refused:
        resolve_adapter(config, uri, **wanted)
    return str(refused.value)


def test_an_adapter(config, adapter) -> None:
    resolved = resolve_adapter(config, adapter)
    assert resolved.lora == Lora(rank=4, alpha=8, targets=("q_proj", "o_proj"))
    assert stage(config, resolved) == adapter.resolve()


def test_an_adapter_of_experts_has_tensors_for_each(config, tmp_path) -> None:
    sizes = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    experts = shape_with(model_type="qwen3_moe", **sizes)
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.up_proj.lora_{side}.weight": np.zeros(shape, "f4")
        for layer in range(2)
        for expert in range(3)
        for side, shape in (("A", (4, 64)), ("B", (32, 4)))
    }
    (tmp_path / "experts").mkdir()
    save_file(tensors, tmp_path / "experts" / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "bias": "none"}
    (tmp_path / "experts" / "adapter_config.json").write_text(json.dumps(lora))
    resolved = resolve_adapter(config, tmp_path / "experts", shape=experts)
    assert resolved.lora == Lora(rank=4, alpha=8, targets=("up_proj",))
    message = adapter_refusal(config, tmp_path / "experts")
    assert "12 tensors; this model and these targets need 4" in message


def test_an_adapter_of_embeddings_that_peft_wrote(config, tiny_model, tmp_path) -> None:
    """With a copy of the model's own, which the worker compares."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=8, target_modules=["q_proj", "embed_tokens"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "peft")
    assert resolve_adapter(config, tmp_path / "peft").lora.targets == ("q_proj", "embed_tokens")
    wanted = "embed_tokens of the model has 511 inputs"
    assert wanted in adapter_refusal(config, tmp_path / "peft", shape=SHAPE.model_copy(update={"vocab_size": 511}))
    wanted = "the adapter's targets is ['embed_tokens', 'q_proj']"
    assert wanted in adapter_refusal(config, tmp_path / "peft", lora=Lora(rank=8, alpha=8, targets=("q_proj",)))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_peft_wrote(config, tiny_model, tmp_path, dora) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], use_dora=dora)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "peft")
    resolved = resolve_adapter(config, tmp_path / "peft")
    assert resolved.lora == Lora(rank=8, alpha=16, targets=("q_proj", "down_proj"), dora=dora)
    if dora:
        edit(tmp_path / "peft" / "adapter_config.json", use_dora=False)
        assert "lora_magnitude_vector belongs to none of" in adapter_refusal(config, tmp_path / "peft")


def test_an_adapter_with_a_head_goes_on_where_one_is_asked_for(config, tiny_model, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForTokenClassification

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="TOKEN_CLS")
    headed = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=2)
    get_peft_model(headed, lora).save_pretrained(tmp_path / "peft")
    head = ScalarHead(names=("good", "true"))
    asked = Lora(rank=8, alpha=16, targets=("q_proj", "down_proj"), head=head)
    assert resolve_adapter(config, tmp_path / "peft", lora=asked).lora == asked
    assert "its head gives scalars (TOKEN_CLS)" in adapter_refusal(config, tmp_path / "peft")
    other = asked.model_copy(update={"head": ScalarHead(names=head.names, per="sequence")})
    assert "head is 2 scalars a token, 2 scalars a sequence" in adapter_refusal(config, tmp_path / "peft", lora=other)


def test_the_order_of_patterns_which_peft_sorts_counts_where_it_makes_a_difference(config, tiny_model, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    ranks, alphas = {"q_proj": 2, "down_proj": 4}, {"q_proj": 3, r"layers.1.self_attn.q_proj": 5}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], rank_pattern=ranks)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora).save_pretrained(tmp_path / "peft")
    asked = Lora.model_validate({"rank": 8, "alpha": 16, "targets": ["q_proj", "down_proj"], "rank_pattern": ranks})
    resolved = resolve_adapter(config, tmp_path / "peft", lora=asked)
    assert [name for name, _ in resolved.lora.rank_pattern] == ["down_proj", "q_proj"]
    edit(tmp_path / "peft" / "adapter_config.json", alpha_pattern=dict(sorted(alphas.items())))
    same = asked.model_copy(update={"alpha_pattern": tuple(sorted(alphas.items()))})
    resolve_adapter(config, tmp_path / "peft", lora=same)
    other = asked.model_copy(update={"alpha_pattern": tuple(alphas.items())})
    message = adapter_refusal(config, tmp_path / "peft", lora=other)
    assert "matches model.layers.1.self_attn.q_proj" in message and "name them in the adapter's order" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "adapter_config.json: r = 0 "),
        ({"r": 5}, "does not fit r=5"),
        ({"use_dora": True}, "8 tensors; this model and these targets need 12"),
        ({"use_dora": "x"}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj.lora_A.weight has the shape (4, 64), which does not fit r=2"),
        ({"rank_pattern": {"(q": 2}}, "rank_pattern.0.0 = '(q' cannot be used: no regular expression"),
        ({"layers_to_transform": [0]}, "layers.1.self_attn.o_proj.lora_A.weight belongs to none of the adapter's"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": "all-linear"}, "8 tensors; this model and these targets need 28"),
        ({"target_modules": ".*(q"}, "target_modules = '.*(q' cannot be used: no regular expression"),
        ({"target_modules": ["q_proj"]}, "o_proj.lora_A.weight belongs to none of the adapter's target_modules"),
        ({"target_modules": ["q_proj", "o_proj", "v_proj"]}, "8 tensors; this model and these targets need 12"),
    ],
)
def test_an_adapter_that_cannot_be_used_names_its_field(config, adapter, changes, reason) -> None:
    edit(adapter / "adapter_config.json", **changes)
    assert reason in adapter_refusal(config, adapter)


def test_an_adapter_of_another_rank_than_the_run_is_refused(config, adapter) -> None:
    message = adapter_refusal(config, adapter, lora=Lora(rank=8, alpha=8, targets=("q_proj", "o_proj")))
    assert "the adapter's rank is 4, 8 is asked for" in message


def test_an_adapter_of_a_deeper_model_is_refused(config, adapter) -> None:
    message = adapter_refusal(config, adapter, shape=shape_with(num_hidden_layers=1))
    assert "but the model has 1 layers" in message


def test_a_missing_or_truncated_adapter_is_named(config, adapter) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "adapter_model.safetensors: truncated" in adapter_refusal(config, adapter)
    weights.unlink()
    assert "the adapter has no adapter_model.safetensors" in adapter_refusal(config, adapter)
    (adapter / "adapter_config.json").unlink()
    assert "there is no such folder, or it is empty" in adapter_refusal(config, adapter)
    assert "there is no such folder" in adapter_refusal(config, adapter / "gone")


def resolve_for(config: Settings, uri: Path, run_id: str) -> ResolvedModel:
    return ActivityEnvironment().run(
        Resolve(HostContext(config)).resolve_model, ModelRequest(uri=str(uri), tenant="default", run_id=run_id)
    )


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_run_goes_on_with_the_model_that_it_began_with_alone(config, model) -> None:
    began = resolve_for(config, model, "r1")
    (model / "model.safetensors").touch()
    assert resolve_for(config, model, "r1").model.sha256 == began.model.sha256
    flip_last_byte(model / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"that the run began with: model\.safetensors changed") as refused:
        resolve_for(config, model, "r1")
    assert str(refused.value).startswith(f"{model}: this model is not")
    assert resolve_for(config, model, "r2").model.sha256 != began.model.sha256, "a new run may begin with it"
    flip_last_byte(model / "model.safetensors")
    assert resolve_for(config, model, "r1").model.sha256 == began.model.sha256, "put back"
    edit(model / "config.json", rope_theta=5e5)
    (model / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(InvalidInput, match=r"config\.json.* changed since; put the former files back"):
        resolve_for(config, model, "r1")


@pytest.mark.parametrize("role", ["initial_adapter", "reference"])
def test_a_run_goes_on_with_the_adapters_that_it_began_with_alone(config, adapter, role) -> None:
    resolve_adapter(config, adapter, run_id="r1", role=role)
    flip_last_byte(adapter / "adapter_model.safetensors")
    message = adapter_refusal(config, adapter, run_id="r1", role=role)
    name = role.replace("_", " ")
    assert f"this {name} is not the one that the run began with: adapter_model.safetensors changed" in message
    resolve_adapter(config, adapter, run_id="r2", role=role)


def test_a_damaged_record_of_the_beginning_is_told_as_such(config, model) -> None:
    resolve_for(config, model, "r1")
    (config.root_path / "store" / "runs" / "r1" / "began_with" / "model.json").write_bytes(b"{")
    with pytest.raises(CorruptArtifact, match=r"began_with/model\.json: the file is damaged"):
        resolve_for(config, model, "r1")
