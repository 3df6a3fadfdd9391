"""`login`, `logout` and `config`: profiles of services, and the settings of this machine."""

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.connection import Globals, address, profile_names, read_settings
from service.cli.exits import USAGE, Stop
from service.cli.output.render import plain, print_table, say

if TYPE_CHECKING:
    from service.cli.profiles import Profile

_LOGIN_EXAMPLES = """\b
Examples:
  longshore login https://longshore.example.org
  longshore --profile staging login http://10.0.0.7:8484 < key.txt
"""
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Its name; may also be given before the command.", autocompletion=profile_names),
]
app = typer.Typer(rich_markup_mode=None)
config = group(help="Settings, and profiles of services.")
app.add_typer(config, name="config")


@command(app, epilog=_LOGIN_EXAMPLES)
def login(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The service; by default the one that commands use.")
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
    origin: Annotated[bool, typer.Option("--origin", help="Also where each value comes from.")] = False,
) -> CommandAnswer:
    """Show the settings of this machine; secrets are cut to their beginning."""
    from service.cli.setting_origins import setting_values, shown
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
    from service.cli.profiles import Profiles
    from service.cli.setting_origins import prefix

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
def use(name: Annotated[str, typer.Argument(help="A profile.")], as_json: bool) -> CommandAnswer:
    """Make a profile the current one."""
    from service.cli.profiles import Profiles

    known = Profiles.read()
    profile = known.named(name)
    known.having(name, profile).write()
    if not as_json:
        say(f"commands now talk to {profile.api_url}")
    _warn_if_hidden(name, profile)
    return CommandAnswer({"profile": name, "api_url": profile.api_url}, lambda: None)
