"""A copy of an adapter's weights, apart from the engine: to write while training continues, or to look at."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from longshore.training import Lora, Optimizer
from megatron_worker.tensors.safetensors_files import WrittenTensor, write_safetensors
from shared.errors import InvalidInput
from shared.models import peft as peft_format
from shared.models.lora_modules import OUTPUT, AdaptedModules


@dataclass(frozen=True)
class Snapshot:
    """Whole float32 tensors on the host, by PEFT's names."""

    lora: Lora
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write the weights as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`."""
        entries = [WrittenTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        peft_format.write_config(folder, self.lora, self.tensors)
        metadata = peft_format.metadata_of(self.lora)
        write_safetensors(folder / peft_format.WEIGHTS, entries, iter(self.tensors.values()), metadata)


def refuse_beyond_passes(lora: Lora) -> None:
    """Raises InvalidInput for settings that user code's passes through the backbone do not support."""
    if lora.dropout or lora.head is not None or AdaptedModules(lora).of(OUTPUT) is not None:
        raise InvalidInput("dropout, heads and adapters of lm_head are of a run's own passes alone", "trainable")


def refuse_beyond_steps(optimizer: Optimizer, lora: Lora | None) -> None:
    """Raises InvalidInput for a setting that would do nothing in a step of user code. `lora`: None for the base."""
    if optimizer.noise_scale:
        raise InvalidInput("it needs the weights of your losses, which only a run's or a session's have", "noise_scale")
    if optimizer.lora_plus_ratio != 1 and lora is None:
        raise InvalidInput("the base has no B matrices", "lora_plus_ratio")
