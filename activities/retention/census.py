"""Inventory of the store: the parts of each run, the artifacts that runs may share, and their users.

One listing of each prefix, and of each run its record, its result and, if that is wanted, one job. Blocking.
"""

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ValidationError

from longshore.fields import Artifact
from shared.errors import NotFound
from shared.runs.requests import FIRST_TENANT
from shared.storage.checkpoints import is_job
from shared.storage.paths import MANIFEST, RunKeys
from shared.storage.removal import RemovedRun
from shared.storage.store import ObjectInfo, ObjectStore
from shared.storage.uses import MARKS, SHARED, RunEnd, of_mark, removed_run, unit_of

What = Literal["checkpoints", "data", "samples", "logs", "sessions", "models", "records", "removed"]
FOLDERS: dict[str, What] = {
    "checkpoints": "checkpoints",
    "kept_states": "checkpoints",
    "dataset": "data",
    "logs": "logs",
    "wandb": "logs",
    "commands": "sessions",
    "results": "sessions",
}
"""Categories of a run's folders. Everything else there is a record, which is kept as long as the run."""
KINDS: dict[str, What] = {
    "tokenized": "data",
    "packed": "data",
    "prompts": "data",
    "models": "models",
}
"""Categories of artifacts that runs may share; the rest are samples."""
_NOTED = ("dataset", "commands", "run.json")
_NOTED_RESULT_BYTES = 2048  # larger results are noted by their writers (shared/runs/session_results.py)
_READS_AT_ONCE = 16


@dataclass
class Heap:
    """Objects that are counted together. `newest`: when the last of them was written, in seconds since 1970."""

    num_objects: int = 0
    num_bytes: int = 0
    newest: float = 0.0

    def add(self, info: ObjectInfo) -> None:
        self.num_objects += 1
        self.num_bytes += info.size
        self.newest = max(self.newest, info.modified)


def _heaps() -> "defaultdict[What, Heap]":
    return defaultdict(Heap)


@dataclass
class RunFolder:
    """A run as the store has it.

    Attributes:
        noted: bytes that the tenant's ledger has already, by category.
        checkpoints: objects by step and fence; `newest` is the manifest's, 0 without one.
        job: the key of one of its job files, and how long that is.
        model: the unit of the imported model that its jobs train.
        ended_at: when its result says that it ended, or was written.
        is_on_record: it was accepted.
    """

    run_id: str
    heaps: dict[What, Heap] = field(default_factory=_heaps)
    noted: dict[What, int] = field(default_factory=lambda: defaultdict(int))
    checkpoints: dict[tuple[str, str], Heap] = field(default_factory=dict)
    job: str | None = None
    job_bytes: int = 0
    tenant: str = FIRST_TENANT
    model: str | None = None
    end: RunEnd | None = None
    is_on_record: bool = False
    ended_at: float | None = None

    @property
    def whole_checkpoints(self) -> list[tuple[str, str]]:
        """Those that have a manifest, the oldest first. Others are being uploaded, or were only half deleted."""
        return sorted(place for place, heap in self.checkpoints.items() if heap.newest)

    @property
    def goes_on(self) -> bool:
        return self.is_on_record and self.end is None


@dataclass
class Census:
    """The store's contents. `marks`: keys. `users`: the runs that have marked a unit. `removed`: removed runs."""

    runs: dict[str, RunFolder] = field(default_factory=dict)
    shared: dict[str, Heap] = field(default_factory=lambda: defaultdict(Heap))
    marks: set[str] = field(default_factory=set)
    users: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    removed: dict[str, RemovedRun] = field(default_factory=dict)

    def users_of(self, unit: str) -> list[RunFolder]:
        """Return the runs on record that use a unit."""
        known = (self.runs.get(run_id) for run_id in sorted(self.users.get(unit, ())))
        return [run for run in known if run is not None and run.is_on_record]

    def discount(self, gone: Iterable[ObjectInfo]) -> None:
        """Let deleted objects count no more in `measured`."""
        for info in gone:
            if (unit := unit_of(info.key)) is not None:
                self.shared[unit].num_bytes -= info.size
            elif info.key.startswith("runs/"):
                _, run_id, path = info.key.split("/", 2)
                what, noted = _kind(path, info.size)
                self.runs[run_id].heaps[what].num_bytes -= info.size
                self.runs[run_id].noted[what] -= noted

    def measured(self) -> dict[str, dict[str, int]]:
        """Return each tenant's bytes that are not in its ledger, by category."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for run in self.runs.values():
            for what, heap in run.heaps.items():
                found[run.tenant][what] += heap.num_bytes - run.noted.get(what, 0)
        for unit, heap in self.shared.items():
            if (what := what_of(unit)) != "models":  # its download is noted in the ledger
                for tenant in {run.tenant for run in self.users_of(unit)}:
                    found[tenant][what] += heap.num_bytes
        return {tenant: {w: n for w, n in sorted(of.items()) if n} for tenant, of in found.items()}


class _Record(BaseModel):
    tenant: str = FIRST_TENANT


class _Plan(BaseModel):
    model: Artifact


class _Job(BaseModel):
    plan: _Plan


def take(store: ObjectStore, *, reads_jobs: bool = True) -> Census:
    """Count everything. Marks are listed first: a run that puts one later is looked for again before a deletion.

    `reads_jobs`: which models runs have trained is wanted, too.
    """
    census = Census()
    for info in store.list(MARKS):
        unit, run_id = of_mark(info.key)
        census.marks.add(info.key)
        census.users[unit].add(run_id)
    for folder in SHARED:
        for info in store.list(f"{folder}/"):
            if (shared := unit_of(info.key)) is not None:
                census.shared[shared].add(info)
    for info in store.list("runs/"):
        _, run_id, path = info.key.split("/", 2)
        _count(census.runs.setdefault(run_id, RunFolder(run_id)), path, info)
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="census") as threads:
        list(threads.map(lambda run: _read(store, run, reads_jobs), census.runs.values()))
    prefix = removed_run()
    for info in list(store.list(prefix)):
        with suppress(NotFound):
            census.removed[info.key.removeprefix(prefix)] = RemovedRun.model_validate_json(store.get_bytes(info.key))
    return census


def _count(run: RunFolder, path: str, info: ObjectInfo) -> None:
    folder, _, rest = path.partition("/")
    what, noted = _kind(path, info.size)
    run.heaps[what].add(info)
    run.noted[what] += noted
    match folder, rest.split("/"):
        case "checkpoints", [label, step, *name]:
            heap = run.checkpoints.setdefault((step, label), Heap())
            heap.num_objects += 1
            heap.num_bytes += info.size
            if name == [MANIFEST]:
                heap.newest = info.modified
        case "logs", _ if run.job is None and is_job(info.key):
            run.job, run.job_bytes = info.key, info.size
        case "run.json", _:
            run.is_on_record = True
        case "result.json", _:
            run.ended_at = info.modified


def _kind(path: str, size: int) -> tuple[What, int]:
    """Return the category of an object in a run's folder, and how many of its bytes are in the tenant's ledger."""
    folder = path.partition("/")[0]
    is_noted = folder in _NOTED and not (folder == "dataset" and path.endswith(f"/{MANIFEST}"))
    is_noted = is_noted or (folder == "results" and size > _NOTED_RESULT_BYTES)
    return FOLDERS.get(folder, "records"), size if is_noted else 0


def _read(store: ObjectStore, run: RunFolder, reads_job: bool) -> None:
    keys = RunKeys(run.run_id)
    # It was removed after it was listed; or a record cannot be read: then the run counts as active.
    with suppress(NotFound, ValidationError):
        if run.is_on_record:
            run.tenant = _Record.model_validate_json(store.get_bytes(keys.record)).tenant
        if run.ended_at is not None:
            end = RunEnd.model_validate_json(store.get_bytes(keys.result))
            run.end, run.ended_at = None if end.state == "paused" else end, end.ended_at or run.ended_at
        if reads_job and run.job is not None:
            uri = _Job.model_validate_json(store.get_bytes(run.job)).plan.model.uri
            run.model = unit_of(uri.removeprefix(f"{store.uri}/"))


def what_of(unit: str) -> What:
    return KINDS.get(unit.partition("/")[0], "samples")
