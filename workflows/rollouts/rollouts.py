"""A run's own rollouts: sample from the policy and grade, for the groups of train steps and held-out prompts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grading.grade import Grade, Graded, GradeRequest
    from activities.records.run_records import RunRecords, StepRecordRequest, policy_of
    from activities.sampling.sample import Sampled, SamplerActivities, SampleRequest
    from activities.sources.download import Download, DownloadRequest
    from activities.tokenizing.render_prompts import Prompts, RenderPrompts
    from activities.trajectories.group_samples import GroupSamples
    from shared.contract import Artifact
    from shared.jobs.weight_sync import SyncTarget
    from shared.runs.serving import SamplerPlace
    from shared.runs.sources import DatasetSource
    from shared.runs.start import RLStart
    from shared.runs.status import Phase, Policy, RLState, RolloutData, StepStatus
    from workflows import control
    from workflows.rollouts import requests as rollout_requests
    from workflows.rollouts.requests import rollouts_of
    from workflows.rollouts.sampling import Sampling
    from workflows.training.run import ActiveRun
    from workflows.training.train_step import unchanged


@dataclass(frozen=True)
class Rolled:
    """The URI of a step's trajectory groups, and metrics such as the seconds that sampling and grading took."""

    groups_uri: str
    metrics: dict[str, float]


async def prepare(start: RLStart, model: Artifact) -> RolloutData:
    """Try the grader, download and render the prompts, before any accelerator is asked for."""
    rollouts = rollouts_of(start.run)
    await control.do(Grade.check_grader, rollouts.grader)
    prompts = await _render(start, model, "train", rollouts.prompts)
    held_out = await _render(start, model, "eval", rollouts.held_out.prompts) if rollouts.held_out else None
    return rollout_requests.rollout_data(start.run, prompts, held_out)


async def _render(start: RLStart, model: Artifact, split: Literal["train", "eval"], source: DatasetSource) -> Prompts:
    download = DownloadRequest(run_id=start.run_id, tenant=start.tenant, split=split, source=source)
    dataset = (await control.do(Download.download, download)).dataset
    request = rollout_requests.prompts_request(start.run, source, dataset, model)
    return await control.do(RenderPrompts.render_prompts, request)


@dataclass
class RolloutSource:
    """Makes the trajectory groups of train steps, up to `off_policy_steps` ahead of the step that is trained.

    Each step is sampled from the policy of `policy_of_step`. `policies` are the last ones, which steps to come may be
    sampled from; `end_step` adds one.
    """

    start: RLStart
    model: Artifact
    data: RolloutData
    policies: list[Policy]
    sampling: Sampling
    _tasks: dict[int, asyncio.Task[Rolled]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _grading: set[int] = field(default_factory=set)

    async def groups(self, step: int) -> Rolled:
        """Return the groups of a step, counted from 1, and start making those of the steps ahead."""
        ahead = rollouts_of(self.start.run).off_policy_steps
        for number in range(step, min(step + ahead, self.data.num_steps) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._roll(number))
        try:
            return await self._tasks[step]
        finally:
            self._tasks.pop(step, None)

    def phase(self, step: int) -> Phase:
        """Return the phase of a step whose groups are being made."""
        if step in self._grading:
            return "grading"
        return "sampling" if self.sampling.is_up else "waiting_for_sampler"

    @staticmethod
    def num_policies(start: RLStart) -> int:
        """Return how many of the last policies are needed, as steps to come are sampled from them."""
        rollouts = start.run.rollouts
        return 1 + (rollouts.off_policy_steps if rollouts else 0)

    async def stop(self) -> None:
        """Cancel rollouts under way and give the sampler back. Finished samples are in the store, and are reused."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.sampling.leasing.release()

    async def _roll(self, step: int) -> Rolled:
        """Sample, grade and group one step. Only one step is sampled at a time; others may be graded meanwhile."""
        async with self._lock:
            began = workflow.time()
            sampled = await self._sample(
                lambda place: rollout_requests.step_samples(
                    self.start, self.model, self.data.prompts, self.policies, step, place
                )
            )
            sampling_s = workflow.time() - began
        self._grading.add(step)
        began = workflow.time()
        try:
            graded = await self._grade(sampled)
        finally:
            self._grading.discard(step)
        request = rollout_requests.groups_request(self.start.run, sampled.completions, graded.grades, step)
        grouped = await control.do(GroupSamples.group_samples, request)
        seconds = {"sampling_seconds": sampling_s, "grading_seconds": workflow.time() - began}
        return Rolled(grouped.groups_uri, grouped.metrics | seconds)

    async def evaluate(self, policy: Policy) -> dict[str, float]:
        """Sample and grade the held-out prompts under a policy; no metrics where the run has none."""
        held_out = self.data.held_out
        if held_out is None:
            return {}
        sampled = await self._sample(
            lambda place: rollout_requests.held_out_samples(
                self.start, self.model, held_out, self.policies, policy, place
            )
        )
        return rollout_requests.held_out_metrics(sampled, (await self._grade(sampled)).summary)

    async def beginning(self, run: ActiveRun, state: RLState) -> StepStatus | None:
        """Evaluate the policy before any training, and record that as step 0; None without held-out prompts."""
        run.show(phase="evaluating")
        metrics = await self.evaluate(self.policies[0])
        if not metrics:
            return None
        step = unchanged(state, StepStatus(step=0, key="rollouts-0", groups="", state="done", metrics=metrics))
        await control.record(RunRecords.record_step, StepRecordRequest(run_id=self.start.run_id, step=step))
        run.show(metrics=metrics)
        return step

    async def end_step(self, run: ActiveRun, step: StepStatus, is_finishing: bool) -> StepStatus:
        """Add the policy that a step left, and evaluate it on held-out prompts where that is due."""
        before = self.policies[-1]
        policy = policy_of(step) if step.state == "done" else before.model_copy(update={"after_step": step.step})
        self.policies = [*self.policies, policy][-self.num_policies(self.start) :]
        is_last = step.step == self.data.num_steps or is_finishing
        if not rollout_requests.is_evaluated(self.start.run, step.step, is_last):
            return step
        run.show(phase="evaluating")
        began = workflow.time()
        metrics = await self.evaluate(policy)
        seconds = {"evaluating_seconds": workflow.time() - began}
        return step.model_copy(update={"metrics": step.metrics | metrics | seconds})

    def sync_target(self, version: int) -> SyncTarget | None:
        """Return where the trainer sends a version of the policy; None where samplers load it from the store."""
        return rollout_requests.sync_target(self.start, version, self.sampling.leasing.grant)

    async def prove(self, policy: Policy, logprobs: Sequence[float]) -> dict[str, float]:
        """Let the sampler prove that it serves a policy."""
        proved = await self.sampling.do(
            SamplerActivities.prove_adapter,
            lambda place: rollout_requests.proof(self.start, self.data, self.policies, policy, logprobs, place),
            self.model,
        )
        return {"probe_difference_max": proved.max_difference, "sync_used": float(proved.was_sent)}

    async def _sample(self, request: Callable[[SamplerPlace], SampleRequest]) -> Sampled:
        return await self.sampling.do(SamplerActivities.sample, request, self.model)

    async def _grade(self, sampled: Sampled) -> Graded:
        request = GradeRequest(samples=sampled.samples, grader=rollouts_of(self.start.run).grader)
        return await control.do(Grade.grade, request)
