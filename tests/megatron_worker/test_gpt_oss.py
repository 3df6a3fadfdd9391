"""gpt-oss: what tests of every family (test_families, benchmarks.families) do not show."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.layout import Layout
from longshore.training import Full
from megatron_worker.megatron.engine import MegatronEngine
from megatron_worker.tensors.safetensors_files import dequantized
from shared.errors import InvalidInput
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs


def in_mxfp4(folder):
    """Quantize a model's experts: their numbers become random ones of the format. Returns what they stand for."""
    tensors, found = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found[name] = blocks, scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return found


def test_mxfp4_is_read_as_transformers_does_and_written_as_it_is_trained(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = distinct_model(tmp_path / "model", "gpt_oss", tied=False)
    packed = in_mxfp4(folder)
    engine = MegatronEngine(folder, Layout(), "float32")
    weights = dict(engine.named_weights())
    for name, (blocks, scales) in packed.items():
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert torch.equal(dequantized(blocks, scales), expected)
        assert torch.equal(weights[name], expected.float())
    engine.train_full(Full())
    engine.save(tmp_path / "saved")
    written = tmp_path / "saved" / "weights"
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    assert not [name for name in load_file(written / "model.safetensors") if "_blocks" in name]
    row = [bin_of(random_rows([60]))]
    again = MegatronEngine(written, Layout(), "float32")
    assert torch.equal(logprobs(engine, row[0]), logprobs(again, row[0]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq|quant_method"),
        ({"num_experts_per_tok": 5}, "5 experts of 4"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"sliding_window": None}, "there is no sliding_window"),
        ({"attention_bias": False}, "are not of this family"),
    ],
)
def test_a_model_that_we_would_compute_wrongly_is_refused(tmp_path, change, words):
    folder = distinct_model(tmp_path, "gpt_oss")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidInput, match=words):
        MegatronEngine(folder, Layout(), "float32")


def test_scales_of_another_shape_and_numbers_that_are_not_finite_are_refused(tmp_path):
    folder = distinct_model(tmp_path, "gpt_oss")
    in_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for scales, words in (
        (tensors[f"{name}_scales"][:, :-1], "shape"),
        (torch.full_like(tensors[f"{name}_scales"], 255), "not finite"),
    ):
        changed = tensors | {f"{name}_scales": scales.contiguous()}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidInput, match=f"{name}.*{words}"):
            MegatronEngine(folder, Layout(), "float32")
