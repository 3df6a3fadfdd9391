"""Schedules, and the runs that they start."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from pydantic import ValidationError
from temporalio import activity
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleBackfill,
    ScheduleDescription,
    ScheduleHandle,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleState,
    ScheduleUpdate,
    WorkflowExecution,
    WorkflowExecutionStatus,
)
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from service.accounts import audit
from service.accounts.tenants import Access, Quotas
from service.automation.schedule_views import ActionView, Backfill, ScheduleView
from service.database.engine import KeyedLocks
from service.errors import Conflict, QuotaExceeded, TemporalUnavailable
from service.inference.published_models import NamedModels, PublishedModels
from service.runs.runs import Runs, RunStates
from service.sealing import key_of, seal_keys
from service.temporal import PATIENCE, Temporal, memo_of, share_of, unless_unknown
from shared.automation import (
    ACTION_MEMO,
    AcceptRequest,
    Action,
    Decision,
    LastScheduled,
    Overlap,
    ScheduledAction,
    ScheduledRun,
    ScheduleRecord,
)
from shared.errors import InvalidInput, NotFound
from shared.runs.acceptance import check_startable
from shared.runs.requests import RunRecord, Source
from shared.settings import Settings
from shared.storage.paths import RunKeys, content_key, last_scheduled, schedule_record
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import Ledger
from workflows.policies import service_queue

# --- Schedules for the APIs: records in the store, and Temporal's schedules, which are derived from them ---

logger = logging.getLogger("longshore.service")

SCHEDULED_WORKFLOW = "ScheduledRunWorkflow"
_OURS = "by Longshore"
"""The note of schedules in Temporal: what a user has noted is on record alone."""
_MOST_SCHEDULES = 100
_SHOWN_ACTIONS = 20
_CONCURRENT = 16
_LOOKS, _LOOK_EVERY_S = 4, 0.2
_OVERLAPS: dict[Overlap, ScheduleOverlapPolicy] = {
    "skip": ScheduleOverlapPolicy.SKIP,
    "buffer_one": ScheduleOverlapPolicy.BUFFER_ONE,
    "buffer_all": ScheduleOverlapPolicy.BUFFER_ALL,
    "allow_all": ScheduleOverlapPolicy.ALLOW_ALL,
    "cancel_other": ScheduleOverlapPolicy.CANCEL_OTHER,
}


class Schedules:
    """Creates, lists, changes and deletes schedules. Those of other tenants are not found."""

    def __init__(
        self, settings: Settings, store: ObjectStore, temporal: Temporal, access: Access, quotas: Quotas
    ) -> None:
        self._settings = settings
        self._store = store
        self._temporal = temporal
        self._access = access
        self._quotas = quotas
        self._key_id = seal_keys(settings)[0].id
        self._locks = KeyedLocks()  # held while a schedule is changed in the store and in Temporal

    async def create(self, tenant: str, owner: str | None, scheduled: ScheduledRun) -> ScheduleView:
        """Create a schedule. The same request again gives the same schedule.

        Raises:
            Conflict: the name is taken by another, or there are too many.
            InvalidInput: an invalid cron line; a URI that the tenant may not read; a layout that is too large.
        """
        check_startable(scheduled.run, self._settings, "run.")
        await asyncio.to_thread(self._access.check, tenant, scheduled)
        scheduled = await self._quotas.sealed(tenant, scheduled)
        record = ScheduleRecord(
            tenant=tenant, owner=owner, scheduled=scheduled, created_at=time.time(), salt=secrets.token_hex(8)
        )
        async with self._locks.of(tenant, scheduled.name), self._temporal.client() as client:
            record = await self._accept(record)
            audit.touched(scheduled.name)
            try:
                await self._make(client, record)
            except RPCError as error:
                if error.status == RPCStatusCode.INVALID_ARGUMENT:
                    await asyncio.to_thread(self._remove, record)
                    raise InvalidInput(error.message, "cron") from None
                raise  # it is on record: the same request once more, or `restore`, makes it
        return await self.show(tenant, scheduled.name)

    async def of(self, tenant: str) -> tuple[ScheduleView, ...]:
        """List a tenant's schedules by name, without their actions."""
        places = asyncio.Semaphore(_CONCURRENT)

        async def view(name: str) -> ScheduleView | None:
            with suppress(NotFound):  # removed since
                async with places, self._temporal.client() as client:
                    record = await asyncio.to_thread(self._read, tenant, name)
                    return _view(record, await _describe(client, record))
            return None

        found = await asyncio.gather(*map(view, sorted(await asyncio.to_thread(self._names, tenant))))
        return tuple(each for each in found if each is not None)

    async def show(self, tenant: str, name: str) -> ScheduleView:
        record = await asyncio.to_thread(self._read, tenant, name)
        async with self._temporal.client() as client:
            known = await _describe(client, record)
            actions = () if known is None else await _actions(client, record, known.info.created_at)
        return _view(record, known).model_copy(update={"actions": actions})

    async def pause(self, tenant: str, name: str, note: str | None = None) -> ScheduleView:
        """Start nothing until it is resumed; a run that is going on continues."""
        ask = partial(ScheduleHandle.pause, note=_OURS, rpc_timeout=PATIENCE)
        return await self._each(tenant, name, ask, paused=True, note=note or "paused")

    async def resume(self, tenant: str, name: str) -> ScheduleView:
        ask = partial(ScheduleHandle.unpause, note=_OURS, rpc_timeout=PATIENCE)
        return await self._each(tenant, name, ask, paused=False, note="resumed")

    async def trigger(self, tenant: str, name: str) -> ScheduleView:
        """Start a run now, like at a scheduled time: the rules about overlap and unchanged data apply."""
        return await self._each(tenant, name, lambda handle: handle.trigger(rpc_timeout=PATIENCE))

    async def backfill(self, tenant: str, name: str, span: Backfill) -> ScheduleView:
        """Start runs for the times of a span, as if it were then. Raises InvalidInput for too many times."""
        span.check_times((await asyncio.to_thread(self._read, tenant, name)).scheduled)
        times = ScheduleBackfill(
            start_at=datetime.fromtimestamp(span.begin, UTC),
            end_at=datetime.fromtimestamp(span.end, UTC),
            overlap=_OVERLAPS[span.overlap],
        )
        return await self._each(tenant, name, lambda handle: handle.backfill(times, rpc_timeout=PATIENCE))

    async def delete(self, tenant: str, name: str) -> ScheduleView:
        """Delete a schedule. Its runs stay, and one that is going on continues."""
        async with self._locks.of(tenant, name):
            record = await asyncio.to_thread(self._read, tenant, name)
            async with self._temporal.client() as client:
                await _forget(client, record)
            await asyncio.to_thread(self._remove, record)
        audit.touched(name)
        return _view(record, None)

    async def restore(self) -> None:
        """Make every schedule in Temporal that has a record, but is not known there, or sealed by a key that only opens
        by now.
        """
        prefix = schedule_record()
        for key in await asyncio.to_thread(lambda: [item.key for item in self._store.list(prefix)]):
            tenant, _, name = key.removeprefix(prefix).partition("/")
            try:
                async with self._locks.of(tenant, name):
                    await self._restore(tenant, name)
            except NotFound:  # removed since
                continue
            except ValidationError as error:  # a record that cannot be read must not keep others from being restored
                logger.error("%s cannot be restored: %s", key, error)

    async def _restore(self, tenant: str, name: str) -> None:
        record = await asyncio.to_thread(self._read, tenant, name)
        async with self._temporal.client() as client:
            known = await _describe(client, record)
            if known is None or not _is_sealed_anew(known, self._key_id):
                await self._make(client, record)
                logger.info("schedule %s of %s was made in Temporal", name, tenant)
                # If another service has removed the schedule meanwhile, remove it from Temporal again.
                if await asyncio.to_thread(self._store.head, schedule_record(tenant, name)) is None:
                    await _forget(client, record)

    async def _make(self, client: Client, record: ScheduleRecord) -> None:
        """Make or update Temporal's schedule from its record: one of this id may be left from another store."""
        id, schedule = record.temporal_id, self._schedule(record)
        try:
            await client.create_schedule(id, schedule, rpc_timeout=PATIENCE)
        except ScheduleAlreadyRunningError:
            await client.get_schedule_handle(id).update(lambda _: ScheduleUpdate(schedule), rpc_timeout=PATIENCE)

    def _schedule(self, record: ScheduleRecord) -> Schedule:
        scheduled = record.scheduled
        return Schedule(
            action=ScheduleActionStartWorkflow(
                SCHEDULED_WORKFLOW,
                ScheduledAction(tenant=record.tenant, owner=record.owner, scheduled=scheduled),
                id=f"schedule/{record.temporal_id}",
                task_queue=self._settings.control_queue,
                priority=share_of(record.tenant),
            ),
            spec=ScheduleSpec(
                cron_expressions=[scheduled.cron] if scheduled.cron else [],
                intervals=[ScheduleIntervalSpec(every=timedelta(seconds=scheduled.every_s))]
                if scheduled.every_s
                else [],
                time_zone_name=scheduled.timezone,
            ),
            policy=SchedulePolicy(
                overlap=_OVERLAPS[scheduled.overlap], catchup_window=timedelta(seconds=scheduled.catch_up_s)
            ),
            state=ScheduleState(paused=record.paused, note=_OURS),
        )

    async def _each(
        self, tenant: str, name: str, ask: Callable[[ScheduleHandle], Awaitable[None]], **changes: object
    ) -> ScheduleView:
        """Apply `ask` to a schedule in Temporal, after making it again if it is missing; then record `changes`."""
        async with self._locks.of(tenant, name):
            record = await asyncio.to_thread(self._read, tenant, name)
            async with self._temporal.client() as client:
                if await _describe(client, record) is None:
                    await self._make(client, record)
                await ask(client.get_schedule_handle(record.temporal_id))
            if changes:
                await self._write(record.model_copy(update=changes))
        audit.touched(name)
        return await self.show(tenant, name)

    # Records.

    async def _accept(self, record: ScheduleRecord) -> ScheduleRecord:
        """Put a schedule on record, unless its name has one; return the record of that name."""
        name, names = record.scheduled.name, await asyncio.to_thread(self._names, record.tenant)
        if name not in names and len(names) >= _MOST_SCHEDULES:
            raise Conflict(f"a tenant has at most {_MOST_SCHEDULES} schedules: remove one")
        if await self._write(record, only_new=True):
            return record
        first = await asyncio.to_thread(self._read, record.tenant, name)
        if first.scheduled != record.scheduled:
            raise Conflict(f"there is a schedule {name} already: remove it, or take another name")
        return first

    async def _write(self, record: ScheduleRecord, *, only_new: bool = False) -> bool:
        key, data = schedule_record(record.tenant, record.scheduled.name), record.model_dump_json(indent=1).encode()
        return await self._quotas.put_record(record.tenant, key, data, only_new=only_new)

    # Blocking.

    def _names(self, tenant: str) -> list[str]:
        prefix = schedule_record(tenant)
        return [item.key.removeprefix(prefix) for item in self._store.list(prefix)]

    def _read(self, tenant: str, name: str) -> ScheduleRecord:
        try:
            return ScheduleRecord.model_validate_json(self._store.get_bytes(schedule_record(tenant, name)))
        except NotFound:
            raise NotFound(f"there is no schedule {name}") from None

    def _remove(self, record: ScheduleRecord) -> None:
        self._store.delete(schedule_record(record.tenant, record.scheduled.name))
        self._store.delete(last_scheduled(record.tenant, record.scheduled.name))


async def _describe(client: Client, record: ScheduleRecord) -> ScheduleDescription | None:
    """Temporal's description of a schedule; None if it has none."""
    handle = client.get_schedule_handle(record.temporal_id)
    for _ in range(_LOOKS):
        try:
            return await handle.describe(rpc_timeout=PATIENCE)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return None
            # Temporal runs the schedule as a workflow, which may just have begun, or have ended before this query.
            if error.status != RPCStatusCode.FAILED_PRECONDITION:
                raise
        await asyncio.sleep(_LOOK_EVERY_S)
    raise TemporalUnavailable(f"the schedule {record.scheduled.name} does not answer")


async def _forget(client: Client, record: ScheduleRecord) -> None:
    with unless_unknown():
        await client.get_schedule_handle(record.temporal_id).delete(rpc_timeout=PATIENCE)


def _is_sealed_anew(known: ScheduleDescription, key_id: str) -> bool:
    """Return False if the input that Temporal keeps for a schedule's runs was sealed by another key than this one."""
    action = known.schedule.action
    return isinstance(action, ScheduleActionStartWorkflow) and all(key_of(each) == key_id for each in action.args)


async def _actions(client: Client, record: ScheduleRecord, made_at: datetime) -> tuple[ActionView, ...]:
    """Return the latest actions. What was started before `made_at`, by Temporal's clock, was another schedule's."""
    own = f'TemporalScheduledById = "{record.temporal_id}"'
    query = f'WorkflowType = "{SCHEDULED_WORKFLOW}" AND {own} AND StartTime >= "{made_at.isoformat()}"'
    found = client.list_workflows(query, limit=_SHOWN_ACTIONS, rpc_timeout=PATIENCE)
    return tuple([await _action(execution) async for execution in found])


def _view(record: ScheduleRecord, known: ScheduleDescription | None) -> ScheduleView:
    """Return the view of a schedule; without Temporal's description, of its record alone."""
    if known is None:
        return ScheduleView(
            scheduled=record.scheduled, created_at=record.created_at, paused=record.paused, note=record.note
        )
    return ScheduleView(
        scheduled=record.scheduled,
        created_at=record.created_at,
        paused=known.schedule.state.paused,
        note=record.note if (told := known.schedule.state.note) in ("", _OURS) else told,
        next_times=tuple(time.timestamp() for time in known.info.next_action_times),
        num_actions=known.info.num_actions,
        num_overlapped=known.info.num_actions_skipped_overlap,
        num_missed=known.info.num_actions_missed_catchup_window,
    )


async def _action(execution: WorkflowExecution) -> ActionView:
    """Return the action in a workflow's memo; if the workflow ended without an outcome, one with Temporal's status."""
    action = await memo_of(execution, ACTION_MEMO, Action) or Action()
    ended = execution.status not in (None, WorkflowExecutionStatus.RUNNING)
    if action.state == "preparing" and ended:
        assert execution.status is not None
        word = execution.status.name.lower().replace("_", " ")
        action = Action(state="failed", reason=f"it ended before its run began: Temporal says {word}")
    return ActionView(**dict(action), at=execution.start_time.timestamp())


# --- Scheduled runs ---
# Accepts the runs of schedules like submitted ones (a row first, then the record), or gives the reason to start none.
#
# A schedule's workflow is started by Temporal, but a tenant's quotas are counted in the service's database. So the
# workflow asks the service to accept the run, on a queue that the service polls.


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
