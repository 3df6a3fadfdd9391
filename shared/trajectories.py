"""Trajectories: what was sampled for a prompt, token by token, and how good it was. One group a line of JSONL.

Token ids are trained as they were sampled, and never rendered again.
"""

from pydantic import Field, JsonValue

from shared.models import Frozen


class Trajectory(Frozen):
    """One sampled sequence: prompt, answers and tool results in the order in which the model saw them.

    `sampled`, `logprobs` and `token_ids` are of one length L. `logprobs` are the sampler's own, in nats, of the tokens
    that it sampled; what stands beside the others is not read.
    """

    token_ids: tuple[int, ...] = Field(min_length=1, description="L ids, prompt and all")
    sampled: tuple[bool, ...] = Field(description="which of the ids the policy sampled: those are trained")
    logprobs: tuple[float | None, ...] = Field(description="null beside what was not sampled")
    reward: float
    advantage: float | None = Field(default=None, description="with advantages `given` alone")
    policy_version: int = Field(default=0, ge=0, description="of the adapter that sampled it; 0 is the run's beginning")
    metrics: dict[str, float] = Field(default_factory=dict, description="averaged over the step, and reported")
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="kept beside it, read by nobody")


class TrajectoryGroup(Frozen):
    """The trajectories of one prompt: what their rewards are compared within."""

    trajectories: tuple[Trajectory, ...] = Field(min_length=1)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
