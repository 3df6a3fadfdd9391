"""A tenant's sweeps on a real Temporal server, with stand-in runs whose loss follows from their learning rate."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.host_context import HostContext
    from activities.publishing.publish import Publish
    from activities.records import RunRecords
    from longshore.automation import Sweep, SweepView
    from longshore.events import Evaluated
    from longshore.fields import Artifact, Fence
    from longshore.views import RunStatus
    from service.accounts.keys import Principal
    from service.automation.sweeps import Sweeps
    from service.backend import Backend
    from service.database import engine
    from service.database.engine import open_database
    from service.host import control_workers
    from service.temporal import connect_temporal
    from shared.runs.start import RunStart
    from shared.settings import Settings
    from shared.storage.artifacts import seal, upload_artifact
    from shared.storage.paths import RunKeys
    from shared.storage.store import ObjectStore, open_store
    from workflows import control
    from workflows.services import SweepWorkflow
    from workflows.training.run import uninterrupted

TENANT = "sweepers"
STEPS = 8
GREATEST = 0.5  # runs with this learning rate fail
HELD = 7  # runs with this seed wait until they are cancelled
HELD_AT_THE_END = 8  # so do those with this one, behind their last step, unless they are the best there can be
BEST_RATE = 1e-2


def loss_of(learning_rate: float, step: int) -> float:
    """Least at 0.01, and falling with the steps."""
    return (math.log10(learning_rate) + 2) ** 2 + 1 / step


@workflow.defn(name="SFTWorkflow")
class Measured:
    """Evaluates at every step, and publishes a folder with its learning rate."""

    @workflow.run
    async def run(self, start: RunStart) -> RunStatus:
        self._status = RunStatus(run_id=start.run_id, num_steps=STEPS, phase="training", gpu_seconds=1.0)
        try:
            await uninterrupted(control.begin(start))
            await uninterrupted(control.record_run(self._status))
            rate = start.run.learning_rate
            for step in range(1, STEPS + 1):
                await self._do("report", [start.run_id, step, loss_of(rate, step)])
                self._show(step=step, metrics={"eval_loss": loss_of(rate, step)})
                if start.run.seed == HELD or (
                    start.run.seed == HELD_AT_THE_END and step == STEPS and rate != BEST_RATE
                ):
                    await workflow.wait_condition(lambda: False)
            if rate == GREATEST:
                await self._end(state="failed", metrics={})
                return self._status
            made = await self._do("make", [start.run_id, start.tenant, rate])
        except (asyncio.CancelledError, ActivityError) as error:  # the latter while it waits for an activity
            if is_cancelled_exception(error):
                await self._end(state="cancelled")
            raise
        await self._end(state="succeeded", adapter=made["uri"], adapter_sha256=made["sha256"])
        return self._status

    async def _do(self, name: str, arguments: list[Any]) -> Any:
        within = timedelta(seconds=20)
        return await workflow.execute_activity(name, args=arguments, start_to_close_timeout=within)

    async def _end(self, **changes: object) -> None:
        self._show(**changes)
        await control.do(RunRecords.record_result, self._status, within=timedelta(seconds=20))
        await control.record_run(self._status)

    def _show(self, **changes: object) -> None:
        self._status = self._status.model_copy(update=changes)

    @workflow.query
    def status(self) -> RunStatus:
        return self._status


@dataclass
class SweepStack:
    settings: Settings
    store: ObjectStore
    backend: Backend
    asking: Principal = field(
        default_factory=lambda: Principal(tenant=TENANT, key_id="key-1", scopes=frozenset(("read", "write")))
    )

    service: list[asyncio.Task[None]] = field(default_factory=list)

    def start_service(self) -> None:
        """Answer sweeps' workflows, and keep the rows of runs up to date."""

        async def watch() -> None:
            while True:
                await self.backend.states.refresh_training()
                await asyncio.sleep(0.2)

        self.service = [asyncio.create_task(self.backend.serve_workflows()), asyncio.create_task(watch())]

    async def kill_service(self) -> None:
        assert not any(task.done() for task in self.service), self.service
        for task in self.service:
            task.cancel()
        await asyncio.wait(self.service)

    @property
    def sweeps(self) -> Sweeps:
        return self.backend.sweeps

    def asked(self, **changes: Any) -> Sweep:
        """A sweep of a grid, unless changed."""
        data = {"uri": "https://example.org/rows.jsonl"}
        run = {"kind": "sft", "model": "org/m", "dataset": data, "eval_dataset": data, "eval_every": 1}
        given = {
            "name": "best",
            "run": run | {"steps": STEPS, "batch_size": 2} | changes.pop("run", {}),
            "parameters": {"learning_rate": {"choices": [1e-4, 1e-3, 1e-2, 1e-1]}},
            "sampler": "grid",
            "parallel": 2,
        }
        return Sweep.model_validate(given | changes)

    async def ended(self, sweep_id: str, within_s: float = 60) -> SweepView:
        until = time.monotonic() + within_s
        while (view := await self.sweeps.show(TENANT, sweep_id)).state == "running":
            assert time.monotonic() < until, view.trials
            await asyncio.sleep(0.2)
        return view

    async def done(self, **changes: Any) -> SweepView:
        return await self.ended((await self.sweeps.create(self.asking, self.asked(**changes))).sweep_id)


@asynccontextmanager
async def started(address: str, root: Path) -> AsyncIterator[SweepStack]:
    settings = Settings(root=root, temporal_address=address, control_queue=f"control-{root.name}")
    store = open_store(settings.store, settings.s3)
    backend = Backend(settings, store, open_database(settings))
    engine.upgrade(backend.database)
    context = HostContext(settings)
    records = RunRecords(context)

    @activity.defn
    def report(run_id: str, step: int, loss: float) -> None:
        event = Evaluated(seq=step, time=float(step), step=step, metrics={"loss": loss})
        key = RunKeys(run_id).log_part("train", Fence(epoch=1), step)
        store.put_bytes(key, event.model_dump_json().encode() + b"\n")

    @activity.defn
    def make(run_id: str, tenant: str, learning_rate: float) -> Artifact:
        folder = root / "made" / run_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(str(learning_rate))
        seal(folder)
        return upload_artifact(store, f"tenants/{tenant}/adapters/{run_id}/v000001", folder)

    activities = [records.record_result, records.begin, Publish(context).publish_best, report, make]
    client = await connect_temporal(settings)
    stack = SweepStack(settings, store, backend)
    async with control_workers(client, settings.control_queue, activities, [SweepWorkflow, Measured]):
        stack.start_service()
        yield stack
        await stack.kill_service()
    backend.database.close()
