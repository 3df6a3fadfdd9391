"""What the protocol suite shares: the stand-in worker's command, plans, and signals that are written down."""

import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from longshore.events import Event
from longshore.fields import Artifact, Frozen
from longshore.training import Lora
from shared.jobs.job import Checkpointing, JobPlan, PackedData, Schedule, WorkerKey
from shared.runs.events import BEGINNING, EventCursor, read_run_events
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import ObjectStore

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[2]


class StandInCommand:
    """Starts tests/workflows/stand_in_worker.py where a host starts megatron_worker."""

    def __init__(self, step_s: float = 0.01) -> None:
        self._step_s = step_s

    def __call__(self, folder: Path, key: WorkerKey) -> list[str]:
        module = ["-m", "tests.workflows.stand_in_worker"]
        return [sys.executable, *module, "--root", str(folder), "--step-s", str(self._step_s)]


class IdleCommand:
    """Starts a worker that is up at once, does no job, and costs next to nothing."""

    def __call__(self, folder: Path, key: WorkerKey) -> list[str]:
        return ["sh", "-c", 'cd "$0" && : > ready && until [ -e stop ]; do sleep 0.1; done', str(folder)]


class Notebook:
    """Signals, written down."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Frozen]] = []
        self._lock = threading.Lock()

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        with self._lock:
            self.said.append((name, message))
        sent: Future[bool] = Future()
        sent.set_result(True)
        return sent

    def of(self, name: str) -> list[Frozen]:
        return [message for said, message in self.said if said == name]


def artifact(store: ObjectStore, folder: Path, key: str, **files: str) -> Artifact:
    """A small artifact in a store."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    seal(folder)
    return upload_artifact(store, key, folder)


def job_plan(
    any_artifact: Artifact, num_steps: int = 20, seed: int = 7, every_steps: int = 5, keep: int = 2
) -> JobPlan:
    return JobPlan(
        run_id="r1",
        job_id="000001",
        model=any_artifact,
        trainable=Lora(),
        data=PackedData(units=any_artifact, plan=any_artifact),
        num_steps=num_steps,
        schedule=Schedule(learning_rate=1e-4),
        checkpointing=Checkpointing(every_steps=every_steps, keep=keep),
        seed=seed,
    )


def read_events(
    store: ObjectStore, run_id: str, cursor: EventCursor = BEGINNING, limit: int | None = None
) -> tuple[list[Event], EventCursor]:
    """`read_run_events`, events alone."""
    found, cursor = read_run_events(store, run_id, cursor, limit)
    return [item.event for item in found], cursor
