"""`whoami`, `usage`, `audit`, `keys` and `tenants`: identity, quotas and use."""

import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from service.cli.commands.sign_in import who_in_words
from service.cli.connection import Json, connect, wants_json
from service.cli.output.durations import seconds_of, span
from service.cli.output.render import ago, plain, print_json, print_table, say, size

_KEYS_EXAMPLES = """\b
Examples:
  longshore keys create --title "nightly job" --scope read --scope write --expires 90d
  longshore keys revoke key-0123456789ab
"""
keys = typer.Typer(
    help="Create, list and revoke API keys of your tenant.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=_KEYS_EXAMPLES,
)
tenants = typer.Typer(
    help="Manage the tenants of this installation, and their quotas.", no_args_is_help=True, rich_markup_mode=None
)
app = typer.Typer(rich_markup_mode=None)
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Lower case letters, digits and dashes.")]
Title = Annotated[str, typer.Option(help="A description.")]
ConcurrentRuns = Annotated[int | None, typer.Option(min=0, help="Runs that have not ended.")]
GpuHours = Annotated[float | None, typer.Option(min=0, help="GPU hours of the last 30 days.")]
StoredBytes = Annotated[int | None, typer.Option(min=0, help="Bytes of uploads and published artifacts.")]


class ScopeName(StrEnum):  # Typer takes no list of a Literal
    read = "read"
    write = "write"
    inference = "inference"
    admin = "admin"


@app.command()
def whoami(context: typer.Context, as_json: Json = False) -> None:
    """Show the service that commands talk to, your key, tenant and scopes."""
    with connect(context) as client:
        who = client.ask("GET", "/whoami")
        url = client.api_url
    if wants_json(context, as_json):
        print_json({"api_url": url, **who})
    else:
        print(f"{who_in_words(who)} at {url}")


@app.command()
def usage(context: typer.Context, as_json: Json = False) -> None:
    """Show what your tenant uses, and its quotas."""
    with connect(context) as client:
        _print_usage(context, client.ask("GET", "/usage"), as_json)


@app.command()
def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    everybody: Annotated[
        bool, typer.Option("--everybody", help="Of all tenants; for admins of the first tenant.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the audit log: what was changed or refused, newest first. Needs the scope admin."""
    with connect(context) as client:
        page = client.ask("GET", "/audit", params={"limit": limit, "everybody": everybody})
    if wants_json(context, as_json):
        print_json(page["entries"])
        return
    names = ("tenant", "key_id", "method", "path", "target", "status", "address")
    rows = ((ago(e["time"]), *(plain(str(e[name] or "")) for name in names)) for e in page["entries"])
    print_table(("when", "tenant", "key", "", "path", "changed", "answer", "from"), rows)


@keys.command()
def create(
    context: typer.Context,
    title: Title = "",
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(help="May be repeated; read, write and inference if absent."),
    ] = None,
    expires: Annotated[str | None, typer.Option(help="In 12h or 90d; never if absent.")] = None,
    as_json: Json = False,
) -> None:
    """Create a key. It is shown only once."""
    body: dict[str, Any] = {"title": title}
    if scope:
        body["scopes"] = [each.value for each in scope]
    if expires is not None:
        body["expires_at"] = time.time() + seconds_of(expires, "--expires")
    with connect(context) as client:
        made = client.ask("POST", "/keys", json=body)
    _print_key(context, made, as_json)


@keys.command(name="ls")
def ls_keys(context: typer.Context, as_json: Json = False) -> None:
    """List keys, newest first: of each its beginning only."""
    with connect(context) as client:
        found = client.ask("GET", "/keys")
    if wants_json(context, as_json):
        print_json(found)
        return
    rows = (
        (
            k["key_id"],
            plain(k["title"]),
            k["prefix"],
            ", ".join(k["scopes"]),
            ago(k["created_at"]),
            ago(k["last_used_at"]) if k["last_used_at"] else "never",
            _validity(k),
        )
        for k in found
    )
    print_table(("key", "title", "prefix", "scopes", "created", "last used", ""), rows)


@keys.command()
def revoke(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Its id, as `longshore keys ls` shows it.")],
    as_json: Json = False,
) -> None:
    """Revoke a key for good."""
    with connect(context) as client:
        ended = client.ask("DELETE", f"/keys/{key_id}")
    if wants_json(context, as_json):
        print_json(ended)
    else:
        say(f"{key_id} ({ended['prefix']}) is revoked")


@tenants.command(name="create")
def create_tenant(
    context: typer.Context,
    tenant: TenantName,
    title: Title = "",
    concurrent_runs: ConcurrentRuns = None,
    gpu_hours: GpuHours = None,
    stored_bytes: StoredBytes = None,
    as_json: Json = False,
) -> None:
    """Create a tenant and its first key, an admin's, which is shown only once."""
    body = {"tenant": tenant, "title": title, "quotas": _quotas(concurrent_runs, gpu_hours, stored_bytes)}
    with connect(context) as client:
        made = client.ask("POST", "/tenants", json=body)
    if warning := made.get("warning"):
        say(f"warning: {warning}")
    if wants_json(context, as_json):
        print_json(made)
    else:
        _print_key(context, made["key"], as_json)


@tenants.command(name="ls")
def ls_tenants(context: typer.Context, as_json: Json = False) -> None:
    """List tenants, with their own quotas."""
    with connect(context) as client:
        found = client.ask("GET", "/tenants")
    if wants_json(context, as_json):
        print_json(found)
        return
    names = ("concurrent_runs", "gpu_hours", "stored_bytes")
    rows = ((t["tenant"], plain(t["title"]), *(_in_units(n, t["quotas"][n], "-") for n in names)) for t in found)
    print_table(("tenant", "title", "quota: runs", "quota: GPU hours", "quota: stored"), rows)
    say("-: the installation's own quota holds; `longshore tenants usage NAME` shows it")


@tenants.command(name="usage")
def usage_of(context: typer.Context, tenant: TenantName, as_json: Json = False) -> None:
    """Show what a tenant uses, and its quotas."""
    with connect(context) as client:
        _print_usage(context, client.ask("GET", f"/tenants/{tenant}/usage"), as_json)


@tenants.command()
def quotas(
    context: typer.Context,
    tenant: TenantName,
    concurrent_runs: ConcurrentRuns = None,
    gpu_hours: GpuHours = None,
    stored_bytes: StoredBytes = None,
    as_json: Json = False,
) -> None:
    """Replace the quotas of a tenant. Those that are not given fall back to the installation's."""
    with connect(context) as client:
        body = _quotas(concurrent_runs, gpu_hours, stored_bytes)
        client.ask("PUT", f"/tenants/{tenant}/quotas", json=body)
        _print_usage(context, client.ask("GET", f"/tenants/{tenant}/usage"), as_json)


def _quotas(concurrent_runs: int | None, gpu_hours: float | None, stored_bytes: int | None) -> dict[str, float]:
    given = {"concurrent_runs": concurrent_runs, "gpu_hours": gpu_hours, "stored_bytes": stored_bytes}
    return {name: value for name, value in given.items() if value is not None}


def _print_usage(context: typer.Context, found: dict[str, Any], as_json: bool) -> None:
    if wants_json(context, as_json):
        print_json(found)
        return
    rows = (
        (words, _in_units(name, found[name]), _in_units(name, found["quotas"][name], "no limit"))
        for words, name in (
            ("runs that go on", "concurrent_runs"),
            ("GPU hours of 30 days", "gpu_hours"),
            ("stored", "stored_bytes"),
        )
    )
    print_table((found["tenant"], "used", "quota"), rows)


def _in_units(name: str, value: float | None, nothing: str = "") -> str:
    match name:
        case _ if value is None:
            return nothing
        case "stored_bytes":
            return size(value)
        case "gpu_hours":
            return f"{value:.2f}"
        case _:
            return f"{value:,.0f}"


def _print_key(context: typer.Context, made: dict[str, Any], as_json: bool) -> None:
    if wants_json(context, as_json):
        print_json(made)
        return
    print(made["key"])
    scopes = ", ".join(made["scopes"])
    say(f"{made['key_id']} of tenant {made['tenant']} ({scopes}), {_validity(made) or 'never expires'}")
    say("keep the key: it is not shown again; `longshore login` takes it")


def _validity(key: dict[str, Any]) -> str:
    now = time.time()
    if key["revoked_at"]:
        return f"revoked {ago(key['revoked_at'])}"
    if not key["expires_at"]:
        return ""
    return f"expires in {span(key['expires_at'] - now)}" if key["expires_at"] > now else "expired"
