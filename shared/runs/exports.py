"""What is asked for as an export of a published adapter or model, and what is told of one."""

from typing import Literal, Self

from pydantic import Field, model_validator

from longshore.fields import Artifact, Frozen
from shared.runs.requests import Tenant

ExportFormat = Literal["merged", "gguf", "fp8", "mlx"]
ExportType = Literal["q8_0", "f16", "bf16", "q4", "q8"]
_TYPES: dict[str, tuple[ExportType, ...]] = {"gguf": ("q8_0", "f16", "bf16"), "mlx": ("q4", "q8")}


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
    """The work of an export. `key`: of the artifact in the store; `name`: of what is exported, with its version."""

    key: str
    name: str
    tenant: Tenant
    model: Artifact
    adapter: Artifact | None
    export: Export
