"""A run's model, as its user names it and as it was found; and the formats that published weights are exported to."""

from typing import Literal, Self

from pydantic import Field, model_validator

from longshore.fields import Artifact, Frozen
from longshore.layout import EngineName, Layout
from longshore.training import Dtype, Trainable
from shared.models.shape import ModelShape
from shared.runs.requests import RunId, Tenant

ExportFormat = Literal["merged", "gguf", "fp8", "mlx"]
ExportType = Literal["q8_0", "f16", "bf16", "q4", "q8"]
_TYPES: dict[str, tuple[ExportType, ...]] = {"gguf": ("q8_0", "f16", "bf16"), "mlx": ("q4", "q8")}


class ModelRequest(Frozen):
    """A model as a tenant's user names it, the layout and engine that hold it, and the longest sequence.

    `run_id`: the run that uses the model. Its later executions must find the same files as its first one. `trainable`:
    what it trains. `any_family`: also accept families that only the engine fsdp may train, if nothing is trained here.
    `dtype`: the precision of the weights on a worker; None: not the run's, or no worker holds them.
    """

    uri: str
    tenant: Tenant
    run_id: RunId | None = None
    layout: Layout = Layout()
    engine: EngineName = "megatron"
    trainable: Trainable | None = None
    max_tokens: int | None = None
    any_family: bool = False
    dtype: Dtype | None = None


class ResolvedModel(Frozen):
    """The model's files: config, safetensors, tokenizer, chat template, generation config."""

    model: Artifact
    shape: ModelShape


class Export(Frozen):
    """How a whole model is written. Without a type: GGUF in `q8_0`, MLX in `q4`."""

    format: ExportFormat = Field(
        description="merged: safetensors as the base model's; gguf: one file for llama.cpp; fp8: safetensors in blocks "
        "of 128 by 128, which vLLM reads; mlx: groups of 64 for mlx-lm"
    )
    type: ExportType | None = Field(default=None, description="gguf: q8_0, f16 or bf16; mlx: q4 or q8")

    @model_validator(mode="after")
    def _is_of_format(self) -> Self:
        types = _TYPES.get(self.format, ())
        if self.type is not None and self.type not in types:
            known = f"it has {', '.join(types)}" if types else "it has none"
            raise ValueError(f"{self.format} has no type {self.type}: {known}")
        return self

    @property
    def stored_as(self) -> ExportType | None:
        """The type of the weights, if the format has several."""
        return self.type or (_TYPES[self.format][0] if self.format in _TYPES else None)

    @property
    def label(self) -> str:
        """`merged`, `fp8`, `gguf-q8_0`, …: equal for exports that have equal files."""
        return "-".join(filter(None, (self.format, self.stored_as)))


LABELS = ("merged", "fp8", *(f"{name}-{each}" for name, types in _TYPES.items() for each in types))


class ExportRequest(Frozen):
    """The work of an export. `key`: the artifact's key in the store; `name`: the exported name, with its version."""

    key: str
    name: str
    tenant: Tenant
    model: Artifact
    adapter: Artifact | None
    export: Export
