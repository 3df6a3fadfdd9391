"""Settings of an RL run's own rollouts: prompts, grader, samplers, and held-out prompts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from longshore.fields import Frozen
from shared.grading.graders import UNGRADED, Grader
from shared.jobs.leases import SamplerKind
from shared.jobs.weight_sync import WeightSync
from shared.runs.sources import PromptsSource

_MOST_REDRAWN = 4096  # groups; their numbers are sent through Temporal


class HeldOut(Frozen):
    """Held-out prompts, sampled and graded before the first step, every `every_steps`, and after the last."""

    prompts: PromptsSource = Field(description="held-out prompts, sampled and graded before and after")
    every_steps: int = Field(
        default=0, ge=0, description="train steps from one evaluation to the next; 0: only before and after"
    )
    samples_per_prompt: int = Field(default=1, ge=1, le=1024, description="samples of each held-out prompt")
    temperature: float = Field(default=0.0, ge=0, le=10, description="temperature of held-out samples; 0: greedy")
    target: float | None = Field(
        default=None, allow_inf_nan=False, description="the run ends after the step that reaches this mean grade"
    )

    @model_validator(mode="after")
    def _greedy_once(self) -> Self:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError("greedy samples of a prompt are all the same: one is enough")
        return self


class Rollouts(Frozen):
    """Settings of a run's own rollouts: the prompts of a step are sampled, graded, and trained on.

    Steps take the prompts in an order shuffled by (seed, epoch). Counted from 0, step t is always sampled from the
    policy before step max(0, t - off_policy_steps), whatever was ready first. With `weight_sync.in_flight: continue`
    that policy is the oldest that may sample a token of the step.
    """

    prompts: PromptsSource = Field(description="rows whose last message, or prompt_field, the model answers")
    grader: Grader = Field(
        default=UNGRADED,
        description="the grader of samples, with OpenAI's fields (docs/graders.md); distillation needs none",
    )
    prompts_per_step: int = Field(default=32, ge=1, le=65_536, description="groups a step")
    group_size: int = Field(default=8, ge=1, le=1024, description="samples of each prompt")
    redraws: int = Field(
        default=0, ge=0, le=16, description="how often groups whose grades are all equal are sampled again"
    )
    epochs: float | None = Field(default=None, gt=0, le=1000, description="passes over the prompts, instead of steps")
    steps: int | None = Field(default=None, ge=1, le=1_000_000, description="train steps of the run's own rollouts")
    max_completion_tokens: int = Field(default=256, ge=1, le=1_048_575, description="longest sample")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), max_length=16, description="text that ends a sample"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the likeliest tokens that together have this probability"
    )
    top_k: int | None = Field(default=None, ge=1, description="sample from this many of the likeliest tokens")
    off_policy_steps: int = Field(default=0, ge=0, le=64, description="steps sampled ahead; 0: on-policy")
    sampler: SamplerKind = Field(default="own", description="the sampler that a host starts: Longshore's own, or vLLM")
    sampler_url: str | None = Field(
        default=None,
        max_length=2048,
        description="a server with vLLM's protocol; if absent, the installation's sampler",
    )
    samplers: int = Field(
        default=1,
        ge=1,
        le=16,
        description="most samplers to lease; a step's prompts are divided among those that are up",
    )
    colocate: bool = Field(default=False, description="trainer and sampler share one device, and use it in turn")
    weight_sync: WeightSync = WeightSync()
    routing_replay: Literal["on", "off"] = Field(
        default="on",
        description="for mixtures of experts: the trainer uses the experts that the sampler chose for each token",
    )
    max_lost_fraction: float = Field(
        default=0.1, ge=0, le=1, description="largest share of prompts that may be too long to leave room for an answer"
    )
    probe_bound: float | None = Field(
        default=None,
        gt=0,
        description="largest difference in nats between sampler and trainer on a probe text; None: 1e-4 in float32, "
        "0.3 in bfloat16",
    )
    max_ungraded_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="largest share of a step's samples without a grade; these are dropped; beyond it the run fails",
    )
    shuffle_rewards: bool = Field(
        default=False,
        description="a control experiment: rewards are shuffled within their group (with batch_normalized and gae "
        "within the step), so that they carry no information",
    )
    held_out: HeldOut | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        return self

    @model_validator(mode="after")
    def _few_are_drawn_again(self) -> Self:
        if self.redraws and self.prompts_per_step > _MOST_REDRAWN:
            raise ValueError(f"redraws: at most {_MOST_REDRAWN} prompts_per_step can be drawn again")
        return self

    @model_validator(mode="after")
    def _samplers_are_leased(self) -> Self:
        if self.samplers > 1 and self.sampler_url is not None:
            raise ValueError("a sampler behind a URL is one: drop samplers, or sampler_url")
        return self

    @model_validator(mode="after")
    def _something_is_in_flight(self) -> Self:
        if self.weight_sync.in_flight == "finish":
            return self
        if not self.off_policy_steps:
            raise ValueError("weight_sync.in_flight: no sample is under way when weights change: set off_policy_steps")
        if self.sampler_url is not None or self.sampler != "own":
            raise ValueError("weight_sync.in_flight: only Longshore's own sampler goes on under new weights: drop it")
        return self

    @model_validator(mode="after")
    def _one_device_at_a_time(self) -> Self:
        if not self.colocate:
            return self
        if self.samplers > 1 or self.sampler_url is not None:
            raise ValueError("colocate: a device has one sampler, which is leased: drop samplers and sampler_url")
        if self.off_policy_steps:
            raise ValueError("colocate: nothing is sampled while the trainer has the device: drop off_policy_steps")
        if self.weight_sync.backend not in ("auto", "store"):
            raise ValueError("colocate: a sampler that sleeps takes no weights: weight_sync.backend is auto or store")
        return self
