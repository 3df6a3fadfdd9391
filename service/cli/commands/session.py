"""`longshore session`: sessions that clients train command by command."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.command import Answer, command, group
from service.cli.commands import runs
from service.cli.commands.runs import RunId, State
from service.cli.output.render import say
from service.cli.output.runs import outcome

if TYPE_CHECKING:
    from service.cli.client import Client

app = group("session", help="Sessions, which a client trains command by command (longshore.client opens them).")


@command(app)
def ls(
    client: "Client",
    state: Annotated[State | None, typer.Option(help="Sessions in this state only.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
) -> Answer | None:
    """List sessions, newest first."""
    return runs.ls(client, state, "session", None, limit)


@command(app)
def get(client: "Client", run_id: RunId) -> Answer | None:
    """Show a session: its state, its last step's metrics, what it has published."""
    return runs.get(client, run_id)


@command(app)
def close(client: "Client", run_id: RunId) -> Answer:
    """Close a session: it ends after the commands that were sent, and its state stays."""
    return Answer(outcome(client.close_session(run_id)), partial(say, f"{run_id} ends when its commands are done"))
