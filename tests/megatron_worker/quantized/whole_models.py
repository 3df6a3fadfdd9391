"""A model folder of the weights that a quantized base stands for."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def write_whole(named: Mapping[str, Tensor], model: Path, folder: Path) -> Path:
    """As `model`, with these weights in place of its own."""
    shutil.copytree(model, folder)
    kept = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if name not in named}
    whole = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(kept | whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
