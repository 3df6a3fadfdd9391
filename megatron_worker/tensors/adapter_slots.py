"""The slots of an engine: adapters beside one base, what is trained of them or of it, and their way to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_worker.engine import Memory
from megatron_worker.families.pieces import Piece
from megatron_worker.tensors.flat_buffer import Flat
from megatron_worker.tensors.offload import HostCopy


class SlotAdapter(Protocol):
    """An adapter's weights, in one buffer."""

    pieces: list[Piece]
    flat: Flat


class SlotOptimizer(Protocol):
    """`flats`: every buffer of its own. `detach`: freeze what it trains, and let go of the gradients.

    `is_exact`: it updates the weights that the model computes with, in float32, and no masters of them.
    """

    is_exact: bool

    def flats(self) -> list[Flat]: ...

    def detach(self) -> None: ...


AdapterT = TypeVar("AdapterT", bound=SlotAdapter)
OptimizerT = TypeVar("OptimizerT", bound=SlotOptimizer)


@dataclass
class Training(Generic[OptimizerT]):
    """What is being trained: an adapter's slot, or (None) the base."""

    slot: str | None
    optimizer: OptimizerT
    pieces: list[Piece]

    @property
    def keeps_masters(self) -> bool:
        """In a checkpoint. Adapters are saved in float32 and need none; the weights of a full model may be rounded."""
        return self.slot is None and not self.optimizer.is_exact


class Slots(Generic[AdapterT, OptimizerT]):
    """Any number of adapters, trained or not, of which one or none is active; or the base is trained.

    Args:
        base: this rank's weights of the base, as published. Each has a storage of its own.
        use: make the model compute with an adapter beside the base, or with none.
        new_optimizer: begin to train an adapter.
    """

    def __init__(
        self,
        base: Sequence[Tensor],
        use: Callable[[AdapterT | None], None],
        new_optimizer: Callable[[AdapterT], OptimizerT],
    ) -> None:
        self._device = base[0].device
        self._published, self._trained = HostCopy(base), HostCopy(base)
        self._use, self._new_optimizer = use, new_optimizer
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

    def install(self, name: str, adapter: AdapterT, trainable: bool) -> None:
        """Take an adapter in, and make it the active one."""
        assert name not in self.adapters, f"slot {name!r} is taken"
        assert not (trainable and self._trains_base), "adapters are trained, or the base, not both"
        self.adapters[name] = adapter
        if trainable:
            self.trainings[name] = Training(name, self._new_optimizer(adapter), adapter.pieces)
        self.activate(name)

    def train_base(self, new_optimizer: Callable[[], OptimizerT], pieces: list[Piece]) -> None:
        assert not self.trainings, "drop_training_state comes before training something else"
        self.trainings[None] = Training(None, new_optimizer(), pieces)

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
        """Forget every slot, and what is being trained. A base that was trained goes too (`restore_base`)."""
        for training in self.trainings.values():
            training.optimizer.detach()
        if self._trains_base:
            self._trained.release()
            self._trained.forget()
        self.trainings.clear()
        self.activate(None)
        self.adapters.clear()

    def restore_base(self) -> bool:
        """Have the base's weights on the device. False: they have storage, but are to be read into it anew."""
        if self._published.device_bytes:
            return True
        if self._published.host_bytes:
            self._published.reload()
            return True
        self._published.restore()
        return False

    def offload(self) -> None:
        for copy in self._changing():
            copy.offload()
        self._published.offload(frozen=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload`, but for a base that is not trained: `restore_base`."""
        for copy in self._changing():
            copy.reload()

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
