"""Train steps of RL runs behind the API: sent, shown, and waited for."""

import asyncio
import time
from contextlib import suppress
from typing import Any

from service.errors import Conflict
from service.runs.runs import Runs
from service.runs.updates import update_run
from service.runs.views.run_view import RunView
from service.temporal import Temporal, query, unless_unknown
from shared.errors import NotFound
from shared.runs.requests import RunRecord
from shared.runs.status import StepRequest, StepStatus
from shared.storage import paths
from shared.storage.store import ObjectStore

# Pauses between checks of a step that is waited for; they grow, so that long steps are checked less often.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25


class TrainSteps:
    """Hands train steps to RL runs, and reads their status."""

    def __init__(self, runs: Runs, store: ObjectStore, temporal: Temporal) -> None:
        self._runs = runs
        self._store = store
        self._temporal = temporal

    async def train(self, tenant: str, run_id: str, request: StepRequest, wait_s: float = 0) -> StepStatus:
        """Hand a step to its run. A repeated key gives the same step.

        Args:
            wait_s: how long to wait for the step's end; the answer is its status then.

        Raises:
            InvalidInput: the key was used for other groups, or their URI points to a forbidden place.
            Conflict: the run takes no more steps, or too many wait.
        """
        await self._runs.check_access(tenant, request)
        request = await self._runs.sealed(tenant, request)
        record = await self.record(tenant, run_id)
        taken = await update_run(self._runs, self._temporal, record, "train_step", request, place="key")
        step = StepStatus.model_validate(taken)
        return await self.show(tenant, run_id, step.step, wait_s)

    async def finish(self, tenant: str, run_id: str) -> RunView:
        """Finish an RL run: no more steps come. Raises Conflict when it has ended."""
        await update_run(self._runs, self._temporal, await self.record(tenant, run_id), "finish")
        return await self._runs.view(tenant, run_id)

    async def show(self, tenant: str, run_id: str, number: int, wait_s: float = 0) -> StepStatus:
        """Return a step's current status, or its end if that comes within `wait_s`. Raises NotFound."""
        record = await self.record(tenant, run_id)
        end, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
        while True:
            step = await self._step(record, number)
            if step.is_final or time.monotonic() > end:
                return step
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.2 * pause_s)

    async def _step(self, record: RunRecord, number: int) -> StepStatus:
        with suppress(NotFound):
            data = await asyncio.to_thread(self._store.get_bytes, paths.RunKeys(record.run_id).step(number))
            return StepStatus.model_validate_json(data)
        async with self._temporal.client() as client:
            handle = client.get_workflow_handle(record.run_id)
            with unless_unknown():
                answer: Any = await query(handle, "step", number)
                if answer:
                    return StepStatus.model_validate(answer)
        raise NotFound(f"{record.run_id} has no step {number}")

    async def record(self, tenant: str, run_id: str) -> RunRecord:
        """The record of a run that has train steps. Raises NotFound, or Conflict for a run of another kind."""
        record = await self._runs.record(tenant, run_id)
        if record.run.kind != "rl":
            raise Conflict(f"{run_id} is no RL run: it trains from its dataset alone")
        return record
