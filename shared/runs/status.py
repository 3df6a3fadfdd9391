"""The status of runs and of train steps, while they go on and when they have ended."""

from typing import Annotated, Literal

from pydantic import Field

from longshore.fields import Artifact, Frozen, Reason, Sha256, added
from longshore.training import ScalarHead
from shared.fence import Fence
from shared.models.shape import ModelShape
from shared.runs.requests import Kind, RunId

Phase = Literal[
    "queued",
    "checking",
    "downloading",
    "tokenizing",
    "waiting_for_groups",
    "waiting_for_commands",
    "waiting_for_sampler",
    "evaluating",
    "sampling",
    "grading",
    "packing",
    "waiting_for_worker",
    "training",
    "publishing",
    "done",
]


# Paused: ended at a step boundary with a checkpoint, until somebody resumes it.
State = Literal["running", "paused", "succeeded", "failed", "cancelled"]


class CheckpointRef(Frozen):
    """A checkpoint in the store."""

    step: int
    fence: Fence
    artifact: Artifact


class Problem(Frozen):
    """The reason why a run failed, in words for its user."""

    kind: str
    message: Reason


STATUS_MEMO = "status"  # of a run's workflow: its RunStatus without metrics and timeline


class PhaseSpan(Frozen):
    """The time that a run was in a phase, in seconds since 1970. `lease`: the number of the lease that it had then."""

    phase: Phase
    began: float
    ended: float | None = None
    lease: int = 0


class RunStatus(Frozen):
    """A run's status: the answer of the workflow's `status` query, and the contents of `result.json` afterwards."""

    run_id: RunId
    kind: Kind = "sft"
    state: State = "running"
    phase: Phase = "queued"
    step: int = 0
    num_steps: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    epoch: int = Field(default=0, description="leases so far: the number of the newest")
    workers_lost: int = Field(default=0, description="leases that ended in a loss: not by a pause or a host's shutdown")
    checkpoint: CheckpointRef | None = None
    adapter: str | None = Field(default=None, description="URI of what was published: adapter, or model after `full`")
    adapter_sha256: str | None = Field(default=None, description="SHA-256 of its manifest")
    name: str | None = None
    version: int | None = None
    policy_version: int | None = Field(default=None, description="of an RL run: train steps that changed the policy")
    dataset_report: str | None = Field(default=None, description="URI of the tokenizing report")
    planned_tokens: int | None = Field(
        default=None, description="of the examples of all steps, once they are packed; not of RL runs"
    )
    problem: Problem | None = None
    skipped_steps: int = Field(default=0, description="of an RL run: train steps with nothing to learn from")
    failed_steps: int = added(0, description="of an RL run: train steps that could not be trained")
    equal_reward_steps: int = added(0, description="of an RL run: trained steps whose rewards were all the same")
    zero_gradient_steps: int = added(0, description="of an RL run: trained steps whose gradient was 0 throughout")
    notices: tuple[Reason, ...] = Field(default=(), description="what its user should know of it, whatever comes of it")
    started_at: float | None = Field(default=None, description="the first time, also of a run that was resumed")
    ended_at: float | None = None
    estimated_end: float | None = Field(
        default=None, description="when its last step is done at the pace of those so far; None while nobody can say"
    )
    timeline: tuple[PhaseSpan, ...] = Field(default=(), description="its last phases, oldest first")
    paused_by: str | None = Field(
        default=None, description="the limit that pauses it, in words: it goes on by itself when that is raised"
    )
    client_away: bool = added(
        False, description="it is paused since its client sent nothing: the client's next command or step resumes it"
    )
    gpu_seconds: float = Field(default=0.0, description="seconds that workers were leased, times their ranks")


STEP_COUNTS = ("skipped_steps", "failed_steps", "equal_reward_steps", "zero_gradient_steps")  # in a RunStatus
StepKey = Annotated[str, Field(min_length=1, max_length=256)]


class StepRequest(Frozen):
    """Train one file of trajectory groups. The same key trains once, however often it is sent."""

    key: StepKey
    groups: str = Field(min_length=1, max_length=2048, description="URI of JSONL, gzip or zstd if you like")
    wait: bool = Field(default=False, description="answer when the step is durable; else at once")


class StepStatus(Frozen):
    """The status of a train step. `done`: its checkpoint is durable, and a later step trains on from it.

    `adapter`, `name` and `version`: what was published of it, if anything (`publish_every`).

    `skipped`: there was nothing to learn from; `failed`: it could not be trained. Both leave the policy as it was.
    """

    step: int = Field(
        description="in order of arrival, from 1; 0 is the policy before the first, where it is evaluated"
    )
    key: StepKey
    groups: str
    state: Literal["queued", "running", "done", "skipped", "failed"] = "queued"
    policy_version: int | None = Field(default=None, description="the version that it made, or left as it was")
    optimizer_step: int | None = Field(default=None, description="of the run, after it")
    adapter: str | None = None
    adapter_sha256: str | None = None
    synced: Sha256 | None = Field(default=None, description="digest of the weights that samplers were sent")
    name: str | None = None
    version: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    checkpoint: CheckpointRef | None = None
    problem: Problem | None = None
    same_as: int | None = Field(default=None, description="the step that trained this key before")

    @property
    def is_final(self) -> bool:
        return self.state not in ("queued", "running")


class Policy(Frozen):
    """The policy as a step left it: `adapter` is what was published of it, None where nothing was yet.

    After a step with full weights it is the whole model. `checkpoint`: the step's, by which samplers know the policy.
    `synced`: the digest of what samplers were sent. `num_refuted`: samplers that failed its proof.
    """

    after_step: int
    version: int
    adapter: Artifact | None
    checkpoint: Artifact | None = None
    synced: Sha256 | None = None
    num_refuted: int = 0


class RewardModel(Frozen):
    """A reward model that grades, as found at the run's beginning: its adapter, and the model that this is on.

    `scorer`: as its graders say. `is_beside`: it is scored on a sampler of its own, and not on the policy's.
    """

    scorer: str
    model: Artifact
    adapter: Artifact
    head: ScalarHead
    is_beside: bool


class RolloutData(Frozen):
    """The rendered prompts of a run's own rollouts, as found at the run's beginning.

    `probe`: token ids by which a sampler proves after each publish that it serves the new adapter.
    """

    prompts: Artifact
    num_steps: int
    probe: tuple[int, ...]
    held_out: Artifact | None = None
    rewards: tuple[RewardModel, ...] = ()


class RLState(Frozen):
    """The state that an RL run's workflow passes to its next execution, whose history starts empty."""

    next_step: int = 1
    policy_version: int = 0
    optimizer_step: int = 0
    checkpoint: CheckpointRef | None = None
    model: Artifact
    shape: ModelShape
    adapter: Artifact | None = None
    reference: Artifact | None = Field(default=None, description="what the URI of the loss's KL reference stands for")
    steps: tuple[StepStatus, ...] = Field(default=(), description="those that wait, and the last ones that ended")
    finishing: bool = False
    epoch: int = 0
    avoid: tuple[str, ...] = Field(default=(), description="queues of hosts that lost a worker at its start")
    avoid_for_samplers: tuple[str, ...] = Field(default=(), description="those that lost a sampler so")
    status: RunStatus
    rollouts: RolloutData | None = None
    unpublished: StepStatus | None = Field(default=None, description="the last step, if nothing was published of it")
    policies: tuple[Policy, ...] = Field(default=(), description="that rollouts to come are sampled from, oldest first")
