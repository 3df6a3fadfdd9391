"""Sleep: a sampler gives its memory back while a trainer has the device, and takes it again when it is woken.

Asleep it keeps its process, its address and its key; it refuses to draw, and to take other weights.
"""

import ctypes
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_worker.sampler.adapters import LoadedAdapter, load_adapter
from megatron_worker.sampler.decoders.interface import AnyDecoder
from megatron_worker.sampler.generation import Generator
from megatron_worker.sampler.models import Models, RequestRefused, parsed
from megatron_worker.tensors.offload import HostCopy
from shared.chat.sampler_control import PartMemory, SamplerMemory, SleepRequest
from shared.errors import InvalidInput


class Sleep:
    """Moves the weights of a decoder and of its adapters off the device and back. Caches go with their sequences.

    Level 1 keeps a copy of the weights in the host's memory. Level 2, and level 1 if the host's memory is the
    device, drops them: `wake` reads weights from their folders again, others must be sent or loaded anew.
    """

    def __init__(self, decoder: AnyDecoder, models: Models, generator: Generator) -> None:
        self._decoder = decoder
        self._models = models
        self._generator = generator
        self._level: Literal[0, 1, 2] = 0
        self._weights = HostCopy(_whole(decoder.named_weights().values()))
        self._adapters: list[HostCopy] = []
        self._dropped: tuple[LoadedAdapter | None, list[LoadedAdapter]] | None = None

    def sleep(self, body: bytes) -> SamplerMemory:
        """Fall asleep, after the running sequences. A sampler that is asleep sleeps on, at the deeper level."""
        level = parsed(SleepRequest, body or b"{}").level
        self._generator.change(lambda: self._fall_asleep(level))
        return self.memory()

    def wake(self) -> SamplerMemory:
        """Take memory again and serve the same weights, except dropped ones that came from no folder.

        Raises RequestRefused: a folder cannot be read; the sampler sleeps on.
        """
        self._generator.change(self._wake)
        return self.memory()

    def memory(self) -> SamplerMemory:
        """Count the bytes of each part, on the device and in the host's memory."""
        adapters = sum(tensor.nbytes for adapter in self._models.adapters() for tensor in _tensors_of(adapter))
        return SamplerMemory(
            asleep=self._level,
            weights=PartMemory(device=self._weights.device_bytes, host=self._weights.host_bytes),
            adapters=PartMemory(device=adapters, host=sum(copy.host_bytes for copy in self._adapters)),
            caches=PartMemory(device=self._generator.cache_bytes),
        )

    def _fall_asleep(self, level: Literal[1, 2]) -> None:
        if level <= self._level:
            return
        self._models.is_asleep = True
        if level == 1 and self._decoder.device.type != "cpu":
            tensors = [_tensors_of(adapter) for adapter in self._models.adapters()]
            self._adapters = [HostCopy(of_one) for of_one in tensors if of_one]
            for copy in (self._weights, *self._adapters):
                copy.offload()
        else:
            self._dropped = self._models.drop()
            self._weights.release()
            self._weights.forget()
            self._adapters = []
        self._level = level
        _give_back(self._decoder.device)

    def _wake(self) -> None:
        if self._dropped is not None:
            self._read_again(*self._dropped)
        elif self._level:
            for copy in (self._weights, *self._adapters):
                copy.reload()
        self._level, self._adapters, self._dropped = 0, [], None
        self._models.is_asleep = False

    def _read_again(self, base: LoadedAdapter | None, adapters: list[LoadedAdapter]) -> None:
        self._weights.restore()
        try:
            if base is not None:
                self._decoder.read_weights(Path(base.folder))
            read = [load_adapter(adapter.name, Path(adapter.folder), self._decoder) for adapter in adapters]
            for adapter, again in zip(adapters, read, strict=True):
                again.drawn_by = adapter.drawn_by
        except InvalidInput as error:
            self._weights.release()
            raise RequestRefused(503, f"the sampler cannot wake: {error}") from error
        self._models.restore(base, read if base is not None else [])


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor of each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def _tensors_of(adapter: LoadedAdapter) -> list[Tensor]:
    factors = [tensor for weights in adapter.lora_weights.values() for tensor in (weights.a_RI, weights.b_OR)]
    return factors if adapter.head is None else [*factors, adapter.head.weight_LH]


def _give_back(device: torch.device) -> None:
    """Give freed memory that torch's allocator or the C library still holds back to the device and the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
