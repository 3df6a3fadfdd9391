"""Record the histories that test_replay.py replays: `python -m tests.workflows.record_histories TEMPORAL_ADDRESS`.

`... TEMPORAL_ADDRESS RUN_ID NAME` records one ended run of a stack that is up: `rollouts`, a server-driven run
with steps ahead, held-out prompts, a sampler and a worker killed.

Do so only when runs that are under way need not survive the change: a history that no longer replays means that a
deployed workflow would break.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from activities.worker_process import processes_of
from tests.workflows import test_rl
from tests.workflows.test_sft import Stack, eventually, failure_of, has_checkpoint, started
from workflows.rl import RLWorkflow

HISTORIES = Path(__file__).parent / "histories"


async def main(address: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with started(address, Path(root)) as stack:
            await stack.add_gpu_host(step_s=0.03)
            await _record(stack, "succeeded", await _succeeded(stack))
            await _record(stack, "worker_lost", await _worker_lost(stack))
            await _record(stack, "cancelled", await _cancelled(stack))
            await _record(stack, "failed", await _failed(stack))
    await record_rl(address)


async def record_run(address: str, run_id: str, name: str) -> None:
    """A run of a stack of its own."""
    client = await Client.connect(address, data_converter=pydantic_data_converter)
    await _write(client, name, run_id)


async def record_rl(address: str) -> None:
    """A client-driven run: steps, the same key twice, groups that cannot be trained, a worker killed, an idle time."""
    with tempfile.TemporaryDirectory() as root:
        async with test_rl.started(address, Path(root)) as stack:
            await stack.add_gpu_host(step_s=0.1)
            await _record(stack, "rl", await _client_driven(stack))


async def _record(stack: Stack, name: str, run_id: str) -> None:
    await _write(stack.client, name, run_id)


async def _write(client: Client, name: str, run_id: str) -> None:
    history = await client.get_workflow_handle(run_id).fetch_history()
    HISTORIES.mkdir(exist_ok=True)
    (HISTORIES / f"{name}.json").write_text(json.dumps(_without_traces(json.loads(history.to_json())), indent=1) + "\n")


def _without_traces(value: Any) -> Any:
    """Stack traces are no part of what a replay compares."""
    match value:
        case dict():
            return {key: _without_traces(item) for key, item in value.items() if key != "stackTrace"}
        case list():
            return [_without_traces(item) for item in value]
        case _:
            return value


async def _succeeded(stack: Stack) -> str:
    handle = await stack.start()
    await handle.result()
    return handle.id


async def _worker_lost(stack: Stack) -> str:
    handle = await stack.start(steps=100)
    await eventually(lambda: has_checkpoint(handle), "a checkpoint")
    for process in processes_of(stack.worker_ids()[0]):
        process.kill()
    await handle.result()
    return handle.id


async def _cancelled(stack: Stack) -> str:
    handle = await stack.start(steps=1000)
    await eventually(lambda: has_checkpoint(handle), "a checkpoint")
    await handle.cancel()
    await failure_of(handle)
    return handle.id


async def _client_driven(stack: test_rl.RLStack) -> str:
    handle = await stack.start_rl(idle_s=1)
    await stack.train(handle, 1)
    await stack.train(handle, 1)
    await handle.execute_update(RLWorkflow.train_step, stack.broken())
    training = asyncio.create_task(stack.train(handle, 2))
    await asyncio.sleep(0.2)
    for process in processes_of(stack.worker_ids()[0]):
        process.kill()
    await training
    await asyncio.sleep(2)
    await stack.train(handle, 3)
    await handle.execute_update(RLWorkflow.finish)
    await handle.result()
    return handle.id


async def _failed(stack: Stack) -> str:
    handle = await stack.start(dataset="file:///bad.jsonl")
    await failure_of(handle)
    return handle.id


if __name__ == "__main__":
    match sys.argv[1:]:
        case [address]:
            asyncio.run(main(address))
        case [address, run_id, name]:
            asyncio.run(record_run(address, run_id, name))
