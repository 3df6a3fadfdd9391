"""`longshore schedule`, `sweep` and `webhook`."""

import json
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longshore
from service.cli import command as cli
from service.cli.run_options import given, options_of, request_fields, run_command
from service.cli.run_output import best, print_sweep, progress

if TYPE_CHECKING:
    from longshore import Client
    from longshore.automation import ScheduleView, SweepView
    from longshore.runs import Run


# --- `longshore webhook`: URLs that are notified of runs ---

WebhookId = Annotated[
    str, typer.Argument(metavar="WEBHOOK", help="The webhook's id, as `longshore webhook ls` shows it.")
]
_COLUMNS = {"webhook": "id", "url": "url", "events": "events", "enabled": "enabled"}
webhook = cli.group("webhook", help="Notify a URL of runs.")


@cli.command(webhook, "create")
def create_webhook(
    client: "Client",
    url: Annotated[str, typer.Argument(help="https://host/path; requests to it are signed.")],
    event: Annotated[
        list[str] | None, typer.Option(help="Event to send, such as run.failed; may be repeated. All if absent.")
    ] = None,
) -> cli.CommandAnswer:
    """Create a webhook. Its secret, which the receiver needs to check signatures, is shown only once."""
    made = client.webhooks.create(cli.checked(longshore.WebhookChoice, {"url": url, "events": event or []}))
    return cli.CommandAnswer(made, partial(_print_secret, made.id, made.secret))


@cli.command(webhook)
def rotate(
    client: "Client",
    webhook_id: WebhookId,
    overlap: Annotated[
        str, typer.Option(help="How long the old secret signs together with the new one, at most 7d. 0s: not at all.")
    ] = "24h",
) -> cli.CommandAnswer:
    """Rotate the secret of a webhook. The new one is shown only once."""
    made = client.webhooks.rotate(
        webhook_id, cli.checked(longshore.Rotation, {"overlap_s": cli.seconds_of(overlap, "--overlap")})
    )
    return cli.CommandAnswer(made, partial(_print_secret, made.secret))


@cli.command(webhook, "ls")
def ls_webhook(client: "Client") -> cli.CommandAnswer:
    """List webhooks."""
    found = client.webhooks.list()
    return cli.CommandAnswer(found, partial(cli.print_items, found, _COLUMNS))


@cli.command(webhook)
def deliveries(client: "Client", webhook_id: WebhookId) -> cli.CommandAnswer:
    """List deliveries and their answers, newest first."""
    found = client.webhooks.deliveries(webhook_id)
    rows = (
        (d.notice_id, d.type, d.run_id or "", d.state, ", ".join(str(a.status or a.problem) for a in d.attempts))
        for d in found
    )
    return cli.CommandAnswer(found, partial(cli.print_table, ("message", "type", "run", "state", "answers"), rows))


cli.by_id(
    *(webhook, "rm", WebhookId, lambda client, id: client.webhooks.delete(id)),
    lambda id, _: cli.say(f"{id} is removed"),
    "Remove a webhook, its secret and its deliveries.",
)
cli.by_id(
    *(webhook, "ping", WebhookId, lambda client, id: client.webhooks.ping(id)),
    lambda _, sent: print(sent.notice_id),
    "Send it a `ping`; `longshore webhook deliveries` shows the answer.",
)


def _print_secret(*lines: str) -> None:
    print(*lines, sep="\n")
    cli.say("keep the secret: it is not shown again")


# --- `longshore schedule`: start runs at set times. `longshore sweep`: runs that differ in a few fields ---

_EXAMPLES = """\b
Examples:
  longshore sweep create rates -p learning_rate=1e-5..1e-3:log -p trainable.rank=4,8,16 --trials 16 \\
      -- submit sft -m org/model -d train.jsonl --eval-dataset held_out.jsonl --steps 200
  longshore sweep create grid --sampler grid -p learning_rate=1e-4,3e-4 -- submit sft …
"""
# The fields of their requests that are options by themselves.
_OF_SCHEDULES = ("cron", "timezone", "overlap", "even_unchanged")
_OF_SWEEPS = ("sampler", "trials", "parallel", "metric", "direction")
ScheduleName = Annotated[
    str, typer.Argument(metavar="NAME", help="The schedule's name, as `longshore schedule ls` shows it.")
]
_POLL_S = 1.0
SweepId = Annotated[str, typer.Argument(metavar="SWEEP", help="The sweep's id, as `longshore sweep ls` shows it.")]
app = typer.Typer(rich_markup_mode=None)
schedule = cli.group(help="Start runs at set times.")
sweep = cli.group(help="Start runs that differ in a few fields, and publish the best.", epilog=_EXAMPLES)
app.add_typer(schedule, name="schedule")
app.add_typer(sweep, name="sweep")
app.add_typer(webhook, name="webhook")


@run_command(
    schedule,
    "schedule",
    "create",
    "Create a schedule. After `--` comes a `longshore submit` command, checked now and started later. Data that has "
    "not changed since the schedule's last run is not trained on again; `show` reports that.",
    _OF_SCHEDULES,
)
@partial(cli.answering, patience_s=20)
def create(
    context: typer.Context,
    client: "Client",
    name: Annotated[str, typer.Argument(help="The name of the schedule.")],
    command: Annotated[list[str], typer.Argument(help="`-- submit sft …`: what to start, with all of its options.")],
    every: Annotated[str | None, typer.Option(help="Interval, instead of --cron: 90m, 6h or 1d.")] = None,
    catch_up: Annotated[
        str, typer.Option(help="Skip a time that was missed by more than this, as in an outage.")
    ] = "10m",
    continues: Annotated[
        bool, typer.Option("--continue", help="Start from the last published version of the run's --name.")
    ] = False,
) -> cli.CommandAnswer:
    fields = request_fields(options_of(longshore.ScheduledRun, _OF_SCHEDULES), given(context))
    if ("cron" in fields) == (every is not None):
        raise cli.Stop("give exactly one of --cron and --every", cli.USAGE)
    fields |= {"name": name, "run": _run_of(context, command), "catch_up_s": cli.seconds_of(catch_up, "--catch-up")}
    fields["continues"] = continues
    fields["every_s"] = None if every is None else cli.seconds_of(every, "--every")
    view = client.schedules.create(cli.checked(longshore.ScheduledRun, fields))
    return cli.CommandAnswer(view, partial(_print, name, view))


@cli.command(schedule)
def ls(client: "Client") -> cli.CommandAnswer:
    """List schedules."""
    found = client.schedules.list()
    rows = (
        (view.scheduled.name, view.scheduled.run.kind, _when(view), _next(view), f"{view.num_actions}")
        for view in found
    )
    return cli.CommandAnswer(found, partial(cli.print_table, ("schedule", "run", "when", "next", "triggered"), rows))


@cli.command(schedule)
def pause(
    client: "Client",
    name: ScheduleName,
    note: Annotated[str | None, typer.Option(help="The reason, shown by `show`.")] = None,
) -> cli.CommandAnswer:
    """Pause a schedule: it starts no runs until it is resumed."""
    view = client.schedules.pause(name, note)
    return cli.CommandAnswer(view, partial(_print, name, view))


def _run_of(context: typer.Context, command: list[str], kinds: str = "sft, dpo or rl") -> "Run":
    """Return the run of the `submit` command after `--`."""
    from service.cli.runs import run_of

    if command[0] != "submit":
        raise cli.Stop(f"after -- give the run to start: -- submit KIND ({kinds}), with its options", cli.USAGE)
    return run_of(context, command[1:], "longshore submit")


def _print(_: str, view: "ScheduleView") -> None:
    scheduled = view.scheduled
    print(f"{scheduled.name}: {scheduled.run.kind} {_when(view)}, overlap {scheduled.overlap}; next {_next(view)}")
    if view.num_overlapped or view.num_missed:
        print(f"skipped: {view.num_overlapped} while a run was running, {view.num_missed} missed by an outage")
    rows = ((action.run_id or "", action.state, cli.ago(action.at), action.reason or "") for action in view.actions)
    if view.actions:
        cli.print_table(("run", "action", "when", "why"), rows)


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


for _name, _ask, _words in (
    ("show", lambda client, name: client.schedules.get(name), "Show a schedule, its next time, and its last runs."),
    ("resume", lambda client, name: client.schedules.resume(name), "Resume a paused schedule."),
    ("trigger", lambda client, name: client.schedules.trigger(name), "Trigger a schedule now, once, by its own rules."),
):
    cli.by_id(schedule, _name, ScheduleName, _ask, _print, _words)
cli.by_id(
    *(schedule, "rm", ScheduleName, lambda client, name: client.schedules.delete(name)),
    lambda name, _: cli.say(f"schedule {name} is removed; its runs stay"),
    "Delete a schedule. Its runs stay, also one that is running.",
)


@run_command(
    sweep,
    "sweep",
    "create",
    "Create a sweep. After `--` comes a `longshore submit` command without --name. All values are checked before "
    "anything starts.",
    _OF_SWEEPS,
)
@partial(cli.answering, patience_s=20)
def create_sweep(
    context: typer.Context,
    client: "Client",
    name: Annotated[str, typer.Argument(help="The name to publish the best trial under.")],
    command: Annotated[list[str], typer.Argument(help="`-- submit sft …`: the run, with all of its options.")],
    parameter: Annotated[
        list[str],
        typer.Option(
            "--parameter", "-p", help="PATH=a,b,c or PATH=low..high[:log][:int]; PATH=[…] for choices in JSON."
        ),
    ],
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    halving: Annotated[
        str | None, typer.Option(help="FIRST_STEP or FIRST_STEP/REDUCTION: successive halving, from that step on.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the sweep has ended.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="With --wait: seconds until the cli.command ends with exit code 101.")
    ] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="Calls with the same key return the same sweep.")] = None,
) -> cli.CommandAnswer:
    first, _, reduction = (halving or "").partition("/")
    fields = request_fields(options_of(longshore.Sweep, _OF_SWEEPS), given(context)) | {
        "name": name,
        "run": _run_of(context, command, "sft, dpo, distill, reward or rl"),
        "parameters": dict(_parameter(text) for text in parameter),
        "seed": seed,
        "halving": {"first_step": first} | ({"reduction": reduction} if reduction else {}) if halving else None,
    }
    view = client.sweeps.create(cli.checked(longshore.Sweep, fields), idempotency_key)
    if not wait:
        return cli.CommandAnswer(view, partial(print, view.sweep_id))
    cli.say(f"sweep {view.sweep_id}")
    return _at_its_end(client, view, timeout)


@cli.command(sweep, "ls")
def list_sweeps(client: "Client") -> cli.CommandAnswer:
    """List sweeps, newest first."""
    found = client.sweeps.list()
    rows = (
        (view.sweep_id, view.sweep.name, view.state, progress(view), best(view), cli.ago(view.created_at))
        for view in found
    )
    return cli.CommandAnswer(
        found, partial(cli.print_table, ("sweep", "name", "state", "trials", "best", "created"), rows)
    )


for _name, _ask, _words in (
    ("show", lambda client, id: client.sweeps.get(id), "Show a sweep and its trials."),
    ("cancel", lambda client, id: client.sweeps.cancel(id), "Cancel a sweep, and those of its runs that go on."),
):
    cli.by_id(sweep, _name, SweepId, _ask, lambda _, view: print_sweep(view), _words)


def _at_its_end(client: "Client", view: "SweepView", timeout_s: float | None) -> cli.CommandAnswer:
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while view.state == "running" and (until is None or time.monotonic() < until):
        time.sleep(_POLL_S)
        view = client.sweeps.get(view.sweep_id)
    code = cli.NOT_FINISHED if view.state == "running" else cli.OF_STATE[view.state]
    return cli.CommandAnswer(view, partial(print_sweep, view), code)


def _parameter(text: str) -> tuple[str, dict[str, Any]]:
    """Parse PATH=VALUES."""
    path, equals, values = text.partition("=")
    if not equals or not values:
        raise cli.Stop(f"--parameter: {text!r} is not of the form PATH=a,b,c or PATH=low..high", cli.USAGE)
    if values.startswith("["):
        return path, {"choices": _json(values)}
    low, dots, rest = values.partition("..")
    if dots and "://" not in values and "/" not in values:
        high, *flags = rest.split(":")
        if set(flags) - {"log", "int"}:
            raise cli.Stop(f"--parameter: after low..high only :log and :int are allowed, not {rest}", cli.USAGE)
        return path, {"min": low, "max": high, "log": "log" in flags, "integer": "int" in flags}
    return path, {"choices": [_json(each) for each in values.split(",")]}


def _json(text: str) -> Any:
    """Return a JSON value; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
