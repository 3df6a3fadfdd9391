"""Exports of published adapters and models: start, follow, list, delete. Each belongs to a version."""

import asyncio
from typing import Literal

from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from longshore.fields import Artifact, Frozen
from service.accounts import audit
from service.errors import Conflict
from service.inference.published_models import PublishedModels
from service.temporal import PATIENCE, Temporal, cause_of, unless_unknown
from shared.errors import InvalidInput, NotFound
from shared.runs.start import LABELS, Export, ExportRequest
from shared.settings import Settings
from shared.storage.artifacts import Manifest, find_artifact, read_manifest
from shared.storage.paths import content_key, published_version
from shared.storage.store import ObjectStore

EXPORT_WORKFLOW = "ExportWorkflow"


class ExportView(Frozen):
    """An export of one version. `label`: its format, and its type where the format has several.

    `num_bytes`: of all files, once it has succeeded. `error`: why it failed.
    """

    model: str
    label: str
    state: Literal["running", "succeeded", "failed"]
    num_bytes: int | None = None
    error: str | None = None


class Exports:
    """Starts exports and shows their status. A finished export is not repeated."""

    def __init__(self, settings: Settings, store: ObjectStore, temporal: Temporal, published: PublishedModels) -> None:
        self._settings = settings
        self._store = store
        self._temporal = temporal
        self._published = published

    async def start(self, tenant: str, model_id: str, export: Export) -> ExportView:
        """Start an export, unless it is there or under way.

        Raises:
            NotFound: nothing is published under this name.
            InvalidInput: it is a run's checkpoint, or a whole model that is to be merged.
        """
        name, key = await asyncio.to_thread(self._place, tenant, model_id, export.label)
        audit.touched(name)
        target = await asyncio.to_thread(self._published.target_of, tenant, name)
        if target.adapter is None and export.format == "merged":
            raise InvalidInput("this is a whole model: there is nothing to merge, and its files are as they are", name)
        if await asyncio.to_thread(find_artifact, self._store, key) is None:
            request = ExportRequest(
                key=key, name=name, tenant=tenant, model=target.model, adapter=target.adapter, export=export
            )
            conflict = WorkflowIDConflictPolicy.USE_EXISTING
            await self._temporal.start(
                EXPORT_WORKFLOW, request, self._workflow(key), tenant, id_conflict_policy=conflict
            )
        return await self.view(tenant, name, export.label)

    async def view(self, tenant: str, model_id: str, label: str) -> ExportView:
        """Return an export's status. Raises NotFound if nobody requested it."""
        name, key = await asyncio.to_thread(self._place, tenant, model_id, label)
        view = ExportView(model=name, label=label, state="running")
        async with self._temporal.client() as client:
            handle = client.get_workflow_handle(self._workflow(key), result_type=Artifact)
            with unless_unknown():
                # All files exist shortly before the workflow has ended; until then it cannot be started again.
                if (await handle.describe(rpc_timeout=PATIENCE)).status == WorkflowExecutionStatus.RUNNING:
                    return view
                if await asyncio.to_thread(find_artifact, self._store, key) is None:
                    try:
                        await handle.result(rpc_timeout=PATIENCE)
                    except WorkflowFailureError as error:
                        return view.model_copy(update={"state": "failed", "error": str(cause_of(error))})
        manifest = await asyncio.to_thread(self._manifest, tenant, name, label)
        return view.model_copy(update={"state": "succeeded", "num_bytes": manifest.num_bytes})

    def artifact(self, tenant: str, model_id: str, label: str) -> Artifact:
        """Return the files of an export. Blocking. Raises NotFound while it is not complete."""
        name, key = self._place(tenant, model_id, label)
        if (artifact := find_artifact(self._store, key)) is None:
            raise NotFound(f"there is no export {label} of {name}, or it is not complete")
        return artifact

    async def delete(self, tenant: str, model_id: str, label: str) -> ExportView:
        """Delete an export's files. Raises NotFound; Conflict while it is being written."""
        view = await self.view(tenant, model_id, label)
        if view.state == "running":
            raise Conflict("this export is being written: delete it when it has ended")
        audit.touched(view.model)
        await asyncio.to_thread(self._published.delete_below, self._place(tenant, view.model, label)[1])
        return view

    def _manifest(self, tenant: str, model_id: str, label: str) -> Manifest:
        artifact = self.artifact(tenant, model_id, label)
        return read_manifest(self._store, self._place(tenant, model_id, label)[1], artifact.sha256)

    def _place(self, tenant: str, model_id: str, label: str) -> tuple[str, str]:
        """Return the name of a version, and the key of its export: below the version's own, to go when it goes."""
        if label not in LABELS:
            raise NotFound(f"there is no export {label[:32]}; these are: {', '.join(LABELS)}")
        found = self._published.find(tenant, model_id)
        if found.kind == "checkpoints":
            rule = "it goes when its run keeps newer ones; publish it, or download the adapter"
            raise InvalidInput(f"a checkpoint is not exported: {rule}", found.id)
        return found.id, f"{published_version(tenant, found.kind, found.name, found.version)}/exports/{label}"

    def _workflow(self, key: str) -> str:
        return f"export-{content_key(self._settings.control_queue, key)}"
