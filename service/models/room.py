"""Samplers that answer users make room for runs, and for each other's models.

One that nobody asks is given back soon when another waits for it, and one that is asked when its share of time is over.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from temporalio.service import RPCError

from service.database.run_rows import RunRows
from service.models.seats import SERVING_WORKFLOW
from service.temporal import PATIENCE, Temporal
from shared.settings import Settings

logger = logging.getLogger("longshore.service")

_AGAIN_S = 60.0


class Room:
    """Tells serving workflows of who waits. A host has one sampler, and cannot know who else wants it."""

    def __init__(
        self, settings: Settings, rows: RunRows, temporal: Temporal, waiting: Callable[[], frozenset[str]]
    ) -> None:
        """
        Args:
            waiting: the serving workflows whose own users wait for a sampler.
        """
        self._query = (
            f'WorkflowType = "{SERVING_WORKFLOW}" AND TaskQueue = "{settings.control_queue}" '
            'AND ExecutionStatus = "Running"'
        )
        self._rows = rows
        self._temporal = temporal
        self._waiting = waiting
        self._told: dict[str, float] = {}

    async def make(self) -> None:
        """Raises TemporalUnavailable, DatabaseUnavailable: nobody was told."""
        now = time.monotonic()
        self._told = {run: since for run, since in self._told.items() if now - since < _AGAIN_S}
        waiting = self._waiting()
        if not waiting and "waiting_for_sampler" not in (await self._rows.open()).values():
            return
        async with self._temporal.client() as client:
            async for execution in client.list_workflows(self._query, rpc_timeout=PATIENCE):
                if execution.run_id in self._told or execution.id in waiting:
                    continue
                self._told[execution.run_id] = now
                with suppress(RPCError):  # it has just ended
                    handle = client.get_workflow_handle(execution.id, run_id=execution.run_id)
                    await handle.signal("make_room", rpc_timeout=PATIENCE)
                    logger.info("%s: others wait for a sampler", execution.id)
