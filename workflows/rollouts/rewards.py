"""The reward models of a run's grader: found and checked before any lease, and run on a sampler of their base model."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.models.resolve import Resolve
    from activities.sampling.score import ScoreSamples, ScoreSamplesRequest
    from longshore.fields import Artifact
    from shared.errors import InvalidInput
    from shared.grading.graders import chosen_scalar, reward_graders
    from shared.runs.models import ModelRequest, ResolvedModel
    from shared.runs.requests import dtype_of
    from shared.runs.sources import DatasetSource
    from shared.runs.start import RLStart
    from shared.runs.status import Problem, RewardModel
    from shared.serving import SamplerPlace
    from workflows import control
    from workflows.outcomes import RunFailed
    from workflows.rollouts.requests import rollouts_of
    from workflows.rollouts.sampling import LeasedSamplers
    from workflows.training import models


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
            asked = ModelRequest(uri=grader.base, any_family=True, tenant=start.tenant)
            base = await control.do(Resolve.resolve_model, asked)
        of_grader = {"role": "reward_model", "model": grader.base or start.run.model}
        request = models.adapter_request(start, grader.model, base, **of_grader)
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
    source: DatasetSource,
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
