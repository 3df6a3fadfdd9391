"""Nemotron-H's layers of one block each and Gemma's experts beside MLPs: checked before a worker is asked for."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from activities.models.resolve import WEIGHTS
from longshore.training import Layout, Lora
from megatron_worker.megatron.engine import MegatronEngine
from shared.families import read_config
from shared.families.model_slices import shape_of
from tests.activities.models.resolving import edit, refusal, resolve
from tests.activities.models.test_resolve_adapter import adapter_refusal, resolve_adapter
from tests.megatron_worker.rows import distinct_model


@pytest.fixture
def model(tmp_path) -> Path:
    return distinct_model(tmp_path / "model", "nemotron_h", num_layers=8)


def rename(model: Path) -> None:
    tensors = {re.sub(r"^backbone\.", "model.", name): t for name, t in load_file(model / WEIGHTS).items()}
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("prefix", ["backbone", "model"])
def test_a_model_is_resolved_by_either_name(config, model, prefix) -> None:
    if prefix == "model":
        rename(model)
    found = resolve(config, model).shape
    assert found == shape_of(read_config(model))
    assert (found.num_layers, found.num_experts, found.routes.num_layers) == (8, 8, 2)
    tensors = load_file(model / WEIGHTS)
    tensors.pop(f"{prefix}.layers.6.mixer.gate.e_score_correction_bias")
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    name = f"{prefix}.layers.6.mixer.gate.e_score_correction_bias"
    assert f"the weights lack the tensor {name}" in refusal(config, model)


def test_published_settings_are_read(config, model) -> None:
    (model / "config.json").write_text(
        re.sub(
            r'"time_step_limit": \[[^]]*\]', '"time_step_limit": [0.0, Infinity]', (model / "config.json").read_text()
        )
    )
    assert "Infinity" in (model / "config.json").read_text()
    letters = json.loads((model / "config.json").read_text()) | {"hybrid_override_pattern": "M*E-M*E-"}
    letters.pop("layers_block_type")
    (model / "config.json").write_text(json.dumps(letters))
    assert resolve(config, model).shape.num_layers == 8
    edit(model / "config.json", hybrid_override_pattern="M*E-M*EX")
    assert "a layer of the kind 'X' is not known" in refusal(config, model)


def test_an_adapter_beside_every_linear_is_resolved(config, model, tmp_path) -> None:
    driven = MegatronEngine(model, Layout(), "float32")
    driven.add_adapter("run", Lora(rank=4, alpha=8), seed=0)
    driven.save(tmp_path / "saved")
    folder, shape = tmp_path / "saved" / "weights", resolve(config, model).shape
    asked = Lora(rank=4, alpha=8)
    assert set(resolve_adapter(config, folder, shape=shape, lora=asked).lora.targets) < set(asked.targets)
    fewer = Lora(rank=4, alpha=8, targets=("q_proj",))
    assert "the adapter's targets is" in adapter_refusal(config, folder, shape=shape, lora=fewer)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop("base_model.model.model.layers.0.mixer.in_proj.lora_B.weight")
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    assert f"{len(tensors)} tensors; this model and these targets need {len(tensors) + 1}" in adapter_refusal(
        config, folder, shape=shape
    )


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def test_experts_beside_an_mlp(config, tmp_path) -> None:
    model = distinct_model(tmp_path / "model", "gemma4", config=EXPERTS)
    shape = resolve(config, model, Layout(ep=2, dp=2)).shape
    assert shape == shape_of(read_config(model))
    assert (shape.num_experts, shape.expert_ffn_size) == (4, 32)
    assert {"gate_proj", "q_proj"} <= set(shape.linears)
    assert "needs sp with tp" in refusal(config, model, Layout(tp=2))
