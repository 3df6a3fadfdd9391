"""Accepts the runs of schedules like submitted ones (a row first, then the record), or gives the reason to start none.

A schedule's workflow is started by Temporal, but a tenant's quotas are counted in the service's database. So the
workflow asks the service to accept the run, on a queue that the service polls.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from temporalio import activity
from temporalio.worker import Worker

from service.errors import QuotaExceeded
from service.inference.named_models import NamedModels
from service.inference.published_models import PublishedModels
from service.runs.runs import Runs
from service.runs.states import RunStates
from service.temporal import Temporal
from shared.automation.schedules import AcceptRequest, Decision, LastScheduled, ScheduledAction
from shared.errors import InvalidInput, NotFound
from shared.runs.requests import RunRecord, Source
from shared.settings import Settings
from shared.storage.paths import RunKeys, content_key, last_scheduled
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import Ledger
from workflows.policies import service_queue


@dataclass(frozen=True, eq=False)
class ScheduledRuns:
    """Decides whether a schedule's data has changed, and a quota allows a run. Several services may do so at once."""

    _settings: Settings
    _store: ObjectStore
    _temporal: Temporal
    _runs: Runs
    _states: RunStates
    _published: PublishedModels
    _names: NamedModels

    async def serve(self, *others: Callable[..., Any]) -> None:
        """Answer the workflows of schedules, until cancelled. `others`: activities of the service for other workflows.

        Raises TemporalUnavailable: before the first question. Later ones wait for the server.
        """
        async with self._temporal.client() as client:
            queue = service_queue(self._settings.control_queue)
            await Worker(client, task_queue=queue, activities=[self.accept_scheduled, *others]).run()

    @activity.defn(name="accept_scheduled")
    async def accept_scheduled(self, request: AcceptRequest) -> Decision:
        """Record the run, unless its data equals that of the schedule's last run, or a quota forbids it.

        The last run counts if it did not fail, and was not cancelled. Asked again, the answer is the same run.
        """
        record = await self._record(request.run_id)
        if record is None:
            reason = await self._unchanged(request)
            try:
                record = None if reason else await self._accept(request)
            except (QuotaExceeded, InvalidInput) as error:  # a published name may be gone
                reason = str(error)
            # An attempt that was given up as too slow may have gone on, and have accepted it meanwhile.
            record = record or await self._record(request.run_id)
            if record is None:
                await asyncio.to_thread(self._remove_dataset, request)
                return Decision(reason=reason)
        await asyncio.to_thread(self._remember, request)
        workflow, start = await self._runs.workflow_of(record, start_id=content_key(request.run_id))
        return Decision(workflow=workflow, start=start)

    async def _record(self, run_id: str) -> RunRecord | None:
        with suppress(NotFound):
            return await self._states.record(run_id)
        return None

    async def _accept(self, request: AcceptRequest) -> RunRecord:
        action = request.action
        run = await asyncio.to_thread(self._names.resolved, action.tenant, action.scheduled.run)
        source = Source(schedule=action.scheduled.name)
        if action.scheduled.continues and run.name is not None:
            newest = await asyncio.to_thread(self._published.newest_adapter, action.tenant, run.name)
            run = run.model_copy(update={"initial_adapter": newest.uri}) if newest is not None else run
        return (await self._runs.accept(request.run_id, run, action.tenant, action.owner, source))[0]

    async def _unchanged(self, request: AcceptRequest) -> str | None:
        """The reason to start no run: its data equals that of the last one; None if it differs."""
        last = None if request.action.scheduled.even_unchanged else await asyncio.to_thread(self._last, request.action)
        if last is None or last.dataset_sha256 != request.dataset.sha256:
            return None
        result = await self._states.result(last.run_id)
        if result is not None and result.state in ("failed", "cancelled"):
            return None
        return f"the dataset is the one that {last.run_id} had"

    # The store. Blocking.

    def _last(self, action: ScheduledAction) -> LastScheduled | None:
        try:
            data = self._store.get_bytes(last_scheduled(action.tenant, action.scheduled.name))
        except NotFound:
            return None
        return LastScheduled.model_validate_json(data)

    def _remember(self, request: AcceptRequest) -> None:
        last = LastScheduled(run_id=request.run_id, dataset_sha256=request.dataset.sha256)
        key = last_scheduled(request.action.tenant, request.action.scheduled.name)
        self._store.put_bytes(key, last.model_dump_json(indent=1).encode())

    def _remove_dataset(self, request: AcceptRequest) -> None:
        """Remove the dataset that was downloaded only to be compared."""
        for item in list(self._store.list(f"{RunKeys(request.run_id).prefix}/")):
            self._store.delete(item.key)
        Ledger(self._store, request.action.tenant).forget(request.run_id)
