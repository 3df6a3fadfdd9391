"""Regular expressions for module names, as in PEFT's settings, matched in linear time.

Python's `re` tries one way after another, and a stranger's pattern can have more ways than there is time for. So a
pattern is parsed as Python parses it, written again for the engine of pydantic-core (Rust's `regex`, which never goes
back), and matched there.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from pydantic_core import SchemaValidator, core_schema

MAX_LENGTH = 1000
_MOST_GROUPS = 60  # the parser calls itself for each
_MOST_PARTS = 5000
"""Parts of a pattern with its repeats written out: the engine's memory and its time for a character grow with them."""
# Names are ASCII. The engine's own classes are Unicode; about a hundred of them exceed its memory limit.
_CATEGORIES = {op.CATEGORY_DIGIT: "0-9", op.CATEGORY_SPACE: r"\t-\r\x1c-\x20", op.CATEGORY_WORD: "0-9A-Za-z_"}
_OTHERS = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
_PLACES = {op.AT_BEGINNING: "^", op.AT_END: "$", op.AT_BOUNDARY: r"(?-u:\b)"}


class ModulePattern:
    """A pattern that a whole name is to match, as in `re.fullmatch`.

    Lookahead is supported only at the pattern's beginning (`^(?!.*vision).*`); backreferences, flags and lookbehind
    are not supported.

    Args:
        is_end: it may follow any prefix that ends with a dot, like the keys of PEFT's patterns.

    Raises ValueError: it is no pattern, too large, or has an unsupported part.
    """

    def __init__(self, expression: str, is_end: bool = False) -> None:
        self.expression = expression
        self._ahead, self._rest = _translated(expression)
        if self._ahead and is_end:
            raise ValueError(f"{_named(op.ASSERT)} is not read in a pattern of ends of names")
        self._begin = r"(?:.*\.)?" if is_end else ""

    @cached_property
    def _whole(self) -> SchemaValidator:
        return _compiled(f"^{self._begin}(?:{self._rest})$")

    def matches(self, name: str) -> bool:
        """Return True if the whole name matches."""
        ahead = (_compiled(f"^(?:{pattern})").isinstance_python(name) == holds for pattern, holds in self._ahead)
        return all(ahead) and self._whole.isinstance_python(name)


@lru_cache(256)
def _compiled(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression, regex_engine="rust-regex", strict=True))


@lru_cache(1024)
def _translated(expression: str) -> tuple[tuple[tuple[str, bool], ...], str]:
    """Return the leading lookaheads, each with whether it must match, and the rest."""
    if len(expression) > MAX_LENGTH or expression.count("(") > _MOST_GROUPS:
        raise ValueError(f"a pattern has at most {MAX_LENGTH} characters, and {_MOST_GROUPS} groups")
    try:
        parts = _parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from None
    if parts.state.flags & ~re.UNICODE:
        raise ValueError("flags are not read in a pattern")
    if _size(parts) > _MOST_PARTS:
        raise ValueError(f"a pattern has at most {_MOST_PARTS} parts with its repeats written out: write it shorter")
    rest, ahead, begin = list(parts), [], ""
    while rest and (rest[0] == (op.AT, op.AT_BEGINNING) or rest[0][0] in (op.ASSERT, op.ASSERT_NOT)):
        kind, value = rest.pop(0)
        if kind == op.AT:
            begin = "^"
        elif value[0] == 1:
            ahead.append((_written(value[1]), bool(kind == op.ASSERT)))
        else:
            raise ValueError(f"{_named(kind)} is not read in a pattern")
    return tuple(ahead), begin + _written(rest)


def _size(parts: Sequence[tuple[Any, Any]]) -> int:
    return sum(map(_size_of, parts))


def _size_of(part: tuple[Any, Any]) -> int:
    match part:
        case (op.SUBPATTERN, (_, _, _, inner)) | (op.ASSERT | op.ASSERT_NOT, (_, inner)):
            return 1 + _size(inner)
        case (op.BRANCH, (_, branches)):
            return 1 + sum(map(_size, branches))
        case (op.MAX_REPEAT | op.MIN_REPEAT, (least, most, inner)):
            return 1 + max(1, _size(inner)) * max(1, least, 0 if most == op.MAXREPEAT else most)
        case (op.IN, items):
            return len(items)
    return 1


def _written(parts: Sequence[tuple[Any, Any]]) -> str:
    return "".join(_written_part(kind, value) for kind, value in parts)


def _written_part(kind: Any, value: Any) -> str:
    match kind:
        case op.LITERAL:
            return _sign(value)
        case op.NOT_LITERAL:
            return f"[^{_sign(value)}]"
        case op.ANY:
            return "."
        case op.IN:
            is_negated = value[0][0] == op.NEGATE
            return f"[{'^' * is_negated}{''.join(_in_class(*item) for item in value[is_negated:])}]"
        case op.SUBPATTERN if not (value[1] or value[2]):
            return f"(?:{_written(value[3])})"
        case op.BRANCH:
            return f"(?:{'|'.join(map(_written, value[1]))})"
        case op.MAX_REPEAT | op.MIN_REPEAT:
            least, most, inner = value
            return f"(?:{_written(inner)}){{{least},{'' if most == op.MAXREPEAT else most}}}"
        case op.AT if value in _PLACES:
            return _PLACES[value]
    raise ValueError(f"{_named(kind)} is not read in a pattern")


def _in_class(kind: Any, value: Any) -> str:
    match kind:
        case op.LITERAL:
            return _sign(value)
        case op.RANGE:
            return f"{_sign(value[0])}-{_sign(value[1])}"
        case _ if value in _OTHERS:
            return f"[^{_CATEGORIES[_OTHERS[value]]}]"
    return f"[{_CATEGORIES[value]}]"


def _sign(code: int) -> str:
    if code > 127:
        raise ValueError("names of modules are ASCII: no other character is read in a pattern")
    return f"\\x{{{code:x}}}"


def _named(kind: Any) -> str:
    names = {op.ASSERT: "looking ahead (but at its beginning) or behind", op.GROUPREF: "a reference to a group"}
    names[op.ASSERT_NOT] = names[op.ASSERT]
    return names.get(kind, str(kind).lower().replace("_", " "))
