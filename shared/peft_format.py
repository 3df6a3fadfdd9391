"""PEFT's adapter folder: `adapter_config.json` and `adapter_model.safetensors`. What we do not compute is refused."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.jobs import LINEARS, Linear, Lora

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor, before the module's Hugging Face name


class _Config(BaseModel):
    """Plain LoRA on our linears; a field that would change the computation has one value that is taken."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    target_modules: tuple[Linear, ...] = Field(min_length=1)
    bias: Literal["none"] = "none"
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    fan_in_fan_out: Literal[False] = False
    lora_bias: Literal[False] = False
    modules_to_save: None = None
    layers_to_transform: None = None
    rank_pattern: dict[str, Any] = Field(default={}, max_length=0)
    alpha_pattern: dict[str, Any] = Field(default={}, max_length=0)


def config_of(lora: Lora) -> dict[str, object]:
    """The content of `adapter_config.json`. Equal adapters have equal contents."""
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": [name for name in LINEARS if name in lora.targets],
        "task_type": "CAUSAL_LM",
    }


def lora_of(config: dict[str, Any], place: str) -> Lora:
    """The adapter that an `adapter_config.json` describes.

    Raises:
        InvalidInput: it asks for something else than plain LoRA on our linears.
    """
    try:
        read = _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"{'.'.join(map(str, first['loc']))} cannot be used: {first['msg']}", place) from error
    targets = tuple(name for name in LINEARS if name in read.target_modules)
    return Lora(rank=read.r, alpha=read.lora_alpha, targets=targets)


def write_config(folder: Path, lora: Lora) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config_of(lora), indent=2) + "\n")


def read_config(folder: Path, expected: Lora | None = None) -> Lora:
    """What a folder's adapter is.

    Raises:
        InvalidInput: it is missing, unreadable, asks for something else than plain LoRA on our linears, or is not
            as `expected`.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput(f"the adapter is missing: no {CONFIG}", str(folder)) from error
    except ValueError as error:
        raise InvalidInput(f"not valid JSON: {error}", str(path)) from error
    found = lora_of(config, str(path))
    if expected is not None:
        check_same(found, expected, str(folder))
    return found


def check_same(found: Lora, expected: Lora, place: str) -> None:
    """Raises InvalidInput when an adapter is of another rank, scale or targets than is asked for."""
    for name, theirs, ours in (
        ("rank", found.rank, expected.rank),
        ("alpha", found.alpha, expected.alpha),
        ("targets", sorted(found.targets), sorted(expected.targets)),
    ):
        if theirs != ours:
            raise InvalidInput(f"the adapter's {name} is {theirs}, {ours} is asked for", place)
