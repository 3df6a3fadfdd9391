"""A process of its own: runs every regular expression of our modules on strings that are to keep it busy.

`python -m tests.security.attacks.patterns ROOT PACKAGE...` prints one line of JSON for each that took too long.
"""

import ast
import itertools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeGuard

NUM_CHARS = 60_000
CPU_S = 0.5
"""A linear pattern takes a hundredth of this, a quadratic one many times as much, on a fast processor too."""
_CALLS = ("match", "search", "fullmatch", "findall", "finditer", "sub", "split")
_MOST_UNITS = 8


@dataclass(frozen=True)
class Use:
    """A pattern, and how our code asks it."""

    place: str
    pattern: str
    flags: int
    call: str


def uses(root: Path, packages: list[str]) -> list[Use]:
    """Every regular expression that a module names, with the calls that are made of it anywhere."""
    sources = {path: path.read_text() for package in packages for path in sorted((root / package).rglob("*.py"))}
    everything = "\n".join(sources.values())
    texts = {name: value for source in sources.values() for name, value in _texts(ast.parse(source))}
    found = []
    for path, source in sources.items():
        tree = ast.parse(source)
        names = {id(node.value): node.targets[0].id for node in ast.walk(tree) if _is_named(node)}
        for node in ast.walk(tree):
            call = _call_of_re(node)
            if call is None:
                continue
            pattern, flags = _text(node.args[0], texts), _flags(node)
            calls = [call]
            if call == "compile":
                name = names.get(id(node), "")
                asked = set(re.findall(rf"\b{name}\.({'|'.join(_CALLS)})\(", everything)) if name else set()
                calls = sorted(asked) or ["fullmatch", "search"]
            place = f"{path.relative_to(root)}:{node.lineno}"
            found += [Use(place, pattern, flags, each) for each in calls]
    return found


def _texts(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                yield name, text


def _is_named(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def _call_of_re(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name)) if name in ("compile", *_CALLS):
            return name
        case _:
            return None


def _text(node: ast.expr, texts: dict[str, str]) -> str:
    """A literal; of what is put together at run time, a text in the place of what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, texts) for part in parts)
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            return texts.get(name, "x")
        case _:
            return "7"


def _flags(node: ast.Call) -> int:
    flags = [*node.args[1:], *(word.value for word in node.keywords if word.arg == "flags")]
    return sum(int(getattr(re, flag.attr)) for flag in flags if _is_flag(flag))


def _is_flag(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"


def units(pattern: str) -> list[str]:
    """The words of a pattern's text, and signs that its classes may have."""
    literal = re.sub(r"\\[A-Za-z]|\(\?(P<\w+>|[:!=<>]+)", " ", pattern)
    words = [*re.findall(r"[\w<>/`]+", literal), *re.findall(r"\\(\W)", pattern)]
    return [*dict.fromkeys((*"a1 ", *words, *(word[0] for word in words), "\n"))][:_MOST_UNITS]


def hostile(units: list[str]) -> Iterator[str]:
    """Long strings that nearly fit: a unit again and again, behind another one or before it, then something else."""
    for one, two in itertools.product(units, repeat=2):
        times = NUM_CHARS // len(one + two)
        for body in (one + two * (2 * times), (one + two) * times, one * times + two * times):
            yield body
            yield f"{body}\x00"


class TooLong(Exception):
    """It took more than its share of CPU time."""


def within_cpu_time(work: Callable[[], object]) -> bool:
    """Whether work is done within CPU_S of this process's own time. Regular expressions hear signals."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        work()
    except TooLong:
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return True


def main() -> None:
    root, packages = Path(sys.argv[1]), sys.argv[2:]
    found = uses(root, packages)
    for use in found:
        compiled = re.compile(use.pattern, use.flags)
        for text in hostile(units(use.pattern)):
            if not within_cpu_time(partial(_ask, compiled, use.call, text)):
                print(json.dumps({"place": use.place, "pattern": use.pattern, "call": use.call, "text": text[:60]}))
                break
    print(json.dumps({"tried": len(found)}), flush=True)


def _ask(pattern: re.Pattern[str], call: str, text: str) -> None:
    match call:
        case "findall" | "finditer" | "sub" | "split":
            pattern.findall(text)
        case _:
            getattr(pattern, call)(text)


if __name__ == "__main__":
    main()
