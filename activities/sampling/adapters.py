"""Adapters on a sampler: those of runs, of which old ones are unloaded, and those of users, least recently used first.

An adapter's name on a sampler is its owner's and its content's.
"""

import re
import threading
import time
from pathlib import Path

from activities.host_context import HostContext
from activities.sampling.client import Sampler
from activities.sampling.samplers import OpenSampler
from shared.contract import Artifact
from shared.errors import InvalidInput, SamplerUnavailable

_DIGITS = 16
OWNER = "serving"
"""In the place of a run's id, so that what runs have on the same sampler is left alone."""
_OURS = re.compile(rf"{OWNER}-[0-9a-f]+")
MAX_ADAPTERS = 16


def adapter_name(run_id: str, adapter: Artifact) -> str:
    """The name of an adapter in requests, by content: the same name never means other weights."""
    return f"{run_id}-{adapter.sha256[:_DIGITS]}"


def use_adapter(
    opened: OpenSampler, run_id: str, adapter: Artifact | None, keep: tuple[Artifact, ...], host: HostContext
) -> str:
    """Make a sampler serve an adapter of a run, or its model alone, and return the name to ask for.

    This run's adapters that are neither it nor in `keep` are unloaded; other runs' stay. The adapter's files are given
    to the sampler as a folder of this machine, so a served sampler must see the host's disk.

    Raises:
        InvalidInput: the sampler refuses the adapter. CorruptArtifact: its files are not what they were.
        SamplerUnavailable: the sampler does not answer.
    """
    sampler = opened.client
    wanted = {adapter_name(run_id, one) for one in (adapter, *keep) if one is not None}
    present = set(sampler.models())
    for name in sorted(present - wanted):
        if re.fullmatch(rf"{re.escape(run_id)}-[0-9a-f]{{{_DIGITS}}}", name):
            sampler.unload_adapter(name)
    if adapter is None:
        return opened.model
    if (name := adapter_name(run_id, adapter)) not in present:
        sampler.load_adapter(name, str(host.stage(adapter)))
    return name


def refusal(sampler: Sampler, model: str, error: InvalidInput, place: str) -> InvalidInput | SamplerUnavailable:
    """The error to raise for a refused request: a server that was started anew knows no adapter, and is asked again."""
    if model in sampler.models():
        return InvalidInput(error.message, place)
    return SamplerUnavailable(f"the sampler serves {model} no longer: {error.message}")


class ServingAdapters:
    """Adapters that answer users, loaded when they are asked for. Safe to use from several threads.

    Args:
        max_adapters: of users on one sampler at a time.
    """

    def __init__(self, host: HostContext, max_adapters: int = MAX_ADAPTERS) -> None:
        self._host = host
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._asked_at: dict[str, float] = {}

    def use(self, opened: OpenSampler, adapter: Artifact | None) -> str:
        """Load an adapter where it is not, and return its name in requests. The adapter's files come from its host.

        Raises:
            InvalidInput: the sampler refuses it. CorruptArtifact: its files are not what they were.
            SamplerUnavailable: the sampler does not answer.
        """
        if adapter is None:
            return opened.model
        name = adapter_name(OWNER, adapter)
        self._asked_at[name] = time.monotonic()
        if name not in opened.client.models():
            folder = self._host.stage(adapter)
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
