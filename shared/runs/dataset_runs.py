"""Runs on a dataset, as users request them: fine-tuning, preferences, distillation."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from longshore.fields import Frozen, Name
from longshore.layout import EngineName, Layout, engine_takes_the_layout
from longshore.losses import MOST_TEACHERS, DistillationSettings, several_teachers_fit
from longshore.training import (
    DTYPE_DESCRIPTION,
    MAX_SCALARS,
    OTHER_BASE_DESCRIPTION,
    PAIRED,
    QUANTIZE_DESCRIPTION,
    RECOMPUTE_DESCRIPTION,
    STATES_DESCRIPTION,
    Adam,
    Decay,
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
    Trainable,
    check_optimizer,
    fields_fit_engine,
    trains_the_language_head,
)
from shared.jobs.job import pipelines_have_bins
from shared.jobs.losses import Preferences, teacher_stays

# --- Datasets of runs: where they are and the format of their rows; and teachers ---

Format = Literal[
    "auto", "chat", "prompt_completion", "alpaca", "sharegpt", "text", "tokenized", "preference", "openai_preference"
]


PAIR_FORMATS = ("preference", "openai_preference")


class DatasetSource(Frozen):
    """A dataset's URI and format. `auto` detects the format from the first rows, and refuses ambiguous ones."""

    uri: str = Field(min_length=1, max_length=2048)
    format: Format = Field(default="auto", description="the format of rows; auto: detected from the first rows")
    prompt_field: str | None = Field(default=None, description="the field that holds the prompt; else rows are chats")
    completion_field: str | None = Field(default=None, description="the field that holds the answer")
    assistant_turns: Literal["all", "last"] = Field(
        default="all",
        description="which answers of a conversation are trained; last: the conversation must end with an answer",
    )
    assistant_pattern: str | None = Field(
        default=None,
        min_length=1,
        max_length=500,
        description="only train those answers that match this regular expression somewhere",
    )


def _both_fields_or_none(source: DatasetSource) -> DatasetSource:
    if (source.prompt_field is None) != (source.completion_field is None):
        raise ValueError("prompt_field and completion_field go together: give both or neither")
    return source


def _prompts_alone(source: DatasetSource) -> DatasetSource:
    if source.format in ("text", "tokenized"):
        raise ValueError(
            f"rows of the format {source.format} ask nothing: prompts are chat rows, or have a prompt field"
        )
    if source.completion_field is not None:
        raise ValueError("completion_field has no meaning here: the model answers; graders see the whole row as item")
    if source.assistant_turns != "all" or source.assistant_pattern is not None:
        raise ValueError("assistant_turns and assistant_pattern have no meaning here: the model answers")
    return source


def _no_pairs(source: DatasetSource) -> DatasetSource:
    if source.format in PAIR_FORMATS:
        raise ValueError(f"rows of the format {source.format} are preference pairs, which dpo learns from")
    return source


def _preferences_alone(source: DatasetSource) -> DatasetSource:
    if source.format in ("text", "tokenized"):
        raise ValueError(f"rows of the format {source.format} have no answers that could be preferred")
    if source.assistant_turns != "all" or source.assistant_pattern is not None:
        raise ValueError("assistant_turns and assistant_pattern have no meaning here: whole answers are learned from")
    return source


def _pairs_alone(source: DatasetSource) -> DatasetSource:
    if source.format not in ("auto", *PAIR_FORMATS):
        raise ValueError(
            f"dpo learns from preference pairs, as reward does: format is auto, {' or '.join(PAIR_FORMATS)}; answers "
            "with a label are what the objective kto learns from, too"
        )
    if source.prompt_field is not None or source.completion_field is not None:
        raise ValueError("prompt_field and completion_field have no meaning here: the fields of pairs have their names")
    return source


RowsSource = Annotated[DatasetSource, AfterValidator(_both_fields_or_none)]


ExamplesSource = Annotated[RowsSource, AfterValidator(_no_pairs)]


PreferencesSource = Annotated[RowsSource, AfterValidator(_preferences_alone)]


PairsSource = Annotated[DatasetSource, AfterValidator(_pairs_alone)]


PromptsSource = Annotated[DatasetSource, AfterValidator(_prompts_alone)]


TeacherUri = Annotated[str, Field(min_length=1, max_length=2048)]


def _is_url(teacher: str) -> bool:
    return teacher.startswith(("http://", "https://"))


class TaughtBy(DistillationSettings):
    """The teacher of a distillation: on the student's base, which is loaded once, or behind a URL."""

    teacher: TeacherUri = Field(
        description="`base`, a published adapter on it (URI or name), or a URL (…/v1) that returns prompt_logprobs",
    )
    teacher_model: str | None = Field(
        default=None, min_length=1, max_length=256, description="the teacher's name at that URL"
    )
    teacher_key: str | None = Field(
        default=None, max_length=64, description="for a teacher behind a URL: the name of its key in this installation"
    )
    teachers: Annotated[tuple[tuple[Name, TeacherUri], ...], PAIRED] = Field(
        default=(),
        max_length=MOST_TEACHERS,
        description="further teachers by name, each as in `teacher`: a row's field `teacher` names one of them; "
        "other rows learn from `teacher`",
    )
    temperature: float = Field(
        default=1.0, gt=0, le=10, description="temperature that divides the logits of both models while training"
    )

    @property
    def teacher_url(self) -> str | None:
        return self.teacher if _is_url(self.teacher) else None

    @property
    def named_teachers(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.teachers)

    @model_validator(mode="after")
    def _several_are_on_the_base(self) -> Self:
        several_teachers_fit(self.teachers, self)
        if self.teachers and any(_is_url(uri) for uri in (self.teacher, *dict(self.teachers).values())):
            raise ValueError("several teachers are of the student's base, and none behind a URL")
        if len(set(self.named_teachers)) < len(self.teachers):
            raise ValueError("teachers: two have one name")
        return self

    @model_validator(mode="after")
    def _servers_tell_some_tokens(self) -> Self:
        if (self.teacher_url is None) != (self.teacher_model is None):
            raise ValueError("teacher_model is what a teacher behind a URL is called there: both, or neither")
        if self.teacher_key is not None and self.teacher_url is None:
            raise ValueError("teacher_key is of a teacher behind a URL: drop it")
        if self.teacher_url is not None and (self.tokens == "all" or self.temperature != 1):
            raise ValueError("a server tells log-probabilities of some tokens, at temperature 1: tokens top_k or drawn")
        return self


# Descriptions that several kinds of runs share.
PEAK = "the highest learning rate, after the warm-up"
_BUDGET = (
    "bytes for a micro-batch on a rank, besides weights and optimizer: "
    "workers measure how many tokens fit, up to bin_tokens"
)


class TrainedRun(Frozen):
    """Common fields of runs that train a model: on a dataset, or on trajectories."""

    kind: str
    schema_version: Literal[1] = 1
    name: Name | None = Field(
        default=None, description="the name under which the adapter is published; the run's id if absent"
    )
    model: ModelUri
    trainable: Trainable = Lora()
    initial_adapter: str | None = Field(default=None, description="a published adapter to continue from: URI or name")
    allow_other_base: bool = Field(default=False, description=OTHER_BASE_DESCRIPTION)
    bin_tokens: int | None = Field(default=None, ge=2, description="tokens of a micro-batch; max_tokens if absent")
    memory_budget_bytes: int | None = Field(default=None, ge=1_000_000, description=_BUDGET)
    optimizer: OptimizerName = "adamw"
    weight_decay: float = Field(default=0.0, ge=0, description="the optimizer's decoupled weight decay")
    decay: Decay = "all"
    clip_norm: float = Field(default=1.0, ge=0, description="bound of the global gradient norm; 0 for none")
    lora_plus_ratio: LoraPlusRatio = 1.0
    noise_scale: NoiseScale = False
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the data's order and of fresh adapter weights")
    engine: EngineName = Field(default="megatron", description="the training engine; fsdp: only layouts of dp and tp")
    layout: Layout = Layout()
    dtype: DtypeChoice = Field(default="auto", description=DTYPE_DESCRIPTION)
    quantize_base: Quantization | None = Field(default=None, description=QUANTIZE_DESCRIPTION)
    optimizer_states: OptimizerStates = Field(default="float32", description=STATES_DESCRIPTION)
    recompute: Recompute = Field(default="auto", description=RECOMPUTE_DESCRIPTION)

    _engine_takes_the_layout = model_validator(mode="after")(engine_takes_the_layout)
    _fields_fit_engine = model_validator(mode="after")(fields_fit_engine)
    _pipelines_have_bins = model_validator(mode="after")(pipelines_have_bins)
    _trains_the_language_head = model_validator(mode="after")(trains_the_language_head)

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Self:
        check_optimizer(self.settings_of_optimizer, self.engine, self.layout, self.trainable)
        return self

    @model_validator(mode="after")
    def _an_adapter_is_trained_on(self) -> Self:
        if self.initial_adapter is not None and self.trainable.kind == "full":
            raise ValueError("full training cannot continue from an adapter: drop initial_adapter, or train a lora")
        return self

    @property
    def settings_of_optimizer(self) -> Optimizer:
        """The optimizer of the run's jobs."""
        return (Muon if self.optimizer == "muon" else Adam)(
            **self.model_dump(include={"weight_decay", "decay", "clip_norm", "lora_plus_ratio", "noise_scale"})
        )


class _DatasetRun(TrainedRun):
    """Common fields of runs on a dataset: either epochs or steps, and either batch_size or batch_tokens."""

    dataset: DatasetSource
    eval_dataset: DatasetSource | None = None
    epochs: float | None = Field(default=None, gt=0, le=1000, description="passes over the data")
    steps: int | None = Field(default=None, ge=1, le=10_000_000, description="optimizer steps, instead of epochs")
    batch_size: int | None = Field(default=None, ge=1, description="examples per step")
    batch_tokens: int | None = Field(default=None, ge=1, description="most tokens per step, instead of batch_size")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest example")
    max_lost_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="refuse the data if more rows than this are dropped or have nothing to train on",
    )
    learning_rate: float = Field(gt=0, le=10, description=PEAK)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="learning-rate schedule after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    eval_every: int = Field(default=0, ge=0, description="evaluate every this many steps; 0: only before and after")
    num_samples: int = Field(default=0, ge=0, le=16, description="greedy completions at each evaluation")
    sample_tokens: int = Field(default=64, ge=1, le=1024, description="longest greedy completion")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: a tenth of the run")
    keep_checkpoints: int = Field(default=2, ge=1, le=1000, description="how many of the newest checkpoints are kept")

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

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.eval_dataset is None and (self.num_samples or self.eval_every):
            raise ValueError("num_samples and eval_every need an eval_dataset: its rows are what is shown")
        return self


class _ExamplesRun(_DatasetRun):
    dataset: ExamplesSource = Field(description="examples")
    eval_dataset: ExamplesSource | None = Field(default=None, description="held-out examples")
    too_long: Literal["drop", "truncate"] = Field(default="drop", description="what happens to longer examples")
    learning_rate: float = Field(default=1e-4, gt=0, le=10, description=PEAK)


class SFTRun(_ExamplesRun):
    """Supervised fine-tuning, as a user requests it."""

    kind: Literal["sft"] = "sft"
    learning_rates: tuple[Annotated[float, Field(ge=0, le=10)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="learning rates, one per step, instead of a schedule; 0 trains nothing",
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


class DistillRun(_ExamplesRun, TaughtBy):
    """Distillation on a dataset (shared.jobs.losses.Distillation): a student becomes like its teacher on its tokens."""

    kind: Literal["distill"] = "distill"

    @model_validator(mode="after")
    def _teacher_stays(self) -> Self:
        teacher_stays(self.trainable, self)
        return self


class DPORun(Preferences, _DatasetRun):
    """Preference optimisation (shared.jobs.losses.DPO, KTO), as a user requests it. An example is a pair; for kto it is
    an answer with its label and an answer to another prompt.

    An example's tokens are those of its prompt and of both answers. If they exceed max_tokens it is left out, not cut.
    """

    kind: Literal["dpo"] = "dpo"
    dataset: PreferencesSource = Field(description="preference pairs; for kto also answers with a label")
    eval_dataset: PreferencesSource | None = Field(default=None, description="held-out pairs, or answers with a label")
    too_long: Literal["drop"] = "drop"
    batch_size: int | None = Field(default=None, ge=1, description="pairs per step")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest pair, including both answers")
    learning_rate: float = Field(default=1e-5, gt=0, le=10, description=PEAK)
    reference: str | None = Field(
        default=None,
        min_length=1,
        max_length=2048,
        description="`base`, or URI of a published adapter on that base; if absent, the model that the run starts from",
    )

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if not self.reads_labels:
            _Pairs(dataset=self.dataset, eval_dataset=self.eval_dataset)  # its errors say at which field
        return self


class RewardRun(_DatasetRun):
    """A reward model, as a user requests it: trained on pairs of answers (shared.jobs.losses.BradleyTerry) or on
    answers with scores (squared_error). The objective sets the head of scalars. Rewards are at answers' last tokens.
    """

    kind: Literal["reward"] = "reward"
    objective: Literal["bradley_terry", "squared_error"] = Field(
        default="bradley_terry", description="pairs, with or without a margin; squared_error: answers with scores"
    )
    dataset: PreferencesSource = Field(description="preference pairs; for squared_error answers with scores")
    eval_dataset: PreferencesSource | None = Field(default=None, description="held-out pairs, or answers with scores")
    score_fields: tuple[Name, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SCALARS,
        description="for squared_error: numeric fields of rows, each a scalar of the head; score if absent",
    )
    per_turn: bool = Field(
        default=False, description="for squared_error: rows' labels have a number for each turn of the assistant"
    )
    center: float = Field(
        default=0.0, ge=0, le=1000, description="for bradley_terry: weight of the squared sum of a pair's rewards"
    )
    too_long: Literal["drop"] = "drop"
    batch_size: int | None = Field(default=None, ge=1, description="pairs, or answers, per step")
    max_tokens: int = Field(default=2048, ge=2, le=1_048_576, description="longest answer, or pair with both answers")
    learning_rate: float = Field(default=1e-4, gt=0, le=10, description=PEAK)

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
        """The head of `trainable`, which the objective trains."""
        if self.per_turn:
            return ScalarHead(names=("reward",), per="token")
        return ScalarHead(names=("reward",) if self.reads_pairs else self.score_fields or ("score",), per="sequence")

    @property
    def reads_pairs(self) -> bool:
        return self.objective == "bradley_terry"

    @property
    def number_fields(self) -> tuple[str, ...]:
        """The fields of rows with numbers that are learned, in addition to the answers."""
        return ("margin",) if self.reads_pairs else ("labels",) if self.per_turn else self.head.names

    # Replaces the base class's validator: here the other head is trained.
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
