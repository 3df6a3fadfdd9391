"""Model families: one file each, from a Hugging Face config and its tensor names to the engine's and back."""

import json
from pathlib import Path

from megatron_worker.families import llama, qwen2, qwen3, qwen3_moe
from megatron_worker.families.architecture import Architecture
from megatron_worker.families.pieces import Piece
from shared.errors import InvalidInput
from shared.models.config import MixtureConfig, read_model_config


def read_architecture(folder: Path) -> Architecture:
    """From a model folder's `config.json`.

    Raises:
        InvalidInput: the file is missing or unreadable, the family unknown, or a setting is one that we do not compute.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput("the model folder has no config.json", str(path)) from error
    except ValueError as error:
        raise InvalidInput(f"not valid JSON: {error}", str(path)) from error
    config = read_model_config(values, str(path))
    if isinstance(config, MixtureConfig):
        return qwen3_moe.architecture(config)
    match config.model_type:
        case "qwen3":
            return qwen3.architecture(config)
        case "qwen2":
            return qwen2.architecture(config)
        case "llama":
            return llama.architecture(config)
        case other:
            raise InvalidInput(
                f"model family {other!r} is not supported: use qwen3, qwen3_moe, qwen2 or llama", str(path)
            )


def pieces_of(architecture: Architecture, tp: int, etp: int = 1) -> list[Piece]:
    """Every tensor of the model, for degrees of tensor and expert tensor parallelism."""
    match architecture.family:
        case "qwen3_moe":
            return qwen3_moe.pieces(architecture, tp, etp)
        case "qwen3":
            return qwen3.pieces(architecture, tp)
        case "qwen2":
            return qwen2.pieces(architecture, tp)
        case "llama":
            return llama.pieces(architecture, tp)
        case other:
            raise AssertionError(other)
