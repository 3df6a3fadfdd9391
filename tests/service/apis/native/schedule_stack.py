"""A tenant's schedules on a real Temporal server, with stand-in runs."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client

from activities.host_context import HostContext
from activities.records import RunRecords
from activities.sources.download import Download
from longshore.automation import ActionView, ScheduledRun, ScheduleView
from longshore.runs import RunRecord
from longshore.views import RunStatus
from service.accounts.tenants import Documents
from service.automation.schedules import Schedules
from service.backend import Backend
from service.database import engine
from service.database.engine import open_database
from service.host import control_workers
from service.temporal import Temporal, connect_temporal
from shared.automation import ScheduleRecord
from shared.settings import DownloadSettings, Settings
from shared.storage.paths import RunKeys
from shared.storage.store import ObjectStore, open_store
from tests.service.stand_in import SUCCEEDS, StandIn
from tests.waiting import eventually, meanwhile
from workflows.services import ScheduledRunWorkflow

TENANT = "schedulers"  # whose schedules no other test has on the Temporal server that they share


@dataclass
class Stack:
    """A tenant's schedules, the service that they belong to, and a host with stand-in runs."""

    settings: Settings
    store: ObjectStore
    backend: Backend
    temporal: Temporal
    client: Client
    tenant: str = TENANT

    @property
    def schedules(self) -> Schedules:
        return self.backend.schedules

    def data(self, name: str, text: str = "one") -> str:
        """A file of rows; its URI."""
        path = self.settings.root_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": text}) + "\n")
        return path.as_uri()

    async def create(self, name: str, seed: int = SUCCEEDS, **changes: object) -> ScheduleView:
        """A schedule whose own times are far away."""
        run = {
            "kind": "sft",
            "name": name,
            "model": "org/m",
            "dataset": {"uri": self.data(name)},
            "steps": 4,
            "batch_size": 2,
            "seed": seed,
        }
        given = {"name": name, "run": run, "cron": "0 2 1 1 *", **changes}
        return await self.schedules.create(self.tenant, "key-1", ScheduledRun.model_validate(given))

    async def acted(self, name: str, number: int, *settled: str) -> tuple[ActionView, ...]:
        """The actions, newest first, when so many are there, and each in a state of `settled`."""

        async def look() -> tuple[ActionView, ...] | None:
            actions = (await self.schedules.show(self.tenant, name)).actions
            return actions if [a.state in (settled or ("started",)) for a in actions] == [True] * number else None

        return await eventually(look, f"{number} actions of {name}")

    async def trigger(self, name: str, number: int, *settled: str) -> ActionView:
        """The action of one more trigger, which is the `number`-th."""
        await self.schedules.trigger(self.tenant, name)
        return (await self.acted(name, number, *(settled or ("started", "skipped", "failed"))))[0]

    async def result(self, run_id: str | None) -> RunStatus:
        assert run_id is not None

        async def look() -> RunStatus | None:
            key = RunKeys(run_id).result
            return RunStatus.model_validate_json(self.store.get_bytes(key)) if self.store.head(key) else None

        return await eventually(look, f"the end of {run_id}")

    def record(self, run_id: str | None) -> RunRecord:
        assert run_id is not None
        return RunRecord.model_validate_json(self.store.get_bytes(RunKeys(run_id).record))

    async def temporal_id(self, name: str) -> str:
        """A schedule's id in Temporal."""
        return (await self.records.get(self.tenant, name)).temporal_id

    @property
    def records(self) -> Documents[ScheduleRecord]:
        return Documents(self.backend.database, self.backend.quotas, "schedule", ScheduleRecord)

    async def settled(self, name: str) -> None:
        """Its workflows have ended, so that the next action overlaps with none."""

        async def look() -> bool:
            async with self.temporal.client() as client:
                known = await client.get_schedule_handle(await self.temporal_id(name)).describe()
            return not known.info.running_actions

        await eventually(look, f"{name} is idle")


@asynccontextmanager
async def started(address: str, root: Path, serves: bool = True) -> AsyncIterator[Stack]:
    settings = Settings(
        root=root,
        temporal_address=address,
        control_queue=f"control-{root.name}",
        download=DownloadSettings(file_roots=(root / "data",)),
    )
    store, temporal = open_store(settings.store, settings.s3), Temporal(settings)
    backend = Backend(settings, store, open_database(settings))
    engine.upgrade(backend.database)
    record = RunRecords(HostContext(settings))
    client = await connect_temporal(settings)
    activities = [Download(HostContext(settings)).download, record.record_result, record.begin]
    async with (
        control_workers(client, settings.control_queue, activities, [ScheduledRunWorkflow, StandIn]),
        AsyncExitStack() as service,
    ):
        if serves:
            await service.enter_async_context(meanwhile(backend.serve_workflows()))
        yield Stack(settings, store, backend, temporal, client)
    backend.database.close()


def stack_run(uri: str) -> dict[str, object]:
    return {"kind": "sft", "model": "org/m", "dataset": {"uri": uri}, "steps": 1, "batch_size": 1}
