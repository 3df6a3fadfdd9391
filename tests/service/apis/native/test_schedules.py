"""Schedules on a real Temporal server: what they start, leave out, refuse and keep, and what a kill leaves of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from pydantic import SecretStr
from temporalio import activity
from temporalio.client import ScheduleActionStartWorkflow, ScheduleIntervalSpec, ScheduleUpdate, ScheduleUpdateInput
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.host_context import HostContext
from activities.records import RunRecords
from activities.sources.download import Download, DownloadRequest
from longshore.accounts import QuotaSettings
from longshore.automation import ActionView, Backfill, ScheduledRun
from longshore.dataset_runs import DatasetSource, SFTRun
from service.accounts.keys import Principal
from service.accounts.tenants import Documents
from service.automation.schedules import Schedules
from service.backend import Backend
from service.database import engine
from service.database.engine import open_database
from service.host import control_workers
from service.sealing import key_of, seal_keys
from service.temporal import Temporal
from shared.automation import AcceptRequest, Decision, LastScheduled, ScheduledAction, ScheduleRecord
from shared.errors import Conflict, InvalidInput, NotFound, QuotaExceeded, TemporalUnavailable
from shared.settings import DownloadSettings, Settings
from shared.storage.paths import RunKeys, published_version
from shared.storage.store import LocalStore, ObjectStore
from tests.service.apis.native.schedule_stack import TENANT, Stack, stack_run, started
from tests.service.conftest import put_versions
from tests.service.stand_in import FAILS, SUCCEEDS, WAITS, StandIn
from tests.waiting import eventually, meanwhile
from workflows.policies import service_queue
from workflows.services import ScheduledRunWorkflow


@pytest.fixture(scope="module")
async def stack(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path_factory.mktemp("schedules")) as stack:
        yield stack
        for view in await stack.schedules.of(TENANT):
            await stack.schedules.delete(TENANT, view.scheduled.name)


async def test_new_data_is_trained_on_from_the_last_version_and_old_data_is_not(stack: Stack, tmp_path: Path) -> None:
    view = await stack.create("nightly", cron="0 2 * * *", timezone="Europe/Berlin", continues=True)
    times = [datetime.fromtimestamp(moment, ZoneInfo("Europe/Berlin")) for moment in view.next_times]
    assert times and all((time.hour, time.minute) == (2, 0) for time in times)

    first = await stack.trigger("nightly", 1)
    record = stack.record(first.run_id)
    assert (record.tenant, record.owner, record.source.schedule) == (TENANT, "key-1", "nightly")
    assert record.run == view.scheduled.run.model_copy(update={"dtype": "float32"})
    assert (await stack.result(first.run_id)).state == "succeeded"
    await stack.settled("nightly")

    assert [run.run_id for run in await stack.backend.runs.of(TENANT, [first.run_id or ""])] == [first.run_id]

    second = await stack.trigger("nightly", 2)
    assert (second.state, second.run_id) == ("skipped", None)
    assert second.reason == f"the dataset is the one that {first.run_id} had"
    assert {item.key.split("/")[1] for item in stack.store.list("runs/sft-")} == {first.run_id}, "it left data behind"

    put_versions(stack.store, TENANT, "nightly", tmp_path, num_claimed=3, num_published=2)
    stack.data("nightly", "two")
    third = await stack.trigger("nightly", 3)
    version = published_version(TENANT, "adapters", "nightly", 2)
    assert stack.record(third.run_id).run.initial_adapter == f"{stack.store.uri}/{version}"
    assert stack.record(third.run_id).run_id > first.run_id
    assert (await stack.result(third.run_id)).state == "succeeded"
    assert [a.state for a in (await stack.schedules.show(TENANT, "nightly")).actions] == [
        "started",
        "skipped",
        "started",
    ]


async def test_new_data_in_one_source_of_a_mixture_starts_a_run(stack: Stack) -> None:
    sources = [{"uri": stack.data(name), "weight": weight} for name, weight in (("mixed-a", 2), ("mixed-b", 1))]
    run = {"kind": "sft", "name": "mixed", "model": "org/m", "dataset": sources, "steps": 4, "batch_size": 2}
    await stack.create("mixed", run=run | {"seed": SUCCEEDS})
    first = await stack.trigger("mixed", 1)
    assert (await stack.result(first.run_id)).state == "succeeded"
    for number in (1, 2):
        assert [*stack.store.list(f"{RunKeys(first.run_id).dataset(f'train-{number}')}/")], "the run's own data"
    await stack.settled("mixed")
    second = await stack.trigger("mixed", 2)
    assert (second.state, second.reason) == ("skipped", f"the dataset is the one that {first.run_id} had")
    stack.data("mixed-b", "two")
    third = await stack.trigger("mixed", 3)
    assert third.state == "started" and (await stack.result(third.run_id)).state == "succeeded"


async def test_a_schedule_of_a_name_that_was_used_before_has_done_nothing(stack: Stack) -> None:
    await stack.create("reborn", even_unchanged=True)
    await stack.trigger("reborn", 1)
    await stack.settled("reborn")  # ids of its workflows have no part of a second
    await stack.schedules.delete(TENANT, "reborn")
    assert (await stack.create("reborn", even_unchanged=True)).actions == ()
    again = await stack.trigger("reborn", 1)
    assert again.state == "started"


async def test_a_schedule_that_temporal_has_and_the_store_has_not_becomes_what_is_asked_for(stack: Stack) -> None:
    orphan = await stack.create("orphan", cron="0 5 * * *")
    await stack.records.delete(TENANT, "orphan")
    made = await stack.create("orphan", cron="30 6 * * *")
    assert made.scheduled != orphan.scheduled
    assert {datetime.fromtimestamp(at, UTC).strftime("%H:%M") for at in made.next_times} == {"06:30"}


async def test_data_of_a_run_that_failed_is_tried_again(stack: Stack) -> None:
    await stack.create("failing", FAILS)
    first = await stack.trigger("failing", 1)
    assert (await stack.result(first.run_id)).state == "failed"
    await stack.settled("failing")
    second = await stack.trigger("failing", 2)
    assert second.state == "started" and second.run_id != first.run_id


async def test_data_that_cannot_be_brought_is_said(stack: Stack) -> None:
    await stack.create("gone")
    (stack.settings.root_path / "data" / "gone.jsonl").unlink()
    action = await stack.trigger("gone", 1)
    assert action.state == "failed" and action.run_id is None
    assert "no such file" in (action.reason or "")


async def test_a_run_that_goes_on_is_not_overlapped(stack: Stack) -> None:
    await stack.create("slow", WAITS, even_unchanged=True)
    first = await stack.trigger("slow", 1)
    await stack.schedules.trigger(TENANT, "slow")

    async def left_out() -> bool:
        return (await stack.schedules.show(TENANT, "slow")).num_overlapped == 1

    await eventually(left_out, "an action is left out")
    assert len((await stack.schedules.show(TENANT, "slow")).actions) == 1
    async with stack.temporal.client() as client:
        assert first.run_id is not None
        await client.get_workflow_handle(first.run_id).cancel()
    assert (await stack.result(first.run_id)).state == "cancelled"
    await stack.settled("slow")
    again = await stack.trigger("slow", 2)
    assert again.state == "started"
    await _cancel(stack, again)


async def test_cancel_other_ends_the_run_before(stack: Stack) -> None:
    await stack.create("newest", WAITS, even_unchanged=True, overlap="cancel_other")
    first = await stack.trigger("newest", 1)
    second = await stack.trigger("newest", 2)
    assert (await stack.result(first.run_id)).state == "cancelled"
    assert second.run_id != first.run_id
    assert stack.store.head(RunKeys(second.run_id or "").result) is None
    await _cancel(stack, second)


async def _cancel(stack: Stack, action: ActionView) -> None:
    async with stack.temporal.client() as client:
        await client.get_workflow_handle(action.run_id or "").cancel()
    await stack.result(action.run_id)


async def test_the_clock_starts_runs_until_it_is_paused(stack: Stack) -> None:
    """The interval is shortened behind our back: a minute is the least that users may ask for."""
    await stack.create("ticking", cron=None, every_s=60, even_unchanged=True)
    async with stack.temporal.client() as client:
        handle = client.get_schedule_handle(await stack.temporal_id("ticking"))
        await handle.update(_each_second)

    async def two() -> bool:
        return (await stack.schedules.show(TENANT, "ticking")).num_actions >= 2

    await eventually(two, "two actions by the clock")
    paused = await stack.schedules.pause(TENANT, "ticking", "holidays")
    assert (paused.paused, paused.note) == (True, "holidays")
    await asyncio.sleep(2)  # what was on its way
    num_actions = (await stack.schedules.show(TENANT, "ticking")).num_actions
    await asyncio.sleep(2)
    assert (await stack.schedules.show(TENANT, "ticking")).num_actions == num_actions

    await stack.schedules.resume(TENANT, "ticking")

    async def more() -> bool:
        return (await stack.schedules.show(TENANT, "ticking")).num_actions > num_actions

    await eventually(more, "it acts again")
    await stack.schedules.delete(TENANT, "ticking")


async def _each_second(given: ScheduleUpdateInput) -> ScheduleUpdate:
    given.description.schedule.spec.intervals = [ScheduleIntervalSpec(every=timedelta(seconds=1))]
    return ScheduleUpdate(given.description.schedule)


async def test_backfill_acts_once_for_each_time(stack: Stack) -> None:
    await stack.create("hourly", cron="0 * * * *", even_unchanged=True)
    begin = datetime(2026, 1, 31, 2, tzinfo=UTC).timestamp()
    await stack.schedules.backfill(TENANT, "hourly", Backfill(begin=begin, end=begin + 2 * 3600))
    actions = await stack.acted("hourly", 3)
    assert len({action.run_id for action in actions}) == 3
    for action in actions:
        assert (await stack.result(action.run_id)).state == "succeeded"


@pytest.mark.parametrize(
    ("times", "days", "is_taken"),
    [
        ({"every_s": 86_400}, 3, True),
        ({"every_s": 3600}, 9, False),
        ({"cron": "0 2 1 * *"}, 31, True),
        ({"cron": "@hourly"}, 31, False),
        ({"cron": "*/15 * * * *"}, 3, False),
    ],
)
async def test_how_many_times_a_backfill_may_act_at(
    accepting: Stack, times: dict[str, object], days: int, is_taken: bool
) -> None:
    name = f"filled-{days}-{len(str(times))}"
    await accepting.create(name, **{"cron": None, "overlap": "skip", **times})
    begin = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    span = Backfill(begin=begin, end=begin + days * 86_400 - 1, overlap="skip")
    if is_taken:
        await accepting.schedules.backfill(TENANT, name, span)
    else:
        with pytest.raises(InvalidInput, match="acts at 200 at most"):
            await accepting.schedules.backfill(TENANT, name, span)


async def test_what_temporal_lost_is_made_again(stack: Stack) -> None:
    await stack.create("lost", cron="30 4 * * *", overlap="buffer_one", catch_up_s=1200)
    before = await stack.schedules.pause(TENANT, "lost")
    await _lose(stack, "lost")
    assert (await stack.schedules.show(TENANT, "lost")).next_times == ()
    await stack.schedules.restore()
    after = await stack.schedules.show(TENANT, "lost")
    assert after == before and after.next_times
    async with stack.temporal.client() as client:
        policy = (await client.get_schedule_handle(await stack.temporal_id("lost")).describe()).schedule.policy
    assert (policy.overlap.name, policy.catchup_window) == ("BUFFER_ONE", timedelta(minutes=20))

    await _lose(stack, "lost")
    await stack.schedules.resume(TENANT, "lost")  # who asks something of it does not wait for the service's start
    assert (await stack.schedules.show(TENANT, "lost")).next_times


async def _lose(stack: Stack, name: str) -> None:
    async with stack.temporal.client() as client:
        await client.get_schedule_handle(await stack.temporal_id(name)).delete()


class PausingRecords(Documents[ScheduleRecord]):
    """After the first read of a kind, or before the first change, it waits until somebody else is done."""

    def wait_at(self, what: str) -> None:
        self._what, self.reached, self.go_on = what, asyncio.Event(), asyncio.Event()

    async def find(self, tenant: str, key: str) -> ScheduleRecord | None:
        found = await super().find(tenant, key)
        await self._pause("find")
        return found

    async def everybodys(self) -> list[tuple[str, ScheduleRecord]]:
        found = await super().everybodys()
        await self._pause("everybodys")
        return found

    async def change(
        self, tenant: str, key: str, change: Callable[[ScheduleRecord], ScheduleRecord], *, always: bool = False
    ) -> ScheduleRecord:
        await self._pause("change")
        return await super().change(tenant, key, change, always=always)

    async def _pause(self, what: str) -> None:
        if what == self._what and not self.reached.is_set():
            self.reached.set()
            await asyncio.wait_for(self.go_on.wait(), 60)


@pytest.mark.parametrize(("what", "at"), [("resume", "change"), ("trigger", "find"), ("restore", "everybodys")])
async def test_a_schedule_that_is_deleted_at_that_moment_stays_deleted(stack: Stack, what: str, at: str) -> None:
    await stack.create(what)
    in_temporal = await stack.temporal_id(what)
    await _lose(stack, what)
    records = PausingRecords(stack.backend.database, stack.backend.quotas, "schedule", ScheduleRecord)
    records.wait_at(at)
    other = Schedules(stack.settings, stack.temporal, stack.backend.access, stack.backend.quotas, records)
    ask = {"resume": other.resume, "trigger": other.trigger}
    working = asyncio.create_task(other.restore() if what == "restore" else ask[what](TENANT, what))
    await asyncio.wait_for(records.reached.wait(), 60)
    await stack.schedules.delete(TENANT, what)
    records.go_on.set()
    await asyncio.wait([working])
    # It may also have met Temporal's own workflow of the schedule as that ended, and asked it in vain.
    assert isinstance(working.exception(), NotFound | TemporalUnavailable | None)
    assert await stack.records.find(TENANT, what) is None, "its record came back"
    async with stack.temporal.client() as client:
        with pytest.raises(RPCError, match="not found"):
            await client.get_schedule_handle(in_temporal).describe()


async def test_a_deletion_that_was_cut_off_is_finished(stack: Stack) -> None:
    """By the service's start, or by who makes a schedule of that name."""
    for name in ("cut-off", "made-anew"):
        await stack.create(name)
        in_temporal = await stack.temporal_id(name)
        await stack.records.change(TENANT, name, lambda record: record.model_copy(update={"is_deleted": True}))
        with pytest.raises(NotFound):
            await stack.schedules.show(TENANT, name)
        if name == "cut-off":
            await stack.schedules.restore()
            assert await stack.records.find(TENANT, name) is None
        else:
            await stack.create(name, cron="0 5 * * *")
        async with stack.temporal.client() as client:
            with pytest.raises(RPCError, match="not found"):
                await client.get_schedule_handle(in_temporal).describe()


async def test_names_belong_to_tenants(stack: Stack) -> None:
    view = await stack.create("mine")
    assert await stack.create("mine") == view, "the same request is the same schedule"
    with pytest.raises(Conflict):
        await stack.create("mine", cron="0 3 * * *")
    for ask in (stack.schedules.show, stack.schedules.trigger, stack.schedules.pause, stack.schedules.delete):
        with pytest.raises(NotFound):
            await ask("other", "mine")
    assert await stack.schedules.of("other") == ()
    assert "mine" in [view.scheduled.name for view in await stack.schedules.of(TENANT)]
    await stack.schedules.delete(TENANT, "mine")
    with pytest.raises(NotFound):
        await stack.schedules.show(TENANT, "mine")
    await stack.create("mine", cron="0 3 * * *")  # its name is free


async def test_what_temporal_refuses_is_not_on_record(stack: Stack) -> None:
    with pytest.raises(InvalidInput) as refused:
        await stack.create("wrong", cron="99 2 * * *")
    assert refused.value.place == "cron"
    with pytest.raises(NotFound):
        await stack.schedules.show(TENANT, "wrong")
    foreign = f"{stack.store.uri}/tenants/other/uploads/x.jsonl"
    with pytest.raises(InvalidInput, match="nothing of yours"):
        await stack.create("wrong", run=stack_run(foreign))


async def test_a_run_that_the_sweep_was_first_to_start_is_not_started_twice(stack: Stack) -> None:
    """A service that starts up sees the record before the schedule's workflow has started the run."""
    settings = stack.settings.model_copy(update={"control_queue": f"{stack.settings.control_queue}-swept"})
    accept = stack.backend.scheduled_runs.accept_scheduled

    @activity.defn(name="accept_scheduled")
    async def accept_and_sweep(request: AcceptRequest) -> Decision:
        decision = await accept(request)
        await stack.client.start_workflow(
            decision.workflow, decision.start, id=request.run_id, task_queue=settings.control_queue
        )
        return decision

    scheduled = ScheduledRun(name="swept", run=stack_run(stack.data("swept")), cron="@daily")
    action = ScheduledAction(tenant=TENANT, scheduled=scheduled)
    record = RunRecords(HostContext(settings))
    activities = [Download(HostContext(settings)).download, record.record_result, record.begin]
    answers = [accept_and_sweep, *stack.backend.records.activities]
    async with (
        control_workers(stack.client, settings.control_queue, activities, [ScheduledRunWorkflow, StandIn]),
        Worker(stack.client, task_queue=service_queue(settings.control_queue), activities=answers),
    ):
        ended = await stack.client.execute_workflow(
            ScheduledRunWorkflow.run, action, id=f"swept/{settings.control_queue}", task_queue=settings.control_queue
        )
        assert ended.state == "started"
        assert (await stack.result(ended.run_id)).state == "succeeded"
    history = await stack.client.get_workflow_handle(ended.run_id).fetch_history()
    assert not history.events[0].workflow_execution_started_event_attributes.parent_workflow_execution.workflow_id


async def test_a_quota_holds_for_schedules_as_for_what_is_sent(stack: Stack) -> None:
    small, backend = replace(stack, tenant="small"), stack.backend
    await backend.tenants.create("small", quotas=QuotaSettings(concurrent_runs=1))
    names = ("left", "right")
    for name in names:
        await small.create(name, WAITS, even_unchanged=True)
        await backend.schedules.trigger("small", name)
    actions = {name: (await small.acted(name, 1, "started", "skipped"))[0] for name in names}
    [(taken, first)] = [(name, action) for name, action in actions.items() if action.state == "started"]
    [(name, refused)] = [(name, action) for name, action in actions.items() if action.state == "skipped"]
    why = "quota concurrent_runs: 1 of small's runs are going on, and more are not allowed"
    why += f": {first.run_id}. `longshore cancel RUN` ends one"
    assert (refused.reason, refused.run_id) == (why, None), "of two at once one gets the last place"
    assert await _runs_of(small) == {first.run_id}
    asking = Principal(tenant="small", key_id="key-1", scopes=frozenset({"write"}))
    with pytest.raises(QuotaExceeded):
        await backend.runs.submit(asking, SFTRun.model_validate(stack_run(small.data(name))))

    await _cancel(stack, first)

    async def seen() -> bool:
        return (await backend.quotas.usage("small")).concurrent_runs == 0

    await eventually(seen, f"the end of {taken}'s run gives its place back")
    again = await small.trigger(name, 2, "started", "skipped")
    assert again.state == "started"
    await _cancel(stack, again)
    await small.settled(name)

    await backend.tenants.set_quotas("small", QuotaSettings(gpu_hours=0))
    third = await small.trigger(name, 3, "started", "skipped")
    assert (third.state, third.run_id) == ("skipped", None)
    assert "took 0.00 GPU hours of 0" in (third.reason or "")
    assert await _runs_of(small) == {first.run_id, again.run_id}
    for name in names:
        await backend.schedules.delete("small", name)


async def _runs_of(stack: Stack) -> set[str]:
    return {run.run_id for run in (await stack.backend.runs.page(stack.tenant, limit=10)).runs}


async def test_a_service_that_is_away_is_waited_for(temporal_address: str, tmp_path: Path) -> None:
    async with started(temporal_address, tmp_path, serves=False) as stack:
        await stack.create("patient")
        waiting = await stack.trigger("patient", 1, "preparing")
        assert not list(stack.store.list("index/runs/"))
        async with meanwhile(stack.backend.serve_workflows()):
            action = (await stack.acted("patient", 1, "started", "skipped", "failed"))[0]
            assert (action.state, action.at) == ("started", waiting.at)
            assert (await stack.result(action.run_id)).state == "succeeded"
        await stack.schedules.delete(TENANT, "patient")


def accepting_alone(root: Path, store: ObjectStore) -> tuple[AcceptRequest, Backend]:
    """Run sft-1 of a schedule, whose data was brought; and a service without Temporal, to be asked to accept it."""
    settings = Settings(root=root, download=DownloadSettings(file_roots=(root / "data",)), cpu_threads=6)
    (root / "data").mkdir()
    (root / "data" / "rows.jsonl").write_text('{"text": "one"}\n')
    source = DatasetSource(uri=(root / "data" / "rows.jsonl").as_uri())
    scheduled = ScheduledRun(name="s", run=stack_run(source.uri), cron="@daily")
    brought = Download(HostContext(settings)).download(
        DownloadRequest(run_id="sft-1", tenant="default", split="train", source=source)
    )
    action = ScheduledAction(tenant=TENANT, scheduled=scheduled)
    backend = Backend(settings, store, open_database(settings))
    engine.upgrade(backend.database)
    record = ScheduleRecord(tenant=TENANT, scheduled=scheduled, created_at=1.0, salt="0")
    asyncio.run(records_of(backend).put(TENANT, "s", record))
    return AcceptRequest(action=action, run_id="sft-1", dataset=brought.dataset), backend


def records_of(backend: Backend) -> Documents[ScheduleRecord]:
    return Documents(backend.database, backend.quotas, "schedule", ScheduleRecord)


async def test_accepting_again_is_the_same_run(tmp_path: Path) -> None:
    """As when the host dies before its answer arrives: then the run's own data is not `unchanged`."""
    request, backend = await asyncio.to_thread(accepting_alone, tmp_path, LocalStore(tmp_path / "store"))
    accept = backend.scheduled_runs.accept_scheduled
    first, second = await accept(request), await accept(request)
    assert first == second
    assert first.start is not None and first.start.tenant == TENANT and first.start.threads_per_rank == 6
    third = await accept(request.model_copy(update={"run_id": "sft-2"}))
    assert third.start is None and third.reason == "the dataset is the one that sft-1 had"
    backend.database.close()


class OvertakingStore(LocalStore):
    """Just after somebody found no record of a run, an earlier attempt accepts it."""

    earlier: Callable[[], object] | None = None

    def get_bytes(self, key: str) -> bytes:
        try:
            return super().get_bytes(key)
        except NotFound:
            earlier, self.earlier = self.earlier, None
            if earlier is not None and key == RunKeys("sft-1").record:
                earlier()
            raise


@pytest.mark.parametrize("has_next", [False, True])
async def test_an_attempt_that_was_given_up_may_have_accepted_the_run(tmp_path: Path, has_next: bool) -> None:
    """It went on beyond its time. Then the data is its run's own, also where another run of that data came after it."""
    store = OvertakingStore(tmp_path / "store")
    request, backend = await asyncio.to_thread(accepting_alone, tmp_path, store)
    accept, loop = backend.scheduled_runs.accept_scheduled, asyncio.get_running_loop()

    def accept_earlier() -> None:
        asyncio.run_coroutine_threadsafe(accept(request), loop).result(60)
        if has_next:
            last = LastScheduled(run_id="sft-2", dataset_sha256=request.dataset.sha256)
            change = records_of(backend).change(TENANT, "s", lambda record: record.model_copy(update={"last": last}))
            asyncio.run_coroutine_threadsafe(change, loop).result(60)

    store.earlier = accept_earlier
    decision = await accept(request)
    assert decision.start is not None and decision == await accept(request)
    assert store.head(RunKeys("sft-1").record) and [*store.list(f"{RunKeys('sft-1').prefix}/dataset")]
    backend.database.close()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"cron": None}, "exactly one of cron and every_s"),
        ({"every_s": 60}, "exactly one of cron and every_s"),
        ({"cron": "* * * * * *"}, "five fields"),
        ({"cron": "@every 1s"}, "five fields"),
        ({"cron": "CRON_TZ=Asia/Tokyo 0 2 * *"}, "five fields"),
        ({"cron": None, "every_s": 5}, "greater than or equal to 60"),
        ({"timezone": "Mars/Olympus"}, "no time zone"),
        ({"continues": True}, "has a name"),
        ({"run": {"kind": "rl", "model": "m"}}, "needs rollouts"),
    ],
)
def test_schedules_that_are_refused(changes: dict, rule: str) -> None:
    given = {"name": "s", "run": stack_run("file:///x"), "cron": "0 2 * * *"} | changes
    with pytest.raises(ValueError, match=rule):
        ScheduledRun.model_validate(given)


def test_a_backfill_is_bounded() -> None:
    for end in (1.0, 33 * 86_400.0):
        with pytest.raises(ValueError, match="31 days"):
            Backfill(begin=2.0, end=end)


@pytest.fixture(scope="module")
async def accepting(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path_factory.mktemp("at-rest")) as accepting:
        yield accepting
        for view in await accepting.schedules.of(TENANT):
            await accepting.schedules.delete(TENANT, view.scheduled.name)


async def test_temporal_is_told_no_word_of_a_users(accepting: Stack) -> None:
    """Ids and notes are not encrypted there."""
    words = "canary-schedule", "canary-note"
    await accepting.create(words[0])
    assert (await accepting.schedules.pause(TENANT, *words)).note == words[1]
    view = await accepting.schedules.show(TENANT, words[0])
    async with accepting.temporal.client() as client:
        handle = client.get_schedule_handle(await accepting.temporal_id(words[0]))
        told = (await handle.describe()).raw_description.SerializeToString()
        assert b"canary" not in told and b"binary/encrypted" in told
        await handle.pause(note="by an operator, in Temporal's page")
    assert (await accepting.schedules.show(TENANT, words[0])).note == "by an operator, in Temporal's page"
    assert (await accepting.schedules.resume(TENANT, words[0])).note == "resumed"
    assert view.note == words[1]


async def test_a_schedule_is_sealed_anew_when_the_key_was_rotated(accepting: Stack) -> None:
    await accepting.create("rotated")
    async with accepting.temporal.client() as client:

        async def sealed_by() -> set[str]:
            known = await client.get_schedule_handle(await accepting.temporal_id("rotated")).describe()
            assert isinstance(known.schedule.action, ScheduleActionStartWorkflow)
            return {key_of(each) for each in known.schedule.action.args}

        old = seal_keys(accepting.settings)[0]
        assert await sealed_by() == {old.id}
        new = "n" * 32
        settings = accepting.settings.model_copy(update={"seal_key": SecretStr(f"{new} {old.secret.decode()}")})
        rotated = Schedules(
            settings, Temporal(settings), accepting.backend.access, accepting.backend.quotas, accepting.records
        )
        await rotated.restore()
        assert await sealed_by() == {seal_keys(settings)[0].id}
        await accepting.schedules.restore()  # the other way round, for those that come after
        assert await sealed_by() == {old.id}
