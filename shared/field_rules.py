"""What a field's rule says in words, where pydantic would show its reader a regular expression."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

_WORDS: dict[str, str] = {}


def pattern(expression: str, words: str) -> Any:
    """A field's pattern, as `Field(pattern=…)`, which `rule_in_words` knows to say."""
    _WORDS[expression] = words
    return Field(pattern=expression)


def rule_in_words(error: Mapping[str, Any]) -> str:
    """The rule that one of pydantic's errors (of `ValidationError.errors()`) names, in words for its user."""
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field"
        case "string_pattern_mismatch" if words := _WORDS.get(error["ctx"]["pattern"]):
            return words
        case _:
            return str(error["msg"]).removeprefix("Value error, ")
