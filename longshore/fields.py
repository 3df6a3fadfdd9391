"""The base class of all models exchanged between processes, and their common types."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PATTERN_WORDS: dict[str, str] = {}
"""By pattern, what is said of text that does not match it."""


def pattern(expression: str, words: str, **rules: Any) -> Any:
    """Return `Field(pattern=expression, **rules)`, and register `words` as the text of errors about the pattern."""
    PATTERN_WORDS[expression] = words
    return Field(pattern=expression, **rules)


def added(default: Any, **rules: Any) -> Any:
    """Return `Field(default, **rules)` for a field that the last release does not have (CONTRIBUTING.md).

    It is left out of JSON if it has its default. So hosts of the last release, which refuse names that they do not
    know, continue runs that do not use it, and refuse runs that do. A release later it may be a `Field` like any other.
    """
    return Field(default, exclude_if=lambda value: value == default, **rules)


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[
    str,
    pattern(
        r"^[a-z0-9][a-z0-9._-]{0,62}$",
        "a name has at most 63 lower-case letters, digits, dots, dashes and underscores, a letter or digit first",
    ),
]


class Frozen(BaseModel):
    """Immutable, and strict about names: a field that nobody reads is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Artifact(Frozen):
    """A folder in a store, whose `manifest.json` lists its files; `sha256` is that manifest's."""

    uri: str
    sha256: Sha256
