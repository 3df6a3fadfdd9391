"""PEFT's adapter folder: `adapter_config.json` and `adapter_model.safetensors`. What we do not compute is refused."""

import hashlib
import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from longshore.fields import Sha256
from longshore.training import LINEARS, Linear, Lora
from shared.errors import InvalidInput
from shared.field_rules import refused_value

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor, before the module's Hugging Face name
_PLAIN: frozenset[Linear] = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)  # what takes these takes all: a model has other linears in their places

# What PEFT leaves out beside the decoder of a model that reads images: linears go by the same names in its towers.
_TOWERS = r".*(vision_tower|audio_tower|visual)\..*"

# Fields that do not change what a finished adapter computes. Dropout only matters in training, where the run's settings
# hold; the configs of initialisations only matter to initialisations that are refused or over (see _Config).
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    }
)


# transformers renames the modules of some models as it reads them: what names begin with in files, and in memory.
_RENAMED = (("backbone.", "model."), ("language_model.model.", "model.language_model."))


def module_of(tensor: str) -> str:
    """Return the name of the module that a model's tensor belongs to."""
    module = tensor.rpartition(".")[0]
    for in_files, in_memory in _RENAMED:
        if module.startswith(in_files):
            return in_memory + module.removeprefix(in_files)
    return module


def _listed(value: object) -> object:
    if isinstance(value, str):
        words = "a pattern is not read: list the linears that it means, of {linears}"
        raise PydanticCustomError("pattern", words, {"linears": ", ".join(LINEARS)})
    return value


class _Config(BaseModel):
    """Fields of plain LoRA. PEFT 0.21 has some 36 more, which are refused if they are switched on (_switched_on).

    PEFT's other initialisations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) also change the base model's weights whenever the
    adapter is loaded, and MiCA trains one matrix alone.
    """

    model_config = ConfigDict(extra="allow")

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    target_modules: Annotated[tuple[Linear, ...], BeforeValidator(_listed)] = Field(min_length=1)
    use_rslora: bool = False
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] = True


def _switched_on(config: _Config) -> list[str]:
    """Return the names of fields that ask for more than plain LoRA, including fields of future versions of PEFT."""
    more = (config.model_extra or {}).items()
    return [
        name
        for name, value in more
        if name not in _WITHOUT_EFFECT and value not in (None, False, "none", {}, [], _TOWERS)
    ]


def config_of(lora: Lora) -> dict[str, object]:
    """The content of `adapter_config.json`. Equal adapters have equal contents."""
    config: dict[str, object] = {
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
    return config | ({"use_rslora": True} if lora.rank_stabilized else {})


def lora_of(config: dict[str, Any], place: str) -> Lora:
    """The adapter that an `adapter_config.json` describes.

    Raises:
        InvalidInput: it asks for something else than plain LoRA on our linears.
    """
    try:
        read = _Config.model_validate(config)
    except ValidationError as error:
        raise InvalidInput(refused_value(error), place) from error
    if fields := _switched_on(read):
        value = (read.model_extra or {})[fields[0]]
        rule = "only plain LoRA is computed, and what this field asks for would be ignored"
        raise InvalidInput(f"{fields[0]} = {value!r:.80} cannot be used: {rule}", place)
    targets = tuple(name for name in LINEARS if name in read.target_modules)
    return Lora(rank=read.r, alpha=read.lora_alpha, targets=targets, rank_stabilized=read.use_rslora)


def write_config(folder: Path, lora: Lora, tensors: Iterable[str]) -> None:
    """Write `adapter_config.json` beside these tensors."""
    is_beside_towers = any(".language_model." in name for name in tensors)
    config = config_of(lora) | ({"exclude_modules": _TOWERS} if is_beside_towers else {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_config(folder: Path, expected: Lora | None = None) -> Lora:
    """Return the LoRA configuration of a folder's adapter.

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


def content_sha256(lora: Lora, weights_sha256: Sha256) -> Sha256:
    """Identify an adapter by what it computes: its configuration, and the hash of its weights' file."""
    return hashlib.sha256(f"{json.dumps(config_of(lora))} {weights_sha256}".encode()).hexdigest()


def check_same(found: Lora, expected: Lora, place: str) -> None:
    """Raises InvalidInput when an adapter is of another rank, scale or targets than is asked for.

    Targets that its family of models has not do not count: see `beside`.
    """
    for name, theirs, ours in (
        ("rank", found.rank, expected.rank),
        ("alpha", found.alpha, expected.alpha),
        ("rank_stabilized", found.rank_stabilized, expected.rank_stabilized),
    ):
        if theirs != ours:
            raise InvalidInput(f"the adapter's {name} is {theirs}, {ours} is asked for", place)
    if not _are_alike({*found.targets}, {*expected.targets}):
        wanted = f"{sorted(expected.targets)} is asked for"
        raise InvalidInput(f"the adapter's targets is {sorted(found.targets)}, {wanted}", place)


def _are_alike(one: set[Linear], other: set[Linear]) -> bool:
    """Return True if there may be a model beside which both targets are the same linears.

    So it is where one has linears of several families, as the default has. Missing tensors then show by their names.
    """
    smaller, larger = sorted((one, other), key=len)
    return smaller == larger or smaller < larger > _PLAIN


def beside(lora: Lora, linears: Container[str]) -> Lora:
    """Return an adapter's settings with the targets that a model has, as PEFT takes them.

    Raises:
        InvalidInput: it has none of them.
    """
    targets = tuple(name for name in LINEARS if name in lora.targets and name in linears)
    if not targets:
        raise InvalidInput(f"this model has no linear {' or '.join(lora.targets)}", "targets")
    return lora.model_copy(update={"targets": targets})
