"""Adapters that a sampler has got by weight syncs, and that nobody has named yet."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from longshore.fields import Sha256

_MOST = 8
A = TypeVar("A")


@dataclass
class _SyncedAdapter(Generic[A]):
    adapter: A
    run_id: str
    content: Sha256 | None = None


class SyncedAdapters(Generic[A]):
    """The newest such adapter of each run, of at most 8 runs: others must be loaded from the store.

    One is found by the digest of its sync, or by its content (`shared.models.peft.content_sha256`) once that is known.
    """

    def __init__(self) -> None:
        self._kept: dict[Sha256, _SyncedAdapter[A]] = {}

    def __iter__(self) -> Iterator[A]:
        return iter([each.adapter for each in self._kept.values()])

    def keep(self, digest: Sha256, run_id: str, adapter: A) -> None:
        """Keep an adapter in the place of the one before of its run."""
        others = [(key, each) for key, each in self._kept.items() if each.run_id != run_id]
        self._kept = dict([*others[1 - _MOST :], (digest, _SyncedAdapter(adapter, run_id))])

    def tell_content(self, digest: Sha256, content: Sha256) -> None:
        if digest in self._kept:
            self._kept[digest].content = content

    def take(self, digest: Sha256) -> A | None:
        """Remove and return the adapter of a sync; None if it is not there."""
        return kept.adapter if (kept := self._kept.pop(digest, None)) is not None else None

    def take_by_content(self, content: Sha256) -> A | None:
        """Remove and return an adapter by its content; None if it is not there."""
        return next((self.take(digest) for digest, each in list(self._kept.items()) if each.content == content), None)

    def clear(self) -> None:
        self._kept.clear()
