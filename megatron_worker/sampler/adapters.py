"""Adapters of the decoder: read from PEFT's folders, or made of tensors that a trainer has sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from longshore.fields import Sha256
from longshore.training import Lora
from megatron_worker.head.scalar import HeadWeights, head_slices
from megatron_worker.sampler.decoders import AnyDecoder
from megatron_worker.sampler.layers import FusedLinear, LoraFactors
from megatron_worker.tensors.adapter_tensors import norms_of_rows, scale_of, targeted
from megatron_worker.tensors.safetensors_files import single_file
from megatron_worker.tensors.state_files import check_adapter_names
from megatron_worker.weight_sync.buckets import weights_sha256
from shared.chat.completions import DrawnBy
from shared.families.tensor_slices import TensorSlice
from shared.models import peft as peft_format
from shared.models.peft import AdaptedModules, LoraSize


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in memory; its folder is not needed any more. Without `lora_weights`: the model alone.

    `head`: of a reward model, which scores and writes nothing.
    `drawn_by`: which weights these are. Only the thread that generates changes them, between two tokens (`become`).
    """

    name: str
    folder: str
    lora_weights: Mapping[str, LoraFactors]
    drawn_by: DrawnBy = field(default_factory=DrawnBy)
    head: HeadWeights | None = None

    def become(self, other: "LoadedAdapter") -> None:
        """Take another one's weights, under the same name."""
        self.folder, self.lora_weights, self.drawn_by = other.folder, other.lora_weights, other.drawn_by
        self.head = other.head

    def weights_sha256(self) -> Sha256:
        """Return the hash of its bits in memory."""
        named = [
            (f"{linear}.{matrix}", tensor)
            for linear, lora in self.lora_weights.items()
            for matrix, tensor in (("a", lora.a_RI), ("b", lora.b_OR), ("gain", lora.gain_O))
        ]
        named += [] if self.head is None else [("score", self.head.weight_LH), ("score bias", self.head.bias_L)]
        return weights_sha256((name, tensor) for name, tensor in named if tensor is not None)


def versioned(adapter: LoadedAdapter, version: int | None = None) -> LoadedAdapter:
    """Say which weights an adapter has."""
    adapter.drawn_by = DrawnBy(policy_version=version, weights_sha256=adapter.weights_sha256())
    return adapter


def load_adapter(name: str, folder: Path, decoder: AnyDecoder) -> LoadedAdapter:
    """Load an adapter. Raises InvalidInput when it is missing or damaged, or not of the decoder's shape."""
    lora = peft_format.read_config(folder, may_have_head=True)
    path = folder / peft_format.WEIGHTS
    of_head = {s.name: s for s in head_slices(lora.head, decoder.architecture.hidden_size)}
    shapes = adapter_shapes(decoder, lora) | {name: s.shape for name, s in of_head.items()}
    with single_file(path) as files:
        check_adapter_names(files, set(shapes), path, decoder.folder)
        tensors = {
            name: files.local(TensorSlice(name, name, shape, None, 0, shape[0]), name, 0, 1)
            for name, shape in shapes.items()
        }
        adapter = adapter_of(name, str(folder), lora, decoder, tensors)
        adapter.head = HeadWeights.among({s.parameter: tensors[name].to(decoder.device) for name, s in of_head.items()})
        return adapter


def adapter_of(name: str, folder: str, lora: Lora, decoder: AnyDecoder, tensors: Mapping[str, Tensor]) -> LoadedAdapter:
    """Make an adapter of whole tensors under PEFT's names, with the shapes of `adapter_shapes`."""
    found, adapted = {}, AdaptedModules(lora)
    for linear in decoder.adaptable:
        if parts := targeted(linear.parts, adapted):
            found[linear.name] = _lora_weights(linear, parts, tensors, decoder)
    return LoadedAdapter(name, folder, found)


def adapter_shapes(decoder: AnyDecoder, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by PEFT's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    adapted = AdaptedModules(lora)
    for linear in decoder.adaptable:
        for part, size in targeted(linear.parts, adapted).items():
            shapes[peft_format.factor_of(part.name, "A")] = (size.rank, part.shape[1])
            shapes[peft_format.factor_of(part.name, "B")] = (part.shape[0], size.rank)
            if lora.dora:
                shapes[peft_format.norms_of(part.name)] = part.shape[:1]
    return shapes


def _lora_weights(
    linear: FusedLinear, chosen: Mapping[TensorSlice, LoraSize], tensors: Mapping[str, Tensor], decoder: AnyDecoder
) -> LoraFactors:
    num_outputs, num_inputs = linear.weight_OI.shape
    sizes = list(chosen.values())
    num_ranks = sum(size.rank for size in sizes)
    a_RI = torch.empty(num_ranks, num_inputs)
    b_OR = torch.zeros(num_outputs, num_ranks)
    row = first = 0
    for part in linear.parts:
        if part in chosen:
            columns = slice(first, first := first + chosen[part].rank)
            a_RI[columns] = tensors[peft_format.factor_of(part.name, "A")]
            b_OR[row : row + part.shape[0], columns] = tensors[peft_format.factor_of(part.name, "B")]
        row += part.shape[0]
    here = decoder.device, decoder.dtype
    a_RI, b_OR, scale = a_RI.to(*here), b_OR.to(*here), scale_of(sizes, decoder.device)
    if peft_format.norms_of(next(iter(chosen)).name) not in tensors:
        return LoraFactors(a_RI, b_OR, scale)
    norm_O = norms_of_rows(linear.weight_OI, (b_OR * scale) @ a_RI).to(decoder.dtype)
    rows = zip(linear.parts, norm_O.split([part.shape[0] for part in linear.parts]), strict=True)
    trained_O = torch.cat(
        [tensors[peft_format.norms_of(part.name)].to(norm_O) if part in chosen else own_O for part, own_O in rows]
    )
    return LoraFactors(a_RI, b_OR, scale, trained_O / norm_O)
