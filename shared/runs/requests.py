"""Runs: what a user starts and sees. One Temporal workflow each; the run's id is the workflow's id."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, JsonValue, model_validator

from longshore.fields import Frozen, Name, pattern
from longshore.layout import EngineName, Layout, engine_takes_the_layout
from longshore.losses import PPO, PolicyLoss
from longshore.training import (
    DTYPE_DESCRIPTION,
    MAX_SCALARS,
    QUANTIZE_DESCRIPTION,
    RECOMPUTE_DESCRIPTION,
    STATES_DESCRIPTION,
    Adam,
    Decay,
    Dtype,
    DtypeChoice,
    Full,
    Lora,
    LoraPlusRatio,
    ModelUri,
    Muon,
    NoiseScale,
    Optimizer,
    OptimizerName,
    OptimizerStates,
    Quantization,
    Recompute,
    ScalarHead,
    SessionRun,
    Trainable,
    check_optimizer,
    fields_fit_engine,
    trains_the_language_head,
)
from shared.field_rules import NO_NUL
from shared.jobs.layout import pipelines_have_bins
from shared.jobs.losses import (
    PRESETS,
    AdvantageKind,
    DistillationSettings,
    Preferences,
    Preset,
    teacher_stays,
    with_algorithm,
)
from shared.runs.rollouts import Rollouts
from shared.runs.sources import DatasetSource, ExamplesSource, PairsSource, PreferencesSource

_PLAIN = "lower-case letters, digits and dashes, a letter or digit first"
RUN_ID = r"^[a-z0-9][a-z0-9-]{0,62}$"
RunId = Annotated[str, pattern(RUN_ID, f"an id has at most 63 {_PLAIN}")]
Tenant = Annotated[str, pattern(r"^[a-z0-9][a-z0-9-]{0,47}$", f"a tenant's name has at most 48 {_PLAIN}")]
FIRST_TENANT = "default"
# Descriptions that several kinds of runs share.
_PEAK = "the highest learning rate, after the warm-up"
_DECAY = "the optimizer's decoupled weight decay"
_CLIP = "bound of the global gradient norm; 0 for none"
_SEED = "seed of the data's order and of fresh adapter weights"
_BUDGET = (
    "what a micro-batch may hold on a rank beside weights and optimizer: workers measure how many tokens that are, "
    "bin_tokens at most"
)

_TrainedRun = TypeVar("_TrainedRun", bound="_DatasetRun | RLRun")


def optimizer_of(run: "_DatasetRun | RLRun") -> Optimizer:
    """Return the optimizer of a run's jobs."""
    return (Muon if run.optimizer == "muon" else Adam)(
        **run.model_dump(include={"weight_decay", "decay", "clip_norm", "lora_plus_ratio", "noise_scale"})
    )


def _optimizer_fits(asked: _TrainedRun) -> _TrainedRun:
    check_optimizer(optimizer_of(asked), asked.engine, asked.layout, asked.trainable)
    return asked


class _DatasetRun(Frozen):
    """Common fields of runs on a dataset: one of epochs and steps, one of batch_size and batch_tokens."""

    kind: str
    schema_version: Literal[1] = 1
    name: Name | None = Field(default=None, description="what the adapter is published as; the run's id if absent")
    model: ModelUri
    dataset: DatasetSource
    eval_dataset: DatasetSource | None = None
    trainable: Trainable = Lora()
    initial_adapter: str | None = Field(default=None, description="a published adapter to go on from: URI or name")
    epochs: float | None = Field(default=None, gt=0, le=1000, description="passes over the data")
    steps: int | None = Field(default=None, ge=1, le=10_000_000, description="optimizer steps, instead of epochs")
    batch_size: int | None = Field(default=None, ge=1, description="examples a step")
    batch_tokens: int | None = Field(default=None, ge=1, description="tokens a step, at most, instead of batch_size")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest example")
    bin_tokens: int | None = Field(default=None, ge=2, description="tokens of a micro-batch; max_tokens if absent")
    memory_budget_bytes: int | None = Field(default=None, ge=1_000_000, description=_BUDGET)
    max_lost_fraction: float = Field(
        default=0.1, ge=0, le=1, description="refuse when more rows than this are dropped or have nothing to train on"
    )
    learning_rate: float = Field(gt=0, le=10, description=_PEAK)
    schedule: Literal["constant", "linear", "cosine"] = Field(default="linear", description="after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    optimizer: OptimizerName = "adamw"
    weight_decay: float = Field(default=0.0, ge=0, description=_DECAY)
    decay: Decay = "all"
    clip_norm: float = Field(default=1.0, ge=0, description=_CLIP)
    lora_plus_ratio: LoraPlusRatio = 1.0
    noise_scale: NoiseScale = False
    seed: int = Field(default=0, ge=0, lt=2**63, description=_SEED)
    engine: EngineName = Field(default="megatron", description="what trains; fsdp: layouts of dp and tp alone")
    layout: Layout = Layout()
    dtype: DtypeChoice = Field(default="auto", description=DTYPE_DESCRIPTION)
    quantize_base: Quantization | None = Field(default=None, description=QUANTIZE_DESCRIPTION)
    optimizer_states: OptimizerStates = Field(default="float32", description=STATES_DESCRIPTION)
    recompute: Recompute = Field(default="auto", description=RECOMPUTE_DESCRIPTION)
    eval_every: int = Field(default=0, ge=0, description="steps; 0: before and after only")
    num_samples: int = Field(default=0, ge=0, le=16, description="greedy completions at each evaluation")
    sample_tokens: int = Field(default=64, ge=1, le=1024, description="longest greedy completion")
    checkpoint_every: int = Field(default=0, ge=0, description="steps; 0: a tenth of the run")
    keep_checkpoints: int = Field(default=2, ge=1, le=1000, description="checkpoints that stay, the newest")

    @property
    def reads_labels(self) -> bool:
        """True if rows are answers with a label, or pairs that are read as two such answers."""
        return False

    @model_validator(mode="after")
    def _one_length_one_batch(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ValueError("give exactly one of batch_size and batch_tokens")
        if self.bin_tokens is not None and self.bin_tokens < self.max_tokens:
            raise ValueError("bin_tokens must hold an example: at least max_tokens")
        if self.batch_tokens is not None and self.batch_tokens < self.max_tokens:
            raise ValueError("batch_tokens must hold an example: at least max_tokens")
        return self

    _engine_takes_the_layout = model_validator(mode="after")(engine_takes_the_layout)
    _fields_fit_engine = model_validator(mode="after")(fields_fit_engine)
    _optimizer_fits = model_validator(mode="after")(_optimizer_fits)
    _pipelines_have_bins = model_validator(mode="after")(pipelines_have_bins)
    _trains_the_language_head = model_validator(mode="after")(trains_the_language_head)

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.eval_dataset is None and (self.num_samples or self.eval_every):
            raise ValueError("num_samples and eval_every need an eval_dataset: its rows are what is shown")
        if self.initial_adapter is not None and self.trainable.kind == "full":
            raise ValueError("full training does not go on from an adapter: drop initial_adapter, or train a lora")
        return self


class _ExamplesRun(_DatasetRun):
    dataset: ExamplesSource = Field(description="examples")
    eval_dataset: ExamplesSource | None = Field(default=None, description="held-out examples")
    too_long: Literal["drop", "truncate"] = Field(default="drop", description="what happens to longer examples")
    learning_rate: float = Field(default=1e-4, gt=0, le=10, description=_PEAK)


class SFTRun(_ExamplesRun):
    """Supervised fine-tuning, as a user asks for it."""

    kind: Literal["sft"] = "sft"
    learning_rates: tuple[Annotated[float, Field(ge=0, le=10)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="of every step, in place of a schedule; 0 trains nothing",
    )

    @model_validator(mode="after")
    def _one_rate_for_each_step(self) -> Self:
        if self.learning_rates is None:
            return self
        if len(self.learning_rates) != self.steps:
            raise ValueError(f"learning_rates has one for each of steps: {len(self.learning_rates)} for {self.steps}")
        if (self.schedule, self.warmup_steps) != ("constant", 0) or self.learning_rate != max(self.learning_rates):
            raise ValueError(
                "learning_rates is a schedule of its own: schedule is constant then, warmup_steps 0, and learning_rate "
                "the highest of them"
            )
        return self


class DistillRun(_ExamplesRun, DistillationSettings):
    """Distillation on a dataset (shared.jobs.losses.Distillation): a student becomes like its teacher on its tokens.

    Both are of one base, which is there once: what differs is an adapter.
    """

    kind: Literal["distill"] = "distill"
    teacher: str = Field(min_length=1, max_length=2048, description="`base`, or a published adapter on it: URI or name")
    temperature: float = Field(default=1.0, gt=0, le=10, description="divides the logits of both while training")

    @model_validator(mode="after")
    def _teacher_stays(self) -> Self:
        teacher_stays(self.trainable, self)
        return self


class DPORun(Preferences, _DatasetRun):
    """Preference optimisation (shared.jobs.losses.DPO, KTO), as a user asks for it: an example is a pair, or of kto an
    answer with its label and an answer to another prompt.

    An example's tokens are those of its prompt and of both answers; one longer than max_tokens is left out, never cut.
    """

    kind: Literal["dpo"] = "dpo"
    dataset: PreferencesSource = Field(description="preference pairs; of kto answers with a label, too")
    eval_dataset: PreferencesSource | None = Field(default=None, description="held-out pairs, or answers with a label")
    too_long: Literal["drop"] = "drop"
    batch_size: int | None = Field(default=None, ge=1, description="pairs a step")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest pair, with both answers")
    learning_rate: float = Field(default=1e-5, gt=0, le=10, description=_PEAK)
    reference: str | None = Field(
        default=None,
        min_length=1,
        max_length=2048,
        description="`base`, or URI of a published adapter on that base; the model as the run begins with it if absent",
    )

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if not self.reads_labels:
            _Pairs(dataset=self.dataset, eval_dataset=self.eval_dataset)  # its errors say at which field
        return self


class RewardRun(_DatasetRun):
    """A reward model, as a user asks for it: of pairs of answers (shared.jobs.losses.BradleyTerry) or of answers with
    scores (squared_error). The head of scalars is of its objective; an answer's reward is at its last token.
    """

    kind: Literal["reward"] = "reward"
    objective: Literal["bradley_terry", "squared_error"] = Field(
        default="bradley_terry", description="of pairs, with a margin or none; squared_error: of answers with scores"
    )
    dataset: PreferencesSource = Field(description="preference pairs; of squared_error answers with scores")
    eval_dataset: PreferencesSource | None = Field(default=None, description="held-out pairs, or answers with scores")
    score_fields: tuple[Name, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SCALARS,
        description="of squared_error: fields of rows with a number, each a scalar of the head; score if absent",
    )
    per_turn: bool = Field(
        default=False, description="of squared_error: rows' labels have a number for each turn of the assistant"
    )
    center: float = Field(
        default=0.0, ge=0, le=1000, description="of bradley_terry: weight of the squared sum of a pair's rewards"
    )
    too_long: Literal["drop"] = "drop"
    batch_size: int | None = Field(default=None, ge=1, description="pairs, or answers, a step")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest answer, or pair with both answers")
    learning_rate: float = Field(default=1e-4, gt=0, le=10, description=_PEAK)

    @model_validator(mode="before")
    @classmethod
    def _has_the_head_of_its_objective(cls, given: Any) -> Any:
        trained = given.get("trainable", Lora()) if isinstance(given, dict) else None
        told = trained.model_dump() if isinstance(trained, Lora | Full) else trained
        if not isinstance(told, dict):
            return given
        fields = given.get("score_fields") or ("score",)
        names = fields if given.get("objective") == "squared_error" and not given.get("per_turn") else ("reward",)
        head = {"names": names, "per": "token" if given.get("per_turn") is True else "sequence"}
        return given | {"trainable": told | {"head": told.get("head") or head}}

    @property
    def head(self) -> ScalarHead:
        """What the objective trains: the head of `trainable`."""
        if self.per_turn:
            return ScalarHead(names=("reward",), per="token")
        return ScalarHead(names=("reward",) if self.reads_pairs else self.score_fields or ("score",), per="sequence")

    @property
    def reads_pairs(self) -> bool:
        return self.objective == "bradley_terry"

    @property
    def number_fields(self) -> tuple[str, ...]:
        """The fields of rows with what is learned beside the answers."""
        return ("margin",) if self.reads_pairs else ("labels",) if self.per_turn else self.head.names

    # In the place of the base's: here it is the other head that is trained.
    @model_validator(mode="after")
    def _trains_the_language_head(self) -> Self:
        if self.trainable.head != self.head:
            raise ValueError(f"trainable.head: objective and score_fields say it ({self.head}): drop it")
        if self.num_samples:
            raise ValueError("num_samples: a head of scalars writes no text: drop it")
        if self.score_fields is not None and (self.reads_pairs or self.per_turn or "labels" in self.score_fields):
            raise ValueError("score_fields are of squared_error without per_turn, which reads `labels`: drop them")
        if self.reads_pairs and self.per_turn:
            raise ValueError("per_turn is of squared_error: bradley_terry learns from whole answers")
        if not self.reads_pairs and self.center:
            raise ValueError("center would be ignored by squared_error: it is of bradley_terry")
        if self.reads_pairs:
            _Pairs(dataset=self.dataset, eval_dataset=self.eval_dataset)
        return self


class _Pairs(Frozen):
    dataset: PairsSource
    eval_dataset: PairsSource | None


DatasetRun = Annotated[SFTRun | DPORun | DistillRun | RewardRun, Field(discriminator="kind")]


class Overlong(Frozen):
    """A penalty that grows over the last tokens before the limit of an answer (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer_tokens: int = Field(ge=1, description="tokens before the limit over which it grows")
    penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="of an answer at the limit")


class RLRun(Frozen):
    """Reinforcement learning on trajectory groups: those that a client sends, step after step, until it finishes the
    run; or, with `rollouts`, the run's own.

    A train step trains one file of groups: `epochs` times over, each time in `mini_batches` optimizer steps of whole
    groups. It makes the policy's next version, which is published as the adapter's.
    """

    kind: Literal["rl"] = "rl"
    schema_version: Literal[1] = 1
    name: Name | None = Field(default=None, description="what the adapters are published as; the run's id if absent")
    model: ModelUri
    trainable: Trainable = Lora()
    initial_adapter: str | None = Field(default=None, description="a published adapter to go on from: URI or name")
    rollouts: Rollouts | None = Field(default=None, description="absent: a client sends the groups")
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="at which trajectories are sampled; the trainer divides its logits by it too",
    )
    algorithm: Preset | None = Field(
        default=None,
        description="a paper's loss and advantages (docs/losses.md); fields that are given below change them",
    )
    loss: PolicyLoss = Field(
        default=PPO(),
        discriminator="kind",
        description="the loss; beside an algorithm, the fields that differ from the paper's",
    )
    advantages: AdvantageKind = Field(
        default="group_mean", description="Dr. GRPO, GRPO, RLOO, REINFORCE++, or each trajectory's own"
    )
    equal_rewards: Literal["drop", "keep"] = Field(
        default="drop",
        description="groups whose rewards are all the same: they say nothing, but count in means; an algorithm's own",
    )
    overlong: Overlong | None = Field(default=None, description="what long answers lose of their reward")
    truncated: Literal["train", "mask"] = Field(
        default="train",
        description="answers that the sampler's limit cut: mask counts their rewards, and trains none of their tokens",
    )
    broken: Literal["refuse", "drop"] = Field(
        default="refuse", description="a step with a trajectory that cannot be trained, or that trajectory alone"
    )
    max_staleness: int | None = Field(
        default=None, ge=0, description="policy versions that a trajectory may be behind; broken beyond; None: any"
    )
    mini_batches: int = Field(default=1, ge=1, le=1000, description="optimizer steps a pass; at most one a group")
    epochs: int = Field(default=1, ge=1, le=100, description="passes over a step's groups")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest trajectory; broken beyond")
    bin_tokens: int | None = Field(default=None, ge=2, description="tokens of a micro-batch; max_tokens if absent")
    memory_budget_bytes: int | None = Field(default=None, ge=1_000_000, description=_BUDGET)
    learning_rate: float = Field(default=1e-5, gt=0, le=10, description=_PEAK)
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up; decays need rollouts.steps, at whose end they reach 0"
    )
    optimizer: OptimizerName = "adamw"
    weight_decay: float = Field(default=0.0, ge=0, description=_DECAY)
    decay: Decay = "all"
    clip_norm: float = Field(default=1.0, ge=0, description=_CLIP)
    lora_plus_ratio: LoraPlusRatio = 1.0
    noise_scale: NoiseScale = False
    seed: int = Field(default=0, ge=0, lt=2**63, description=_SEED)
    engine: EngineName = Field(default="megatron", description="what trains; fsdp: layouts of dp and tp alone")
    layout: Layout = Layout()
    dtype: DtypeChoice = Field(default="auto", description=DTYPE_DESCRIPTION)
    quantize_base: Quantization | None = Field(default=None, description=QUANTIZE_DESCRIPTION)
    optimizer_states: OptimizerStates = Field(default="float32", description=STATES_DESCRIPTION)
    recompute: Recompute = Field(default="auto", description=RECOMPUTE_DESCRIPTION)
    between_steps: Literal["offload", "keep"] = Field(
        default="offload", description="offload: a worker that waits gives the device's memory back"
    )
    idle_s: float = Field(default=60.0, ge=0, le=86_400, description="seconds until an idle worker is given back")
    publish_every: int = Field(
        default=1,
        ge=1,
        le=1_000_000,
        description="policy versions from one that is published to the next; and the last",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_says(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("algorithm") not in PRESETS:
            return given
        return with_algorithm(given, _completion_tokens(given))

    @property
    def longest_answer(self) -> int:
        """The most tokens that a policy samples for a trajectory."""
        return self.rollouts.max_completion_tokens if self.rollouts else self.max_tokens

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps of the run where it is known how many there are: some fewer, if steps have few groups."""
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
        if self.initial_adapter is not None and self.trainable.kind == "full":
            raise ValueError("full training does not go on from an adapter: drop initial_adapter, or train a lora")
        if self.rollouts is not None and self.rollouts.sampler_url is not None and self.trainable.kind == "full":
            raise ValueError("full training needs a sampler that takes whole weights: drop rollouts.sampler_url")
        if self.advantages in ("batch_normalized", "given") and self.equal_rewards == "keep":
            raise ValueError(f"equal_rewards has no meaning with {self.advantages} advantages: all groups are kept")
        return self

    _trains_the_language_head = model_validator(mode="after")(trains_the_language_head)
    _engine_takes_the_layout = model_validator(mode="after")(engine_takes_the_layout)
    _fields_fit_engine = model_validator(mode="after")(fields_fit_engine)
    _optimizer_fits = model_validator(mode="after")(_optimizer_fits)
    _pipelines_have_bins = model_validator(mode="after")(pipelines_have_bins)

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
        if (rollouts.top_p < 1 or rollouts.top_k is not None) and self.loss.old == "sampler":
            raise ValueError(
                "rollouts.top_p and top_k: samples have the log-probabilities of the tokens that were left, and the "
                "trainer those of all: set loss.old to trainer, whose ratios are of its own alone"
            )
        if rollouts.redraws and self.advantages == "batch_normalized":
            raise ValueError("rollouts.redraws: batch_normalized does not compare the grades of a group: drop it")
        if self.advantages == "given":
            raise ValueError("given advantages come with a client's trajectories: rollouts have grades alone")
        if rollouts.group_size == 1 and self.advantages != "batch_normalized":
            raise ValueError(f"{self.advantages} compares the samples of a prompt: group_size must be 2 or more")
        return self


def _completion_tokens(given: dict[str, Any]) -> int:
    """Return the most tokens of an answer: the limit of `rollouts`, else `max_tokens`. Fields are not validated yet."""
    match given.get("rollouts"):
        case None:
            tokens = given.get("max_tokens", RLRun.model_fields["max_tokens"].default)
        case Rollouts(max_completion_tokens=tokens):
            pass
        case rollouts:
            default = Rollouts.model_fields["max_completion_tokens"].default
            tokens = rollouts.get("max_completion_tokens", default) if isinstance(rollouts, dict) else default
    return tokens if isinstance(tokens, int) and tokens > 0 else 1  # else validating the field fails


Kind = Literal["sft", "dpo", "distill", "reward", "rl", "session"]
Run = Annotated[SFTRun | DPORun | DistillRun | RewardRun | RLRun | SessionRun, Field(discriminator="kind")]


def dtype_of(run: Run) -> Dtype:
    """Return the precision of a run that was accepted. It is `auto` of none but those before there was a choice."""
    return "float32" if run.dtype == "auto" else run.dtype


class Precision(Frozen):
    """The precision of a run, chosen once, where the run is accepted.

    `reason`: why, where the request named none. `notice`: for a user who named one, where another is fast.
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


class Source(Frozen):
    """The API through which a run was submitted, and labels of its client."""

    api: Literal["native", "page", "openai", "art", "tinker"] = "native"
    schedule: str | None = Field(default=None, description="the name of the schedule that started it")
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=MAX_METADATA)
    wandb: WandbRun | None = None
    request: dict[str, JsonValue] | None = Field(
        default=None, description="what a client of another API sent, to be shown to it again; never a secret"
    )


class RunRecord(Frozen):
    """`run.json`: what was accepted, and when. Written before the workflow starts."""

    schema_version: Literal[1] = 1
    run_id: RunId
    tenant: Tenant = FIRST_TENANT
    owner: str | None = Field(default=None, description="the id of the API key that sent it")
    source: Source = Source()
    run: Run
    created_at: float
    threads_per_rank: int = Field(default=1, ge=1, description="kept for resume: part of a bit-identical result")
    precision: Precision | None = Field(default=None, description="of its dtype, which is never `auto` here")
