"""Flat buffers of tensors, their offload to the host's memory, and what is resident."""

import ctypes
import math
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_worker.engine import Memory, Part, PartBytes, PartPlaces, Where

# --- Host memory for offloaded tensors, and the copies there and back ---
#
# Copies go chunk by chunk, on a separate stream. Host memory is allocated by chunks, too, since torch rounds every
# request for pinned memory up to a power of two: one of 9 GB would take 16 GB.

CHUNK_BYTES = 256 << 20
_HUGE_PAGE_BYTES = 2 << 20


class HostCopy:
    """Tensors, each with its own storage, and host buffers for their values while they are offloaded.

    Buffers are pinned if there is a device to copy to. They are allocated the first time that they are needed, and
    kept until `forget`: page-locking, or a page's first touch, costs more than the copy.
    """

    def __init__(self, tensors: Sequence[Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = tensors[0].device
        self._storages = [t.untyped_storage() for t in tensors]
        # Whole storages: a shard's is longer than the shard if shards are not equal.
        self._sizes = [storage.nbytes() for storage in self._storages]
        whole = [t.detach().as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in tensors]
        self._slices = _cut([t.view(torch.uint8) for t in whole], chunk_bytes)
        self._host: list[Tensor] = []

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def host_bytes(self) -> int:
        return sum(chunk.untyped_storage().nbytes() for chunk in self._host)

    def offload(self, frozen: bool = False) -> None:
        """Copy to the host and give the device's storages back, unless that was done.

        `frozen`: the tensors never change, so that one copy is for good.
        """
        if self.device_bytes:
            if not (frozen and self._host):
                self._write()
            self.release()

    def reload(self) -> None:
        """Undo `offload`, if necessary. Copies may still run after the return; work on the device waits for them."""
        if not self.device_bytes:
            self.restore()
            with _beside(self._device):
                for slices, chunk in zip(self._slices, self._host, strict=True):
                    _copy_each(slices, chunk.split([len(s) for s in slices]))

    def release(self) -> None:
        """Give the device's storages back. Every view of them stays valid, but empty, until they are there again."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take storage again, its contents undefined."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _prefer_huge_pages(storage)

    def forget(self) -> None:
        """Give the host's buffers back."""
        self._host = []

    def _write(self) -> None:
        with _beside(self._device):
            for number, slices in enumerate(self._slices):
                if number == len(self._host):  # the next chunk is page-locked while this one travels
                    self._host.append(self._new_chunk(sum(map(len, slices))))
                _copy_each(self._host[number].split([len(s) for s in slices]), slices)
        torch.get_device_module(self._device).synchronize()

    def _new_chunk(self, num_bytes: int) -> Tensor:
        pinned = self._device.type != "cpu"
        chunk = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        if not pinned:
            _prefer_huge_pages(chunk.untyped_storage())
        return chunk


def _cut(tensors: Sequence[Tensor], chunk: int) -> list[list[Tensor]]:
    """Cut the concatenation of flat tensors into chunks of `chunk` elements: the slices that make up each chunk."""
    chunks: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        while len(tensor):
            if not room:
                chunks.append([])
                room = chunk
            chunks[-1].append(tensor[:room])
            tensor, room = tensor[room:], room - len(chunks[-1][-1])
    return chunks


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run the block's work on a separate stream, after the work before it and before the work after it.

    On the CPU torch's streams do nothing.
    """
    streams: Any = torch.get_device_module(device)
    own, side = streams.current_stream(device), streams.Stream()
    side.wait_stream(own)
    with streams.stream(side):
        yield
    own.wait_stream(side)


def _prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask the kernel for huge pages (2 MB) for fresh memory, as the first access to a page costs more than the copy.

    If the kernel does not follow (`transparent_hugepage` is `never`), copies are slower.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if storage.device.type != "cpu" or advice is None or storage.nbytes() < 2 * _HUGE_PAGE_BYTES:
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


# --- Named tensors one after another in one buffer: one copy offloads them, one collective reduces them ---

_ALIGNMENT = 64  # elements: keeps every tensor on a cache line, and vectorised kernels on their fast path


class Flat:
    """`views[name]` are the tensors, in the order given; the gaps between them hold zeros.

    `host` holds them while they are offloaded: then views stay valid, but empty.

    `multiples`: the length of the section that begins with this name is rounded up to this multiple.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        multiples: dict[str, int] | None = None,
    ) -> None:
        self.shapes = shapes
        self.multiples = multiples or {}
        self.offsets: dict[str, int] = {}
        end, start, multiple = 0, 0, 1
        for name, shape in shapes.items():
            if name in self.multiples:
                end = start + _rounded_up(end - start, multiple)
                start, multiple = end, self.multiples[name]
            self.offsets[name] = end
            end += _rounded_up(math.prod(shape), _ALIGNMENT)
        self.num_elements = start + _rounded_up(end - start, multiple)
        self.buffer = torch.zeros(self.num_elements, dtype=dtype, device=device)
        spans = ((name, self.offsets[name], math.prod(shape)) for name, shape in shapes.items())
        self.views = {name: self.buffer[start : start + size].view(shapes[name]) for name, start, size in spans}
        self.host = HostCopy([self.buffer])

    def like(self, dtype: torch.dtype, device: torch.device | None = None) -> "Flat":
        """Zeros of the same shapes at the same offsets, on the same device unless another is given."""
        return Flat(self.shapes, dtype, device or self.buffer.device, self.multiples)

    @property
    def num_bytes(self) -> int:
        """Bytes it takes when resident."""
        return self.num_elements * self.buffer.element_size()


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- Residency: which of an engine's tensors are on the device, which on the host, and which were dropped ---
#
# One object manages the base weights (slot None) and the weights, gradients and optimizer state of every slot. Code
# that computes requests what it needs for the length of a `with` block.

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
                assert self.refill is not None
                for copy in self.copies:
                    copy.restore()
                self.refill()
            case (("device" | "host"), "dropped"):
                if self.refill is None:
                    raise ValueError("nothing could fill it again")
                for copy in self.copies:
                    copy.release()
                    copy.forget()
            case _:
                return
        self.where = where

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
