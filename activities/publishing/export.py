"""Exports a published adapter or model as a new artifact: a whole model in another program's format."""

from pathlib import Path

from temporalio import activity

from activities.host_context import HostContext, beating
from activities.models.files import INDEX
from activities.publishing.export_files import ExportSource, write_export
from longshore.fields import Artifact
from shared.runs.models import ExportRequest
from shared.storage.artifacts import find_artifact, open_artifact
from shared.storage.stored_bytes import Room


class Exports:
    """The activity `export`."""

    def __init__(self, host: HostContext) -> None:
        self._host = host

    @activity.defn(name="export")
    def export(self, request: ExportRequest) -> Artifact:
        """Write an export, unless it is in the store.

        Raises:
            InvalidInput: the format cannot hold the model, with the file, the key and the rule; or there is no room.
            CorruptArtifact: a file that was read back differs from the written one.
        """
        if done := find_artifact(self._host.store, request.key):
            return done
        _, manifest = open_artifact(request.model, self._host.settings.s3)
        names = [entry.path for entry in manifest.files]
        room = Room(self._host.store, request.tenant, self._host.settings.quotas)
        with beating(), room.reserving(manifest.num_bytes, request.name):
            source = ExportSource(
                model=str(self._host.stage(request.model)),
                weights=tuple(name for name in names if name.endswith(".safetensors")),
                others=tuple(name for name in names if not name.endswith((".safetensors", INDEX))),
                adapter=str(self._host.stage(request.adapter)) if request.adapter else None,
                export=request.export,
                title=request.name.replace(":", "-"),
            )

            def make(folder: Path) -> None:
                self._host.confined(write_export, source, str(folder), kind="dataset")

            return self._host.made_once(request.key, "export", make)
