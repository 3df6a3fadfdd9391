"""Model families: one file each, from a Hugging Face config and its tensor names to the engine's and back."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

from megatron_worker.families.architecture import Architecture
from megatron_worker.families.tensor_slices import TensorSlice
from shared.errors import InvalidInput
from shared.jobs.layout import FAMILIES
from shared.models.config import read_model_config


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
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InvalidInput(f"model family {config.model_type!r} is not supported: use {known}", str(path))
    architecture: Architecture = _module(config.model_type).architecture(config)
    return architecture


def slices_of(architecture: Architecture, tp: int, etp: int = 1) -> list[TensorSlice]:
    """Every tensor of the model, for degrees of tensor and expert tensor parallelism."""
    slices: list[TensorSlice] = _module(architecture.family).slices(architecture, tp, etp)
    return slices


def _module(family: str) -> ModuleType:
    """The module of a family. It has `architecture(config)` and `slices(architecture, tp, etp)`."""
    return import_module(f"{__name__}.{family}")
