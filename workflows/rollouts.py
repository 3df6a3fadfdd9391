"""A run's own rollouts: what a step trains on is sampled from the policy and graded here; so are held-out prompts."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.download import Downloaded, DownloadRequest
    from activities.grade import Graded, GradeRequest
    from activities.group_samples import Grouped, GroupSamplesRequest
    from activities.prove_adapter import Proved, ProveRequest
    from activities.render_prompts import Prompts, PromptsRequest
    from activities.sample import Sampled, SampleRequest
    from activities.sampled_groups import Rows
    from activities.samplers import SamplerPlace
    from shared.completions import Sampling as Draw
    from shared.jobs import Artifact
    from shared.paths import content_key
    from shared.runs import DatasetSource, Phase, Policy, RLStart, RolloutData, Rollouts
    from workflows import control, policies
    from workflows.sampling import Sampling


@dataclass(frozen=True)
class Rolled:
    """A step's groups, as a client would have sent them, and how long it took to make them."""

    groups_uri: str
    metrics: dict[str, float]


async def prepare(start: RLStart, model: Artifact) -> RolloutData:
    """Prompts brought and rendered, and the grader tried, before any accelerator is asked for."""
    rollouts = start.run.rollouts
    assert rollouts is not None
    await control.check("check_grader", rollouts.grader)
    prompts = await _render(start, model, "train", rollouts.prompts)
    held_out = await _render(start, model, "eval", rollouts.held_out.prompts) if rollouts.held_out else None
    num_steps = rollouts.steps
    if num_steps is None:
        assert rollouts.epochs is not None
        num_steps = max(1, math.floor(rollouts.epochs * prompts.num_prompts / rollouts.prompts_per_step))
    return RolloutData(
        prompts=prompts.prompts,
        num_steps=num_steps,
        probe=prompts.probe,
        held_out=held_out.prompts if held_out else None,
        num_held_out=held_out.num_prompts if held_out else 0,
    )


async def _render(start: RLStart, model: Artifact, split: Literal["train", "eval"], source: DatasetSource) -> Prompts:
    run, rollouts = start.run, start.run.rollouts
    assert rollouts is not None
    download = DownloadRequest(run_id=start.run_id, split=split, source=source)
    request = PromptsRequest(
        dataset=(await control.do("download", download, Downloaded)).dataset,
        source=source,
        model=model,
        max_prompt_tokens=run.max_tokens - rollouts.max_completion_tokens,
        max_lost_fraction=rollouts.max_lost_fraction,
    )
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
        ahead = self._rollouts.off_policy_steps
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

    @property
    def _rollouts(self) -> Rollouts:
        rollouts = self.start.run.rollouts
        assert rollouts is not None
        return rollouts

    def _policy_for(self, step: int) -> Policy:
        """Counted from 1, step t is sampled from the policy after step max(0, t - 1 - off_policy_steps)."""
        after = max(0, step - 1 - self._rollouts.off_policy_steps)
        return next(policy for policy in self.policies if policy.after_step == after)

    async def _roll(self, step: int) -> Rolled:
        """Sample, grade, group. One step is sampled at a time; what comes after goes on beside the next one."""
        rollouts, run = self._rollouts, self.start.run
        policy = self._policy_for(step)
        rows = Rows(first=(step - 1) * rollouts.prompts_per_step, count=rollouts.prompts_per_step, seed=run.seed)
        async with self._turn:
            began = workflow.time()
            sampled = await self._sample(policy, self.data.prompts, rows, rollouts.group_size, run.temperature, step)
            sampling_s = workflow.time() - began
        self._grading.add(step)
        began = workflow.time()
        try:
            graded = await self._grade(sampled)
        finally:
            self._grading.discard(step)
        request = GroupSamplesRequest(
            completions=sampled.completions,
            grades=graded.grades,
            shuffle_seed=_seed(run.seed, "rewards", step) if rollouts.shuffle_rewards else None,
            max_ungraded_fraction=rollouts.max_ungraded_fraction,
        )
        grouped = await control.do("group_samples", request, Grouped)
        seconds = {"sampling_seconds": sampling_s, "grading_seconds": workflow.time() - began}
        return Rolled(grouped.groups_uri, grouped.metrics | seconds)

    async def evaluate(self, policy: Policy) -> dict[str, float]:
        """Grades of the held-out prompts under a policy; nothing where the run has none."""
        held_out = self._rollouts.held_out
        if held_out is None or self.data.held_out is None:
            return {}
        sampled = await self._sample(
            policy, self.data.held_out, Rows(), held_out.samples_per_prompt, held_out.temperature, 0
        )
        graded = (await self._grade(sampled)).summary
        metrics = {
            "eval_samples": float(graded.num_samples),
            "eval_ungraded": float(graded.num_failed),
            "eval_truncation_rate": sampled.num_cut_off / sampled.num_samples,
            "eval_response_tokens_mean": sampled.num_tokens / sampled.num_samples,
        }
        if graded.mean is not None and graded.std is not None:
            metrics |= {"eval_reward_mean": graded.mean, "eval_reward_std": graded.std}
        return metrics

    async def prove(self, policy: Policy, logprobs: Sequence[float]) -> dict[str, float]:
        """Let the sampler prove that it serves a policy: its log-probabilities of the probe are the trainer's."""
        adapter, bound = policy.adapter, self._rollouts.probe_bound or policies.PROBE_BOUND[self.start.run.dtype]
        assert adapter is not None

        def request(place: SamplerPlace) -> ProveRequest:
            return ProveRequest(
                run_id=self.start.run_id,
                adapter=adapter,
                probe=self.data.probe,
                logprobs=tuple(logprobs),
                bound=bound,
                place=place,
                keep=self._kept,
            )

        proved = await self.sampling.do("prove_adapter", request, Proved, self.model)
        return {"probe_difference_max": proved.max_difference}

    @property
    def _kept(self) -> tuple[Artifact, ...]:
        return tuple(policy.adapter for policy in self.policies if policy.adapter is not None)

    async def _sample(
        self, policy: Policy, prompts: Artifact, rows: Rows, group_size: int, temperature: float, step: int
    ) -> Sampled:
        run, rollouts = self.start.run, self._rollouts

        def request(place: SamplerPlace) -> SampleRequest:
            return SampleRequest(
                run_id=self.start.run_id,
                model=self.model,
                dtype=run.dtype,
                prompts=prompts,
                rows=rows,
                group_size=group_size,
                sampling=Draw(temperature=temperature, max_tokens=rollouts.max_completion_tokens, stop=rollouts.stop),
                seed=_seed(run.seed, "samples", step),
                adapter=policy.adapter,
                policy_version=policy.version,
                keep=self._kept,
                place=place,
            )

        return await self.sampling.do("sample", request, Sampled, self.model)

    async def _grade(self, sampled: Sampled) -> Graded:
        return await control.do("grade", GradeRequest(samples=sampled.samples, grader=self._rollouts.grader), Graded)


def _seed(seed: int, what: str, step: int) -> int:
    """Of one step, and of one use of chance in it: 62 bits."""
    return int(content_key("rollouts-1", str(seed), what, str(step))[:16], 16) >> 2
