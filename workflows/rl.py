"""Reinforcement learning, step after step, on groups that a client sends or that the run samples and grades itself."""

import asyncio
import math
from datetime import timedelta
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.progress import ProgressReport
    from activities.models.publish import Published, PublishRequest
    from activities.models.resolve_adapter import AdapterRequest, ResolvedAdapter
    from activities.records.record_step import Recovered, RecoverRequest, StepRecordRequest
    from activities.trajectories.pack_trajectories import GroupsRequest, PackedGroups
    from shared.contract import Artifact
    from shared.jobs.job import reference_uri
    from shared.jobs.leases import LeaseGrant
    from shared.runs.start import ModelRequest, ResolvedModel, RLStart
    from shared.runs.status import Policy, Problem, RLState, RunStatus, StepRequest, StepStatus
    from workflows import control, policies
    from workflows.outcomes import RunFailed, close, ended_early, problem_of, with_skipped
    from workflows.rollouts import rollouts
    from workflows.rollouts.requests import is_evaluated
    from workflows.rollouts.rollouts import RolloutSource
    from workflows.rollouts.sampling import Sampling
    from workflows.training.glance import Glance
    from workflows.training.interruption import Work
    from workflows.training.job_plan import rl_job
    from workflows.training.pace import Pace
    from workflows.training.steps import MAX_WAITING, Steps
    from workflows.training.training import Training

# A client's step leaves some 40 events in a history that should stay under 10,000; one of the run's own some 80.
_STEPS_AN_EXECUTION, _OWN_STEPS_AN_EXECUTION = 100, 60
_GRACE_S = 1.0  # for the next step, where another run waits for the worker


@workflow.defn
class RLWorkflow:
    """One run. Its policy is what the last done step left; a step that fails leaves it as it was."""

    @workflow.init
    def __init__(self, start: RLStart) -> None:
        self._start = start
        self._state: RLState | None = start.state
        self._steps = Steps(start.state.steps, start.state.next_step) if start.state else Steps()
        self._finishing = start.state is not None and start.state.finishing
        self._moving_on = False
        self._wanted_epoch: int | None = None  # of the lease that another run waits for
        self._num_done = 0
        self._work = Work()
        self._glance = Glance(start.state.status if start.state else None)
        self._training = Training(start, self._work, self._look, holds=True)
        self._sampling = Sampling(start)
        self._source: RolloutSource | None = None
        self._pace = Pace()  # of train steps, with the rollouts between them
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
        self._training.is_tracked = self._training.epoch > 0

    @workflow.run
    async def run(self, start: RLStart) -> RunStatus:
        try:
            await self._work.whole(self._glance.begin(start, self._show))
            if not await self._work.do(self._train_all()):
                await self._move_on()
            self._show(state="succeeded", phase="done")
        except (Exception, asyncio.CancelledError) as error:
            if not self._glance.has_begun:
                raise
            self._status = ended_early(self._status, error, self._work.is_pausing)
        await self._leave()
        self._show(ended_at=workflow.now().timestamp())
        await control.record("record_result", self.status())
        await workflow.wait_condition(workflow.all_handlers_finished)
        return close(self.status())

    # The order of things.

    async def _train_all(self) -> bool:
        """False when this execution's history is long enough, and there is more to train."""
        if self._state is None:
            self._state = await self._prepare()
        return await (self._train_own_steps if self._start.run.rollouts else self._train_steps)(self._state)

    async def _prepare(self) -> RLState:
        """Check model and adapter; a run that goes on finds in the store what its last execution left."""
        start, run = self._start, self._start.run
        self._show(phase="checking")
        recovered = Recovered()
        if start.resumed:
            request = RecoverRequest(run_id=start.run_id, num_policies=RolloutSource.num_policies(start))
            recovered = await control.do("recover_steps", request, Recovered)
            self._steps.next = recovered.last_step + 1
        asked = ModelRequest(
            run_id=start.run_id, tenant=start.tenant, uri=run.model, layout=run.layout, engine=run.engine
        )
        resolved = await control.do("resolve_model", asked, ResolvedModel)
        adapter: Artifact | None = None
        if run.initial_adapter is not None:
            wanted = AdapterRequest(
                run_id=start.run_id,
                tenant=start.tenant,
                uri=run.initial_adapter,
                lora=run.trainable,
                shape=resolved.shape,
            )
            adapter = (await control.do("resolve_adapter", wanted, ResolvedAdapter)).adapter
        reference: Artifact | None = None
        if (uri := reference_uri(run.loss)) is not None:
            named = AdapterRequest(
                run_id=start.run_id, tenant=start.tenant, role="reference", uri=uri, shape=resolved.shape
            )
            reference = (await control.do("resolve_adapter", named, ResolvedAdapter)).adapter
        data = None
        if run.rollouts is not None:
            self._show(phase="tokenizing")
            data = await rollouts.prepare(start, resolved.model)
            self._show(num_steps=data.num_steps * run.epochs * run.mini_batches)
        state = RLState(
            model=resolved.model,
            shape=resolved.shape,
            adapter=adapter,
            reference=reference,
            status=self._status,
            rollouts=data,
            policies=(
                Policy(after_step=0, version=0, adapter=adapter),
                *(policy.model_copy(update={"adapter": policy.adapter or adapter}) for policy in recovered.policies),
            ),
        )
        return self._after(state, recovered.trained) if recovered.trained else state

    async def _train_steps(self, state: RLState) -> bool:
        """Train what comes, in order. False when this execution's history is long enough."""
        self._state = state
        while True:
            await self._wait_for_a_step()
            if (step := self._steps.first_waiting()) is not None:
                self._steps.keep(await self._train(step))
            elif self._finishing:
                return True
            if self._num_done >= _STEPS_AN_EXECUTION or workflow.info().is_continue_as_new_suggested():
                return False

    async def _train_own_steps(self, state: RLState) -> bool:
        """Sample, grade and train to the last step, or the target. False when this history is long enough."""
        self._state = state
        assert state.rollouts is not None
        self._source = source = RolloutSource(
            self._start, state.model, state.rollouts, list(state.policies), self._sampling
        )
        if self._steps.next == 1 and await self._evaluate_the_beginning(source):
            return True
        while self._steps.next <= state.rollouts.num_steps and not self._finishing:
            self._show(phase="sampling")
            rolled = await source.groups(self._steps.next)
            step = self._steps.take(f"rollouts-{self._steps.next}", rolled.groups_uri, rolled.metrics)
            done = await self._train(step)
            self._steps.keep(done)
            self._pace.take(done.step, workflow.time(), self._training.epoch)
            if self._is_at_target(done):
                return True
            if self._num_done >= _OWN_STEPS_AN_EXECUTION or workflow.info().is_continue_as_new_suggested():
                return False
        return True

    async def _evaluate_the_beginning(self, source: RolloutSource) -> bool:
        """Step 0: how the policy does before any training. True when it is good enough."""
        self._show(phase="evaluating")
        metrics = await source.evaluate(source.policies[0])
        if not metrics:
            return False
        step = StepStatus(step=0, key="rollouts-0", groups="", state="done", metrics=metrics, **self._policy())
        await control.record("record_step", StepRecordRequest(run_id=self._start.run_id, step=step))
        self._steps.keep(step)
        self._show(metrics=metrics)
        return self._is_at_target(step)

    def _is_at_target(self, step: StepStatus) -> bool:
        held_out = self._start.run.rollouts.held_out if self._start.run.rollouts else None
        if held_out is None or held_out.target is None:
            return False
        return step.metrics.get("eval_reward_mean", -math.inf) >= held_out.target

    async def _wait_for_a_step(self) -> None:
        """A worker without a step is given back after a while, or soon where another run waits for it."""

        def has_come() -> bool:
            return self._finishing or self._steps.first_waiting() is not None

        if has_come():
            return
        self._show(phase="waiting_for_groups")
        idle_s = self._start.run.idle_s
        try:
            await workflow.wait_condition(lambda: has_come() or self._is_wanted, timeout=timedelta(seconds=idle_s))
            if not has_come():
                await workflow.wait_condition(has_come, timeout=timedelta(seconds=min(_GRACE_S, idle_s)))
        except TimeoutError:
            self._training.release()
            await workflow.wait_condition(has_come)

    @property
    def _is_wanted(self) -> bool:
        """Whether another run waits for the worker that this one holds."""
        return self._wanted_epoch == self._training.epoch

    async def _train(self, step: StepStatus) -> StepStatus:
        """A step from its groups to its published adapter, on record in the store whatever became of it."""
        self._steps.keep(step := step.model_copy(update={"state": "running"}))
        try:
            done = await self._train_and_publish(step)
            if self._source is not None:
                done = await self._end_own_step(done, self._source)
        except (RunFailed, ActivityError) as error:
            problem = problem_of(error)
            if self._source is not None or problem.kind not in policies.STEP_KINDS:
                raise
            done = step.model_copy(update={"state": "failed", "problem": problem, **self._policy()})
        await control.record("record_step", StepRecordRequest(run_id=self._start.run_id, step=done))
        if done.state == "done" and done.same_as is None:
            assert self._state is not None
            self._state = self._after(self._state, done)
        if done.state == "skipped":
            self._show(skipped_steps=self._status.skipped_steps + 1)
        self._num_done += 1
        return done

    async def _train_and_publish(self, step: StepStatus) -> StepStatus:
        start, state = self._start, self._state
        assert state is not None
        self._show(phase="packing")
        request = GroupsRequest(
            run_id=start.run_id,
            tenant=start.tenant,
            run=start.run,
            step=step.model_copy(update={"metrics": {}}),
            policy_version=state.policy_version,
            vocab_size=state.shape.vocab_size,
            model=state.model,
            name=self._status.name,
            version=self._status.version,
        )
        packed = await control.do("pack_trajectories", request, PackedGroups)
        if (before := packed.trained_before) is not None:
            return before.model_copy(update={"step": step.step, "same_as": before.step})
        metrics = step.metrics | packed.metrics
        if packed.data is None or packed.report_uri is None:
            return step.model_copy(update={"state": "skipped", "metrics": metrics, **self._policy()})
        self._show(phase="waiting_for_worker", dataset_report=packed.report_uri)
        began = workflow.time()
        result = await self._training.do(rl_job(start, state, step, packed.data, packed.num_steps))
        trained = workflow.time()
        self._show(phase="publishing")
        assert result.checkpoint is not None
        published = await control.do(
            "publish",
            PublishRequest(
                run_id=start.run_id,
                tenant=start.tenant,
                run=start.run,
                step=step.step,
                model=state.model,
                checkpoint=result.checkpoint,
                report_uri=packed.report_uri,
                metrics=packed.metrics | result.metrics,
            ),
            Published,
            policies.PATIENT,
        )
        done = step.model_copy(
            update={
                "state": "done",
                "policy_version": state.policy_version + 1,
                "optimizer_step": result.step,
                "adapter": published.uri,
                "adapter_sha256": published.sha256,
                "name": published.name,
                "version": published.version,
                "checkpoint": result.checkpoint,
            }
        )
        if self._source is not None:
            metrics |= await self._source.prove(_policy_of(done), result.probe)
        seconds = {"training_seconds": trained - began, "publishing_seconds": workflow.time() - trained}
        return done.model_copy(update={"metrics": metrics | result.metrics | seconds})

    async def _end_own_step(self, step: StepStatus, source: RolloutSource) -> StepStatus:
        """Note the policy that the step left, and look at it with held-out prompts where that is due."""
        before = source.policies[-1]
        policy = _policy_of(step) if step.state == "done" else before.model_copy(update={"after_step": step.step})
        source.add(policy)
        is_last = step.step == source.data.num_steps or self._finishing
        if not is_evaluated(self._start.run, step.step, is_last):
            return step
        self._show(phase="evaluating")
        began = workflow.time()
        metrics = await source.evaluate(policy)
        seconds = {"evaluating_seconds": workflow.time() - began}
        return step.model_copy(update={"metrics": step.metrics | metrics | seconds})

    async def _leave(self) -> None:
        """Give back what the run holds, and leave what is under way."""
        self._training.release()
        if self._source is not None:
            await self._source.stop()

    async def _move_on(self) -> NoReturn:
        """Go on as a new execution with an empty history. Who waits is told how the step stands, and asks again."""
        await self._leave()
        self._moving_on = True
        await workflow.wait_condition(workflow.all_handlers_finished)
        self._work.check()
        assert self._state is not None
        state = self._state.model_copy(
            update={
                "next_step": self._steps.next,
                "steps": self._steps.all(),
                "finishing": self._finishing,
                "epoch": self._training.epoch,
                "status": self.status(),
                "policies": tuple(self._source.policies) if self._source else (),
            }
        )
        workflow.continue_as_new(self._start.model_copy(update={"state": state, "resumed": False}))

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
            self._check_step(request)
        if self._steps.of_key(request.key) is None:
            self._steps.take(request.key, request.groups)
        if request.wait:
            await workflow.wait_condition(lambda: self._may_answer(request.key))
        found = self._steps.of_key(request.key)
        if found is None or (request.wait and not found.is_final and not self._moving_on):
            raise ApplicationError("the run ended before this step: send it again when it was resumed", type="Conflict")
        return found

    def _may_answer(self, key: str) -> bool:
        step = self._steps.of_key(key)
        return self._moving_on or self._has_ended or step is None or step.is_final

    @property
    def _has_ended(self) -> bool:
        return self._status.ended_at is not None

    @train_step.validator
    def _check_step(self, request: StepRequest) -> None:
        self._check_key(request)
        if self._steps.of_key(request.key) is not None:
            return
        if self._start.run.rollouts is not None:
            raise ApplicationError("the run makes its own groups: it takes none", type="Conflict")
        if self._finishing or self._status.state != "running":
            raise ApplicationError("the run takes no more steps: it was finished, or has ended", type="Conflict")
        if self._steps.num_waiting >= MAX_WAITING:
            raise ApplicationError(f"{MAX_WAITING} steps wait already: send the next one later", type="Conflict")

    def _check_key(self, request: StepRequest) -> None:
        known = self._steps.of_key(request.key)
        if known is not None and known.groups != request.groups:
            rule = f"this key was used for {known.groups}, which made step {known.step}"
            raise ApplicationError(rule, type="InvalidInput")

    @workflow.update
    async def finish(self) -> RunStatus:
        """Take no more steps, and end well after those that wait."""
        self._finishing = True
        return self.status()

    @workflow.query
    def step(self, number: int) -> StepStatus | None:
        """A step as it stands; None for one that is not there, or that only the store remembers."""
        step = self._steps.get(number)
        if step is None or step.is_final or not self._has_ended:
            return step
        message = "the run ended before this step: send it again when the run was resumed"
        return step.model_copy(update={"state": "failed", "problem": Problem(kind="run_ended", message=message)})

    @workflow.query
    def status(self) -> RunStatus:
        """The run as it stands."""
        training, status = self._training, self._status
        phase = status.phase
        if phase == "waiting_for_worker" and training.is_leased:
            phase = "training"
        elif phase == "sampling" and self._source is not None:
            phase = self._source.phase(self._steps.next)
        in_job = status.phase in ("waiting_for_worker", "training", "publishing")
        return status.model_copy(
            update={
                "phase": phase,
                "epoch": training.epoch,
                "notices": with_skipped((*status.notices, *training.notices), status.skipped_steps),
                "workers_lost": self._glance.workers_lost_before + training.num_lost,
                "estimated_end": self._estimated_end,
                "step": max(status.step, training.step) if in_job else status.step,
                "metrics": status.metrics | training.metrics if in_job else status.metrics,
                "timeline": self._glance.timeline,
                "gpu_seconds": self._glance.gpu_seconds_before + self._device_seconds,
            }
        )

    @workflow.signal
    def leased(self, grant: LeaseGrant) -> None:
        """A host has a worker up for this run."""
        self._training.leased(grant)

    @workflow.signal
    def sampler_leased(self, grant: LeaseGrant) -> None:
        """A host has a sampler up for this run."""
        self._sampling.granted(grant)

    @workflow.signal
    def make_room(self) -> None:
        """Another run waits for a worker: this lease ends as soon as no step waits. The next step takes another one."""
        self._wanted_epoch = self._training.epoch

    @workflow.signal
    def pause(self) -> None:
        """End at the next step boundary, with a checkpoint, until somebody resumes the run."""
        self._work.pause()

    @workflow.signal
    def progress(self, report: ProgressReport) -> None:
        """The job got ahead, or a checkpoint stands."""
        self._training.progress(report)

    # How it is done.

    def _show(self, **changes: object) -> None:
        self._status = self._status.model_copy(update=changes)
        self._look()

    def _look(self) -> None:
        self._glance.note(self.status())

    @property
    def _estimated_end(self) -> float | None:
        if self._source is None or self._status.state != "running":
            return None
        return self._pace.end(self._source.data.num_steps, self._training.epoch)

    @property
    def _device_seconds(self) -> float:
        """Of this execution: a worker's ranks have a device each, and so has a sampler."""
        return self._training.held_s * self._start.run.layout.world_size + self._sampling.held_s


def _policy_of(done: StepStatus) -> Policy:
    assert done.policy_version is not None and done.adapter is not None and done.adapter_sha256 is not None
    adapter = Artifact(uri=done.adapter, sha256=done.adapter_sha256)
    return Policy(after_step=done.step, version=done.policy_version, adapter=adapter)
