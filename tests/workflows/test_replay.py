"""Recorded runs, replayed by today's code: a change that would break runs under way is seen here."""

import asyncio
import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workflows.leases.serving import ServingWorkflow
from workflows.rl import RLWorkflow
from workflows.services.scheduled import ScheduledRunWorkflow
from workflows.services.single_activity import (
    ExportWorkflow,
    GraderWorkflow,
    PreviewWorkflow,
    TrackWorkflow,
    UntrainedModelWorkflow,
)
from workflows.services.sweep import SweepWorkflow
from workflows.services.webhook import WebhookWorkflow
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
