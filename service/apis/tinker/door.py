"""The parts of the service that Tinker's operations share, for one request's tenant."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends

from service.accounts.principals import Asking, Principal
from service.apis.tinker.futures import FutureKind, TrainingFuture
from service.apis.tinker.records import CheckpointRecord, ModelRecord, TinkerRecords
from service.backend import Backed, Backend
from service.errors import Conflict, QueueFull
from service.runs.sessions import CommandView
from shared.contract import Frozen
from shared.errors import InvalidInput, LongshoreError, NotFound
from shared.jobs.commands import Asked, CommandResult, Skip
from shared.settings import TinkerSettings

T = TypeVar("T")
_RESULT_S = 20.0
"""How long a request waits for a checkpoint that is still being saved."""


class NamedModel(Frozen):
    """A base model by its URI, to be checked."""

    model: str


@dataclass(frozen=True)
class Door:
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
        """Return where a base model is, by the name that clients give it."""
        return self.settings.models.get(base_model, base_model)

    def check_uri(self, uri: str) -> None:
        """Raise InvalidInput if the tenant may not read a model's URI. Blocking."""
        self.backend.access.check(self.tenant, NamedModel(model=uri))

    # Commands.

    async def command(
        self, model: ModelRecord, seq_id: int, asked: Asked | Skip, kind: FutureKind, detail: str = ""
    ) -> dict[str, Any]:
        """Have a model's session do a command, and answer with its future."""
        number = seq_id + model.before
        await self.backend.training_sessions.accept(self.tenant, model.run_id, number, asked)
        future = TrainingFuture(model.model_id, number, kind, detail)
        return {"request_id": future.request_id, "model_id": model.model_id}

    @asynccontextmanager
    async def numbered(self, model: ModelRecord, seq_id: int) -> AsyncIterator[None]:
        """Pass over the number of a request that is refused, since the model's next request has the next number."""
        try:
            yield
        except (InvalidInput, NotFound, Conflict) as error:
            if not isinstance(error, QueueFull):
                await self.pass_over(model, seq_id)
            raise

    async def pass_over(self, model: ModelRecord, seq_id: int) -> None:
        with suppress(LongshoreError):  # the number is taken, or the session has ended
            number = seq_id + model.before
            await self.backend.training_sessions.accept(self.tenant, model.run_id, number, Skip())

    async def outcome(self, model: ModelRecord, command: int, wait_s: float) -> CommandView:
        return await self.backend.training_sessions.outcome(self.tenant, model.run_id, command, wait_s)

    # Checkpoints.

    async def saved(self, checkpoint: CheckpointRecord) -> tuple[ModelRecord, CommandResult]:
        """Return what saving a checkpoint came to, when it has. Raises NotFound: it failed, or takes too long."""
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


async def _door(backend: Backed, asking: Asking) -> Door:
    return Door(backend, asking, TinkerRecords(backend.store, asking.tenant))


AtDoor = Annotated[Door, Depends(_door)]
