"""Device memory of a trainer and a sampler on one device, measured from outside during a run."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
from pydantic import ValidationError

from longshore.events import Event, Offloaded, Step
from shared.chat.completions import SamplerMemory, SamplerReady
from shared.storage.paths import HostPaths


class Device:
    """Polls the device memory of a stack's sampler while a `with` block runs.

    `awake`: bytes while no job's worker had anything on the device; `asleep`, `together`: while one might have had,
    with the sampler asleep or not.
    """

    def __init__(self, root: Path) -> None:
        self.awake, self.asleep, self.together = list[int](), list[int](), list[int]()
        self._root, self._workers = root, HostPaths(root).workers
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Device":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def figures(self, events: Iterable[Event]) -> dict[str, float]:
        """Return the most that lay on the device together, and the most that either had, by a run's events."""
        events = list(events)
        trainer = max(event.metrics["memory_bytes"] for event in events if isinstance(event, Step))
        left = max(event.device_bytes_after for event in events if isinstance(event, Offloaded))
        sampler = max(self.awake)
        peak = max(trainer + max(self.asleep + self.together), sampler + left)
        return {"device_peak_mb": peak / 1e6, "larger_alone_mb": max(trainer, sampler) / 1e6}

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            before, memory, after = self.job(), self._sampler(), self.job()
            if memory is not None and before == after:
                seen = self.awake if before is None else self.asleep if memory.asleep else self.together
                if before is not None or not memory.asleep:
                    seen.append(memory.device_bytes)

    def job(self) -> str | None:
        """The log of the job whose worker may have something on the device."""
        for log in self._workers.glob("*/outputs/*/*/*/log.jsonl"):
            with suppress(FileNotFoundError):
                text = log.read_text()
                if '"started"' in text and '"offloaded"' not in text:
                    return str(log)
        return None

    def _sampler(self) -> SamplerMemory | None:
        for ready in samplers(self._root):
            with suppress(httpx.TransportError):
                key = {"Authorization": f"Bearer {ready.api_key}"}
                with httpx.Client(transport=httpx.HTTPTransport(uds=ready.socket), headers=key) as client:
                    return SamplerMemory.model_validate_json(client.get(f"{ready.url}/v1/memory").content)
        return None


def samplers(root: Path) -> Iterator[SamplerReady]:
    """Yield the samplers of a stack that have come up."""
    for path in HostPaths(root).workers.glob("*/ready"):
        with suppress(FileNotFoundError, ValidationError):  # it has gone, or is a worker's
            yield SamplerReady.model_validate_json(path.read_bytes())
