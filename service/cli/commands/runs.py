"""Commands that list, show, follow and change runs."""

import time
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli.completion import run_ids
from service.cli.connection import Json, connect, wants_json
from service.cli.exits import INTERRUPTED, USAGE, Stop
from service.cli.output.durations import span
from service.cli.output.render import (
    ago,
    coloured,
    doing,
    outcome,
    plain,
    print_details,
    print_json,
    print_table,
    say,
    summary,
)
from service.cli.output.step_table import print_step_metrics, print_steps, step_line

if TYPE_CHECKING:
    from service.cli.client import Client
    from service.runs.views import RunView

_LONGEST_REASON = 72
_GOALS = {"sft": "loss", "dpo": "loss", "rl": "reward_mean"}  # what a list shows of how runs do
State = Literal["running", "paused", "succeeded", "failed", "cancelled"]
RunId = Annotated[
    str,
    typer.Argument(metavar="RUN", help="The run's id, as `longshore ls` shows it.", autocompletion=run_ids),
]
Timeout = Annotated[float | None, typer.Option(help="Seconds until exit code 101.")]
app = typer.Typer(rich_markup_mode=None)
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")]


@app.command()
def ls(
    context: typer.Context,
    state: Annotated[State | None, typer.Option(help="Runs in this state only.")] = None,
    kind: Annotated[Literal["sft", "dpo", "rl"] | None, typer.Option(help="Runs of this kind only.")] = None,
    words: Annotated[str | None, typer.Option("--search", help="Words in the id, the name or the model.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    with connect(context) as client:
        page = client.runs(limit, state, kind=kind, words=words)
        places = client.places() if not wants_json(context, as_json) and any(map(_waits, page.runs)) else {}
    if wants_json(context, as_json):
        print_json([outcome(view) for view in page.runs])
        return
    if not page.runs:
        say("there is none; longshore submit starts one")
        return
    from service.runs.views import seconds_left

    now = time.time()
    rows = (
        (
            view.run_id,
            coloured(view.state),
            plain(_why(view, places.get(view.run_id))),
            f"{view.step}/{view.num_steps or '?'}",
            "" if (left_s := seconds_left(view, now)) is None else span(left_s),
            f"{view.metrics[goal]:.4g}" if (goal := _GOALS[view.kind]) in view.metrics else "",
            plain(view.run.name),
            ago(view.created_at),
        )
        for view in page.runs
    )
    print_table(("run", "state", "phase or error", "step", "left", "loss/reward", "name", "submitted"), rows)
    if page.has_more:
        say(f"there are more: --limit shows up to 200, {limit} now")


@app.command()
def get(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Show a run."""
    with connect(context) as client:
        view = client.run(run_id)
        as_json = wants_json(context, as_json)
        place = client.places().get(run_id) if _waits(view) and not as_json else None
    if as_json:
        print_json(outcome(view) | {"run": view.run.model_dump(mode="json")})
    else:
        print(summary(view, place))
        print_details(view)


@app.command()
def watch(context: typer.Context, run_id: RunId, timeout: Timeout = None, as_json: Json = False) -> None:
    """Follow a run to its end. Ctrl-C leaves; the run goes on."""
    from service.cli.commands.submit import finish

    with connect(context, patience_s=20) as client:
        finish(client, client.run(run_id), wait=True, timeout_s=timeout, as_json=wants_json(context, as_json))


@app.command()
def logs(context: typer.Context, run_id: RunId, follow: Follow = False) -> None:
    """Print what happened in a run, in readable lines."""
    from service.runs.views import last_lines, log_line

    with connect(context, patience_s=20 if follow else 2) as client:
        try:
            for event in client.events_to_the_end(run_id, None, follow):
                print(log_line(event), flush=True)
            for line in last_lines(client.run(run_id)):
                print(line)
        except KeyboardInterrupt:
            _left(f"longshore logs -f {run_id}")


@app.command()
def events(
    context: typer.Context,
    run_id: RunId,
    follow: Follow = False,
    after: Annotated[str | None, typer.Option(help="Only events after this cursor.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: events are JSON anyway.")] = True,
) -> None:
    """Print the workers' events, one JSON object a line."""
    with connect(context, patience_s=20 if follow else 2) as client:
        try:
            for event in client.events_to_the_end(run_id, after, follow):
                print(event.model_dump_json(), flush=True)
                after = event.cursor
        except KeyboardInterrupt:
            _left(f"longshore events -f {run_id}" + (f" --after {after}" if after else ""))


@app.command()
def steps(context: typer.Context, run_id: RunId, follow: Follow = False, as_json: Json = False) -> None:
    """List the train steps of an RL run: rewards, published versions, errors.

    With --follow, print each step as it ends; with --json, everything that is known; with both, an object a line.
    """
    as_json = wants_json(context, as_json)
    with connect(context, patience_s=20 if follow else 2) as client:
        if follow:
            _follow_steps(client, run_id, as_json)
            return
        found = list(client.steps(run_id))
    if as_json:
        print_json([step.model_dump(mode="json") for step in found])
    elif found:
        print_steps(found)
    else:
        say(f"no step of {run_id} has ended yet")


def _follow_steps(client: "Client", run_id: str, as_json: bool) -> None:
    try:
        for step in client.steps_to_the_end(run_id):
            print(step.model_dump_json() if as_json else step_line(step), flush=True)
    except KeyboardInterrupt:
        _left(f"longshore steps -f {run_id}")


@app.command()
def metrics(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Show the main metrics of every step and evaluation; with --json, all."""
    from service.runs.views import Metrics, brief, looked_for

    with connect(context) as client:
        found = client.get(f"/runs/{run_id}/metrics", Metrics)
    if wants_json(context, as_json):
        print_json(found.model_dump(mode="json"))
        return
    names = looked_for({name for row in found.steps for name in row.metrics})
    print_table(
        ("step", *names),
        ((str(row.step), *(f"{row.metrics[n]:.5g}" if n in row.metrics else "" for n in names)) for row in found.steps),
    )
    for row in found.evaluations:
        print(f"evaluated after step {row.step}: {brief(row.metrics)}")
    if found.train_steps:
        print_step_metrics(found.train_steps)


@app.command()
def checkpoints(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """List the checkpoints in the store."""
    from shared.runs.status import CheckpointRef

    with connect(context) as client:
        found = client.get(f"/runs/{run_id}/checkpoints", tuple[CheckpointRef, ...])
    if wants_json(context, as_json):
        print_json([c.model_dump(mode="json") for c in found])
    else:
        print_table(("step", "written by", "uri"), ((str(c.step), c.fence.label, c.artifact.uri) for c in found))


@app.command()
def cancel(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Cancel a run: at its next step, with a checkpoint, or at once if it does not train."""
    with connect(context) as client:
        view = client.change(run_id, "cancel")
    if wants_json(context, as_json):
        print_json(outcome(view))
    else:
        say(f"{_ending(view, 'is cancelled', 'ends')}; `longshore resume {run_id}` goes on from there")


@app.command()
def pause(context: typer.Context, run_id: RunId, as_json: Json = False) -> None:
    """Pause a run at its next step, with a checkpoint. A paused run does not count in a quota."""
    with connect(context) as client:
        view = client.change(run_id, "pause")
    if wants_json(context, as_json):
        print_json(outcome(view))
    else:
        say(f"{_ending(view, 'is paused', 'pauses')}; `longshore resume {run_id}` goes on from there")


@app.command()
def resume(
    context: typer.Context, run_id: RunId, wait: Wait = False, timeout: Timeout = None, as_json: Json = False
) -> None:
    """Resume a paused, cancelled or failed run from its last checkpoint."""
    from service.cli.commands.submit import finish

    with connect(context) as client:
        view = client.change(run_id, "resume")
        finish(client, view, wait=wait, timeout_s=timeout, as_json=wants_json(context, as_json))


@app.command()
def retry(
    context: typer.Context, run_id: RunId, wait: Wait = False, timeout: Timeout = None, as_json: Json = False
) -> None:
    """Submit the request of a failed or cancelled run again, as a new run. Prints its id."""
    from service.cli.commands.submit import finish

    with connect(context) as client:
        view = client.change(run_id, "retry")
        finish(client, view, wait=wait, timeout_s=timeout, as_json=wants_json(context, as_json))


@app.command()
def download(
    context: typer.Context,
    run_id: RunId,
    into: Annotated[Path | None, typer.Option(help="The folder to make; ./RUN if absent.")] = None,
    as_json: Json = False,
) -> None:
    """Download what a run published, and check the hash of every file."""
    from service.cli.unpack import fetch

    target = into or Path(run_id)
    if target.exists():
        raise Stop(f"{target} is there already", USAGE, "name another folder with --into")
    with connect(context) as client:
        manifest = fetch(client, run_id, target)
    if wants_json(context, as_json):
        print_json({"run_id": run_id, "folder": str(target.resolve()), "files": manifest.model_dump()["files"]})
    else:
        print(target)


def _waits(view: "RunView") -> bool:
    from service.runs.views import IN_QUEUE

    return view.state == "running" and view.phase in IN_QUEUE


def _why(view: "RunView", place: int | None) -> str:
    """Return the phase of a run, or the first words of why it failed."""
    if view.state == "running":
        return doing(view, place)
    return shorten(view.problem.message, _LONGEST_REASON, placeholder=" …") if view.problem else ""


def _ending(view: "RunView", done: str, doing: str) -> str:
    """Say when a run ends that was asked to: while it trains, at its next step; else at once."""
    if view.state != "running":
        return f"{view.run_id} {done}"
    when = "at its next step, with a checkpoint" if view.phase == "training" else "at once: no step runs"
    return f"{view.run_id} {doing} {when}"


def _left(command: str) -> None:
    say(f"\nthe run goes on; attach again with: {command}")
    raise typer.Exit(INTERRUPTED)
