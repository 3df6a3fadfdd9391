"""What operators see of a stack: traces of commands, metrics under the names that dashboard and alerts use, its log."""

import gzip
import json
import re
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.spans import Receiver, Span
from tests.end_to_end.stack import Stack, wait_until
from tests.infra.observability import names_of

pytestmark = pytest.mark.slow

# Only where something of that kind has happened does the SDK tell them.
SELDOM = {
    "temporal_activity_execution_failed_total",
    "temporal_workflow_task_execution_failed_total",
    "temporal_request_failure_total",
}


@pytest.fixture(scope="module")
def canary(stack: Stack, traces: Receiver, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word in a file's name and in its only row, which a preview has refused with an error that repeats it."""
    word = "canary-of-a-row-7f3a"
    data = tmp_path_factory.mktemp("seen") / f"{word}.jsonl"
    data.write_text(json.dumps({"messages": [{"role": word, "content": word}]}) + "\n")
    with stack.with_environment(OTEL_EXPORTER_OTLP_ENDPOINT=traces.endpoint):
        refused = stack.cli("preview", "--model", str(tiny_model), "--dataset", str(data), check=False)
    assert word in refused.stderr and refused.code != 0
    return word


def test_a_commands_trace_tells_an_errors_type_and_no_text(traces: Receiver, canary: str) -> None:
    """From the command to the activity that failed."""

    def failed() -> list[Span] | None:
        spans = traces.spans()
        roots = {span.trace for span in spans if span.name == "longshore preview"}
        found = [span for span in spans if span.trace in roots]
        known = {"", *(span.span for span in found)}
        is_there = any(span.name == "RunActivity:preview" for span in found)
        return found if is_there and all(span.parent in known for span in found) else None

    spans = wait_until(failed, "the command's trace", timeout_s=120)
    by_id = {span.span: span for span in spans}
    (span,) = [span for span in spans if span.name == "RunActivity:preview"]
    assert span.attributes["error.type"] == "InvalidInput"
    names = [span.name]
    while span.parent:
        span = by_id[span.parent]
        names.append(span.name)
    assert names[1:3] == ["StartActivity:preview", "StartWorkflow:PreviewWorkflow"]
    assert names[3:] == ["POST /api/v1/preview", "longshore preview"] and span.process == "longshore-cli"
    assert canary.encode() not in b"".join(traces.raw)


def test_dashboard_and_alerts_use_names_that_are_exported(stack: Stack, canary: str) -> None:
    used = names_of()
    assert len(used) > 20

    def missing() -> set[str]:
        return used - stack.names_of_metrics() - SELDOM

    with suppress(TimeoutError):
        wait_until(lambda: not missing(), "every name that is used", timeout_s=60)
    assert not missing()


def test_no_tenant_reaches_metrics(stack: Stack) -> None:
    """The API's own port has no such route, whoever asks; and what is counted names routes by their templates."""
    connection = stack.connection
    asked = httpx.get(f"{connection.api_url}/metrics", headers={"authorization": f"Bearer {connection.api_key}"})
    assert asked.status_code == 404 and "longshore_http" not in asked.text
    web = stack.metrics()["web"]
    routes = {found[1] for name in web if (found := re.search(r"route=([^,}]*)", name))}
    assert "unmatched" in routes and "/metrics" not in routes
    assert any(name.startswith("temporal_request_total{") for name in web)


def test_the_next_steps_of_a_run_are_traced(stack: Stack, options: list[str], tmp_path: Path) -> None:
    """With names of operations and a mark for each step; without a word of the data. An ended run has no steps left."""
    run_id = stack.cli(*options, "--steps", "20000", "--learning-rate", "0.01").json["run_id"]  # until it is cancelled
    target = tmp_path / "trace.json.gz"
    told = stack.cli("profile", run_id, "--steps", "3", "--into", str(target), "--json").json
    assert told["num_bytes"] == target.stat().st_size
    text = gzip.decompress(target.read_bytes()).decode()
    names = [event.get("name") for event in json.loads(text)["traceEvents"]]
    assert names.count("optimizer step") == 3 and "aten::mm" in names
    assert "crates" not in text
    stack.cli("cancel", run_id)
    assert stack.cli("watch", run_id, check=False).code == 103
    refused = stack.cli("profile", run_id, check=False)
    assert refused.code == 100 and "does not run" in refused.stderr
    assert not (stack.root / "store" / "runs" / run_id / "profile.json").exists()
