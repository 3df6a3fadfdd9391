"""Whole runs while the keys of their installation are rotated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio.client import Client, WorkflowHandle

from service.sealing import ENCRYPTED, key_of, seal_keys
from service.temporal import connect_temporal
from tests import forks
from tests.waiting import eventually
from tests.workflows.stack import Stack, has_checkpoint, started
from tests.workflows.stand_in_worker import adapter_bytes

OLD, NEW = "old-" * 8, "new-" * 8
STEPS = 60


@pytest.fixture
async def stack(temporal_address: str, tmp_path: Path) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path, has_control=False, seal_key=OLD) as stack:
        yield stack


@asynccontextmanager
async def hosts(stack: Stack, keys: str) -> AsyncIterator[None]:
    """A control host and a GPU host with these keys; and the service, which starts runs by them from now on."""
    stack.client = await connect_temporal(stack.settings.model_copy(update={"seal_key": SecretStr(keys)}))
    gpu = stack.spawn_gpu_host(step_s=0.1, seal_key=keys)
    async with stack.control_host(stack.client):
        yield
        await asyncio.to_thread(forks.end, gpu)


async def sealed_by(stack: Stack, run_id: str) -> set[str]:
    """The keys of all that Temporal has of a run; each payload of it is encrypted."""
    raw = await Client.connect(stack.settings.temporal_address)
    found = set()
    async for event in raw.get_workflow_handle(run_id).fetch_history_events():
        for payloads in (
            event.workflow_execution_started_event_attributes.input,
            event.activity_task_scheduled_event_attributes.input,
            event.activity_task_completed_event_attributes.result,
            event.workflow_execution_signaled_event_attributes.input,
            event.workflow_execution_completed_event_attributes.result,
        ):
            assert all(each.metadata["encoding"] == ENCRYPTED for each in payloads.payloads)
            found |= {key_of(each) for each in payloads.payloads}
    return found


async def test_keys_are_rotated_while_runs_go_on(stack: Stack) -> None:
    """Hosts of each step are up before those of the step before leave, as in a rolling restart."""
    before = await stack.exits.enter_async_context(AsyncExitStack())
    await before.enter_async_context(hosts(stack, OLD))
    handles: list[WorkflowHandle] = [await stack.start(steps=STEPS, is_tracked=False)]
    await eventually(lambda: has_checkpoint(handles[0]), "the first run is under way")
    for keys in (f"{OLD} {NEW}", f"{NEW} {OLD}"):
        following = await stack.exits.enter_async_context(AsyncExitStack())
        await following.enter_async_context(hosts(stack, keys))
        await before.aclose()
        handles.append(await stack.start(steps=STEPS, is_tracked=False))
        before = following
    for handle in handles:
        run = stack.client.get_workflow_handle(handle.id)
        await run.result()
        status = await stack.result(handle.id)
        assert (status.state, status.problem, status.step) == ("succeeded", None, STEPS)
        assert stack.weights(status) == adapter_bytes(7, STEPS)
    old, new = (key.id for key in seal_keys(stack.settings.model_copy(update={"seal_key": SecretStr(f"{OLD} {NEW}")})))
    assert [await sealed_by(stack, handle.id) for handle in (handles[0], handles[-1])] == [{old, new}, {new}]
