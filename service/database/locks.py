"""Locks by key, in this process: changes of the same object wait for each other."""

import asyncio
from weakref import WeakValueDictionary


class KeyedLocks:
    """A lock for each key. It exists while a task holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    def of(self, *key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())
