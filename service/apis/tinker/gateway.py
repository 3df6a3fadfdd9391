"""Common parts of Tinker's operations: the service's parts for one request's tenant, and ids of pending requests.

The ids contain everything needed to find the result, so that a restarted service needs no state.
"""

import asyncio
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from fastapi import Depends

from longshore.commands import Asked, CommandResult
from longshore.fields import Frozen
from service.accounts.principals import Asking, Principal
from service.apis.tinker.records import CheckpointRecord, ModelRecord, TinkerRecords
from service.backend import Backed, Backend
from service.errors import Conflict, QueueFull
from service.inference.named_models import one_form
from service.runs.sessions import CommandView
from shared.errors import InvalidInput, LongshoreError, NotFound
from shared.jobs.commands import Skip
from shared.settings import TinkerSettings

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
