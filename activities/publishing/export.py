"""Exports a published adapter or model: a whole model in another program's format, as an artifact of its own.

Each file of weights is kept in the store as soon as it is complete, so that a killed export goes on behind it.
"""

import hashlib
import json
import shutil
from pathlib import Path

from temporalio import activity

from activities.host_context import HostContext, Parts, beating
from activities.models.files import INDEX
from activities.publishing.export_files import SAFETENSORS, ExportSource, config_of_export, plan_export, write_file
from longshore.fields import Artifact, Frozen
from shared.models.end_tokens import GENERATION
from shared.runs.exports import ExportRequest
from shared.storage.artifacts import FileEntry, Manifest, find_artifact, manifest_of, open_artifact, sha256_file
from shared.storage.paths import MANIFEST
from shared.storage.store import uri_of
from shared.storage.stored_bytes import Room


class _Part(Frozen):
    """A file of weights that is in the store, and the bytes of each tensor in it."""

    file: FileEntry
    tensors: dict[str, int]


class Exports:
    """The activity `export`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="export")
    def export(self, request: ExportRequest) -> Artifact:
        """Write an export, unless it is in the store.

        Raises:
            InvalidInput: the format cannot hold the model, with the file, the key and the rule; or there is no room.
            CorruptArtifact: a file was read back, and is not what was written.
        """
        if done := find_artifact(self._host.store, request.key):
            return done
        _, manifest = open_artifact(request.model, self._host.settings.s3)
        room = Room(self._host.store, request.tenant, self._host.settings.quotas)
        with beating(), room.reserving(manifest.num_bytes, request.name):
            source = ExportSource(
                model=str(self._host.stage(request.model)),
                shards=tuple(entry.path for entry in manifest.files if entry.path.endswith(SAFETENSORS)),
                adapter=str(self._host.stage(request.adapter)) if request.adapter else None,
                export=request.export,
                title=request.name.replace(":", "-"),
            )
            written = self._write_weights(request.key, source)
            others = [e.path for e in manifest.files if e.path != INDEX and not e.path.endswith(SAFETENSORS)]
            artifact = self._keep_rest(request.key, source, written, others)
            self._parts(request.key).forget(range(len(written)))
        return artifact

    def _parts(self, key: str) -> Parts:
        return Parts(self._host.store, lambda number: f"{key}/parts/{number:05d}.json")

    def _write_weights(self, key: str, source: ExportSource) -> list[_Part]:
        parts = self._parts(key)
        known = parts.known()
        names = self._host.confined(plan_export, source)
        for number, name in enumerate(names):
            if number not in known:
                parts.keep(number, self._write_file(key, source, name).model_dump_json().encode())
        return [_Part.model_validate_json(parts.get(number)) for number in range(len(names))]

    def _write_file(self, key: str, source: ExportSource, name: str) -> _Part:
        with self._host.scratch("export") as folder:
            tensors = self._host.confined(write_file, source, name, str(folder), kind="dataset")
            path = folder / name
            entry = FileEntry(path=name, size=path.stat().st_size, sha256=sha256_file(path))
            self._host.store.put_file(f"{key}/{name}", path)
        return _Part(file=entry, tensors=tensors)

    def _keep_rest(self, key: str, source: ExportSource, written: list[_Part], others: list[str]) -> Artifact:
        """Keep the small files, and last the manifest. A GGUF file needs none beside it."""
        store = self._host.store
        with self._host.scratch("export") as folder:
            if source.export.format != "gguf":
                _copy_small_files(source, others, folder)
                content = self._host.confined(config_of_export, source)
                (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
                if len(written) > 1:
                    (folder / INDEX).write_text(_index(written))
            small = manifest_of(folder).files
            for entry in small:
                store.put_file(f"{key}/{entry.path}", folder / entry.path)
        files = sorted((*small, *(part.file for part in written)), key=lambda entry: entry.path)
        data = Manifest(files=tuple(files)).encoded()
        store.put_bytes(f"{key}/{MANIFEST}", data)
        return Artifact(uri=uri_of(store, key), sha256=hashlib.sha256(data).hexdigest())


def _copy_small_files(source: ExportSource, names: list[str], folder: Path) -> None:
    """Copy what is beside the weights; of an adapter what ends trained answers, and its card."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, folder / name)
    for name in (GENERATION, "README.md"):
        if source.adapter is not None and (Path(source.adapter) / name).exists():
            shutil.copyfile(Path(source.adapter) / name, folder / name)


def _index(written: list[_Part]) -> str:
    places = {name: part.file.path for part in written for name in part.tensors}
    total = sum(size for part in written for size in part.tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"
