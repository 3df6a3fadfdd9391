"""Adapters that answer users: loaded when they are asked for, the one that was not asked for longest unloaded."""

import re
import threading
import time
from pathlib import Path

from activities.sampling.run_adapters import adapter_name
from activities.sampling.samplers import OpenSampler
from shared.contract import Artifact
from shared.settings import S3Settings
from shared.storage.artifacts import stage

OWNER = "serving"
"""In the place of a run's id, so that what runs have on the same sampler is left alone."""

_OURS = re.compile(rf"{OWNER}-[0-9a-f]+")
MAX_ADAPTERS = 16


class ServingAdapters:
    """Remembers when each was asked for last. Safe to use from several threads.

    Args:
        max_adapters: of users on one sampler at a time.
    """

    def __init__(self, cache: Path, s3: S3Settings, max_adapters: int = MAX_ADAPTERS) -> None:
        self._cache = cache
        self._s3 = s3
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._asked_at: dict[str, float] = {}

    def use(self, opened: OpenSampler, adapter: Artifact | None) -> str:
        """What requests call the adapter on this sampler, where it now is. The adapter's files come from its host.

        Raises:
            InvalidInput: the sampler refuses it. CorruptArtifact: its files are not what they were.
            SamplerUnavailable: the sampler does not answer.
        """
        if adapter is None:
            return opened.model
        name = adapter_name(OWNER, adapter)
        self._asked_at[name] = time.monotonic()
        if name not in opened.client.models():
            folder = stage(adapter, self._cache, self._s3)
            with self._lock:
                self._load(opened, name, folder)
        return name

    def _load(self, opened: OpenSampler, name: str, folder: Path) -> None:
        present = {one for one in opened.client.models() if _OURS.fullmatch(one)}
        if name in present:
            return
        oldest_first = sorted(present, key=lambda one: (self._asked_at.get(one, 0.0), one))
        for old in oldest_first[: max(0, len(present) + 1 - self._max_adapters)]:
            opened.client.unload_adapter(old)  # what is being drawn from it goes on
            self._asked_at.pop(old, None)
        opened.client.load_adapter(name, str(folder))
