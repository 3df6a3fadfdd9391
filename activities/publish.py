"""Publishing: a checkpoint's weights under a registered name and version, with a card, immutable."""

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from temporalio import activity

from activities.heartbeat import beating
from activities.model_card import model_card
from shared.artifacts import find, seal, stage, upload
from shared.jobs import Artifact
from shared.models import Frozen
from shared.paths import HostPaths, published, published_version, version_claim, write_atomically
from shared.runs import CheckpointRef, RunId, SFTRun
from shared.settings import Settings
from shared.store import ObjectStore, open_store, open_uri

Kind = Literal["adapters", "models"]
# Of a base model's folder, these are the weights' own, and come from the checkpoint instead.
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class PublishRequest(Frozen):
    """What to publish. `metrics` and `report_uri` go into the card."""

    run_id: RunId
    run: SFTRun
    model: Artifact
    checkpoint: CheckpointRef
    report_uri: str
    metrics: dict[str, float]


class Published(Frozen):
    """What was published; `sha256` is its manifest's."""

    uri: str
    sha256: str
    name: str
    version: int


class _Claim(Frozen):
    """Which run owns a version."""

    run_id: RunId


class Publish:
    """Puts an adapter, or a whole model after full fine-tuning, where users and servers find it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._paths = HostPaths(settings.root_path)

    @activity.defn(name="publish")
    def publish(self, request: PublishRequest) -> Published:
        """Publish as the next free version of the name; a run has one version, however often this is tried.

        Raises:
            CorruptArtifact: the checkpoint, or the published version, is not what its manifest says.
        """
        store = open_store(self._settings.store, self._settings.s3)
        kind: Kind = "adapters" if request.run.trainable.kind == "lora" else "models"
        name = request.run.name or request.run_id
        with beating():
            version = claim_version(store, kind, name, request.run_id)
            key = published_version(kind, name, version)
            artifact = find(store, key) or self._upload(store, key, request)
        return Published(uri=artifact.uri, sha256=artifact.sha256, name=name, version=version)

    def _upload(self, store: ObjectStore, key: str, request: PublishRequest) -> Artifact:
        scratch = self._paths.scratch / f"publish-{request.run_id}"
        shutil.rmtree(scratch, ignore_errors=True)  # of a try that was killed
        folder = scratch / uuid.uuid4().hex
        try:
            self._fill(folder, request)
            seal(folder)
            return upload(store, key, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fill(self, folder: Path, request: PublishRequest) -> None:
        checkpoint = stage(request.checkpoint.artifact, self._paths.cache, self._settings.s3)
        _copy(checkpoint / "weights", folder, lambda name: True)
        if request.run.trainable.kind == "lora":
            _name_the_model(folder / "adapter_config.json", request.run.model)
        else:
            model = stage(request.model, self._paths.cache, self._settings.s3)
            _copy(model, folder, lambda name: not name.endswith(_WEIGHTS) and not (folder / name).exists())
        report = self._report(request.report_uri)
        write_atomically(folder / "README.md", model_card(request.run, request.metrics, report).encode())

    def _report(self, uri: str) -> dict[str, object]:
        store, key = open_uri(uri, self._settings.s3)
        report: dict[str, object] = json.loads(store.get_bytes(key))
        return report


def claim_version(store: ObjectStore, kind: Kind, name: str, run_id: str) -> int:
    """The version of `name` that this run owns: the one it claimed before, or the lowest that nobody did."""
    claims = sorted(info.key for info in store.list(f"{published(kind, name)}/claims/"))
    for number, key in enumerate(claims, 1):
        if key == version_claim(kind, name, number) and _owner(store, key) == run_id:
            return number
    version = len(claims) + 1
    mine = _Claim(run_id=run_id).model_dump_json().encode()
    while not store.put_if_absent(version_claim(kind, name, version), mine):
        if _owner(store, version_claim(kind, name, version)) == run_id:
            break
        version += 1
    return version


def _owner(store: ObjectStore, key: str) -> str:
    return _Claim.model_validate_json(store.get_bytes(key)).run_id


def _copy(source: Path, target: Path, is_wanted: Callable[[str], bool]) -> None:
    """Copy the wanted files of a flat folder, its manifest left out."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "manifest.json" and is_wanted(path.name):
            shutil.copyfile(path, target / path.name)


def _name_the_model(config: Path, model: str) -> None:
    """Let PEFT find the base model where the user found it: a hub id, a URI, or a folder for a `file://` URI."""
    content = json.loads(config.read_bytes())
    content["base_model_name_or_path"] = model.removeprefix("file://")
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
