"""Live bytes of everything that operations make, whoever makes it: a count that is independent of TrainerRank's."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes that lived at once while the block ran. Storages that were there before do not count."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: weakref.WeakSet = weakref.WeakSet()
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_in([*args, *(kwargs or {}).values()]):
            self._seen.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                self._live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard of PyTorch's: nothing is compiled here."""
        return False

    def take_peak(self) -> int:
        """The peak so far; the next one is looked for from here on."""
        peak, self.peak = self.peak, self._live
        return peak

    def _gone(self, num_bytes):
        self._live -= num_bytes


def tensors_in(values):
    """However deep in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
