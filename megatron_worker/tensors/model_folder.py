"""What stands beside the weights in a Hugging Face model folder that an engine writes."""

import json
import shutil
from pathlib import Path

import torch

_COPIED = (
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "LICENSE"),
    *("tokenizer*", "vocab.*", "chat_template*"),
)


def write_beside_weights(folder: Path, model: Path, dtype: torch.dtype) -> None:
    """The config with the weights' dtype; tokenizer and templates as they were in `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_bytes())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for source in sorted({p for pattern in _COPIED for p in model.glob(pattern)}):
        shutil.copyfile(source, folder / source.name)
