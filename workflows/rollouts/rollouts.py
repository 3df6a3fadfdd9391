"""A run's own rollouts: sample from the policy and grade, for the groups of train steps and held-out prompts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grading.grade import Grade, Graded, GradeRequest, GradeSummary
    from activities.models.resolve import Resolve
    from activities.records import RunRecords, StepRecordRequest, policy_of
    from activities.sampling.admit import AdmitGroups, AdmitRequest, Admitted, BegunPrompts
    from activities.sampling.agents import CheckEnvironment, CheckEnvironmentRequest
    from activities.sampling.sample import (
        PolicySampleRequest,
        Proved,
        ProveRequest,
        Sampled,
        SamplerActivities,
        ScoreSamples,
        ScoreSamplesRequest,
        Share,
        ShareRequest,
    )
    from activities.sources.download import Download, DownloadRequest
    from activities.tokenizing.render_prompts import Prompts, RenderPrompts
    from activities.trajectories.group_samples import Drawn, GroupSamples
    from longshore.dataset_runs import Dataset, DatasetSource, sources_by_split
    from longshore.fields import Artifact
    from longshore.grading import reward_graders
    from longshore.runs import RLRun, dtype_of
    from longshore.views import CarriedOver, CheckpointRef, Phase, Problem, StepStatus
    from shared.errors import InvalidInput
    from shared.jobs.job import HeldOutGrades, LeaseGrant, SyncTarget
    from shared.jobs.packed import RouteShape
    from shared.models.shape import ModelShape
    from shared.runs.acceptance import chosen_scalar
    from shared.runs.start import ModelRequest, ResolvedModel, RLStart, RunStart
    from shared.runs.status import Policy, RewardModel, RLState, RolloutData
    from shared.serving import LeasedSampler, SamplerPlace
    from workflows import control
    from workflows import policies as limits
    from workflows.outcomes import RunFailed
    from workflows.rollouts import requests as rollout_requests
    from workflows.rollouts.requests import rollouts_of
    from workflows.rollouts.sampling import LeasedSamplers
    from workflows.training import job_plan
    from workflows.training.run import ActiveRun, ShownRun
    from workflows.training.train_step import unchanged, with_evaluation


# --- The reward models of a run's grader ---
# Found and checked before any lease, and run on a sampler of their base model.


async def find_rewards(start: RLStart, policy: ResolvedModel) -> tuple[RewardModel, ...]:
    """Find the reward models that grade, and their base models. `policy`: the policy's model.

    Raises:
        RunFailed: a grader uses a scalar that its reward model does not have.
    """
    found: dict[str, RewardModel] = {}
    rollouts = rollouts_of(start.run)
    keeps_base = start.run.trainable.kind == "lora" and rollouts.sampler == "own"  # this sampler can also score
    for place, grader in reward_graders(rollouts.grader).items():
        base = policy
        if grader.base is not None:
            asked = ModelRequest(uri=grader.base, any_family=True, tenant=start.tenant, room=start.room)
            base = await control.do(Resolve.resolve_model, asked)
        of_grader = {"role": "reward_model", "model": grader.base or start.run.model}
        request = job_plan.adapter_request(start, grader.model, base, **of_grader)
        adapter = await control.do(Resolve.resolve_adapter, request)
        head = adapter.lora.head
        assert head is not None  # the activity has refused a model without a head
        try:
            chosen_scalar(grader, head.names, f"rollouts.{place}")
        except InvalidInput as error:
            raise RunFailed(Problem(kind="invalid_input", message=str(error))) from error
        is_beside = not keeps_base or base.model.sha256 != policy.model.sha256
        found[grader.scorer] = RewardModel(
            scorer=grader.scorer, model=base.model, adapter=adapter.adapter, head=head, is_beside=is_beside
        )
    return tuple(found.values())


async def scored(
    start: RLStart,
    sampling: LeasedSamplers,
    samples: Artifact,
    prompts: Artifact,
    source: Dataset,
    rewards: tuple[RewardModel, ...],
) -> dict[str, Artifact]:
    """Score samples by each reward model, for `GradeRequest.rewards`. Raises as `LeasedSamplers.do` does.

    Args:
        prompts, source: the prompts of the samples, and how their rows are read.
    """
    given = {"run_id": start.run_id, "samples": samples, "source": source, "prompts": prompts}

    async def scored_by(reward: RewardModel) -> Artifact:
        def request(place: SamplerPlace) -> ScoreSamplesRequest:
            return ScoreSamplesRequest(reward=reward, dtype=dtype_of(start.run), place=place, **given)

        asked = sampling.beside(reward.model) if reward.is_beside else sampling
        return await asked.do(ScoreSamples.score_samples, request, reward.model)

    return {reward.scorer: await scored_by(reward) for reward in rewards}


@dataclass(frozen=True)
class Rolled:
    """The URIs of a step's trajectory groups and of its samples, and metrics such as the seconds that these took.

    `carried`: the prompts that it leaves for later steps, with `carry_over`.
    """

    groups_uri: str
    samples_uri: str
    metrics: dict[str, float]
    carried: CarriedOver | None = None

    @property
    def told(self) -> dict[str, Any]:
        """Fields of the step's status."""
        return {"metrics": self.metrics, "samples": {"train": self.samples_uri}, "carried": self.carried}


def check_buckets(run: RLRun, shape: ModelShape) -> None:
    """Raise RunFailed if the model's weights do not fit the buckets of the run's weight sync."""
    if (message := rollout_requests.too_small_a_bucket(run, shape)) is not None:
        raise RunFailed(Problem(kind="invalid_input", message=message))


async def prepare_rollouts(run: ShownRun, start: RLStart, policy: ResolvedModel) -> RolloutData:
    """Try the grader, download and render the prompts, before any accelerator is asked for."""
    rollouts = rollouts_of(start.run)
    rewards = await _checked_grader(start, policy)
    parts = await _render(run, start, policy.model, sources_by_split(rollouts.prompts, "train"))
    mixed = rollout_requests.mix_prompts_request(rollouts.prompts, parts)
    prompts = parts[0] if mixed is None else await control.do(RenderPrompts.mix_prompts, mixed)
    await _check_environment(start, policy, rollouts.prompts, prompts)
    held_out = await _render(run, start, policy.model, rollout_requests.held_out_sources(start.run))
    return rollout_requests.rollout_data(start.run, prompts, held_out).model_copy(update={"rewards": rewards})


async def _checked_grader(start: RLStart, policy: ResolvedModel) -> tuple[RewardModel, ...]:
    """Try the grader. Returns its reward models."""
    await control.do(Grade.check_grader, rollouts_of(start.run).grader)
    return await find_rewards(start, policy)


async def _check_environment(start: RLStart, policy: ResolvedModel, source: Dataset, prompts: Prompts) -> None:
    """Try the environment or agent on these prompts, if episodes are played."""
    if (plan := rollout_requests.episode_plan(start.run, source)) is not None:
        check = CheckEnvironmentRequest(plan=plan, prompts=prompts.prompts, model=policy.model)
        await control.do(CheckEnvironment.check_environment, check)


async def _render(
    run: ShownRun, start: RLStart, model: Artifact, sources: Mapping[str, DatasetSource]
) -> list[Prompts]:
    """Download datasets of prompts, each under its own name below the run, and render them."""
    found = []
    for split, source in sources.items():
        download = DownloadRequest(run_id=start.run_id, tenant=start.tenant, split=split, source=source, room=run.room)
        downloaded = await control.do(Download.download, download)
        run.add_notices(downloaded.notices)
        request = rollout_requests.prompts_request(start.run, source, downloaded.dataset, model)
        found.append(await control.do(RenderPrompts.render_prompts, request))
    return found


@dataclass
class RolloutSource:
    """Makes the trajectory groups of train steps, up to `off_policy_steps` ahead of the step that is trained.

    The prompts of each step are sampled from the policy of `policy_of_step`, which a step's number determines. A step
    trains its own prompts. With `carry_over` it trains as many, but the oldest that are complete of all that have been
    begun: the prompts of each step have an activity of their own, and another one decides which of them a step takes
    (activities/sampling/admit.py). Only that decision depends on time, and it is made once: it is in the store, in
    history, and the remaining prompts (`carried`) are in the step's record. Nothing is dropped. One more step's prompts
    begin when a step has been trained, so that at most `off_policy_steps` + 1 steps' prompts are begun and not trained.
    Those of `MOST_DRAWN` steps at most are drawn at a time: further ones wait for the slowest, which is trained less
    than `MOST_DRAWN` + `off_policy_steps` steps after its policy was made.

    `policies` are the last ones, which later steps may be sampled from; `end_step` adds one. `_proof` is the last
    policy to prove, with the trainer's log-probabilities of the probe. `_proved` holds the lease epochs of the samplers
    that were asked to prove it; a sampler that fails is given up. `_proving` holds those that started late and have not
    answered yet. `routes`: the expert routes that the trainer replays.
    """

    start: RLStart
    model: Artifact
    data: RolloutData
    policies: list[Policy]
    sampling: LeasedSamplers
    routes: RouteShape | None
    carried: CarriedOver
    _tasks: dict[int, asyncio.Task[Rolled]] = field(default_factory=dict)
    _drawing: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # with carry_over: steps' prompts
    _taken: dict[int, tuple[BegunPrompts, ...]] = field(default_factory=dict)  # by steps whose groups are being made
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _grading: set[int] = field(default_factory=set)
    _proof: tuple[Policy, tuple[float, ...]] | None = None
    _proved: set[int] = field(default_factory=set)
    _proving: set[int] = field(default_factory=set)
    _faults_told: tuple[int, int] = (0, 0)

    async def groups(self, step: int) -> Rolled:
        """Return the groups of a step, counted from 1, and start making those of the steps ahead."""
        self._begin(step)
        self._begin_roll(step)
        try:
            rolled = await self._tasks[step]
        finally:
            self._tasks.pop(step, None)
            self._taken.pop(step, None)
        if rolled.carried is not None:
            self.carried = rolled.carried
            over = [number for number, task in self._drawing.items() if number < self.carried.oldest and task.done()]
            for number in over:
                del self._drawing[number]
            if step < self.data.num_steps:
                self._begin_roll(step + 1)  # so that it is graded while this step trains
            else:
                await workflow.wait_condition(lambda: all(task.done() for task in self._drawing.values()))
        return rolled

    @property
    def _carries_over(self) -> bool:
        return rollouts_of(self.start.run).carry_over

    def _begin(self, step: int) -> None:
        """Begin to make the groups of a step and of the steps sampled ahead of it."""
        last = min(step + rollouts_of(self.start.run).off_policy_steps, self.data.num_steps)
        if not self._carries_over:
            for number in range(step, last + 1):
                self._begin_roll(number)
            return
        num_prompts = rollouts_of(self.start.run).prompts_per_step
        for number in range(self.carried.oldest, last + 1):
            if number not in self._drawing and self.carried.of_step(number, num_prompts):
                self._drawing[number] = asyncio.create_task(self._draw_prompts(number))

    def _begin_roll(self, step: int) -> None:
        if step not in self._tasks:
            self._tasks[step] = asyncio.create_task(self._roll(step))

    def phase(self, step: int) -> Phase:
        """Return the phase of a step whose groups are being made."""
        if step in self._grading:
            return "grading"
        return "sampling" if self.sampling.is_up else "waiting_for_sampler"

    @staticmethod
    def num_policies(start: RLStart) -> int:
        """Return how many of the last policies are kept for later steps to sample from."""
        rollouts = start.run.rollouts
        return 1 + (rollouts.off_policy_steps if rollouts else 0)

    async def stop(self) -> None:
        """Cancel rollouts in progress and give the sampler back. Finished samples are in the store, and are reused."""
        await self._drop()
        self.sampling.release()

    async def _drop(self) -> None:
        """Cancel rollouts in progress, and drop those that have ended and were not trained on."""
        tasks = [*self._tasks.values(), *self._drawing.values()]
        for each in (self._tasks, self._drawing, self._taken):
            each.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _roll(self, step: int) -> Rolled:
        """Sample, grade and group one step. Groups of equal grades are sampled again, as often as the run allows."""
        drawn: list[Drawn] = []
        metrics, seconds, num_redrawn = dict[str, float](), dict[str, float](), 0
        groups: tuple[int, ...] | None = None
        while True:
            sampled, found, told, took = await self._draw(step, drawn, groups)
            drawn.append(found)
            metrics |= told
            seconds = {name: seconds.get(name, 0.0) + s for name, s in took.items()}
            request = rollout_requests.groups_request(self.start.run, drawn, step)
            grouped = await control.do(GroupSamples.group_samples, request)
            if not (groups := grouped.equal_groups):
                break
            num_redrawn += len(groups)
        if rollouts_of(self.start.run).redraws:
            metrics["redrawn_groups"] = float(num_redrawn)
        carried = None
        if self._carries_over:
            taken = self._taken[step]
            num_prompts = rollouts_of(self.start.run).prompts_per_step
            carried = self.carried.without({one.step: one.groups for one in taken}, num_prompts)
            metrics |= rollout_requests.admitted_metrics(self.start.run, step, taken, carried)
        return Rolled(grouped.groups_uri, sampled.samples.uri, grouped.metrics | metrics | seconds, carried)

    async def _draw(
        self, step: int, before: Sequence[Drawn], groups: tuple[int, ...] | None
    ) -> tuple[Sampled, Drawn, dict[str, float], dict[str, float]]:
        """Sample and grade. Only one step is sampled at a time; others may be graded at the same time.

        Also returns metrics, and seconds by name.

        Args:
            before: samples drawn earlier for this step. `groups`: those to draw now; None: all.
        """
        async with self._lock:
            began = workflow.time()
            if not self._carries_over:
                sampled, metrics = await self._sample(self._request(step, before, groups))
            elif groups is None:
                sampled, metrics = await self._admitted(step)
            else:
                sampled, metrics = await self._drawn_again(step, before, groups), {}
            sampling_s = workflow.time() - began
        self._grading.add(step)
        began = workflow.time()
        try:
            graded = await self._grade(sampled, self.data.prompts, rollouts_of(self.start.run).prompts)
        finally:
            self._grading.discard(step)
        seconds = {"sampling_seconds": sampling_s, "grading_seconds": workflow.time() - began}
        drawn = Drawn(completions=sampled.completions, grades=graded.grades)
        return sampled, drawn, metrics | sampled.metrics, seconds

    def _request(
        self, step: int, before: Sequence[Drawn] = (), groups: tuple[int, ...] | None = None
    ) -> Callable[[SamplerPlace], PolicySampleRequest]:
        """Return what makes the request for the samples of a step's prompts. `before`, `groups`: as of `_draw`."""
        return lambda place: rollout_requests.step_samples(
            self.start, self.model, self.data, self.policies, step, place, self.routes, before, groups
        )

    # --- Prompts that are carried over ---

    async def _draw_prompts(self, step: int) -> None:
        """Sample the prompts of a step, for this and later steps to take."""
        if (before := self._drawing.get(step - limits.MOST_DRAWN)) is not None:
            await workflow.wait_condition(before.done)
        await self._sample(self._request(step))

    async def _admitted(self, step: int) -> tuple[Sampled, dict[str, float]]:
        """Have it decided which prompts a step takes, of those that are left. Raises what sampling one of them raises.

        It is asked again if more of them begin in the meantime.
        """
        admitted = None
        while admitted is None:
            admitted = await self._admitted_of(step, tuple(self._drawing))
        self._taken[step] = admitted.taken
        many = {"samplers": float(len(self.sampling.grants))} if self.sampling.uses_many_samplers else {}
        return admitted, many

    async def _admitted_of(self, step: int, known: tuple[int, ...]) -> Admitted | None:
        left = (number for number in known if number >= self.carried.oldest)
        keys = {number: self._request(number)(self.sampling.any_place).key for number in left}
        request = rollout_requests.admit_request(self.start, self.data, step, keys, self.carried)
        asked = asyncio.create_task(self._admit(request))
        try:
            await workflow.wait_condition(lambda: asked.done() or known != tuple(self._drawing) or self._has_failed)
            for task in self._drawing.values():
                if task.done():
                    task.result()
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    @property
    def _has_failed(self) -> bool:
        ended = [task for task in self._drawing.values() if task.done()]
        return any(task.cancelled() or task.exception() is not None for task in ended)

    async def _admit(self, request: AdmitRequest) -> Admitted:
        return await control.do(AdmitGroups.admit_groups, request.model_copy(update={"routes": self.routes}))

    async def _drawn_again(self, step: int, before: Sequence[Drawn], groups: tuple[int, ...]) -> Sampled:
        """Sample some of the prompts that a step has taken once more, each from the policy of the first time."""
        taken = [(one.step, number) for one in self._taken[step] for number in one.groups]
        begun = []
        for of_step in sorted({taken[group][0] for group in groups}):
            numbers = tuple(number for place, number in (taken[group] for group in groups) if place == of_step)
            request = self._request(of_step, before, numbers)
            await self._sample(request)
            begun.append(BegunPrompts(step=of_step, key=request(self.sampling.any_place).key, groups=numbers))
        all_of = {"begun": tuple(begun), "num_groups": len(groups), "numbers": groups}
        request_of = AdmitRequest(run_id=self.start.run_id, step=step, prompts=self.data.prompts, **all_of)
        return await self._admit(request_of)

    async def evaluate(self, policy: Policy) -> dict[str, Any]:
        """Sample and grade the held-out prompts under a policy. Returns fields of a step's status, if there are any."""
        return rollout_requests.held_out_fields(await self.graded(policy))

    async def graded(self, policy: Policy) -> dict[str, tuple[Sampled, GradeSummary]]:
        """Sample and grade the held-out prompts under a policy. Returns what was found, by their names."""
        held_out = self.start.run.held_out
        sources = held_out.evaluations if held_out else {}
        sets = self.data.evaluations.items()
        return {name: await self._evaluated(policy, prompts, sources[name]) for name, prompts in sets}

    async def _evaluated(
        self, policy: Policy, prompts: Artifact, source: DatasetSource
    ) -> tuple[Sampled, GradeSummary]:
        sampled, _ = await self._sample(
            lambda place: rollout_requests.held_out_samples(
                self.start, self.model, prompts, self.policies, policy, place, source
            )
        )
        return sampled, (await self._grade(sampled, prompts, source)).summary

    async def beginning(self, run: ActiveRun, state: RLState) -> StepStatus | None:
        """Evaluate the policy before any training, and record that as step 0; None without held-out prompts."""
        run.show(phase="evaluating")
        told = await self.evaluate(self.policies[0])
        if not told:
            return None
        step = unchanged(state, StepStatus(step=0, key="rollouts-0", groups="", state="done", **told))
        await control.record(RunRecords.record_step, StepRecordRequest(run_id=self.start.run_id, step=step))
        run.show(metrics=step.metrics)
        return step

    async def end_step(self, run: ActiveRun, step: StepStatus, is_finishing: bool) -> StepStatus:
        """Add the policy that a step made, and evaluate it on held-out prompts if that is due."""
        if (before := self.policies[-1]).after_step < step.step:
            made_one = step.state == "done"
            self._add(policy_of(step) if made_one else before.model_copy(update={"after_step": step.step}))
        policy = self.policies[-1]
        is_last = step.step == self.data.num_steps or is_finishing
        if not rollout_requests.is_evaluated(self.start.run, step.step, is_last):
            return step
        run.show(phase="evaluating")
        began = workflow.time()
        told = await self.evaluate(policy)
        return with_evaluation(step, told, evaluating_seconds=workflow.time() - began)

    def _add(self, policy: Policy) -> None:
        kept = self.num_policies(self.start)
        if self._carries_over:
            oldest = min([self.carried.oldest, *(n for n, task in self._drawing.items() if not task.done())])
            kept = 1 + policy.after_step - rollout_requests.policy_before(self.start.run, oldest)
        self.policies = [*self.policies, policy][-kept:]

    async def prove_and_sample_next(self, step: StepStatus, logprobs: Sequence[float]) -> dict[str, float]:
        """Let samplers prove the policy that a step made, and begin to sample from it before it is published.

        If a sampler fails the proof and may have sampled from its wrong weights, all samples that are not yet trained
        on are drawn again. If the evaluation after this step may end the run, no sampling begins.
        """
        metrics = await self.prove(policy_of(step), logprobs)
        policy = policy_of(step.model_copy(update={"metrics": step.metrics | metrics}))
        if policy.num_refuted and self.sampling.samples_before_verification:
            await self._drop()
        self._add(policy)
        if not rollout_requests.may_end_with(self.start.run, step.step):
            self._begin(step.step + 1)
        return metrics

    def sync_target(self, version: int) -> SyncTarget | None:
        """Return where the trainer sends a version of the policy; None if samplers load it from the store."""
        return rollout_requests.sync_target(self.start, version, self.sampling.grants)

    async def prove(self, policy: Policy, logprobs: Sequence[float]) -> dict[str, float]:
        """Have the running samplers prove that they serve a policy. Those that start later do so before they sample."""
        self._proof, self._proved = (policy, tuple(logprobs)), set()
        proofs = [await self.sampling.do(SamplerActivities.prove_adapter, self._prove_request, self.model)]

        async def prove_too(grant: LeaseGrant, *_: int) -> None:
            proofs.extend(await self._prove_once(grant))

        await self.sampling.on_each(prove_too, self.model)
        return {
            "probe_difference_max": max(proved.max_difference for proved in proofs),
            "sync_used": float(all(proved.was_sent for proved in proofs)),
        } | self._faults()

    def _faults(self) -> dict[str, float]:
        """Return, as metrics, how many samplers failed a proof since the last call: recovered, and given up."""
        before, now = self._faults_told, (self.sampling.num_reloaded, self.sampling.num_mismatched)
        self._faults_told = now
        return {"sync_reloaded": float(now[0] - before[0]), "sync_given_up": float(now[1] - before[1])}

    async def _prove_once(self, grant: LeaseGrant) -> list[Proved]:
        """Have a sampler prove that it serves the policy of the last proof, if it has not been asked to."""
        epoch = grant.fence.epoch
        if epoch in self._proving:  # it may not have the policy
            await workflow.wait_condition(lambda: epoch not in self._proving)
        if self._proof is None or epoch in self._proved:
            return []
        self._proving.add(epoch)
        try:
            return [await self.sampling.ask(SamplerActivities.prove_adapter, self._prove_request, grant)]
        finally:
            self._proving.discard(epoch)

    def _prove_request(self, place: SamplerPlace) -> ProveRequest:
        assert self._proof is not None
        if isinstance(place, LeasedSampler):
            self._proved.add(place.fence.epoch)
        return rollout_requests.proof(self.start, self.data, self.policies, *self._proof, place)

    async def _sample(self, request: Callable[[SamplerPlace], PolicySampleRequest]) -> tuple[Sampled, dict[str, float]]:
        """Draw samples on all running samplers; after a loss again on all; then draw any missing ones on one sampler.

        Also returns, as a metric, how many samplers worked at once, if the run may have several.
        """
        num_samplers = 1

        async def draw(grant: LeaseGrant, number: int, count: int) -> None:
            nonlocal num_samplers
            await self._prove_once(grant)
            num_samplers = max(num_samplers, count)
            share = Share(number=number, count=count)
            activity = SamplerActivities.draw_share
            await self.sampling.ask(activity, lambda place: ShareRequest(**dict(request(place)), share=share), grant)

        for _ in range(self.start.timing.max_losses):
            if not await self.sampling.on_each(draw, self.model):
                break
        sampled = await self.sampling.do(SamplerActivities.sample, request, self.model, self._prove_once)
        return sampled, {"samplers": float(num_samplers)} if self.sampling.uses_many_samplers else {}

    async def _grade(self, sampled: Sampled, prompts: Artifact, source: Dataset) -> Graded:
        rewards = await scored(self.start, self.sampling, sampled.samples, prompts, source, self.data.rewards)
        request = GradeRequest(samples=sampled.samples, grader=rollouts_of(self.start.run).grader, rewards=rewards)
        return await control.do(Grade.grade, request)


class HeldOutEvaluations:
    """Evaluates the checkpoints of a run on a dataset on held-out prompts, as an RL run evaluates its policies.

    The run leases a sampler when it has given its worker back, and gives it back before it leases a worker again: it
    never holds one while it waits for the other.
    """

    def __init__(self, start: RunStart) -> None:
        self.start = rollout_requests.held_out_start(start)
        self.sampling = LeasedSamplers(self.start, lambda: None)
        self._watched = start.run.watched.intersection(
            start.run.rollouts.held_out.metric_names if start.run.rollouts else ()
        )
        self._source: RolloutSource | None = None
        self._initial: Artifact | None = None

    async def prepare(self, run: ShownRun, model: ResolvedModel, initial: Artifact | None, num_steps: int) -> None:
        """Try the grader, download and render the prompts, before any accelerator is asked for.

        Args:
            initial: the adapter that the run begins with.
        """
        if (message := rollout_requests.too_many_evaluations(self.start.run, num_steps)) is not None:
            raise RunFailed(Problem(kind="invalid_input", message=message))
        rewards = await _checked_grader(self.start, model)
        sources = rollout_requests.held_out_sources(self.start.run)
        # Rows that are evaluated by their loss are downloaded as `eval`.
        by_split = {split.replace("eval", "prompts", 1): source for split, source in sources.items()}
        rendered = await _render(run, self.start, model.model, by_split)
        for source, prompts in zip(sources.values(), rendered, strict=True):
            await _check_environment(self.start, model, source, prompts)
        data = rollout_requests.rollout_data(self.start.run, rendered[0], rendered)
        data = data.model_copy(update={"rewards": rewards})
        self._source = RolloutSource(self.start, model.model, data, [], self.sampling, None, CarriedOver())
        self._initial = initial

    @property
    def probe(self) -> tuple[int, ...]:
        """Token ids whose scores prove that a sampler has a checkpoint's weights."""
        return self._source.data.probe if self._source is not None else ()

    async def evaluate(
        self, step: int = 0, checkpoint: CheckpointRef | None = None, logprobs: Sequence[float] = ()
    ) -> HeldOutGrades:
        """Sample and grade the held-out prompts with the weights after a step.

        Args:
            checkpoint: the step's; that of step 0 is not read.
            logprobs: the trainer's, of the probe; none: samplers need not prove anything.

        Raises:
            RunFailed: no sample was graded, and the grades decide; or as `LeasedSamplers.do`.
        """
        assert self._source is not None
        saved = checkpoint.artifact if step and checkpoint is not None else None
        policy = Policy(after_step=step, version=step, adapter=None if saved else self._initial, checkpoint=saved)
        self._source.policies = [policy]
        try:
            if logprobs:
                await self._source.prove(policy, logprobs)
            found = await self._source.graded(policy)
        finally:
            self.sampling.release()
        told = rollout_requests.held_out_fields(found)
        if missing := self._watched - told["metrics"].keys():
            reasons = "; ".join(reason for _, summary in found.values() for reason in summary.reasons[:1])
            message = f"{min(missing)} decides, and no sample was graded after step {step}: {reasons}"
            raise RunFailed(Problem(kind="invalid_input", message=f"rollouts.grader: {message}"))
        return HeldOutGrades(step=step, **told)
