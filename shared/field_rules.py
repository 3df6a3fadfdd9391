"""What a field's rule says in words, where pydantic would show its reader a regular expression or a riddle."""

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_WORDS: dict[str, str] = {}
NO_NUL = r"^[^\x00]*$"


def pattern(expression: str, words: str, **rules: Any) -> Any:
    """A field's pattern, as `Field(pattern=…)`, which `rule_in_words` knows to say. `rules`: others of `Field`."""
    _WORDS[expression] = words
    return Field(pattern=expression, **rules)


def only(*allowed: object, words: str) -> BeforeValidator:
    """Refuse every value but these and None, in words, before a type or a bound is looked at.

    For a field that clients send and that may only have the value that changes nothing: pydantic would say of
    `ge=0, le=0` that 1 should be less than or equal to 0.
    """

    def check(value: object) -> object:
        if value is not None and (isinstance(value, bool) or value not in allowed):
            raise PydanticCustomError("not_applied", words)
        return value

    return BeforeValidator(check)


def rule_in_words(error: Mapping[str, Any]) -> str:
    """The rule that one of pydantic's errors (of `ValidationError.errors()`) names, in words for its user."""
    loc = error["loc"]
    match error["type"]:
        case "extra_forbidden":
            return f"there is no such field: {loc[-1]}" if loc else "there is no such field"
        case "missing" if not loc or loc == ("body",):
            return "the request needs a body: a JSON object"
        case "missing":
            return "this field is required"
        case "string_pattern_mismatch":
            return _WORDS.get(error["ctx"]["pattern"], "this has characters, or a form, that is not allowed here")
        case _:
            return str(error["msg"]).removeprefix("Value error, ")
