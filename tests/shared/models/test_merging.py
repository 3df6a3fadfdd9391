"""Merged weights against PEFT's own merge and float64, file for file; and files that are none."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.training import Lora
from shared.errors import InvalidInput
from shared.models import merging
from shared.models.merging import Merger

LORA = Lora(rank=4, alpha=6, targets=("q_proj", "down_proj"))
Q, DOWN, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.norm"


def files(tmp_path: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    torch.manual_seed(3)
    base = {f"{Q}.weight": (24, 16), f"{DOWN}.weight": (16, 40), f"{NORM}.weight": (16,)}
    save_file({name: torch.randn(shape).to(dtype) for name, shape in base.items()}, tmp_path / "base.safetensors")
    factors = {}
    for name in (Q, DOWN):
        rows, columns = base[f"{name}.weight"]
        factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(LORA.rank, columns)
        factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, LORA.rank)
    save_file(factors, tmp_path / "adapter.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "adapter.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_merged_in_float32_and_rounded_once(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_BLOCK_BYTES", 200)  # a few rows at a time, as of a large weight
    base, adapter = files(tmp_path, dtype)
    with adapter.open("rb") as weights:
        merger = Merger.of(LORA, weights, "adapter")
    with base.open("rb") as source, (tmp_path / "merged.safetensors").open("wb") as target:
        merger.merge(source, target, "base")
    merger.check_used("base")
    merged, before, factors = (load_file(tmp_path / f"{name}.safetensors") for name in ("merged", "base", "adapter"))
    assert torch.equal(merged[f"{NORM}.weight"], before[f"{NORM}.weight"])
    for name in (Q, DOWN):
        a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
        exact = before[f"{name}.weight"].double() + LORA.alpha / LORA.rank * b @ a
        assert merged[f"{name}.weight"].dtype == dtype
        step = 8 * torch.finfo(dtype).eps
        assert torch.allclose(merged[f"{name}.weight"].double(), exact, rtol=step, atol=step)
        assert not torch.equal(merged[f"{name}.weight"], before[f"{name}.weight"])


def test_a_stack_of_experts_is_merged_as_each_expert_alone_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_BLOCK_BYTES", 200)
    torch.manual_seed(3)
    start, sizes = "model.layers.0.mlp.experts", {"gate_proj": (6, 16), "up_proj": (6, 16), "down_proj": (16, 6)}
    apart = {f"{start}.{e}.{n}.weight": torch.randn(size).bfloat16() for e in range(3) for n, size in sizes.items()}
    lora, factors = Lora(rank=4, alpha=6, targets=("gate_proj", "up_proj", "down_proj")), {}
    for name, weight in apart.items():
        if ".1.up_proj" not in name:  # one expert's is left as it is
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = torch.randn(4, weight.shape[1])
            factors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4)
    save_file(factors, tmp_path / "adapter.safetensors")

    def stacks(tensors) -> dict[str, torch.Tensor]:
        rows = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        return {
            f"{start}.{name}": torch.stack(
                [torch.cat([tensors[f"{start}.{e}.{n}.weight"] for n in own]) for e in range(3)]
            )
            for name, own in rows.items()
        }

    merged = {}
    for name, tensors in (("apart", apart), ("stacked", stacks(apart))):
        save_file(tensors, tmp_path / "base.safetensors")
        with (tmp_path / "adapter.safetensors").open("rb") as weights:
            merger = Merger.of(lora, weights, "adapter")
        with (tmp_path / "base.safetensors").open("rb") as source, (tmp_path / name).open("wb") as target:
            merger.merge(source, target, "base")
        merger.check_used("base")
        merged[name] = load_file(tmp_path / name)
    assert all(torch.equal(merged["stacked"][name], stack) for name, stack in stacks(merged["apart"]).items())
    assert not torch.equal(merged["stacked"][f"{start}.down_proj"], stacks(apart)[f"{start}.down_proj"])


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = torch.cat(
        [torch.randn(5000) * 10.0 ** torch.randint(-30, 30, (5000,)), torch.tensor([1e39, float("nan"), 0])]
    )
    bits = merging.bytes_of(values.float().numpy(), "BF16")
    ours = torch.frombuffer(bytearray(bits), dtype=torch.bfloat16)
    assert torch.equal(ours.nan_to_num(7), values.float().to(torch.bfloat16).nan_to_num(7))
    assert np.array_equal(merging.floats_of(bits, "BF16", ""), ours.float().numpy(), equal_nan=True)


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
OTHER = {f"{Q}.weight": {"dtype": "F32", "shape": [1, 16], "data_offsets": [0, 64]}}
QUANTISED = {f"{Q}.weight": {"dtype": "F8_E4M3", "shape": [24, 16], "data_offsets": [0, 384]}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no safetensors"),
        (struct.pack("<Q", 1 << 62), "no safetensors"),
        (header(a=7), "no safetensors"),
        (header(a=ONE | {"data_offsets": [4, 8]}) + bytes(8), "no safetensors"),
        (header(a=ONE, b=ONE | {"data_offsets": [2, 6]}) + bytes(8), "no safetensors"),
        (header(a=ONE | {"shape": [1 << 40]}) + bytes(4), "no safetensors"),
        (header(a=ONE) + bytes(3), "ends early"),
        (header(**OTHER) + bytes(64), "is F32 of \\[1, 16\\]; the adapter changes floats of \\[24, 16\\]"),
        (header(**QUANTISED) + bytes(384), "is F8_E4M3"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    with files(tmp_path, torch.float32)[1].open("rb") as weights:
        merger = Merger.of(LORA, weights, "adapter")
    with pytest.raises(InvalidInput, match=said):
        merger.merge(io.BytesIO(data), io.BytesIO(), "shard")
    with pytest.raises(InvalidInput, match="the base model has no model"):
        merger.check_used("base")
