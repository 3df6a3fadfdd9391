"""The slots of an engine: adapters beside one base, what is trained of them or of it, and their way to the host."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_worker.engine import Memory
from megatron_worker.families import read_architecture
from megatron_worker.families.architecture import Architecture
from megatron_worker.families.tensor_slices import TensorSlice
from megatron_worker.tensors.flat_buffer import Flat
from megatron_worker.tensors.offload import HostCopy
from megatron_worker.tensors.state_files import (
    StatefulOptimizer,
    StateRanks,
    read_adapter,
    read_model,
    read_optimizer,
    write_adapter,
    write_model_folder,
    write_optimizer,
)
from shared.errors import InvalidInput
from shared.jobs.job import Lora
from shared.models import peft as peft_format


class SlotAdapter(Protocol):
    """An adapter's weights, in one buffer."""

    lora: Lora
    slices: list[TensorSlice]
    flat: Flat

    def initialise(self, seed: int) -> None: ...


class SlotOptimizer(StatefulOptimizer, Protocol):
    """`flats`: every buffer of its own. `detach`: freeze what it trains, and let go of the gradients.

    `is_exact`: it updates the weights that the model computes with, in float32, and no masters of them.
    """

    is_exact: bool

    def flats(self) -> list[Flat]: ...

    def detach(self) -> None: ...

    def refresh_working(self) -> None: ...


AdapterT = TypeVar("AdapterT", bound=SlotAdapter)
OptimizerT = TypeVar("OptimizerT", bound=SlotOptimizer)


@dataclass
class Training(Generic[OptimizerT]):
    """What is being trained: an adapter's slot, or (None) the base."""

    slot: str | None
    optimizer: OptimizerT
    pieces: list[TensorSlice]

    @property
    def keeps_masters(self) -> bool:
        """In a checkpoint. Adapters are saved in float32 and need none; the weights of a full model may be rounded."""
        return self.slot is None and not self.optimizer.is_exact


@dataclass(frozen=True)
class Base:
    """A model's own weights on this rank.

    Args:
        folder: where its published weights are.
        parameters: by the names that `pieces` give them.
        storages: the tensors that hold them, each with a storage of its own.
    """

    folder: Path
    architecture: Architecture
    pieces: list[TensorSlice]
    parameters: Mapping[str, Tensor]
    storages: list[Tensor]


class Slots(Generic[AdapterT, OptimizerT]):
    """Any number of adapters, trained or not, of which one or none is active; or the base is trained.

    Args:
        read_base: read the published weights into the base's parameters.
        use: make the model compute with an adapter beside the base, or with none.
        new_adapter: an adapter of zeros; `new_optimizer`: begin to train one.
    """

    def __init__(
        self,
        base: Base,
        ranks: StateRanks,
        read_base: Callable[[], None],
        use: Callable[[AdapterT | None], None],
        new_adapter: Callable[[Lora], AdapterT],
        new_optimizer: Callable[[AdapterT], OptimizerT],
    ) -> None:
        self._base, self._ranks, self._read_base = base, ranks, read_base
        self._device = base.storages[0].device
        self._published, self._trained = HostCopy(base.storages), HostCopy(base.storages)
        self._use, self._new_adapter, self._new_optimizer = use, new_adapter, new_optimizer
        self._active: str | None = None
        self.adapters: dict[str, AdapterT] = {}
        self.trainings: dict[str | None, Training[OptimizerT]] = {}

    @property
    def is_training(self) -> bool:
        return self._active in self.trainings

    @property
    def training(self) -> Training[OptimizerT]:
        """Of the active slot; of the base where no slot is active."""
        assert self.is_training, "nothing is being trained"
        return self.trainings[self._active]

    def add_adapter(self, name: str, lora: Lora, seed: int) -> None:
        """Install a fresh adapter, trainable and active."""
        self.ensure_base()
        adapter = self._new_adapter(lora)
        adapter.initialise(seed)
        self._install(name, adapter, trainable=True)

    def load_adapter(self, name: str, folder: Path, lora: Lora | None, trainable: bool) -> None:
        """Install a PEFT adapter from a folder and make it active. Raises InvalidInput on every rank alike."""
        self.ensure_base()
        with self._ranks.agreement():
            adapter = self._new_adapter(peft_format.read_config(folder, lora))
            # Read in float32, whatever the slot computes in, so that a trained slot's masters lose nothing.
            exact = adapter.flat.like(torch.float32)
            read_adapter(folder, adapter.slices, exact.views, self._ranks)
        adapter.flat.buffer.copy_(exact.buffer)
        self._install(name, adapter, trainable)
        if trainable:
            self.training.optimizer.put("master", exact)

    def _install(self, name: str, adapter: AdapterT, trainable: bool) -> None:
        assert name not in self.adapters, f"slot {name!r} is taken"
        assert not (trainable and self._trains_base), "adapters are trained, or the base, not both"
        self.adapters[name] = adapter
        if trainable:
            self.trainings[name] = Training(name, self._new_optimizer(adapter), adapter.slices)
        self.activate(name)

    def train_base(self, new_optimizer: Callable[[], OptimizerT]) -> None:
        """Train every weight of the base."""
        self.ensure_base()
        assert not self.trainings, "drop_training_state comes before training something else"
        self.trainings[None] = Training(None, new_optimizer(), self._base.pieces)

    def activate(self, name: str | None) -> None:
        self._active = name
        self._use(None if name is None else self.adapters[name])

    def drop(self, name: str) -> None:
        """Forget a slot: weights, gradients, moments. When it was the active one, none is."""
        if name == self._active:
            self.activate(None)
        if (training := self.trainings.pop(name, None)) is not None:
            training.optimizer.detach()
        del self.adapters[name]

    def drop_all(self) -> None:
        """Forget every slot, and what is being trained. A base that was trained goes too (`ensure_base`)."""
        for training in self.trainings.values():
            training.optimizer.detach()
        if self._trains_base:
            self._trained.release()
            self._trained.forget()
        self.trainings.clear()
        self.activate(None)
        self.adapters.clear()

    def ensure_base(self) -> None:
        """Have the base as it was published on the device: full fine-tuning uses it up."""
        if self._published.device_bytes:
            return
        if self._published.host_bytes:
            self._published.reload()
            return
        self._published.restore()
        for storage in self._base.storages:
            storage.zero_()
        self._read_base()

    def offload(self) -> None:
        for copy in self._changing():
            copy.offload()
        self._published.offload(frozen=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload`."""
        for copy in self._changing():
            copy.reload()
        self.ensure_base()

    # Files.

    def save(self, folder: Path) -> None:
        """Write `weights/` and `optimizer/` of what is being trained; rank 0 writes. Collective."""
        training, base, ranks = self.training, self._base, self._ranks
        weights, optimizer = (folder / "weights", folder / "optimizer") if ranks.rank == 0 else (None, None)
        with ranks.agreement():
            if training.slot is None:
                write_model_folder(weights, base.folder, training.pieces, base.parameters, ranks)
            else:
                lora, exact = self.adapters[training.slot].lora, training.optimizer.gathered("master")
                write_adapter(weights, lora, training.pieces, exact, ranks)
        with ranks.agreement():
            write_optimizer(optimizer, training.optimizer, training.pieces, ranks, training.keeps_masters)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, under any layout, into what is being trained. Raises InvalidInput on mismatch."""
        training, ranks = self.training, self._ranks
        with ranks.agreement():
            if training.slot is None:
                self._load_base(folder / "weights")
            else:
                adapter = self.adapters[training.slot]
                peft_format.read_config(folder / "weights", adapter.lora)
                exact = adapter.flat.like(torch.float32)
                read_adapter(folder / "weights", adapter.slices, exact.views, ranks)
                training.optimizer.put("master", exact)
            read_optimizer(folder / "optimizer", training.optimizer, training.pieces, ranks, training.keeps_masters)
        training.optimizer.refresh_working()

    def _load_base(self, folder: Path) -> None:
        if read_architecture(folder) != self._base.architecture:
            raise InvalidInput("the checkpoint is of another architecture than the model", str(folder / "config.json"))
        read_model(folder, self._base.pieces, self._base.parameters, self._ranks)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors of the base, one at a time, on every rank."""
        return ((p.name, self._ranks.whole(p, self._base.parameters)) for p in self._base.pieces)

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and whole float32 tensors of a slot, one at a time, on every rank."""
        adapter, training = self.adapters[name], self.trainings.get(name)
        weights = adapter.flat.views if training is None else training.optimizer.gathered("master")
        return ((p.name, self._ranks.whole(p, weights).float()) for p in adapter.slices)

    def memory(self) -> Memory:
        held = self._published.device_bytes + sum(flat.host.device_bytes for flat in self._flats())
        if self._device.type == "cuda":
            held = torch.cuda.memory_allocated(self._device)
        return Memory(held, sum(copy.host_bytes for copy in (self._published, *self._changing())))

    @property
    def _trains_base(self) -> bool:
        return None in self.trainings

    def _changing(self) -> list[HostCopy]:
        """Of all that training may have changed since it was last on the host."""
        return [flat.host for flat in self._flats()] + ([self._trained] if self._trains_base else [])

    def _flats(self) -> list[Flat]:
        """Adapters and optimizer state."""
        optimizers = [flat for training in self.trainings.values() for flat in training.optimizer.flats()]
        return [adapter.flat for adapter in self.adapters.values()] + optimizers
