"""`longshore step` and `finish`: hand train steps to an RL run, and end it."""

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.command import Answer, command
from service.cli.commands.runs import RunId, Timeout
from service.cli.commands.submit import dataset_uri
from service.cli.exits import DONE, FAILED, NOT_FINISHED, USAGE, Stop
from service.cli.output.render import say
from service.cli.output.runs import outcome

if TYPE_CHECKING:
    from service.cli.client import Client
    from shared.runs.status import StepStatus

app = typer.Typer(rich_markup_mode=None)
_LONG_POLL_S = 10.0


@command(app, patience_s=20)
def step(
    client: "Client",
    run_id: RunId,
    groups: Annotated[str, typer.Argument(help="Trajectory groups as JSONL: a file (uploaded), or a URI.")],
    key: Annotated[
        str | None, typer.Option(help="The same key trains once, however often it is sent; else each call is a step.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the step's end.")] = False,
    timeout: Timeout = None,
) -> Answer:
    """Train one file of trajectory groups, and publish the next version of the policy.

    Exit codes: 0 done (or queued, without --wait), 2 usage, 100 failed, 101 not finished within --timeout.
    """
    if timeout is not None and not wait:
        raise Stop("--timeout goes with --wait", USAGE)
    end = None if timeout is None else time.monotonic() + timeout
    uri = dataset_uri(client, groups, "groups")
    key = key or f"cli-{secrets.token_hex(16)}"
    found = client.train_step(run_id, key, uri)
    while wait and not found.is_final and (end is None or time.monotonic() < end):
        left = _LONG_POLL_S if end is None else min(_LONG_POLL_S, max(0.0, end - time.monotonic()))
        found = client.step(run_id, found.step, left)
        if found.key != key:  # it was resumed meanwhile, and the number is another's
            raise Stop("the run ended before this step, and was resumed: send it again", FAILED)
    code = FAILED if found.state == "failed" else NOT_FINISHED if wait and not found.is_final else DONE
    return Answer(found, partial(print, _words(found)), code)


@command(app, "finish")
def finish_run(client: "Client", run_id: RunId) -> Answer:
    """End an RL run after the steps that are queued."""
    return Answer(outcome(client.change(run_id, "finish")), partial(say, f"{run_id} ends when its steps are done"))


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
