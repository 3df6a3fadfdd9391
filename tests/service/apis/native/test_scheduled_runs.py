"""Runs of schedules are accepted once, whoever asks again; and schedules that are refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.host_context import HostContext
from activities.sources.download import Download, DownloadRequest
from service.automation.schedule_views import Backfill
from service.backend import Backend
from service.database import engine
from service.database.engine import open_database
from shared.automation import AcceptRequest, LastScheduled, ScheduledAction, ScheduledRun
from shared.errors import NotFound
from shared.runs.dataset_runs import DatasetSource
from shared.settings import DownloadSettings, Settings
from shared.storage.paths import RunKeys, last_scheduled
from shared.storage.store import LocalStore, ObjectStore
from tests.service.apis.native.schedule_stack import TENANT, stack_run


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
    return AcceptRequest(action=action, run_id="sft-1", dataset=brought.dataset), backend


async def test_accepting_again_is_the_same_run(tmp_path: Path) -> None:
    """As when the host dies before its answer arrives: then the run's own data is not `unchanged`."""
    request, backend = accepting_alone(tmp_path, LocalStore(tmp_path / "store"))
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
    request, backend = accepting_alone(tmp_path, store)
    accept, loop = backend.scheduled_runs.accept_scheduled, asyncio.get_running_loop()

    def accept_earlier() -> None:
        asyncio.run_coroutine_threadsafe(accept(request), loop).result(60)
        if has_next:
            last = LastScheduled(run_id="sft-2", dataset_sha256=request.dataset.sha256)
            store.put_bytes(last_scheduled(TENANT, "s"), last.model_dump_json().encode())

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
