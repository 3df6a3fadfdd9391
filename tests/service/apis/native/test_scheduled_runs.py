"""Runs of schedules are accepted once, whoever asks again; refusals; and no word of a user's at rest."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio.client import ScheduleActionStartWorkflow

from activities.host_context import HostContext
from activities.sources.download import Download, DownloadRequest
from longshore.automation import Backfill, ScheduledRun
from longshore.dataset_runs import DatasetSource
from service.accounts.tenants import Documents
from service.automation.schedules import Schedules
from service.backend import Backend
from service.database import engine
from service.database.engine import open_database
from service.sealing import key_of, seal_keys
from service.temporal import Temporal
from shared.automation import AcceptRequest, LastScheduled, ScheduledAction, ScheduleRecord
from shared.errors import NotFound
from shared.settings import DownloadSettings, Settings
from shared.storage.paths import RunKeys
from shared.storage.store import LocalStore, ObjectStore
from tests.service.apis.native.schedule_stack import TENANT, Stack, stack_run, started


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
async def stack(temporal_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with started(temporal_address, tmp_path_factory.mktemp("at-rest")) as stack:
        yield stack
        for view in await stack.schedules.of(TENANT):
            await stack.schedules.delete(TENANT, view.scheduled.name)


async def test_temporal_is_told_no_word_of_a_users(stack: Stack) -> None:
    """Ids and notes are not encrypted there."""
    words = "canary-schedule", "canary-note"
    await stack.create(words[0])
    assert (await stack.schedules.pause(TENANT, *words)).note == words[1]
    view = await stack.schedules.show(TENANT, words[0])
    async with stack.temporal.client() as client:
        handle = client.get_schedule_handle(await stack.temporal_id(words[0]))
        told = (await handle.describe()).raw_description.SerializeToString()
        assert b"canary" not in told and b"binary/encrypted" in told
        await handle.pause(note="by an operator, in Temporal's page")
    assert (await stack.schedules.show(TENANT, words[0])).note == "by an operator, in Temporal's page"
    assert (await stack.schedules.resume(TENANT, words[0])).note == "resumed"
    assert view.note == words[1]


async def test_a_schedule_is_sealed_anew_when_the_key_was_rotated(stack: Stack) -> None:
    await stack.create("rotated")
    async with stack.temporal.client() as client:

        async def sealed_by() -> set[str]:
            known = await client.get_schedule_handle(await stack.temporal_id("rotated")).describe()
            assert isinstance(known.schedule.action, ScheduleActionStartWorkflow)
            return {key_of(each) for each in known.schedule.action.args}

        old = seal_keys(stack.settings)[0]
        assert await sealed_by() == {old.id}
        new = "n" * 32
        settings = stack.settings.model_copy(update={"seal_key": SecretStr(f"{new} {old.secret.decode()}")})
        rotated = Schedules(settings, Temporal(settings), stack.backend.access, stack.backend.quotas, stack.records)
        await rotated.restore()
        assert await sealed_by() == {seal_keys(settings)[0].id}
        await stack.schedules.restore()  # the other way round, for those that come after
        assert await sealed_by() == {old.id}
