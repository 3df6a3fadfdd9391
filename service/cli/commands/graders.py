"""`longshore grader`: try a grader on samples before a run."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.command import CommandAnswer, command, group
from service.cli.exits import DONE, FAILED, USAGE, Stop
from service.cli.output.render import plain, print_table, say
from service.cli.run_options import json_of

if TYPE_CHECKING:
    from service.cli.client import CliClient
    from shared.grading.graders import Grader

_MOST = 100
_EXAMPLES = """\b
Examples:
  longshore grader run grader.json samples.jsonl
  longshore grader run grader.json --text "12 sacks" --item '{"answer": "12"}'
  longshore grader check grader.json
"""
GraderFile = Annotated[
    str, typer.Argument(metavar="GRADER", help="In OpenAI's fields: a JSON file, or the JSON itself (docs/graders.md).")
]
app = group("grader", help="Try a grader on samples, before a run.", epilog=_EXAMPLES)


@command(app)
def run(
    client: "CliClient",
    grader: GraderFile,
    samples: Annotated[
        str | None,
        typer.Argument(metavar="SAMPLES", help='JSONL of {"sample": {"output_text": ...}, "item": {...}}; - is stdin.'),
    ] = None,
    text: Annotated[str | None, typer.Option(help="What the model wrote, instead of SAMPLES.")] = None,
    item: Annotated[str | None, typer.Option(help="With --text: the dataset's row, as JSON.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Samples to grade, from the first.")] = 20,
) -> CommandAnswer:
    """Grade samples as a run would. Exit code 100 if one has no grade."""
    checked = _checked(grader)
    rows = list(_rows(samples, text, item, limit))
    grades = [{"place": place, **client.grade(checked, sample)} for place, sample in rows]
    code = FAILED if any(each["grade"] is None for each in grades) else DONE
    return CommandAnswer(grades, partial(_print, grades), code)


@command(app)
def check(client: "CliClient", grader: GraderFile) -> CommandAnswer:
    """Check a grader: parse its fields, templates and formula, and load its source."""
    checked = _checked(grader)
    client.grade(checked, None)
    return CommandAnswer(checked, partial(say, f"{checked.name} can be used"))


def _checked(given: str) -> "Grader":
    from shared.errors import InvalidInput
    from shared.grading.graders import parse_grader

    try:
        return parse_grader(json_of(given, "GRADER"))
    except InvalidInput as error:
        raise Stop(str(error), USAGE, "docs/graders.md has the fields of each kind") from None


def _rows(samples: str | None, text: str | None, item: str | None, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if (samples is None) == (text is None):
        raise Stop("give either SAMPLES or --text", USAGE, "longshore grader run --help has examples")
    if text is not None:
        yield "--text", {"sample": {"output_text": text}, "item": _object(item or "{}", "--item")}
        return
    if item is not None:
        raise Stop("--item goes with --text: SAMPLES have items of their own", USAGE)
    name = "stdin" if samples == "-" else str(samples)
    with sys.stdin if samples == "-" else _opened(name) as lines:
        number = graded = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if graded == limit:
                say(f"only the first {limit} samples are graded: --limit takes up to {_MOST}")
                return
            graded += 1
            yield f"{name}:{number}", _sample(_object(line, f"{name}:{number}"), f"{name}:{number}")
    if not graded:
        raise Stop(f"{name} has no samples", USAGE)


def _opened(name: str) -> Any:
    path = Path(name)
    if not path.is_file():
        raise Stop(f"SAMPLES: there is no file {name}", USAGE)
    return path.open()


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Stop(f"{place}: no JSON: {error}", USAGE) from None
    if not isinstance(found, dict):
        raise Stop(f"{place}: expected a JSON object", USAGE)
    return found


def _sample(row: dict[str, Any], place: str) -> dict[str, Any]:
    from pydantic import ValidationError

    from shared.grading.graders import SampledItem

    try:
        return SampledItem.model_validate(row).model_dump(mode="json")
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise Stop(f"{place}: {rule}", USAGE, 'a sample is {"sample": {"output_text": ...}, "item": {...}}') from None


def _print(grades: list[dict[str, Any]]) -> None:
    parts = list(grades[0]["parts"]) if grades else []
    rows = (
        (
            plain(each["place"]),
            _number(each["grade"]),
            *(_number(each["parts"].get(part)) for part in parts),
            f"{each['duration_s']:.2f}",
            plain(each["error"] or ""),
        )
        for each in grades
    )
    print_table(("sample", "grade", *parts, "seconds", ""), rows)
    found = [each["grade"] for each in grades if each["grade"] is not None]
    if len(grades) > 1 and found:
        say(f"mean {sum(found) / len(found):.4g} of {len(found)} grades; {len(grades) - len(found)} without one")


def _number(grade: float | None) -> str:
    return "" if grade is None else f"{grade:.6g}"
