"""Workflows under the real names and with the real messages, that need no worker, model or data."""

import asyncio

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from shared.runs import Problem, RunStart, RunStatus


@workflow.defn(name="SFTWorkflow")
class StandIn:
    """Ends as the run's seed says: 0 at once, 1 fails, 2 runs until it is cancelled; resumed runs succeed."""

    def __init__(self) -> None:
        self._status: RunStatus | None = None

    @workflow.run
    async def run(self, start: RunStart) -> RunStatus:
        status = RunStatus(run_id=start.run_id, name=start.run.name, num_steps=4, phase="training", step=1)
        self._status = status
        if start.run.seed == 2 and not start.resumed:
            try:
                await workflow.wait_condition(lambda: False)
            except asyncio.CancelledError:
                return self._end(status.model_copy(update={"state": "cancelled", "phase": "done"}))
        if start.run.seed == 1:
            problem = Problem(kind="invalid_input", message="train.jsonl:3: no assistant turn")
            return self._end(status.model_copy(update={"state": "failed", "phase": "done", "problem": problem}))
        done = {"state": "succeeded", "phase": "done", "step": 4, "metrics": {"loss": 1.5}}
        return self._end(status.model_copy(update=done))

    def _end(self, status: RunStatus) -> RunStatus:
        self._status = status
        return status

    @workflow.query
    def status(self) -> RunStatus:
        assert self._status is not None
        return self._status
