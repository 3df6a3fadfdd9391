"""`longshore schedule`: start runs at set times."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.connection import Json, connect, wants_json
from service.cli.exits import USAGE, Stop
from service.cli.output.durations import seconds_of
from service.cli.output.render import ago, print_json, print_table, say

if TYPE_CHECKING:
    from service.automation.schedule_views import ScheduleView
    from shared.runs.requests import Run

Overlap = Literal["skip", "buffer_one", "buffer_all", "allow_all", "cancel_other"]
ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="As `longshore schedule ls` shows it.")]
app = typer.Typer(name="schedule", help="Start runs at set times.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The name of the schedule.")],
    command: Annotated[list[str], typer.Argument(help="`-- submit sft …`: what to start, with all of its options.")],
    cron: Annotated[str | None, typer.Option(help='As "0 2 * * *": minute, hour, day, month, weekday.')] = None,
    every: Annotated[str | None, typer.Option(help="Instead of --cron: 90m, 6h or 1d.")] = None,
    timezone: Annotated[str, typer.Option(help="Time zone of --cron, such as Europe/Berlin.")] = "UTC",
    overlap: Annotated[Overlap, typer.Option(help="When the run before has not ended.")] = "skip",
    catch_up: Annotated[str, typer.Option(help="Skip a time that was missed by more, as in an outage.")] = "10m",
    continues: Annotated[
        bool, typer.Option("--continue", help="Start from the last published version of the run's --name.")
    ] = False,
    even_unchanged: Annotated[
        bool, typer.Option("--even-unchanged", help="Also if the data has not changed since the last run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a schedule. After `--` comes a `longshore submit` command, checked now and started later.

    Data that has not changed since the schedule's last run is not trained on again: `show` says so.
    """
    if (cron is None) == (every is None):
        raise Stop("give exactly one of --cron and --every", USAGE)
    run = _run_of(context, command)
    fields = {
        "name": name,
        "run": run,
        "cron": cron,
        "every_s": None if every is None else seconds_of(every, "--every"),
        "timezone": timezone,
        "overlap": overlap,
        "catch_up_s": seconds_of(catch_up, "--catch-up"),
        "continues": continues,
        "even_unchanged": even_unchanged,
    }
    from service.automation.schedule_views import ScheduleView

    body = _checked(fields).model_dump()
    with connect(context, patience_s=20) as client:
        view = client.post("/schedules", ScheduleView, is_repeatable=True, json=body)
    _print(context, view, as_json)


@app.command()
def ls(context: typer.Context, as_json: Json = False) -> None:
    """List schedules."""
    from service.automation.schedule_views import ScheduleView

    with connect(context) as client:
        found = client.get("/schedules", tuple[ScheduleView, ...])
    if wants_json(context, as_json):
        print_json([view.model_dump(mode="json") for view in found])
        return
    rows = (
        (view.scheduled.name, view.scheduled.run.kind, _when(view), _next(view), f"{view.num_actions}")
        for view in found
    )
    print_table(("schedule", "run", "when", "next", "triggered"), rows)


@app.command()
def show(context: typer.Context, name: ScheduleName, as_json: Json = False) -> None:
    """Show a schedule, its next time, and its last runs."""
    from service.automation.schedule_views import ScheduleView

    with connect(context) as client:
        view = client.get(f"/schedules/{name}", ScheduleView)
    _print(context, view, as_json)


@app.command()
def pause(
    context: typer.Context,
    name: ScheduleName,
    note: Annotated[str | None, typer.Option(help="The reason, shown by `show`.")] = None,
    as_json: Json = False,
) -> None:
    """Pause a schedule: it starts no runs until it is resumed."""
    _tell(context, name, "pause", as_json, params={"note": note} if note else {})


@app.command()
def resume(context: typer.Context, name: ScheduleName, as_json: Json = False) -> None:
    """Resume a paused schedule."""
    _tell(context, name, "resume", as_json)


@app.command()
def trigger(context: typer.Context, name: ScheduleName, as_json: Json = False) -> None:
    """Trigger a schedule now, once. Its rules about overlap and unchanged data hold."""
    _tell(context, name, "trigger", as_json)


@app.command()
def backfill(
    context: typer.Context,
    name: ScheduleName,
    begin: Annotated[datetime, typer.Option("--from", help="In UTC, as 2026-01-31T02:00:00.")],
    end: Annotated[datetime, typer.Option("--to", help="In UTC; at most 31 days later.")],
    overlap: Annotated[Overlap, typer.Option(help="Between these runs.")] = "buffer_all",
    as_json: Json = False,
) -> None:
    """Start the runs of a period in the past."""
    span = {
        "begin": begin.replace(tzinfo=UTC).timestamp(),
        "end": end.replace(tzinfo=UTC).timestamp(),
        "overlap": overlap,
    }
    _tell(context, name, "backfill", as_json, json=span)


@app.command()
def rm(context: typer.Context, name: ScheduleName, as_json: Json = False) -> None:
    """Delete a schedule. Its runs stay, also one that is running."""
    with connect(context) as client:
        view = client.ask("DELETE", f"/schedules/{name}")
    if wants_json(context, as_json):
        print_json(view)
    else:
        say(f"schedule {name} is removed; its runs stay")


def _run_of(context: typer.Context, command: list[str]) -> "Run":
    """Return the run that a submit command would start. Its options are checked, its files uploaded."""
    from service.cli.commands.submit import run_of

    if command[0] != "submit":
        raise Stop("after -- goes what to start: -- submit sft, dpo or rl, and their options", USAGE)
    return run_of(context, command[1:], "longshore submit")


def _checked(fields: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from shared.runs.schedules import ScheduledRun

    try:
        return ScheduledRun.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        rule = first["msg"].removeprefix("Value error, ")
        raise Stop(f"{name}: {rule}" if name else rule, USAGE, "--help lists the options") from None


def _tell(context: typer.Context, name: str, verb: str, as_json: bool, **options: Any) -> None:
    from service.automation.schedule_views import ScheduleView

    with connect(context) as client:
        view = client.post(f"/schedules/{name}/{verb}", ScheduleView, **options)
    _print(context, view, as_json)


def _print(context: typer.Context, view: "ScheduleView", as_json: bool) -> None:
    if wants_json(context, as_json):
        print_json(view.model_dump(mode="json"))
        return
    scheduled = view.scheduled
    print(f"{scheduled.name}: {scheduled.run.kind} {_when(view)}, overlap {scheduled.overlap}; next {_next(view)}")
    if view.num_overlapped or view.num_missed:
        print(f"skipped: {view.num_overlapped} while a run was running, {view.num_missed} missed by an outage")
    rows = ((action.run_id or "", action.state, ago(action.at), action.reason or "") for action in view.actions)
    if view.actions:
        print_table(("run", "action", "when", "why"), rows)


def _when(view: "ScheduleView") -> str:
    scheduled = view.scheduled
    if scheduled.cron is None:
        return f"every {scheduled.every_s} s"
    return f"{scheduled.cron} {scheduled.timezone}"


def _next(view: "ScheduleView") -> str:
    if view.paused:
        return "paused" + (f" ({view.note})" if view.note not in (None, "paused") else "")
    if not view.next_times:
        return "never"
    return datetime.fromtimestamp(view.next_times[0], UTC).isoformat(timespec="minutes").replace("+00:00", "Z")
