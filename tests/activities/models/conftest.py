"""A tiny model of a test's own, an adapter for it, and settings under which both may be named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.settings import DownloadSettings, Settings


@pytest.fixture
def config(tmp_path, tiny_model) -> Settings:
    return Settings(root=tmp_path / "root", download=DownloadSettings(file_roots=(tmp_path, tiny_model.parent)))


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "a model"))


@pytest.fixture
def adapter(tmp_path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    sides = {"A": (4, 64), "B": (64, 4)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{linear}.lora_{side}.weight": np.zeros(shape, np.float32)
        for layer in range(2)
        for linear in ("q_proj", "o_proj")
        for side, shape in sides.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
