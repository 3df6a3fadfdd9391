"""The status of runs and of train steps, during and after them."""

from typing import Annotated, Literal

from pydantic import Field

from longshore.fields import Artifact, Frozen, Sha256
from longshore.training import ScalarHead
from shared.field_rules import Reason
from shared.models.shape import ModelShape
from shared.runs.requests import Kind, RunId
from shared.storage.paths import Fence

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


STATUS_MEMO = "status"  # the memo of a run's workflow: its RunStatus without metrics and timeline


class PhaseSpan(Frozen):
    """The time that a run was in a phase, in seconds since 1970. `lease`: the number of its lease at that time."""

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
    epoch: int = Field(default=0, description="number of leases so far")
    workers_lost: int = Field(
        default=0,
        description="leases that ended because the host or worker was lost, not by a pause or a host's shutdown",
    )
    checkpoint: CheckpointRef | None = None
    adapter: str | None = Field(default=None, description="URI of the published adapter, or model after `full`")
    adapter_sha256: str | None = Field(default=None, description="SHA-256 of the artifact's manifest")
    name: str | None = None
    version: int | None = None
    policy_version: int | None = Field(default=None, description="RL runs: train steps that changed the policy")
    dataset_report: str | None = Field(default=None, description="URI of the tokenizing report")
    planned_tokens: int | None = Field(
        default=None, description="tokens in the examples of all steps, once they are packed; not for RL runs"
    )
    problem: Problem | None = None
    skipped_steps: int = Field(default=0, description="RL runs: train steps with nothing to learn from")
    failed_steps: int = Field(default=0, description="RL runs: train steps that failed")
    equal_reward_steps: int = Field(default=0, description="RL runs: trained steps whose rewards were all the same")
    zero_gradient_steps: int = Field(default=0, description="RL runs: trained steps whose gradient was 0 throughout")
    notices: tuple[Reason, ...] = Field(default=(), description="notices for the user, whether the run succeeds or not")
    started_at: float | None = Field(default=None, description="start of its first execution, also for a resumed run")
    ended_at: float | None = None
    estimated_end: float | None = Field(
        default=None, description="estimated end of its last step at the current pace; None if it is unknown"
    )
    timeline: tuple[PhaseSpan, ...] = Field(default=(), description="the run's last phases, oldest first")
    paused_by: str | None = Field(
        default=None,
        description="the limit that paused the run, in words; the run resumes by itself when that is raised",
    )
    client_away: bool = Field(
        default=False,
        description="the run was paused because its client sent nothing; the client's next command or step resumes it",
    )
    gpu_seconds: float = Field(default=0.0, description="seconds that workers were leased, times their ranks")


STEP_COUNTS = ("skipped_steps", "failed_steps", "equal_reward_steps", "zero_gradient_steps")  # in a RunStatus
StepKey = Annotated[str, Field(min_length=1, max_length=256)]


class StepRequest(Frozen):
    """Train one file of trajectory groups. The same key trains once, however often it is sent."""

    key: StepKey
    groups: str = Field(min_length=1, max_length=2048, description="URI of JSONL, optionally gzip or zstd")
    wait: bool = Field(default=False, description="answer when the step is durable, instead of at once")


class StepStatus(Frozen):
    """The status of a train step. `done`: its checkpoint is durable, and a later step trains on from it.

    `adapter`, `name` and `version`: what was published, if anything (`publish_every`).

    `skipped`: there was nothing to learn from; `failed`: it could not be trained. Neither changes the policy.
    """

    step: int = Field(
        description="number in order of arrival, from 1; 0: the evaluation of the policy before the first step"
    )
    key: StepKey
    groups: str
    state: Literal["queued", "running", "done", "skipped", "failed"] = "queued"
    policy_version: int | None = Field(default=None, description="the policy's version after the step")
    optimizer_step: int | None = Field(default=None, description="the run's optimizer steps after the step")
    adapter: str | None = None
    adapter_sha256: str | None = None
    synced: Sha256 | None = Field(default=None, description="digest of the weights that samplers were sent")
    name: str | None = None
    version: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    checkpoint: CheckpointRef | None = None
    problem: Problem | None = None
    same_as: int | None = Field(default=None, description="the earlier step that trained this key")

    @property
    def is_final(self) -> bool:
        return self.state not in ("queued", "running")


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


class RLState(Frozen):
    """The state that an RL run's workflow passes to its next execution, whose history starts empty."""

    next_step: int = 1
    policy_version: int = 0
    optimizer_step: int = 0
    checkpoint: CheckpointRef | None = None
    model: Artifact
    shape: ModelShape
    adapter: Artifact | None = None
    reference: Artifact | None = Field(default=None, description="the artifact of the loss's KL reference")
    steps: tuple[StepStatus, ...] = Field(
        default=(), description="steps that are waiting, and the last ones that ended"
    )
    finishing: bool = False
    epoch: int = 0
    avoid: tuple[str, ...] = Field(default=(), description="queues of hosts that lost a worker at its start")
    avoid_for_samplers: tuple[str, ...] = Field(default=(), description="hosts that lost a sampler at its start")
    status: RunStatus
    rollouts: RolloutData | None = None
    unpublished: StepStatus | None = Field(default=None, description="the last step, if it was not published")
    policies: tuple[Policy, ...] = Field(
        default=(), description="the adapters that later rollouts sample from, oldest first"
    )
