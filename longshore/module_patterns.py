"""Regular expressions over names of modules, as PEFT's settings have them, matched in bounded time.

Python's `re` tries one way after another, and a stranger's pattern can have more ways than there is time for. Here each
part of a pattern is asked once which places of the name it leads to, all at once: places are bits of a number, of which
there are no more than the name has characters. What remains is counted, and refused beyond a bound.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_LENGTH = 1000
_MOST_GROUPS = 60  # the parser calls itself for each
_OF_ONE_CHARACTER = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
}
_OTHERS = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
_PLACES = (op.AT_BEGINNING, op.AT_END, op.AT_BOUNDARY)


@dataclass
class Effort:
    """The budget that is left for matching, in looks at a part of a pattern, of a microsecond or less each."""

    left: int = 2_000_000

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError("this takes too long to match with the names of the model's modules: write it shorter")


class ModulePattern:
    """A pattern that a whole name is to match: what `re` knows, without references, flags and looking behind.

    `is_end`: a dot and anything may stand before it, as before the keys of PEFT's patterns. Raises ValueError where it
    is none of those.
    """

    def __init__(self, expression: str, is_end: bool = False) -> None:
        self.expression = expression
        if len(expression) > MAX_LENGTH or expression.count("(") > _MOST_GROUPS:
            raise ValueError(f"a pattern has at most {MAX_LENGTH} characters, and {_MOST_GROUPS} groups")
        try:
            _parser.parse(expression)
            self._parts = _parser.parse(rf"(.*\.)?({expression})$" if is_end else expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"no regular expression: {error}") from None
        if self._parts.state.flags & ~re.UNICODE:
            raise ValueError("flags are not read in a pattern")
        _check(self._parts)

    def matches(self, name: str, effort: Effort) -> bool:
        """Return True if the whole name matches. Raises ValueError where that takes more than is left."""
        return bool(_after_all(self._parts, 1, _Name(name, effort)) >> len(name) & 1)


@dataclass(frozen=True)
class _Name:
    text: str
    effort: Effort
    _found: dict[tuple[Any, int], int] = field(default_factory=dict)

    def places_of(self, kind: Any, value: Any) -> int:
        """Return the places in front of the characters that a part of one character takes."""
        key = kind, value if isinstance(value, int) else id(value)
        if key not in self._found:
            self._found[key] = sum(1 << place for place, c in enumerate(self.text) if _takes(kind, value, c))
        return self._found[key]


def _check(parts: Sequence[tuple[Any, Any]]) -> None:
    for kind, value in parts:
        match kind:
            case op.SUBPATTERN if not (value[1] or value[2]):
                _check(value[3])
            case op.BRANCH:
                for branch in value[1]:
                    _check(branch)
            case op.MAX_REPEAT | op.MIN_REPEAT:
                _check(value[2])
            case op.ASSERT | op.ASSERT_NOT if value[0] == 1:
                _check(value[1])
            case _ if kind not in _OF_ONE_CHARACTER and (kind != op.AT or value not in _PLACES):
                raise ValueError(f"{str(kind).lower().replace('_', ' ')} is not read in a pattern")


def _after_all(parts: Sequence[tuple[Any, Any]], places: int, name: _Name) -> int:
    """Return where in the name the parts, one after another, may end if they begin at one of some places."""
    for kind, value in parts:
        if not places:
            return 0
        places = _after(kind, value, places, name)
    return places


def _after(kind: Any, value: Any, places: int, name: _Name) -> int:
    name.effort.spend()
    match kind:
        case op.SUBPATTERN:
            return _after_all(value[3], places, name)
        case op.BRANCH:
            found = 0
            for branch in value[1]:
                found |= _after_all(branch, places, name)
            return found
        case op.MAX_REPEAT | op.MIN_REPEAT:
            least, most, repeated = value
            return _after_repeats(least, most, repeated, places, name)
        case op.ASSERT | op.ASSERT_NOT:
            single = [1 << place for place in range(len(name.text) + 1) if places >> place & 1]
            holds = kind == op.ASSERT
            return sum(one for one in single if bool(_after_all(value[1], one, name)) == holds)
        case op.AT:
            end = 1 << len(name.text)
            return places & (1 if value == op.AT_BEGINNING else end if value == op.AT_END else _boundaries(name.text))
    return (places & name.places_of(kind, value)) << 1


def _after_repeats(least: int, most: int, parts: Sequence[tuple[Any, Any]], places: int, name: _Name) -> int:
    """Return the places after the repeats. More than one a character of the name match nothing new: some are empty."""
    bound = len(name.text) + 1
    for _ in range(min(least, bound)):
        places = _after_all(parts, places, name)
    if most == op.MAXREPEAT and len(parts) == 1 and parts[0][0] in _OF_ONE_CHARACTER:
        return _along(places, name.places_of(*parts[0]), bound)
    found = new = places
    for _ in range(min(most - least, bound)):
        new = _after_all(parts, new, name) & ~found
        if not new:
            break
        found |= new
    return found


def _along(places: int, takes: int, bound: int) -> int:
    """Return places with all those behind them that are reached over characters at places in `takes` alone."""
    step = 1
    while step <= bound:  # `takes` are those where so many in a row begin
        places |= (places & takes) << step
        takes &= takes >> step
        step *= 2
    return places


def _takes(kind: Any, value: Any, c: str) -> bool:
    """Return True if a part of one character is this one."""
    match kind:
        case op.LITERAL:
            return ord(c) == int(value)
        case op.NOT_LITERAL:
            return ord(c) != int(value)
        case op.ANY:
            return c != "\n"
        case op.RANGE:
            return bool(value[0] <= ord(c) <= value[1])
        case op.CATEGORY:
            return not _CATEGORIES[_OTHERS[value]](c) if value in _OTHERS else _CATEGORIES[value](c)
    is_negated = value[0][0] == op.NEGATE
    return any(_takes(part, range_, c) for part, range_ in value[is_negated:]) != is_negated


def _boundaries(name: str) -> int:
    """Return the places between a character of words and another one, or the name's end."""
    words = [False, *map(_CATEGORIES[op.CATEGORY_WORD], name), False]
    return sum(1 << place for place in range(len(name) + 1) if words[place] != words[place + 1])
