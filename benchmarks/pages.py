"""Writes the tables of docs/runs.md and docs/metrics.md: `python -m benchmarks.pages`. Tests compare them.

Their rows come from the models of runs and from longshore/metrics.py; all else of a page is written by hand.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from longshore import metrics
from service.cli.run_options import UNLESS, Form, RunOption, options_of, run_model

DOCS = Path(__file__).parents[1] / "docs"
_FORMS_IN_WORDS: dict[Form, str] = {
    "names": "list of text",
    "source": "dataset",
    "sources": "dataset, or a list of them",
    "named": "object of datasets",
}
_TYPES_IN_WORDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "boolean"}
_TYPES_IN_WORDS |= {list[int]: "list of integers", list[float]: "list of numbers"}


def with_tables(page: str, tables: Iterable[str]) -> str:
    """Return a page with these as its first tables."""
    left = iter(tables)
    return re.sub(r"(?m)(?:^\|.*\n)+", lambda found: next(left, found[0]), page)


def pages() -> dict[str, str]:
    """Return the pages as they are to be, by the names of their files."""
    tables = {"runs.md": [_of_runs()], "metrics.md": map(_of_metrics, metrics.TABLES)}
    return {name: with_tables((DOCS / name).read_text(), made) for name, made in tables.items()}


def _of_runs() -> str:
    """A field that is the same in several kinds of runs is one row."""
    kinds_of: dict[tuple[str, ...], list[str]] = {}
    for kind in ("sft", "dpo", "distill", "reward", "rl"):
        for option in options_of(run_model(kind)):
            kinds_of.setdefault(_cells(option), []).append(kind)
    rows = ([field, flag, ", ".join(kinds), *cells] for (field, flag, *cells), kinds in kinds_of.items())
    return _table(["field", "option", "runs", "type", "default", "meaning"], rows)


def _of_metrics(table: tuple[metrics.Metric, ...]) -> str:
    is_combined = table in metrics.COMBINED
    how = ([each.combined.replace("_", " ")] if is_combined else [] for each in table)
    rows = ([f"`{each.name}`", each.unit, each.means, *last] for each, last in zip(table, how, strict=True))
    return _table(["metric", "unit", "is", *(["combined by"] if is_combined else [])], rows)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def _cells(option: RunOption) -> tuple[str, ...]:
    field = f"{option.field}.kind" if option.form == "variant" else option.field
    meaning = option.help.replace("|", "\\|")
    return f"`{field}`", f"`--{option.flag}`", _type(option), _default(option), meaning


def _type(option: RunOption) -> str:
    words = _FORMS_IN_WORDS.get(option.form, "object")
    if option.form == "variant":
        words = f"`{option.kind}`"
    elif option.form in ("value", "reading") and get_origin(option.parsed_as) is Literal:
        words = " \\| ".join(f"`{choice}`" for choice in get_args(option.parsed_as))
    elif option.form in ("value", "reading"):
        words = _TYPES_IN_WORDS.get(option.parsed_as, "list of text")
    return f"{words}, {option.bounds}" if option.bounds else words


def _default(option: RunOption) -> str:
    if option.is_required:
        return "required"
    if option.field in UNLESS and option.default is None:
        value, other = UNLESS[option.field]
        return f"{value:g} on the command line, without `{other}`"
    if option.form in ("layout", "variant") or option.default is None:
        return ""
    return f"`{option.default}`" if option.parsed_as is not bool else str(option.default).lower()


if __name__ == "__main__":
    for name, page in pages().items():
        (DOCS / name).write_text(page)
