"""`longshore login`, `config`, `whoami`, `usage`, `keys`, `tenants`, `audit` and `gc`."""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longshore
from longshore.connection import FIRST_PROFILE, PROJECT_FILE, Profile, Profiles, credentials_path, user_config_path
from service.cli import command as cli
from service.cli.run_options import given, json_of, options_of, request_fields, run_command

if TYPE_CHECKING:
    from pydantic import BaseModel

    from longshore import Client, QuotaSettings
    from longshore.accounts import KeyHolder, KeyView, NewKey, TenantUsage
    from longshore.automation import GarbageReport
    from shared.settings import Settings


# --- `login`, `logout` and `config`: profiles of services, and the settings of this machine ---

_LOGIN_EXAMPLES = """\b
Examples:
  longshore login https://longshore.example.org
  longshore --profile staging login http://10.0.0.7:8484 < key.txt
"""
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile", help="The profile's name; may also be given before the command.", autocompletion=cli.profile_names
    ),
]
app = typer.Typer(rich_markup_mode=None)
config = cli.group(help="Settings, and profiles of services.")
app.add_typer(config, name="config")


@cli.command(app, epilog=_LOGIN_EXAMPLES)
def login(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="URL of the service; by default the one that commands use.")
    ] = None,
    profile_name: ProfileName = None,
    *,
    as_json: bool,
) -> cli.CommandAnswer:
    """Check an API key, and keep it for later commands.

    Prompts for the key, or reads it from stdin if that is no terminal. It is kept with its URL as a profile (`default`,
    or that of --profile), in a file that you alone can read, and is sent to that URL alone.
    """
    options: cli.Globals = context.obj
    name = profile_name or options.profile or FIRST_PROFILE
    known = Profiles.read()
    before = known.profiles.get(name)
    url = url or options.api_url or (before.api_url if before else cli.address(replace(options, profile=None)).url)
    key = options.api_key or _asked_key(url)
    with cli.client_at(url, key) as client:
        who = client.whoami()
        profile = Profile(api_url=client.url, api_key=key)
    known.having(name, profile).write()
    found = {
        "profile": name,
        "api_url": profile.api_url,
        **who.model_dump(mode="json"),
        "file": str(credentials_path()),
    }
    if not as_json:
        cli.say(f"logged in to {profile.api_url} as {who_in_words(who)}; kept as profile {name} in {found['file']}")
    _warn_if_hidden(name, profile)
    return cli.CommandAnswer(found, lambda: None)


def _asked_key(url: str) -> str:
    key: str
    if sys.stdin.isatty():
        key = typer.prompt(f"API key of {url}", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not (key := key.strip()):
        advice = "type it, give it on stdin (longshore login URL < key.txt) or with --api-key"
        raise cli.Stop("no key was given", cli.USAGE, advice)
    if not key.isascii() or not key.isprintable():
        raise cli.Stop("this is no API key: it has characters that none has", cli.USAGE)
    return key


def _warn_if_hidden(name: str, profile: Profile) -> None:
    """Warn if another place than the profile decides which service later commands talk to."""
    found = cli.address(cli.Globals())
    if (found.url, found.key) != (profile.api_url, profile.api_key):
        origin = found.url_origin if found.url != profile.api_url else found.key_origin
        cli.say(f"commands here do not use it by themselves: {origin} wins; longshore --profile {name} … does")


@cli.command(app)
def logout(context: typer.Context, profile_name: ProfileName = None) -> cli.CommandAnswer:
    """Remove a profile from this machine: the current one, or that of --profile. Its key stays valid."""
    known = Profiles.read()
    name = profile_name or context.obj.profile or known.current
    if name is None:
        raise cli.Stop("you are not logged in", cli.USAGE, "longshore config profiles")
    known.named(name)
    known.without(name).write()
    words = f"profile {name} is forgotten; `longshore keys revoke` ends a key for good"
    return cli.CommandAnswer({"profile": name}, partial(cli.say, words))


def who_in_words(who: "KeyHolder") -> str:
    key = f"{who.key_id} ({who.title})" if who.title else who.key_id
    return f"{key} of tenant {who.tenant} ({', '.join(sorted(who.scopes))})"


@cli.command(config)
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value comes from.")] = False,
) -> cli.CommandAnswer:
    """Show the settings of this machine; secrets are cut to their beginning."""
    from service.dev import Connection

    found, settings = cli.address(context.obj), cli.read_settings()
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
    rows = [(v.name, cli.plain(v.value), cli.plain(v.origin))[: len(columns)] for v in values]
    return cli.CommandAnswer(values, partial(cli.print_table, columns, rows))


@cli.command(config)
def profiles() -> cli.CommandAnswer:
    """List the services that were logged in to; * is the current one."""

    known = Profiles.read()
    rows = [
        {"profile": name, "api_url": each.api_url, "api_key": prefix(each.api_key), "current": name == known.current}
        for name, each in sorted(known.profiles.items())
    ]
    if not rows:
        return cli.CommandAnswer(rows, partial(cli.say, "there are none: longshore login makes one"))
    cells = ((r["profile"], r["api_url"], r["api_key"], "*" if r["current"] else "") for r in rows)
    table = ([cli.plain(str(cell)) for cell in row] for row in cells)
    return cli.CommandAnswer(rows, partial(cli.print_table, ("profile", "service", "key", ""), table))


@cli.command(config)
def use(name: Annotated[str, typer.Argument(help="Name of a profile.")], as_json: bool) -> cli.CommandAnswer:
    """Make a profile the current one."""
    known = Profiles.read()
    profile = known.named(name)
    known.having(name, profile).write()
    if not as_json:
        cli.say(f"commands now talk to {profile.api_url}")
    _warn_if_hidden(name, profile)
    return cli.CommandAnswer({"profile": name, "api_url": profile.api_url}, lambda: None)


# --- The settings of this machine: where each comes from, and the part of its value that may be shown ---

_PREFIX = "LONGSHORE_"
_IS_SECRET = re.compile(r"key|secret|password|token")
_OUR_KEY = re.compile(r"^(ls-[0-9a-f]{12})-")
_LEAST_SHOWN = 12


@dataclass(frozen=True)
class SettingValue:
    """A setting by its dotted name. `value` may be shown: secrets are cut to their beginning."""

    name: str
    value: str | None
    origin: str


def setting_values(settings: "Settings") -> Iterator[SettingValue]:
    """Return every setting, in the order of definition, each from the first place that says it."""
    from pydantic_settings import TomlConfigSettingsSource

    from shared.settings import Environment, Settings

    said = {"environment": Environment(Settings)()}
    for place, file in ((f"./{PROJECT_FILE}", PROJECT_FILE), (str(user_config_path()), user_config_path())):
        said[place] = TomlConfigSettingsSource(Settings, file)()
    for name, value in _flat(settings, ()):
        origin = next((place for place, values in said.items() if _says(values, name)), "default")
        origin = variable(*name) if origin == "environment" else origin
        yield SettingValue(".".join(name), shown(name[-1], value), origin)


def variable(*name: str) -> str:
    """Return the environment variable that set a setting: its own, or that of its group."""
    from shared.settings import FROM_FILE

    known = {variable.upper() for variable in os.environ}
    own = [_PREFIX + "__".join(name[:length]).upper() for length in range(len(name), 0, -1)]
    wanted = [variable + suffix for variable in own for suffix in ("", FROM_FILE.upper())]
    return next((each for each in wanted if each in known), wanted[0])


def shown(name: str, value: object) -> str | None:
    """Return a value as it may be shown: the prefix of a key, a URL without its password."""
    from pydantic import SecretStr

    if value is None:
        return None
    is_secret = isinstance(value, SecretStr) or _IS_SECRET.search(name) is not None
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    if isinstance(value, tuple):
        text = ", ".join(str(each) for each in value)
    if "://" in text:
        text = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:…@", text)
        return text.partition("?")[0] + "?…" if is_secret and "?" in text else text
    return prefix(text) if is_secret else text


def prefix(key: str) -> str:
    """Return the first characters of a key, enough for its holder to recognise it."""
    if ours := _OUR_KEY.match(key):
        return f"{ours[1]}…"
    return f"{key[:4]}…" if len(key) >= _LEAST_SHOWN else "…"


def _flat(model: "BaseModel", above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    from pydantic import BaseModel

    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _flat(value, (*above, name))
        else:
            yield (*above, name), value


def _says(values: object, name: tuple[str, ...]) -> bool:
    for part in name:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


# --- `whoami`, `usage`, `audit`, `keys`, `tenants` and `gc`: identity, quotas and use ---

_KEYS_EXAMPLES = """\b
Examples:
  longshore keys create "nightly job" --scope read --scope write --expires 90d
  longshore keys revoke key-0123456789ab
"""
keys = cli.group(help="Create, list and revoke API keys of your tenant.", epilog=_KEYS_EXAMPLES)
tenants = cli.group(help="Manage the tenants of this installation, and their quotas.")

app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Lower case letters, digits and dashes.")]
Title = Annotated[str, typer.Option(help="A description.")]


class ScopeName(StrEnum):  # Typer takes no list of a Literal
    read = "read"
    write = "write"
    inference = "inference"
    admin = "admin"


@cli.command(app)
def whoami(client: "Client") -> cli.CommandAnswer:
    """Show the service that commands talk to, your key, tenant and scopes."""
    who = client.whoami()
    document = {"api_url": client.url, **who.model_dump(mode="json")}
    return cli.CommandAnswer(document, partial(print, f"{who_in_words(who)} at {client.url}"))


@cli.command(app)
def usage(client: "Client") -> cli.CommandAnswer:
    """Show your tenant's usage and quotas."""
    return _usage(client.usage())


@cli.command(app)
def audit(
    client: "Client",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    everybody: Annotated[
        bool, typer.Option("--everybody", help="Show entries of all tenants; for admins of the first tenant.")
    ] = False,
) -> cli.CommandAnswer:
    """Show the audit log: changes and refusals, newest first. Needs the scope admin."""
    entries = client.audit(limit, everybody=everybody).entries
    columns = {"when": "time", "tenant": "tenant", "key": "key_id", "": "method", "path": "path"}
    columns |= {"changed": "target", "answer": "status", "from": "address"}
    return cli.CommandAnswer(entries, partial(cli.print_items, entries, columns))


@cli.command(keys)
def create(
    client: "Client",
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The key's title in lists: its owner or purpose.")] = "",
    title: Annotated[str, typer.Option(help="The same as NAME.")] = "",
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(help="Scope of the key: read, write or inference; all three if absent. May be repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time until the key expires, such as 12h or 90d; never if absent.")
    ] = None,
) -> cli.CommandAnswer:
    """Create a key. It is shown only once."""
    if name and title:
        raise cli.Stop("NAME and --title are the same: give one of them", cli.USAGE)
    fields: dict[str, Any] = {"title": name or title}
    if scope:
        fields["scopes"] = [each.value for each in scope]
    if expires is not None:
        fields["expires_at"] = time.time() + cli.seconds_of(expires, "--expires")
    made = client.keys.create(cli.checked(longshore.KeyRequest, fields))
    return cli.CommandAnswer(made, partial(_print_key, made))


@cli.command(keys, "ls")
def ls_keys(client: "Client") -> cli.CommandAnswer:
    """List keys, newest first: of each its beginning only."""
    found = client.keys.list()
    columns: dict[str, Any] = {"key": "key_id", "title": "title", "prefix": "prefix", "scopes": "scopes"}
    columns |= {"created": "created_at", "last used": "last_used_at", "": _validity}
    return cli.CommandAnswer(found, partial(cli.print_items, found, columns))


cli.by_id(
    keys,
    "revoke",
    Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `longshore keys ls` shows it.")],
    lambda client, key_id: client.keys.revoke(key_id),
    lambda key_id, ended: cli.say(f"{key_id} ({ended.prefix}) is revoked"),
    "Revoke a key for good.",
)


@run_command(tenants, "quotas", "create", "Create a tenant and its first key, an admin's, which is shown only once.")
@cli.answering
def create_tenant(context: typer.Context, client: "Client", tenant: TenantName, title: Title = "") -> cli.CommandAnswer:
    fields = {"tenant": tenant, "title": title, "quotas": _quotas(context).model_dump(exclude_unset=True)}
    made = client.tenants.create(cli.checked(longshore.TenantRequest, fields))
    if made.warning:
        cli.say(f"warning: {made.warning}")
    return cli.CommandAnswer(made, partial(_print_key, made.key))


@cli.command(tenants, "ls")
def ls_tenants(client: "Client") -> cli.CommandAnswer:
    """List tenants, with their own quotas."""
    found = client.tenants.list()

    def show() -> None:
        names = ("concurrent_runs", "gpu_hours", "stored_bytes")
        rows = (
            (t.tenant, cli.plain(t.title), *(_in_units(n, getattr(t.quotas, n), "-") for n in names)) for t in found
        )
        cli.print_table(("tenant", "title", "quota: runs", "quota: GPU hours", "quota: stored"), rows)
        cli.say("-: the installation's own quota holds; `longshore tenants usage NAME` shows it")

    return cli.CommandAnswer(found, show)


cli.by_id(
    *(tenants, "usage", TenantName, lambda client, tenant: client.tenants.usage(tenant)),
    lambda _, found: _print_usage(found),
    "Show a tenant's usage and quotas.",
)


@run_command(
    tenants,
    "quotas",
    "quotas",
    "Replace the quotas of a tenant. Others return to the installation's.",
)
@cli.answering
def quotas(context: typer.Context, client: "Client", tenant: TenantName) -> cli.CommandAnswer:
    client.tenants.set_quotas(tenant, _quotas(context))
    return _usage(client.tenants.usage(tenant))


def _quotas(context: typer.Context) -> "QuotaSettings":
    fields = request_fields(options_of(longshore.QuotaSettings), given(context))
    return cli.checked(longshore.QuotaSettings, fields)


@cli.command(app)
def gc(
    client: "Client",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for the end of the collection.")] = 600,
) -> cli.CommandAnswer:
    """Delete objects of all tenants that the installation's policies expire (operators only)."""
    found = client.collect_garbage(dry_run, wait)
    return cli.CommandAnswer(
        found, partial(_print_collected, found.report), cli.DONE if found.report else cli.NOT_FINISHED
    )


def _print_collected(report: "GarbageReport | None") -> None:
    if report is None:
        cli.say("the collection goes on; the same command joins it")
        return
    rows = [
        (row.what, row.tenant or "-", f"{row.num_units:,}", f"{row.num_objects:,}", cli.size(row.num_bytes))
        for row in report.freed
    ]
    if rows:
        cli.print_table(("would go" if report.is_dry else "deleted", "tenant", "units", "objects", "bytes"), rows)
    measured = ((t, what, cli.size(n)) for t, parts in sorted(report.measured.items()) for what, n in parts.items())
    cli.print_table(("tenant", "stores, beside its files", "bytes"), measured)
    cli.say(f"{report.num_runs} runs, {report.num_going_on} go on; {report.took_s:.1f} s")
    if report.num_withdrawn:
        cli.say(f"{report.num_withdrawn} of them stay: runs that have begun meanwhile use them")


def _usage(found: "TenantUsage") -> cli.CommandAnswer:
    return cli.CommandAnswer(found, partial(_print_usage, found))


def _print_usage(found: "TenantUsage") -> None:
    quotas = found.quotas
    rows = [
        (words, _in_units(name, getattr(found, name)), _in_units(name, getattr(quotas, name), "no limit"))
        for words, name in (
            ("runs that go on", "concurrent_runs"),
            ("GPU hours of 30 days", "gpu_hours"),
            ("stored", "stored_bytes"),
        )
    ]
    parts = [(f"  of it {what} of runs", cli.size(n), "") for what, n in found.measured.num_bytes.items()]
    money, most = found.currency, quotas.spending
    cost = "" if found.cost is None else f"{found.cost:,.2f} {money}"
    spending = ("cost of 30 days", cost, "no limit" if most is None else f"{most:,.2f} {money}")
    weight = ("part of shared workers", "", str(quotas.worker_weight or 1))
    sharing = ("adapters beside each other on a worker", "", quotas.worker_sharing or "tenant")
    rows = [*rows, *parts, *([spending] if cost or most is not None else []), sharing, weight]
    cli.print_table((found.tenant, "used", "quota"), rows)


def _in_units(name: str, value: float | None, nothing: str = "") -> str:
    match name:
        case _ if value is None:
            return nothing
        case "stored_bytes":
            return cli.size(value)
        case "gpu_hours":
            return f"{value:.2f}"
        case _:
            return f"{value:,.0f}"


def _print_key(made: "NewKey") -> None:
    print(made.key)
    cli.say(f"{made.key_id} of tenant {made.tenant} ({', '.join(made.scopes)}), {_validity(made) or 'never expires'}")
    cli.say("keep the key: it is not shown again; `longshore login` takes it")


def _validity(key: "KeyView") -> str:
    now = time.time()
    if key.revoked_at:
        return f"revoked {cli.ago(key.revoked_at)}"
    if not key.expires_at:
        return ""
    return f"expires in {cli.span(key.expires_at - now)}" if key.expires_at > now else "expired"


# --- `longshore api`: any route ---


@app.command()
def api(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="GET, POST, PUT, PATCH or DELETE.")],
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A path below /api/v1, with its query; or one that begins with /v1.")
    ],
    body: Annotated[str | None, typer.Option("--json", help="The body: JSON, or a file of it.")] = None,
) -> None:
    """Call any route of the API (docs/api.md), and print its JSON.

    For what has no command of its own: `longshore api PATCH /webhooks/ID --json '{"enabled": false}'`.
    """
    options = {} if body is None else {"json": json_of(body, "--json")}
    with cli.client_of(context) as client:
        cli.print_json(client.call(method.upper(), path, **options))
