"""Samplers that answer users make room for runs: one that nobody asks is given back when a run waits for one."""

import logging
import time
from contextlib import suppress

from temporalio.service import RPCError

from service.database.run_rows import RunRows
from service.models.seats import SERVING_WORKFLOW
from service.temporal import PATIENCE, Temporal
from shared.settings import Settings

logger = logging.getLogger("longshore.service")

_AGAIN_S = 60.0


class Room:
    """Tells serving workflows of runs that wait. A host has one sampler, and cannot know who else wants it."""

    def __init__(self, settings: Settings, rows: RunRows, temporal: Temporal) -> None:
        self._query = (
            f'WorkflowType = "{SERVING_WORKFLOW}" AND TaskQueue = "{settings.control_queue}" '
            'AND ExecutionStatus = "Running"'
        )
        self._rows = rows
        self._temporal = temporal
        self._told: dict[str, float] = {}

    async def make(self) -> None:
        """Raises TemporalUnavailable, DatabaseUnavailable: nobody was told."""
        now = time.monotonic()
        self._told = {run: since for run, since in self._told.items() if now - since < _AGAIN_S}
        if "waiting_for_sampler" not in (await self._rows.open()).values():
            return
        async with self._temporal.client() as client:
            async for execution in client.list_workflows(self._query, rpc_timeout=PATIENCE):
                if execution.run_id in self._told:
                    continue
                self._told[execution.run_id] = now
                with suppress(RPCError):  # it has just ended
                    handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
                    await handle.signal("make_room", rpc_timeout=PATIENCE)
                    logger.info("%s: a run waits for a sampler", execution.id)
