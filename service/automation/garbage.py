"""Garbage collection, on a control host: at an operator's request, and periodically."""

import asyncio
import time
from contextlib import suppress
from typing import Literal

from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy

from longshore.fields import Frozen
from service.accounts.tenants import Quotas
from service.temporal import Temporal, cause_of
from shared.automation.garbage import GarbageReport, GarbageRequest
from shared.runs.requests import FIRST_TENANT
from shared.settings import Settings
from shared.storage.paths import content_key

GARBAGE_WORKFLOW = "GarbageWorkflow"


class GarbageView(Frozen):
    """The status of a collection. `report`: set when it is done."""

    state: Literal["running", "done"]
    report: GarbageReport | None = None


class Garbage:
    """Starts collections: of all services of an installation one at a time, and one dry run."""

    def __init__(self, settings: Settings, temporal: Temporal, quotas: Quotas) -> None:
        self._settings = settings
        self._temporal = temporal
        self._quotas = quotas
        self._due = time.monotonic() + settings.retention.every_s

    async def collect(self, request: GarbageRequest, wait_s: float) -> GarbageView:
        """Start a collection, or join the one that is going on, and wait for its end, so long at most.

        Raises TemporalUnavailable; StoreUnavailable, InvalidInput: the collection failed with it.
        """
        handle = await self._temporal.start(
            GARBAGE_WORKFLOW,
            request,
            f"garbage-{content_key(self._settings.control_queue, request)}",
            FIRST_TENANT,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            result_type=GarbageReport,
        )
        report: GarbageReport | None = None
        async with self._temporal.client():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    try:
                        report = await handle.result()
                    except WorkflowFailureError as error:
                        raise cause_of(error) from None
        self._quotas.recount()
        return GarbageView(state="running" if report is None else "done", report=report)

    async def collect_when_due(self) -> None:
        """Start a collection each `retention.every_s` seconds, the first so long after this service began."""
        if time.monotonic() >= self._due:
            await self.collect(GarbageRequest(is_dry=False), 0)
            self._due = time.monotonic() + self._settings.retention.every_s
