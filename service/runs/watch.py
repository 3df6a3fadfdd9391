"""Keep the index up to date: each second a listing of Temporal's running workflows, and a query to those that moved."""

import asyncio
import logging

from service.runs.rows import IndexedRun, RunRows
from service.runs.states import RunStates
from service.temporal import LIST_PATIENCE, Temporal, memo_of
from shared.errors import NotFound
from shared.runs.start import RL_WORKFLOW, SFT_WORKFLOW
from shared.runs.status import STATUS_MEMO, RunStatus

logger = logging.getLogger("longshore.service")

_CONCURRENT = 8
_MOST_A_TURN = 128
_RUNNING = f'WorkflowType IN ("{SFT_WORKFLOW}", "{RL_WORKFLOW}") AND ExecutionStatus = "Running"'


class Watch:
    """Several services may watch one database: a row is changed once."""

    def __init__(self, rows: RunRows, states: RunStates, temporal: Temporal) -> None:
        self._rows = rows
        self._states = states
        self._temporal = temporal
        self._places = asyncio.Semaphore(_CONCURRENT)
        self._foreign: set[str] = set()  # runs of another installation in this namespace of Temporal

    async def refresh(self) -> None:
        """Bring rows up to date, those first that were changed longest ago.

        Raises:
            TemporalUnavailable, DatabaseUnavailable: the rows stay as they are.
        """
        running = await self._running()  # before the rows: what was submitted since is asked for, and runs
        rows = await self._rows.open()
        moved = [run_id for run_id, phase in rows.items() if _may_have_moved(phase, run_id, running)]
        self._foreign &= running.keys()
        unknown = [run_id for run_id in running if run_id not in rows and run_id not in self._foreign]
        await asyncio.gather(*(self._look(run_id) for run_id in (unknown + moved)[:_MOST_A_TURN]))

    async def _running(self) -> dict[str, RunStatus | None]:
        """Running workflows of runs, each with the status in its memo."""
        async with self._temporal.client() as client:
            found = client.list_workflows(_RUNNING, rpc_timeout=LIST_PATIENCE)
            return {e.id: await memo_of(e, STATUS_MEMO, RunStatus) async for e in found}

    async def _look(self, run_id: str) -> None:
        async with self._places:
            try:
                await self._states.refresh(await self._row(run_id))
            except NotFound:
                self._foreign.add(run_id)
                logger.warning("%s runs in Temporal and is not on record in this store", run_id)

    async def _row(self, run_id: str) -> IndexedRun:
        return await self._rows.find(run_id) or await self._states.adopt(run_id)


def _may_have_moved(phase: str, run_id: str, running: dict[str, RunStatus | None]) -> bool:
    """True if a run must be asked: it is no longer listed, it is training, or its phase is another than the row's."""
    memo = running.get(run_id)
    return memo is None or memo.phase == "training" or memo.phase != phase or memo.state != "running"
