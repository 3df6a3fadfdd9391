"""Published weights in FP8 with a scale for each block of 128 by 128, as the base of what is trained."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longshore.training import Full
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.tensors.safetensors_files import single_file
from shared.errors import InvalidInput
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.rows import bin_of, distinct_model, random_rows
from tests.megatron_worker.scores import logprobs, logprobs_by_steps

ROWS = random_rows((60, 17))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def by_the_formula(code_OI: torch.Tensor, scale_BC: torch.Tensor) -> np.ndarray:
    """Each number of a code times the scale of the block that it is in, one after another."""
    codes, scales = code_OI.float().numpy(), scale_BC.numpy()
    made = np.empty_like(codes)
    for row, column in np.ndindex(*codes.shape):
        made[row, column] = codes[row, column] * scales[row // 128, column // 128]
    return made


def in_fp8(model: Path) -> Path:
    """Quantize a model's linears, also those of the layers behind. Returns a folder of the numbers they stand for."""
    same = shutil.copytree(model, model.with_name("same"))
    tensors = load_file(model / "model.safetensors")
    numbers, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("_proj.weight") or "_proj_with_mqa" in n]:
        code_OI = (tensors[name] * 100).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in code_OI.shape]
        scale_BC = (0.5 + torch.rand(blocks, generator=generator)) / 100
        tensors |= {name: code_OI, f"{name}_scale_inv": scale_BC}
        numbers[name] = torch.from_numpy(by_the_formula(code_OI, scale_BC))
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    save_file(numbers, same / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return same


def deepseek(folder: Path) -> Path:
    """A model whose linears are of no multiple of 128, with a layer behind the others that predicts more tokens."""
    model = distinct_model(folder / "model", "deepseek_v3", tied=False, hidden_size=200)
    tensors = load_file(model / "model.safetensors")
    behind = {"eh_proj": torch.randn(200, 400), "mlp.down_proj": torch.randn(200, 600), "enorm": torch.ones(200)}
    tensors |= {f"model.layers.2.{name}.weight": tensor for name, tensor in behind.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return model


@pytest.mark.parametrize(("family", "engine"), [("deepseek_v3", "megatron"), ("qwen3", "megatron"), ("qwen3", "fsdp")])
def test_blocks_are_read_as_the_formula_says_and_written_as_they_are_trained(tmp_path, family, engine):
    small = {"hidden_size": 200, "head_dim": 24}
    model = deepseek(tmp_path) if family == "deepseek_v3" else distinct_model(tmp_path / "model", "qwen3", **small)
    same = in_fp8(model)
    driven, plain = start(engine, model, "lora"), start(engine, same, "lora")
    assert torch.equal(logprobs(driven, bin_of(ROWS)), logprobs(plain, bin_of(ROWS)))
    assert train(driven, [[ROWS]]) == train(plain, [[ROWS]])
    decoders = [Decoder(folder, torch.float32, torch.device("cpu")) for folder in (model, same)]
    assert torch.equal(*(logprobs_by_steps(decoder, ROWS[0].ids, range(20, 30), {}) for decoder in decoders))

    full = start(engine, model)
    full.train_full(Full())
    full.save(tmp_path / "saved")
    written = tmp_path / "saved" / "weights"
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    read, expected, found = (load_file(folder / "model.safetensors") for folder in (model, same, written))
    expected = {name: tensor for name, tensor in expected.items() if not name.startswith("model.layers.2.")}
    expected |= {name: tensor for name, tensor in read.items() if name.startswith("model.layers.2.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    full.load(tmp_path / "saved")


@pytest.mark.parametrize("shape", [(128, 128), (300, 130), (1, 257), (130, 1), (2, 130, 200)], ids=str)
def test_any_part_of_a_tensor_is_read(tmp_path, shape):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = [*shape[:-2], *(-(-size // 128) for size in shape[-2:])]
    scales = torch.rand(blocks, generator=generator)
    save_file({"w": codes, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    pairs = zip(codes.reshape(-1, *shape[-2:]), scales.reshape(-1, *blocks[-2:]), strict=True)
    expected = torch.stack([torch.from_numpy(by_the_formula(*pair)) for pair in pairs]).reshape(shape)
    files = single_file(tmp_path / "model.safetensors")
    assert files.names == {"w"}
    assert torch.equal(files._slice("w")[:], expected)
    lazy = files._slice("w")
    for axis, size in enumerate(shape):
        for begin, end in {
            (0, size),
            (size // 3, size),
            (0, size // 2),
            (min(127, size - 1), size),
            (2 * size // 3, size),
            (size, size),
        }:
            key = (*[slice(None)] * axis, slice(begin, end))
            assert torch.equal(lazy[key], expected[key]), key
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"w", "w_scale_inv"}


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_scales_that_are_missing_or_of_another_shape_are_refused(tmp_path, engine):
    model = distinct_model(tmp_path / "model", hidden_size=200)
    in_fp8(model)
    tensors = load_file(model / "model.safetensors")
    scale = tensors[f"{NAME}_scale_inv"]
    for change, words in (
        ({}, f"{NAME} is FP8, and its scales, .*: it is missing"),
        ({f"{NAME}_scale_inv": scale[:, :-1].clone()}, r"_scale_inv, have to be floats of \(2, 5\): it is F32"),
        ({f"{NAME}_scale_inv": scale.flatten()}, r"_scale_inv, have to be floats of .*: it is F32 of \(10,\)"),
        ({f"{NAME}_scale_inv": scale * torch.nan}, "not finite"),
        (
            {f"{NAME}_scale_inv": scale, NAME: tensors[NAME].float()},
            f"not of this family, the first is '{NAME}_scale_inv'",
        ),
    ):
        others = {name: tensor for name, tensor in tensors.items() if name != f"{NAME}_scale_inv"}
        save_file(others | change, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidInput, match=words):
            start(engine, model)
