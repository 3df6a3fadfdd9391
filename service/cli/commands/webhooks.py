"""`longshore webhook`: URLs that are notified of runs."""

from typing import Annotated, Any

import typer

from service.cli.connection import Json, connect, wants_json
from service.cli.exits import USAGE, Stop
from service.cli.output.durations import seconds_of
from service.cli.output.render import ago, print_json, print_table, say

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Its id, as `longshore webhook ls` shows it.")]
app = typer.Typer(name="webhook", help="Notify a URL of runs.", no_args_is_help=True, rich_markup_mode=None)
_COLUMNS = ("webhook", "url", "events", "")


@app.command()
def create(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="https://host/path: what is sent there is signed.")],
    event: Annotated[
        list[str] | None, typer.Option(help="Event to send, such as run.failed; may be repeated. All if absent.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a webhook. Its secret, by which the receiver checks signatures, is shown only once."""
    with connect(context) as client:
        made = client.ask("POST", "/webhooks", json={"url": url, "events": event or []})
    if wants_json(context, as_json):
        print_json(made)
    else:
        print(made["id"])
        print(made["secret"])
        say("keep the secret: it is not shown again")


@app.command()
def update(
    context: typer.Context,
    webhook_id: WebhookId,
    url: Annotated[str | None, typer.Option(help="Another URL; pending deliveries go there too.")] = None,
    event: Annotated[
        list[str] | None, typer.Option(help="Event to send, instead of those before; may be repeated.")
    ] = None,
    all_events: Annotated[bool, typer.Option("--all-events", help="Send all events.")] = False,
    enabled: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Whether events are sent.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a webhook. What is not given stays, and so does its secret."""
    if event and all_events:
        raise Stop("--event and --all-events exclude each other", USAGE)
    events = [] if all_events else event or None
    asked = {"url": url, "events": events, "enabled": enabled}
    change = {name: value for name, value in asked.items() if value is not None}
    if not change:
        raise Stop("give what is to change: --url, --event, --all-events, --enable or --disable", USAGE)
    with connect(context) as client:
        changed = client.ask("PATCH", f"/webhooks/{webhook_id}", json=change)
    if wants_json(context, as_json):
        print_json(changed)
    else:
        print_table(_COLUMNS, [_row(changed)])


@app.command()
def rotate(
    context: typer.Context,
    webhook_id: WebhookId,
    overlap: Annotated[
        str, typer.Option(help="How long the old secret signs beside the new one, 7d at most. 0s: it is out at once.")
    ] = "24h",
    as_json: Json = False,
) -> None:
    """Rotate the secret of a webhook. The new one is shown only once."""
    overlap_s = seconds_of(overlap, "--overlap")
    with connect(context) as client:
        made = client.ask("POST", f"/webhooks/{webhook_id}/rotate", json={"overlap_s": overlap_s})
    if wants_json(context, as_json):
        print_json(made)
    else:
        print(made["secret"])
        say("keep the secret: it is not shown again")


@app.command()
def ls(context: typer.Context, as_json: Json = False) -> None:
    """List webhooks."""
    with connect(context) as client:
        found = client.ask("GET", "/webhooks")
    if wants_json(context, as_json):
        print_json(found)
        return
    print_table(_COLUMNS, map(_row, found))


@app.command()
def rm(context: typer.Context, webhook_id: WebhookId, as_json: Json = False) -> None:
    """Remove a webhook, its secret and its deliveries."""
    with connect(context) as client:
        removed = client.ask("DELETE", f"/webhooks/{webhook_id}")
    if wants_json(context, as_json):
        print_json(removed)
    else:
        say(f"{webhook_id} is removed")


@app.command()
def ping(context: typer.Context, webhook_id: WebhookId, as_json: Json = False) -> None:
    """Send it a `ping`; `longshore webhook deliveries` says what it answered."""
    with connect(context) as client:
        sent = client.ask("POST", f"/webhooks/{webhook_id}/ping")
    if wants_json(context, as_json):
        print_json(sent)
    else:
        print(sent["notice_id"])


@app.command()
def deliveries(context: typer.Context, webhook_id: WebhookId, as_json: Json = False) -> None:
    """List deliveries and their answers, newest first."""
    with connect(context) as client:
        found = client.ask("GET", f"/webhooks/{webhook_id}/deliveries")
    if wants_json(context, as_json):
        print_json(found)
        return
    rows = (
        (
            d["notice_id"],
            d["type"],
            d["run_id"] or "",
            d["state"],
            ", ".join(str(a["status"] or a["problem"]) for a in d["attempts"]),
            ago(d["created_at"]),
        )
        for d in found
    )
    print_table(("message", "type", "run", "state", "answers", "made"), rows)


def _row(webhook: dict[str, Any]) -> tuple[str, str, str, str]:
    state = "" if webhook["enabled"] else "disabled"
    return webhook["id"], webhook["url"], ", ".join(webhook["events"]) or "all", state
