"""Resolve an adapter: a PEFT folder to go on from, checked against model and run before any GPU is asked for."""

import re
from functools import partial
from typing import Literal

from temporalio import activity

from activities.host_context import HostContext, beating
from activities.models.files import read_tensors
from activities.models.imports import check_began_with, import_files
from activities.models.safetensors_header import TensorEntry
from activities.sources.models import Location, locate
from shared.contract import Artifact, Frozen
from shared.errors import InvalidInput
from shared.jobs.job import Lora
from shared.models.peft import CONFIG, WEIGHTS, check_same, lora_of
from shared.models.shape import ModelShape
from shared.runs.requests import RunId, Tenant

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>\d+)\.(self_attn|mlp(\.experts\.\d+)?)\.(?P<linear>\w+)"
    r"\.lora_(?P<side>[AB])\.weight"
)
_MLP = ("gate_proj", "up_proj", "down_proj")


class AdapterRequest(Frozen):
    """An adapter as a tenant's user names it; what the run asks for, and the model's sizes, where they are known.

    `run_id` and `role`: the run that is to begin, or to go on, with it, and what it is to that run.
    """

    uri: str
    tenant: Tenant
    run_id: RunId | None = None
    role: Literal["initial_adapter", "reference"] = "initial_adapter"
    lora: Lora | None = None
    shape: ModelShape | None = None


class ResolvedAdapter(Frozen):
    """The adapter's files, and what its configuration says."""

    adapter: Artifact
    lora: Lora


class ResolveAdapter:
    """The activity `resolve_adapter`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="resolve_adapter")
    def resolve_adapter(self, request: AdapterRequest) -> ResolvedAdapter:
        """Check an adapter and make an artifact of it.

        Raises:
            InvalidInput: names the file and the rule that it breaks, or which files changed since the run began.
            StoreUnavailable: S3 cannot be reached or refuses us.
        """
        with beating():
            check = partial(_check_config, request)
            location = locate(request.uri, request.tenant, self._host.settings, (CONFIG, WEIGHTS), check)
            lora = check(location)
            _check_weights(location, lora, request.shape)
            adapter = import_files(location, [CONFIG, WEIGHTS], self._host, request.tenant)
            if request.run_id is not None:
                check_began_with(request.role, adapter, request.uri, request.run_id, self._host)
            return ResolvedAdapter(adapter=adapter, lora=lora)


def _check_config(request: AdapterRequest, location: Location) -> Lora:
    lora = lora_of(location.read_json(CONFIG), location.place(CONFIG))
    if request.lora is not None:
        check_same(lora, request.lora, location.place(CONFIG))
    return lora


def _check_weights(location: Location, lora: Lora, shape: ModelShape | None) -> None:
    if WEIGHTS not in location.files:
        raise InvalidInput(f"the adapter has no {WEIGHTS}; only safetensors is read", location.store.uri)
    tensors = read_tensors(location, WEIGHTS)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, lora, shape, location.place(WEIGHTS))
    expected = 0 if shape is None else 2 * _linears_of_layer(lora, shape) * shape.num_layers
    if shape is not None and len(tensors) != expected:
        raise InvalidInput(
            f"{len(tensors)} tensors; this model and these targets need {expected}", location.place(WEIGHTS)
        )


def _linears_of_layer(lora: Lora, shape: ModelShape) -> int:
    """Count the adapted linears: each expert has linears of its own."""
    of_experts = sum(target in _MLP for target in lora.targets)
    return len(lora.targets) - of_experts + of_experts * max(1, shape.num_experts)


def _check_tensor(name: str, tensor: TensorEntry, lora: Lora, shape: ModelShape | None, place: str) -> None:
    match = _TENSOR.fullmatch(name)
    if match is None or match["linear"] not in lora.targets:
        raise InvalidInput(f"tensor {name} belongs to none of the adapter's target_modules", place)
    if shape is not None and int(match["layer"]) >= shape.num_layers:
        raise InvalidInput(f"tensor {name}, but the model has {shape.num_layers} layers", place)
    rank = tensor.shape[0 if match["side"] == "A" else -1] if len(tensor.shape) == 2 else None
    if rank != lora.rank:
        raise InvalidInput(f"tensor {name} has the shape {tensor.shape}, which does not fit r={lora.rank}", place)
