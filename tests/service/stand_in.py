"""Workflows under the real ones' names and with their messages, that need no worker, model or data."""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.records import RunRecords
    from longshore.views import Problem, RunStatus, StepStatus
    from shared.runs.start import RLStart, RunStart
    from shared.runs.status import StepRequest
    from workflows import control
    from workflows.training.run import uninterrupted

SUCCEEDS, FAILS, WAITS, QUEUES, MUTE = 0, 1, 2, 3, 4
"""Seeds of runs: what the stand-in does with them. A resumed run succeeds. A mute one waits, and cannot be queried."""
PUBLISHES = "publishes"
"""The name of runs that say that they have published a version. Nothing stands in the store."""


@workflow.defn(name="SFTWorkflow")
class StandIn:
    @workflow.init
    def __init__(self, start: RunStart) -> None:
        self._status = RunStatus(
            run_id=start.run_id,
            name=start.run.name,
            num_steps=4,
            phase="training",
            step=1,
            estimated_end=workflow.time() + 3600,
            epoch=2,
        )
        if start.run.seed == QUEUES:
            self._show(phase="waiting_for_worker")
        self._is_pausing = False
        self._is_mute = start.run.seed == MUTE

    @workflow.run
    async def run(self, start: RunStart) -> RunStatus:
        try:
            await uninterrupted(control.begin(start))
            await uninterrupted(control.record_run(self._status))
            if start.run.seed in (WAITS, QUEUES, MUTE) and not start.resumed:
                await workflow.wait_condition(lambda: self._is_pausing)
                self._show(state="paused", step=2)
                await self._record()
                return self._status
        except asyncio.CancelledError:
            self._show(state="cancelled")
            await self._record()
            raise
        if start.run.seed == FAILS and not start.resumed:
            problem = Problem(kind="invalid_input", message="train.jsonl:3: no assistant turn")
            self._show(state="failed", problem=problem)
            await self._record()
            raise ApplicationError(problem.message, type=problem.kind, non_retryable=True)
        version = 1 if start.run.name == PUBLISHES else None
        self._show(state="succeeded", phase="done", step=4, metrics={"loss": 1.5}, version=version)
        await self._record()
        return self._status

    async def _record(self) -> None:
        self._show(ended_at=workflow.now().timestamp())
        await control.do(RunRecords.record_result, self._status, within=timedelta(seconds=20))
        await control.record_run(self._status)

    def _show(self, **changes: object) -> None:
        self._status = self._status.model_copy(update=changes)

    @workflow.signal
    def pause(self) -> None:
        self._is_pausing = True

    @workflow.signal
    def pause_for_limit(self, limit: str) -> None:
        self._is_pausing = True
        self._show(paused_by=limit)

    @workflow.query
    def status(self) -> RunStatus:
        if self._is_mute:
            raise RuntimeError("this history was made by other code")
        return self._status


UNANSWERED_STEP = 13  # the stand-in of an RL run fails where it is asked for it


@workflow.defn(name="RLWorkflow")
class RLStandIn:
    """Trains nothing: steps that are sent are skipped, and tests put others on record. It ends when it is finished."""

    @workflow.init
    def __init__(self, start: RLStart) -> None:
        self._status = RunStatus(run_id=start.run_id, kind="rl", name=start.run.name, phase="waiting_for_groups")
        self._is_finished = False
        self._steps: list[StepStatus] = []

    @workflow.run
    async def run(self, start: RLStart) -> RunStatus:
        await control.record_run(self._status)
        await workflow.wait_condition(lambda: self._is_finished)
        self._status = self._status.model_copy(update={"state": "succeeded", "phase": "done"})
        await control.record(RunRecords.record_result, self._status)
        await control.record_run(self._status)
        return self._status

    @workflow.update
    async def train_step(self, request: StepRequest) -> StepStatus:
        before = [step for step in self._steps if step.key == request.key]
        if not before:
            step = StepStatus(step=len(self._steps) + 1, key=request.key, groups=request.groups, state="skipped")
            before = [step]
            self._steps += before
        return before[0]

    @workflow.query
    def step(self, number: int) -> StepStatus | None:
        if number == UNANSWERED_STEP:
            raise RuntimeError("this history was made by other code")
        return next((step for step in self._steps if step.step == number), None)

    @workflow.update
    async def finish(self) -> RunStatus:
        self._is_finished = True
        return self._status

    @workflow.query
    def status(self) -> RunStatus:
        return self._status
