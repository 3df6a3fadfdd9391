"""Adapters of the decoder: read from PEFT's folders, or made of tensors that a trainer has sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from longshore.fields import Sha256
from longshore.training import Lora
from megatron_worker.head.scalar import HeadWeights, head_slices
from megatron_worker.lora import Adapter, AppliedLora, forms_of
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.layers import Factors
from megatron_worker.tensors.safetensors_files import single_file
from megatron_worker.tensors.state_files import check_adapter_names
from megatron_worker.weight_sync.buckets import weights_sha256
from shared.chat.completions import DrawnBy
from shared.families.tensor_slices import TensorSlice
from shared.models import peft as peft_format


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in memory; its folder is not needed any more. Without `lora_weights`: the model alone.

    `head`: of a reward model, which scores and writes nothing. `weights`: another object after each change of weights.
    `drawn_by`: which weights these are. Only the thread that generates changes them, between two tokens (`become`).
    """

    name: str
    folder: str
    lora_weights: Factors
    drawn_by: DrawnBy = field(default_factory=DrawnBy)
    head: HeadWeights | None = None
    weights: object = field(default_factory=object)

    def become(self, other: "LoadedAdapter") -> None:
        """Take another one's weights, under the same name."""
        self.folder, self.lora_weights, self.drawn_by = other.folder, other.lora_weights, other.drawn_by
        self.head, self.weights = other.head, other.weights

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        named = [(f"{n}.{matrix}", x) for n, lora in self.lora_weights.items() for matrix, x in lora.tensors.items()]
        return named if self.head is None else [*named, *self.head.named_tensors()]

    def weights_sha256(self) -> Sha256:
        """Return the hash of its bits in memory."""
        return weights_sha256(self.named_tensors())


def versioned(adapter: LoadedAdapter, version: int | None = None) -> LoadedAdapter:
    """Say which weights an adapter has."""
    adapter.drawn_by = DrawnBy(policy_version=version, weights_sha256=adapter.weights_sha256())
    return adapter


def load_adapter(name: str, folder: Path, decoder: Decoder) -> LoadedAdapter:
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


def adapter_of(name: str, folder: str, lora: Lora, decoder: Decoder, tensors: Mapping[str, Tensor]) -> LoadedAdapter:
    """Make an adapter of whole tensors under PEFT's names, with the shapes of `adapter_shapes`."""
    found: dict[str, AppliedLora] = {}
    for fused in decoder.adaptable:  # one by one: beside what is kept and what came there is no third copy of it all
        adapter = Adapter(lora, [fused.linear], [], decoder.dtype, decoder.device)
        for s in adapter.slices:
            adapter.write(s, tensors[s.name])
        found |= {linear: own.applied(fused.weight_OI) for linear, own in adapter.linears.items()}
    return LoadedAdapter(name, folder, found)


def adapter_shapes(decoder: Decoder, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors by PEFT's names."""
    forms = forms_of(lora, [fused.linear for fused in decoder.adaptable])
    return {s.name: s.shape for form in forms for s in form.slices}
