"""Runs as users start and see them. Each is one Temporal workflow; the run's id is the workflow's id."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from longshore import losses
from longshore.dataset_runs import (
    PEAK,
    DatasetSource,
    DistillRun,
    DPORun,
    NamedPrompts,
    PromptsDataset,
    PromptsSource,
    RewardRun,
    SFTRun,
    TrainedRun,
)
from longshore.environments import Agent, PythonEnvironment
from longshore.fields import NO_NUL, Frozen, Name, added, pattern
from longshore.grading import UNGRADED, EnvironmentGrader, Grader, parts_of
from longshore.training import Dtype, Full, SamplerKind, SessionRun, Watched, WeightSync, fields_fit_engine

# --- Settings of an RL run's own rollouts: prompts, grader, samplers, and held-out prompts ---

HELD_OUT_METRICS = ("eval_reward_mean", "eval_reward_std", "eval_response_tokens_mean", "eval_truncation_rate")
_MOST_REDRAWN = _MOST_BEGUN = 4096  # groups; their numbers are sent through Temporal


class HeldOut(Watched):
    """Held-out prompts, sampled and graded before the first step, every `every_steps`, and after the last."""

    _usual_metric: ClassVar[str] = "eval_reward_mean"

    prompts: PromptsSource | None = Field(
        default=None, description="held-out prompts, sampled and graded before and after"
    )
    sets: NamedPrompts = added(
        {},
        max_length=16,
        description="held-out prompts by name, instead of prompts: each is evaluated, as eval_NAME_reward_mean",
    )
    every_steps: int = Field(
        default=0, ge=0, description="train steps from one evaluation to the next; 0: only before and after"
    )
    samples_per_prompt: int = Field(default=1, ge=1, le=1024, description="samples of each held-out prompt")
    temperature: float = Field(default=0.0, ge=0, le=10, description="temperature of held-out samples; 0: greedy")
    target: float | None = Field(
        default=None, allow_inf_nan=False, description="the run ends after the step that reaches this mean grade"
    )

    @property
    def evaluations(self) -> dict[str, DatasetSource]:
        """The held-out prompts by name; those of `prompts` have an empty one."""
        return {"": self.prompts} if self.prompts is not None else self.sets

    def is_due(self, step: int) -> bool:
        """Return True if a step, counted from 1, is evaluated."""
        return bool(self.every_steps) and step % self.every_steps == 0

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if self.prompts is None and not self.sets:
            missing = {"type": "missing", "loc": ("prompts",), "input": self}
            raise ValidationError.from_exception_data("held_out", [missing])  # type: ignore[list-item]
        if self.prompts is not None and self.sets:
            raise ValueError("sets: give the data of prompts a name there, and drop prompts")
        return self

    @model_validator(mode="after")
    def _greedy_once(self) -> Self:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError("greedy samples of a prompt are all the same: one is enough")
        return self

    @model_validator(mode="after")
    def _its_metrics_decide(self) -> Self:
        if self.watched and not self.every_steps:
            raise ValueError("keep and early_stop: set every_steps, for evaluations between the steps")
        known = list(HELD_OUT_METRICS)
        if self.sets:  # the mean is also that of all sets together
            of_sets = (metric.replace("eval", f"eval_{name}", 1) for name in self.sets for metric in HELD_OUT_METRICS)
            known = [HELD_OUT_METRICS[0], *of_sets]
        if unknown := self.watched - set(known):
            raise ValueError(f"{unknown.pop()} is no metric of held-out prompts; they have {', '.join(known)}")
        return self


class Rollouts(Frozen):
    """Settings of a run's own rollouts: the prompts of a step are sampled, graded, and trained on.

    Steps take the prompts in an order shuffled by (seed, epoch). Counted from 0, the prompts of step t are always
    sampled from the policy before step max(0, t - off_policy_steps), whatever was ready first. With
    `weight_sync.in_flight: continue` that policy is the oldest that may sample a token of them. They are what step t
    trains, or with `carry_over` what it begins: then it trains the oldest prompts that are complete.
    """

    prompts: PromptsDataset = Field(description="rows whose last message, or prompt_field, the model answers")
    grader: Grader = Field(
        default=UNGRADED,
        description="the grader of samples, with OpenAI's fields (docs/graders.md); distillation needs none",
    )
    environment: PythonEnvironment | None = added(
        None, description="plays an episode of several turns with the policy, for each sample (docs/agents.md)"
    )
    agent: Agent | None = added(
        None,
        description="a program that asks the policy by itself, in a sandbox or at a server, for each sample "
        "(docs/agents.md)",
    )
    prompts_per_step: int = Field(default=32, ge=1, le=65_536, description="groups per step")
    group_size: int = Field(default=8, ge=1, le=1024, description="samples of each prompt")
    redraws: int = Field(
        default=0, ge=0, le=16, description="how often groups whose grades are all equal are sampled again"
    )
    epochs: float | None = Field(default=None, gt=0, le=1000, description="passes over the prompts, instead of steps")
    steps: int | None = Field(
        default=None, ge=0, le=1_000_000, description="train steps of the run's own rollouts; 0: held-out prompts alone"
    )
    max_completion_tokens: int = Field(default=256, ge=1, le=1_048_575, description="longest sample")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), max_length=16, description="text that ends a sample"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the likeliest tokens that together have this probability"
    )
    top_k: int | None = Field(default=None, ge=1, description="sample from this many of the likeliest tokens")
    off_policy_steps: int = Field(default=0, ge=0, le=64, description="steps sampled ahead; 0: on-policy")
    carry_over: bool = added(
        False,
        description="a step waits for no slow prompt: it trains the oldest that are complete of those sampled ahead, "
        "and later steps the others; which, depends on time",
    )
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

    @property
    def has_episodes(self) -> bool:
        """True if a sample is an episode, which may have several answers."""
        return self.environment is not None or self.agent is not None

    @model_validator(mode="before")
    @classmethod
    def _environments_grade(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("grader") is not None:
            return given
        has_episodes = given.get("environment") is not None or given.get("agent") is not None
        return given | {"grader": EnvironmentGrader()} if has_episodes else given

    @model_validator(mode="after")
    def _has_an_environment(self) -> Self:
        if self.environment is not None and self.agent is not None:
            raise ValueError("agent: an episode has an environment or an agent, not both: drop one")
        for place, part in parts_of(self.grader).items():
            if not self.has_episodes and isinstance(part, EnvironmentGrader):
                raise ValueError(f"{place}: an environment's reward needs one: give environment")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        if self.steps == 0 and self.held_out is None:
            raise ValueError("steps: without any, held_out is what the run does: give its prompts")
        return self

    @model_validator(mode="after")
    def _few_are_drawn_again(self) -> Self:
        if self.redraws and self.prompts_per_step > _MOST_REDRAWN:
            raise ValueError(f"redraws: at most {_MOST_REDRAWN} prompts_per_step can be drawn again")
        return self

    @model_validator(mode="after")
    def _others_are_complete(self) -> Self:
        if not self.carry_over:
            return self
        if not self.off_policy_steps:
            raise ValueError("carry_over: no other prompts are sampled in the meantime: set off_policy_steps")
        if self.prompts_per_step * (self.off_policy_steps + 1) > _MOST_BEGUN:
            raise ValueError(
                f"carry_over: at most {_MOST_BEGUN} prompts are begun and not trained: lower prompts_per_step, or "
                "off_policy_steps"
            )
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


_PLAIN = "lower-case letters, digits and dashes, a letter or digit first"
RUN_ID = r"^[a-z0-9][a-z0-9-]{0,62}$"
RunId = Annotated[str, pattern(RUN_ID, f"an id has at most 63 {_PLAIN}")]
CRITIC = ".critic"
JobsOf = Annotated[str, pattern(RUN_ID.replace("$", rf"(\{CRITIC})?$"), f"a run's id, perhaps with {CRITIC}")]
"""A run whose jobs these are, or the jobs of its critic on its own worker: the store has them below the run."""
Tenant = Annotated[str, pattern(r"^[a-z0-9][a-z0-9-]{0,47}$", f"a tenant's name has at most 48 {_PLAIN}")]
FIRST_TENANT = "default"


class Overlong(Frozen):
    """A penalty that grows over the last tokens before the limit of an answer (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer_tokens: int = Field(ge=1, description="tokens before the limit over which the penalty grows")
    penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="penalty of an answer at the limit")


class RLRun(TrainedRun):
    """Reinforcement learning on trajectory groups: a client sends them, step after step, until it finishes the run; or,
    with `rollouts`, the run makes its own.

    A train step trains on one file of groups, `epochs` times, each time in `mini_batches` optimizer steps of whole
    groups. It makes the policy's next version, which is published as a version of the adapter.
    """

    kind: Literal["rl"] = "rl"
    name: Name | None = Field(
        default=None, description="the name under which adapters are published; the run's id if absent"
    )
    rollouts: Rollouts | None = Field(default=None, description="absent: a client sends the groups")
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="sampling temperature; the trainer divides its logits by it too",
    )
    algorithm: losses.Preset | None = Field(
        default=None,
        description="a paper's loss and advantages (docs/losses.md); the fields below change them",
    )
    loss: losses.RLLoss = Field(
        default=losses.PPO(),
        discriminator="kind",
        description="the loss; with an algorithm, only the fields that differ from the paper's",
    )
    advantages: losses.AdvantageKind = Field(
        default="group_mean", description="Dr. GRPO, GRPO, RLOO, REINFORCE++, each trajectory's own, or none"
    )
    credit: Literal["episode", "turn"] = added(
        "episode",
        description="what an answer of several is trained by: the whole episode's advantage, or with leave_one_out "
        "what was earned from it on, less what the others of the group earned from theirs",
    )
    equal_rewards: Literal["drop", "keep"] = Field(
        default="drop",
        description="groups whose rewards are all equal have no signal, but count in means; default: the algorithm's",
    )
    overlong: Overlong | None = Field(default=None, description="the penalty on the reward of long answers")
    truncated: Literal["train", "mask", "bootstrap"] = Field(
        default="train",
        description="answers cut off by the sampler's limit: mask counts their rewards but does not train on their "
        "tokens; bootstrap: the critic's value of their last state stands in for the missing rest",
    )
    critic: losses.Critic | None = Field(
        default=None, description="a critic for gae advantages, trained together with the policy (algorithm ppo)"
    )
    broken: Literal["refuse", "drop"] = Field(
        default="refuse", description="what fails if a trajectory cannot be trained: the step, or only that trajectory"
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="most policy versions that a trajectory may be behind; older ones are broken; None: no limit",
    )
    mini_batches: int = Field(default=1, ge=1, le=1000, description="optimizer steps per pass; at most one per group")
    epochs: int = Field(default=1, ge=1, le=100, description="passes over a step's groups")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest trajectory; longer ones are broken")
    learning_rate: float = Field(default=1e-5, gt=0, le=10, description=PEAK)
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="learning-rate schedule after the warm-up; decays need rollouts.steps, at whose end they reach 0",
    )
    between_steps: Literal["offload", "keep"] = Field(
        default="offload", description="offload: a waiting worker frees the device's memory"
    )
    idle_s: float = Field(default=60.0, ge=0, le=86_400, description="seconds until an idle worker is returned")
    publish_every: int = Field(
        default=1,
        ge=1,
        le=1_000_000,
        description="publish every this many policy versions, and the last one",
    )

    @property
    def held_out(self) -> HeldOut | None:
        """The held-out prompts of the run's own rollouts, if it has some."""
        return self.rollouts.held_out if self.rollouts else None

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_says(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("critic") is not None and not given.get("algorithm"):
            return {"advantages": "gae"} | given
        if not isinstance(given, dict) or given.get("algorithm") not in losses.PRESETS:
            return given
        return losses.with_algorithm(given, _completion_tokens(given))

    @property
    def longest_answer(self) -> int:
        """The most tokens that a policy samples for a trajectory: of an episode less than the whole of it."""
        if self.rollouts is None or self.rollouts.has_episodes:
            return self.max_tokens
        return self.rollouts.max_completion_tokens

    def samples_of(self, which: str) -> int:
        """Return the samples of a prompt in a train step, or else in an evaluation."""
        if self.rollouts is None:
            return 1
        held_out = self.rollouts.held_out
        return self.rollouts.group_size if which == "train" or held_out is None else held_out.samples_per_prompt

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps of the run, if their number is known; fewer are done if steps have few groups."""
        steps = self.rollouts.steps if self.rollouts else None
        return None if steps is None else steps * self.epochs * self.mini_batches

    @model_validator(mode="after")
    def _holds_together(self) -> "RLRun":
        if self.schedule != "constant" and self.planned_steps is None:
            raise ValueError(f"schedule: a {self.schedule} decay needs an end: give rollouts.steps")
        if self.overlong is not None and self.overlong.buffer_tokens > self.longest_answer:
            raise ValueError(f"overlong.buffer_tokens: an answer has at most {self.longest_answer} tokens")
        if self.bin_tokens is not None and self.bin_tokens < self.max_tokens:
            raise ValueError("bin_tokens must hold a trajectory: at least max_tokens")
        if self.rollouts is not None and self.rollouts.sampler_url is not None and self.trainable.kind == "full":
            raise ValueError("full training needs a sampler that takes whole weights: drop rollouts.sampler_url")
        if isinstance(self.loss, losses.Distillation):
            losses.check_teacher_is_frozen(self.trainable, self.loss)
            if self.advantages != "none":
                raise ValueError("a distillation loss reads no advantages: they are none")
            if self.loss.more_teachers:
                raise ValueError("loss.more_teachers: several teachers are of rows of a dataset, and not of samples")
        elif self.advantages == "none" and (self.loss.kl is None or self.loss.kl.placement == "loss"):
            raise ValueError("advantages none leave a loss to kl with placement reward alone: give it, or rewards")
        self._critic_fits()
        if self.credit == "turn" and self.advantages != "leave_one_out":
            raise ValueError(
                f"credit: turn has a formula for leave_one_out alone, and the run's advantages are {self.advantages}"
            )
        if self.advantages not in (*losses.COMPARE_GROUPS, "none") and self.equal_rewards == "keep":
            raise ValueError(f"equal_rewards has no meaning with {self.advantages} advantages: all groups are kept")
        return self

    def _critic_fits(self) -> None:
        if (self.advantages == "gae") != (self.critic is not None):
            raise ValueError("gae advantages are a critic's, and a critic's are gae: give both, or algorithm ppo")
        if self.critic is None and self.truncated == "bootstrap":
            raise ValueError("truncated: bootstrap needs the values of a critic: give one, or train, or mask")
        if self.critic is None:
            return
        if isinstance(self.trainable, Full):
            raise ValueError("critic: it has the base beside the policy, which full training changes: train a lora")
        if self.critic.own_worker and self.layout.nodes > 1:
            raise ValueError("critic.own_worker: both workers have the layout, which is of one machine then; drop it")
        try:
            fields_fit_engine(self.model_copy(update={"trainable": self.critic.trained_beside(self.trainable)}))
        except ValueError as error:
            raise ValueError(f"critic.{error}") from error
        if self.rollouts is not None and (steps := self.rollouts.steps) and self.critic.warmup_steps >= steps:
            raise ValueError(f"critic.warmup_steps: fewer than rollouts.steps, {steps}, or the policy is never trained")

    @model_validator(mode="after")
    def _rollouts_fit(self) -> "RLRun":
        rollouts = self.rollouts
        if rollouts is None:
            return self
        if rollouts.colocate and self.between_steps == "keep":
            raise ValueError("rollouts.colocate: the trainer leaves the device after a step: between_steps is offload")
        if rollouts.max_completion_tokens >= self.max_tokens:
            raise ValueError("max_tokens must hold a prompt too: more than rollouts.max_completion_tokens")
        if self.quantize_base is not None and rollouts.probe_bound is None:
            raise ValueError(
                "quantize_base: samplers hold the base as it is in its files, so that their log-probabilities differ: "
                "say by rollouts.probe_bound how far, in nats, or drop quantize_base"
            )
        if self.max_staleness is not None and rollouts.off_policy_steps > self.max_staleness:
            raise ValueError("rollouts.off_policy_steps goes beyond max_staleness: every later step would be refused")
        if self.max_staleness is not None and rollouts.carry_over:
            raise ValueError("rollouts.carry_over: slow prompts would be dropped for their age: drop max_staleness")
        if rollouts.carry_over and self.trainable.kind == "full" and rollouts.weight_sync.in_flight == "finish":
            raise ValueError(
                "rollouts.carry_over: a sampler takes whole weights when its samples have ended, also the slowest: set "
                "rollouts.weight_sync.in_flight to continue, or train a lora"
            )
        is_cut = rollouts.top_p < 1 or rollouts.top_k is not None
        if is_cut and not isinstance(self.loss, losses.Distillation) and self.loss.old == "sampler":
            raise ValueError(
                "rollouts.top_p and top_k: samples have the log-probabilities of the tokens that were left, and the "
                "trainer those of all: set loss.old to trainer, whose ratios are of its own alone"
            )
        if rollouts.redraws and self.advantages not in (*losses.COMPARE_GROUPS, "none"):
            raise ValueError(f"rollouts.redraws: {self.advantages} does not compare the grades of a group: drop it")
        if self.advantages == "given":
            raise ValueError("given advantages come with a client's trajectories: rollouts have grades alone")
        if rollouts.grader == UNGRADED and (self.advantages != "none" or rollouts.held_out is not None):
            raise ValueError("rollouts.grader is missing: only distillation without held-out prompts needs none")
        if rollouts.group_size == 1 and self.advantages in losses.COMPARE_GROUPS:
            raise ValueError(f"rollouts.group_size must be 2 or more: {self.advantages} compares a prompt's samples")
        return self


def _completion_tokens(given: dict[str, Any]) -> int:
    """Return what `longest_answer` will be of fields that are not validated yet."""
    tokens, rollouts = given.get("max_tokens", RLRun.model_fields["max_tokens"].default), given.get("rollouts")
    if isinstance(rollouts, Rollouts):
        rollouts = {name: getattr(rollouts, name) for name in ("environment", "max_completion_tokens")}
    if isinstance(rollouts, dict) and rollouts.get("environment") is None:
        tokens = rollouts.get("max_completion_tokens", Rollouts.model_fields["max_completion_tokens"].default)
    return tokens if isinstance(tokens, int) and tokens > 0 else 1  # else validating the field fails


Kind = Literal["sft", "dpo", "distill", "reward", "rl", "session"]
Run = Annotated[SFTRun | DPORun | DistillRun | RewardRun | RLRun | SessionRun, Field(discriminator="kind")]


def dtype_of(run: Run) -> Dtype:
    """Return the precision of a run; the service has chosen one for `auto` when it accepts a run."""
    return "float32" if run.dtype == "auto" else run.dtype


class Precision(Frozen):
    """The precision of a run, chosen once, when the run is accepted.

    `reason`: why, if the request set none. `notice`: for a user who set one although another is faster.
    """

    dtype: Dtype
    reason: str | None = None
    notice: str | None = None


MAX_METADATA = 16
# PostgreSQL's text has no NUL.
MetadataKey = Annotated[str, pattern(NO_NUL, "text here has no NUL character", min_length=1, max_length=64)]
MetadataValue = Annotated[str, pattern(NO_NUL, "text here has no NUL character", max_length=512)]
WandbName = Annotated[
    str, pattern(r"^[^/\\#?%:\x00-\x1f]{1,128}$", "1 to 128 characters without / \\ # ? % : and control characters")
]


class WandbRun(Frozen):
    """The W&B project of a run, instead of the installation's own."""

    project: WandbName
    entity: WandbName | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(default=(), max_length=32)


class SweepTrial(Frozen):
    """A run's trial in a sweep. `values`: the values of the swept fields, by their paths."""

    sweep: str
    number: int
    values: dict[str, JsonValue]


class Source(Frozen):
    """The API through which a run was submitted, and labels of its client."""

    api: Literal["native", "page", "openai", "art", "tinker"] = "native"
    schedule: str | None = Field(default=None, description="the name of the schedule that started it")
    trial: SweepTrial | None = Field(default=None, description="its place in the sweep that started it")
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=MAX_METADATA)
    wandb: WandbRun | None = None
    request: dict[str, JsonValue] | None = Field(
        default=None, description="data that a client of another API sent and gets back; never a secret"
    )


class RunRecord(Frozen):
    """`run.json`: the accepted run, and when it was accepted. Written before the workflow starts."""

    schema_version: Literal[1] = 1
    run_id: RunId
    tenant: Tenant = FIRST_TENANT
    owner: str | None = Field(default=None, description="id of the API key that submitted it")
    source: Source = Source()
    run: Run
    created_at: float
    threads_per_rank: int = Field(default=1, ge=1, description="kept for resuming: bit-identical results depend on it")
    precision: Precision | None = Field(
        default=None, description="precision of the run; its dtype is never `auto` here"
    )
