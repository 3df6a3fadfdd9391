"""One train step of an RL run, from its groups to the policy that it makes, which is published if that is due."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.hosts.run_job import JobResult
    from activities.trajectories.pack_trajectories import GroupsRequest, PackTrajectories
    from longshore.accounts import Room
    from longshore.runs import RLRun
    from longshore.training import SyncOutcome
    from longshore.views import Problem, RunStatus, StepStatus
    from shared.jobs.job import JobPlan, SyncTarget
    from shared.runs.start import RLStart
    from shared.runs.status import RLState, StepRequest
    from workflows import control
    from workflows.training import job_plan
    from workflows.training.job_plan import replayed_routes, rl_job
    from workflows.training.run import ActiveRun, StatusChanges, version_shown


# --- The train steps of an RL run as its workflow knows them: those that wait, and the last ones that ended ---

_GRACE_S = 1.0  # for the next step, if another run waits for the worker
_MAX_WAITING = 64  # further steps are refused, for the client to send again later
_REMEMBERED = 64  # ended steps that are kept here; the store has a record of every one
_ENDED_BEFORE = "the run ended before this step: send it again when {} resumed"


class StepQueue:
    """Steps in order of arrival.

    Attributes:
        next: the number of the next step that comes.
        is_finishing: no more steps are taken; the run succeeds after those that wait.
        is_moving_on: the run continues as a new execution: waiting clients ask again there.
    """

    def __init__(self, before: RLState | None) -> None:
        self._steps = {step.step: step for step in before.steps} if before else {}
        self.next = before.next_step if before else 1
        self.is_finishing = before is not None and before.finishing
        self.is_moving_on = False

    def take(self, key: str, groups: str, **told: Any) -> StepStatus:
        """Add a new step, which waits for those before it. `told`: further fields of its status."""
        step = StepStatus(step=self.next, key=key, groups=groups, **told)
        self.next += 1
        self._steps[step.step] = step
        return step

    def keep(self, step: StepStatus) -> None:
        """Replace a step's status, and drop the oldest ended steps."""
        self._steps[step.step] = step
        ended = [number for number, one in self._steps.items() if one.is_final]
        for number in ended[:-_REMEMBERED]:
            del self._steps[number]

    def first_waiting(self) -> StepStatus | None:
        return next((step for step in self._steps.values() if not step.is_final), None)

    def all(self) -> tuple[StepStatus, ...]:
        """Return the steps that wait, and the last ones that ended."""
        return tuple(self._steps.values())

    def get(self, number: int, has_ended: bool) -> StepStatus | None:
        """Return a step; None if it is not kept here. A step that was not done when the run ended has failed."""
        step = self._steps.get(number)
        if step is None or step.is_final or not has_ended:
            return step
        problem = Problem(kind="run_ended", message=_ENDED_BEFORE.format("the run was"))
        return step.model_copy(update={"state": "failed", "problem": problem})

    def check(self, request: StepRequest, makes_own: bool, is_running: bool) -> None:
        """Refuse a request for a step that cannot be taken. A request with a known step's key asks for that step.

        Raises:
            ApplicationError: the key was used for other groups, or no more steps are taken (at the moment).
        """
        known = self._of_key(request.key)
        if known is not None:
            if known.groups != request.groups:
                rule = f"this key was used for {known.groups}, which made step {known.step}"
                raise ApplicationError(rule, type="InvalidInput")
        elif makes_own:
            raise ApplicationError("the run makes its own groups: it takes none", type="Conflict")
        elif self.is_finishing or not is_running:
            raise ApplicationError("the run takes no more steps: it was finished, or has ended", type="Conflict")
        elif sum(not step.is_final for step in self._steps.values()) >= _MAX_WAITING:
            raise ApplicationError(f"{_MAX_WAITING} steps wait already: send the next one later", type="Conflict")

    async def answer(self, request: StepRequest, has_ended: Callable[[], bool]) -> StepStatus:
        """Take a step in, and return its status: at once, or when it has ended if `request.wait`.

        Raises:
            ApplicationError: the run ended first.
        """
        if self._of_key(request.key) is None:
            self.take(request.key, request.groups)

        def is_settled() -> bool:
            step = self._of_key(request.key)
            return self.is_moving_on or has_ended() or step is None or step.is_final

        if request.wait:
            await workflow.wait_condition(is_settled)
        found = self._of_key(request.key)
        if found is None or (request.wait and not found.is_final and not self.is_moving_on):
            raise ApplicationError(_ENDED_BEFORE.format("it was"), type="Conflict")
        return found

    async def wait(self, run: ActiveRun, is_wanted: Callable[[], bool]) -> None:
        """Wait for a step, or for `is_finishing`. A worker without a step is given back after `run.idle_s` seconds.

        Args:
            is_wanted: another run waits for the worker: it is given back soon.
        """

        def has_come() -> bool:
            return self.is_finishing or self.first_waiting() is not None

        if has_come():
            return
        run.show(phase="waiting_for_groups")
        assert isinstance(run.start, RLStart)
        idle_s = run.start.run.idle_s
        try:
            await workflow.wait_condition(lambda: has_come() or is_wanted(), timeout=timedelta(seconds=idle_s))
            if not has_come():
                await workflow.wait_condition(has_come, timeout=timedelta(seconds=min(_GRACE_S, idle_s)))
        except TimeoutError:
            run.release()
            await workflow.wait_condition(has_come)

    def _of_key(self, key: str) -> StepStatus | None:
        return next((step for step in self._steps.values() if step.key == key), None)


class GroupSource(Protocol):
    """The source of a run's own groups: samplers, which need each version of the policy."""

    def sync_target(self, version: int) -> SyncTarget | None:
        """Return where the trainer sends a version of the policy; None if samplers load it from the store."""

    async def prove_and_sample_next(self, step: StepStatus, logprobs: Sequence[float]) -> dict[str, float]:
        """Prove that samplers serve the policy that a step made, given the trainer's log-probabilities of the probe.

        Begins to sample the next step. Returns metrics.
        """


def groups_request(start: RLStart, state: RLState, step: StepStatus, known: RunStatus, room: Room) -> GroupsRequest:
    """Return the request that packs a step's groups. `known`: the run's status, with the last published version."""
    return GroupsRequest(
        run_id=start.run_id,
        tenant=start.tenant,
        run=start.run,
        step=step.model_copy(update={"metrics": {}}),
        policy_version=state.policy_version,
        vocab_size=state.shape.vocab_size,
        model=state.model,
        name=known.name,
        version=known.version,
        routes=replayed_routes(start.run, state.shape),
        room=room,
    )


async def train_and_publish(
    run: ActiveRun, start: RLStart, state: RLState, step: StepStatus, source: GroupSource | None
) -> StepStatus:
    """Pack a step's groups, train on them, publish what is due.

    Returns:
        The step: done; or skipped, if there is nothing to learn from; or the earlier step that had the same key.
    """
    run.show(phase="packing")
    request = groups_request(start, state, step, run.status, run.room)
    packed = await control.do(PackTrajectories.pack_trajectories, request)
    if (before := packed.trained_before) is not None:
        return before.model_copy(update={"step": step.step, "same_as": before.step})
    metrics = step.metrics | packed.metrics
    if packed.data is None or packed.report_uri is None:
        return unchanged(state, step.model_copy(update={"state": "skipped", "metrics": metrics}))
    run.show(phase="waiting_for_worker", dataset_report=packed.report_uri)
    began = workflow.time()
    target = source.sync_target(state.policy_version + 1) if source is not None else None
    plan = rl_job(start, state, step, packed.data, packed.num_steps, target)
    result, critic = await run.train_beside(plan) if is_divided(start, plan) else (await run.training.do(plan), None)
    trained = workflow.time()
    done = trained_step(state, step, result, metrics)
    if critic is not None:
        named = {name: value for name, value in critic.metrics.items() if name.startswith("critic_")}
        own = {"critic_checkpoint": critic.checkpoint, "metrics": done.metrics | named}
        done = done.model_copy(update=own)
    run.show(phase="publishing")
    about = packed.metrics | result.metrics
    publishing = (
        publish_policy(start, state, done, packed.report_uri, about)
        if is_due(start, state, done)
        else unpublished(done)
    )
    if source is None:
        done = await publishing
    else:
        done = await publish_while_sampling(publishing, source.prove_and_sample_next(done, result.probe))
    seconds = {"training_seconds": trained - began, "publishing_seconds": workflow.time() - trained}
    return done.model_copy(update={"metrics": done.metrics | result.metrics | seconds})


def is_divided(start: RLStart, plan: JobPlan) -> bool:
    """Return True if a step's critic is updated on its own worker. In a warm-up nothing is beside it."""
    settings = start.run.critic
    return settings is not None and settings.own_worker and plan.critic is not None and not plan.critic.alone


def trained_step(state: RLState, step: StepStatus, result: JobResult, metrics: dict[str, float]) -> StepStatus:
    """Return a step whose job has made the next version of the policy, with the metrics of its groups."""
    return step.model_copy(
        update={
            "state": "done",
            "policy_version": state.policy_version + 1,
            "optimizer_step": result.step,
            "checkpoint": result.checkpoint,
            "synced": result.sync.digest if result.sync else None,
            "metrics": metrics | (sync_metrics(result.sync) if result.sync is not None else {}),
        }
    )


def is_due(start: RLStart, state: RLState, done: StepStatus) -> bool:
    """Return True if a step's policy is published: every `publish_every` versions, the last step's, and one that is
    evaluated, if the best is kept.
    """
    assert done.policy_version is not None
    is_last = state.rollouts is not None and done.step == state.rollouts.num_steps
    held_out = start.run.held_out
    is_candidate = held_out is not None and held_out.keep == "best" and held_out.is_due(done.step)
    return is_last or is_candidate or done.policy_version % start.run.publish_every == 0


async def publish_policy(
    start: RLStart, state: RLState, done: StepStatus, report_uri: str | None, metrics: dict[str, float]
) -> StepStatus:
    """Publish the policy that a step made. Returns the step with the name and version."""
    request = job_plan.publish_request(start, state.model, done.checkpoint, report_uri, metrics, done.step)
    return done.model_copy(update=version_shown(await job_plan.publish_weights(request)))


async def unpublished(done: StepStatus) -> StepStatus:
    return done


async def publish_while_sampling(
    publishing: Coroutine[Any, Any, StepStatus], taking_up: Coroutine[Any, Any, dict[str, float]]
) -> StepStatus:
    """Publish a step while samplers load its policy. If either fails the other is cancelled."""
    tasks = asyncio.create_task(publishing), asyncio.create_task(taking_up)
    try:
        done, proof = await asyncio.gather(*tasks)
    except (Exception, asyncio.CancelledError):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return done.model_copy(update={"metrics": done.metrics | proof})


def sync_metrics(sync: SyncOutcome) -> dict[str, float]:
    """Return the metrics of a step's weight sync."""
    return {
        "sync_bytes": float(sync.num_bytes),
        "sync_blocked_s": sync.blocked_s,
        "sync_s": sync.duration_s,
        "sync_failed": float(len(sync.problems)),
        "sync_made_room": float(sync.made_room),
    }


def with_evaluation(step: StepStatus, told: Mapping[str, Any], **seconds: float) -> StepStatus:
    """Return a step with the metrics and samples of an evaluation after it. `seconds`: further metrics."""
    metrics, samples = step.metrics | told["metrics"] | seconds, step.samples | told["samples"]
    return step.model_copy(update={"metrics": metrics, "samples": samples})


def unchanged(state: RLState, step: StepStatus) -> StepStatus:
    """A step that does not change the policy."""
    policy = {"policy_version": state.policy_version, "optimizer_step": state.optimizer_step}
    return step.model_copy(update=policy)


def shown_after(known: RunStatus, run: RLRun, done: StepStatus) -> StatusChanges:
    """Return what the status shows of a step that has ended: the policy that it made, and the counts of steps that
    were not trained, or that had no learning signal.
    """
    is_new = done.state == "done" and done.same_as is None
    by_rewards = is_new and run.advantages not in ("none", "given") and done.metrics["trajectories"] > 1
    are_equal = by_rewards and done.metrics["reward_std"] < 1e-9  # a mean's rounding is less
    counts = {
        "skipped_steps": known.skipped_steps + (done.state == "skipped"),
        "failed_steps": known.failed_steps + (done.state == "failed"),
        "equal_reward_steps": known.equal_reward_steps + are_equal,
        "zero_gradient_steps": known.zero_gradient_steps + (is_new and done.metrics.get("grad_norm") == 0),
    }
    return counts | policy_shown(done) if is_new else counts


def policy_shown(done: StepStatus) -> StatusChanges:
    """Return what the status shows of the policy that a step made."""
    assert done.policy_version is not None and done.optimizer_step is not None
    version = ("adapter", "adapter_sha256", "name", "version") if done.adapter is not None else ()
    shown = {name: getattr(done, name) for name in ("policy_version", "metrics", "checkpoint", *version)}
    return shown | {"step": done.optimizer_step}


def state_after(state: RLState, done: StepStatus) -> RLState:
    """Return the state that the step after one that made a policy trains on."""
    return state.model_copy(
        update={
            "policy_version": done.policy_version,
            "optimizer_step": done.optimizer_step,
            "checkpoint": done.checkpoint,
            "critic_checkpoint": done.critic_checkpoint,
            "unpublished": done if done.adapter is None else None,
        }
    )
