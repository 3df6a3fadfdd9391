"""Of many runs at once those that are further go first, lest all wait until the last one is prepared."""

from pathlib import Path

from temporalio.api.enums.v1 import EventType

from tests.waiting import eventually
from tests.workflows.stack import started
from workflows.sft import SFTWorkflow

_OF_OTHERS = 3  # Temporal's own


async def test_a_run_that_is_further_comes_first_in_the_queue(temporal_address: str, tmp_path: Path) -> None:
    """As Temporal was told: the smaller the number, the sooner. Its tenant's share stays what it is."""
    async with started(temporal_address, tmp_path) as stack:
        handle = await stack.start(is_tracked=False)

        async def is_prepared() -> bool:
            return (await handle.query(SFTWorkflow.status)).phase == "waiting_for_worker"

        await eventually(is_prepared, "it is prepared")
        scheduled = [
            event.activity_task_scheduled_event_attributes
            async for event in handle.fetch_history_events()
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        ]
        await handle.terminate()
    turns = {each.activity_type.name: each.priority.priority_key or _OF_OTHERS for each in scheduled}
    assert turns["pack"] < turns["tokenize"] < turns["download"] == turns["begin"] == _OF_OTHERS
    assert not any(each.priority.fairness_key for each in scheduled), "inherited from the run"
