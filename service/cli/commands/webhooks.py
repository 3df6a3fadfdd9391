"""`longshore webhook`: URLs that are notified of runs."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.exits import USAGE, Stop
from service.cli.output.render import ago, print_table, say, seconds_of

if TYPE_CHECKING:
    from service.cli.client import CliClient

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Its id, as `longshore webhook ls` shows it.")]
app = group("webhook", help="Notify a URL of runs.")
_COLUMNS = ("webhook", "url", "events", "")


@command(app)
def create(
    client: "CliClient",
    url: Annotated[str, typer.Argument(help="https://host/path; requests to it are signed.")],
    event: Annotated[
        list[str] | None, typer.Option(help="Event to send, such as run.failed; may be repeated. All if absent.")
    ] = None,
) -> CommandAnswer:
    """Create a webhook. Its secret, which the receiver needs to check signatures, is shown only once."""
    made = client.ask("POST", "/webhooks", json={"url": url, "events": event or []})
    return CommandAnswer(made, partial(_print_secret, made["id"], made["secret"]))


@command(app)
def update(
    client: "CliClient",
    webhook_id: WebhookId,
    url: Annotated[str | None, typer.Option(help="Another URL; pending deliveries go there too.")] = None,
    event: Annotated[
        list[str] | None, typer.Option(help="Event to send, replacing the previous ones; may be repeated.")
    ] = None,
    all_events: Annotated[bool, typer.Option("--all-events", help="Send all events.")] = False,
    enabled: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Whether events are sent.", show_default=False)
    ] = None,
) -> CommandAnswer:
    """Change a webhook. What is not given stays, and so does its secret."""
    if event and all_events:
        raise Stop("--event and --all-events exclude each other", USAGE)
    events = [] if all_events else event or None
    asked = {"url": url, "events": events, "enabled": enabled}
    change = {name: value for name, value in asked.items() if value is not None}
    if not change:
        raise Stop("name what to change: --url, --event, --all-events, --enable or --disable", USAGE)
    changed = client.ask("PATCH", f"/webhooks/{webhook_id}", json=change)
    return CommandAnswer(changed, partial(print_table, _COLUMNS, [_row(changed)]))


@command(app)
def rotate(
    client: "CliClient",
    webhook_id: WebhookId,
    overlap: Annotated[
        str, typer.Option(help="How long the old secret signs together with the new one, 7d at most. 0s: not at all.")
    ] = "24h",
) -> CommandAnswer:
    """Rotate the secret of a webhook. The new one is shown only once."""
    body = {"overlap_s": seconds_of(overlap, "--overlap")}
    made = client.ask("POST", f"/webhooks/{webhook_id}/rotate", json=body)
    return CommandAnswer(made, partial(_print_secret, made["secret"]))


@command(app)
def ls(client: "CliClient") -> CommandAnswer:
    """List webhooks."""
    found = client.ask("GET", "/webhooks")
    return CommandAnswer(found, partial(print_table, _COLUMNS, map(_row, found)))


@command(app)
def rm(client: "CliClient", webhook_id: WebhookId) -> CommandAnswer:
    """Remove a webhook, its secret and its deliveries."""
    return CommandAnswer(client.ask("DELETE", f"/webhooks/{webhook_id}"), partial(say, f"{webhook_id} is removed"))


@command(app)
def ping(client: "CliClient", webhook_id: WebhookId) -> CommandAnswer:
    """Send it a `ping`; `longshore webhook deliveries` shows the answer."""
    sent = client.ask("POST", f"/webhooks/{webhook_id}/ping")
    return CommandAnswer(sent, partial(print, sent["notice_id"]))


@command(app)
def deliveries(client: "CliClient", webhook_id: WebhookId) -> CommandAnswer:
    """List deliveries and their answers, newest first."""
    found = client.ask("GET", f"/webhooks/{webhook_id}/deliveries")
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
    return CommandAnswer(found, partial(print_table, ("message", "type", "run", "state", "answers", "made"), rows))


def _print_secret(*lines: str) -> None:
    print(*lines, sep="\n")
    say("keep the secret: it is not shown again")


def _row(webhook: dict[str, Any]) -> tuple[str, str, str, str]:
    state = "" if webhook["enabled"] else "disabled"
    return webhook["id"], webhook["url"], ", ".join(webhook["events"]) or "all", state
