"""A run's checkpoints as adapters that can be asked before, or beside, what it publishes: `run:step-30` names one."""

import re
from dataclasses import dataclass

from shared.contract import Artifact
from shared.errors import NotFound
from shared.runs.requests import RunRecord
from shared.storage.artifacts import Manifest, find, read_manifest, refer
from shared.storage.paths import MANIFEST, RunKeys, checkpoint_adapter
from shared.storage.store import ObjectStore, uri_of

_ID = re.compile(r"(?P<run>[a-z0-9][a-z0-9-]{0,62}):step-(?P<step>[0-9]{1,8})")
_WEIGHTS = "weights/"


@dataclass(frozen=True)
class CheckpointName:
    run_id: str
    step: int

    def __str__(self) -> str:
        return f"{self.run_id}:step-{self.step}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        match = _ID.fullmatch(text)
        return cls(match["run"], int(match["step"])) if match else None


def adapter_of(store: ObjectStore, record: RunRecord, step: int) -> Artifact:
    """The adapter in the newest checkpoint of a step: its files where they lie, under a manifest of their own.

    Raises:
        NotFound: there is no such checkpoint, or none any more; or the run trains no adapter.
    """
    keys = RunKeys(record.run_id)
    missing = NotFound(f"there is no published model {CheckpointName(record.run_id, step)}")
    if record.run.trainable.kind != "lora":
        raise missing
    found = [
        key.removesuffix(f"/{MANIFEST}")
        for key in (item.key for item in store.list(f"{keys.checkpoints}/"))
        if (place := keys.checkpoint_of(key)) is not None and place[1] == step
    ]
    checkpoint = find(store, max(found)) if found else None
    if checkpoint is None:
        raise missing
    manifest = read_manifest(store, max(found), checkpoint.sha256)
    files = [entry for entry in manifest.files if entry.path.startswith(_WEIGHTS)]
    weights = Manifest(
        files=tuple(entry.model_copy(update={"path": entry.path.removeprefix(_WEIGHTS)}) for entry in files),
        root=uri_of(store, f"{max(found)}/{_WEIGHTS.rstrip('/')}"),
    )
    return refer(store, checkpoint_adapter(record.tenant, record.run_id, checkpoint.sha256), weights)
