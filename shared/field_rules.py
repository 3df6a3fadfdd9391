"""Readable rules of fields, instead of pydantic's messages for patterns, missing and unknown fields."""

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from longshore.fields import PATTERN_WORDS
from shared.errors import InvalidInput


def first_error(error: ValidationError, tags: Container[object] = ()) -> tuple[str, str]:
    """Return the field (`a.0.b`; empty: the whole value) and the rule, in words, of pydantic's first error.

    `tags`: parts of a location that name a member of a union instead of a field; they are left out.
    """
    first = error.errors(include_url=False)[0]
    return ".".join(str(part) for part in first["loc"] if part not in tags), rule_in_words(first)


def first_rule(error: ValidationError, tags: Container[object] = ()) -> str:
    """Return pydantic's first error as `field: rule`, or only the rule if it is not about one field.

    The arguments are those of `first_error`.
    """
    return ": ".join(part for part in first_error(error, tags) if part)


@contextmanager
def refused_in_words(place: str = "", tags: Container[object] = ()) -> Iterator[None]:
    """Raise a ValidationError of the block as an InvalidInput: its first rule, at its field below `place`.

    `tags`: as `first_error` has them.
    """
    try:
        yield
    except ValidationError as error:
        field, rule = first_error(error, tags)
        raise InvalidInput(rule, f"{place}.{field}".strip(".")) from None


def refused_value(error: ValidationError) -> str:
    """Return pydantic's first error as `field = value cannot be used: rule`, for files that the user did not write."""
    field, rule = first_error(error)
    first = error.errors(include_url=False)[0]
    given = "" if first["type"] == "missing" else f" = {first['input']!r:.80}"
    return f"{field}{given} cannot be used: {rule}"


def location_of(error: Mapping[str, Any], names: Container[str]) -> tuple[int | str, ...]:
    """Return the location of one of pydantic's errors; for a rule on several fields, the first that its text names."""
    if error["loc"] not in ((), ("body",)) or error["type"] != "value_error":
        return tuple(error["loc"])
    said = (word for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", error["msg"]) if word.partition(".")[0] in names)
    return tuple(next(said, "").split("."))


def rule_in_words(error: Mapping[str, Any]) -> str:
    """Return the rule of one of pydantic's errors (of `ValidationError.errors()`), in words for the user."""
    loc = error["loc"]
    match error["type"]:
        case "extra_forbidden":
            return f"there is no such field: {loc[-1]}" if loc else "there is no such field"
        case "missing" if not loc or loc == ("body",):
            return "the request needs a body: a JSON object"
        case "missing":
            return "this field is required"
        case "string_pattern_mismatch":
            return PATTERN_WORDS.get(
                error["ctx"]["pattern"], "this has characters, or a form, that is not allowed here"
            )
        case "string_too_short" | "too_short" if error["ctx"]["min_length"] == 1:
            return "this must not be empty"
        case _:
            return str(error["msg"]).removeprefix("Value error, ")
