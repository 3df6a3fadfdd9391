"""Which service a command talks to: flag > environment > project file > user file > the dev stack of this root."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from service.cli.client import Client
    from shared.settings import Settings

_MEND = "mend the LONGSHORE_ variable, ./longshore.toml or the user's configuration file"
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for programs.")]


@dataclass(frozen=True)
class Globals:
    """Options that stand before the command."""

    as_json: bool = False
    api_url: str | None = None
    api_key: str | None = None


def connect(context: typer.Context, patience_s: float = 2.0) -> "Client":
    """A client of the service that this command should talk to, and how long it bears that the service is away."""
    from service.cli.client import Client

    given: Globals = context.obj
    url, key = address(given.api_url, given.api_key)
    return Client(url, key, patience_s)


def address(api_url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """The URL and key of the service, each from the first place that has one."""
    from service.dev_connection import Connection

    settings = read_settings()
    dev = Connection.read(settings.root_path)
    explicit_url = api_url or (settings.api_url if "api_url" in settings.model_fields_set else None)
    url = explicit_url or (dev.api_url if dev else settings.api_url)
    key = api_key or settings.api_key
    if key is None and dev is not None and url == dev.api_url:  # the dev stack's key is for the dev stack alone
        key = dev.api_key
    return url, key


def read_settings() -> "Settings":
    """The settings, or a plain line about the one that is wrong."""
    from pydantic import ValidationError

    from service.cli.exits import USAGE, Stop
    from shared.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "LONGSHORE_" + "__".join(str(part) for part in first["loc"]).upper()
        raise Stop(f"{name}: {first['msg']}", USAGE, _MEND) from None
    except ValueError as error:  # no TOML, or no JSON in a variable that wants it
        raise Stop(f"the settings cannot be read: {error}", USAGE, _MEND) from None


def wants_json(context: typer.Context, here: bool) -> bool:
    """`--json` may stand before the command or after it."""
    given: Globals = context.obj
    return here or given.as_json
