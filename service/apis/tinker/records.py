"""What the service keeps of Tinker's sessions, requests and samplers, and their way to runs."""

import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi import Depends
from pydantic import Field, JsonValue, field_validator

from longshore.commands import Asked, CommandResult
from longshore.fields import Frozen, pattern
from longshore.runs import RunId
from longshore.views import CommandView
from service.accounts.keys import Asking, Principal
from service.accounts.tenants import Documents, Quotas
from service.backend import Backed, Backend
from service.database.engine import Database
from service.inference.published_models import one_form
from shared.chat.completions import MAX_TOP_LOGPROBS
from shared.errors import Conflict, InvalidInput, LongshoreError, NotFound, QueueFull
from shared.jobs.commands import Skip
from shared.settings import TinkerSettings

# --- Records of Tinker's sessions, models, checkpoints and samplers, per tenant ---
#
# A model is one of our sessions, and a request to train it is one of that session's commands. A record refers to the
# session and the command, which have the result.

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,127}$"
CheckpointName = Annotated[
    str, pattern(CHECKPOINT_NAME, "a name has at most 128 letters, digits, dots, dashes, underscores and =")
]
Metadata = dict[str, JsonValue]
R = TypeVar("R", bound="TinkerRecord")


class TinkerRecord(Frozen):
    """A record. `id`: its client's name for it. `key`: by which those of a kind are sorted."""

    what: ClassVar[str]
    created_at: float = Field(default_factory=time.time)

    @property
    def id(self) -> str:
        raise NotImplementedError

    @property
    def key(self) -> str:
        return self.id


class SessionRecord(TinkerRecord):
    """A client's session. It owns the models and samplers made in it, and ends when the client ends it."""

    what: ClassVar[str] = "Tinker session"
    session_id: str
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: Metadata | None = None
    display_name: str | None = None
    project_id: str | None = None
    finished: Literal["success", "errored", "interrupted"] | None = None

    @property
    def id(self) -> str:
        return self.session_id


def _part(session_id: str, number: int) -> str:
    """The key of a numbered part of a client's session: a model or a sampler."""
    return f"{session_id}/{number:06d}"


class ModelRecord(TinkerRecord):
    """A model in training, and the session of ours that it is.

    `before`: commands of the session before the model's first request: 1 if it began by loading a state.
    """

    what: ClassVar[str] = "Tinker model"
    session_id: str
    number: int
    run_id: RunId
    published_as: str
    base_model: str
    rank: int
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    before: Literal[0, 1] = 0
    user_metadata: Metadata | None = None

    @property
    def key(self) -> str:
        return _part(self.session_id, self.number)

    @property
    def id(self) -> str:
        return f"{self.session_id}:train:{self.number}"


class CheckpointRecord(TinkerRecord):
    """A checkpoint by name: the state after a command of its model."""

    what: ClassVar[str] = "Tinker checkpoint"
    model_id: str
    kind: CheckpointKind
    name: str
    command: int
    expires_at: float | None = None
    public: bool = False
    user_metadata: Metadata | None = None

    @property
    def key(self) -> str:
        session_id, _, number = self.model_id.split(":")
        return f"{_part(session_id, int(number))}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"

    @property
    def is_there(self) -> bool:
        return self.expires_at is None or self.expires_at > time.time()


class SamplerRecord(TinkerRecord):
    """A sampling session: samples of a base model, of a checkpoint, or of the state after a command of a model.

    `inflight`: of the newest state that the model has saved for such sessions.
    """

    what: ClassVar[str] = "Tinker sampling session"
    session_id: str
    number: int
    base_model: str
    model_path: str | None = None
    model_id: str | None = None
    command: int | None = None
    inflight: bool = False

    @property
    def key(self) -> str:
        return _part(self.session_id, self.number)

    @property
    def id(self) -> str:
        return f"{self.session_id}:sample:{self.number}"


class TinkerRecords:
    """The records of one tenant. Another tenant's are not found."""

    def __init__(self, database: Database, quotas: Quotas, tenant: str) -> None:
        self._database = database
        self._quotas = quotas
        self._tenant = tenant

    def _of(self, kind: type[R]) -> Documents[R]:
        return Documents(self._database, self._quotas, kind.what, kind)

    async def add(self, record: R) -> R | None:
        """Put a record, unless there is one of its key. Returns the one that was there. Raises QuotaExceeded."""
        return await self._of(type(record)).add(self._tenant, record.key, record, alias=record.id)

    async def change(self, record: R, **changes: object) -> None:
        """Change fields of a record. Raises NotFound: it was deleted."""
        records = self._of(type(record))
        await records.change(self._tenant, record.key, lambda before: before.model_copy(update=changes))

    async def claim(self, checkpoint: CheckpointRecord, overwrite: bool) -> None:
        """Give a checkpoint its name. Raises Conflict if another one has it, and InvalidInput for a name of none."""
        if not re.fullmatch(CHECKPOINT_NAME, checkpoint.name):
            raise InvalidInput("at most 128 letters, digits, dots, dashes, underscores and =", "path")

        def replace(before: CheckpointRecord) -> CheckpointRecord:
            if before.command == checkpoint.command and not overwrite:
                return before
            if before.is_there and not overwrite:
                raise Conflict(f"there is a checkpoint {checkpoint.id}: save under another name, or overwrite it")
            return checkpoint

        if await self.add(checkpoint) is not None:
            await self._of(CheckpointRecord).change(self._tenant, checkpoint.key, replace)

    async def delete(self, record: TinkerRecord) -> None:
        await self._of(type(record)).delete(self._tenant, record.key)

    async def find(self, kind: type[R], id: str) -> R:
        """Return the record of a client's id. Raises NotFound."""
        if (found := await self._of(kind).find_alias(self._tenant, id)) is None:
            raise NotFound(f"there is no {kind.what} {id[:300]}")
        return found

    async def keys(self, kind: type[R], below: str = "") -> list[str]:
        """List the keys of records, or of those that begin with `below`."""
        return await self._of(kind).keys(self._tenant, below)

    async def all(self, kind: type[R], below: str = "") -> list[R]:
        """List records, or those whose keys begin with `below`."""
        return await self._of(kind).all(self._tenant, below)

    async def known(self, kind: type[R], id: str) -> R:
        """`find` a record for a request that only needs what never changes in it: it may be a minute old."""
        find = partial(self._of(kind).find_alias, self._tenant, id)
        found: R | None = await self._database.recent.of(kind.what, self._tenant, id, find=find)
        if found is None:
            raise NotFound(f"there is no {kind.what} {id[:300]}")
        return found

    async def model(self, model_id: str) -> ModelRecord:
        """Find a model, as `known` does. Raises NotFound."""
        return await self.known(ModelRecord, model_id)

    async def checkpoint(self, path: str) -> CheckpointRecord:
        """Find a checkpoint. Raises NotFound: it is not there, or no longer."""
        found = await self.find(CheckpointRecord, path)
        if not found.is_there:
            raise NotFound(f"there is no checkpoint {path}")
        return found

    async def checkpoints(self, below: str = "") -> list[CheckpointRecord]:
        """List the checkpoints of a model, or of all, in order."""
        return [each for each in await self.all(CheckpointRecord, below) if each.is_there]


# --- Requests of Tinker's SDK in JSON ---
# Unknown fields are refused, since they might change the request's meaning.

Id = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(max_length=1024)]
Number = Annotated[int, Field(ge=0, le=999_999)]
Seq = Annotated[int, Field(ge=1, le=9_000_000)]


class TinkerRequest(Frozen):
    type: str | None = None


class ClientConfigRequest(TinkerRequest):
    sdk_version: str = Field(default="", max_length=64)


class CreateSession(TinkerRequest):
    tags: tuple[Annotated[str, Field(max_length=256)], ...] = Field(default=(), max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: str = Field(default="", max_length=64)
    project_id: str | None = Field(default=None, max_length=256)
    display_name: str | None = Field(default=None, max_length=512)


class OfSession(TinkerRequest):
    session_id: Id


class FinishReason(Frozen):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(TinkerRequest):
    reason: FinishReason
    detail: str | None = Field(default=None, max_length=4096)


class LoraConfig(Frozen):
    rank: int = Field(ge=1, le=1024)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Frozen):
    type: str = "adamw"
    version: int | None = None

    @field_validator("type")
    @classmethod
    def _is_adamw(cls, value: str) -> str:
        if value != "adamw":
            raise ValueError(f"the optimizer {value[:60]} is not served here: adamw is")
        return value


class CreateModel(TinkerRequest):
    session_id: Id
    model_seq_id: Number
    base_model: str = Field(min_length=1, max_length=2048)
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(TinkerRequest):
    model_id: Id


class AdamParams(Frozen):
    """Numbers that cannot be used are refused where they are read, so that the request's number is not missed."""

    type: str | None = None
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(OfModel):
    seq_id: Seq
    adam_params: AdamParams | None = None
    optimizer_params: JsonValue = None


class SaveRequest(OfModel):
    seq_id: Seq
    path: str | None = Field(default=None, max_length=4096)
    ttl_seconds: int | None = None


class SaveWeights(SaveRequest):
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(SaveRequest):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: Metadata | None = None


class SaveExternal(SaveRequest):
    path: str = Field(max_length=4096)
    age_encryption_recipients: tuple[str, ...] | None = None


class LoadWeights(TinkerRequest):
    """Load into a model (`model_id`, `seq_id`), or make a new one from weights (`session_id`, `model_seq_id`)."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = Field(default=None, max_length=2048)
    user_metadata: Metadata | None = None
    path: Path
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class RetrieveFuture(TinkerRequest):
    request_id: str = Field(max_length=4096)
    allow_metadata_only: bool = False


class CreateSampler(TinkerRequest):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = Field(default=None, max_length=2048)
    model_path: Path | None = None


class TokenChunk(Frozen):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]


class ModelInput(Frozen):
    chunks: tuple[TokenChunk, ...] = Field(min_length=1)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(Frozen):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleRequest(TinkerRequest):
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = Field(default=None, max_length=2048)
    model_path: Path | None = None
    sampling_session_id: Id | None = None
    seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Refuse fields that ask for something no sampler here returns. Raises InvalidInput.

        `record_stability_info` needs nothing: the loss that it is for reads a sample's own log-probabilities here.
        """
        if self.prompt_alt_tokens_k:
            raise InvalidInput("samplers here draw no tokens within the prompt: give 0", "prompt_alt_tokens_k")
        if self.target_prompt_logprobs is not None:
            raise InvalidInput("samplers here score the prompt's own tokens alone", "target_prompt_logprobs")
        if not self.prompt.ids:
            raise InvalidInput("there is no token", "prompt")


class TinkerPath(TinkerRequest):
    tinker_path: Path


class SetTtl(TinkerRequest):
    ttl_seconds: int | None = None


class SetProject(TinkerRequest):
    project_id: str = Field(max_length=256)


class CancelFuture(TinkerRequest):
    request_id: str = Field(max_length=4096)


class SearchCursor(Frozen):
    last_created_at: str = Field(max_length=64)
    last_session_id: Id


class SearchSessions(TinkerRequest):
    session_id: Id | None = None
    project_ids: tuple[Id, ...] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=64)
    display_name: str | None = Field(default=None, min_length=1, max_length=512)
    owner: JsonValue = None
    statuses: tuple[dict[str, JsonValue], ...] | None = Field(default=None, max_length=16)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None

    def matches(self, session: SessionRecord) -> bool:
        """Return True for a session that is looked for. All sessions of a tenant are their searcher's own."""
        name = (session.display_name or "").lower()
        named = [self.session_id == session.session_id] if self.session_id is not None else []
        if self.display_name is not None:
            named.append(all(word in name for word in self.display_name.lower().split()))
        metadata = session.user_metadata or {}
        return (
            (any(named) or not named)
            and (self.project_ids is None or session.project_id in self.project_ids)
            and all(metadata.get(key) == value for key, value in self.user_metadata.items())
            and (self.statuses is None or any(_has_status(session, each) for each in self.statuses))
        )


def _has_status(session: SessionRecord, wanted: dict[str, JsonValue]) -> bool:
    match wanted.get("type"):
        case "active":
            return session.finished is None
        case "client_finished":
            reasons = wanted.get("reasons")
            return session.finished is not None and (not isinstance(reasons, list) or session.finished in reasons)
        case _:
            return False


# --- Common parts of Tinker's operations ---
# The service's parts for one request's tenant, and ids of pending requests.
#
# The ids contain everything needed to find the result, so that a restarted service needs no state.

_RESULT_S = 20.0
"""How long a request waits for a checkpoint that is still being saved."""


class AskedLoss(Frozen):
    """A loss by Tinker's name, and its settings."""

    name: str
    config: dict[str, float | str] = Field(default_factory=dict)


FutureKind = Literal["create", "passes", "optim", "save", "sampler", "load"]


class TrainingFuture(Frozen):
    """A pending command of a model's session, and what its answer needs in addition to the command's result.

    `detail`: of `save` the checkpoint's path; of `sampler` the sampling session's id; of `load` the path. `loss`: of
    `passes`.
    """

    model_id: str
    command: int = Field(ge=0, lt=10**8)
    kind: FutureKind
    detail: str = ""
    loss: AskedLoss | None = None

    @property
    def request_id(self) -> str:
        return urlsafe_b64encode(self.model_dump_json(exclude_defaults=True).encode()).decode()

    @classmethod
    def parse(cls, request_id: str) -> Self:
        """Raises NotFound if it is not such an id."""
        try:
            return cls.model_validate_json(urlsafe_b64decode(request_id))
        except ValueError:
            raise NotFound(f"there is no request {request_id[:120]}") from None


class NamedModel(Frozen):
    """A base model by its URI, to be checked."""

    model: str


@dataclass(frozen=True)
class Gateway:
    """What is asked for one tenant."""

    backend: Backend
    asking: Principal
    records: TinkerRecords

    @property
    def tenant(self) -> str:
        return self.asking.tenant

    @property
    def settings(self) -> TinkerSettings:
        return self.backend.settings.tinker

    def uri_of(self, base_model: str) -> str:
        """Return the URI of a base model that clients name, in the form that runs use."""
        return one_form(self.settings.models.get(base_model, base_model))

    def check_same(self, base_model: str | None, of_checkpoint: str) -> None:
        """Raise InvalidInput for a base model that is another one than a checkpoint's."""
        if base_model is not None and self.uri_of(base_model) != self.uri_of(of_checkpoint):
            raise InvalidInput(f"the checkpoint is of {of_checkpoint}", "base_model")

    # Commands.

    async def command(
        self, model: ModelRecord, seq_id: int, asked: Asked | Skip | bytes, kind: FutureKind, **more: Any
    ) -> dict[str, Any]:
        """Have a model's session do a command, and answer with its future, which has `more` fields."""
        number = seq_id + model.before
        await self.backend.sessions.accept(self.tenant, model.run_id, number, asked)
        future = TrainingFuture(model_id=model.id, command=number, kind=kind, **more)
        return {"request_id": future.request_id, "model_id": model.id}

    @asynccontextmanager
    async def numbered(self, model: ModelRecord, seq_id: int) -> AsyncIterator[None]:
        """Pass over the number of a request that is refused, since the model's next request has the next number."""
        try:
            yield
        except (InvalidInput, NotFound, Conflict) as error:
            if not isinstance(error, QueueFull):
                with suppress(LongshoreError):  # the number is taken, or the session has ended
                    await self.backend.sessions.accept(self.tenant, model.run_id, seq_id + model.before, Skip())
            raise

    async def outcome(self, model: ModelRecord, command: int, wait_s: float) -> CommandView:
        return await self.backend.sessions.show(self.tenant, model.run_id, command, wait_s)

    # Checkpoints.

    async def saved(self, checkpoint: CheckpointRecord) -> tuple[ModelRecord, CommandResult]:
        """Wait until a checkpoint is saved, and return the result. Raises NotFound: it failed, or takes too long."""
        model = await self.records.model(checkpoint.model_id)
        view = await self.outcome(model, checkpoint.command, _RESULT_S)
        if view.result is None or view.result.step is None:
            reason = view.message or (view.result and view.result.problem and view.result.problem.message)
            raise NotFound(f"{checkpoint.id} is not saved: {reason or 'it is still being done'}")
        return model, view.result

    async def state_of(self, path: str) -> tuple[ModelRecord, str]:
        """Return the model of a checkpoint, and the state's name in our sessions. Raises NotFound."""
        model, result = await self.saved(await self.records.checkpoint(path))
        return model, f"{model.run_id}:step-{result.step}"


async def _gateway(backend: Backed, asking: Asking) -> Gateway:
    return Gateway(backend, asking, TinkerRecords(backend.database, backend.quotas, asking.tenant))


AtGateway = Annotated[Gateway, Depends(_gateway)]
