"""Records of Tinker's sessions, models, checkpoints and samplers: small objects in the store, per tenant.

A model is one of our sessions, and a request to train it is one of that session's commands. A record refers to the
session and the command, which have the result.
"""

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, JsonValue

from longshore.fields import Frozen, pattern
from service.accounts.tenants import Quotas
from service.errors import Conflict
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import RunId
from shared.storage import paths
from shared.storage.store import ObjectStore

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
