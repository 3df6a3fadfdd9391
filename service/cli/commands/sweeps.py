"""`longshore sweep`: runs that differ in a few fields, of which the best is published."""

import json
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.commands.schedules import checked, run_of_command
from service.cli.exits import DONE, NOT_FINISHED, OF_STATE, USAGE, Stop
from service.cli.output.render import ago, plain, print_table, say

if TYPE_CHECKING:
    from service.automation.sweep_views import SweepView, TrialView
    from service.cli.client import CliClient

_EXAMPLES = """\b
Examples:
  longshore sweep create rates -p learning_rate=1e-5..1e-3:log -p trainable.rank=4,8,16 --trials 16 \\
      -- submit sft -m org/model -d train.jsonl --eval-dataset held_out.jsonl --steps 200
  longshore sweep create grid --sampler grid -p learning_rate=1e-4,3e-4 -- submit sft …
"""
_POLL_S = 1.0
SweepName = Annotated[str, typer.Argument(metavar="SWEEP", help="The id that `longshore sweep ls` shows.")]
app = group("sweep", help="Start runs that differ in a few fields, and publish the best.", epilog=_EXAMPLES)


@command(app, patience_s=20)
def create(
    context: typer.Context,
    client: "CliClient",
    name: Annotated[str, typer.Argument(help="What the best trial is published as.")],
    command: Annotated[list[str], typer.Argument(help="`-- submit sft …`: the run, with all of its options.")],
    parameter: Annotated[
        list[str],
        typer.Option(
            "--parameter", "-p", help="PATH=a,b,c or PATH=low..high[:log][:int]; PATH=[…] for choices in JSON."
        ),
    ],
    sampler: Annotated[Literal["grid", "random", "tpe"], typer.Option(help="What chooses the values.")] = "tpe",
    trials: Annotated[int | None, typer.Option(help="How many; of a grid all combinations.")] = None,
    parallel: Annotated[int, typer.Option(help="Runs at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
    metric: Annotated[
        str | None, typer.Option(help="Held-out loss, or an rl run's held-out reward, if absent.")
    ] = None,
    direction: Annotated[Literal["minimize", "maximize"] | None, typer.Option(help="Of the metric.")] = None,
    halving: Annotated[
        str | None, typer.Option(help="FIRST_STEP or FIRST_STEP/REDUCTION: successive halving, from that step on.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the sweep has ended.")] = False,
    timeout: Annotated[float | None, typer.Option(help="With --wait: seconds until exit code 101.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key gives the same sweep.")] = None,
) -> CommandAnswer:
    """Create a sweep. After `--` comes a `longshore submit` command without --name.

    All values are checked before anything starts.
    """
    first, _, reduction = (halving or "").partition("/")
    fields: dict[str, Any] = {
        "name": name,
        "run": run_of_command(context, command, "sft, dpo, distill, reward or rl"),
        "parameters": dict(_parameter(text) for text in parameter),
        "sampler": sampler,
        "seed": seed,
        "trials": trials,
        "parallel": parallel,
        "metric": metric,
        "direction": direction,
        "halving": {"first_step": first} | ({"reduction": reduction} if reduction else {}) if halving else None,
    }
    from service.automation.sweep_views import SweepView
    from shared.automation.sweeps import Sweep

    unset = {"trainable"} - fields["run"].model_fields_set  # as `submit` leaves it out
    body = checked(Sweep, fields).model_dump(exclude={"run": unset})
    headers = {"idempotency-key": idempotency_key or f"cli-{secrets.token_hex(16)}"}
    view = client.post("/sweeps", SweepView, is_repeatable=True, json=body, headers=headers)
    if not wait:
        return CommandAnswer(view, partial(print, view.sweep_id))
    say(f"sweep {view.sweep_id}")
    return _at_its_end(client, view, timeout)


@command(app)
def ls(client: "CliClient") -> CommandAnswer:
    """List sweeps, newest first."""
    from service.automation.sweep_views import SweepView

    found = client.get("/sweeps", tuple[SweepView, ...])
    rows = (
        (view.sweep_id, view.sweep.name, view.state, _progress(view), _best(view), ago(view.created_at))
        for view in found
    )
    return CommandAnswer(found, partial(print_table, ("sweep", "name", "state", "trials", "best", "created"), rows))


@command(app)
def show(client: "CliClient", sweep: SweepName) -> CommandAnswer:
    """Show a sweep and its trials."""
    from service.automation.sweep_views import SweepView

    return _answer(client.get(f"/sweeps/{sweep}", SweepView))


@command(app)
def cancel(client: "CliClient", sweep: SweepName) -> CommandAnswer:
    """Cancel a sweep, and those of its runs that have not ended."""
    from service.automation.sweep_views import SweepView

    return _answer(client.post(f"/sweeps/{sweep}/cancel", SweepView))


def _at_its_end(client: "CliClient", view: "SweepView", timeout_s: float | None) -> CommandAnswer:
    from service.automation.sweep_views import SweepView

    until = None if timeout_s is None else time.monotonic() + timeout_s
    while view.state == "running" and (until is None or time.monotonic() < until):
        time.sleep(_POLL_S)
        view = client.get(f"/sweeps/{view.sweep_id}", SweepView)
    return _answer(view, NOT_FINISHED if view.state == "running" else OF_STATE[view.state])


def _parameter(text: str) -> tuple[str, dict[str, Any]]:
    """Parse PATH=VALUES."""
    path, equals, values = text.partition("=")
    if not equals or not values:
        raise Stop(f"--parameter: {text!r} is no PATH=a,b,c or PATH=low..high", USAGE)
    if values.startswith("["):
        return path, {"choices": _json(values)}
    low, dots, rest = values.partition("..")
    if dots and "://" not in values and "/" not in values:
        high, *flags = rest.split(":")
        if set(flags) - {"log", "int"}:
            raise Stop(f"--parameter: after low..high comes :log, :int or both, and not {rest}", USAGE)
        return path, {"min": low, "max": high, "log": "log" in flags, "integer": "int" in flags}
    return path, {"choices": [_json(each) for each in values.split(",")]}


def _json(text: str) -> Any:
    """Return a JSON value; what is none is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _answer(view: "SweepView", code: int = DONE) -> CommandAnswer:
    return CommandAnswer(view, partial(_print, view), code)


def _print(view: "SweepView") -> None:
    print(f"{view.sweep_id} ({view.sweep.name}): {view.state}, {_progress(view)} trials have ended")
    if view.problem:
        print(view.problem)
    paths = tuple(view.sweep.parameters)

    def row(trial: "TrialView") -> tuple[str, ...]:
        number = f"{trial.number}*" if trial.number == view.best else f"{trial.number}"
        values = (plain(json.dumps(trial.values.get(path))) for path in paths)
        return number, trial.state, _number(trial.value), f"{trial.step}", *values, trial.run_id

    print_table(("trial", "state", view.metric, "step", *paths, "run"), map(row, view.trials))
    if view.adapter:
        print(f"published: {view.sweep.name}:v{view.version} {view.adapter}")


def _progress(view: "SweepView") -> str:
    return f"{sum(trial.state not in ('running', 'paused') for trial in view.trials)} of {view.num_trials}"


def _best(view: "SweepView") -> str:
    return "" if view.best is None else f"{_number(view.trials[view.best].value)} (trial {view.best})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
