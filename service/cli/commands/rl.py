"""`longshore step` and `finish`: hand train steps to an RL run, and end it."""

import secrets
import time
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.commands.runs import RunId, Timeout
from service.cli.commands.submit import dataset_uri
from service.cli.connection import Json, connect, wants_json
from service.cli.exits import FAILED, NOT_FINISHED, USAGE, Stop
from service.cli.output.render import outcome, print_json, say

if TYPE_CHECKING:
    from shared.runs.status import StepStatus

app = typer.Typer(rich_markup_mode=None)
_LONG_POLL_S = 10.0


@app.command()
def step(
    context: typer.Context,
    run_id: RunId,
    groups: Annotated[str, typer.Argument(help="Trajectory groups as JSONL: a file (uploaded), or a URI.")],
    key: Annotated[
        str | None, typer.Option(help="The same key trains once, however often it is sent; else each call is a step.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the step's end.")] = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Train one file of trajectory groups, and publish the next version of the policy.

    Exit codes: 0 done (or queued, without --wait), 2 usage, 100 failed, 101 not finished within --timeout.
    """
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    end = None if timeout is None else time.monotonic() + timeout
    with connect(context, patience_s=20) as client:
        uri = dataset_uri(client, groups, "groups")
        key = key or f"cli-{secrets.token_hex(16)}"
        found = client.train_step(run_id, key, uri)
        while wait and not found.is_final and (end is None or time.monotonic() < end):
            left = _LONG_POLL_S if end is None else min(_LONG_POLL_S, max(0.0, end - time.monotonic()))
            found = client.step(run_id, found.step, left)
            if found.key != key:  # it was resumed meanwhile, and the number is another's
                raise Stop("the run ended before this step, and was resumed: send it again", FAILED)
    if wants_json(context, as_json):
        print_json(found.model_dump(mode="json"))
    else:
        print(_words(found))
    if found.state == "failed":
        raise typer.Exit(FAILED)
    if wait and not found.is_final:
        raise typer.Exit(NOT_FINISHED)


@app.command(name="finish")
def finish_run(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """End an RL run after the steps that are queued."""
    with connect(context) as client:
        view = client.finish(run_id)
    if wants_json(context, as_json):
        print_json(outcome(view))
    else:
        say(f"{run_id} ends when its steps are done")


def _words(step: "StepStatus") -> str:
    from service.runs.views import dropped

    words = f"step {step.step}: {step.state}"
    if step.state == "done":
        words += f", policy version {step.policy_version}, published: {step.adapter}"
    if step.problem is not None:
        words += f": {step.problem.message}"
    if lost := dropped(step.metrics):
        words += f"; {lost}"
    return words
