"""Published models, their exports, and what the names and settings in requests of other APIs mean."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, create_model
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from longshore.fields import Artifact, Frozen
from longshore.grading import Grader, MultiGrader, RewardModelGrader
from longshore.losses import Distillation
from longshore.runs import RLRun, Run, RunRecord
from longshore.training import Dtype, Lora, ScalarHead, SessionRun
from longshore.views import Envelope, Export, ExportView, ModelView, PreviewRequest
from service.accounts import audit
from service.accounts.tenants import Quotas
from service.temporal import PATIENCE, Temporal, cause_of, unless_unknown
from shared import provenance
from shared.chat.messages import ServedModel
from shared.errors import Conflict, InvalidInput, NotFound
from shared.jobs.job import Job
from shared.runs.acceptance import chosen_scalar
from shared.runs.start import LABELS, ExportRequest
from shared.settings import Settings
from shared.storage.artifacts import (
    PUBLISHED_NAME,
    CheckpointName,
    Manifest,
    checkpoint_of_step,
    find_artifact,
    is_job,
    is_name,
    read_manifest,
    read_record,
    refer,
)
from shared.storage.paths import (
    MANIFEST,
    RunKeys,
    checkpoint_adapter,
    content_key,
    published,
    published_version,
    version_claim,
)
from shared.storage.store import ObjectStore, uri_of

# --- Published adapters and models by name ---
# `name` is the newest version, `name:v3` one, `run:step-30` a checkpoint.

Kind = Literal["adapters", "models", "checkpoints"]
_KINDS: tuple[Kind, ...] = ("adapters", "models")  # if an adapter and a model have the same name, it means the adapter
_SINGULAR: dict[Kind, Literal["adapter", "model", "checkpoint"]] = {
    "adapters": "adapter",
    "models": "model",
    "checkpoints": "checkpoint",
}
_WEIGHTS = "weights/"
BASE = ":base"
"""Behind the name of something published: the model that it was trained from, to be asked beside it."""
_VERSION = re.compile(rf"(?P<name>[^/]+)/v(?P<version>[0-9]{{6}})/{re.escape(MANIFEST)}")


class Owner(BaseModel):
    """The run that has claimed a version. `step`: its train step, if it publishes several versions."""

    run_id: str
    step: int | None = None


@dataclass(frozen=True)
class PublishedModel:
    """A version in the store; or a checkpoint, whose name is its run's id and whose version is its step."""

    kind: Kind
    name: str
    version: int

    @property
    def id(self) -> str:
        if self.kind == "checkpoints":
            return str(CheckpointName(self.name, self.version))
        return f"{self.name}:v{self.version}"


@dataclass(frozen=True)
class Target:
    """The weights that answer a question: an adapter and the model that it was trained on, or a model alone.

    `base`: the model as the run named it. `name` and `version`: those of the published weights; version 0 is the
    untrained base model.
    """

    model: Artifact
    adapter: Artifact | None
    dtype: Dtype
    base: str
    name: str | None = None
    version: int | None = None


def adapter_of_step(store: ObjectStore, record: RunRecord, step: int) -> Artifact:
    """Return the adapter in the newest checkpoint of a step. A separate manifest refers to the checkpoint's files.

    Raises NotFound: the checkpoint does not exist or was deleted, or the run trains no adapter.
    """
    name = CheckpointName(record.run_id, step)
    missing = NotFound(f"there is no published model {name}")
    if record.run.trainable.kind != "lora" or (found := checkpoint_of_step(store, name)) is None:
        raise missing
    key, checkpoint = found
    manifest = read_manifest(store, key, checkpoint.sha256)
    files = [entry for entry in manifest.files if entry.path.startswith(_WEIGHTS)]
    weights = Manifest(
        files=tuple(entry.model_copy(update={"path": entry.path.removeprefix(_WEIGHTS)}) for entry in files),
        root=uri_of(store, f"{key}/{_WEIGHTS.rstrip('/')}"),
    )
    return refer(store, checkpoint_adapter(record.tenant, record.run_id, checkpoint.sha256), weights)


class PublishedModels:
    """Finds published versions in the store. Blocking. Versions never change, so they are cached."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._targets: dict[tuple[str, PublishedModel], Target] = {}
        self._records: dict[str, RunRecord] = {}

    def served(self, tenant: str) -> list[ServedModel]:
        """List each name once, with its newest version, in alphabetical order, except reward models: they answer
        nothing."""
        return [_served(tenant, view, view.name) for view in self.views(tenant) if not view.rewards]

    def views(self, tenant: str) -> list[ModelView]:
        """Return published models: each name once, with its newest version, by name; those whose run is on record."""
        versions: dict[tuple[str, Kind], list[int]] = {}
        for kind in _KINDS:
            for found in self._versions(tenant, kind):
                versions.setdefault((found.name, kind), []).append(found.version)
        names: dict[str, Kind] = dict(reversed(versions))  # a model hides behind an adapter
        listed = []
        for name, kind in sorted(names.items()):
            with suppress(NotFound):
                listed.append(
                    self._view(tenant, PublishedModel(kind, name, versions[name, kind][-1]), versions[name, kind])
                )
        return listed

    def view(self, tenant: str, model_id: str) -> ModelView:
        """Return the published version of a name or id, with its size. Raises NotFound."""
        found = self.find(tenant, model_id)
        versions: list[int] = []
        if found.kind != "checkpoints":
            versions = [each.version for each in self._versions(tenant, found.kind, found.name)]
        view = self._view(tenant, found, versions)
        files = self.manifest(tenant, found).files
        return view.model_copy(update={"num_bytes": sum(entry.size for entry in files)})

    def _view(self, tenant: str, found: PublishedModel, versions: Sequence[int] = ()) -> ModelView:
        record = self.record(tenant, found)
        return ModelView(
            id=found.id,
            name=found.name,
            kind=_SINGULAR[found.kind],
            version=found.version,
            versions=tuple(versions),
            base=None if found.kind == "models" else record.run.model,
            run_id=record.run_id,
            created_at=record.created_at,
            rewards=record.run.trainable.head.names if record.run.trainable.head else (),
        )

    def manifest(self, tenant: str, found: PublishedModel) -> Manifest:
        """Return the list of a version's files. Raises NotFound when they were deleted."""
        artifact = self.artifact(tenant, found)
        return read_manifest(self._store, artifact.uri.removeprefix(f"{self._store.uri}/"), artifact.sha256)

    def _versions(self, tenant: str, kind: Kind, name: str | None = None) -> Iterator[PublishedModel]:
        """Versions in the store, of one name or of all, in order."""
        prefix = published(tenant, kind)
        for info in self._store.list(prefix if name is None else f"{prefix}{name}/v"):
            if match := _VERSION.fullmatch(info.key.removeprefix(prefix)):
                yield PublishedModel(kind, match["name"], int(match["version"]))

    def find(self, tenant: str, model_id: str) -> PublishedModel:
        """Find a version by its id. Raises NotFound if the id is malformed, or not of a version of this tenant."""
        if checkpoint := CheckpointName.parse(model_id):
            return self._checkpoint(tenant, checkpoint)
        match = PUBLISHED_NAME.fullmatch(model_id)
        found = None
        if match is not None and match["version"] is not None:
            name, version = match["name"], int(match["version"])
            places = ((kind, f"{published_version(tenant, kind, name, version)}/{MANIFEST}") for kind in _KINDS)
            found = next((PublishedModel(kind, name, version) for kind, key in places if self._store.head(key)), None)
        elif match is not None:
            found = self._newest(tenant, match["name"])
        if found is None:
            raise NotFound(f"there is no published model {model_id[:300]}")
        return found

    def _checkpoint(self, tenant: str, name: CheckpointName) -> PublishedModel:
        found = PublishedModel("checkpoints", name.run_id, name.step)
        try:
            record = self.record(tenant, found)
        except NotFound:
            raise NotFound(f"there is no published model {name}") from None
        if record.tenant != tenant:
            raise NotFound(f"there is no published model {name}")
        adapter_of_step(self._store, record, name.step)
        return found

    def _newest(self, tenant: str, name: str) -> PublishedModel | None:
        """Find the newest version. There may be newer claims of versions that are not published yet."""
        for kind in _KINDS:
            claims = sum(1 for _ in self._store.list(f"{published(tenant, kind, name)}/claims/"))
            for version in range(claims, 0, -1):
                if self._store.head(f"{published_version(tenant, kind, name, version)}/{MANIFEST}"):
                    return PublishedModel(kind, name, version)
        return None

    def show(self, tenant: str, model_id: str) -> ServedModel:
        """The view of an id for clients. Raises NotFound if this tenant has not published it."""
        return _served(tenant, self._view(tenant, self.find(tenant, model_id)), model_id)

    def target_of(self, tenant: str, model_id: str) -> Target:
        """Return the weights of an id; of `name:base` those that the training of `name` began with.

        Raises NotFound: they were deleted, or their job has no record.
        """
        if model_id.endswith(BASE):
            record = self.record(tenant, self.find(tenant, model_id.removesuffix(BASE)))
            plan = self._job(record.run_id).plan
            return Target(plan.model, None, plan.dtype, record.run.model, None, 0)
        found = self.find(tenant, model_id)
        if (tenant, found) not in self._targets:
            self._targets[tenant, found] = self._read_target(tenant, found)
        return self._targets[tenant, found]

    def asked(self, tenant: str, model_id: str) -> Target:
        """Return the weights of an id that is asked a question. Raises as `target_of`; InvalidInput: a reward model."""
        target = self.target_of(tenant, model_id)
        if not model_id.endswith(BASE) and (head := self.head(tenant, self.find(tenant, model_id))) is not None:
            raise InvalidInput(f"{model_id[:300]} is a reward model ({head}), which answers no questions", "model")
        return target

    def _read_target(self, tenant: str, found: PublishedModel) -> Target:
        artifact, record = self.artifact(tenant, found), self.record(tenant, found)
        plan = self._job(record.run_id).plan
        if found.kind == "checkpoints":
            return Target(plan.model, artifact, plan.dtype, record.run.model)
        if found.kind == "adapters":
            return Target(plan.model, artifact, plan.dtype, record.run.model, found.name, found.version)
        return Target(artifact, None, plan.dtype, artifact.uri, found.name, found.version)

    def artifact(self, tenant: str, found: PublishedModel) -> Artifact:
        """Return the files of an adapter or a model. Raises NotFound when they were deleted."""
        if found.kind == "checkpoints":
            return adapter_of_step(self._store, self.record(tenant, found), found.version)
        artifact = find_artifact(self._store, published_version(tenant, found.kind, found.name, found.version))
        if artifact is None:
            raise NotFound(f"{found.id} is no longer in the store")
        return artifact

    def head(self, tenant: str, found: PublishedModel) -> ScalarHead | None:
        """Return the head of scalars of a version; None: a language model, or one whose run is not on record."""
        with suppress(NotFound):
            return self.record(tenant, found).run.trainable.head
        return None

    def record(self, tenant: str, found: PublishedModel) -> RunRecord:
        """Return the record of the run that published a version. Raises NotFound when that is not on record."""
        run_id = found.name
        if found.kind != "checkpoints":
            run_id = self.owner(tenant, found).run_id
        if run_id not in self._records:
            self._records[run_id] = RunRecord.model_validate_json(self._store.get_bytes(RunKeys(run_id).record))
        return self._records[run_id]

    def owner(self, tenant: str, found: PublishedModel) -> Owner:
        """Return the run that made a version, and its train step. Raises NotFound."""
        return read_record(self._store, version_claim(tenant, found.kind, found.name, found.version), Owner)

    def has_claimed(self, record: RunRecord, name: str | None) -> bool:
        """Return True if a run has published a version, of one name or of any. Newest ones are checked first."""
        for kind in _KINDS:
            for found in reversed(list(self._versions(record.tenant, kind, name))):
                with suppress(NotFound):
                    if self.owner(record.tenant, found).run_id == record.run_id:
                        return True
        return False

    def versions(self, tenant: str, name: str) -> list[int]:
        """The versions of an adapter in the store, in order."""
        return [found.version for found in self._versions(tenant, "adapters", name)]

    def newest_adapter(self, tenant: str, name: str) -> Artifact | None:
        """The files of the newest version; None while there is none."""
        versions = self.versions(tenant, name)
        return self.artifact(tenant, PublishedModel("adapters", name, versions[-1])) if versions else None

    def provenance(self, tenant: str, model_id: str) -> Envelope:
        """Return the signed statement of a version's origin: in-toto with SLSA provenance, in a DSSE envelope.

        Raises NotFound: it has none.
        """
        found = self.find(tenant, model_id)
        if found.kind == "checkpoints":
            raise InvalidInput("a checkpoint has no statement: publish it", "model")
        key = published_version(tenant, found.kind, found.name, found.version)
        try:
            return Envelope.model_validate_json(self._store.get_bytes(f"{key}/{provenance.NAME}"))
        except NotFound:
            raise NotFound(f"{found.id} was published without a statement of what it was made from") from None

    def delete_model(self, tenant: str, model_id: str) -> None:
        """Delete a version, or all if the id names none. Raises NotFound; InvalidInput for a run's checkpoint."""
        if CheckpointName.parse(model_id):
            raise InvalidInput("a checkpoint is its run's: it goes when the run keeps newer ones", "model")
        found = self.find(tenant, model_id)
        if model_id == found.id:
            self.delete(tenant, found)
            return
        for each in list(self._versions(tenant, found.kind, found.name)):
            self.delete(tenant, each)

    def delete(self, tenant: str, found: PublishedModel) -> None:
        """Delete a version's files, the manifest first, so that it never seems complete. Its number stays taken."""
        self.delete_below(published_version(tenant, found.kind, found.name, found.version))
        self._targets.pop((tenant, found), None)

    def delete_below(self, key: str) -> None:
        """Delete an artifact of a version, and those that lie below it, such as its exports."""
        self._store.delete(f"{key}/{MANIFEST}")
        for info in list(self._store.list(f"{key}/")):
            self._store.delete(info.key)

    def _job(self, run_id: str) -> Job:
        """Return any job of a run: they all train the same model."""
        keys = (info.key for info in self._store.list(f"{RunKeys(run_id).logs}/") if is_job(info.key))
        key = next(keys, None)
        if key is None:
            raise NotFound(f"no job of {run_id} is on record")
        return Job.model_validate_json(self._store.get_bytes(key))


def _served(tenant: str, view: ModelView, model_id: str) -> ServedModel:
    """Return what clients of OpenAI see of a version, by the name that they asked for."""
    return ServedModel(
        id=model_id,
        created=int(view.created_at),
        owned_by=tenant,
        parent=view.base,
        root=view.id,
        version=view.version,
    )


# --- Replaces published names of models and adapters in requests by the URIs that they refer to ---

R = TypeVar("R", bound=Frozen)
_UNKNOWN = "you have published nothing of this name, and it is no folder, URI or hub id (organisation/name)"
_TWICE = "model names an adapter, which the run goes on from: leave out initial_adapter, or name the base model"


@dataclass(frozen=True)
class StartingPoint:
    """The model and adapter that a name refers to. `lora`: the shape of that adapter."""

    model: str
    initial_adapter: str | None = None
    lora: Lora | None = None


def one_form(text: str) -> str:
    """Return the file URI of a folder path, so that a path and its URI name the same model."""
    is_path = text.startswith("/") and not text.startswith("//")
    text = Path(text).as_uri() if is_path else text
    return f"file:///{text[8:].rstrip('/')}" if text.startswith("file:///") else text


class NamedModels:
    """Looks up names of a tenant's published models. Blocking."""

    def __init__(self, published: PublishedModels) -> None:
        self._published = published

    def starting_point(
        self, tenant: str, model: str, place: str = "model", may_have_head: bool = False
    ) -> StartingPoint:
        """Return the model and adapter that a run on this name starts from. Paths, URIs and hub ids stay unchanged.

        Raises InvalidInput: nothing is published under this name; or it is a reward model, unless it is an adapter and
        may have such a head.
        """
        if not is_name(model):
            return StartingPoint(one_form(model))
        found = self._find(tenant, model, place)
        self._refuse_scalars(tenant, found, place, may_have_head and found.kind != "models")
        artifact = self._published.artifact(tenant, found)
        if found.kind == "models":
            return StartingPoint(artifact.uri)
        run = self._published.record(tenant, found).run
        return StartingPoint(run.model, artifact.uri, run.trainable if isinstance(run.trainable, Lora) else None)

    def resolved(self, tenant: str, request: R, below: str = "") -> R:
        """Return a request with URIs in place of the names of its model, first adapter, reference and teacher.

        If `model` names an adapter, the run starts from it, and takes its shape unless the run sets one.

        `below`: path of the request's fields in the client's request, such as `run.`.

        Raises InvalidInput: nothing is published under a name, or it is of another kind.
        """
        match request:
            case PreviewRequest():
                model = self.starting_point(tenant, request.model_uri, f"{below}model_uri").model
                changes: dict[str, Any] = {"model_uri": model}
            case SFTRun() | DPORun() | DistillRun() | RewardRun() | RLRun() | SessionRun():
                changes = self._changes(tenant, request, below)
            case _:
                return request
        changes = {name: value for name, value in changes.items() if value != getattr(request, name)}
        return request.model_copy(update=changes) if changes else request

    def _changes(self, tenant: str, run: Run, below: str) -> dict[str, Any]:
        may_have_head = isinstance(run, RewardRun | SessionRun)
        start = self.starting_point(tenant, run.model, f"{below}model", may_have_head)
        changes: dict[str, Any] = {"model": start.model}
        if run.initial_adapter is not None:
            if start.initial_adapter is not None:
                raise InvalidInput(_TWICE, f"{below}initial_adapter")
            place = f"{below}initial_adapter"
            changes["initial_adapter"] = self._adapter(tenant, run.initial_adapter, place, may_have_head)
        elif start.initial_adapter is not None:
            if run.trainable.kind == "full":
                rule = "full training starts from a whole model, and this names an adapter: name its base model"
                raise InvalidInput(rule, f"{below}model")
            changes["initial_adapter"] = start.initial_adapter
            if isinstance(run, RewardRun):  # it has its head there, and so always the field
                is_default = run.trainable == Lora(head=run.head)
                if start.lora is not None and start.lora.head != run.head:
                    raise InvalidInput(f"its head is not {run.head}: name the model that it is on", f"{below}model")
            else:
                is_default = "trainable" not in run.model_fields_set
            if is_default and start.lora is not None:
                changes["trainable"] = start.lora
        match run:
            case DPORun(reference=str(reference)) if reference != "base":
                changes["reference"] = self._adapter(tenant, reference, f"{below}reference")
            case DistillRun(teacher=teacher, teachers=more):
                named = {"teacher": teacher} | {f"teachers.{name}": uri for name, uri in more}
                found = [u if u == "base" else self._adapter(tenant, u, f"{below}{at}") for at, u in named.items()]
                changes["teacher"] = found[0]
                changes["teachers"] = tuple(zip(run.named_teachers, found[1:], strict=True))
            case RLRun(loss=Distillation(teacher=str(teacher)) as loss) if teacher != "base":
                adapter = self._adapter(tenant, teacher, f"{below}loss.distillation.teacher")
                changes["loss"] = loss.model_copy(update={"teacher": adapter})
            case RLRun(loss=loss) if not isinstance(loss, Distillation) and (
                (kl := loss.kl) is not None and isinstance(kl.reference, str) and kl.reference != "base"
            ):
                adapter = self._adapter(tenant, kl.reference, f"{below}loss.{loss.kind}.kl.reference")
                changes["loss"] = loss.model_copy(update={"kl": kl.model_copy(update={"reference": adapter})})
        if not isinstance(run, SessionRun) and run.rollouts is not None:
            grader = self._grader(tenant, run.rollouts.grader, f"{below}rollouts.grader")
            changes["rollouts"] = run.rollouts.model_copy(update={"grader": grader})
        return changes

    def _grader(self, tenant: str, grader: Grader, place: str) -> Grader:
        """Return a grader with URIs in place of the names of its reward models, and of the models that they are on."""
        if isinstance(grader, MultiGrader):
            parts = {name: self._grader(tenant, one, f"{place}.graders.{name}") for name, one in grader.graders.items()}
            return grader.model_copy(update={"graders": parts})
        if not isinstance(grader, RewardModelGrader):
            return grader
        base = grader.base and self.starting_point(tenant, grader.base, f"{place}.base").model
        if not is_name(grader.model):
            return grader.model_copy(update={"model": one_form(grader.model), "base": base})
        found = self._find(tenant, grader.model, f"{place}.model")
        head = self._published.head(tenant, found)
        if head is None or found.kind == "models":
            what = "language model" if head is None else "reward model of all weights"
            raise InvalidInput(f"{found.id} is a {what}, and a grader wants a reward model's adapter", f"{place}.model")
        chosen_scalar(grader, head.names, place)
        base = base or self._published.record(tenant, found).run.model
        return grader.model_copy(update={"model": self._published.artifact(tenant, found).uri, "base": base})

    def _adapter(self, tenant: str, text: str, place: str, may_have_head: bool = False) -> str:
        if not is_name(text):
            return one_form(text)
        found = self._find(tenant, text, place)
        if found.kind == "models":
            raise InvalidInput(f"{found.id} is a whole model, and an adapter is wanted", place)
        self._refuse_scalars(tenant, found, place, may_have_head)
        return self._published.artifact(tenant, found).uri

    def _refuse_scalars(self, tenant: str, found: PublishedModel, place: str, may_have_head: bool) -> None:
        head = self._published.head(tenant, found)
        if head is not None and not may_have_head:
            raise InvalidInput(f"{found.id} is a reward model ({head}): it has no head of a language model", place)

    def _find(self, tenant: str, name: str, place: str) -> PublishedModel:
        try:
            return self._published.find(tenant, name)
        except NotFound as error:
            raise InvalidInput(str(error) if CheckpointName.parse(name) else _UNKNOWN, place) from None


# --- Exports of published adapters and models: start, follow, list, delete. Each belongs to a version ---

EXPORT_WORKFLOW = "ExportWorkflow"


@dataclass(frozen=True, eq=False)
class Exports:
    """Starts exports and shows their status. A finished export is not repeated."""

    _settings: Settings
    _store: ObjectStore
    _temporal: Temporal
    _published: PublishedModels
    _quotas: Quotas

    async def start(self, tenant: str, model_id: str, export: Export) -> ExportView:
        """Write a whole model in another program's format. It is stored with the version, and deleted with it.

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
            await self._quotas.measure(tenant)  # exports that ended are counted, too
            request = ExportRequest(
                key=key,
                name=name,
                tenant=tenant,
                model=target.model,
                adapter=target.adapter,
                export=export,
                room=await self._quotas.room(tenant),
            )
            conflict = WorkflowIDConflictPolicy.USE_EXISTING
            await self._temporal.start(
                EXPORT_WORKFLOW, request, self._workflow(key), tenant, id_conflict_policy=conflict
            )
        return await self.view(tenant, name, export.label)

    async def view(self, tenant: str, model_id: str, export: str) -> ExportView:
        """Return the status of an export. Raises NotFound if nobody requested it."""
        name, key = await asyncio.to_thread(self._place, tenant, model_id, export)
        view = ExportView(model=name, label=export, state="running")
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
        artifact = await asyncio.to_thread(self.artifact, tenant, name, export)
        manifest = await asyncio.to_thread(read_manifest, self._store, key, artifact.sha256)
        return view.model_copy(update={"state": "succeeded", "num_bytes": manifest.num_bytes})

    def artifact(self, tenant: str, model_id: str, label: str) -> Artifact:
        """Return the files of an export. Blocking. Raises NotFound while it is not complete."""
        name, key = self._place(tenant, model_id, label)
        if (artifact := find_artifact(self._store, key)) is None:
            raise NotFound(f"there is no export {label} of {name}, or it is not complete")
        return artifact

    async def delete(self, tenant: str, model_id: str, export: str) -> ExportView:
        """Delete the files of an export, which can be asked for again. Raises Conflict while it is being written."""
        view = await self.view(tenant, model_id, export)
        if view.state == "running":
            raise Conflict("this export is being written: delete it when it has ended")
        audit.touched(view.model)
        await asyncio.to_thread(self._published.delete_below, self._place(tenant, view.model, export)[1])
        await self._quotas.measure(tenant)
        return view

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


# --- Longshore's own settings in jobs of other APIs: fields of the run models, by their own names (docs/runs.md) ---

LORA_FIELDS = tuple(name for name in Lora.model_fields if name not in ("kind", "head"))
"""Fields of `trainable` in a run of a language loss."""


def settings_of(fields: dict[type[BaseModel], set[str]]) -> Any:
    """Make a model of these fields of run models, by their names, types, bounds and descriptions.

    Each may be absent or null, which means its native default. If two models have a field, it is the first one's.
    """
    made: dict[str, Any] = {}
    for model, names in fields.items():
        for name in model.model_fields:
            if name in names and name not in made:
                field = copy(model.model_fields[name])
                field.default, field.default_factory = None, None
                assert field.annotation is not None
                made[name] = field.annotation | None, field
    return create_model("OwnSettings", __base__=_OwnSettings, **made)


class _OwnSettings(Frozen):
    @property
    def given(self) -> dict[str, Any]:
        """The fields that were sent, by name; null counts as absent."""
        return {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}
