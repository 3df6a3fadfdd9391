"""Adapters for sampling: a PEFT folder as matrices beside the decoder's fused linears.

Shape suffixes: O outputs and I inputs of a fused linear, R ranks of all its parts together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.sampler.decoder import Decoder, FusedLinear, LoraWeights
from megatron_worker.tensors.safetensors_files import TensorFiles, check_names, single_file
from shared.jobs.job import Lora
from shared.models import peft as peft_format


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory: its folder may go away. Without `lora_weights`: the model alone."""

    name: str
    folder: str
    lora_weights: Mapping[str, LoraWeights]


def load_adapter(name: str, folder: Path, decoder: Decoder) -> Adapter:
    """Load an adapter. Raises InvalidInput when it is missing or damaged, or not of the decoder's shape."""
    lora = peft_format.read_config(folder)
    path = folder / peft_format.WEIGHTS
    parts = {linear.name: _targeted(linear, lora) for linear in decoder.linears}
    with single_file(path) as files:
        check_names(files, {_name(p, ab) for own in parts.values() for p in own for ab in "AB"}, path)
        lora_weights = {
            x.name: _lora_weights(x, parts[x.name], lora, files, decoder) for x in decoder.linears if parts[x.name]
        }
    return Adapter(name, str(folder), lora_weights)


def _targeted(linear: FusedLinear, lora: Lora) -> list[TensorSlice]:
    return [p for p in linear.parts if p.name.split(".")[-2] in lora.targets]


def _name(part: TensorSlice, matrix: str) -> str:
    return f"{peft_format.PREFIX}{part.name.removesuffix('.weight')}.lora_{matrix}.weight"


def _lora_weights(
    linear: FusedLinear, targeted: list[TensorSlice], lora: Lora, files: TensorFiles, decoder: Decoder
) -> LoraWeights:
    num_outputs, num_inputs = linear.weight_OI.shape
    a_RI = torch.empty(len(targeted) * lora.rank, num_inputs)
    b_OR = torch.zeros(num_outputs, len(targeted) * lora.rank)
    row = 0
    for part in linear.parts:
        if part in targeted:
            columns = slice((first := targeted.index(part) * lora.rank), first + lora.rank)
            a_RI[columns] = _read(files, part, "A", (lora.rank, num_inputs))
            b_OR[row : row + part.shape[0], columns] = _read(files, part, "B", (part.shape[0], lora.rank))
        row += part.shape[0]
    return LoraWeights(a_RI.to(decoder.device, decoder.dtype), b_OR.to(decoder.device, decoder.dtype), lora.scale)


def _read(files: TensorFiles, part: TensorSlice, matrix: str, shape: tuple[int, ...]) -> torch.Tensor:
    name = _name(part, matrix)
    return files.local(TensorSlice(name, name, shape, None, 0, shape[0]), name, 0, 1)
