"""Recorded runs, replayed by today's code: a change that would break runs under way is seen here."""

import asyncio
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workflows.rl import RLWorkflow
from workflows.sft import SFTWorkflow

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))


def test_there_are_histories() -> None:
    assert [path.stem for path in HISTORIES] == ["cancelled", "failed", "rl", "rollouts", "succeeded", "worker_lost"]


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_recorded_run_replays(path: Path) -> None:
    text = await asyncio.to_thread(path.read_text)
    history = WorkflowHistory.from_json(path.stem, text)
    await Replayer(workflows=[SFTWorkflow, RLWorkflow], data_converter=pydantic_data_converter).replay_workflow(history)
