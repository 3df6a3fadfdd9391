"""PEFT's folder: `adapter_config.json` beside `adapter_model.safetensors`. What we do not compute is refused."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import InvalidInput
from shared.jobs import LINEARS, Linear, Lora

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor, before the module's Hugging Face name


class _PeftConfig(BaseModel):
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


def write_config(folder: Path, lora: Lora) -> None:
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": [name for name in LINEARS if name in lora.targets],
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_config(folder: Path) -> Lora:
    """Raises InvalidInput when it is missing, unreadable, or asks for something else than plain LoRA on our linears."""
    path = folder / CONFIG
    try:
        config = _PeftConfig.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput("the adapter is missing: no adapter_config.json", str(folder)) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", str(path)) from error
    targets = tuple(name for name in LINEARS if name in config.target_modules)
    return Lora(rank=config.r, alpha=config.lora_alpha, targets=targets)


def check_same(found: Lora, expected: Lora, folder: Path) -> None:
    """Raises InvalidInput when an adapter is of another rank, scale or targets than the job asks for."""
    for name, theirs, ours in (
        ("rank", found.rank, expected.rank),
        ("alpha", found.alpha, expected.alpha),
        ("targets", sorted(found.targets), sorted(expected.targets)),
    ):
        if theirs != ours:
            raise InvalidInput(f"the adapter's {name} is {theirs}, the job asks for {ours}", str(folder / CONFIG))
