"""Runs behind the APIs: submits, shows, ends and resumes them.

A run is accepted once `run.json` is in the store. Whatever happens after that (the service dies, Temporal is away,
its database is lost) the run is found again by its record, and started. The index (database/) has a row of each: a
tenant's runs are listed and counted there.
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
from pydantic import Field, ValidationError
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from longshore.fields import Frozen
from service.accounts import audit
from service.accounts.keys import Principal
from service.accounts.tenants import Access, Quotas
from service.database.engine import KeyedLocks
from service.errors import Conflict, TemporalUnavailable
from service.runs.rows import IndexedRun, RunFilter, RunRows
from service.runs.views import RunPage, RunView, with_cost
from service.temporal import LIST_PATIENCE, PATIENCE, Temporal, memo_of, query, unless_unknown
from shared.errors import InvalidInput, LongshoreError, NotFound
from shared.runs.acceptance import check_offered, check_startable, precision_of
from shared.runs.requests import Run, RunRecord, Source
from shared.runs.start import (
    RL_WORKFLOW,
    SESSION_WORKFLOW,
    SFT_WORKFLOW,
    AnyStart,
    result_sha256,
    threads_per_rank,
    workflow_of,
)
from shared.runs.status import STATUS_MEMO, Problem, RunStatus, State
from shared.settings import Settings
from shared.storage import paths
from shared.storage.store import ObjectStore
from shared.storage.stored_bytes import STATE_IS_GONE, expired, hold_checkpoints, removed_run

# --- Refreshes the status of runs ---
# Reads it from their workflows and the store, and writes it into their rows.
#
# A row is read before the workflow is asked, and only changed if it is still the same, so that an old answer never
# replaces a newer one.

logger = logging.getLogger("longshore.service")
SHARED_S = 0.5
"""Seconds for which a workflow's answer is used again."""
_RECORD_DUE_S = 60.0
_START_DUE_S = 30.0
_CONCURRENT = 8
_MOST_A_TURN = 128
_RUNNING = f'WorkflowType IN ("{SFT_WORKFLOW}", "{RL_WORKFLOW}", "{SESSION_WORKFLOW}") AND ExecutionStatus = "Running"'


class RunStates:
    """Keeps rows up to date. `waiting`: accepted runs that Temporal does not know, which have to be started."""

    def __init__(self, store: ObjectStore, rows: RunRows, temporal: Temporal) -> None:
        self._store = store
        self._rows = rows
        self._temporal = temporal
        self._asked: dict[str, tuple[float, asyncio.Task[IndexedRun]]] = {}
        self.waiting: set[str] = set()

    async def current(self, run: IndexedRun) -> IndexedRun:
        """Ask for a run's current status. Callers within half a second share one query."""
        since, task = self._asked.get(run.run_id, (0.0, None))
        if task is None or time.monotonic() - since > SHARED_S:
            task = asyncio.create_task(self.refresh(run))
            now = time.monotonic()
            self._asked = {run_id: each for run_id, each in self._asked.items() if now - each[0] <= SHARED_S}
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
                if result is None:
                    await self._lost(run)
                return result
            if description.status == WorkflowExecutionStatus.RUNNING:
                return await _query(handle)
            return await self.result(run.run_id) or await self._settle(handle, run, description)

    async def _lost(self, run: IndexedRun) -> None:
        """Have a run that Temporal does not know started, if it has a record; else delete its row."""
        age_s = time.time() - run.record.created_at
        if await asyncio.to_thread(self._store.head, paths.RunKeys(run.run_id).record) is not None:
            # A schedule's workflow starts its run itself, to wait for its end.
            if run.record.source.schedule is None or age_s > _START_DUE_S:
                self.waiting.add(run.run_id)
        elif age_s > _RECORD_DUE_S:
            await self._rows.delete(run.run_id)  # the service died before it was accepted

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

    async def record(self, run_id: str) -> RunRecord:
        """Read a run's record in the store. Raises NotFound for an unknown run, and for one that was removed."""
        try:
            data = await asyncio.to_thread(self._store.get_bytes, paths.RunKeys(run_id).record)
        except NotFound:
            raise NotFound(f"there is no run {run_id}") from None
        if await asyncio.to_thread(self._store.head, removed_run(run_id)) is not None:
            raise NotFound(f"there is no run {run_id}: it was removed")
        return RunRecord.model_validate_json(data)

    async def adopt(self, run_id: str) -> IndexedRun:
        """Add the row of a run that has a record but no row, such as after the loss of the database.

        Raises NotFound: it has no record.
        """
        record = await self.record(run_id)
        await self._rows.add(record, await self.result(run_id) or queued(record))
        found = await self._rows.find(run_id)
        assert found is not None
        return found


async def _query(handle: WorkflowHandle[Any, Any]) -> RunStatus | None:
    """Query a workflow's status; None if it fails, such as when code is newer than the workflow's history."""
    try:
        return await query(handle, "status", result_type=RunStatus)
    except TemporalUnavailable as error:
        logger.warning("%s", error)
        return None


def queued(record: RunRecord) -> RunStatus:
    """The status of a run that was accepted and has not begun."""
    return RunStatus(run_id=record.run_id, kind=record.run.kind, name=record.run.name or record.run_id)


class Watch:
    """Keeps rows up to date: lists Temporal's running workflows each second, and asks those that may have changed.

    Several services may do so with one database.
    """

    def __init__(self, rows: RunRows, states: RunStates, temporal: Temporal) -> None:
        self._rows = rows
        self._states = states
        self._temporal = temporal
        self._places = asyncio.Semaphore(_CONCURRENT)
        self._foreign: set[str] = set()  # runs of another installation in this namespace of Temporal

    async def refresh(self) -> None:
        """Update rows, those first that were changed longest ago.

        Raises:
            TemporalUnavailable, DatabaseUnavailable: the rows stay as they are.
        """
        running = await self._running()  # before the rows: a run that is submitted in between is asked
        rows = await self._rows.open()
        moved = [run_id for run_id, phase in rows.items() if _may_have_moved(phase, run_id, running)]
        self._foreign &= running.keys()
        unknown = [run_id for run_id in running if run_id not in rows and run_id not in self._foreign]
        await asyncio.gather(*(self._look(run_id) for run_id in (unknown + moved)[:_MOST_A_TURN]))

    async def _running(self) -> dict[str, RunStatus | None]:
        """Return the runs whose workflows are running, each with the status in its memo."""
        async with self._temporal.client() as client:
            found = client.list_workflows(_RUNNING, rpc_timeout=LIST_PATIENCE)
            return {e.id: await memo_of(e, STATUS_MEMO, RunStatus) async for e in found}

    async def _look(self, run_id: str) -> None:
        async with self._places:
            try:
                await self._states.refresh(await self._rows.find(run_id) or await self._states.adopt(run_id))
            except NotFound:
                self._foreign.add(run_id)
                logger.warning("%s runs in Temporal and is not on record in this store", run_id)


def _may_have_moved(phase: str, run_id: str, running: dict[str, RunStatus | None]) -> bool:
    """True if a run must be asked: it is not listed as running, it is training, or its phase differs from the row's."""
    memo = running.get(run_id)
    return memo is None or memo.phase == "training" or memo.phase != phase or memo.state != "running"


F = TypeVar("F", bound=Frozen)

_CLOSING_S = 5.0


class _Idempotency(Frozen):
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
            await (self._start(record) if is_new else self.make_sure(record))
        except TemporalUnavailable as error:  # accepted all the same: the sweep starts it when Temporal is back
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
        mine = _Idempotency(run_id=run_id, request_sha256=hashlib.sha256(asked.model_dump_json().encode()).hexdigest())
        place = paths.idempotency(tenant, key)
        if await self._quotas.put_record(tenant, place, mine.model_dump_json().encode(), only_new=True):
            return run_id
        first = _Idempotency.model_validate_json(await asyncio.to_thread(self._store.get_bytes, place))
        if await asyncio.to_thread(self._store.head, removed_run(first.run_id)) is not None:
            raise Conflict(f"this key created {first.run_id}, which was removed: use another Idempotency-Key")
        if first.request_sha256 != mine.request_sha256:
            raise InvalidInput(
                f"this key was used for another request, which created {first.run_id}", "Idempotency-Key"
            )
        return first.run_id

    async def accept(
        self, run_id: str, run: Run, tenant: str, owner: str | None, source: Source
    ) -> tuple[RunRecord, bool]:
        """Write a run's record, for the caller to start it. Returns the record, and whether this call wrote it.

        The row is added first, since quotas are counted in rows: of two requests for the last place one succeeds.

        Raises QuotaExceeded.
        """
        with suppress(NotFound):
            return await self._states.record(run_id), False
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
        took_place = await self._rows.admit(record, queued(record))
        data = record.model_dump_json(indent=1).encode()

        def put() -> bool:
            hold_checkpoints(self._store, tenant, run_id, run.model_dump_json())
            self._store.put_bytes(paths.run_index(run_id), b"")
            return self._store.put_if_absent(paths.RunKeys(run_id).record, data)

        try:
            is_new = await self._quotas.put_noted(tenant, run_id, "record", data, put)
        except Exception:
            # The record may have been written although there was no answer. If the store cannot be asked now, the row
            # stays, and is deleted later if there is no record.
            with suppress(NotFound):
                return await self._states.record(run_id), False
            if took_place:
                await self._rows.delete(run_id)
            raise
        return (record, True) if is_new else (await self._states.record(run_id), False)

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
        quotas = await self._rows.quotas(record.tenant)
        return workflow_of(
            record, self._settings, quotas, start_id=start_id, resumed=resumed, goes_on_from=goes_on_from
        )

    # Showing.

    async def record(self, tenant: str, run_id: str) -> RunRecord:
        """Return a run's record. Raises NotFound for a run that this tenant does not have."""
        return (await self._row(tenant, run_id)).record

    async def view(self, tenant: str, run_id: str) -> RunView:
        """Return a run's current view: from its workflow while it runs, from its row afterwards."""
        return with_cost((await self._current(tenant, run_id)).view, self._settings.prices)

    async def of(self, tenant: str, run_ids: Sequence[str]) -> tuple[IndexedRun, ...]:
        """The runs of these ids that the tenant has, from the index, in no order."""
        return await self._rows.among(tenant, run_ids)

    async def _row(self, tenant: str, run_id: str) -> IndexedRun:
        run = await self._rows.find(run_id) or await self._states.adopt(run_id)
        if run.record.tenant != tenant:
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
            async with self._going_on(tenant):
                run = await self._row(tenant, run_id)
                if run.status.state == "paused":
                    audit.touched(run_id)
                    await self._states.give_up(run)
                    return await self.view(tenant, run_id)
        async with self._ending(tenant, run_id) as client:
            await client.get_workflow_handle(run_id).cancel(rpc_timeout=PATIENCE)
        return await self.view(tenant, run_id)

    async def pause(self, tenant: str, run_id: str, limit: str | None = None) -> RunView:
        """Ask a run to end at its next step boundary, to be resumed later. Raises Conflict when it has ended.

        `limit`: a message about the limit that pauses it; None if a user does.
        """
        async with self._ending(tenant, run_id) as client:
            handle = client.get_workflow_handle(run_id)
            if limit is None:
                await handle.signal("pause", rpc_timeout=PATIENCE)
            else:
                await handle.signal("pause_for_limit", limit, rpc_timeout=PATIENCE)
        return await self.view(tenant, run_id)

    @asynccontextmanager
    async def _ending(self, tenant: str, run_id: str) -> AsyncIterator[Client]:
        """Yield Temporal's client for ending an active run. Raises Conflict if it has ended."""
        await self.make_sure(await self.record(tenant, run_id))
        self._states.changed(run_id)
        run = await self._current(tenant, run_id)
        if not run.is_open:
            raise Conflict(f"{run_id} has ended: it {_ended_as(run.status.state)}")
        audit.touched(run_id)
        async with self._temporal.client() as client:
            try:
                yield client
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                raise Conflict(f"{run_id} has just ended") from None
        self._states.changed(run_id)

    async def resume(self, tenant: str, run_id: str) -> RunView:
        """Go on from the last checkpoint. Raises Conflict when the run is running, or succeeded; QuotaExceeded."""
        self._states.changed(run_id)
        run = await self._current(tenant, run_id)
        match run.status.state:
            case "running":
                raise Conflict(f"{run_id} is running")
            case "succeeded":
                raise Conflict(f"{run_id} succeeded: there is nothing to resume")
            case "failed" | "cancelled" | "paused":
                audit.touched(run_id)
                if await asyncio.to_thread(self._store.head, expired(run_id)) is not None:
                    raise Conflict(f"{run_id}: {STATE_IS_GONE}; its request can be sent as a new run")
                async with self._going_on(tenant):
                    await self._rows.check_place(tenant)
                    await self._start_again(run.record)
                    await self._rows.change(run, _reopened(run))
        self._states.changed(run_id)
        return await self.view(tenant, run_id)

    async def pause_left(self) -> None:
        """Pause runs whose clients have sent nothing for `clients.away_s`.

        Raises TemporalUnavailable, DatabaseUnavailable: the next call does the rest.
        """
        away_s = self._settings.clients.away_s
        for run in await self._rows.waiting_for_clients(time.time() - away_s) if away_s else ():
            with suppress(Conflict, NotFound):  # it has just ended
                async with self._ending(run.record.tenant, run.run_id) as client:
                    await client.get_workflow_handle(run.run_id).signal("pause_for_client", rpc_timeout=PATIENCE)

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

    def _going_on(self, tenant: str) -> asyncio.Lock:
        """Return the lock that is held while a tenant's run is resumed, or a paused one cancelled.

        So two runs do not take one place of a quota, and a run is not both resumed and cancelled. The lock only holds
        within this process.
        """
        return self._locks.of(tenant)

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
        """Start every accepted run that has not ended and is unknown to Temporal; add rows that are missing."""
        await self._temporal.check()
        states, prefix = await self._rows.states(), paths.run_index()
        for item in await asyncio.to_thread(lambda: list(self._store.list(prefix))):
            run_id = item.key.removeprefix(prefix)
            if states.get(run_id, "running") != "running":
                continue
            try:
                run = await self._rows.find(run_id) or await self._states.adopt(run_id)
                if run.is_open:
                    await self._states.refresh(run)
            except NotFound:  # it has no record: it was not accepted
                continue
            except ValidationError as error:  # a record that cannot be read must not keep others from being started
                logger.error("%s cannot be looked after: %s", run_id, error)
            except LongshoreError:  # store, database or Temporal are away: the sweep is repeated
                raise
            except Exception:  # nor may any other error of one run
                logger.exception("%s cannot be looked after", run_id)
        await self.start_waiting()

    async def start_waiting(self) -> None:
        """Start runs that were accepted while Temporal was unavailable."""
        for run_id in sorted(self._states.waiting):
            with suppress(NotFound):  # its record is missing
                await self.make_sure(await self._states.record(run_id))
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
        with suppress(Conflict):  # another process has just started it
            await self._start(record, resumed=was_leased)
        logger.info("started %s, which was accepted and not known to Temporal", record.run_id)


def new_run_id(kind: str) -> str:
    """The kind + milliseconds since 1970 in 11 hex digits, so that ids sort by time + 6 random ones."""
    return f"{kind}-{int(time.time() * 1000):011x}{secrets.token_hex(3)}"


def _reopened(run: IndexedRun) -> RunStatus:
    changes = {"state": "running", "phase": "queued", "problem": None, "ended_at": None, "paused_by": None}
    return run.status.model_copy(update={**changes, "client_away": False})


def _ended_as(state: State) -> str:
    return f"was {state}" if state in ("cancelled", "paused") else state
