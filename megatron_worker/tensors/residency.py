"""Residency: which of an engine's tensors are on the device, which on the host, and which were dropped.

One object manages the base weights (slot None) and the weights, gradients and optimizer state of every slot. Code that
computes requests what it needs for the length of a `with` block.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Unpack

import torch

from megatron_worker.engine import Memory, Part, PartBytes, PartPlaces, Where
from megatron_worker.tensors.offload import HostCopy

Key = tuple[Part, str | None]


@dataclass
class Resident:
    """One part of one slot, which is moved as a whole.

    `is_frozen`: its values never change, so it is copied to the host only once. `refill` fills its tensors after they
    were dropped; a part without it cannot be dropped.
    """

    copies: Sequence[HostCopy]
    is_frozen: bool = False
    refill: Callable[[], None] | None = None
    where: Where = field(default="device", init=False)

    def move(self, where: Where) -> None:
        """Move the part. A dropped part stays dropped if its place is the host.

        Raises ValueError: it should be dropped, but has no `refill`.
        """
        match self.where, where:
            case "device", "host":
                for copy in self.copies:
                    copy.offload(self.is_frozen)
            case "host", "device":
                for copy in self.copies:
                    copy.reload()
            case "dropped", "device":
                self._fill()
            case (("device" | "host"), "dropped"):
                self._drop()
            case _:
                return
        self.where = where

    def _fill(self) -> None:
        assert self.refill is not None
        for copy in self.copies:
            copy.restore()
        self.refill()

    def _drop(self) -> None:
        if self.refill is None:
            raise ValueError("nothing could fill it again")
        for copy in self.copies:
            copy.release()
            copy.forget()

    @property
    def bytes(self) -> PartBytes:
        return PartBytes(sum(copy.device_bytes for copy in self.copies), sum(copy.host_bytes for copy in self.copies))


class Residency:
    """See the module's docstring. `base`: the weights as they were published, on the device."""

    def __init__(self, base: Resident, device: torch.device) -> None:
        self._published = base
        self._device = device
        self._held: dict[Key, Resident] = {("weights", None): base}

    def add(self, slot: str | None, parts: Mapping[Part, Resident]) -> None:
        """Take over parts of a slot, which are on the device. If they are weights of slot None, the base is trained."""
        if slot is None and "weights" in parts:
            self.bring_base()
        self._held |= {(part, slot): resident for part, resident in parts.items()}

    def drop(self, slot: str | None) -> None:
        """Forget a slot; its memory is freed with the last reference to its tensors. For slot None: end its training.

        Trained weights of the base then hold no memory; the published weights are loaded when they are needed.
        """
        parts = {key: resident for key, resident in self._held.items() if key[1] == slot}
        for key in parts:
            del self._held[key]
        if slot is None:
            self._held["weights", None] = self._published
            if (trained := parts["weights", None]) is not self._published:
                for copy in trained.copies:
                    copy.release()
                    copy.forget()
                self._published.where = "host" if self._published.bytes.host else "dropped"

    def bring_base(self) -> None:
        self._move({("weights", None): "device"})

    def where(self, part: Part, slot: str | None) -> Where:
        return self._held[part, slot].where

    def place(
        self,
        everything: Where | None = None,
        *,
        slots: Collection[str | None] | None = None,
        **parts: Unpack[PartPlaces],
    ) -> None:
        """Move parts of some slots, or of all. See `megatron_worker.tensors.slot_engine.Engine.place`."""
        wanted = {
            key: where
            for key in self._held
            if (where := parts.get(key[0], everything)) is not None and (slots is None or key[1] in slots)
        }
        for (part, slot), where in wanted.items():
            if where == "dropped" and self._held[part, slot].refill is None:
                of = "the trained base" if slot is None else f"slot {slot!r}"
                raise ValueError(f"the {part} of {of} cannot be dropped: nothing else holds them")
        self._move(wanted)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def training(self, slot: str | None) -> Iterator[None]:
        """Have the base and all of a slot on the device, and what was elsewhere there again afterwards."""
        with self._at({key: "device" for key in self._held if key[1] == slot or key == ("weights", None)}):
            yield

    @contextmanager
    def scoring(self, slot: str | None) -> Iterator[None]:
        """Have the base and a slot's weights on the device, no gradients and no optimizer state; then all as it was."""
        wanted: dict[Key, Where] = {key: "host" for key in self._held if key[0] in ("optimizer", "gradients")}
        with self._at(wanted | {("weights", s): "device" for s in (None, slot)}):
            yield

    @contextmanager
    def _at(self, wanted: Mapping[Key, Where]) -> Iterator[None]:
        # Parts that were dropped before may have values at the end, such as gradients: those are kept on the host.
        before: dict[Key, Where] = {
            key: "host" if (where := self._held[key].where) == "dropped" else where for key in wanted
        }
        try:
            self._move(wanted)
            yield
        finally:
            self._move({key: where for key, where in before.items() if key in self._held})

    def _move(self, wanted: Mapping[Key, Where]) -> None:
        """Move parts: first those that leave the device, then those that come to it."""
        for key, where in sorted(wanted.items(), key=lambda item: item[1] == "device"):
            self._held[key].move(where)

    def memory(self) -> Memory:
        """Count bytes by part; on CUDA the device's are all that torch has allocated there."""
        is_hidden = self._held["weights", None] is not self._published  # the base is trained in their place
        hidden_bytes = self._published.bytes.host if is_hidden else 0
        parts: dict[Part, PartBytes] = {"weights": PartBytes(host=hidden_bytes)}
        for (part, _), resident in self._held.items():
            parts[part] = parts.get(part, PartBytes()) + resident.bytes
        device = sum(part.device for part in parts.values())
        if self._device.type == "cuda":
            device = torch.cuda.memory_allocated(self._device)
        return Memory(device, sum(part.host for part in parts.values()), parts)
