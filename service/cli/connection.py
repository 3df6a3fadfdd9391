"""Find the service that a command talks to, from the first of: flag, named profile, environment, project file, profile
of the last login, user file, dev stack of this root.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.cli.client import CliClient
    from shared.runs.requests import Run
    from shared.settings import Settings

TRACE_PARENT = "TRACEPARENT"
"""The variable by which programs pass on the trace that they are part of."""
_MEND = "mend the LONGSHORE_ variable, ./longshore.toml or the user's configuration file"
_MOST_COMPLETIONS, _COMPLETION_PATIENCE_S = 50, 2.0
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for programs.")]


@dataclass(frozen=True)
class Globals:
    """Options before the command."""

    as_json: bool = False
    api_url: str | None = None
    api_key: str | None = None
    profile: str | None = None
    take_run: "Callable[[Run], None] | None" = None  # of a command that wants the run that `submit` would start


@dataclass(frozen=True)
class Address:
    """A service and the key to ask it with, each with the place that names it."""

    url: str
    url_origin: str
    key: str | None
    key_origin: str | None


@dataclass(frozen=True)
class _Place:
    """The URL and key that one place gives. `is_bound`: its key is only sent to its own URL."""

    url: str | None
    key: str | None
    origin: str
    key_origin: str | None = None
    is_bound: bool = False


def cli_client(context: typer.Context, patience_s: float = 2.0) -> "CliClient":
    """Return a client of the service that this command talks to. `patience_s`: as for Client."""
    from service.cli.client import CliClient

    found = address(context.obj)
    return CliClient(found.url, found.key, patience_s, traceparent=os.environ.get(TRACE_PARENT))


def address(given: Globals) -> Address:
    """Find the URL and key of the service, each in the first place that has one."""
    settings = read_settings()
    places = list(_places(given, settings))
    url, url_origin = next(((p.url, p.origin) for p in places if p.url), (settings.api_url, "default"))
    for place in places:
        if place.key and (not place.is_bound or place.url == url):
            return Address(url, url_origin, place.key, place.key_origin or place.origin)
    return Address(url, url_origin, None, None)


def _places(given: Globals, settings: "Settings") -> Iterator[_Place]:
    from service.cli.profiles import Profiles, layers
    from service.dev.connection import Connection

    yield _Place(given.api_url, given.api_key, "--api-url", "--api-key")
    profiles = Profiles.read()
    if given.profile:
        named = profiles.named(given.profile)
        yield _Place(named.api_url, named.api_key, f"profile {given.profile}", is_bound=True)
    environment, project, user = (_Place(said.get("api_url"), said.get("api_key"), origin) for origin, said in layers())
    yield _Place(environment.url, environment.key, "LONGSHORE_API_URL", "LONGSHORE_API_KEY")
    yield project
    current = profiles.profiles.get(profiles.current or "")
    if current and not given.profile:
        yield _Place(current.api_url, current.api_key, f"profile {profiles.current}", is_bound=True)
    yield user
    if dev := Connection.read(settings.root_path):
        yield _Place(dev.api_url, dev.api_key, f"the dev stack of {settings.root_path}", is_bound=True)


def read_settings() -> "Settings":
    """Read the settings. Raises Stop, which names the setting that is wrong."""
    from pydantic import ValidationError

    from service.cli.render import USAGE, Stop
    from shared.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "LONGSHORE_" + "__".join(str(part) for part in first["loc"]).upper()
        raise Stop(f"{name}: {first['msg']}", USAGE, _MEND) from None
    except ValueError as error:  # no TOML, or no JSON in a variable that wants it
        raise Stop(f"the settings cannot be read: {error}", USAGE, _MEND) from None


# Shell completion. Errors give an empty completion, and no message.


def run_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of the newest runs, each with its state and name. (Typer keeps those that match.)"""
    from service.cli.client import CliClient
    from service.cli.render import Stop

    # Nothing was called yet, the callback of the options before the command neither.
    given = context.find_root().params
    try:
        found = address(Globals(False, given.get("api_url"), given.get("api_key"), given.get("profile")))
        with CliClient(found.url, found.key, patience_s=0, timeout_s=_COMPLETION_PATIENCE_S) as client:
            page = client.runs(_MOST_COMPLETIONS, None, words=incomplete or None)
    except (Stop, OSError):
        return []
    return [(view.run_id, f"{view.state} {view.run.name or ''}".strip()) for view in page.runs]


def profile_names() -> list[str]:
    from service.cli.profiles import Profiles
    from service.cli.render import Stop

    try:
        return list(Profiles.read().profiles)
    except (Stop, OSError):
        return []
