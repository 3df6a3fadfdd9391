"""Runs on a dataset, as users request them: fine-tuning, preferences, distillation."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)

from longshore import training
from longshore.environments import Agent, PythonEnvironment
from longshore.fields import Frozen, Name, added, pattern
from longshore.grading import UNGRADED, EnvironmentGrader, Grader, parts_of
from longshore.losses import (
    MOST_TEACHERS,
    DistillationSettings,
    Preferences,
    check_teacher_is_frozen,
    several_teachers_fit,
)

# --- Datasets of runs: where they are and the format of their rows; and teachers ---

Format = Literal[
    "auto", "chat", "prompt_completion", "alpaca", "sharegpt", "text", "tokenized", "preference", "openai_preference"
]
PAIR_FORMATS = ("preference", "openai_preference")


class DatasetSource(Frozen):
    """A dataset's URI and format. `auto` detects the format from the first rows, and refuses ambiguous ones.

    Text is read as a URI.
    """

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

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_uri(cls, given: Any) -> Any:
        return {"uri": given} if isinstance(given, str) else given


def _is_not_a_prefix(name: str) -> str:
    if name == "eval":  # `eval_loss` is the loss of a set without a name
        raise ValueError("metrics of evaluations begin with eval_: give another name")
    return name


SetName = Annotated[
    str,
    pattern(
        r"^[a-z0-9][a-z0-9-]{0,31}$",
        "this name has at most 32 lower-case letters, digits and dashes, a letter or digit first",
    ),
    AfterValidator(_is_not_a_prefix),
]
"""The name of a source or of held-out data in metrics: no underscore, which ends it there (`eval_NAME_loss`)."""


class MixedSource(DatasetSource):
    """A source of a mixture: a dataset, and how much of what is trained comes from it.

    Either `weight` or `epochs` is of all sources that have any. A source without one has 1.
    """

    name: SetName | None = Field(default=None, description="its name in metrics; its number, from 1, if absent")
    weight: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        strict=True,
        description="its share of the examples, relative to the weights of the other sources",
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        strict=True,
        description="passes over it in each epoch of the run",
    )

    @property
    def alone(self) -> DatasetSource:
        """The dataset without its place in a mixture."""
        return DatasetSource(**self.model_dump(include=set(DatasetSource.model_fields)))


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
MOST_SOURCES = 64


@cache
def _mixture() -> TypeAdapter[tuple[MixedSource, ...]]:
    sources = Annotated[tuple[MixedSource, ...], Field(min_length=1, max_length=MOST_SOURCES)]
    return TypeAdapter(sources)


def _of_sources(*checks: Callable[[DatasetSource], DatasetSource]) -> WrapValidator:
    """Return a validator of one dataset, or of a list of sources, each by these checks.

    It replaces the validator of the union, whose errors would name the union's members instead of fields alone.
    """

    def read(given: Any, _: object) -> Any:
        if not isinstance(given, list | tuple):
            one = DatasetSource.model_validate(given)
            for check in checks:
                check(one)
            return one
        sources = _mixture().validate_python(given)
        for number, source in enumerate(sources):
            for check in checks:
                try:
                    check(source)
                except ValueError as error:
                    refused = {"type": "value_error", "loc": (number,), "input": source, "ctx": {"error": error}}
                    raise ValidationError.from_exception_data("dataset", [refused]) from None  # type: ignore[list-item]
        _check_shares(sources)
        return sources

    return WrapValidator(read)


def _check_shares(sources: tuple[MixedSource, ...]) -> None:
    """Raise ValueError if the sources of a mixture have no shares, or shares of two kinds, or one name."""
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and any(source.epochs is not None for source in sources):
        raise ValueError("some sources have a weight and some epochs: give one of both")
    if weights and len(weights) == len(sources) and not sum(weights):
        raise ValueError("the weights sum to 0: nothing would be drawn")
    names = [source.name or str(number) for number, source in enumerate(sources, 1)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two sources have the name {twice} in metrics")


Dataset = DatasetSource | tuple[MixedSource, ...]
ExamplesDataset = Annotated[Dataset, _of_sources(_both_fields_or_none, _no_pairs)]
PreferencesDataset = Annotated[Dataset, _of_sources(_both_fields_or_none, _preferences_alone)]
PairsDataset = Annotated[Dataset, _of_sources(_pairs_alone)]
PromptsDataset = Annotated[Dataset, _of_sources(_prompts_alone)]


def named_sources(dataset: Dataset) -> dict[str, DatasetSource]:
    """Return the sources of a mixture by their names in metrics. One dataset has an empty name."""
    if isinstance(dataset, DatasetSource):
        return {"": dataset}
    return {source.name or str(number): source.alone for number, source in enumerate(dataset, 1)}


def sources_by_split(dataset: Dataset, split: str) -> dict[str, DatasetSource]:
    """Return a dataset, or each source of a mixture, by the name that it is downloaded under."""
    if isinstance(dataset, DatasetSource):
        return {split: dataset}
    return {f"{split}-{number}": source.alone for number, source in enumerate(dataset, 1)}


def evaluations_by_split(evaluations: Mapping[str, DatasetSource]) -> dict[str, DatasetSource]:
    """Return held-out data, in order, by the name that each is downloaded under: `eval` if it has none."""
    return {f"eval-{name}".removesuffix("-"): source for name, source in evaluations.items()}


def _each_name_once(given: Any) -> Any:
    """Read pairs of a name and a dataset as an object. Raises ValueError for a name that is there twice."""
    if not isinstance(given, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in given
    ):
        return given
    names = [pair[0] for pair in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two evaluations have the name {twice}")
    return dict(given)


NamedPrompts = Annotated[dict[SetName, PromptsSource], BeforeValidator(_each_name_once)]
_NamedExamples = Annotated[dict[SetName, ExamplesSource], BeforeValidator(_each_name_once)]
_NamedPreferences = Annotated[dict[SetName, PreferencesSource], BeforeValidator(_each_name_once)]
_EVALUATIONS: dict[str, Any] = {
    "max_length": 16,
    "description": "held-out data by name, instead of eval_dataset: each is evaluated, as eval_NAME_loss",
}
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
    teachers: Annotated[tuple[tuple[Name, TeacherUri], ...], training.PAIRED] = Field(
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
    model: training.ModelUri
    trainable: training.Trainable = training.Lora()
    initial_adapter: str | None = Field(default=None, description="a published adapter to continue from: URI or name")
    allow_other_base: bool = Field(default=False, description=training.OTHER_BASE_DESCRIPTION)
    bin_tokens: int | None = Field(default=None, ge=2, description="tokens of a micro-batch; max_tokens if absent")
    memory_budget_bytes: int | None = Field(default=None, ge=1_000_000, description=_BUDGET)
    optimizer: training.OptimizerName = "adamw"
    weight_decay: float = Field(default=0.0, ge=0, description="the optimizer's decoupled weight decay")
    decay: training.Decay = "all"
    clip_norm: float = Field(default=1.0, ge=0, description="bound of the global gradient norm; 0 for none")
    lora_plus_ratio: training.LoraPlusRatio = 1.0
    noise_scale: training.NoiseScale = False
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the data's order and of fresh adapter weights")
    engine: training.EngineName = Field(
        default="megatron", description="the training engine; fsdp: only layouts of dp and tp"
    )
    layout: training.Layout = training.Layout()
    dtype: training.DtypeChoice = Field(default="auto", description=training.DTYPE_DESCRIPTION)
    quantize_base: training.Quantization | None = Field(default=None, description=training.QUANTIZE_DESCRIPTION)
    optimizer_states: training.OptimizerStates = Field(default="float32", description=training.STATES_DESCRIPTION)
    recompute: training.Recompute = Field(default="auto", description=training.RECOMPUTE_DESCRIPTION)

    _fields_fit_engine = model_validator(mode="after")(training.fields_fit_engine)
    _pipelines_have_bins = model_validator(mode="after")(training.pipelines_have_bins)
    _trains_the_language_head = model_validator(mode="after")(training.trains_the_language_head)

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Self:
        training.check_optimizer(self.settings_of_optimizer, self.engine, self.layout, self.trainable)
        return self

    @model_validator(mode="after")
    def _an_adapter_is_trained_on(self) -> Self:
        if self.initial_adapter is not None and self.trainable.kind == "full":
            raise ValueError("full training cannot continue from an adapter: drop initial_adapter, or train a lora")
        return self

    @property
    def settings_of_optimizer(self) -> training.Optimizer:
        """The optimizer of the run's jobs."""
        return (training.Muon if self.optimizer == "muon" else training.Adam)(
            **self.model_dump(include={"weight_decay", "decay", "clip_norm", "lora_plus_ratio", "noise_scale"})
        )


# --- Prompts that a run samples by itself, and how their samples are graded ---

HELD_OUT_METRICS = ("eval_reward_mean", "eval_reward_std", "eval_response_tokens_mean", "eval_truncation_rate")


class HeldOutPrompts(Frozen):
    """Held-out prompts, sampled and graded before the first step, every `every_steps`, and after the last."""

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

    @property
    def evaluations(self) -> dict[str, DatasetSource]:
        """The held-out prompts by name; those of `prompts` have an empty one."""
        return {"": self.prompts} if self.prompts is not None else self.sets

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that may decide. With names, `eval_reward_mean` is the mean of all sets together."""
        if not self.sets:
            return HELD_OUT_METRICS
        of_sets = (metric.replace("eval", f"eval_{name}", 1) for name in self.sets for metric in HELD_OUT_METRICS)
        return (HELD_OUT_METRICS[0], *of_sets)

    def check_metrics(self, names: set[str]) -> None:
        """Raise ValueError if one of these metrics is none of held-out prompts."""
        if unknown := names.difference(self.metric_names):
            known = ", ".join(self.metric_names)
            raise ValueError(f"{unknown.pop()} is no metric of held-out prompts; they have {known}")

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


class GradedSamples(Frozen):
    """How prompts are sampled, and how the samples are graded."""

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
    max_completion_tokens: int = Field(default=256, ge=1, le=1_048_575, description="longest sample")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), max_length=16, description="text that ends a sample"
    )
    sampler: training.SamplerKind = Field(
        default="own", description="the sampler that a host starts: Longshore's own, or vLLM"
    )
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
    max_lost_fraction: float = Field(
        default=0.1, ge=0, le=1, description="largest share of prompts that may be too long to leave room for an answer"
    )
    probe_bound: float | None = Field(
        default=None,
        gt=0,
        description="largest difference in nats between sampler and trainer on a probe text; None: 1e-4 in float32, "
        "0.3 in bfloat16",
    )

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
    def _samplers_are_leased(self) -> Self:
        if self.samplers > 1 and self.sampler_url is not None:
            raise ValueError("a sampler behind a URL is one: drop samplers, or sampler_url")
        return self


class HeldOutRollouts(GradedSamples):
    """What a run on a dataset samples by itself: held-out prompts alone."""

    held_out: HeldOutPrompts

    @model_validator(mode="after")
    def _are_graded(self) -> Self:
        if self.grader == UNGRADED:
            raise ValueError("grader is missing: held-out prompts are sampled to be graded")
        return self


def check_rollouts(run: TrainedRun, max_tokens: int, rollouts: GradedSamples) -> None:
    """Raise ValueError if samplers cannot draw these samples from the run's model."""
    if rollouts.max_completion_tokens >= max_tokens:
        raise ValueError("max_tokens must hold a prompt too: more than rollouts.max_completion_tokens")
    if rollouts.sampler_url is not None and run.trainable.kind == "full":
        raise ValueError("full training needs a sampler that takes whole weights: drop rollouts.sampler_url")
    if run.quantize_base is not None and rollouts.probe_bound is None:
        raise ValueError(
            "quantize_base: samplers hold the base as it is in its files, so that their log-probabilities differ: "
            "say by rollouts.probe_bound how far, in nats, or drop quantize_base"
        )


class _DatasetRun(training.Watched, TrainedRun):
    """Common fields of runs on a dataset: either epochs or steps, and either batch_size or batch_tokens."""

    dataset: Dataset
    eval_dataset: DatasetSource | None = None
    eval_datasets: dict[str, DatasetSource] = added({})
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
    rollouts: HeldOutRollouts | None = added(
        None, description="held-out prompts, sampled and graded before, during and after the training"
    )
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
        if self.eval_datasets and self.eval_dataset is not None:
            raise ValueError("eval_datasets: give the data of eval_dataset a name there, and drop eval_dataset")
        if not self.evaluations and (self.num_samples or self.eval_every):
            raise ValueError("num_samples and eval_every need an eval_dataset: its rows are what is shown")
        held_out = self.rollouts.held_out if self.rollouts is not None else None
        of_prompts = self.watched.intersection(HELD_OUT_METRICS if held_out is None else held_out.metric_names)
        decides = "early_stop" if self.keep == "last" else "keep"
        if held_out is not None and not self.evaluations:
            held_out.check_metrics(self.watched)
        if of_prompts and not (held_out is not None and held_out.every_steps):
            raise ValueError(
                f"{decides}: set rollouts.held_out and its every_steps, for evaluations between the steps: "
                f"{min(of_prompts)} is of held-out prompts"
            )
        if self.watched - of_prompts and not (self.evaluations and self.eval_every):
            raise ValueError(f"{decides}: set eval_dataset and eval_every, for evaluations between the steps")
        if of_prompts and self.watched - of_prompts and held_out and held_out.every_steps != self.eval_every:
            raise ValueError(
                "best_by and early_stop.metric: one is of an eval_dataset and one of held-out prompts, so set "
                "rollouts.held_out.every_steps to eval_every: an evaluation that decides has both"
            )
        for field, metric in self._watched_by():
            is_of_rows = metric not in of_prompts
            if (
                is_of_rows
                and self.eval_datasets
                and not any(metric.startswith(f"eval_{name}_") for name in self.eval_datasets)
            ):
                known = ", ".join(f"eval_{name}_loss" for name in self.eval_datasets)
                raise ValueError(f"{field}: eval_datasets have no {metric}; they have {known}, and other metrics")
        return self

    @model_validator(mode="after")
    def _rollouts_fit(self) -> Self:
        if self.rollouts is not None:
            check_rollouts(self, self.max_tokens, self.rollouts)
        return self

    @property
    def usual_metric(self) -> str:
        return "eval_loss" if self.evaluations or self.rollouts is None else HELD_OUT_METRICS[0]

    def _watched_by(self) -> Iterator[tuple[str, str]]:
        """Yield the metrics that decide, each with the field that it is of."""
        if self.keeps_by is not None and (self.best_by or not (self.early_stop and self.early_stop.metric)):
            yield "best_by", self.keeps_by
        if self.stops_by is not None:
            yield "early_stop.metric", self.stops_by

    @property
    def sources(self) -> tuple[DatasetSource, ...]:
        """The data that is trained on: one dataset, or the sources of a mixture."""
        return (self.dataset,) if isinstance(self.dataset, DatasetSource) else self.dataset

    @property
    def evaluations(self) -> dict[str, DatasetSource]:
        """The held-out data by name; that of `eval_dataset` has an empty one."""
        return {"": self.eval_dataset} if self.eval_dataset is not None else self.eval_datasets


class _ExamplesRun(_DatasetRun):
    dataset: ExamplesDataset = Field(description="examples")
    eval_dataset: ExamplesSource | None = Field(default=None, description="held-out examples")
    eval_datasets: _NamedExamples = added({}, **_EVALUATIONS)
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
    """Distillation on a dataset: a student becomes like its teacher on the tokens of its rows."""

    kind: Literal["distill"] = "distill"

    @model_validator(mode="after")
    def _teacher_stays(self) -> Self:
        check_teacher_is_frozen(self.trainable, self)
        return self


class DPORun(Preferences, _DatasetRun):
    """Preference optimisation (DPO, KTO in losses.py), as a user requests it. An example is a pair; for kto it is
    an answer with its label and an answer to another prompt.

    An example's tokens are those of its prompt and of both answers. If they exceed max_tokens it is left out, not cut.
    """

    kind: Literal["dpo"] = "dpo"
    dataset: PreferencesDataset = Field(description="preference pairs; for kto also answers with a label")
    eval_dataset: PreferencesSource | None = Field(default=None, description="held-out pairs, or answers with a label")
    eval_datasets: _NamedPreferences = added({}, **_EVALUATIONS)
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
            _Pairs(
                dataset=self.dataset, eval_dataset=self.eval_dataset, eval_datasets=self.eval_datasets
            )  # its errors say at which field
        return self


class RewardRun(_DatasetRun):
    """A reward model, as a user requests it: trained on pairs of answers (longshore.losses.BradleyTerry) or on
    answers with scores (squared_error). The objective sets the head of scalars. Rewards are at answers' last tokens.
    """

    kind: Literal["reward"] = "reward"
    objective: Literal["bradley_terry", "squared_error"] = Field(
        default="bradley_terry", description="pairs, with or without a margin; squared_error: answers with scores"
    )
    dataset: PreferencesDataset = Field(description="preference pairs; for squared_error answers with scores")
    eval_dataset: PreferencesSource | None = Field(default=None, description="held-out pairs, or answers with scores")
    eval_datasets: _NamedPreferences = added({}, **_EVALUATIONS)
    score_fields: tuple[Name, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=training.MAX_SCALARS,
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
        trained = given.get("trainable", training.Lora()) if isinstance(given, dict) else None
        told = trained.model_dump() if isinstance(trained, training.Lora | training.Full) else trained
        if not isinstance(told, dict):
            return given
        fields = given.get("score_fields") or ("score",)
        names = fields if given.get("objective") == "squared_error" and not given.get("per_turn") else ("reward",)
        head = {"names": names, "per": "token" if given.get("per_turn") is True else "sequence"}
        return given | {"trainable": told | {"head": told.get("head") or head}}

    @property
    def head(self) -> training.ScalarHead:
        """The head of `trainable`, which the objective trains."""
        if self.per_turn:
            return training.ScalarHead(names=("reward",), per="token")
        return training.ScalarHead(
            names=("reward",) if self.reads_pairs else self.score_fields or ("score",), per="sequence"
        )

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
        if self.rollouts is not None:
            raise ValueError("rollouts: a head of scalars writes no text: drop them")
        if self.score_fields is not None and (self.reads_pairs or self.per_turn or "labels" in self.score_fields):
            raise ValueError("score_fields are of squared_error without per_turn, which reads `labels`: drop them")
        if self.reads_pairs and self.per_turn:
            raise ValueError("per_turn is of squared_error: bradley_terry learns from whole answers")
        if not self.reads_pairs and self.center:
            raise ValueError("center would be ignored by squared_error: it is of bradley_terry")
        if self.reads_pairs:
            _Pairs(dataset=self.dataset, eval_dataset=self.eval_dataset, eval_datasets=self.eval_datasets)
        return self


class _Pairs(Frozen):
    dataset: PairsDataset
    eval_dataset: PairsSource | None
    eval_datasets: dict[str, PairsSource]


DatasetRun = Annotated[SFTRun | DPORun | DistillRun | RewardRun, Field(discriminator="kind")]
