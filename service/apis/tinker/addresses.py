"""Common parts of all requests below /tinker: the address, the header of the key, the format of errors."""

from typing import Any

TINKER = "/tinker/api/v1"
TINKER_FILES = "/tinker/files/"
"""Downloads by signed addresses, which need no key."""
BATCH_PATHS = (f"{TINKER}/forward_backward",)
"""Whose bodies are larger than others."""
_PREFIX = "tml-"
_BY_KIND = {"conflict": 400, "quota_exceeded": 403}  # the SDK repeats 409 and 429 for minutes


def is_tinker(path: str) -> bool:
    return path == "/tinker" or path.startswith("/tinker/")


def tinker_key(path: str, header: str) -> str | None:
    """Return the Authorization header equivalent to Tinker's X-API-Key; None without one.

    Its SDK wants every key to begin with `tml-`; that prefix is removed.
    """
    return f"Bearer {header.removeprefix(_PREFIX)}" if header and is_tinker(path) else None


def error_body(status: int, kind: str, message: str, place: str | None) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error: in the form of a failed future, plus its type and place."""
    category = "server" if status >= 500 else "user"
    text = f"{place}: {message}" if place else message
    return _BY_KIND.get(kind, status), {"error": text, "category": category, "type": kind, "place": place}
