"""The request of a fine-tuning job: OpenAI's fields, and ours under `longshore`. `runs.py` makes a run of it.

Unknown fields are refused, since ignoring one would train another model than was asked for.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from longshore.fields import Frozen
from service.runs.own_settings import OwnSettings
from shared.grading.graders import Grader
from shared.jobs.losses import AdvantageKind, Objective, Preset
from shared.runs.requests import MAX_METADATA, MetadataKey, MetadataValue, WandbRun
from shared.runs.sources import Format

MAX_SUFFIX = 64


def _automatic(given: Any) -> Any:
    return None if given == "auto" else given


def _auto(kind: str) -> Any:
    return WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": kind}, {"type": "null"}]})


# None: chosen here, by the rules of docs/openai_api.md.
AutoInt = Annotated[int | None, BeforeValidator(_automatic), _auto("integer")]
AutoFloat = Annotated[float | None, BeforeValidator(_automatic), _auto("number")]


def _at_most(most: int, instead: str = "") -> AfterValidator:
    """Return a validator by a bound of OpenAI's, which protects the installation. `instead`: our own setting."""

    def check(given: float | None) -> float | None:
        if given is not None and given > most:
            more = f": for more, give {instead} in `longshore`" if instead else ""
            raise ValueError(f"at most {most}, as at OpenAI{more}")
        return given

    return AfterValidator(check)


class Hyperparameters(Frozen):
    """Hyperparameters of every method."""

    batch_size: Annotated[AutoInt, _at_most(256, "batch_tokens")] = None
    learning_rate_multiplier: AutoFloat = None
    n_epochs: Annotated[AutoInt, _at_most(50, "steps")] = None


class DpoHyperparameters(Hyperparameters):
    beta: Annotated[AutoFloat, _at_most(2)] = None


class ReinforcementHyperparameters(Hyperparameters):
    batch_size: Annotated[AutoInt, _at_most(256)] = None
    compute_multiplier: Annotated[AutoFloat, _at_most(10, "group_size")] = None
    eval_interval: AutoInt = None
    eval_samples: AutoInt = None
    reasoning_effort: Literal["default"] | None = Field(
        default=None, description="templates of open models have no such switch: only `default`"
    )


class Supervised(Frozen):
    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(Frozen):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Reinforcement(Frozen):
    grader: Grader
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()


class Method(Frozen):
    """The training method. Settings of another method than `type` are refused."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Reinforcement | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        for name in ("supervised", "dpo", "reinforcement"):
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"{name} would be ignored: the type is {self.type}")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError("reinforcement needs its settings: a grader, at least")
        return self


class WandbIntegration(Frozen):
    """The W&B run that a job is written to."""

    type: Literal["wandb"]
    wandb: WandbRun


class LongshoreSettings(OwnSettings):
    """Our own settings, by their native names (docs/api.md); those that are absent have their native defaults.

    Settings that the job's method does not have are refused.
    """

    full: bool | None = Field(default=None, description="train every weight, and not a LoRA adapter")
    batch_tokens: int | None = Field(default=None, description="in the place of batch_size")
    steps: int | None = Field(default=None, description="in the place of n_epochs")
    learning_rate: float | None = Field(default=None, description="in the place of learning_rate_multiplier")
    schedule: Literal["constant", "linear", "cosine"] | None = None
    warmup_steps: int | None = None
    max_lost_fraction: float | None = None
    too_long: Literal["drop", "truncate"] | None = None
    eval_every: int | None = None
    num_samples: int | None = None
    sample_tokens: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = None
    format: Format | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    assistant_turns: Literal["all", "last"] | None = None
    assistant_pattern: str | None = None
    objective: Objective | None = None
    label_smoothing: float | None = None
    gamma: float | None = None
    rpo_alpha: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    reference: str | None = None
    algorithm: Preset | None = None
    advantages: AdvantageKind | None = None
    mini_batches: int | None = None
    group_size: int | None = Field(default=None, description="in the place of compute_multiplier")
    max_completion_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    redraws: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    off_policy_steps: int | None = None
    sampler_url: str | None = None
    probe_bound: float | None = None
    routing_replay: Literal["on", "off"] | None = None
    max_ungraded_fraction: float | None = None
    target: float | None = Field(default=None, description="mean grade of validation prompts that ends the job")

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were sent, by name; null counts as absent."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}


class JobRequest(Frozen):
    """`POST /v1/fine_tuning/jobs`."""

    model: str = Field(
        min_length=1, max_length=2048, description="a hub id, folder or URI; or the name of what you have published"
    )
    training_file: str = Field(
        min_length=1, max_length=2048, description="the id of a file of the purpose fine-tune; or a URI of a dataset"
    )
    validation_file: str | None = Field(default=None, min_length=1, max_length=2048)
    method: Method | None = None
    hyperparameters: Hyperparameters | None = Field(
        default=None, description="deprecated: use method.supervised.hyperparameters"
    )
    suffix: str | None = Field(default=None, max_length=MAX_SUFFIX, description="the name to publish the result under")
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    metadata: dict[MetadataKey, MetadataValue] | None = Field(default=None, max_length=MAX_METADATA)
    integrations: tuple[WandbIntegration, ...] | None = Field(default=None, max_length=1)
    longshore: LongshoreSettings = LongshoreSettings()

    @model_validator(mode="after")
    def _one_place_for_hyperparameters(self) -> Self:
        if self.hyperparameters is None or self.method is None:
            return self
        if self.method.type != "supervised" or self.method.supervised is not None:
            raise ValueError("hyperparameters stand in method: those beside it would be ignored")
        return self

    @property
    def how(self) -> Supervised | Dpo | Reinforcement:
        """The method with its settings, from `method` or from the older field for hyperparameters."""
        match self.method:
            case None:
                return Supervised(hyperparameters=self.hyperparameters or Hyperparameters())
            case Method(type="dpo", dpo=dpo):
                return dpo or Dpo()
            case Method(type="reinforcement", reinforcement=Reinforcement() as reinforcement):
                return reinforcement
            case Method(supervised=supervised):
                return supervised or Supervised(hyperparameters=self.hyperparameters or Hyperparameters())
