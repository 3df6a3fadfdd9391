"""The reward models of a run's grader: found and checked before any lease, and asked on a sampler of their model."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.models.resolve import AdapterRequest, Resolve
    from activities.sampling.sample import Sampled
    from activities.sampling.score import ScoreSamples, ScoreSamplesRequest
    from longshore.fields import Artifact
    from shared.errors import InvalidInput
    from shared.grading.graders import chosen_scalar, reward_graders
    from shared.models.shape import ModelShape
    from shared.runs.models import ModelRequest
    from shared.runs.requests import dtype_of
    from shared.runs.sources import DatasetSource
    from shared.runs.start import RLStart
    from shared.runs.status import Problem, RewardModel
    from workflows import control
    from workflows.outcomes import RunFailed
    from workflows.rollouts.requests import rollouts_of
    from workflows.rollouts.sampling import LeasedSamplers


async def find_rewards(start: RLStart, model: Artifact, shape: ModelShape) -> tuple[RewardModel, ...]:
    """Find the reward models that grade, each once, and the models that they are on.

    Args:
        model: the policy's, and its shape.

    Raises:
        RunFailed: a grader asks for a scalar that its reward model does not give.
    """
    found: dict[str, RewardModel] = {}
    for place, grader in reward_graders(rollouts_of(start.run).grader).items():
        base, base_shape = model, shape
        if grader.base is not None:
            asked = ModelRequest(tenant=start.tenant, uri=grader.base, any_family=True)
            resolved = await control.do(Resolve.resolve_model, asked)
            base, base_shape = resolved.model, resolved.shape
        request = AdapterRequest(
            run_id=start.run_id, tenant=start.tenant, role="reward_model", uri=grader.model, shape=base_shape
        )
        adapter = await control.do(Resolve.resolve_adapter, request)
        assert adapter.lora.head is not None  # the activity has refused what has none
        try:
            chosen_scalar(grader, adapter.lora.head.names, f"rollouts.{place}")
        except InvalidInput as error:
            raise RunFailed(Problem(kind="invalid_input", message=str(error))) from error
        found[grader.model] = RewardModel(
            grader=grader.model,
            model=base,
            adapter=adapter.adapter,
            head=adapter.lora.head,
            is_on_policys=base.sha256 == model.sha256,
        )
    return tuple(found.values())


async def scored(
    start: RLStart,
    sampling: LeasedSamplers,
    sampled: Sampled,
    prompts: Artifact,
    source: DatasetSource,
    rewards: tuple[RewardModel, ...],
) -> dict[str, Artifact]:
    """Score samples by each reward model: on the policy's sampler where that holds its model, else on its own.

    Returns what `GradeRequest.rewards` takes. Raises as `LeasedSamplers.do` does.

    Args:
        prompts, source: what the samples answer, and how those rows are read.
    """
    found = {}
    for reward in rewards:
        asked = sampling.beside(reward.model) if not is_shared(start, reward) else sampling
        found[reward.grader] = await asked.do(
            ScoreSamples.score_samples,
            lambda place, reward=reward: ScoreSamplesRequest(  # type: ignore[misc]
                run_id=start.run_id,
                samples=sampled.samples,
                source=source,
                prompts=prompts,
                reward=reward,
                dtype=dtype_of(start.run),
                place=place,
            ),
            reward.model,
        )
    return found


def is_shared(start: RLStart, reward: RewardModel) -> bool:
    """Return True if the policy's sampler scores, too: one of our own, whose base stays what it is."""
    keeps_base = start.run.trainable.kind == "lora" and rollouts_of(start.run).sampler == "own"
    return reward.is_on_policys and keeps_base
