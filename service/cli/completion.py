"""Shell completion of run ids and profile names.

Errors give an empty completion, and no message.
"""

from typing import Any

import typer

_MOST = 50
_PATIENCE_S = 2.0


def run_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of the newest runs, each with its state and name. (Typer keeps those that match.)"""
    from service.cli.client import Client
    from service.cli.connection import Globals, address
    from service.cli.exits import Stop

    # Nothing was called yet, the callback of the options before the command neither.
    given: dict[str, Any] = context.find_root().params
    try:
        found = address(Globals(False, given.get("api_url"), given.get("api_key"), given.get("profile")))
        with Client(found.url, found.key, patience_s=0, timeout_s=_PATIENCE_S) as client:
            page = client.runs(_MOST, None, words=incomplete or None)
    except (Stop, OSError):
        return []
    return [(view.run_id, f"{view.state} {view.run.name or ''}".strip()) for view in page.runs]


def profile_names() -> list[str]:
    from service.cli.exits import Stop
    from service.cli.profiles import Profiles

    try:
        return list(Profiles.read().profiles)
    except (Stop, OSError):
        return []
