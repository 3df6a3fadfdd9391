"""Metrics, traces and logs of one process: few labels whatever is asked, ids in the log, nothing by default."""

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from sqlalchemy.orm import Session
from starlette.types import Receive, Scope, Send
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

from activities.telemetry import MAX_SPANS, HostStart, JobSeen
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.events import Started, Step
from longshore.fields import Fence
from longshore.runs import RunRecord
from service import telemetry
from service.database import engine
from service.database.engine import open_database
from service.runs.files import InstallationGauges
from service.runs.rows import run_row
from service.runs.runs import queued
from service.telemetry import SeenRequests
from service.temporal import Temporal, connect_temporal, share_of
from shared.log_lines import JsonFormatter
from shared.settings import Settings


async def test_what_is_asked_makes_no_label_of_its_own() -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    name = "longshore_http_requests_total"
    labels = {"method": "OTHER", "route": "unmatched", "status": "404"}
    before = REGISTRY.get_sample_value(name, labels) or 0.0
    transport = httpx.ASGITransport(SeenRequests(refuses))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for number in range(20):
            await client.request(f"BREW{number}", f"/pots/{number}?word=secret{number}")
    assert REGISTRY.get_sample_value(name, labels) == before + 20
    routes = {sample.labels.get("route") for metric in REGISTRY.collect() for sample in metric.samples}
    assert not any("pots" in route for route in routes if route)


def test_of_a_request_its_traceparent_is_taken_and_no_text() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    found = trace.get_current_span(telemetry.context_of(parent)).get_span_context()
    assert trace.format_trace_id(found.trace_id) == "a" * 32
    for broken in (None, "", "secret", f"00-{'0' * 32}-{'b' * 16}-01"):
        assert not trace.get_current_span(telemetry.context_of(broken)).get_span_context().is_valid


def test_a_host_s_start_and_a_job_s_loading_are_spans_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    start = HostStart()
    start.reached("a host of a test's, which no program begins")
    start.tell(0.0)
    start.begin()
    start.tell(time.time())  # it was there before this lease
    assert not kept.get_finished_spans()
    start.begin()
    start.reached("host: connect")
    for _ in range(2):
        start.tell(psutil.Process().create_time())
    imports, connect = kept.get_finished_spans()
    assert (imports.name, connect.name) == ("host: imports", "host: connect")
    assert imports.start_time == int(psutil.Process().create_time() * 1e9) and imports.end_time == connect.start_time
    kept.clear()

    class Plan:
        run_id, job_id = "sft-1", "000001"

    fence, seconds = Fence(epoch=1, attempt=1), {"stage inputs": 4.0, "build engine": 3.0, "make slot": 0.5}
    seen = JobSeen(Plan(), fence, begun_at=100.0)  # type: ignore[arg-type]
    counts = {"first_step": 0, "num_steps": 1, "world_size": 1}
    ids = {"run_id": Plan.run_id, "job_id": Plan.job_id, "fence": fence, "device": "cpu"}
    seen.take(Started(seq=1, time=110.0, seconds=seconds, **counts, **ids))
    *phases, load = kept.get_finished_spans()
    assert [(each.name, each.start_time / 1e9, each.end_time / 1e9) for each in (*phases, load)] == [
        ("stage inputs", 102.5, 106.5),
        ("build engine", 106.5, 109.5),
        ("make slot", 109.5, 110.0),
        ("load", 100.0, 110.0),
    ]
    assert {each.parent and each.parent.span_id for each in phases} == {load.context and load.context.span_id}
    kept.clear()
    for step in range(1, 2 * MAX_SPANS + 2):
        seen.take(Step(seq=step + 1, time=110.0 + step, step=step, metrics={}))
    seen.end()
    jobs = [span for span in kept.get_finished_spans() if span.name == "job"]
    steps = [span for span in kept.get_finished_spans() if span.name == "optimizer step"]
    of_trace = Counter(span.context.trace_id for span in steps)
    assert list(of_trace.values()) == [MAX_SPANS, MAX_SPANS, 1]
    assert [each.links[0].context if each.links else None for each in jobs] == [None, *(b.context for b in jobs[:-1])]
    assert all(job.attributes["longshore.run"] == "sft-1" for job in jobs), "each trace is found by the run's id"
    assert [job.end_time for job in jobs[:-1]] == [job.start_time for job in jobs[1:]]


def test_a_span_is_sent_without_what_is_not_listed() -> None:
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    with (
        pytest.raises(ValueError, match="secret"),
        tracer.start_as_current_span("work", attributes={"longshore.run": "sft-1", "url.query": "secret"}) as span,
    ):
        span.add_event("secret", {"row": "secret"})
        raise ValueError("secret of a user")
    (whole,) = kept.get_finished_spans()
    assert "secret" in whole.to_json()
    sent = telemetry.scrubbed(whole)
    assert "secret" not in sent.to_json()
    assert dict(sent.attributes) == {"longshore.run": "sft-1", "error.type": "ValueError"}
    assert (sent.name, sent.context, sent.start_time, sent.end_time) == (
        whole.name,
        whole.context,
        whole.start_time,
        whole.end_time,
    )


@workflow.defn(sandboxed=False)  # its module imports much
class Endless:
    """One activity an execution, of three."""

    @workflow.run
    async def run(self, number: int) -> None:
        await workflow.execute_activity("work", start_to_close_timeout=timedelta(seconds=60))
        if number < 3:
            workflow.continue_as_new(number + 1)


@workflow.defn(sandboxed=False)
class Nested:
    """Two activities, and itself once as a child."""

    @workflow.run
    async def run(self, is_outer: bool) -> None:
        for _ in range(2):
            await workflow.execute_activity("work", start_to_close_timeout=timedelta(seconds=60))
        if is_outer:
            await workflow.execute_child_workflow(Nested.run, False)


@activity.defn(name="work")
async def nothing() -> None:
    pass


async def spans_of(
    address: str, tracer: trace.Tracer, kept: InMemorySpanExporter, of: type, start: object, is_traced: bool
) -> tuple[str, Sequence[ReadableSpan]]:
    """Run a workflow to its end, and return its id and all spans.

    Nothing is kept of it between its tasks, as if each ran on another host. `is_traced`: its caller names a trace.
    """
    queue, interceptors = uuid.uuid4().hex, [telemetry.temporal_interceptor(tracer)]
    client = await Client.connect(address)
    caller = await Client.connect(address, interceptors=interceptors) if is_traced else client
    async with Worker(
        client,
        task_queue=queue,
        workflows=[of],
        activities=[nothing],
        interceptors=interceptors,
        max_cached_workflows=0,
    ):
        await caller.execute_workflow(of.run, start, id=queue, task_queue=queue)  # type: ignore[attr-defined]
    return queue, kept.get_finished_spans()


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(kept: InMemorySpanExporter) -> trace.Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return provider.get_tracer("test")


async def test_a_workflow_that_continues_as_new_begins_another_trace_with_a_link(
    temporal_address: str, tracer: trace.Tracer, kept: InMemorySpanExporter
) -> None:
    with tracer.start_as_current_span("request") as request:
        _, spans = await spans_of(temporal_address, tracer, kept, Endless, 1, is_traced=True)
    roots = [span for span in spans if span.name == "RunWorkflow:Endless"]
    ids = [span.context.trace_id for span in roots]
    assert len(roots) == len(set(ids)) == 3 and ids[0] == request.get_span_context().trace_id
    assert [span.links[0].context.trace_id if span.links else None for span in roots] == [None, *ids[:-1]]
    assert [span.context.trace_id for span in spans if span.name == "RunActivity:work"] == ids


async def test_what_a_schedule_starts_is_one_trace(
    temporal_address: str, tracer: trace.Tracer, kept: InMemorySpanExporter
) -> None:
    """No caller names a trace."""
    queue, spans = await spans_of(temporal_address, tracer, kept, Nested, True, is_traced=False)
    assert sum(span.name == "RunActivity:work" for span in spans) == 4
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    (root,) = [span for span in spans if span.parent is None]
    assert root.name == "RunWorkflow:Nested" and root.attributes and root.attributes["temporalWorkflowID"] == queue
    assert {span.parent.span_id for span in spans if span.parent} <= {
        span.context.span_id for span in spans if span.context
    }


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    telemetry.start_tracing("test")
    assert telemetry.tracing_interceptors() == ()


async def test_a_line_of_the_log_has_the_ids_of_its_activity(temporal_address: str, tmp_path: Path) -> None:
    lines: list[dict] = []
    formatter = JsonFormatter(telemetry.current_ids)

    @activity.defn
    def told() -> None:
        record = logging.LogRecord("x", logging.WARNING, __file__, 1, "a %s", ("line\n\x7fforged",), None)
        text = formatter.format(record)
        assert text.isascii() and text.isprintable()
        lines.append(json.loads(text))

    client = await connect_temporal(Settings(root=tmp_path, temporal_address=temporal_address))
    queue = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as threads:
        async with Worker(client, task_queue=queue, activities=[told], activity_executor=threads):
            await client.execute_activity(
                "told",
                id=queue,
                task_queue=queue,
                start_to_close_timeout=timedelta(seconds=60),
                priority=share_of("acme"),
            )
    (line,) = lines
    assert line["message"] == "a line\n\x7fforged" and (line["level"], line["logger"]) == ("WARNING", "x")
    assert (line["activity"], line["tenant"]) == ("told", "acme")


async def test_of_many_tenants_those_that_used_most_have_a_series(temporal_address: str, tmp_path: Path) -> None:
    settings = Settings(root=tmp_path, temporal_address=temporal_address, shape=f"s{uuid.uuid4().hex[:8]}")
    database = open_database(settings)
    engine.upgrade(database)
    run = SFTRun(model="file:///m", dataset=DatasetSource(uri="file:///d"), epochs=1, batch_size=1)

    def add(session: Session) -> None:
        for number in range(200):
            record = RunRecord(run_id=f"sft-{number}", tenant=f"t{number}", run=run, created_at=0.0, threads_per_rank=1)
            session.add(run_row(record, queued(record).model_copy(update={"gpu_seconds": float(number)})))

    await database.writing(add)
    await InstallationGauges(settings, database, Temporal(settings)).refresh()
    (metric,) = [metric for metric in REGISTRY.collect() if metric.name == "longshore_tenant_gpu_seconds"]
    found = {sample.labels["tenant"]: sample.value for sample in metric.samples}
    assert len(found) == 21 and found["t199"] == 199.0 and "t179" not in found
    assert sum(found.values()) == sum(range(200))
    assert REGISTRY.get_sample_value("longshore_queue_depth", {"role": "gpu", "shape": settings.shape}) == 0.0
    assert REGISTRY.get_sample_value("longshore_runs", {"phase": "queued"}) == 200.0
    # Of a series that begins with its first event, Prometheus tells no increase.
    for state in ("paused", "succeeded", "failed", "cancelled"):
        assert REGISTRY.get_sample_value("longshore_ended_runs", {"state": state}) == 0.0
    assert REGISTRY.get_sample_value("longshore_sampler_proofs_total", {"outcome": "refuted"}) is not None
    assert REGISTRY.get_sample_value("longshore_jobs_total", {"outcome": "lost"}) is not None
    database.close()
