"""Resolve an adapter: a PEFT folder to go on from, checked against model and run before any GPU is asked for."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from temporalio import activity

from activities.heartbeat import beating
from activities.import_files import import_files
from activities.model_files import read_tensors
from activities.model_location import Location, locate
from activities.safetensors_header import TensorEntry
from shared.errors import InvalidInput
from shared.jobs import LINEARS, Artifact, Linear, Lora
from shared.layout import ModelShape
from shared.models import Frozen
from shared.settings import Settings

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>\d+)\.(self_attn|mlp)\.(?P<linear>\w+)\.lora_(?P<side>[AB])\.weight"
)


class AdapterRequest(Frozen):
    """An adapter as a user names it; what the run asks for, and the model's sizes, where they are known."""

    uri: str
    lora: Lora | None = None
    shape: ModelShape | None = None


class ResolvedAdapter(Frozen):
    """The adapter's files, and what its configuration says."""

    adapter: Artifact
    lora: Lora


class _PeftConfig(BaseModel):
    """`adapter_config.json`: plain LoRA on our linears; whatever would change the computation is refused."""

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


class ResolveAdapter:
    """Finds and checks adapters."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @activity.defn(name="resolve_adapter")
    def resolve_adapter(self, request: AdapterRequest) -> ResolvedAdapter:
        """Check an adapter and make an artifact of it.

        Raises:
            InvalidInput: names the file and the rule that it breaks.
            StoreUnavailable: S3 cannot be reached or refuses us.
        """
        with beating():
            location = locate(request.uri, self._settings, (CONFIG, WEIGHTS))
            lora = _read_config(location)
            if request.lora is not None:
                _check_same(lora, request.lora, location.place(CONFIG))
            _check_weights(location, lora, request.shape)
            return ResolvedAdapter(adapter=import_files(location, [CONFIG, WEIGHTS], self._settings), lora=lora)


def _read_config(location: Location) -> Lora:
    raw = location.read_json(CONFIG)
    try:
        config = _PeftConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))} cannot be used: {first['msg']}"
        raise InvalidInput(problem, location.place(CONFIG)) from error
    targets = tuple(name for name in LINEARS if name in config.target_modules)
    return Lora(rank=config.r, alpha=config.lora_alpha, targets=targets)


def _check_same(found: Lora, wanted: Lora, place: str) -> None:
    for name, theirs, ours in (
        ("rank", found.rank, wanted.rank),
        ("alpha", found.alpha, wanted.alpha),
        ("targets", sorted(found.targets), sorted(wanted.targets)),
    ):
        if theirs != ours:
            raise InvalidInput(f"the adapter's {name} is {theirs}, the run asks for {ours}", place)


def _check_weights(location: Location, lora: Lora, shape: ModelShape | None) -> None:
    if WEIGHTS not in location.files:
        raise InvalidInput(f"the adapter has no {WEIGHTS}; only safetensors is read", location.store.uri)
    tensors = read_tensors(location, WEIGHTS)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, lora, shape, location.place(WEIGHTS))
    if shape is not None and len(tensors) != 2 * len(lora.targets) * shape.num_layers:
        expected = 2 * len(lora.targets) * shape.num_layers
        raise InvalidInput(
            f"{len(tensors)} tensors; this model and these targets need {expected}", location.place(WEIGHTS)
        )


def _check_tensor(name: str, tensor: TensorEntry, lora: Lora, shape: ModelShape | None, place: str) -> None:
    match = _TENSOR.fullmatch(name)
    if match is None or match["linear"] not in lora.targets:
        raise InvalidInput(f"tensor {name} belongs to none of the adapter's target_modules", place)
    if shape is not None and int(match["layer"]) >= shape.num_layers:
        raise InvalidInput(f"tensor {name}, but the model has {shape.num_layers} layers", place)
    rank = tensor.shape[0 if match["side"] == "A" else -1] if len(tensor.shape) == 2 else None
    if rank != lora.rank:
        raise InvalidInput(f"tensor {name} has the shape {tensor.shape}, which does not fit r={lora.rank}", place)
