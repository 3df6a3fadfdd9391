"""Models in the sense of OpenPipe ART's clients: a name and a base model, trained job by job.

A model is a name under which its runs publish. Its steps are the versions of that name: every job that changes the
model publishes one, and step 0 is the base model. So a model needs nothing but its record and the published versions.
"""

import asyncio
import hashlib
import math
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

from temporalio.common import WorkflowIDConflictPolicy

from longshore.dataset_runs import TrainedRun
from longshore.fields import Artifact, Frozen, Name, pattern
from longshore.runs import RLRun, Tenant
from longshore.training import Dtype, EngineName, Lora
from longshore.views import RunStatus, StepStatus
from service.accounts import audit
from service.accounts.tenants import Documents, Quotas
from service.database.engine import KeyedLocks
from service.inference.published_models import (
    LORA_FIELDS,
    PublishedModel,
    PublishedModels,
    Target,
    one_form,
    settings_of,
)
from service.temporal import Temporal
from shared.chat.messages import ServedModel
from shared.errors import Conflict, InvalidInput, NotFound, StoreUnavailable, TemporalUnavailable
from shared.runs.acceptance import precision_of
from shared.runs.start import ModelRequest, ResolvedModel
from shared.settings import Settings
from shared.storage import paths
from shared.storage.paths import content_key
from shared.storage.store import ObjectStore

_WORD, _WORD_RULE = r"^[^/\\#?%:\x00-\x1f\x7f]+$", "no / \\ # ? % : and no control characters"
# As W&B has them, whose artifacts ART names models by.
ArtWord = Annotated[str, pattern(_WORD, _WORD_RULE, min_length=1, max_length=64)]
_MODEL_ID = re.compile(r"^model-[0-9a-f]{17}$")
ModelId = Annotated[str, pattern(_MODEL_ID.pattern, "the id of a model: model- and 17 hex digits")]

_ARTIFACT = "wandb-artifact:///"
_NAME = re.compile(r"(?P<entity>[^/:]+)/(?P<project>[^/:]+)/(?P<name>[^/:]+)(:(step(?P<step>[0-9]{1,6})|latest))?")
_LONGEST_SLUG = 54
_CHECK_BASE_S = 10.0
UNTRAINED_MODEL_WORKFLOW = "UntrainedModelWorkflow"
_PATIENCE = timedelta(hours=2)  # a large model may have to be downloaded
_TRUSTED_S = 600.0


RL_SETTINGS = {"temperature", "idle_s", "between_steps", "equal_rewards", "broken"}
_JOBS_OWN = {"kind", "schema_version", "name", "model", "initial_adapter", "trainable"}


_settings: Any = settings_of(
    {Lora: set(LORA_FIELDS), RLRun: TrainedRun.model_fields.keys() - _JOBS_OWN | {"max_tokens"} | RL_SETTINGS}
)


class ArtSettings(_settings):
    """Settings of a model's jobs that ART's clients have no fields for, by their native names (docs/runs.md).

    `temperature`, `idle_s`, `between_steps`, `equal_rewards` and `broken` are of reinforcement jobs alone.
    """


class ArtModel(Frozen):
    """The record of a model. `published_as`: the name of its adapters and of its runs.

    `dtype`: used if its settings name none, so that training and sampling use the same one.
    """

    model_id: ModelId
    tenant: Tenant
    entity: ArtWord
    project: ArtWord
    name: ArtWord
    base_model: str
    settings: ArtSettings = ArtSettings()
    dtype: Dtype
    published_as: Name
    created_at: float

    @property
    def title(self) -> str:
        return f"{self.entity}/{self.project}/{self.name}"


@dataclass(frozen=True)
class ArtName:
    """A model's name in requests for completions. `step`: None for the newest."""

    title: str
    step: int | None

    @classmethod
    def parse(cls, text: str) -> "ArtName | None":
        """Parse `wandb-artifact:///entity/project/name:step5`; scheme and step may be missing. None for other texts."""
        match = _NAME.fullmatch(text.removeprefix(_ARTIFACT))
        if match is None:
            return None
        step = int(match["step"]) if match["step"] is not None else None
        return cls(f"{match['entity']}/{match['project']}/{match['name']}", step)


class UntrainedModels:
    """Resolves base models. Requests for the same model share one answer, which is kept for ten minutes.

    The installation can give some of them names for requests (LONGSHORE_TINKER__MODELS).
    """

    def __init__(self, settings: Settings, temporal: Temporal, store: ObjectStore, quotas: Quotas) -> None:
        self._settings = settings
        self._quotas = quotas
        self._temporal = temporal
        self._store = store
        self._known: dict[ModelRequest, tuple[float, Artifact]] = {}

    async def resolve(self, tenant: str, uri: str, engine: EngineName | None = None) -> Artifact:
        """The files of a hub id, folder or URI that this tenant may read.

        `engine`: the one that will train it; None: it is only sampled, and of any family that samplers support.

        Raises InvalidInput: it is no model that can be used here. TemporalUnavailable: nobody to ask.
        """
        any_family = engine in (None, "fsdp")
        request = ModelRequest(uri=one_form(uri), tenant=tenant, any_family=any_family)
        since, known = self._known.get(request, (0.0, None))
        if known is not None and time.monotonic() - since < _TRUSTED_S:
            return known
        found = await self._temporal.ask(
            UNTRAINED_MODEL_WORKFLOW,
            request.model_copy(update={"room": await self._quotas.room(tenant)}),
            ResolvedModel,
            workflow_id=f"untrained-model-{content_key(self._settings.control_queue, request)}",
            tenant=tenant,
            within=_PATIENCE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        self._known[request] = time.monotonic(), found.model
        return found.model

    async def target(self, tenant: str, uri: str) -> Target:
        """Return the weights of a base model, to be asked in the precision of sessions that would begin now.

        Raises as `resolve` does.
        """
        asked = self._settings.tinker.dtype
        precision = await asyncio.to_thread(precision_of, asked, self._settings, self._store)
        return Target(await self.resolve(tenant, uri), None, precision.dtype, uri, None, 0)

    def uri_of(self, name: str) -> str | None:
        """Return the URI of a named base model; None if the installation has no such name."""
        return self._settings.tinker.models.get(name)

    def served(self) -> list[ServedModel]:
        """Return the named ones as clients see them, in alphabetical order. They are nobody's: their version is 0."""
        named = sorted(self._settings.tinker.models)
        return [ServedModel(id=name, created=0, owned_by="installation", root=name, version=0) for name in named]


@dataclass(frozen=True, eq=False)
class ArtModels:
    """Registers, finds, lists and deletes models with their checkpoints. Another tenant's are not found.

    The alias of their records is a hash of their title.
    """

    _store: ObjectStore
    _records: Documents[ArtModel]
    _published: PublishedModels
    _untrained: UntrainedModels
    _locks: KeyedLocks = field(default_factory=KeyedLocks)

    def lock(self, model_id: str) -> asyncio.Semaphore:
        """Return the lock to hold while a model is given a job, since each job starts from the one before."""
        return self._locks.of(model_id)

    async def _check_base(self, model: ArtModel) -> None:
        """Check that the base model can be used here, for a limited time.

        If it is still being downloaded then, or no host answers, the model is accepted, and the first job may fail.

        Raises InvalidInput: the model cannot be used.
        """
        try:
            async with asyncio.timeout(_CHECK_BASE_S):
                await self._untrained.resolve(model.tenant, model.base_model, model.settings.engine or "megatron")
        except InvalidInput as error:
            raise InvalidInput(str(error), "base_model") from error
        except (TimeoutError, StoreUnavailable, TemporalUnavailable):
            return

    async def register(self, model: ArtModel, *, return_existing: bool) -> ArtModel:
        """Put a model on record.

        Raises:
            Conflict: its name is taken; with `return_existing`: by a model of another base or of other settings.
            InvalidInput: its base is none that can be used here.
            QuotaExceeded
        """
        found = await self._by_title(model.tenant, model.title)
        if found is None:
            await self._check_base(model)
            found = await self._records.add(model.tenant, model.model_id, model, alias=_digest(model.title))
            if found is None:
                audit.touched(model.model_id)
                return model
        if not return_existing:
            raise Conflict(f"{model.title} is registered: return_existing answers with it")
        if one_form(found.base_model) != one_form(model.base_model):
            raise Conflict(f"{model.title} is registered with the base model {found.base_model}")
        if model.settings not in (ArtSettings(), found.settings):
            raise Conflict(f"{model.title} is registered with other settings, which hold for all of its jobs")
        return found

    async def _by_title(self, tenant: str, title: str) -> ArtModel | None:
        return await self._records.find_alias(tenant, _digest(title))

    async def show(self, tenant: str, model_id: str) -> ArtModel:
        """Return the record of a tenant's model. Raises NotFound."""
        return await self._records.get(tenant, model_id)

    async def all(self, tenant: str) -> list[ArtModel]:
        """List a tenant's models in order of registration."""
        return await self._records.all(tenant)

    async def delete(self, model: ArtModel) -> None:
        """Delete a model and its checkpoints. Its runs stay on record."""
        audit.touched(model.model_id)
        for step in await asyncio.to_thread(self.steps, model):
            await asyncio.to_thread(self._published.delete, model.tenant, _published(model, step))
        await self._records.delete(model.tenant, model.model_id)

    # Checkpoints.

    def steps(self, model: ArtModel) -> list[int]:
        """List the steps that have a checkpoint, in order. The base model is none of them. Blocking."""
        return self._published.versions(model.tenant, model.published_as)

    def metrics(self, model: ArtModel, step: int) -> dict[str, float]:
        """Return the metrics of the job that made a checkpoint. Blocking."""
        with suppress(NotFound):  # it was published, and its job is not on record yet
            owner = self._published.owner(model.tenant, _published(model, step))
            keys = paths.RunKeys(owner.run_id)
            if owner.step is not None:
                return finite_metrics(
                    StepStatus.model_validate_json(self._store.get_bytes(keys.step(owner.step))).metrics
                )
            return finite_metrics(RunStatus.model_validate_json(self._store.get_bytes(keys.result)).metrics)
        return {}

    async def newest(self, model: ArtModel) -> str | None:
        """The URI of the adapter that the next job starts from; None if there is none yet."""
        found = await asyncio.to_thread(self._published.newest_adapter, model.tenant, model.published_as)
        return found.uri if found is not None else None

    def delete_steps(self, model: ArtModel, steps: Iterable[int]) -> tuple[int, list[int]]:
        """Delete checkpoints. Returns how many, and the steps that do not exist. Blocking.

        Raises InvalidInput: one of them is the newest, which the next job starts from.
        """
        wanted, there = sorted(set(steps)), self.steps(model)
        if there and there[-1] in wanted:
            raise InvalidInput(f"step {there[-1]} is the newest: the next job continues from it", "steps")
        found = [step for step in wanted if step in there]
        audit.touched(model.model_id)
        for step in found:
            self._published.delete(model.tenant, _published(model, step))
        return len(found), [step for step in wanted if step not in there]

    # Inference.

    async def target(self, tenant: str, name: ArtName) -> Target:
        """Return the adapter and base model of a model's step. Raises NotFound."""
        model = await self._by_title(tenant, name.title)
        if model is None:
            raise NotFound(f"there is no model {name.title}")
        if name.step != 0:
            version = "" if name.step is None else f":v{name.step}"
            try:
                return await asyncio.to_thread(self._published.target_of, tenant, f"{model.published_as}{version}")
            except NotFound:
                if name.step is not None:
                    raise NotFound(f"{name.title} has no checkpoint of step {name.step}") from None
        base = await self._untrained.resolve(tenant, model.base_model)
        return Target(base, None, model.settings.dtype or model.dtype, model.base_model, model.published_as, 0)


def new_model(
    tenant: str, entity: str, project: str, name: str | None, base_model: str, settings: ArtSettings, dtype: Dtype
) -> ArtModel:
    """Make a model with an id that sorts by time; a model without a name has its id as its name."""
    now = time.time()
    model_id = f"model-{int(now * 1000):011x}{secrets.token_hex(3)}"
    slug = re.sub(r"[^a-z0-9._-]+", "-", f"{project}-{name or 'model'}".lower())[:_LONGEST_SLUG].strip("-._")
    return ArtModel(
        model_id=model_id,
        tenant=tenant,
        entity=entity,
        project=project,
        name=name or model_id,
        base_model=base_model,
        settings=settings,
        dtype=dtype,
        published_as=f"{slug or 'model'}-{model_id[-8:]}",
        created_at=now,
    )


def finite_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Drop values that JSON has no number for."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _published(model: ArtModel, step: int) -> PublishedModel:
    return PublishedModel("adapters", model.published_as, step)


def _digest(title: str) -> str:
    return hashlib.sha256(title.encode()).hexdigest()
