"""Refreshes the status of runs: reads it from their workflows and the store, and writes it into their rows.

A row is read before the workflow is asked, and only changed if it is still the same, so that an old answer never
replaces a newer one.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from temporalio.client import WorkflowExecutionDescription, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from service.errors import TemporalUnavailable
from service.runs.rows import IndexedRun, RunRows
from service.temporal import LIST_PATIENCE, PATIENCE, Temporal, memo_of, query
from shared.errors import NotFound
from shared.runs.requests import RunRecord
from shared.runs.start import RL_WORKFLOW, SESSION_WORKFLOW, SFT_WORKFLOW
from shared.runs.status import STATUS_MEMO, Problem, RunStatus
from shared.storage import paths
from shared.storage.store import ObjectStore
from shared.storage.uses import removed_run

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
