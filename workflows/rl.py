"""Reinforcement learning, step after step, on groups that a client sends or that the run samples and grades itself."""

from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.publishing.publish import Publish
    from activities.records import Recovered, RecoverRequest, RunRecords, StepRecordRequest
    from longshore.fields import Artifact
    from longshore.losses import reference_uri
    from longshore.training import Lora, Watched
    from longshore.views import CarriedOver, Problem, RunStatus, StepStatus
    from shared.automation import BestRequest
    from shared.jobs.job import LeaseGrant
    from shared.runs.start import RLStart
    from shared.runs.status import STEP_COUNTS, Policy, RLState, StepRequest
    from workflows import control, policies
    from workflows.outcomes import RunFailed, problem_of_error, with_counts
    from workflows.rollouts import rollouts
    from workflows.rollouts.requests import ends_with
    from workflows.rollouts.rollouts import RolloutSource
    from workflows.rollouts.sampling import LeasedSamplers
    from workflows.training import job_plan
    from workflows.training.job_plan import replayed_routes
    from workflows.training.run import ActiveRun, ClientDrivenHandlers, ShownRun, StepEta, changed, version_shown
    from workflows.training.train_step import (
        StepQueue,
        policy_shown,
        publish_policy,
        shown_after,
        state_after,
        train_and_publish,
        unchanged,
    )

# A history should stay under 10,000 events. A step of a client's groups takes about 40, one of own rollouts about 80.
_STEPS_AN_EXECUTION, _OWN_STEPS_AN_EXECUTION = 100, 60


# --- What local runs share (longshore/local.py) ---


def recover_request(start: RLStart) -> RecoverRequest:
    """Return the request for the steps and policies that a run has in the store."""
    held_out = start.run.held_out
    return RecoverRequest(
        run_id=start.run_id,
        num_policies=RolloutSource.num_policies(start),
        watched=held_out if held_out is not None and held_out.watched else None,
    )


async def prepared_state(run: ShownRun, start: RLStart, recovered: Recovered) -> RLState:
    """Check model and adapters, render prompts. Steps that were recovered from the store are done."""
    resolved = await job_plan.resolve_model(start)
    adapter = await job_plan.resolve_initial_adapter(start, resolved)
    uri = reference_uri(start.run.loss)
    reference = await job_plan.resolve_reference(start, uri, resolved) if uri is not None else None
    data = None
    if start.run.rollouts is not None:
        run.show(phase="tokenizing")
        data = await rollouts.prepare_rollouts(run, start, resolved)
        run.show(num_steps=data.num_steps * start.run.epochs * start.run.mini_batches)
    if recovered.trained is not None:
        run.show(**policy_shown(recovered.trained))
    state = RLState(
        model=resolved.model,
        shape=resolved.shape,
        adapter=adapter,
        reference=reference,
        status=run.status,
        rollouts=data,
        evaluated=recovered.evaluated,
        carried=recovered.carried,
        policies=(
            Policy(after_step=0, version=0, adapter=adapter),
            *(policy.model_copy(update={"adapter": policy.adapter or adapter}) for policy in recovered.policies),
        ),
    )
    return state_after(state, recovered.trained) if recovered.trained else state


def best_request(start: RLStart, best: StepStatus) -> BestRequest:
    """Return the request that publishes the policy of the best evaluation again, as the newest version."""
    assert best.adapter is not None and best.adapter_sha256 is not None
    return BestRequest(
        tenant=start.tenant,
        name=start.run.name or start.run_id,
        run_id=start.run_id,
        kind="adapters" if isinstance(start.run.trainable, Lora) else "models",
        artifact=Artifact(uri=best.adapter, sha256=best.adapter_sha256),
    )


def best_metrics(watched: Watched, best: StepStatus) -> dict[str, float]:
    """Return the metrics of the evaluation whose policy is kept; none if the last policy is kept."""
    metric = watched.keeps_by
    return {} if metric is None else {"best_step": float(best.step), f"best_{metric}": best.metrics[metric]}


async def publish_last(run: ShownRun, start: RLStart, state: RLState) -> StepStatus | None:
    """Publish the last step's policy, if that has not been done. Returns the step then."""
    if (step := state.unpublished) is None:
        return None
    run.show(phase="publishing")
    done = await publish_policy(start, state, step, run.status.dataset_report, step.metrics)
    await control.record(RunRecords.record_step, StepRecordRequest(run_id=start.run_id, step=done))
    run.show(**policy_shown(done))
    return done


async def publish_best(run: ShownRun, start: RLStart, state: RLState, last_step: int) -> None:
    """Say what the evaluations decided; publish the best policy again, as the newest version, if it is not."""
    watched, best = start.run.held_out, state.evaluated.best
    if state.rollouts is None or watched is None:
        return
    if best is not None and best.policy_version != state.policy_version:
        found = await control.do(Publish.publish_best, best_request(start, best), policies.PATIENT)
        run.show(**version_shown(found))
    if best is not None:
        run.show(metrics=run.status.metrics | best_metrics(watched, best))
    run.add_notices(watched.decided(last_step, state.rollouts.num_steps, best.step if best else None))


@workflow.defn
class RLWorkflow(ClientDrivenHandlers):
    """One RL run. A train step that succeeds makes the policy's next version; one that fails does not change it."""

    @workflow.init
    def __init__(self, start: RLStart) -> None:
        before = start.state
        self._start = start
        self._state = before
        self._steps = StepQueue(before)
        self._sampling = LeasedSamplers(start, self._yield_worker)
        self._source: RolloutSource | None = None
        self._eta = StepEta()  # of whole train steps: sampling, grading and training
        self._num_done = 0
        self._run = ActiveRun(start, self._current, before, holds=True)
        for training in self._run.trainings:
            training.must_yield = lambda: self._sampling.is_awaited
        self._run.training.device = self._sampling.lent
        self._run.training.shares = not self._sampling.is_colocated

    @workflow.run
    async def run(self, start: RLStart) -> RunStatus:
        return await self._run.to_its_end(self._train_and_finish, self._leave)

    async def _train_and_finish(self) -> None:
        if not await self._run.interruptible(self._train_all()):
            await self._move_on()
        status = self._run.status
        if status.failed_steps and not status.policy_version:
            failed = [step.problem for step in self._steps.all() if step.problem is not None]
            last = failed[-1] if failed else Problem(kind="error", message="see its record")
            message = f"no step was trained, and {status.failed_steps} failed; the last one: {last.message}"
            raise RunFailed(Problem(kind=last.kind, message=message))
        self._run.show(state="succeeded", phase="done")

    async def _train_all(self) -> bool:
        """Train every step. False when this execution's history is long enough, and there is more to train."""
        if self._state is None:
            self._state = await self._prepare()
        is_whole = await (self._train_own_steps(self._state) if self._start.run.rollouts else self._train_steps())
        if is_whole:
            assert self._state is not None
            if (done := await publish_last(self._run, self._start, self._state)) is not None:
                self._state = state_after(self._state, done)
                self._steps.keep(done)
            await publish_best(self._run, self._start, self._state, self._steps.next - 1)
        return is_whole

    async def _prepare(self) -> RLState:
        """Check model and adapters, render prompts; a resumed run finds its last steps and policies in the store."""
        start = self._start
        self._run.show(phase="checking")
        recovered = Recovered()
        if start.resumed:
            self._sampling.restore_after(self._run.problem_before)
            recovered = await control.do(RunRecords.recover_steps, recover_request(start))
            self._steps.next = recovered.last_step + 1
        state = await prepared_state(self._run, start, recovered)
        if start.run.rollouts is not None:
            rollouts.check_buckets(start.run, state.shape)
        return state

    async def _train_steps(self) -> bool:
        """Train the steps that clients send, in order. False when this execution's history is long enough."""
        while True:
            await self._steps.wait(self._run, self._is_wanted)
            if (step := self._steps.first_waiting()) is not None:
                await self._train(step)
            elif self._steps.is_finishing:
                return True
            if self._is_long(_STEPS_AN_EXECUTION):
                return False

    async def _train_own_steps(self, state: RLState) -> bool:
        """Sample, grade and train to the last step, or the target. False when this history is long enough."""
        assert state.rollouts is not None
        self._source = source = RolloutSource(
            start=self._start,
            model=state.model,
            data=state.rollouts,
            policies=list(state.policies),
            sampling=self._sampling,
            routes=replayed_routes(self._start.run, state.shape),
            carried=state.carried,
        )
        if self._steps.next == 1 and (beginning := await source.beginning(self._run, state)) is not None:
            self._steps.keep(beginning)
            if ends_with(self._start.run, beginning, state.evaluated):
                return True
        while self._steps.next <= state.rollouts.num_steps and not self._steps.is_finishing:
            self._run.show(phase="sampling")
            rolled = await source.groups(self._steps.next)
            step = self._steps.take(f"rollouts-{self._steps.next}", rolled.groups_uri, **rolled.told)
            done = await self._train(step)
            self._eta.take(done.step, workflow.time(), self._run.training.leasing.epoch)
            assert self._state is not None
            if ends_with(self._start.run, done, self._state.evaluated):
                return True
            if self._is_long(_OWN_STEPS_AN_EXECUTION):
                return False
        return True

    async def _train(self, step: StepStatus) -> StepStatus:
        """Train a step, and publish if that is due. Its outcome, also a failure, is recorded in the store."""
        assert self._state is not None
        source, step = self._source, step.model_copy(update={"state": "running"})
        self._steps.keep(step)
        try:
            done = await train_and_publish(self._run, self._start, self._state, step, source)
            if source is not None:
                done = await source.end_step(self._run, done, self._steps.is_finishing)
        except (RunFailed, ActivityError) as error:
            problem = problem_of_error(error)
            if source is not None or problem.kind not in policies.STEP_KINDS:
                raise
            done = unchanged(self._state, step.model_copy(update={"state": "failed", "problem": problem}))
        await control.record(RunRecords.record_step, StepRecordRequest(run_id=self._start.run_id, step=done))
        if done.state == "done" and done.same_as is None:
            evaluated = self._state.evaluated.after(done, self._start.run.held_out)
            self._state = state_after(self._state, done).model_copy(update={"evaluated": evaluated})
        self._run.show(**shown_after(self._run.status, self._start.run, done))
        self._num_done += 1
        self._steps.keep(done)
        return done

    def _is_long(self, max_steps: int) -> bool:
        return self._num_done >= max_steps or workflow.info().is_continue_as_new_suggested()

    async def _leave(self) -> None:
        """Give back the workers and the sampler, and cancel rollouts in progress."""
        self._run.release()
        if self._source is not None:
            await self._source.stop()

    async def _move_on(self) -> NoReturn:
        """Continue as a new execution. Waiting clients get a status, and have to ask again."""
        await self._leave()
        self._steps.is_moving_on = True

        def own() -> dict[str, object]:
            return {
                "next_step": self._steps.next,
                "steps": self._steps.all(),
                "finishing": self._steps.is_finishing,
                "policies": tuple(self._source.policies) if self._source else (),
                "carried": self._source.carried if self._source else CarriedOver(),
            }

        await self._run.move_on(self._state, own)

    @workflow.update
    async def train_step(self, request: StepRequest) -> StepStatus:
        """Accept a train step, unless one with its key is known. Answers at once or, with `wait`, when it has ended.

        If the run moves on to a new execution, even a waiting client gets an unfinished step, and has to ask again.
        """
        if self._start.resumed:  # the number of steps is read from the store first
            await workflow.wait_condition(lambda: self._state is not None or self._has_ended())
            self._check_step(request)
        return await self._steps.answer(request, self._has_ended)

    @train_step.validator
    def _check_step(self, request: StepRequest) -> None:
        self._steps.check(request, self._start.run.rollouts is not None, self._takes_steps)

    @property
    def _takes_steps(self) -> bool:
        """Also False while the run is being paused: a step that came now would fail when the run ends."""
        return self._run.status.state == "running" and not self._run.is_pausing

    @workflow.update
    async def finish(self) -> RunStatus:
        """Accept no more steps; the run succeeds after those that wait."""
        self._steps.is_finishing = True
        return self._current()

    @workflow.query
    def step(self, number: int) -> StepStatus | None:
        """Return a step's status; None if there is no such step, or only the store still has its record."""
        return self._steps.get(number, self._has_ended())

    @workflow.signal
    def sampler_leased(self, grant: LeaseGrant) -> None:
        """Take a host's signal that a sampler is up for this run."""
        self._sampling.granted(grant)

    def _has_work(self) -> bool:
        return self._steps.is_finishing or self._steps.first_waiting() is not None

    def _yield_worker(self) -> None:
        # Runs lease a sampler before a worker. A run that lost its sampler and waits for another one gives up its idle
        # worker: otherwise it would deadlock with a run that holds that sampler and waits for the worker.
        for training in self._run.trainings:
            if training.is_idle:
                training.release()

    def _current(self) -> RunStatus:
        status, training, known = self._run.with_jobs(), self._run.training, self._run.status
        is_sampling = known.phase == "sampling" and self._source is not None
        in_job = known.phase in ("waiting_for_worker", "training", "publishing")
        eta = None
        if self._source is not None and known.state == "running":
            eta = self._eta.end(self._source.data.num_steps, training.leasing.epoch)
        return changed(
            status,
            phase=self._source.phase(self._steps.next) if self._source and is_sampling else status.phase,
            notices=with_counts(status.notices, **known.model_dump(include=set(STEP_COUNTS))),
            estimated_end=eta,
            step=max(known.step, training.step) if in_job else known.step,
            metrics=known.metrics | training.metrics if in_job else known.metrics,
            gpu_seconds=status.gpu_seconds + self._sampling.held_s,
        )
