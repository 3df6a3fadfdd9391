"""Samplers of published adapters: leased when a question comes, lost, replaced, shared, and gone when none comes."""

import asyncio
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.host_context import HostContext
from activities.hosts.workers import processes_of
from activities.sampling.client import Sampler
from activities.sampling.samplers import OpenSampler, SamplerLeaseRequest, ServingAdapters
from longshore.accounts import QuotaSettings
from longshore.fields import Artifact, Fence
from longshore.runs import RLRun, RunRecord
from service.accounts.tenants import Quotas
from service.database import engine
from service.database.engine import Database
from service.inference.questions import IdleEviction, StreamedAnswer
from service.runs.rows import RunRows, run_row
from service.runs.runs import queued
from service.temporal import Temporal
from shared.chat.trajectories import AnswerLookup, look_up, parse_record
from shared.errors import InvalidInput, SamplerUnavailable
from shared.jobs.job import LeaseGrant, SamplerKey
from shared.runs.start import RunTiming
from shared.serving import ServeRequest, ServingStart
from shared.settings import ServingSettings
from shared.storage.artifacts import find_artifact
from shared.storage.paths import published_version
from tests.depth import drawn
from tests.workflows.leases.harbour import IDLE_S, Harbour, greedy, said, there_is
from tests.workflows.published import publish
from workflows import policies
from workflows.leases import ServingWorkflow


@pytest.mark.drawn
@pytest.mark.parametrize("waits_s", drawn([0.0, 0.01, 0.1, 1.0, None], 1, always=[None]))
async def test_a_caller_that_leaves_takes_the_question_back(harbour: Harbour, waits_s: float | None) -> None:
    """However far it has come: on its way to the host, waiting, drawn. None: a part of the answer is there."""
    inference = harbour.inference()
    await inference.chat("default", greedy("north"))
    endless = greedy("north", temperature=1, max_tokens=1900, n=128, stream=True)
    draft = StreamedAnswer(endless)
    asked = asyncio.create_task(inference.chat("default", endless, draft))
    await (there_is(draft.changed.is_set) if waits_s is None else asyncio.sleep(waits_s))
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    [sampler] = harbour.samplers()
    await there_is(lambda: is_idle(sampler))
    assert said((await inference.chat("default", greedy("north"))).read())


async def is_idle(sampler: str) -> bool:
    """True if a sampler's processes have used no processor time for a while."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes_of(sampler))

    before = used()
    await asyncio.sleep(0.5)
    return used() - before < 0.1


async def test_a_sampler_that_is_killed_over_a_question_is_replaced(harbour: Harbour) -> None:
    """The new one goes on with what the old one drew, though the question names no seed."""
    inference, long = harbour.inference(), greedy("north", max_tokens=1900, temperature=1, stream=True)
    draft = StreamedAnswer(long)
    asked = asyncio.create_task(inference.chat("default", long, draft))
    await there_is(draft.changed.is_set)
    before = draft.take()
    assert not asked.done()
    [sampler] = harbour.samplers()
    for process in processes_of(sampler):
        process.kill()
    await asked
    assert harbour.samplers() != [sampler]
    whole = before + draft.take()
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        for line in whole.decode().split("\n")
        if line.startswith("data: {")
    )
    record = parse_record(look_up(harbour.store, "default", AnswerLookup(ids=(draft.start.answer_id,)))[0])
    assert before and record is not None and text == record.choices[0].content, "nothing twice, and nothing left out"


async def test_of_many_adapters_the_one_asked_longest_ago_makes_room(harbour: Harbour) -> None:
    await harbour.inference().chat("default", greedy("north"))
    ready = harbour.ready()
    adapters = ServingAdapters(HostContext(harbour.settings), max_adapters=2)
    first, second, third = (
        find_artifact(harbour.store, published_version("default", "adapters", name, version))
        for name, version in (("north", 1), ("north", 2), ("south", 1))
    )

    def load() -> None:
        with Sampler(ready.url, ready.api_key, socket_path=ready.socket) as client:
            opened = OpenSampler(client, ready.model)
            for name in set(client.models()) - {ready.model}:
                client.unload_adapter(name)
            client.load_adapter("r1-0123456789abcdef", str(harbour.adapters["south"]))
            names = [adapters.use(opened, adapter) for adapter in (first, second, first, third)]
            assert set(client.models()) == {ready.model, "r1-0123456789abcdef", names[0], names[3]}
            assert adapters.use(opened, None) == ready.model
            client.unload_adapter("r1-0123456789abcdef")

    await asyncio.to_thread(load)


async def test_a_sampler_is_gone_after_the_idle_time_and_makes_room_for_another_model(harbour: Harbour) -> None:
    """There is one sampler host: a whole model is asked while it still serves the adapters' model."""
    shutil.copytree(harbour.model, harbour.settings.root_path / "whole")
    publish(harbour.store, harbour.settings.root_path / "whole", "whole", harbour.artifact, kind="models")
    inference = harbour.inference()
    before = said((await inference.chat("default", greedy("north"))).read())
    [sampler] = harbour.samplers()
    whole = said((await inference.chat("default", greedy("whole"))).read())
    assert sampler not in harbour.samplers()
    assert whole != before
    await there_is(lambda: [], lambda _: not harbour.samplers(), timeout_s=IDLE_S + 30)
    mine = f'TaskQueue = "{harbour.settings.control_queue}" AND ExecutionStatus = "Running"'
    await there_is(lambda: harbour.client.count_workflows(mine), lambda found: found.count == 0)


async def test_an_idle_sampler_makes_room_for_a_run_that_waits(harbour: Harbour, tmp_path: Path) -> None:
    idle_s = 60.0
    serving = harbour.settings.serving.model_copy(update={"idle_s": idle_s})
    await harbour.inference(serving=serving).chat("default", greedy("north"))
    [sampler] = harbour.samplers()
    database = Database(f"sqlite:///{tmp_path}/longshore.db")
    engine.upgrade(database)
    rows = RunRows(database, Quotas(QuotaSettings(), harbour.store, database))
    eviction = IdleEviction(harbour.settings, rows, Temporal(harbour.settings), frozenset)
    try:
        await eviction.evict()
        run = RLRun.model_validate({"model": "m"})
        record = RunRecord(run_id="rl-1", run=run, created_at=1.0)
        status = queued(record).model_copy(update={"phase": "waiting_for_sampler"})
        await asyncio.sleep(1)
        assert harbour.samplers() == [sampler], "nobody waits"
        database.write(lambda session: session.add(run_row(record, status)))
        await eviction.evict()
        await there_is(lambda: [], lambda _: not harbour.samplers(), timeout_s=idle_s - 10)
    finally:
        database.close()
    mine = f'TaskQueue = "{harbour.settings.control_queue}" AND ExecutionStatus = "Running"'
    await there_is(lambda: harbour.client.count_workflows(mine), lambda found: found.count == 0)


async def test_a_sampler_that_is_asked_all_the_time_is_shared(
    harbour: Harbour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question a second does not keep the only sampler from another model's users."""
    monkeypatch.setattr("service.inference.questions.WAITS_S", 1.0)
    shutil.copytree(harbour.model, harbour.settings.root_path / "other")
    publish(harbour.store, harbour.settings.root_path / "other", "other", harbour.artifact, kind="models")
    serving = harbour.settings.serving.model_copy(update={"idle_s": 60.0, "share_s": 3.0})
    inference = harbour.inference(serving=serving)
    database = Database(f"sqlite:///{tmp_path}/longshore.db")
    engine.upgrade(database)
    rows = RunRows(database, Quotas(QuotaSettings(), harbour.store, database))
    eviction = IdleEviction(harbour.settings, rows, Temporal(harbour.settings), inference.leases.waiting)

    async def again_and_again(work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await work()
            await asyncio.sleep(0.5)

    async def keep() -> None:
        with suppress(SamplerUnavailable):  # while the other model has its turn
            await inference.chat("default", greedy("north", max_tokens=1))

    await keep()
    loops = [asyncio.create_task(again_and_again(work)) for work in (keep, eviction.evict)]
    try:
        assert said((await inference.chat("default", greedy("other"))).read())
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        database.close()
    # The last question, which nobody waits for any more, begins anew a workflow that it finds terminated.
    await there_is(lambda: terminate_servings(harbour), lambda _: not inference.leases._asking)
    await terminate_servings(harbour)


async def terminate_servings(harbour: Harbour) -> None:
    mine = f'WorkflowType = "ServingWorkflow" AND TaskQueue = "{harbour.settings.control_queue}"'
    async for found in harbour.client.list_workflows(f'{mine} AND ExecutionStatus = "Running"'):
        with suppress(RPCError):  # it has ended meanwhile
            await harbour.client.get_workflow_handle(found.id, run_id=found.run_id).terminate()


async def happened(handle: WorkflowHandle[Any, Any], what: str) -> bool:
    return any(event.HasField(f"{what}_event_attributes") for event in (await handle.fetch_history()).events)


async def test_a_sampler_that_is_lost_before_its_share_is_over_is_waited_for(temporal_address: str) -> None:
    """Its share ends while the next one is not up yet: questions wait for that, and the workflow sleeps meanwhile."""
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter)
    serving_id, queue = f"serving-{uuid.uuid4().hex}", f"q-{uuid.uuid4().hex}"
    lost, share_over = asyncio.Event(), asyncio.Event()

    @activity.defn(name="lease_sampler")
    async def lease_sampler(request: SamplerLeaseRequest) -> None:
        if request.epoch == 2:  # another model's is before it
            await share_over.wait()
        grant = LeaseGrant(fence=Fence(epoch=request.epoch), host_queue="h", worker_id=f"w{request.epoch}")
        await client.get_workflow_handle(serving_id).signal("sampler_leased", grant)
        await lost.wait() if request.epoch == 1 else await asyncio.Event().wait()

    key = SamplerKey(model=Artifact(uri="file:///m", sha256="0" * 64), threads=1, slots=1, max_model_len=128)
    timing = RunTiming(heartbeat_timeout_s=600)
    start = ServingStart(serving_id=serving_id, key=key, shape=queue, idle_s=600, share_s=3, timing=timing)
    async with (
        Worker(client, task_queue=queue, workflows=[ServingWorkflow], workflow_runner=UnsandboxedWorkflowRunner()),
        Worker(client, task_queue=policies.sampler_queue(queue), activities=[lease_sampler]),
    ):
        handle = await client.start_workflow(ServingWorkflow.run, start, id=serving_id, task_queue=queue)
        first = await handle.execute_update(ServingWorkflow.serve, ServeRequest(patience_s=60))
        await handle.signal(ServingWorkflow.make_room)
        lost.set()
        while not await happened(handle, "activity_task_completed"):  # noqa: ASYNC110 (in another process)
            await asyncio.sleep(0.1)
        asking = asyncio.create_task(handle.execute_update(ServingWorkflow.serve, ServeRequest(patience_s=60)))
        await asyncio.sleep(2 * start.share_s)
        share_over.set()
        assert (first.worker_id, (await asking).worker_id) == ("w1", "w2")
        assert not await happened(handle, "workflow_task_failed"), "it did not yield"
        await handle.terminate()


async def test_without_a_sampler_host_a_question_is_told_so(harbour: Harbour) -> None:
    inference = harbour.inference(shape="nowhere", serving=ServingSettings(idle_s=1, patience_s=0.5))
    with pytest.raises(SamplerUnavailable, match=r"no sampler host of shape nowhere had one up within 0\.5 s"):
        await inference.chat("default", greedy("north"))


async def test_a_model_that_samplers_refuse_is_named(harbour: Harbour) -> None:
    folder = harbour.settings.root_path / "broken"
    shutil.copytree(harbour.model, folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    publish(harbour.store, folder, "broken", harbour.artifact, kind="models")
    with pytest.raises(InvalidInput, match="the sampler cannot use this model"):
        await harbour.inference().chat("default", greedy("broken"))


async def questions_and_a_kill(harbour: Harbour) -> None:
    """All that a serving workflow does in its life; for the record of histories."""
    inference = harbour.inference(serving=harbour.settings.serving.model_copy(update={"idle_s": 20}))
    await asyncio.gather(*(inference.chat("default", greedy(name)) for name in ("north", "south")))
    for process in processes_of(harbour.samplers()[0]):
        process.kill()
    await inference.chat("default", greedy("north"))
    mine = f'TaskQueue = "{harbour.settings.control_queue}" AND ExecutionStatus = "Running"'
    await there_is(lambda: harbour.client.count_workflows(mine), lambda found: found.count == 0)
