"""The grade activity: every sample a line, in order; finished grades outlive a kill; refusals come early."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import ActivityEnvironment

from activities.grading.grade import Grade, Graded, GradeRequest
from activities.grading.open_grader import combined
from activities.host_context import HostContext
from longshore.fields import Artifact
from longshore.grading import Grader, SampleGrade, parse_expression
from shared.errors import InvalidInput, StoreUnavailable
from shared.runs.acceptance import parse_grader
from shared.settings import GradingSettings, Settings
from shared.storage.artifacts import seal, upload_artifact
from shared.storage.store import LocalStore
from tests.activities.grading.sandboxes import REFUSAL, REPOSITORY
from tests.activities.scoring_server import Judge, completion, scoring_server
from tests.waiting import wait_until

CHECK = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
judge = pytest.fixture(scoring_server)
needs_sandbox = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def samples(tmp_path: Path, *rows: Any, files: int = 1) -> Artifact:
    folder = tmp_path / "samples"
    folder.mkdir(exist_ok=True)
    share = -(-len(rows) // files)
    for number in range(files):
        lines = [json.dumps(row) for row in rows[number * share : (number + 1) * share]]
        (folder / f"part-{number:03d}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    seal(folder)
    return upload_artifact(LocalStore(tmp_path / "samples-store"), "samples", folder)


def row(text: Any, answer: Any) -> dict[str, Any]:
    return {"sample": {"output_text": text}, "item": {"answer": answer}}


def settings(tmp_path: Path, **grading: Any) -> Settings:
    return Settings(root=tmp_path / "machine", grading=GradingSettings(**grading))


def graded(tmp_path: Path, grader: Any, *rows: Any, **grading: Any) -> tuple[Graded, list[SampleGrade]]:
    request = GradeRequest(samples=samples(tmp_path, *rows), grader=parse_grader(grader))
    found: Graded = ActivityEnvironment().run(Grade(HostContext(settings(tmp_path, **grading))).grade, request)
    assert not list((tmp_path / "machine" / "scratch").iterdir())
    return found, grades_in(found)


def grades_in(found: Graded) -> list[SampleGrade]:
    lines = Path(found.grades_uri.removeprefix("file://")).read_text().splitlines()
    return [SampleGrade.model_validate_json(line) for line in lines]


def test_every_sample_gets_a_line_in_order(tmp_path: Path) -> None:
    rows = [row(str(n), str(n if n % 3 else -1)) for n in range(200)] + [{"sample": {"output_text": "x"}}]
    request = GradeRequest(samples=samples(tmp_path, *rows, files=3), grader=parse_grader(CHECK))
    found = ActivityEnvironment().run(Grade(HostContext(settings(tmp_path))).grade, request)
    grades = grades_in(found)
    assert [grade.grade for grade in grades[:-1]] == [float(n % 3 > 0) for n in range(200)]
    assert grades[67].place == "part-001.jsonl:1" and len(grades) == 201
    assert grades[-1].grade is None and grades[-1].error is not None
    summary = found.summary
    assert (summary.num_samples, summary.num_graded, summary.num_failed) == (201, 200, 1)
    share = 133 / 200
    assert summary.mean == pytest.approx(share) and summary.std == pytest.approx((share * (1 - share)) ** 0.5)
    assert summary.reasons == ("part-002.jsonl:67: item.answer is not in this row: item has no field 'answer'",)


def test_a_retry_returns_at_once_and_parts_are_gone(tmp_path: Path) -> None:
    first, _ = graded(tmp_path, CHECK, *[row("a", "a")] * 100)
    store = tmp_path / "machine" / "store" / "graded"
    assert not [path for path in store.rglob("*.jsonl") if "-parts" in str(path)]
    (tmp_path / "samples-store" / "samples" / "part-000.jsonl").unlink()
    request = GradeRequest(samples=Artifact(uri="s3://elsewhere/x", sha256=_sha(tmp_path)), grader=parse_grader(CHECK))
    again = ActivityEnvironment().run(Grade(HostContext(settings(tmp_path))).grade, request)
    assert again == first


def _sha(tmp_path: Path) -> str:
    import hashlib

    return hashlib.sha256((tmp_path / "samples-store" / "samples" / "manifest.json").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there is nothing to grade"),
        ([row("a", "a"), {"sample": {}}], "part-000.jsonl:2: sample.output_text must be a text"),
        ([{"item": {}}], "part-000.jsonl:1: sample: this field is required"),
        ([row("a", "a") | {"other": 1}], "part-000.jsonl:1: other: there is no such field"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        graded(tmp_path, CHECK, *rows)
    assert message in str(refused.value)
    assert not list((tmp_path / "machine" / "scratch").iterdir())


@needs_sandbox
def test_a_multi_grader_combines_its_parts(tmp_path: Path) -> None:
    similar = {**CHECK, "type": "text_similarity", "evaluation_metric": "fuzzy_match"}
    del similar["operation"]
    source = "def grade(sample, item):\n    return {'12': 1, '1': 0.25}[sample['output_text']]"
    grader = {
        "type": "multi",
        "name": "both",
        "graders": {"exact": CHECK, "close": similar, "code": {"type": "python", "name": "c", "source": source}},
        "calculate_output": "max(exact, 0.5 * close) + code / exact",
    }
    _, grades = graded(tmp_path, grader, row("12", "12"), row("1", "12"), row("x", "12"))
    assert grades[0].grade == 2.0 and grades[0].parts == {"exact": 1.0, "close": 1.0, "code": 1.0}
    assert grades[1].grade is None and grades[1].error == "calculate_output: / of 0.25 and 0 has no value"
    assert grades[1].parts == {"exact": 0.0, "close": pytest.approx(2 / 3), "code": 0.25}
    assert grades[2].grade is None and grades[2].error == "code: KeyError: 'x' (line 2)"


def test_a_part_without_a_grade_leaves_none() -> None:
    reasons = {"a": None, "b": "why", "c": "so"}
    grades = {"a": 1.0, "b": None, "c": None}
    parts = {name: SampleGrade(place="", grade=grades[name], error=reasons[name]) for name in grades}
    found = combined(parts, parse_expression("a + b + c"))
    assert found == SampleGrade(place="", grade=None, error="b: why; c: so", parts=grades)


@needs_sandbox
@pytest.mark.parametrize(
    ("grader", "place", "message"),
    [
        ({"type": "python", "name": "p", "source": "def grade(: pass"}, "grader.source", "SyntaxError"),
        (
            {
                "type": "multi",
                "name": "m",
                "graders": {"code": {"type": "python", "name": "p", "source": "import numpy; grade = 1"}},
                "calculate_output": "code",
            },
            "grader.graders.code.source",
            "No module named 'numpy'",
        ),
        (
            {"type": "score_model", "name": "s", "model": "m", "input": [{"role": "user", "content": "x"}]},
            "grader.base_url",
            "name the server",
        ),
    ],
)
def test_check_grader_refuses_before_anything_is_sampled(tmp_path: Path, grader: Any, place: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        ActivityEnvironment().run(Grade(HostContext(settings(tmp_path))).check_grader, parse_grader(grader))
    assert refused.value.place == place and message in refused.value.message


@needs_sandbox
def test_check_grader_passes_what_can_grade(tmp_path: Path) -> None:
    grader: Grader = parse_grader({"type": "python", "name": "p", "source": SLOW})
    ActivityEnvironment().run(Grade(HostContext(settings(tmp_path))).check_grader, grader)
    assert not list(tmp_path.rglob("scratch/*"))


SLOW = """
import time

def grade(sample, item):
    time.sleep(0.02)
    return item["n"] % 5
"""
KILLED = """
import sys
from pathlib import Path
from activities.grading.grade import Grade, GradeRequest
from activities.host_context import HostContext
from shared.settings import Settings
print("up", flush=True)
Grade(HostContext(Settings(root=Path(sys.argv[1])))).grade(GradeRequest.model_validate_json(sys.argv[2]))
"""


@needs_sandbox
def test_finished_grades_outlive_a_kill(tmp_path: Path) -> None:
    rows = [{"sample": {"output_text": ""}, "item": {"n": n}} for n in range(200)]
    grader = parse_grader({"type": "python", "name": "slow", "source": SLOW})
    request = GradeRequest(samples=samples(tmp_path, *rows), grader=grader)
    machine = tmp_path / "machine"
    command = [sys.executable, "-c", KILLED, str(machine), request.model_dump_json()]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (parts := list(machine.rglob("*-parts/*.jsonl"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        started = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    assert parts and len(started) > 2
    kept = {path: path.stat().st_mtime_ns for path in parts}
    # A finished part is believed, not graded again: one that says otherwise shows up in the result.
    first = sorted(parts)[0]
    first.write_text(first.read_text().replace('"grade":4.0', '"grade":4.5'))
    found = ActivityEnvironment().run(Grade(HostContext(settings(tmp_path))).grade, request)
    grades = [grade.grade for grade in grades_in(found)]
    assert len(kept) < 4 and grades[:5] == [0, 1, 2, 3, 4.5] and grades[195:] == [0, 1, 2, 3, 4]
    wait_until(lambda: not any(each.is_running() for each in started), "the end of its sandbox")


def test_a_server_that_goes_away_keeps_what_was_graded(tmp_path: Path, judge: Judge) -> None:
    grader = {
        "type": "score_model",
        "name": "s",
        "model": "m",
        "range": [0, 100],
        "input": [{"role": "user", "content": "{{ sample.output_text }}"}],
    }
    rows = [row("x" * n, "") for n in range(70)]
    said = [(200, dict[str, str](), completion(json.dumps({"result": 1}))) for _ in range(65)]
    judge.replies = [*said, *[(503, {"Retry-After": "0"}, b"")] * 3]
    with pytest.raises(StoreUnavailable, match="the server answered 503"):
        graded(tmp_path, grader, *rows, score_model_url=judge.url, score_model_concurrency=1)
    asked = len(judge.asked)
    assert asked in (68, 69), "64 of the first part, one more and three tries; the next may have begun"
    _, grades = graded(tmp_path, grader, *rows, score_model_url=judge.url, score_model_concurrency=1)
    assert len(judge.asked) - asked == 6, "only the second part is asked for again"
    assert [grade.grade for grade in grades] == [1.0] * 64 + [64.0, 65.0, 66.0, 67.0, 68.0, 69.0]


def test_requests_and_answers_pass_through_temporal(tmp_path: Path) -> None:
    converter = pydantic_data_converter.payload_converter
    request = GradeRequest(samples=Artifact(uri="file:///x", sha256="0" * 64), grader=parse_grader(CHECK))
    found, _ = graded(tmp_path, CHECK, row("a", "a"))
    for value, kind in [(request, GradeRequest), (request.grader, Grader), (found, Graded)]:
        assert converter.from_payloads(converter.to_payloads([value]), [kind]) == [value]  # type: ignore[list-item]
