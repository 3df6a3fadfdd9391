"""Live bytes of everything that operations make, whoever makes it: an independent count, by sweeping what is held."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes that lived at once while the block ran. Storages that were there before do not count."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._foreign: weakref.WeakSet = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._sizes:
                self._foreign.add(leaf.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage not in self._foreign:
                    self._sizes[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result
