"""Record the histories that test_replay.py replays: `python -m tests.workflows.record_histories TEMPORAL_ADDRESS`.

`python -m tests.workflows.record_histories rollouts` starts a stack of its own, whose server-driven run samples a step
ahead, evaluates held-out prompts, and loses a sampler and a worker.

`python -m tests.workflows.record_histories serving TEMPORAL_ADDRESS` records users' questions alone,
`python -m tests.workflows.record_histories joined TEMPORAL_ADDRESS` a run that joins another's worker, and
`python -m tests.workflows.record_histories short TEMPORAL_ADDRESS` workflows of one activity each.

Do so only when runs that are under way need not survive the change: a history that no longer replays means that a
deployed workflow would break.
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from temporalio.client import Client

from activities.hosts.workers import processes_of
from activities.tracking.track import TrackRequest
from examples.tiny_model import make_tiny_model
from longshore.automation import WebhookChoice
from longshore.client import Client as SessionClient
from longshore.client import CommandFailed
from longshore.commands import Datum, SaveState
from longshore.dataset_runs import DatasetSource, SFTRun
from longshore.fields import Frozen
from longshore.grading import GradeOneRequest, SampledItem, StringCheckGrader
from longshore.training import Lora, SessionRun
from longshore.views import Export, PreviewRequest, PreviewStart
from service.dev import Connection
from service.host import serve_host
from service.sealing import Sealing
from service.temporal import connect_temporal
from shared.runs.start import ExportRequest, ModelRequest, ResolvedModel
from shared.settings import DownloadSettings, Settings
from tests.conftest import CORPUS
from tests.end_to_end.conftest import LETTERS, QUICK
from tests.end_to_end.stack import started as whole_stack
from tests.end_to_end.victims import a_rank, kill, sampler
from tests.opened import with_opened
from tests.service.apis.native import schedule_stack, sweep_stack, webhook_stack
from tests.waiting import eventually
from tests.workflows import test_rl
from tests.workflows.leases.harbour import started as started_harbour
from tests.workflows.leases.test_serving import questions_and_a_kill
from tests.workflows.leases.test_sharing import is_leased
from tests.workflows.stack import Stack, failure_of, started
from workflows.rl import RLWorkflow
from workflows.sft import SFTWorkflow

HISTORIES = Path(__file__).parent / "histories"


async def main(address: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with started(address, Path(root)) as stack:
            await stack.add_gpu_host(step_s=0.03)
            await _record(stack, "succeeded", await _succeeded(stack))
            await _record(stack, "worker_lost", await _worker_lost(stack))
            await _record(stack, "cancelled", await _cancelled(stack))
            await _record(stack, "failed", await _failed(stack))
            await _record(stack, "paused", await _paused(stack))
    await record_joined(address)
    await record_rl(address)
    await record_serving(address)
    await record_short(address)
    await record_scheduled(address)
    await record_sweep(address)
    await record_webhook(address)


def record_rollouts() -> None:
    """A server-driven run, of a whole stack."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make_tiny_model(root / "model", [f"Name ship {n}: the {n}th tide." for n in range(50)])
        prompts = root / "prompts.jsonl"
        rows = ({"messages": [{"role": "user", "content": f"Name ship {n}."}]} for n in range(24))
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with whole_stack(root / "stack", **QUICK) as stack:
            run_id = stack.cli(
                *("submit", "rl", "--json", "--model", str(model), "--prompts", str(prompts)),
                *("--grader", json.dumps(LETTERS), "--steps", "4", "--prompts-per-step", "6", "--group-size", "4"),
                *("--eval-prompts", str(prompts), "--eval-every", "2", "--off-policy-steps", "1", "--loss", "ppo"),
                *("--max-completion-tokens", "16", "--max-tokens", "80", "--lora-rank", "4"),
            ).json["run_id"]
            kill(stack, sampler, patience_s=300)
            kill(stack, a_rank, patience_s=300)
            stack.cli("watch", run_id, "--timeout", "550", timeout_s=600)
            connection = Connection.read(stack.root)
            assert connection is not None
            asyncio.run(_record_run(connection, run_id, "rollouts"))


def record_session() -> None:
    """A session on a whole stack: a worker killed with gradients in it, an idle time, a publication, a gap, its end."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make_tiny_model(root / "model", [f"Name ship {n}: the {n}th tide." for n in range(50)])
        with whole_stack(root / "stack", **QUICK) as stack:
            connection = Connection.read(stack.root)
            assert connection is not None
            data = [Datum(tokens=tuple(range(5, 25)))]
            with SessionClient(connection.api_url, connection.api_key) as client:
                session = client.sessions.open(SessionRun(model=str(model), trainable=Lora(rank=4), idle_s=1, gap_s=1))
                session.forward_backward(data).result(300)
                kill(stack, a_rank, patience_s=300)
                session.optim_step(learning_rate=0.01).result(300)
                session.forward(data).result(300)
                time.sleep(4)
                session.forward_backward(data).result(300)
                session.save_state(publish=True).result(300)
                with suppress(CommandFailed):
                    client.sessions.send(session.id, 9, SaveState()).result(60)
                session.close()
                stack.cli("watch", session.id, "--timeout", "550", timeout_s=600)
            asyncio.run(_record_run(connection, session.id, "session"))


async def record_joined(address: str) -> None:
    """A run that joins another's worker, loses it, and goes on alone."""
    with tempfile.TemporaryDirectory() as root:
        async with started(address, Path(root)) as stack:
            await stack.add_gpu_host(step_s=0.03)
            first = await stack.begun(steps=1000, shares_with="")
            joined = await stack.start(steps=20, shares_with="")
            await eventually(lambda: is_leased(joined), "its lease")
            for process in processes_of(stack.worker_ids()[0]):
                process.kill()
            await first.cancel()
            await joined.result()
            await _record(stack, "joined", joined.id)


async def record_serving(address: str) -> None:
    """Users' questions: two at once, a sampler killed, another question, an idle time."""
    with tempfile.TemporaryDirectory() as root:
        model = make_tiny_model(Path(root) / "model", CORPUS)
        async with started_harbour(address, model, Path(root)) as harbour:
            await questions_and_a_kill(harbour)
            mine = f'TaskQueue = "{harbour.settings.control_queue}"'
            ended = [workflow async for workflow in harbour.client.list_workflows(mine)]
            by_type = {workflow.workflow_type: workflow.id for workflow in ended}
            await _write(harbour.client, "serving", by_type["ServingWorkflow"])


async def record_short(address: str) -> None:
    """A grader tried, a dataset looked at, a model found for somebody who asks it and exported, a run followed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make_tiny_model(root / "model", CORPUS)
        rows = root / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"q{n}", "completion": f"a{n}"}) + "\n" for n in range(8)))
        settings = Settings(
            root=root / "root",
            temporal_address=address,
            control_queue="short",
            download=DownloadSettings(file_roots=(root,)),
            wandb_mode="disabled",
        )
        dataset = DatasetSource(uri=rows.as_uri())
        run = SFTRun(model=str(model), dataset=dataset, steps=1, batch_size=1)
        exact = {"name": "exact", "operation": "eq", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
        sample = SampledItem(sample={"output_text": "42"}, item={"answer": "42"})
        looked_at = PreviewRequest(source=dataset, model_uri=str(model), num_rows=2)
        requests: dict[str, tuple[str, Frozen]] = {
            "grader": ("GraderWorkflow", GradeOneRequest(grader=StringCheckGrader(**exact), sample=sample)),
            "preview": ("PreviewWorkflow", PreviewStart(tenant="default", request=looked_at)),
            "untrained_model": ("UntrainedModelWorkflow", ModelRequest(uri=str(model), tenant="default")),
            "track": ("TrackWorkflow", TrackRequest(run_id="sft-1", run=run)),
        }
        stopped = asyncio.Event()
        host = asyncio.create_task(serve_host("control", settings, stopped))
        client = await connect_temporal(settings)
        for name, (workflow, request) in requests.items():
            await client.execute_workflow(workflow, request, id=name, task_queue=settings.control_queue)
            await _write(client, name, name)
        resolved = await client.get_workflow_handle("untrained_model", result_type=ResolvedModel).result()
        key = "tenants/default/models/tiny/v000001/exports/gguf-q8_0"
        export = ExportRequest(
            key=key, name="tiny:v1", tenant="default", model=resolved.model, adapter=None, export=Export(format="gguf")
        )
        await client.execute_workflow("ExportWorkflow", export, id="export", task_queue=settings.control_queue)
        await _write(client, "export", "export")
        stopped.set()
        await host


async def _record_run(connection: Connection, run_id: str, name: str) -> None:
    settings = Settings(root=Path(connection.root), temporal_address=connection.temporal_address)
    client = await connect_temporal(settings)
    await _write(client, name, run_id)


async def record_rl(address: str) -> None:
    """A client-driven run: steps, the same key twice, groups that cannot be trained, a worker killed, an idle time."""
    with tempfile.TemporaryDirectory() as root:
        async with test_rl.started(address, Path(root)) as stack:
            await stack.add_gpu_host(step_s=0.1)
            await _record(stack, "rl", await _client_driven(stack))


async def record_scheduled(address: str) -> None:
    """A schedule's two actions: a run to its end, and none for data that has not changed."""
    with tempfile.TemporaryDirectory() as root:
        async with schedule_stack.started(address, Path(root)) as stack:
            await stack.create("nightly")
            await stack.result((await stack.trigger("nightly", 1)).run_id)
            await stack.settled("nightly")
            await stack.trigger("nightly", 2)
            await stack.settled("nightly")
            found = stack.client.list_workflows('WorkflowType = "ScheduledRunWorkflow"')
            skipped, started = [execution.id async for execution in found][:2]
            await _write(stack.client, "scheduled", started)
            await _write(stack.client, "scheduled_skipped", skipped)
            await stack.schedules.delete(schedule_stack.TENANT, "nightly")


async def record_sweep(address: str) -> None:
    """A grid of four, two at once; the best is published."""
    with tempfile.TemporaryDirectory() as root:
        async with sweep_stack.started(address, Path(root)) as stack:
            view = await stack.done(name="grid")
            client = await connect_temporal(stack.settings)
            await _write(client, "sweep", f"{sweep_stack.TENANT}/{view.sweep_id}")


async def record_webhook(address: str) -> None:
    """Two webhooks: one takes the notice at the third attempt, the other is gone."""
    with tempfile.TemporaryDirectory() as root, webhook_stack.receiving() as busy, webhook_stack.receiving() as gone:
        busy.answers, gone.answers = [500, 503], [410]
        async with webhook_stack.started(address, Path(root)) as stack:
            for receiver in (busy, gone):
                choice = WebhookChoice(url=receiver.url)
                made = await stack.webhooks.create(webhook_stack.TENANT, None, choice)
            notice = await stack.tell(webhook_stack.status("succeeded"))
            await stack.ended(made.id)
            await stack.client.get_workflow_handle(notice.notice_id).result()
            await _write(stack.client, "webhook", notice.notice_id)


async def _record(stack: Stack, name: str, run_id: str) -> None:
    await _write(stack.client, name, run_id)


async def _write(client: Client, name: str, run_id: str) -> None:
    history = await client.get_workflow_handle(run_id).fetch_history()
    codec = client.data_converter.payload_codec
    if isinstance(codec, Sealing):
        history = replace(history, events=[with_opened(event, codec.keys.keys) for event in history.events])
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
    handle = await stack.begun(steps=100)
    for process in processes_of(stack.worker_ids()[0]):
        process.kill()
    await handle.result()
    return handle.id


async def _cancelled(stack: Stack) -> str:
    handle = await stack.begun(steps=1000)
    await handle.cancel()
    await failure_of(handle)
    return handle.id


async def _paused(stack: Stack) -> str:
    handle = await stack.begun(steps=1000)
    await handle.signal(SFTWorkflow.pause)
    await handle.result()
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
        case ["rollouts"]:
            record_rollouts()
        case ["session"]:
            record_session()
        case ["serving", address]:
            asyncio.run(record_serving(address))
        case ["joined", address]:
            asyncio.run(record_joined(address))
        case ["short", address]:
            asyncio.run(record_short(address))
        case [address]:
            asyncio.run(main(address))
