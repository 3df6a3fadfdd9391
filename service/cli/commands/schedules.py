"""`longshore schedule`: start runs at set times."""

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.exits import USAGE, Stop
from service.cli.output.render import ago, print_table, say, seconds_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from service.automation.schedule_views import ScheduleView
    from service.cli.client import CliClient
    from shared.runs.requests import Run

M = TypeVar("M", bound="BaseModel")
Overlap = Literal["skip", "buffer_one", "buffer_all", "allow_all", "cancel_other"]
ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="As `longshore schedule ls` shows it.")]
app = group("schedule", help="Start runs at set times.")


@command(app, patience_s=20)
def create(
    context: typer.Context,
    client: "CliClient",
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
) -> CommandAnswer:
    """Create a schedule. After `--` comes a `longshore submit` command, checked now and started later.

    Data that has not changed since the schedule's last run is not trained on again: `show` says so.
    """
    if (cron is None) == (every is None):
        raise Stop("give exactly one of --cron and --every", USAGE)
    fields = {
        "name": name,
        "run": run_of_command(context, command),
        "cron": cron,
        "every_s": None if every is None else seconds_of(every, "--every"),
        "timezone": timezone,
        "overlap": overlap,
        "catch_up_s": seconds_of(catch_up, "--catch-up"),
        "continues": continues,
        "even_unchanged": even_unchanged,
    }
    from service.automation.schedule_views import ScheduleView
    from shared.automation.schedules import ScheduledRun

    body = checked(ScheduledRun, fields).model_dump()
    return _answer(client.post("/schedules", ScheduleView, is_repeatable=True, json=body))


@command(app)
def ls(client: "CliClient") -> CommandAnswer:
    """List schedules."""
    from service.automation.schedule_views import ScheduleView

    found = client.get("/schedules", tuple[ScheduleView, ...])
    rows = (
        (view.scheduled.name, view.scheduled.run.kind, _when(view), _next(view), f"{view.num_actions}")
        for view in found
    )
    return CommandAnswer(found, partial(print_table, ("schedule", "run", "when", "next", "triggered"), rows))


@command(app)
def show(client: "CliClient", name: ScheduleName) -> CommandAnswer:
    """Show a schedule, its next time, and its last runs."""
    from service.automation.schedule_views import ScheduleView

    return _answer(client.get(f"/schedules/{name}", ScheduleView))


@command(app)
def pause(
    client: "CliClient",
    name: ScheduleName,
    note: Annotated[str | None, typer.Option(help="The reason, shown by `show`.")] = None,
) -> CommandAnswer:
    """Pause a schedule: it starts no runs until it is resumed."""
    return _tell(client, name, "pause", params={"note": note} if note else {})


@command(app)
def resume(client: "CliClient", name: ScheduleName) -> CommandAnswer:
    """Resume a paused schedule."""
    return _tell(client, name, "resume")


@command(app)
def trigger(client: "CliClient", name: ScheduleName) -> CommandAnswer:
    """Trigger a schedule now, once. Its rules about overlap and unchanged data hold."""
    return _tell(client, name, "trigger")


@command(app)
def backfill(
    client: "CliClient",
    name: ScheduleName,
    begin: Annotated[datetime, typer.Option("--from", help="In UTC, as 2026-01-31T02:00:00.")],
    end: Annotated[datetime, typer.Option("--to", help="In UTC; at most 31 days later.")],
    overlap: Annotated[Overlap, typer.Option(help="Between these runs.")] = "buffer_all",
) -> CommandAnswer:
    """Start the runs of a period in the past."""
    span = {
        "begin": begin.replace(tzinfo=UTC).timestamp(),
        "end": end.replace(tzinfo=UTC).timestamp(),
        "overlap": overlap,
    }
    return _tell(client, name, "backfill", json=span)


@command(app)
def rm(client: "CliClient", name: ScheduleName) -> CommandAnswer:
    """Delete a schedule. Its runs stay, also one that is running."""
    view = client.ask("DELETE", f"/schedules/{name}")
    return CommandAnswer(view, partial(say, f"schedule {name} is removed; its runs stay"))


def run_of_command(context: typer.Context, command: list[str], kinds: str = "sft, dpo or rl") -> "Run":
    """Return the run of the `submit` command that stands after `--`."""
    from service.cli.commands.submit import run_of

    if command[0] != "submit":
        raise Stop(f"after -- goes what to start: -- submit KIND ({kinds}), and its options", USAGE)
    return run_of(context, command[1:], "longshore submit")


def checked(model: type[M], fields: dict[str, Any]) -> M:
    """Validate a request. Raises Stop with the first rule that it breaks."""
    from pydantic import ValidationError

    from shared.field_rules import first_rule

    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise Stop(first_rule(error), USAGE, "--help lists the options") from None


def _tell(client: "CliClient", name: str, verb: str, **options: Any) -> CommandAnswer:
    from service.automation.schedule_views import ScheduleView

    return _answer(client.post(f"/schedules/{name}/{verb}", ScheduleView, **options))


def _answer(view: "ScheduleView") -> CommandAnswer:
    return CommandAnswer(view, partial(_print, view))


def _print(view: "ScheduleView") -> None:
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
