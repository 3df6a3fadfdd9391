"""Evicts idle samplers and workers that other runs or users wait for.

A sampler that answers users is given back soon if there are no questions, and otherwise when its share of time is over.
The worker of an RL run or session whose client sends nothing is given back at once, as the client may have crashed.
"""

import logging
import time
from collections.abc import Callable, Sequence

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowExecution

from service.inference.questions import SERVING_WORKFLOW
from service.runs.rows import RunRows
from service.temporal import LIST_PATIENCE, PATIENCE, Temporal, memo_of, unless_unknown
from shared.runs.start import RL_WORKFLOW, SESSION_WORKFLOW
from shared.runs.status import STATUS_MEMO, RunStatus
from shared.settings import Settings

logger = logging.getLogger("longshore.service")

_AGAIN_S = 60.0
_GIVEN_BACK_IN_S = 15.0  # for this long a worker that was requested counts as on its way
_UNTAKEN = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED

_Lease = tuple[str, int]
"""A lease: the id of the execution of a run's workflow, and the lease's epoch."""


class IdleEviction:
    """Signals workflows that hold an idle worker while others wait for one. (Hosts do not know who waits.)"""

    def __init__(
        self, settings: Settings, rows: RunRows, temporal: Temporal, waiting: Callable[[], frozenset[str]]
    ) -> None:
        """`waiting`: the serving workflows whose own users wait for a sampler."""
        here = f'TaskQueue = "{settings.control_queue}" AND ExecutionStatus = "Running"'
        self._servings = f'WorkflowType = "{SERVING_WORKFLOW}" AND {here}'
        self._driven_by_clients = f'WorkflowType IN ("{RL_WORKFLOW}", "{SESSION_WORKFLOW}") AND {here}'
        self._rows = rows
        self._temporal = temporal
        self._waiting = waiting
        self._asked: dict[str, float] = {}
        self._asked_runs: dict[_Lease, float] = {}

    async def evict(self) -> None:
        """Signal the workflows. Raises TemporalUnavailable, DatabaseUnavailable: not all were signalled."""
        phases = await self._rows.open()
        if (waiting := self._waiting()) or "waiting_for_sampler" in phases.values():
            await self._evict_samplers(waiting)
        if for_worker := [run_id for run_id, phase in phases.items() if phase == "waiting_for_worker"]:
            await self._evict_workers(for_worker, list(phases))

    async def _evict_samplers(self, waiting: frozenset[str]) -> None:
        now = time.monotonic()
        self._asked = {run: since for run, since in self._asked.items() if now - since < _AGAIN_S}
        async with self._temporal.client() as client:
            async for execution in client.list_workflows(self._servings, rpc_timeout=PATIENCE):
                if execution.run_id in self._asked or execution.id in waiting:
                    continue
                await _ask_to_make_room(client, execution, "a sampler")
                self._asked[execution.run_id] = now

    async def _evict_workers(self, waiting: Sequence[str], oldest_first: Sequence[str]) -> None:
        """Ask idle runs for their workers, as many as are missing, the longest idle ones first; each once a lease.

        `waiting`: runs in the phase of waiting for a worker. Only those whose lease no host has taken count.
        """
        async with self._temporal.client() as client:
            listed = client.list_workflows(self._driven_by_clients, rpc_timeout=LIST_PATIENCE)
            idle = {lease: e async for e in listed if (lease := await _idle_lease(e)) and e.id in oldest_first}
            now = time.monotonic()
            self._asked_runs = {lease: since for lease, since in self._asked_runs.items() if lease in idle}
            on_their_way = sum(now - since < _GIVEN_BACK_IN_S for since in self._asked_runs.values())
            asked = sorted(idle.keys() - self._asked_runs, key=lambda lease: oldest_first.index(idle[lease].id))
            if not asked:
                return
            num_missing = await _num_untaken(client, waiting, len(asked) + on_their_way) - on_their_way
            for lease in asked[: max(0, num_missing)]:
                await _ask_to_make_room(client, idle[lease], "a worker")
                self._asked_runs[lease] = now


async def _idle_lease(execution: WorkflowExecution) -> _Lease | None:
    """Return the last lease of a run that waits for its client, and may still hold the lease; None for other runs."""
    status = await memo_of(execution, STATUS_MEMO, RunStatus)
    if status is None or status.phase not in ("waiting_for_groups", "waiting_for_commands") or not status.epoch:
        return None
    return execution.run_id, status.epoch


async def _num_untaken(client: Client, run_ids: Sequence[str], at_most: int) -> int:
    """Count the runs, up to `at_most`, whose lease activity no host has taken."""
    found = 0
    for run_id in run_ids:
        if found == at_most:
            break
        with unless_unknown():  # it may have ended
            description = await client.get_workflow_handle(run_id).describe(rpc_timeout=PATIENCE)
            pending = description.raw_description.pending_activities
            found += any(a.activity_type.name == "lease" and a.state == _UNTAKEN for a in pending)
    return found


async def _ask_to_make_room(client: Client, execution: WorkflowExecution, what: str) -> None:
    with unless_unknown():  # it may have ended
        handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
        await handle.signal("make_room", rpc_timeout=PATIENCE)
        logger.info("%s: others wait for %s", execution.id, what)
