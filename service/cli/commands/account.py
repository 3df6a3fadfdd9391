"""`whoami`, `usage`, `audit`, `keys`, `tenants` and `gc`: identity, quotas and use."""

import time
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.commands.sign_in import who_in_words
from service.cli.exits import DONE, NOT_FINISHED, USAGE, Stop
from service.cli.output.render import ago, plain, print_table, say, seconds_of, size, span

if TYPE_CHECKING:
    from service.cli.client import CliClient

_KEYS_EXAMPLES = """\b
Examples:
  longshore keys create "nightly job" --scope read --scope write --expires 90d
  longshore keys revoke key-0123456789ab
"""
keys = group(help="Create, list and revoke API keys of your tenant.", epilog=_KEYS_EXAMPLES)
tenants = group(help="Manage the tenants of this installation, and their quotas.")
app = typer.Typer(rich_markup_mode=None)
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
_GC_ANSWERS_S = 30.0  # beyond the wait that was requested
_QUOTAS = ("concurrent_runs", "gpu_hours", "spending", "stored_bytes", "worker_sharing", "worker_weight")
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Lower case letters, digits and dashes.")]
Title = Annotated[str, typer.Option(help="A description.")]
ConcurrentRuns = Annotated[int | None, typer.Option(min=0, help="Runs that have not ended.")]
GpuHours = Annotated[float | None, typer.Option(min=0, help="GPU hours of the last 30 days.")]
Spending = Annotated[
    float | None, typer.Option(min=0, help="Cost of the runs of the last 30 days; at this limit runs are paused.")
]
StoredBytes = Annotated[int | None, typer.Option(min=0, help="Bytes of uploads and published artifacts.")]


class SharingName(StrEnum):
    all = "all"
    tenant = "tenant"
    none = "none"


Sharing = Annotated[SharingName | None, typer.Option(help="Tenants whose adapters may share a worker with its own.")]


Weight = Annotated[
    float | None, typer.Option(min=0.001, max=1000, help="Its weight in shared workers and queues; the default is 1.")
]


class ScopeName(StrEnum):  # Typer takes no list of a Literal
    read = "read"
    write = "write"
    inference = "inference"
    admin = "admin"


@command(app)
def whoami(client: "CliClient") -> CommandAnswer:
    """Show the service that commands talk to, your key, tenant and scopes."""
    who = client.ask("GET", "/whoami")
    return CommandAnswer({"api_url": client.api_url, **who}, partial(print, f"{who_in_words(who)} at {client.api_url}"))


@command(app)
def usage(client: "CliClient") -> CommandAnswer:
    """Show your tenant's usage and quotas."""
    return _usage(client.ask("GET", "/usage"))


@command(app)
def audit(
    client: "CliClient",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    everybody: Annotated[
        bool, typer.Option("--everybody", help="Of all tenants; for admins of the first tenant.")
    ] = False,
) -> CommandAnswer:
    """Show the audit log: changes and refusals, newest first. Needs the scope admin."""
    entries = client.ask("GET", "/audit", params={"limit": limit, "everybody": everybody})["entries"]
    names = ("tenant", "key_id", "method", "path", "target", "status", "address")
    rows = ((ago(e["time"]), *(plain(str(e[name] or "")) for name in names)) for e in entries)
    columns = ("when", "tenant", "key", "", "path", "changed", "answer", "from")
    return CommandAnswer(entries, partial(print_table, columns, rows))


@command(keys)
def create(
    client: "CliClient",
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Whose it is, or what for: its title in lists.")] = "",
    title: Annotated[str, typer.Option(help="The same as NAME.")] = "",
    scope: Annotated[
        list[ScopeName] | None, typer.Option(help="May be repeated; read, write and inference if absent.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="In 12h or 90d; never if absent.")] = None,
) -> CommandAnswer:
    """Create a key. It is shown only once."""
    if name and title:
        raise Stop("NAME and --title are the same: give one of them", USAGE)
    body: dict[str, Any] = {"title": name or title}
    if scope:
        body["scopes"] = [each.value for each in scope]
    if expires is not None:
        body["expires_at"] = time.time() + seconds_of(expires, "--expires")
    made = client.ask("POST", "/keys", json=body)
    return CommandAnswer(made, partial(_print_key, made))


@command(keys, "ls")
def ls_keys(client: "CliClient") -> CommandAnswer:
    """List keys, newest first: of each its beginning only."""
    found = client.ask("GET", "/keys")
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
    return CommandAnswer(
        found, partial(print_table, ("key", "title", "prefix", "scopes", "created", "last used", ""), rows)
    )


@command(keys)
def revoke(
    client: "CliClient",
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Its id, as `longshore keys ls` shows it.")],
) -> CommandAnswer:
    """Revoke a key for good."""
    ended = client.ask("DELETE", f"/keys/{key_id}")
    return CommandAnswer(ended, partial(say, f"{key_id} ({ended['prefix']}) is revoked"))


@command(tenants, "create")
def create_tenant(
    client: "CliClient",
    tenant: TenantName,
    title: Title = "",
    concurrent_runs: ConcurrentRuns = None,
    gpu_hours: GpuHours = None,
    spending: Spending = None,
    stored_bytes: StoredBytes = None,
    worker_sharing: Sharing = None,
    worker_weight: Weight = None,
) -> CommandAnswer:
    """Create a tenant and its first key, an admin's, which is shown only once."""
    quotas = _given(concurrent_runs, gpu_hours, spending, stored_bytes, worker_sharing, worker_weight)
    body = {"tenant": tenant, "title": title, "quotas": quotas}
    made = client.ask("POST", "/tenants", json=body)
    if warning := made.get("warning"):
        say(f"warning: {warning}")
    return CommandAnswer(made, partial(_print_key, made["key"]))


@command(tenants, "ls")
def ls_tenants(client: "CliClient") -> CommandAnswer:
    """List tenants, with their own quotas."""
    found = client.ask("GET", "/tenants")

    def show() -> None:
        names = ("concurrent_runs", "gpu_hours", "stored_bytes")
        rows = ((t["tenant"], plain(t["title"]), *(_in_units(n, t["quotas"][n], "-") for n in names)) for t in found)
        print_table(("tenant", "title", "quota: runs", "quota: GPU hours", "quota: stored"), rows)
        say("-: the installation's own quota holds; `longshore tenants usage NAME` shows it")

    return CommandAnswer(found, show)


@command(tenants, "usage")
def usage_of(client: "CliClient", tenant: TenantName) -> CommandAnswer:
    """Show a tenant's usage and quotas."""
    return _usage(client.ask("GET", f"/tenants/{tenant}/usage"))


@command(tenants)
def quotas(
    client: "CliClient",
    tenant: TenantName,
    concurrent_runs: ConcurrentRuns = None,
    gpu_hours: GpuHours = None,
    spending: Spending = None,
    stored_bytes: StoredBytes = None,
    worker_sharing: Sharing = None,
    worker_weight: Weight = None,
) -> CommandAnswer:
    """Replace the quotas of a tenant. Those that are not given fall back to the installation's."""
    body = _given(concurrent_runs, gpu_hours, spending, stored_bytes, worker_sharing, worker_weight)
    client.ask("PUT", f"/tenants/{tenant}/quotas", json=body)
    return _usage(client.ask("GET", f"/tenants/{tenant}/usage"))


@command(app)
def gc(
    client: "CliClient",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for its end.")] = 600,
) -> CommandAnswer:
    """Delete objects of all tenants that the installation's policies expire (operators only)."""
    params = {"dry_run": dry_run, "wait_s": wait}
    found = client.ask("POST", "/gc", params=params, timeout=wait + _GC_ANSWERS_S)
    return CommandAnswer(found, partial(_print_collected, found["report"]), DONE if found["report"] else NOT_FINISHED)


def _print_collected(report: dict[str, Any] | None) -> None:
    if report is None:
        say("the collection goes on; the same command joins it")
        return
    names = ("num_units", "num_objects")
    rows = [
        (row["what"], row["tenant"] or "-", *(f"{row[name]:,}" for name in names), size(row["num_bytes"]))
        for row in report["freed"]
    ]
    if rows:
        print_table(("would go" if report["is_dry"] else "deleted", "tenant", "units", "objects", "bytes"), rows)
    measured = ((t, what, size(n)) for t, parts in sorted(report["measured"].items()) for what, n in parts.items())
    print_table(("tenant", "stores, beside its files", "bytes"), measured)
    say(f"{report['num_runs']} runs, {report['num_going_on']} go on; {report['took_s']:.1f} s")
    if report["num_withdrawn"]:
        say(f"{report['num_withdrawn']} of them stay: runs that have begun meanwhile use them")


def _given(*quotas: float | str | None) -> dict[str, float | str]:
    return {name: value for name, value in zip(_QUOTAS, quotas, strict=True) if value is not None}


def _usage(found: dict[str, Any]) -> CommandAnswer:
    rows = (
        (words, _in_units(name, found[name]), _in_units(name, found["quotas"][name], "no limit"))
        for words, name in (
            ("runs that go on", "concurrent_runs"),
            ("GPU hours of 30 days", "gpu_hours"),
            ("stored", "stored_bytes"),
        )
    )
    parts = [(f"  of it {what} of runs", size(n), "") for what, n in found["measured"]["num_bytes"].items()]
    money, most = found["currency"], found["quotas"]["spending"]
    cost = "" if found["cost"] is None else f"{found['cost']:,.2f} {money}"
    spending = ("cost of 30 days", cost, "no limit" if most is None else f"{most:,.2f} {money}")
    weight = ("part of shared workers", "", str(found["quotas"]["worker_weight"] or 1))
    sharing = ("adapters beside each other on a worker", "", found["quotas"]["worker_sharing"] or "tenant")
    return CommandAnswer(
        found,
        partial(
            print_table,
            (found["tenant"], "used", "quota"),
            [*rows, *parts, *([spending] if cost or most is not None else []), sharing, weight],
        ),
    )


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


def _print_key(made: dict[str, Any]) -> None:
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
