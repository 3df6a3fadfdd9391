"""`longshore login`, `config`, `whoami`, `usage`, `keys`, `tenants`, `audit` and `gc`."""

import sys
import time
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.connection import Globals, address, profile_names, read_settings
from service.cli.render import DONE, NOT_FINISHED, USAGE, Stop, ago, plain, print_table, say, seconds_of, size, span

if TYPE_CHECKING:
    from service.cli.client import CliClient
    from service.cli.profiles import Profile


# --- `login`, `logout` and `config`: profiles of services, and the settings of this machine ---

_LOGIN_EXAMPLES = """\b
Examples:
  longshore login https://longshore.example.org
  longshore --profile staging login http://10.0.0.7:8484 < key.txt
"""
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile", help="The profile's name; may also be given before the command.", autocompletion=profile_names
    ),
]
app = typer.Typer(rich_markup_mode=None)
config = group(help="Settings, and profiles of services.")
app.add_typer(config, name="config")


@command(app, epilog=_LOGIN_EXAMPLES)
def login(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="URL of the service; by default the one that commands use.")
    ] = None,
    profile_name: ProfileName = None,
    *,
    as_json: bool,
) -> CommandAnswer:
    """Check an API key, and keep it for later commands.

    Prompts for the key, or reads it from stdin if that is no terminal. It is kept with its URL as a profile (`default`,
    or that of --profile), in a file that you alone can read, and is sent to that URL alone.
    """
    from service.cli.client import CliClient
    from service.cli.profiles import FIRST_PROFILE, Profile, Profiles, credentials_path

    given: Globals = context.obj
    name = profile_name or given.profile or FIRST_PROFILE
    known = Profiles.read()
    before = known.profiles.get(name)
    url = url or given.api_url or (before.api_url if before else address(replace(given, profile=None)).url)
    key = given.api_key or _asked_key(url)
    with CliClient(url, key) as client:
        who = client.ask("GET", "/whoami")
        profile = Profile(api_url=client.api_url, api_key=key)
    known.having(name, profile).write()
    found = {"profile": name, "api_url": profile.api_url, **who, "file": str(credentials_path())}
    if not as_json:
        say(f"logged in to {profile.api_url} as {who_in_words(who)}; kept as profile {name} in {found['file']}")
    _warn_if_hidden(name, profile)
    return CommandAnswer(found, lambda: None)


def _asked_key(url: str) -> str:
    key: str
    if sys.stdin.isatty():
        key = typer.prompt(f"API key of {url}", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not (key := key.strip()):
        advice = "type it, give it on stdin (longshore login URL < key.txt) or with --api-key"
        raise Stop("no key was given", USAGE, advice)
    if not key.isascii() or not key.isprintable():
        raise Stop("this is no API key: it has characters that none has", USAGE)
    return key


def _warn_if_hidden(name: str, profile: "Profile") -> None:
    """Warn if another place than the profile decides which service later commands talk to."""
    found = address(Globals())
    if (found.url, found.key) != (profile.api_url, profile.api_key):
        origin = found.url_origin if found.url != profile.api_url else found.key_origin
        say(f"commands here do not use it by themselves: {origin} wins; longshore --profile {name} … does")


@command(app)
def logout(context: typer.Context, profile_name: ProfileName = None) -> CommandAnswer:
    """Remove a profile from this machine: the current one, or that of --profile. Its key stays valid."""
    from service.cli.profiles import Profiles

    known = Profiles.read()
    name = profile_name or context.obj.profile or known.current
    if name is None:
        raise Stop("you are not logged in", USAGE, "longshore config profiles")
    known.named(name)
    known.without(name).write()
    words = f"profile {name} is forgotten; `longshore keys revoke` ends a key for good"
    return CommandAnswer({"profile": name}, partial(say, words))


def who_in_words(who: dict[str, Any]) -> str:
    key = f"{who['key_id']} ({who['title']})" if who.get("title") else who["key_id"]
    return f"{key} of tenant {who['tenant']} ({', '.join(sorted(who['scopes']))})"


@command(config)
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value comes from.")] = False,
) -> CommandAnswer:
    """Show the settings of this machine; secrets are cut to their beginning."""
    from service.cli.profiles import setting_values, shown
    from service.dev.connection import Connection

    found, settings = address(context.obj), read_settings()
    used: dict[str, tuple[str | None, str]] = {}
    if dev := Connection.read(settings.root_path):  # its ports are chosen when it starts
        place = f"the dev stack of {settings.root_path}"
        used = {"temporal_address": (dev.temporal_address, place), "temporal_ui": (dev.temporal_ui, place)}
    used |= {"api_url": (found.url, found.url_origin), "api_key": (found.key, found.key_origin or "default")}
    values = []
    for value in setting_values(settings):
        if value.name in used:
            text, place = used[value.name]
            value = replace(value, value=shown(value.name, text), origin=place)
        values.append(value)
    columns = ("setting", "value", "from") if origin else ("setting", "value")
    rows = [(v.name, plain(v.value), plain(v.origin))[: len(columns)] for v in values]
    return CommandAnswer(values, partial(print_table, columns, rows))


@command(config)
def profiles() -> CommandAnswer:
    """List the services that were logged in to; * is the current one."""
    from service.cli.profiles import Profiles, prefix

    known = Profiles.read()
    rows = [
        {"profile": name, "api_url": each.api_url, "api_key": prefix(each.api_key), "current": name == known.current}
        for name, each in sorted(known.profiles.items())
    ]
    if not rows:
        return CommandAnswer(rows, partial(say, "there are none: longshore login makes one"))
    cells = ((r["profile"], r["api_url"], r["api_key"], "*" if r["current"] else "") for r in rows)
    table = ([plain(str(cell)) for cell in row] for row in cells)
    return CommandAnswer(rows, partial(print_table, ("profile", "service", "key", ""), table))


@command(config)
def use(name: Annotated[str, typer.Argument(help="Name of a profile.")], as_json: bool) -> CommandAnswer:
    """Make a profile the current one."""
    from service.cli.profiles import Profiles

    known = Profiles.read()
    profile = known.named(name)
    known.having(name, profile).write()
    if not as_json:
        say(f"commands now talk to {profile.api_url}")
    _warn_if_hidden(name, profile)
    return CommandAnswer({"profile": name, "api_url": profile.api_url}, lambda: None)


# --- `whoami`, `usage`, `audit`, `keys`, `tenants` and `gc`: identity, quotas and use ---

_KEYS_EXAMPLES = """\b
Examples:
  longshore keys create "nightly job" --scope read --scope write --expires 90d
  longshore keys revoke key-0123456789ab
"""
keys = group(help="Create, list and revoke API keys of your tenant.", epilog=_KEYS_EXAMPLES)
tenants = group(help="Manage the tenants of this installation, and their quotas.")

app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
_GC_ANSWERS_S = 30.0  # beyond the wait that was requested
_QUOTAS = ("concurrent_runs", "gpu_hours", "spending", "stored_bytes", "worker_sharing", "worker_weight")
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Lower case letters, digits and dashes.")]
Title = Annotated[str, typer.Option(help="A description.")]
ConcurrentRuns = Annotated[int | None, typer.Option(min=0, help="Most runs that have not ended.")]
GpuHours = Annotated[float | None, typer.Option(min=0, help="Most GPU hours in the last 30 days.")]
Spending = Annotated[
    float | None,
    typer.Option(min=0, help="Highest cost of the runs of the last 30 days; at this limit runs are paused."),
]
StoredBytes = Annotated[int | None, typer.Option(min=0, help="Most bytes of uploads and published artifacts.")]


class SharingName(StrEnum):
    all = "all"
    tenant = "tenant"
    none = "none"


Sharing = Annotated[
    SharingName | None, typer.Option(help="Tenants whose adapters may share a worker with this tenant's.")
]


Weight = Annotated[
    float | None,
    typer.Option(min=0.001, max=1000, help="The tenant's weight in shared workers and queues; the default is 1."),
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
        bool, typer.Option("--everybody", help="Show entries of all tenants; for admins of the first tenant.")
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
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The key's title in lists: its owner or purpose.")] = "",
    title: Annotated[str, typer.Option(help="The same as NAME.")] = "",
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(help="Scope of the key: read, write or inference; all three if absent. May be repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time until the key expires, such as 12h or 90d; never if absent.")
    ] = None,
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
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `longshore keys ls` shows it.")],
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
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for the end of the collection.")] = 600,
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
