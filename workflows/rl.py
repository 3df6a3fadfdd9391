"""Reinforcement learning, driven by a client: it sends trajectory groups, step after step, and gets adapters back."""

import asyncio
from datetime import timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.lease import LeaseGrant
    from activities.pack_trajectories import GroupsRequest, PackedGroups
    from activities.progress import ProgressReport
    from activities.publish import Published, PublishRequest
    from activities.record_result import ReopenRequest
    from activities.record_step import Recovered, RecoverRequest, StepRecordRequest
    from activities.resolve_adapter import AdapterRequest, ResolvedAdapter
    from activities.resolve_model import ModelRequest, ResolvedModel
    from shared.jobs import Artifact
    from shared.runs import RLStart, RLState, RunStatus, StepRequest, StepStatus
    from workflows import control, policies
    from workflows.job_plan import rl_job
    from workflows.outcomes import RunCancelled, RunFailed, problem_of
    from workflows.track import track
    from workflows.training import Training

MAX_WAITING = 64
"""Steps that may wait their turn; a client that is further ahead is told to come back."""
_REMEMBERED = 64  # steps whose answers stay here; the store remembers every one
_STEPS_AN_EXECUTION = 100  # a step leaves some 40 events in a history that should stay under 10,000


@workflow.defn
class RLWorkflow:
    """One run. Its policy is what the last done step left; a step that fails leaves it as it was."""

    @workflow.init
    def __init__(self, start: RLStart) -> None:
        self._start = start
        self._state: RLState | None = start.state
        before = start.state.steps if start.state else ()
        self._steps: dict[int, StepStatus] = {step.step: step for step in before}
        self._next_step = start.state.next_step if start.state else 1
        self._finishing = start.state is not None and start.state.finishing
        self._moving_on = False
        self._num_done = 0
        self._training = Training(start, holds=True)
        self._status = (
            start.state.status
            if start.state
            else RunStatus(
                run_id=start.run_id,
                kind="rl",
                name=start.run.name or start.run_id,
                policy_version=0,
                started_at=workflow.info().start_time.timestamp(),
            )
        )
        self._training.epoch = start.state.epoch if start.state else 0

    @workflow.run
    async def run(self, start: RLStart) -> RunStatus:
        try:
            if self._state is None:
                self._state = await self._prepare()
            if not await self._train_steps(self._state):
                await self._move_on()
            self._show(state="succeeded", phase="done")
        except (Exception, asyncio.CancelledError) as error:
            self._end_early(error)
        self._training.release()
        self._show(ended_at=workflow.now().timestamp())
        await control.record("record_result", self.status())
        await workflow.wait_condition(workflow.all_handlers_finished)
        match self._status.state:
            case "cancelled":
                raise asyncio.CancelledError
            case "failed":
                assert self._status.problem is not None
                raise ApplicationError(self._status.problem.message, type=self._status.problem.kind, non_retryable=True)
        return self.status()

    # The order of things.

    async def _prepare(self) -> RLState:
        """Check model and adapter; a run that goes on finds in the store what its last execution left."""
        start, run = self._start, self._start.run
        self._show(phase="checking")
        recovered = Recovered()
        if start.resumed:
            await control.record("reopen", ReopenRequest(run_id=start.run_id))
            recovered = await control.do("recover_steps", RecoverRequest(run_id=start.run_id), Recovered)
            self._next_step = recovered.last_step + 1
        resolved = await control.do("resolve_model", ModelRequest(uri=run.model, layout=run.layout), ResolvedModel)
        adapter: Artifact | None = None
        if run.initial_adapter is not None:
            request = AdapterRequest(uri=run.initial_adapter, lora=run.trainable, shape=resolved.shape)
            adapter = (await control.do("resolve_adapter", request, ResolvedAdapter)).adapter
        await track(self._start.run_id, self._start.run)
        state = RLState(model=resolved.model, shape=resolved.shape, adapter=adapter, status=self._status)
        return self._after(state, recovered.trained) if recovered.trained else state

    async def _train_steps(self, state: RLState) -> bool:
        """Train what comes, in order. False when this execution's history is long enough."""
        self._state = state
        while True:
            await self._wait_for_a_step()
            if (step := self._first_waiting()) is not None:
                self._keep(await self._train(step))
            elif self._finishing:
                return True
            if self._num_done >= _STEPS_AN_EXECUTION or workflow.info().is_continue_as_new_suggested():
                return False

    async def _wait_for_a_step(self) -> None:
        """A worker without a step is given back after a while."""

        def has_come() -> bool:
            return self._finishing or self._first_waiting() is not None

        if has_come():
            return
        self._show(phase="waiting_for_groups")
        try:
            await workflow.wait_condition(has_come, timeout=timedelta(seconds=self._start.run.idle_s))
        except TimeoutError:
            self._training.release()
            await workflow.wait_condition(has_come)

    async def _train(self, step: StepStatus) -> StepStatus:
        """A step from its groups to its published adapter, on record in the store whatever became of it."""
        self._keep(step := step.model_copy(update={"state": "running"}))
        try:
            done = await self._train_and_publish(step)
        except (RunFailed, ActivityError) as error:
            problem = problem_of(error)
            if problem.kind not in policies.STEP_KINDS:
                raise
            done = step.model_copy(update={"state": "failed", "problem": problem, **self._policy()})
        await control.record("record_step", StepRecordRequest(run_id=self._start.run_id, step=done))
        if done.state == "done" and done.same_as is None:
            assert self._state is not None
            self._state = self._after(self._state, done)
        self._num_done += 1
        return done

    async def _train_and_publish(self, step: StepStatus) -> StepStatus:
        start, state = self._start, self._state
        assert state is not None
        self._show(phase="packing")
        request = GroupsRequest(
            run_id=start.run_id,
            run=start.run,
            step=step,
            policy_version=state.policy_version,
            vocab_size=state.shape.vocab_size,
        )
        packed = await control.do("pack_trajectories", request, PackedGroups)
        if (before := packed.trained_before) is not None:
            return before.model_copy(update={"step": step.step, "same_as": before.step})
        if packed.data is None or packed.report_uri is None:
            return step.model_copy(update={"state": "skipped", "metrics": packed.metrics, **self._policy()})
        self._show(phase="waiting_for_worker", dataset_report=packed.report_uri)
        result = await self._training.do(rl_job(start, state, step, packed.data, packed.num_steps))
        self._show(phase="publishing")
        assert result.checkpoint is not None
        metrics = packed.metrics | result.metrics
        published = await control.do(
            "publish",
            PublishRequest(
                run_id=start.run_id,
                run=start.run,
                step=step.step,
                model=state.model,
                checkpoint=result.checkpoint,
                report_uri=packed.report_uri,
                metrics=metrics,
            ),
            Published,
            policies.PATIENT,
        )
        return step.model_copy(
            update={
                "state": "done",
                "policy_version": state.policy_version + 1,
                "optimizer_step": result.step,
                "adapter": published.uri,
                "adapter_sha256": published.sha256,
                "name": published.name,
                "version": published.version,
                "metrics": metrics,
                "checkpoint": result.checkpoint,
            }
        )

    async def _move_on(self) -> NoReturn:
        """Go on as a new execution with an empty history. Who waits is told how the step stands, and asks again."""
        self._training.release()
        self._moving_on = True
        await workflow.wait_condition(workflow.all_handlers_finished)
        assert self._state is not None
        state = self._state.model_copy(
            update={
                "next_step": self._next_step,
                "steps": tuple(self._steps.values()),
                "finishing": self._finishing,
                "epoch": self._training.epoch,
                "status": self.status(),
            }
        )
        workflow.continue_as_new(self._start.model_copy(update={"state": state, "resumed": False}))

    # Steps.

    def _first_waiting(self) -> StepStatus | None:
        return next((step for step in self._steps.values() if not step.is_final), None)

    def _of_key(self, key: str) -> StepStatus | None:
        return next((step for step in self._steps.values() if step.key == key), None)

    def _keep(self, step: StepStatus) -> None:
        """Note how a step stands. Of those that ended, the last ones stay."""
        self._steps[step.step] = step
        ended = [number for number, one in self._steps.items() if one.is_final]
        for number in ended[:-_REMEMBERED]:
            del self._steps[number]

    def _after(self, state: RLState, done: StepStatus) -> RLState:
        """The policy that a step made is what the next one trains on."""
        assert done.policy_version is not None and done.optimizer_step is not None
        changes = {
            "policy_version": done.policy_version,
            "optimizer_step": done.optimizer_step,
            "checkpoint": done.checkpoint,
        }
        shown = {name: getattr(done, name) for name in ("adapter", "adapter_sha256", "name", "version", "checkpoint")}
        self._show(policy_version=done.policy_version, step=done.optimizer_step, metrics=done.metrics, **shown)
        return state.model_copy(update=changes)

    def _policy(self) -> dict[str, int]:
        """The policy as it is, for a step that leaves it so."""
        assert self._state is not None
        return {"policy_version": self._state.policy_version, "optimizer_step": self._state.optimizer_step}

    # What clients ask.

    @workflow.update
    async def train_step(self, request: StepRequest) -> StepStatus:
        """Take a step in; the same key is the same step. Answers at once, or when it has ended if `wait`.

        A waiting client may be told of an unfinished step all the same, when the run moves on to a new execution: it
        asks again.
        """
        if self._start.resumed:  # the store knows how many steps there were
            await workflow.wait_condition(lambda: self._state is not None or self._has_ended)
        self._check_key(request)
        if self._of_key(request.key) is None:
            step = StepStatus(step=self._next_step, key=request.key, groups=request.groups)
            self._next_step += 1
            self._steps[step.step] = step
        if request.wait:
            await workflow.wait_condition(lambda: self._may_answer(request.key))
        found = self._of_key(request.key)
        if found is None or (request.wait and not found.is_final and not self._moving_on):
            raise ApplicationError("the run ended before this step: send it again when it was resumed", type="Conflict")
        return found

    def _may_answer(self, key: str) -> bool:
        step = self._of_key(key)
        return self._moving_on or self._has_ended or step is None or step.is_final

    @property
    def _has_ended(self) -> bool:
        return self._status.ended_at is not None

    @train_step.validator
    def _check_step(self, request: StepRequest) -> None:
        self._check_key(request)
        if self._of_key(request.key) is not None:
            return
        if self._finishing or self._status.state != "running":
            raise ApplicationError("the run takes no more steps: it was finished", type="Conflict")
        self._check_room()

    def _check_key(self, request: StepRequest) -> None:
        known = self._of_key(request.key)
        if known is not None and known.groups != request.groups:
            rule = f"this key was used for {known.groups}, which made step {known.step}"
            raise ApplicationError(rule, type="InvalidInput")

    def _check_room(self) -> None:
        if sum(not step.is_final for step in self._steps.values()) >= MAX_WAITING:
            raise ApplicationError(f"{MAX_WAITING} steps wait already: send the next one later", type="Conflict")

    @workflow.update
    async def finish(self) -> RunStatus:
        """Take no more steps, and end well after those that wait."""
        self._finishing = True
        return self.status()

    @workflow.query
    def step(self, number: int) -> StepStatus | None:
        """A step as it stands; None for one that is not there, or that only the store remembers."""
        return self._steps.get(number)

    @workflow.query
    def status(self) -> RunStatus:
        """The run as it stands."""
        training, status = self._training, self._status
        phase = "training" if status.phase == "waiting_for_worker" and training.is_leased else status.phase
        in_job = status.phase in ("waiting_for_worker", "training", "publishing")
        return status.model_copy(
            update={
                "phase": phase,
                "epoch": training.epoch,
                "step": max(status.step, training.step) if in_job else status.step,
                "metrics": status.metrics | training.metrics if in_job else status.metrics,
            }
        )

    @workflow.signal
    def leased(self, grant: LeaseGrant) -> None:
        """A host has a worker up for this run."""
        self._training.leased(grant)

    @workflow.signal
    def progress(self, report: ProgressReport) -> None:
        """The job got ahead, or a checkpoint stands."""
        self._training.progress(report)

    # How it is done.

    def _end_early(self, error: BaseException) -> None:
        if isinstance(error, RunCancelled) or is_cancelled_exception(error):
            self._show(state="cancelled")
        else:
            problem = problem_of(error)
            workflow.logger.warning("the run failed: %s", problem.message, exc_info=problem.kind == "error")
            self._show(state="failed", problem=problem)

    def _show(self, **changes: object) -> None:
        self._status = self._status.model_copy(update=changes)
