"""The native API's sessions: a client trains a slot command by command."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from pydantic import RootModel

from longshore.commands import Asked, Forward, ForwardBackward
from longshore.training import SessionRun
from service.accounts.principals import Asking, reads_or_writes
from service.apis.json_bodies import JsonBody, JsonRoute
from service.backend import Backed, IdempotencyKey
from service.runs.sessions import CommandView
from service.runs.views.run_view import RunPage, RunView
from shared.jobs.commands import stored_form
from shared.runs.requests import RunId
from shared.runs.status import State

router = APIRouter(route_class=JsonRoute, dependencies=[Depends(reads_or_writes)])
Number = Annotated[
    int, Path(ge=1, le=99_999_999, description="commands are done in the order of their numbers, from 1")
]
Wait = Annotated[float, Query(ge=0, le=60, description="how long to wait for the result")]


class SentCommand(RootModel[Asked]):
    """A command, by its `kind`."""

    def packed(self) -> bytes | None:
        return stored_form(self.root) if isinstance(self.root, Forward | ForwardBackward) else None

    @classmethod
    def of_packed(cls, data: bytes) -> "SentCommand":
        return cls.model_construct(data)  # type: ignore[arg-type]  # the command's file, which is not parsed here


@router.post("/sessions", status_code=201)
async def open_session(
    session: JsonBody[SessionRun], backend: Backed, asking: Asking, idempotency_key: IdempotencyKey = None
) -> RunView:
    """Open a session. The same Idempotency-Key gives the same session. It is a run: /runs has its events and end."""
    named = await asyncio.to_thread(backend.names.resolved, asking.tenant, session)
    return await backend.runs.submit(asking, named, idempotency_key, asked=session)


@router.get("/sessions")
async def list_sessions(
    backend: Backed,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[RunId | None, Query(description="the `next` of the page before")] = None,
    state: State | None = None,
) -> RunPage:
    """Sessions, newest first, as they stood a second ago at most."""
    return await backend.runs.page(asking.tenant, limit=limit, after=after, state=state, kind="session")


@router.put("/sessions/{run_id}/commands/{number}", status_code=202)
async def send_command(
    run_id: RunId, number: Number, command: JsonBody[SentCommand], backend: Backed, asking: Asking, wait_s: Wait = 0
) -> CommandView:
    """Send a command, which is durable when this answers, and done once however often it is sent."""
    return await backend.sessions.send(asking.tenant, run_id, number, command.root, wait_s)


@router.get("/sessions/{run_id}/commands/{number}")
async def get_command(run_id: RunId, number: Number, backend: Backed, asking: Asking, wait_s: Wait = 0) -> CommandView:
    """A command's state, or its result."""
    return await backend.sessions.show(asking.tenant, run_id, number, wait_s)


@router.post("/sessions/{run_id}/close", status_code=202)
async def close_session(run_id: RunId, backend: Backed, asking: Asking) -> RunView:
    """Take no more commands: the session ends after those that wait, and its state stays. 409 when it has ended."""
    return await backend.sessions.close(asking.tenant, run_id)
