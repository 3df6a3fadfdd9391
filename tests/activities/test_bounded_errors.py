"""An error that quotes what a user sent is as short as any other, whichever door it leaves by."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from activities.formats.dataset import open_dataset
from activities.grading.grade import grade_sample
from activities.grading.open_grader import GraderMeans
from activities.sources.download import find_sources
from activities.tokenizing.render_prompts import PromptsRequest, write_prompts
from activities.tokenizing.tokenize import TokenizeRequest, preview_of, write_units
from longshore.dataset_runs import DatasetSource
from longshore.fields import Artifact
from longshore.grading import Grader, SampledItem, parse_expression
from longshore.views import LostRow, PreviewRequest, Problem
from shared.errors import InvalidInput, LongshoreError, StoreUnavailable
from shared.settings import Settings
from tests.activities.templates import CHATML, open_model, write_model

LONG = "x" * 1_000_000
ANGRY = "{% for m in messages %}{% if 'ANGRY' in m.content %}{{ raise_exception('bad: ' + m.content) }}{% endif %}"
SOURCE = DatasetSource(uri="file:///rows")
ARTIFACT = Artifact(uri="file:///a", sha256="0" * 64)
MOST = 10_000  # characters
CALM = [{"messages": [{"role": "user", "content": "quay"}, {"role": "assistant", "content": "sacks"}]}]
CROSS = {"messages": [{"role": "user", "content": f"ANGRY {LONG}"}, {"role": "assistant", "content": "y"}]}


def rows_in(folder: Path, *rows: Any) -> Path:
    (folder / "rows").mkdir(parents=True)
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows"


def parsed(**row: Any) -> Callable[[Path], object]:
    return lambda tmp_path: list(open_dataset(rows_in(tmp_path, row), SOURCE))


def graded(source: str) -> Callable[[Path], object]:
    def grade(tmp_path: Path) -> object:
        grader: Grader = TypeAdapter(Grader).validate_python({"type": "python", "name": "g", "source": source})
        sample = SampledItem(sample={"output_text": LONG})
        found = grade_sample(grader, GraderMeans.of(Settings(root=tmp_path)), sample)
        raise InvalidInput(found.error or "")

    return grade


DOORS: dict[str, Callable[[Path], object]] = {
    "a role": parsed(messages=[{"role": LONG, "content": "quay"}]),
    "a column": parsed(**{LONG: 1}),
    "a key twice": lambda tmp_path: list(open_dataset(written(tmp_path, f'{{"{LONG}": 1, "{LONG}": 2}}'), SOURCE)),
    "a call that is no JSON": parsed(conversations=[{"from": "function_call", "value": LONG}]),
    "a URI": lambda tmp_path: find_sources(f"file://{tmp_path}/{LONG}", "acme", Settings(root=tmp_path)),
    "a web page": lambda tmp_path: find_sources(f"http://user:word@{LONG}", "acme", Settings(root=tmp_path)),
    "an expression": lambda _: parse_expression(f"a + {LONG} ("),
    "python's": graded("def grade(sample, item):\n    raise ValueError(sample['output_text'])\n"),
    "a server's": lambda _: refuse(StoreUnavailable(LONG)),
    "a place": lambda _: refuse(InvalidInput("the file is empty", LONG)),
}


def refuse(error: LongshoreError) -> object:
    raise error


def written(folder: Path, line: str) -> Path:
    rows_in(folder)
    (folder / "rows" / "rows.jsonl").write_text(line)
    return folder / "rows"


@pytest.mark.parametrize("door", DOORS)
def test_no_error_is_as_long_as_what_it_quotes(tmp_path: Path, door: str) -> None:
    with pytest.raises((LongshoreError, ValueError)) as raised:
        DOORS[door](tmp_path)
    assert 0 < len(str(raised.value)) < MOST


def test_a_template_that_quotes_the_message_is_told_once_with_the_row(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "chatml")
    (tmp_path / "model" / "chat_template.jinja").write_text(ANGRY + "{% endfor %}" + CHATML)
    model, folder = open_model(tmp_path / "model"), rows_in(tmp_path, *CALM, CROSS, CROSS)
    request = {"dataset": ARTIFACT, "source": SOURCE, "model": ARTIFACT}
    told: list[str] = []
    for write in (
        lambda: write_units(folder, model, TokenizeRequest(**request, max_tokens=64), tmp_path / "units"),
        lambda: write_prompts(folder, model, PromptsRequest(**request, max_prompt_tokens=64), tmp_path),
    ):
        with pytest.raises(InvalidInput) as raised:
            write()
        told.append(str(raised.value))
    for are_prompts in (False, True):
        asked = PreviewRequest(source=SOURCE, model_uri="m", are_prompts=are_prompts)
        preview = preview_of(folder, model, asked)
        assert [row.place for row in preview.report.lost] == ["rows.jsonl:2", "rows.jsonl:3"]
        told += [preview.problem or "", preview.model_dump_json()]
    for text in told:
        assert "bad: ANGRY xxx" in text and "rows.jsonl:2" in text and len(text) < MOST


def test_records_of_failures_are_bounded_and_can_be_written(tmp_path: Path) -> None:
    for record in (Problem(kind="error", message=LONG), LostRow(place="rows.jsonl:1", reason=LONG)):
        assert len(record.model_dump_json()) < MOST
    half = Problem(kind="error", message="half of a character: \ud83d")
    assert Problem.model_validate_json(half.model_dump_json()).message == "half of a character: ?"
