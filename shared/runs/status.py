"""The status of runs and of train steps, during and after them."""

from pydantic import Field

from longshore.fields import Artifact, Frozen, Sha256, added
from longshore.training import Evaluations, ScalarHead, Watched
from longshore.views import CarriedOver, CheckpointRef, RunStatus, SourceShare, StepKey, StepStatus
from shared.models.shape import ModelShape


class RunChange(Frozen):
    """A status that a run's workflow records in the database, and the time of that by Temporal's clock."""

    status: RunStatus
    at: float


STEP_COUNTS = ("skipped_steps", "failed_steps", "equal_reward_steps", "zero_gradient_steps")  # in a RunStatus


class StepRequest(Frozen):
    """Train one file of trajectory groups. The same key trains once, however often it is sent."""

    key: StepKey
    groups: str = Field(min_length=1, max_length=2048, description="URI of JSONL, optionally gzip or zstd")
    wait: bool = Field(default=False, description="answer when the step is durable, instead of at once")


class Policy(Frozen):
    """The policy after a step. `adapter`: its published adapter, or whole model for full weights; None: not published.

    `checkpoint`: the step's; samplers identify the policy by it. `synced`: digest of the weights sent to samplers.
    `num_refuted`: samplers that failed its proof.
    """

    after_step: int
    version: int
    adapter: Artifact | None
    checkpoint: Artifact | None = None
    synced: Sha256 | None = None
    num_refuted: int = 0


class RewardModel(Frozen):
    """A reward model that grades, as found at the run's beginning: its adapter, and the adapter's base model.

    `scorer`: its name in the graders. `is_beside`: it runs on its own sampler, not on the policy's.
    """

    scorer: str
    model: Artifact
    adapter: Artifact
    head: ScalarHead
    is_beside: bool


class RolloutData(Frozen):
    """The rendered prompts of a run's own rollouts, as found at the run's beginning.

    `probe`: token ids that a sampler scores after each publish, to prove that it serves the new adapter.
    """

    prompts: Artifact
    num_steps: int
    probe: tuple[int, ...]
    held_out: Artifact | None = None
    rewards: tuple[RewardModel, ...] = ()
    sources: tuple[SourceShare, ...] = added((), description="of a mixture: its prompts are those of each, in order")
    held_out_sets: dict[str, Artifact] = added({}, description="held-out prompts by name, instead of held_out")

    @property
    def evaluations(self) -> dict[str, Artifact]:
        """The held-out prompts by name, as those of `HeldOut`."""
        return {"": self.held_out} if self.held_out is not None else self.held_out_sets


class Evaluated(Frozen):
    """What an RL run's evaluations have come to. `known`: those that later decisions need. `best`: the step of the best
    one, if the best is kept.
    """

    known: Evaluations = Field(default_factory=dict)
    best: StepStatus | None = None

    def after(self, step: StepStatus, watched: Watched | None) -> "Evaluated":
        """Take a step that may have been evaluated. One that was not trained has the policy of the step before."""
        is_new = step.state == "done" and step.same_as is None and step.step > 0
        if watched is None or not watched.watched or not is_new or not watched.watched <= step.metrics.keys():
            return self
        known = watched.with_evaluation(self.known, step.step, step.metrics)
        return Evaluated(known=known, best=step if watched.best(known) == step.step else self.best)


class RLState(Frozen):
    """The state that an RL run's workflow passes to its next execution, whose history starts empty."""

    next_step: int = 1
    policy_version: int = 0
    optimizer_step: int = 0
    checkpoint: CheckpointRef | None = None
    critic_checkpoint: CheckpointRef | None = added(None, description="the critic's, if it has its own worker")
    model: Artifact
    shape: ModelShape
    adapter: Artifact | None = None
    reference: Artifact | None = Field(default=None, description="the artifact of the loss's KL reference")
    steps: tuple[StepStatus, ...] = Field(
        default=(), description="steps that are waiting, and the last ones that ended"
    )
    finishing: bool = False
    epoch: int = 0
    status: RunStatus
    rollouts: RolloutData | None = None
    unpublished: StepStatus | None = Field(default=None, description="the last step, if it was not published")
    policies: tuple[Policy, ...] = Field(
        default=(), description="the adapters that later rollouts sample from, oldest first"
    )
    evaluated: Evaluated = Evaluated()
    carried: CarriedOver = added(CarriedOver(), description="the prompts that the last step left, with carry_over")
