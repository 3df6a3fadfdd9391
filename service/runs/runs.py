"""Runs behind the APIs: submits, shows, ends and resumes them.

A run is accepted once its row is in the database. Whatever happens after that (the service dies, Temporal or the store
is away) the run is found again by its row, and started. Its workflow records each change of its state and phase in the
row (service/runs/rows.py); `run.json` and `result.json` in the store are for readers without the database.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack

from opentelemetry import trace
from pydantic import Field
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import WorkflowIDReusePolicy
from temporalio.converter import ActivitySerializationContext
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from longshore.fields import Frozen
from longshore.runs import Run, RunRecord, Source
from longshore.views import Problem, RunPage, RunStatus, RunView, SamplesNow, State
from service.accounts import audit
from service.accounts.keys import Principal
from service.accounts.tenants import Access, Documents, Quotas
from service.database.engine import KeyedLocks
from service.runs.rows import IndexedRun, RunFilter, RunRows, Uses, checkpoints_named
from service.runs.views import with_cost
from service.temporal import LIST_PATIENCE, PATIENCE, Temporal, query, unless_unknown
from shared.errors import Conflict, InvalidInput, LongshoreError, NotFound, QuotaExceeded, TemporalUnavailable
from shared.runs.acceptance import check_offered, check_startable, precision_of
from shared.runs.start import (
    RL_WORKFLOW,
    SESSION_WORKFLOW,
    SFT_WORKFLOW,
    AnyStart,
    result_sha256,
    threads_per_rank,
    workflow_of,
)
from shared.settings import Settings
from shared.storage import paths
from shared.storage.artifacts import find_artifact
from shared.storage.store import ObjectStore

# --- The status of runs: live, and of those that Temporal has lost ---
#
# A workflow records its state and phase in its run's row. How far its steps are is asked here, since steps are many.
# A row is read before the workflow is asked, and only changed if it is still the same, so that an old answer never
# replaces a newer one.

logger = logging.getLogger("longshore.service")
_SHARED_S = 0.5
"""Seconds for which a workflow's answer is used again."""
_START_DUE_S = 30.0
_DRAWING = ("sample", "draw_share")  # activities that tell `SamplesNow`
_CONCURRENT = 8
_MOST_A_TURN = 128
_RUNNING = f'WorkflowType IN ("{SFT_WORKFLOW}", "{RL_WORKFLOW}", "{SESSION_WORKFLOW}") AND ExecutionStatus = "Running"'


class RunStates:
    """Asks workflows for the status of their runs. `waiting`: accepted runs that Temporal does not know, to start."""

    def __init__(self, store: ObjectStore, rows: RunRows, temporal: Temporal) -> None:
        self._store = store
        self._rows = rows
        self._temporal = temporal
        self._asked: dict[str, tuple[float, asyncio.Task[IndexedRun]]] = {}
        self._places = asyncio.Semaphore(_CONCURRENT)
        self.waiting: set[str] = set()

    async def current(self, run: IndexedRun) -> IndexedRun:
        """Ask for a run's current status. Callers within half a second share one query."""
        since, task = self._asked.get(run.run_id, (0.0, None))
        if task is None or time.monotonic() - since > _SHARED_S:
            task = asyncio.create_task(self.refresh(run))
            now = time.monotonic()
            self._asked = {run_id: each for run_id, each in self._asked.items() if now - each[0] <= _SHARED_S}
            self._asked[run.run_id] = now, task
        return await asyncio.shield(task)

    def changed(self, run_id: str) -> None:
        """Forget the last answer, since the run was changed."""
        self._asked.pop(run_id, None)

    async def refresh(self, run: IndexedRun) -> IndexedRun:
        """Ask for a run's status, and update its row. While Temporal is away only the end of a run is noticed."""
        try:
            status = await self._status(run)
        except TemporalUnavailable:
            status = await self.result(run.run_id)  # its end may be in the store
        return run if status is None else await self._rows.change(run, status)

    async def refresh_training(self) -> None:
        """Ask the runs that train how far they are, those first that were asked longest ago.

        Raises TemporalUnavailable, DatabaseUnavailable: the rows stay as they are.
        """
        phases = await self._rows.open()
        await self._refresh_all([run_id for run_id, phase in phases.items() if phase == "training"])

    async def find_lost(self) -> None:
        """Look at the runs of which Temporal lists no running workflow: they have to be started, or were ended there.

        Raises TemporalUnavailable, DatabaseUnavailable.
        """
        open_runs = await self._rows.open()
        async with self._temporal.client() as client:
            known = {each.id async for each in client.list_workflows(_RUNNING, rpc_timeout=LIST_PATIENCE)}
        await self._refresh_all([run_id for run_id in open_runs if run_id not in known])

    async def _refresh_all(self, run_ids: Sequence[str]) -> None:
        await asyncio.gather(*(self._look(run_id) for run_id in run_ids[:_MOST_A_TURN]))

    async def _look(self, run_id: str) -> None:
        async with self._places:
            try:
                if (run := await self._rows.find(run_id)) is not None and run.is_open:
                    await self.refresh(run)
            except LongshoreError:  # store, database or Temporal are away: this is repeated
                raise
            except Exception:  # an error of one run must not keep others from being started
                logger.exception("%s cannot be looked after", run_id)

    async def _status(self, run: IndexedRun) -> RunStatus | None:
        """Read a run's status from its workflow or its result; None if nothing newer than the row is known."""
        async with self._temporal.client() as client:
            handle = client.get_workflow_handle(run.run_id)
            try:
                description = await handle.describe(rpc_timeout=PATIENCE)
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                result = await self.result(run.run_id)
                # A schedule's workflow starts its run itself, to wait for its end.
                is_due = time.time() - run.record.created_at > _START_DUE_S
                if result is None and (run.record.source.schedule is None or is_due):
                    self.waiting.add(run.run_id)
                return result
            if description.status == WorkflowExecutionStatus.RUNNING:
                status = await _query(handle)
                # The workflow is about to record its end: until then the row has the run's state.
                if status is None or status.state != "running":
                    return None
                return status.model_copy(update={"samples_now": await _samples_now(client, description)})
            return await self.result(run.run_id) or await self._settle(handle, run, description)

    async def _settle(
        self, handle: WorkflowHandle[Any, Any], run: IndexedRun, ended: WorkflowExecutionDescription
    ) -> RunStatus:
        """Write a result for a run that ended without one, such as when an operator terminated its workflow.

        Otherwise it would seem lost, and be started again, once Temporal has forgotten it.
        """
        status = await _query(handle) or run.status
        if (await handle.describe(rpc_timeout=PATIENCE)).run_id != ended.run_id:
            return status  # it was resumed meanwhile, which moved its result away
        if status.state == "running":
            word = ended.status.name.lower().replace("_", " ") if ended.status is not None else "nothing"
            problem = Problem(
                kind="ended_outside", message=f"the workflow ended without a result: Temporal says {word}"
            )
            status = status.model_copy(update={"state": "failed", "problem": problem, "ended_at": time.time()})
        data = status.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_if_absent, paths.RunKeys(run.run_id).result, data)
        return status

    async def result(self, run_id: str) -> RunStatus | None:
        """Read a run's result in the store; None before its end."""
        with suppress(NotFound):
            data = await asyncio.to_thread(self._store.get_bytes, paths.RunKeys(run_id).result)
            return RunStatus.model_validate_json(data)
        return None

    async def give_up(self, run: IndexedRun) -> None:
        """Record that a paused run was cancelled, as it has no workflow that could do so."""
        status = run.status.model_copy(update={"state": "cancelled", "ended_at": time.time()})
        data = status.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_bytes, paths.RunKeys(run.run_id).result, data)
        await self._rows.change(run, status)
        self.changed(run.run_id)


async def _query(handle: WorkflowHandle[Any, Any]) -> RunStatus | None:
    """Query a workflow's status; None if it fails, such as when code is newer than the workflow's history."""
    try:
        return await query(handle, "status", result_type=RunStatus)
    except TemporalUnavailable as error:
        logger.warning("%s", error)
        return None


async def _samples_now(client: Client, description: WorkflowExecutionDescription) -> SamplesNow | None:
    """Add up what the run's activities that draw samples have told with their heartbeats; None if there are none."""
    found = list[SamplesNow]()
    for each in description.raw_description.pending_activities:
        if (name := each.activity_type.name) in _DRAWING and each.heartbeat_details.payloads:
            # Sealed for this activity of this workflow alone.
            by = ActivitySerializationContext(client.namespace, None, name, None, description.id, None, False)
            opened = client.data_converter.with_context(by)
            with suppress(RuntimeError):  # of a newer host, which tells what this service does not know
                found += await opened.decode(each.heartbeat_details.payloads, [SamplesNow])
    return sum(found[1:], found[0]) if found else None


def queued(record: RunRecord) -> RunStatus:
    """The status of a run that was accepted and has not begun."""
    return RunStatus(run_id=record.run_id, kind=record.run.kind, name=record.run.name or record.run_id)


F = TypeVar("F", bound=Frozen)

_CLOSING_S = 5.0
_STATE_IS_GONE = "what it would go on from was deleted, as this installation's policy has it (docs/backup.md)"


class FirstRequest(Frozen):
    """The run that an idempotency key made, and the hash of its request."""

    run_id: str
    request_sha256: str = Field(description="digest of the request's canonical JSON")


@dataclass(frozen=True, eq=False)
class Runs:
    """Submit, show, list, cancel, pause, resume and retry runs. A run of another tenant is not found."""

    _settings: Settings
    _store: ObjectStore
    _rows: RunRows
    _states: RunStates
    _temporal: Temporal
    _access: Access
    _quotas: Quotas
    _uses: Uses
    _keys: Documents[FirstRequest]
    # Held, in this process, while a tenant's run is resumed or a paused one cancelled: so two runs do not take one
    # place of a quota, and a run is not both resumed and cancelled.
    _locks: KeyedLocks = field(default_factory=KeyedLocks)

    # Submitting.

    async def submit(
        self,
        asking: Principal,
        run: Run,
        idempotency_key: str | None = None,
        source: Source | None = None,
        asked: Frozen | None = None,
    ) -> RunView:
        """Accept a run and start it. The same key gives the same run.

        Args:
            asked: the request that the run was made of; by default the run. A repeated key must have an equal request.
                (The run may differ, if a name in the request means something else by then.)

        Raises:
            InvalidInput: a URI points to a forbidden place, or the key was used for another request.
            QuotaExceeded
        """
        await self.check_run(
            asking.tenant, run, "" if source is None or source.api in ("native", "page", "tinker") else "longshore."
        )
        run_id = new_run_id(run.kind)
        if idempotency_key:
            run_id = await self.claim(asking.tenant, idempotency_key, run_id, asked or run)
        audit.touched(run_id)
        trace.get_current_span().set_attribute("longshore.run", run_id)  # whose workflow may start later, elsewhere
        record, is_new = await self.accept(run_id, run, asking.tenant, asking.key_id, source or Source())
        try:
            # A repeated key may be of a run that ended long ago, and that Temporal has forgotten.
            if is_new:
                await self.put_record(record)
                await self._start(record)
            else:
                await self.make_sure(record)
        except LongshoreError as error:  # accepted all the same: started when store and Temporal are back
            logger.warning("%s waits to be started: %s", run_id, error)
            self._states.waiting.add(run_id)
        return await self.view(asking.tenant, run_id)

    async def check_access(self, tenant: str, request: Frozen) -> None:
        """Raise InvalidInput if the tenant may not read a URI in a request."""
        await asyncio.to_thread(self._access.check, tenant, request)

    async def check_run(self, tenant: str, run: Run, below: str = "") -> None:
        """Raise InvalidInput for a URI that the tenant may not read, or a layout that no host offers.

        `below`: the place of the run's fields in the request.
        """
        check_startable(run, self._settings, below)
        await asyncio.to_thread(check_offered, run, self._settings, self._store, below)
        await self.check_access(tenant, run)

    async def sealed(self, tenant: str, request: F) -> F:
        """Return a request without the queries of its URIs, as `Quotas.sealed` does."""
        return await self._quotas.sealed(tenant, request)

    async def claim(self, tenant: str, key: str, run_id: str, asked: Frozen) -> str:
        """Return the run or sweep that a key made: `run_id` the first time.

        Raises InvalidInput for another request; Conflict if that run was removed.
        """
        mine = FirstRequest(run_id=run_id, request_sha256=hashlib.sha256(asked.model_dump_json().encode()).hexdigest())
        first = await self._keys.add(tenant, hashlib.sha256(key.encode()).hexdigest(), mine)
        if first is None:
            return run_id
        if await self._rows.is_removed(first.run_id):
            raise Conflict(f"this key created {first.run_id}, which was removed: use another Idempotency-Key")
        if first.request_sha256 != mine.request_sha256:
            raise InvalidInput(
                f"this key was used for another request, which created {first.run_id}", "Idempotency-Key"
            )
        return first.run_id

    async def accept(
        self, run_id: str, run: Run, tenant: str, owner: str | None, source: Source
    ) -> tuple[RunRecord, bool]:
        """Add a run's row, for the caller to put its record into the store (`put_record`), and then to start it.

        Returns the record, and whether this call made it. One of two requests for a quota's last place succeeds.

        Raises:
            QuotaExceeded
            InvalidInput, BeingDeleted: a checkpoint that it names was deleted since, or may be in a moment.
        """
        if (known := await self._rows.find(run_id)) is not None:
            return known.record, False
        run, source = await self.sealed(tenant, run), await self.sealed(tenant, source)
        precision = await asyncio.to_thread(precision_of, run.dtype, self._settings, self._store)
        record = RunRecord(
            run_id=run_id,
            tenant=tenant,
            owner=owner,
            source=source,
            run=run.model_copy(update={"dtype": precision.dtype}),
            created_at=time.time(),
            threads_per_rank=threads_per_rank(run, self._settings),
            precision=precision,
        )
        for key, made_by in checkpoints_named(tenant, run.model_dump_json()).items():
            await self._uses.note(paths.RunKeys(made_by).prefix, run_id)
            if await asyncio.to_thread(find_artifact, self._store, key) is None:
                raise InvalidInput(f"this checkpoint of {made_by} was deleted", key)
        if not await self._rows.admit(record, queued(record)):
            return await self.accepted(run_id), False
        return record, True

    async def accepted(self, run_id: str) -> RunRecord:
        """Return what was accepted as a run, whoever's it is. Raises NotFound."""
        run = await self._rows.find(run_id)
        if run is None:
            raise NotFound(f"there is no run {run_id}")
        return run.record

    async def put_record(self, record: RunRecord) -> None:
        """Put a run's record into the store, unless it is there."""
        data = record.model_dump_json(indent=1).encode()
        await asyncio.to_thread(self._store.put_if_absent, paths.RunKeys(record.run_id).record, data)

    async def _start(self, record: RunRecord, *, resumed: bool = False) -> None:
        """Start a run's workflow. Raises Conflict when it is to be resumed and is running."""
        ended = await asyncio.to_thread(result_sha256, self._store, record.run_id) if resumed else None
        name, start = await self.workflow_of(record, resumed=resumed, goes_on_from=ended)
        policy = WorkflowIDReusePolicy.ALLOW_DUPLICATE if resumed else WorkflowIDReusePolicy.REJECT_DUPLICATE
        try:
            await self._temporal.start(
                name, start, record.run_id, record.tenant, start.tenant_weight, id_reuse_policy=policy
            )
        except WorkflowAlreadyStartedError:
            if resumed:
                raise Conflict(f"{record.run_id} is running") from None

    async def workflow_of(
        self, record: RunRecord, *, start_id: str | None = None, resumed: bool = False, goes_on_from: str | None = None
    ) -> tuple[str, AnyStart]:
        """Return the name and input of a run's workflow, with the tenant's current rules for sharing workers."""
        quotas, room = await self._rows.quotas(record.tenant), await self._quotas.room(record.tenant)
        return workflow_of(
            record, self._settings, quotas, room, start_id=start_id, resumed=resumed, goes_on_from=goes_on_from
        )

    # Showing.

    async def record(self, tenant: str, run_id: str) -> RunRecord:
        """Return a run's record. Raises NotFound for a run that this tenant does not have."""
        return (await self._row(tenant, run_id)).record

    async def view(self, tenant: str, run_id: str) -> RunView:
        """Return a run's current status: from its workflow while it runs, from its row afterwards."""
        return with_cost((await self._current(tenant, run_id)).view, self._settings.prices)

    async def of(self, tenant: str, run_ids: Sequence[str]) -> tuple[IndexedRun, ...]:
        """The runs of these ids that the tenant has, from the index, in no order."""
        return await self._rows.among(tenant, run_ids)

    async def _row(self, tenant: str, run_id: str) -> IndexedRun:
        run = await self._rows.find(run_id)
        if run is None or run.record.tenant != tenant:
            raise NotFound(f"there is no run {run_id}")
        return run

    async def _current(self, tenant: str, run_id: str) -> IndexedRun:
        run = await self._row(tenant, run_id)
        return await self._states.current(run) if run.is_open else run

    async def page(self, tenant: str, *, limit: int, after: str | None = None, **wanted: Unpack[RunFilter]) -> RunPage:
        """A tenant's runs, newest first, as the index has them: a second old at most.

        Args:
            after: the run id that the page before ended with.
            wanted: which of them.
        """
        found = await self._rows.page(tenant, limit + 1, after, **wanted)
        runs = tuple(with_cost(run.view, self._settings.prices) for run in found[:limit])
        has_more = len(found) > limit
        since = wanted.get("no_session_idle_since")
        num_hidden = 0 if since is None else await self._rows.num_sessions_idle_since(tenant, since)
        return RunPage(
            runs=runs, has_more=has_more, next=runs[-1].run_id if has_more else None, num_hidden_sessions=num_hidden
        )

    # Ending and going on.

    async def cancel(self, tenant: str, run_id: str) -> RunView:
        """Ask a run to end at its next step boundary; end a paused one at once. Raises Conflict when it has ended."""
        run = await self._row(tenant, run_id)
        if run.status.state == "paused":
            async with self._locks.of(tenant):
                run = await self._row(tenant, run_id)
                if run.status.state == "paused":
                    audit.touched(run_id)
                    await self._states.give_up(run)
                    return await self.view(tenant, run_id)
        async with self._ending(tenant, run_id) as handle:
            await handle.cancel(rpc_timeout=PATIENCE)
        return await self.view(tenant, run_id)

    async def pause(self, tenant: str, run_id: str, limit: str | None = None) -> RunView:
        """Ask a run to end at its next step boundary, to be resumed later. Raises Conflict when it has ended.

        `limit`: a message about the limit that pauses it; None if a user does.
        """
        name, told = ("pause", []) if limit is None else ("pause_for_limit", [limit])
        async with self._ending(tenant, run_id) as handle:
            await handle.signal(name, args=told, rpc_timeout=PATIENCE)
        return await self.view(tenant, run_id)

    @asynccontextmanager
    async def _ending(self, tenant: str, run_id: str) -> AsyncIterator[WorkflowHandle[Any, Any]]:
        """Yield the workflow of an active run, to end it. Raises Conflict if it has ended."""
        await self.make_sure(await self.record(tenant, run_id))
        self._states.changed(run_id)
        run = await self._current(tenant, run_id)
        if not run.is_open:
            raise Conflict(f"{run_id} has ended: it {_ended_as(run.status.state)}")
        audit.touched(run_id)
        async with self._temporal.client() as client:
            try:
                yield client.get_workflow_handle(run_id)
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                raise Conflict(f"{run_id} has just ended") from None
        self._states.changed(run_id)

    async def resume(self, tenant: str, run_id: str) -> RunView:
        """Go on from the last checkpoint of a paused, failed or cancelled run.

        Raises Conflict when the run is running, or succeeded, or its state is gone; QuotaExceeded; BeingDeleted.
        """
        self._states.changed(run_id)
        run = await self._current(tenant, run_id)
        match run.status.state:
            case "running":
                raise Conflict(f"{run_id} is running")
            case "succeeded":
                raise Conflict(f"{run_id} succeeded: there is nothing to resume")
            case "failed" | "cancelled" | "paused":
                audit.touched(run_id)
                await self._uses.note(paths.RunKeys(run_id).prefix, run_id)
                if await asyncio.to_thread(self._store.head, paths.RunKeys(run_id).is_expired) is not None:
                    raise Conflict(f"{run_id}: {_STATE_IS_GONE}; its request can be sent as a new run")
                async with self._locks.of(tenant):
                    await self._rows.check_place(tenant)
                    await self._start_again(run.record)
                    changes: dict[str, object] = {
                        "state": "running",
                        "phase": "queued",
                        "problem": None,
                        "ended_at": None,
                    }
                    changes |= {"paused_by": None, "client_away": False}
                    await self._rows.change(run, run.status.model_copy(update=changes))
        self._states.changed(run_id)
        return await self.view(tenant, run_id)

    async def pause_left(self) -> None:
        """Pause runs whose clients have sent nothing for `clients.away_s`.

        Raises TemporalUnavailable, DatabaseUnavailable: the next call does the rest.
        """
        away_s = self._settings.clients.away_s
        for run in await self._rows.waiting_for_clients(time.time() - away_s) if away_s else ():
            with suppress(Conflict, NotFound):  # it has just ended
                async with self._ending(run.record.tenant, run.run_id) as handle:
                    await handle.signal("pause_for_client", rpc_timeout=PATIENCE)

    async def hold_spending(self) -> None:
        """Pause the runs of tenants at their spending limit; resume, oldest first, those that a limit has paused and
        whose tenants are below it now. Several services may do so at once.

        Raises TemporalUnavailable, DatabaseUnavailable: the next call does the rest.
        """
        over, going_on, held = await self._rows.overspending()
        for run in going_on:
            tenant = run.record.tenant
            with suppress(Conflict, NotFound):  # it has just ended
                await self.pause(tenant, run.run_id, f"quota spending: {over[tenant]}")
                logger.info("%s is paused: %s", run.run_id, over[tenant])
        for run in held:
            with suppress(Conflict, NotFound, QuotaExceeded):  # another quota has no place for it yet
                await self.resume(run.record.tenant, run.run_id)
                logger.info("%s goes on: its tenant may spend more", run.run_id)

    async def resume_for_client(self, tenant: str, run_id: str) -> bool:
        """Resume a run that `pause_left` paused, or is pausing. Returns False for any other. Raises QuotaExceeded."""
        end = time.monotonic() + _CLOSING_S
        while True:
            self._states.changed(run_id)
            status = (await self._current(tenant, run_id)).status
            is_pausing = status.client_away and status.state == "running"
            if not is_pausing or time.monotonic() > end:
                break
            await asyncio.sleep(0.1)  # its worker saves the state
        if status.client_away and status.state == "paused":
            try:
                await self.resume(tenant, run_id)
            except Conflict:  # another request may have resumed it
                if not (await self._current(tenant, run_id)).is_open:
                    raise
        return status.client_away

    async def _start_again(self, record: RunRecord) -> None:
        """Start a workflow again once it has closed, after the run's end. Raises Conflict when it does not close."""
        end = time.monotonic() + _CLOSING_S
        while True:
            try:
                return await self._start(record, resumed=True)
            except Conflict:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def retry(self, asking: Principal, run_id: str) -> RunView:
        """Submit a run's request as a new run. Raises Conflict unless the run failed or was cancelled."""
        run = await self._current(asking.tenant, run_id)
        if run.status.state not in ("failed", "cancelled"):
            word = "is running" if run.is_open else _ended_as(run.status.state)
            raise Conflict(f"{run_id} {word}: what failed or was cancelled can be tried again")
        return await self.submit(asking, run.record.run, source=run.record.source)

    # Starting runs that were accepted but not started.

    async def sweep(self) -> None:
        """Start every accepted run that has not ended and is unknown to Temporal.

        Raises TemporalUnavailable, DatabaseUnavailable, StoreUnavailable: the next call does the rest.
        """
        await self._states.find_lost()
        for run_id in sorted(self._states.waiting):
            with suppress(NotFound):  # it was removed
                await self.make_sure(await self.accepted(run_id))
            self._states.waiting.discard(run_id)

    async def make_sure(self, record: RunRecord) -> None:
        """Start a run that has not ended, unless Temporal knows it."""
        async with self._temporal.client() as client:
            with unless_unknown():
                await client.get_workflow_handle(record.run_id).describe(rpc_timeout=PATIENCE)
                return
        if await self._states.result(record.run_id) is not None:
            return
        # A lease on record means that it ran before and Temporal lost it: it continues from its last checkpoint.
        leases = paths.RunKeys(record.run_id).leases
        was_leased = await asyncio.to_thread(lambda: any(True for _ in self._store.list(leases)))
        await self.put_record(record)
        with suppress(Conflict):  # another process has just started it
            await self._start(record, resumed=was_leased)
        logger.info("started %s, which was accepted and not known to Temporal", record.run_id)


def new_run_id(kind: str) -> str:
    """The kind + milliseconds since 1970 in 11 hex digits, so that ids sort by time + 6 random ones."""
    return f"{kind}-{int(time.time() * 1000):011x}{secrets.token_hex(3)}"


def _ended_as(state: State) -> str:
    return f"was {state}" if state in ("cancelled", "paused") else state
