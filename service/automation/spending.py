"""Limits of spending: pauses the runs of a tenant at its limit, and resumes them when the limit is raised.

This keeps no state: spending is computed from the rows of runs, and a run's status says whether a limit has paused it.
"""

import logging
from contextlib import suppress

from service.errors import Conflict, QuotaExceeded
from service.runs.rows import RunRows
from service.runs.runs import Runs
from shared.errors import NotFound

logger = logging.getLogger("longshore.service")


class SpendingLimits:
    """Pauses and resumes runs. Several services may do so at once."""

    def __init__(self, runs: Runs, rows: RunRows) -> None:
        self._runs = runs
        self._rows = rows

    async def enforce(self) -> None:
        """Pause the runs of tenants at their limit; resume, oldest first, paused runs of tenants now below theirs.

        Raises:
            TemporalUnavailable, DatabaseUnavailable: the next call does the rest.
        """
        over, going_on, held = await self._rows.overspending()
        for run in going_on:
            tenant = run.record.tenant
            with suppress(Conflict, NotFound):  # it has just ended
                await self._runs.pause(tenant, run.run_id, f"quota spending: {over[tenant]}")
                logger.info("%s is paused: %s", run.run_id, over[tenant])
        for run in held:
            with suppress(Conflict, NotFound, QuotaExceeded):  # another quota has no place for it yet
                await self._runs.resume(run.record.tenant, run.run_id)
                logger.info("%s goes on: its tenant may spend more", run.run_id)
