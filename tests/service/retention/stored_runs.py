"""A store as many runs of two tenants leave it: records, checkpoints, logs, data, and what several of them share; and
their rows.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy.orm import Session

from longshore.dataset_runs import ExamplesSource, SFTRun
from longshore.fields import Artifact, Fence
from longshore.runs import RunRecord
from longshore.views import FileEntry, RunStatus
from service.database.engine import Database, UseRow
from service.runs.rows import run_row
from service.runs.runs import queued
from shared.storage import paths
from shared.storage.artifacts import Manifest
from shared.storage.store import LocalStore, ObjectStore, uri_of

DAY_S = 86_400.0
TENANTS = ("acme", "globex")
STEPS = (10, 20)
FENCE = Fence(epoch=1, attempt=1).label


@dataclass(frozen=True)
class Made:
    """A run of the store. `state`: None for one that goes on. `days`: since its end. `shared`: the keys it uses."""

    record: RunRecord
    run_id: str
    tenant: str
    state: str | None
    status: RunStatus
    days: float
    shared: tuple[str, ...]
    model: str


def key_of(number: int) -> str:
    return f"{number:032x}"


class Writer:
    """Writes objects: into a file store without fsync, which takes most of the time of thousands of small files."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def put(self, key: str, data: bytes | str) -> None:
        data = data.encode() if isinstance(data, str) else data
        match self.store:
            case LocalStore(root=root):
                path = root / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            case store:
                store.put_bytes(key, data)

    def artifact(self, key: str, **files: bytes) -> Artifact:
        entries = []
        for name, data in files.items():
            self.put(f"{key}/{name}", data)
            entries.append(_entry(name, data))
        manifest = Manifest(files=tuple(entries)).encoded()
        self.put(f"{key}/{paths.MANIFEST}", manifest)
        return Artifact(uri=uri_of(self.store, key), sha256=hashlib.sha256(manifest).hexdigest())


def fill(store: ObjectStore, database: Database, num_runs: int, now: float) -> list[Made]:
    """Fill both with runs of two tenants: every tenth goes on, others ended 0 to 59 days ago, one in ten paused.

    Two in a row share what was made of their data; twenty share a model.
    """
    writer = Writer(store)
    request = SFTRun(model="org/tiny", dataset=ExamplesSource(uri="https://x/rows.jsonl"), epochs=1, batch_size=1)
    for number in range(num_runs // 20 + 1):
        writer.artifact(paths.model_import(key_of(number)), weights=b"w" * 40)
    for number in range(num_runs // 2 + 1):
        for place in (paths.tokenized(key_of(number)), paths.packed(key_of(number)), paths.graded(key_of(number))):
            writer.artifact(place, a=b"a" * 30)
    runs = [_run(writer, request, number, now) for number in range(num_runs)]
    database.write(lambda session: add_rows(session, runs))
    return runs


def add_rows(session: Session, runs: Iterable[Made]) -> None:
    """Add the rows of runs, and of what they use."""
    for run in runs:
        session.add(run_row(run.record, run.status))
        for unit in (paths.RunKeys(run.run_id).prefix, *run.shared, run.model):
            session.add(UseRow(unit=unit, run_id=run.run_id, at=1.0))


def _run(writer: Writer, request: SFTRun, number: int, now: float) -> Made:
    run_id, tenant = f"sft-{number:017d}", TENANTS[number % 4 // 2]
    state = (None, "paused", "failed", "cancelled", *["succeeded"] * 6)[number % 10]
    days, keys = float(number % 60), paths.RunKeys(run_id)
    record = RunRecord(run_id=run_id, tenant=tenant, run=request, created_at=now - 90 * DAY_S)
    writer.put(keys.record, record.model_dump_json())
    writer.put(keys.start("00"), '{"execution":"e"}')
    for step in STEPS:
        writer.artifact(f"{keys.checkpoints}/{FENCE}/step-{step:08d}", weights=b"w" * 60)
    model = paths.model_import(key_of(number // 20))
    plan = {"plan": {"model": {"uri": uri_of(writer.store, model), "sha256": "0" * 64}}}
    for job in ("000001", "000002"):
        writer.put(f"{keys.logs}/{job}/{FENCE}/job.json", json.dumps(plan))
        writer.put(f"{keys.logs}/{job}/{FENCE}/log.jsonl", b"{}\n" * 10)
    writer.artifact(keys.dataset("train"), rows=b"r" * 50)
    shared = tuple(place(key_of(number // 2)) for place in (paths.tokenized, paths.packed, paths.graded))
    status = queued(record)
    if state is not None:
        adapter = "file:///somewhere" if state == "succeeded" else None
        status = RunStatus(run_id=run_id, state=state, adapter=adapter, ended_at=now - days * DAY_S)
        writer.put(keys.result, status.model_dump_json())
    return Made(record, run_id, tenant, state, status, days, shared, model)


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def sizes(store: ObjectStore) -> dict[str, int]:
    return {info.key: info.size for info in store.list("")}


def stored_by(found: dict[str, int], tenant: str, runs: Iterable[Made]) -> int:
    """The bytes of the folders of a tenant's runs and of all that these use, of the sizes of all objects."""
    own = [run for run in runs if run.tenant == tenant]
    units = {unit for run in own for unit in (paths.RunKeys(run.run_id).prefix, *run.shared, run.model)}
    return sum(size for key, size in found.items() if _unit(key) in units)


def _unit(key: str) -> str:
    parts = key.split("/")
    return "/".join(parts[: 3 if parts[0] == "models" else 2])


def damaged(store: ObjectStore) -> list[str]:
    """Keys of artifacts that have a manifest, and not all that it names."""
    found = sizes(store)
    wrong = []
    for key in found:
        if key.endswith(f"/{paths.MANIFEST}"):
            folder = key.removesuffix(paths.MANIFEST)
            manifest = Manifest.model_validate_json(store.get_bytes(key))
            if any(found.get(folder + entry.path) != entry.size for entry in manifest.files):
                wrong.append(key)
    return wrong
