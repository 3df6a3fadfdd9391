"""Recorded runs, replayed by today's code: a change that would break runs under way is seen here."""

import asyncio
import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import PayloadConverter
from temporalio.worker import Replayer

from service.telemetry import temporal_interceptor
from workflows.leases import ServingWorkflow
from workflows.rl import RLWorkflow
from workflows.services import (
    ExportWorkflow,
    GraderWorkflow,
    PreviewWorkflow,
    ScheduledRunWorkflow,
    SweepWorkflow,
    TrackWorkflow,
    UntrainedModelWorkflow,
    WebhookWorkflow,
)
from workflows.session import SessionWorkflow
from workflows.sft import SFTWorkflow

WORKFLOWS = [
    SFTWorkflow,
    RLWorkflow,
    SessionWorkflow,
    ScheduledRunWorkflow,
    SweepWorkflow,
    WebhookWorkflow,
    ServingWorkflow,
    GraderWorkflow,
    PreviewWorkflow,
    TrackWorkflow,
    UntrainedModelWorkflow,
    ExportWorkflow,
]
HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))


def test_there_are_histories() -> None:
    assert [path.stem for path in HISTORIES] == [
        "cancelled",
        "export",
        "failed",
        "grader",
        "joined",
        "paused",
        "preview",
        "rl",
        "rollouts",
        "scheduled",
        "scheduled_skipped",
        "serving",
        "session",
        "succeeded",
        "sweep",
        "track",
        "untrained_model",
        "webhook",
        "worker_lost",
    ]


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_recorded_run_replays(path: Path) -> None:
    text = await asyncio.to_thread(path.read_text)
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    history = WorkflowHistory.from_json(started["workflowId"], text)  # a scheduled run's id is made of it
    await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(history)


@pytest.mark.parametrize("name", ["rollouts", "session"])
async def test_a_run_replays_alike_with_traces_and_leaves_no_spans(name: str) -> None:
    """Begun by a host with traces, as the header tells, or without; ids of traces decide nothing."""
    text = await asyncio.to_thread((Path(__file__).parent / "histories" / f"{name}.json").read_text)
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    interceptor = temporal_interceptor(provider.get_tracer("replay"))
    for is_traced in (True, False):
        history = WorkflowHistory.from_json(name, text)
        if is_traced:
            started = history.events[0].workflow_execution_started_event_attributes
            (context,) = PayloadConverter.default.to_payloads([{"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}])
            started.header.fields["_tracer-data"].CopyFrom(context)
        replayer = Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter, interceptors=[interceptor])
        await replayer.replay_workflow(history)
    assert kept.get_finished_spans() == ()
