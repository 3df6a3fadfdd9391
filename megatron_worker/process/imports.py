"""Imports of slow modules: PyTorch, Megatron."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def slow_imports() -> Iterator[None]:
    """Make imports within the block without garbage collections, which take a quarter of their time.

    If a module was new, all objects at the end are frozen: modules live for ever, and later collections, including
    that at the process's end, need not look at their objects.
    """
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if len(sys.modules) > num_modules:
            gc.freeze()
