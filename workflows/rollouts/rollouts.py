"""A run's own rollouts: what a step trains on is sampled from the policy and graded here; so are held-out prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.grading.grade import Graded, GradeRequest
    from activities.sampling.prove_adapter import Proved
    from activities.sampling.sample import Sampled
    from activities.sources.download import Downloaded, DownloadRequest
    from activities.tokenizing.render_prompts import Prompts
    from activities.trajectories.group_samples import Grouped
    from shared.contract import Artifact
    from shared.runs.requests import DatasetSource
    from shared.runs.start import RLStart
    from shared.runs.status import Phase, Policy, RolloutData
    from workflows import control
    from workflows.rollouts import requests as rollout_requests
    from workflows.rollouts.requests import rollouts_of
    from workflows.rollouts.sampling import RequestAt, Sampling


@dataclass(frozen=True)
class Rolled:
    """A step's groups, as a client would have sent them, and how long it took to make them."""

    groups_uri: str
    metrics: dict[str, float]


async def prepare(start: RLStart, model: Artifact) -> RolloutData:
    """Prompts brought and rendered, and the grader tried, before any accelerator is asked for."""
    rollouts = rollouts_of(start.run)
    await control.check("check_grader", rollouts.grader)
    prompts = await _render(start, model, "train", rollouts.prompts)
    held_out = await _render(start, model, "eval", rollouts.held_out.prompts) if rollouts.held_out else None
    return rollout_requests.rollout_data(start.run, prompts, held_out)


async def _render(start: RLStart, model: Artifact, split: Literal["train", "eval"], source: DatasetSource) -> Prompts:
    download = DownloadRequest(run_id=start.run_id, tenant=start.tenant, split=split, source=source)
    dataset = (await control.do("download", download, Downloaded)).dataset
    request = rollout_requests.prompts_request(start.run, source, dataset, model)
    return await control.do("render_prompts", request, Prompts)


@dataclass
class RolloutSource:
    """Makes the groups of steps, a few ahead where the run allows it, always from the policy that the rule names.

    `policies` are those that steps to come may be sampled from; the run adds one with every step.
    """

    start: RLStart
    model: Artifact
    data: RolloutData
    policies: list[Policy]
    sampling: Sampling
    _tasks: dict[int, asyncio.Task[Rolled]] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _grading: set[int] = field(default_factory=set)

    async def groups(self, step: int) -> Rolled:
        """The groups of a step, counted from 1, when those before it are done. Steps ahead are begun beside it."""
        ahead = rollouts_of(self.start.run).off_policy_steps
        for number in range(step, min(step + ahead, self.data.num_steps) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._roll(number))
        try:
            return await self._tasks[step]
        finally:
            self._tasks.pop(step, None)

    def phase(self, step: int) -> Phase:
        """What the making of a step's groups waits for."""
        if step in self._grading:
            return "grading"
        return "sampling" if self.sampling.is_up else "waiting_for_sampler"

    def add(self, policy: Policy) -> None:
        """The policy as a step left it."""
        self.policies = [*self.policies, policy][-self.num_policies(self.start) :]

    @staticmethod
    def num_policies(start: RLStart) -> int:
        """How many of the last policies steps to come are sampled from."""
        rollouts = start.run.rollouts
        return 1 + (rollouts.off_policy_steps if rollouts else 0)

    async def stop(self) -> None:
        """Leave what is under way. What was drawn of it stands in the store, and is found again."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.sampling.release()

    async def _roll(self, step: int) -> Rolled:
        """Sample, grade, group. One step is sampled at a time; what comes after goes on beside the next one."""
        async with self._turn:
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
        grouped = await control.do("group_samples", request, Grouped)
        seconds = {"sampling_seconds": sampling_s, "grading_seconds": workflow.time() - began}
        return Rolled(grouped.groups_uri, grouped.metrics | seconds)

    async def evaluate(self, policy: Policy) -> dict[str, float]:
        """Grades of the held-out prompts under a policy; nothing where the run has none."""
        held_out = self.data.held_out
        if held_out is None:
            return {}
        sampled = await self._sample(
            lambda place: rollout_requests.held_out_samples(
                self.start, self.model, held_out, self.policies, policy, place
            )
        )
        return rollout_requests.held_out_metrics(sampled, (await self._grade(sampled)).summary)

    async def prove(self, policy: Policy, logprobs: Sequence[float]) -> dict[str, float]:
        """Let the sampler prove that it serves a policy."""
        proved = await self.sampling.do(
            "prove_adapter",
            lambda place: rollout_requests.proof(self.start, self.data, self.policies, policy, logprobs, place),
            Proved,
            self.model,
        )
        return {"probe_difference_max": proved.max_difference}

    async def _sample(self, request: RequestAt) -> Sampled:
        return await self.sampling.do("sample", request, Sampled, self.model)

    async def _grade(self, sampled: Sampled) -> Graded:
        return await control.do(
            "grade", GradeRequest(samples=sampled.samples, grader=rollouts_of(self.start.run).grader), Graded
        )
