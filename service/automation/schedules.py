"""Schedules, and the runs that they start."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from temporalio import activity
from temporalio.api.workflowservice.v1 import ListScheduleMatchingTimesRequest
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

from longshore.automation import Action, ActionView, Backfill, Overlap, ScheduledRun, ScheduleView
from longshore.runs import RunRecord, Source
from service.accounts import audit
from service.accounts.tenants import Access, Documents, Quotas
from service.inference.published_models import NamedModels, PublishedModels
from service.runs.runs import Runs
from service.sealing import key_of, seal_keys
from service.temporal import PATIENCE, Temporal, memo_of, share_of, unless_unknown
from shared.automation import ACTION_MEMO, AcceptRequest, Decision, LastScheduled, ScheduledAction, ScheduleRecord
from shared.errors import Conflict, InvalidInput, NotFound, QuotaExceeded, TemporalUnavailable
from shared.runs.acceptance import check_startable
from shared.settings import Settings
from shared.storage.paths import RunKeys, content_key
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import stored_of_run

# --- Schedules for the APIs: records, and Temporal's schedules, which are derived from them ---

logger = logging.getLogger("longshore.service")

SCHEDULED_WORKFLOW = "ScheduledRunWorkflow"
_OURS = "by Longshore"
"""The note of schedules in Temporal: what a user has noted is on record alone."""
_MOST_SCHEDULES = 100
_MOST_BACKFILLED = 200
_SHOWN_ACTIONS = 20
_CONCURRENT = 16
_LOOKS, _LOOK_EVERY_S = 4, 0.2


@dataclass(frozen=True, eq=False)
class Schedules:
    """Creates, lists, changes and deletes schedules. Those of other tenants are not found."""

    _settings: Settings
    _temporal: Temporal
    _access: Access
    _quotas: Quotas
    _records: Documents[ScheduleRecord]

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
        async with self._temporal.client() as client:
            record = await self._accept(client, record)
            audit.touched(scheduled.name)
            try:
                await self._make(client, record)
            except RPCError as error:
                if error.status == RPCStatusCode.INVALID_ARGUMENT:
                    await self._records.delete(tenant, scheduled.name)
                    raise InvalidInput(error.message, "cron") from None
                raise  # it is on record: the same request once more, or `restore`, makes it
        return await self.show(tenant, scheduled.name)

    async def of(self, tenant: str) -> tuple[ScheduleView, ...]:
        """List schedules by name, without their actions."""
        places = asyncio.Semaphore(_CONCURRENT)

        async def view(record: ScheduleRecord) -> ScheduleView:
            async with places, self._temporal.client() as client:
                return _view(record, await _describe(client, record))

        found = [record for record in await self._records.all(tenant) if not record.is_deleted]
        return tuple(await asyncio.gather(*map(view, found)))

    async def show(self, tenant: str, name: str) -> ScheduleView:
        """Return a schedule with its next times and its last actions: runs started, or the reason why not."""
        record = await self._read(tenant, name)
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
        begin, end = (datetime.fromtimestamp(at, UTC) for at in (span.begin, span.end))

        async def ask(handle: ScheduleHandle) -> None:
            async with self._temporal.client() as client:
                request = ListScheduleMatchingTimesRequest(namespace=client.namespace, schedule_id=handle.id)
                request.start_time.FromDatetime(begin)
                request.end_time.FromDatetime(end)
                found = await client.workflow_service.list_schedule_matching_times(request, timeout=PATIENCE)
            if (num_times := len(found.start_time)) > _MOST_BACKFILLED:  # Temporal lists some more, but not all
                rule = f"up to {num_times:,} times, or more; one backfill acts at {_MOST_BACKFILLED} at most"
                raise InvalidInput(rule, "end")
            times = ScheduleBackfill(start_at=begin, end_at=end, overlap=_policy(span.overlap))
            await handle.backfill(times, rpc_timeout=PATIENCE)

        return await self._each(tenant, name, ask)

    async def delete(self, tenant: str, name: str) -> ScheduleView:
        """Delete a schedule. Its runs stay, and one that is going on continues."""
        await self._read(tenant, name)
        record = await self._records.change(tenant, name, lambda r: r.model_copy(update={"is_deleted": True}))
        audit.touched(name)
        async with self._temporal.client() as client:
            await self._finish_deletion(client, record)
        return _view(record, None)

    async def _finish_deletion(self, client: Client, record: ScheduleRecord) -> None:
        """Delete a schedule in Temporal, and then its record. If that is cut off, `restore` does it."""
        await _forget(client, record)
        await self._records.delete(record.tenant, record.scheduled.name)

    async def restore(self) -> None:
        """Make every schedule in Temporal that has a record, but is not known there, or sealed by a key that only opens
        by now. Finish deletions.
        """
        key_id = seal_keys(self._settings)[0].id
        for _, record in await self._records.everybodys():
            async with self._temporal.client() as client:
                if record.is_deleted:
                    await self._finish_deletion(client, record)
                    continue
                known = await _describe(client, record)
                if known is None or not _is_sealed_anew(known, key_id):
                    with suppress(NotFound):  # removed since
                        await self._make(client, record)
                        logger.info("schedule %s of %s was made in Temporal", record.scheduled.name, record.tenant)

    async def _make(self, client: Client, record: ScheduleRecord) -> None:
        """Make or update Temporal's schedule from its record: one of this id may be left from another store.

        Raises NotFound: another request has deleted it meanwhile. Then Temporal has it no more.
        """
        id, schedule = record.temporal_id, self._schedule(record)
        try:
            await client.create_schedule(id, schedule, rpc_timeout=PATIENCE)
        except ScheduleAlreadyRunningError:
            await client.get_schedule_handle(id).update(lambda _: ScheduleUpdate(schedule), rpc_timeout=PATIENCE)
        now = await self._records.find(record.tenant, record.scheduled.name)
        if now is None or now.is_deleted or now.salt != record.salt:
            await _forget(client, record)
            raise NotFound(f"there is no schedule {record.scheduled.name}")

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
                overlap=_policy(scheduled.overlap), catchup_window=timedelta(seconds=scheduled.catch_up_s)
            ),
            state=ScheduleState(paused=record.paused, note=_OURS),
        )

    async def _each(
        self, tenant: str, name: str, ask: Callable[[ScheduleHandle], Awaitable[None]], **changes: object
    ) -> ScheduleView:
        """Apply `ask` to a schedule in Temporal, after making it again if it is missing; then record `changes`."""
        record = await self._read(tenant, name)
        async with self._temporal.client() as client:
            if await _describe(client, record) is None:
                await self._make(client, record)
            await ask(client.get_schedule_handle(record.temporal_id))
        if changes:
            await self._records.change(tenant, name, lambda before: before.model_copy(update=changes))
        audit.touched(name)
        return await self.show(tenant, name)

    async def _accept(self, client: Client, record: ScheduleRecord) -> ScheduleRecord:
        """Put a schedule on record, unless its name has one; return the record of that name."""

        def check(others: Sequence[ScheduleRecord]) -> None:
            if len(others) >= _MOST_SCHEDULES:
                raise Conflict(f"a tenant has at most {_MOST_SCHEDULES} schedules: remove one")

        name = record.scheduled.name
        while (first := await self._records.add(record.tenant, name, record, check=check)) is not None:
            if not first.is_deleted:
                if first.scheduled != record.scheduled:
                    raise Conflict(f"there is a schedule {name} already: remove it, or take another name")
                return first
            await self._finish_deletion(client, first)
        return record

    async def _read(self, tenant: str, name: str) -> ScheduleRecord:
        record = await self._records.find(tenant, name)
        if record is None or record.is_deleted:
            raise NotFound(f"there is no schedule {name}")
        return record


def _policy(overlap: Overlap) -> ScheduleOverlapPolicy:
    return ScheduleOverlapPolicy[overlap.upper()]


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

    _store: ObjectStore
    _runs: Runs
    _published: PublishedModels
    _names: NamedModels
    _schedules: Documents[ScheduleRecord]
    _quotas: Quotas

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
                # The dataset was downloaded to be compared alone.
                prefix = f"{RunKeys(request.run_id).prefix}/"
                for item in await asyncio.to_thread(lambda: list(self._store.list(prefix))):
                    await asyncio.to_thread(self._store.delete, item.key)
                return Decision(reason=reason)
        last = LastScheduled(run_id=request.run_id, dataset_sha256=request.data_sha256)
        with suppress(NotFound):  # the schedule was removed meanwhile
            name = request.action.scheduled.name
            await self._schedules.change(request.action.tenant, name, lambda r: r.model_copy(update={"last": last}))
        await self._runs.put_record(record)  # an attempt before may have died behind the row
        workflow, start = await self._runs.workflow_of(record, start_id=content_key(request.run_id))
        return Decision(workflow=workflow, start=start)

    async def _record(self, run_id: str) -> RunRecord | None:
        with suppress(NotFound):
            return await self._runs.accepted(run_id)
        return None

    async def _accept(self, request: AcceptRequest) -> RunRecord:
        action = request.action
        held = await asyncio.to_thread(stored_of_run, self._store, action.tenant, request.run_id)
        await self._quotas.admit_bytes(action.tenant, sum(each.num_bytes for each in held))
        run = await asyncio.to_thread(self._names.resolved, action.tenant, action.scheduled.run)
        source = Source(schedule=action.scheduled.name)
        if action.scheduled.continues and run.name is not None:
            newest = await asyncio.to_thread(self._published.newest_adapter, action.tenant, run.name)
            run = run.model_copy(update={"initial_adapter": newest.uri}) if newest is not None else run
        return (await self._runs.accept(request.run_id, run, action.tenant, action.owner, source))[0]

    async def _unchanged(self, request: AcceptRequest) -> str | None:
        """The reason to start no run: its data equals that of the last one; None if it differs."""
        action = request.action
        record = await self._schedules.find(action.tenant, action.scheduled.name)
        last = None if record is None or action.scheduled.even_unchanged else record.last
        if last is None or last.dataset_sha256 != request.data_sha256:
            return None
        with suppress(NotFound):  # it was removed
            if (await self._runs.view(request.action.tenant, last.run_id)).state in ("failed", "cancelled"):
                return None
        return f"the dataset is the one that {last.run_id} had"
