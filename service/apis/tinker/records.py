"""What the service keeps of Tinker's sessions, requests and samplers, and their way to runs."""

import asyncio
import json
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from fastapi import Depends
from pydantic import Field, JsonValue, field_validator

from longshore.commands import Asked, CommandResult
from longshore.fields import Frozen, pattern
from service.accounts.keys import Asking, Principal
from service.accounts.tenants import Quotas
from service.backend import Backed, Backend
from service.errors import Conflict, QueueFull
from service.inference.published_models import one_form
from service.runs.sessions import CommandView
from shared.chat.completions import MAX_TOP_LOGPROBS
from shared.errors import InvalidInput, LongshoreError, NotFound
from shared.jobs.commands import Skip
from shared.runs.requests import RunId
from shared.settings import TinkerSettings
from shared.storage import paths
from shared.storage.store import ObjectStore

# --- Records of Tinker's sessions, models, checkpoints and samplers: small objects in the store, per tenant ---
#
# A model is one of our sessions, and a request to train it is one of that session's commands. A record refers to the
# session and the command, which have the result.

_SESSION = r"tinker-[0-9a-f]{21}"
_MODEL = re.compile(rf"(?P<session>{_SESSION}):train:(?P<number>[0-9]{{1,6}})")
_SAMPLER = re.compile(rf"(?P<session>{_SESSION}):sample:(?P<number>[0-9]{{1,6}})")
_PATH = re.compile(r"tinker://(?P<model>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)")
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,127}$"
CheckpointName = Annotated[
    str, pattern(CHECKPOINT_NAME, "a name has at most 128 letters, digits, dots, dashes, underscores and =")
]
Metadata = dict[str, JsonValue]
R = TypeVar("R", bound="TinkerRecord")


class TinkerRecord(Frozen):
    """A record. `folder`: the prefix of records of its kind."""

    folder: ClassVar[str]
    created_at: float = Field(default_factory=time.time)

    @property
    def place(self) -> str:
        """Its key below `folder`."""
        raise NotImplementedError


class SessionRecord(TinkerRecord):
    """A client's session. It owns the models and samplers made in it, and ends when the client ends it."""

    folder: ClassVar[str] = "sessions"
    session_id: str
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: Metadata | None = None
    display_name: str | None = None
    project_id: str | None = None
    finished: Literal["success", "errored", "interrupted"] | None = None

    @property
    def place(self) -> str:
        return self.session_id


@dataclass(frozen=True)
class SessionPart:
    """A numbered part of a client's session: a model or a sampler."""

    session_id: str
    number: int

    @classmethod
    def of_model(cls, model_id: str) -> Self:
        """Parse a model's id. Raises NotFound."""
        return cls._parsed(_MODEL, model_id, "model")

    @classmethod
    def of_sampler(cls, sampler_id: str) -> Self:
        """Parse a sampling session's id. Raises NotFound."""
        return cls._parsed(_SAMPLER, sampler_id, "sampling session")

    @classmethod
    def _parsed(cls, form: re.Pattern[str], text: str, what: str) -> Self:
        if (match := form.fullmatch(text)) is None:
            raise NotFound(f"there is no {what} {text[:120]}")
        return cls(match["session"], int(match["number"]))

    @property
    def place(self) -> str:
        return f"{self.session_id}/{self.number:06d}"


class ModelRecord(TinkerRecord):
    """A model in training, and the session of ours that it is.

    `before`: commands of the session before the model's first request: 1 if it began by loading a state.
    """

    folder: ClassVar[str] = "models"
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
    def place(self) -> str:
        return SessionPart(self.session_id, self.number).place

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.number}"


class CheckpointRecord(TinkerRecord):
    """A checkpoint by name: the state after a command of its model."""

    folder: ClassVar[str] = "checkpoints"
    model_id: str
    kind: CheckpointKind
    name: str
    command: int
    expires_at: float | None = None
    public: bool = False
    user_metadata: Metadata | None = None

    @property
    def place(self) -> str:
        return f"{SessionPart.of_model(self.model_id).place}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"

    @property
    def is_there(self) -> bool:
        return self.expires_at is None or self.expires_at > time.time()


class SamplerRecord(TinkerRecord):
    """A sampling session: samples of a base model, of a checkpoint, or of the state after a command of a model.

    `inflight`: of the newest state that the model has saved for such sessions.
    """

    folder: ClassVar[str] = "samplers"
    session_id: str
    number: int
    base_model: str
    model_path: str | None = None
    model_id: str | None = None
    command: int | None = None
    inflight: bool = False

    @property
    def place(self) -> str:
        return SessionPart(self.session_id, self.number).place

    @property
    def sampler_id(self) -> str:
        return f"{self.session_id}:sample:{self.number}"


class TinkerRecords:
    """The records of one tenant. Another tenant's are not found."""

    def __init__(self, store: ObjectStore, quotas: Quotas, tenant: str) -> None:
        self._store = store
        self._quotas = quotas
        self._tenant = tenant
        self._root = paths.tinker_records(tenant)

    # Writing. Their bytes count. Raise QuotaExceeded.

    async def add(self, record: TinkerRecord) -> bool:
        """Put a record, unless there is one at its place."""
        return await self._put(record, only_new=True)

    async def put(self, record: TinkerRecord) -> None:
        await self._put(record, only_new=False)

    async def _put(self, record: TinkerRecord, *, only_new: bool) -> bool:
        data = record.model_dump_json().encode()
        return await self._quotas.put_record(self._tenant, self._key(record), data, only_new=only_new)

    async def claim(self, checkpoint: CheckpointRecord, overwrite: bool) -> None:
        """Give a checkpoint its name. Raises Conflict if another one has it, and InvalidInput for a name of none."""
        if not re.fullmatch(CHECKPOINT_NAME, checkpoint.name):
            raise InvalidInput("at most 128 letters, digits, dots, dashes, underscores and =", "path")
        if overwrite:
            await self.put(checkpoint)
            return
        if await self.add(checkpoint):
            return
        before = await asyncio.to_thread(self.find, CheckpointRecord, checkpoint.place)
        if before.command == checkpoint.command:
            return
        if before.is_there:
            raise Conflict(f"there is a checkpoint {checkpoint.path}: save under another name, or overwrite it")
        await self.put(checkpoint)

    # Reading and deleting. Blocking.

    def delete(self, record: TinkerRecord) -> None:
        self._store.delete(self._key(record))

    def _key(self, record: TinkerRecord) -> str:
        return f"{self._root}{record.folder}/{record.place}"

    def find(self, kind: type[R], place: str) -> R:
        """Return the record at a place. Raises NotFound."""
        return kind.model_validate_json(self._store.get_bytes(f"{self._root}{kind.folder}/{place}"))

    def places(self, kind: type[TinkerRecord], below: str = "") -> list[str]:
        """List the places of records, or of those below a place, in order."""
        prefix = f"{self._root}{kind.folder}/"
        return [info.key.removeprefix(prefix) for info in self._store.list(f"{prefix}{below}")]

    def all(self, kind: type[R], below: str = "") -> list[R]:
        return [self.find(kind, place) for place in self.places(kind, below)]

    # By what clients call them.

    def session(self, session_id: str) -> SessionRecord:
        """Find a client's session. Raises NotFound."""
        if re.fullmatch(_SESSION, session_id):
            with suppress(NotFound):
                return self.find(SessionRecord, session_id)
        raise NotFound(f"there is no session {session_id[:120]}")

    def model(self, model_id: str) -> ModelRecord:
        """Find a model. Raises NotFound."""
        with suppress(NotFound):
            return self.find(ModelRecord, SessionPart.of_model(model_id).place)
        raise NotFound(f"there is no model {model_id[:120]}")

    def sampler(self, sampler_id: str) -> SamplerRecord:
        """Find a sampling session. Raises NotFound."""
        with suppress(NotFound):
            return self.find(SamplerRecord, SessionPart.of_sampler(sampler_id).place)
        raise NotFound(f"there is no sampling session {sampler_id[:120]}")

    def checkpoint(self, path: str) -> CheckpointRecord:
        """Find a checkpoint by its path. Raises NotFound: it is not there, or no longer."""
        match = _PATH.fullmatch(path)
        if match and re.fullmatch(CHECKPOINT_NAME, match["name"]):
            with suppress(NotFound):
                place = f"{SessionPart.of_model(match['model']).place}/{match['kind']}/{match['name']}"
                found = self.find(CheckpointRecord, place)
                if found.is_there:
                    return found
        raise NotFound(f"there is no checkpoint {path[:300]}")

    def checkpoints(self, below: str = "") -> list[CheckpointRecord]:
        """List the checkpoints of a model, or of all, in order."""
        return [each for each in self.all(CheckpointRecord, below) if each.is_there]


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


class SaveWeights(OfModel):
    seq_id: Seq
    path: str | None = Field(default=None, max_length=4096)
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(OfModel):
    seq_id: Seq
    path: str | None = Field(default=None, max_length=4096)
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None


class SaveExternal(OfModel):
    seq_id: Seq
    path: str = Field(max_length=4096)
    ttl_seconds: int | None = None
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

    def check(self, records_nothing: bool = False) -> None:
        """Refuse fields that ask for something no sampler here returns. Raises InvalidInput.

        `records_nothing`: stable_reinforce has a substitute, which needs no record; the client's session said that.
        """
        if self.prompt_alt_tokens_k:
            raise InvalidInput("samplers here draw no tokens within the prompt: give 0", "prompt_alt_tokens_k")
        if self.target_prompt_logprobs is not None:
            raise InvalidInput("samplers here score the prompt's own tokens alone", "target_prompt_logprobs")
        if self.record_stability_info and not records_nothing:
            raise InvalidInput(
                "nothing of the kind is recorded here: stable_reinforce is not served", "record_stability_info"
            )
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

T = TypeVar("T")
_RESULT_S = 20.0
"""How long a request waits for a checkpoint that is still being saved."""


FutureKind = Literal["create", "passes", "optim", "save", "sampler", "load"]
_LONGEST = 4096


@dataclass(frozen=True)
class TrainingFuture:
    """A pending command of a model's session, and what its answer needs in addition to the command's result.

    `detail`: of `passes` the loss as it was asked for; of `save` the checkpoint's path; of `sampler` the sampling
    session's id; of `load` the path.
    """

    model_id: str
    command: int
    kind: FutureKind
    detail: str = ""

    @property
    def request_id(self) -> str:
        detail = urlsafe_b64encode(self.detail.encode()).decode()
        return f"{self.model_id}|{self.command}|{self.kind}|{detail}"

    @classmethod
    def parse(cls, request_id: str) -> Self:
        """Raises NotFound if it is not such an id."""
        missing = NotFound(f"there is no request {request_id[:120]}")
        parts = request_id.split("|")
        if len(parts) != 4 or len(request_id) > _LONGEST:
            raise missing
        model_id, command, kind, detail = parts
        if kind not in get_args(FutureKind) or not (command.isascii() and command.isdigit() and len(command) <= 8):
            raise missing
        try:
            return cls(model_id, int(command), kind, urlsafe_b64decode(detail).decode())  # type: ignore[arg-type]
        except (Base64Error, ValueError):
            raise missing from None


STABLE_REINFORCE = "stable_reinforce"


def loss_detail(loss_fn: str, config: Mapping[str, float | str], asked: str) -> str:
    """`asked`: the name that its client gave the loss."""
    return json.dumps([loss_fn, dict(config), asked], separators=(",", ":"))


def loss_of_detail(detail: str) -> tuple[str, dict[str, float | str], str]:
    """Return the loss that is computed, its settings, and the name that was asked for.

    Raises NotFound if `loss_detail` has not made it.
    """
    try:
        loss_fn, config, asked = json.loads(detail)
        if isinstance(loss_fn, str) and isinstance(config, dict) and asked in (loss_fn, STABLE_REINFORCE):
            return loss_fn, config, asked
    except (ValueError, RecursionError):
        pass
    raise NotFound("there is no such request")


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

    async def read(self, find: Callable[..., T], *arguments: Any) -> T:
        """Call a method of `records` on a thread."""
        return await asyncio.to_thread(find, *arguments)

    async def model(self, model_id: str) -> ModelRecord:
        return await self.read(self.records.model, model_id)

    def uri_of(self, base_model: str) -> str:
        """Return the URI of a base model that clients name, in the form that runs use."""
        return one_form(self.settings.models.get(base_model, base_model))

    def check_same(self, base_model: str | None, of_checkpoint: str) -> None:
        """Raise InvalidInput for a base model that is another one than a checkpoint's."""
        if base_model is not None and self.uri_of(base_model) != self.uri_of(of_checkpoint):
            raise InvalidInput(f"the checkpoint is of {of_checkpoint}", "base_model")

    def check_uri(self, uri: str) -> None:
        """Raise InvalidInput if the tenant may not read a model's URI. Blocking."""
        self.backend.access.check(self.tenant, NamedModel(model=uri))

    # Commands.

    async def command(
        self, model: ModelRecord, seq_id: int, asked: Asked | Skip | bytes, kind: FutureKind, detail: str = ""
    ) -> dict[str, Any]:
        """Have a model's session do a command, and answer with its future."""
        number = seq_id + model.before
        await self.backend.sessions.accept(self.tenant, model.run_id, number, asked)
        future = TrainingFuture(model.model_id, number, kind, detail)
        return {"request_id": future.request_id, "model_id": model.model_id}

    @asynccontextmanager
    async def numbered(self, model: ModelRecord, seq_id: int) -> AsyncIterator[None]:
        """Pass over the number of a request that is refused, since the model's next request has the next number."""
        try:
            yield
        except (InvalidInput, NotFound, Conflict) as error:
            if not isinstance(error, QueueFull):
                await self.skip_number(model, seq_id)
            raise

    async def skip_number(self, model: ModelRecord, seq_id: int) -> None:
        with suppress(LongshoreError):  # the number is taken, or the session has ended
            number = seq_id + model.before
            await self.backend.sessions.accept(self.tenant, model.run_id, number, Skip())

    async def outcome(self, model: ModelRecord, command: int, wait_s: float) -> CommandView:
        return await self.backend.sessions.outcome(self.tenant, model.run_id, command, wait_s)

    # Checkpoints.

    async def saved(self, checkpoint: CheckpointRecord) -> tuple[ModelRecord, CommandResult]:
        """Wait until a checkpoint is saved, and return the result. Raises NotFound: it failed, or takes too long."""
        model = await self.model(checkpoint.model_id)
        view = await self.outcome(model, checkpoint.command, _RESULT_S)
        if view.result is None or view.result.step is None:
            reason = view.message or (view.result and view.result.problem and view.result.problem.message)
            raise NotFound(f"{checkpoint.path} is not saved: {reason or 'it is still being done'}")
        return model, view.result

    async def state_of(self, path: str) -> tuple[ModelRecord, str]:
        """Return the model of a checkpoint, and the state's name in our sessions. Raises NotFound."""
        model, result = await self.saved(await self.read(self.records.checkpoint, path))
        return model, f"{model.run_id}:step-{result.step}"


async def _gateway(backend: Backed, asking: Asking) -> Gateway:
    return Gateway(backend, asking, TinkerRecords(backend.store, backend.quotas, asking.tenant))


AtGateway = Annotated[Gateway, Depends(_gateway)]
