"""Parses ART's requests for training jobs, and makes runs of them. Settings that have no equivalent are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from longshore.fields import Frozen
from longshore.losses import CISPO, GSPO, PPO
from service.apis.errors import validation_problem
from service.inference.art_models import ArtModel, ModelId
from service.inference.published_models import one_form
from service.runs.own_settings import LORA_FIELDS
from shared.errors import InvalidInput
from shared.runs.dataset_runs import SFTRun
from shared.runs.requests import RLRun, Source

# --- The settings that ART's clients send with a job ---
# A key is accepted or refused by its value, never by its presence.
#
# Newer clients send all of their settings with every job, most of them at defaults that mean "off". Those of a release
# that is not known yet are accepted while they mean that.

# The defaults of ART's trainer: the bounds of CISPO, and those of PPO.
_CISPO_LOW, _CISPO_HIGH, _PPO = 1.0, 4.0, 0.2
_OFF = ("none", "off", "default", "auto")
_UNKNOWN_TO_LOSSES = "no loss here knows it: leave it at its default"
_NOT_DONE = "this is not done here: leave it at its default"


def is_off(value: object) -> bool:
    """Return True for null, false, zero, empty values, and words for these."""
    return not value or value in _OFF


def _off(words: str) -> BeforeValidator:
    """Return a validator that takes values that mean off, as None, and refuses all others with these words."""

    def check(value: object) -> None:
        if not is_off(value):
            raise PydanticCustomError("not_done", words)

    return BeforeValidator(check)


class SentModel(Frozen):
    """The parent of requests: an unknown key is dropped if its value means off, else refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_keys_that_are_off(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name in cls.model_fields or not is_off(value)}


class ExperimentalConfig(SentModel):
    """Settings of a reinforcement job. Nulls have ART's defaults."""

    learning_rate: float | None = None
    ppo: bool | None = None
    loss_fn: Literal["cispo", "ppo"] | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    scale_rewards: bool | None = None
    normalize_advantages: bool | None = None
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] | None = None
    max_negative_advantage_importance_sampling_weight: float | None = None
    precalculate_logprobs: bool | None = None
    truncated_importance_sampling: float | None = Field(default=None, ge=0)
    packed_sequence_length: int | None = Field(default=None, ge=2, le=1_048_576)

    # Only off.
    advantage_balance: Annotated[None, _off(_UNKNOWN_TO_LOSSES)] = None
    mask_prob_ratio: Annotated[None, _off(_UNKNOWN_TO_LOSSES)] = None
    kimi_k2_tau: Annotated[None, _off(_UNKNOWN_TO_LOSSES)] = None
    kl_penalty_coef: Annotated[None, _off(_UNKNOWN_TO_LOSSES)] = None
    allow_training_without_logprobs: Annotated[None, _off(_NOT_DONE)] = None
    num_trajectories_learning_rate_multiplier_power: Annotated[None, _off(_NOT_DONE)] = None
    plot_tensors: Annotated[None, _off(_NOT_DONE)] = None
    scale_learning_rate_by_reward_std_dev: Annotated[None, _off(_NOT_DONE)] = None

    # Any value is accepted, since none changes the training: chunk sizes, and details of a KL penalty of 0.
    logprob_calculation_chunk_size: int | None = Field(default=None, ge=1)
    kl_penalty_reference_step: int | None = Field(default=None, ge=0)
    kl_penalty_source: Literal["current_learner", "sample"] | None = None
    kl_penalty_step_lag: int | None = Field(default=None, ge=1)
    kl_ref_adapter_path: str | None = None

    @model_validator(mode="after")
    def _one_loss(self) -> Self:
        if self.loss_fn is not None and self.ppo is not None and self.ppo != (self.loss_fn == "ppo"):
            raise ValueError(f"loss_fn is {self.loss_fn}, but ppo means another loss")
        return self

    @property
    def divides_by_deviation(self) -> bool:
        """Whether a reward's distance from its group's mean is divided by the group's standard deviation."""
        return self.scale_rewards is not False and self.normalize_advantages is not False

    @property
    def loss(self) -> CISPO | PPO | GSPO:
        """The loss that equals ART's objective: CISPO for its clipped REINFORCE, PPO for its clipped surrogate.

        Raises InvalidInput: no loss equals it; names the field. ValidationError: a number is out of its bounds.
        """
        is_ppo = self.loss_fn == "ppo" if self.loss_fn is not None else bool(self.ppo)
        low = self.epsilon if self.epsilon is not None else (_PPO if is_ppo else _CISPO_LOW)
        high = self.epsilon_high if self.epsilon_high is not None else (low if is_ppo else _CISPO_HIGH)
        most = self.max_negative_advantage_importance_sampling_weight or None
        match self.importance_sampling_level or "token", is_ppo:
            case "token", True:
                return PPO(clip_low=low, clip_high=high, dual_clip=most, **self._old)
            case "token", False:
                # CISPO clips the weight from above, so a bound on the ratio is just a lower value of that clip.
                return CISPO(clip_low=low, clip_high=high if most is None else min(high, most - 1), **self._old)
            case "sequence", True if most is None:
                return GSPO(clip_low=low, clip_high=high, aggregation="token_mean", **self._old)
            case "sequence", _:
                rule = "by sequence alone with ppo, and without max_negative_advantage_importance_sampling_weight"
                raise _refusal("importance_sampling_level", rule)
            case level, _:
                raise _refusal("importance_sampling_level", f"no loss here weighs by {level}: token or sequence")

    @property
    def _old(self) -> dict[str, Any]:
        """The policy that the loss's ratios compare with, and the bound of the weight that corrects for the sampler.

        Raises InvalidInput: a bound without the trainer's own log-probabilities.
        """
        bound = self.truncated_importance_sampling or None
        if self.precalculate_logprobs:
            return {"old": "trainer", "truncated_importance": bound}
        if bound is not None:
            rule = "it weighs the trainer's log-probabilities against the sampler's: with precalculate_logprobs alone"
            raise _refusal("truncated_importance_sampling", rule)
        return {"old": "sampler"}


def _refusal(name: str, rule: str) -> InvalidInput:
    return InvalidInput(rule, f"experimental_config.{name}")


class MetricLogging(SentModel):
    """Asks the service to keep a supervised job's metrics, which it does in any case, by the run's own steps."""

    enabled: bool | None = None
    target_training_step: int | None = Field(default=None, ge=0)


class SftConfig(SentModel):
    """Settings of a supervised job. A list of learning rates has one for every batch."""

    batch_size: int | None = None
    learning_rate: float | tuple[float, ...] | None = None
    metric_logging: MetricLogging | None = None
    assistant_turns: Literal["all", "last"] | None = None


# Conversations of agents are long, and ART's clients cannot say how long.
_MAX_TOKENS = 8192
# Broken conversations are left out, since a single one of thousands would fail the client's step.
_BROKEN = "drop"
# The client's own defaults.
_RL_RATE, _SFT_RATE, _SFT_BATCH = 5e-6, 5e-5, 2
_RL_ALONE = {"temperature", "idle_s", "between_steps", "equal_rewards", "broken"}
_RL_NAMES = {
    "learning_rate": "experimental_config.learning_rate",
    "loss.clip_low": "experimental_config.epsilon",
    "loss.clip_high": "experimental_config.epsilon_high",
    "clip_low": "experimental_config.epsilon",
    "clip_high": "experimental_config.epsilon_high",
}
_SFT_NAMES = {
    "dataset.uri": "training_data_url",
    "learning_rate": "config.learning_rate",
    "learning_rates": "config.learning_rate",
    "steps": "config.learning_rate",
    "batch_size": "config.batch_size",
}
MODEL_LABEL, NAME_LABEL = "art_model", "art_name"
"""Labels of a model's runs, by which they are found."""


class SftRequest(SentModel):
    """`POST /v1/preview/sft-training-jobs`."""

    model_id: ModelId
    training_data_url: str = Field(min_length=1, max_length=2048, description="URI of a dataset, or wandb-artifact:///")
    config: SftConfig | None = None


class RlRequest(SentModel):
    """`POST /v1/preview/training-jobs` without its groups, which are read one by one."""

    model_id: ModelId
    experimental_config: ExperimentalConfig | None = None


def rl_run(model: ArtModel, config: ExperimentalConfig, adapter: str | None) -> RLRun:
    """The run that takes a model's train steps; steps with another config need another run.

    `adapter`: URI of the adapter that the run starts from.

    Raises InvalidInput: names the client's field and the rule that it breaks.
    """
    try:
        return RLRun.model_validate(
            _common(model, adapter)
            | {"broken": _BROKEN}
            | model.settings.model_dump(include=_RL_ALONE, exclude_none=True)
            | _sizes(model, config.packed_sequence_length)
            | {
                "loss": config.loss,
                "advantages": "group_normalized" if config.divides_by_deviation else "group_mean",
                "learning_rate": _RL_RATE if config.learning_rate is None else config.learning_rate,
            }
        )
    except ValidationError as error:
        raise _named(error, _RL_NAMES) from None


def sft_run(model: ArtModel, url: str, config: SftConfig, adapter: str | None) -> SFTRun:
    """Return the run of one pass over a dataset.

    `adapter`: URI of the adapter that the run starts from.

    Raises InvalidInput: names the client's field and the rule that it breaks.
    """
    try:
        return SFTRun.model_validate(
            _common(model, adapter)
            | {
                "dataset": {"uri": url, "assistant_turns": config.assistant_turns or "all"},
                "batch_size": _SFT_BATCH if config.batch_size is None else config.batch_size,
                "schedule": "constant",
            }
            | _rates(config)
        )
    except ValidationError as error:
        raise _named(error, _SFT_NAMES) from None


def _sizes(model: ArtModel, packed: int | None) -> dict[str, int]:
    """The longest trajectory and a micro-batch's tokens, if the client sets the length of a packed sequence."""
    if packed is None:
        return {}
    return {"max_tokens": min(packed, model.settings.max_tokens or _MAX_TOKENS), "bin_tokens": packed}


def _rates(config: SftConfig) -> dict[str, Any]:
    """Return the fields of one pass at one learning rate, or of a step for each of a list of rates."""
    match config.learning_rate:
        case tuple() as rates:
            return {"steps": len(rates), "learning_rate": max(rates, default=0.0), "learning_rates": rates}
        case rate:
            return {"epochs": 1, "learning_rate": _SFT_RATE if rate is None else rate}


def art_source(model: ArtModel, request: dict[str, Any]) -> Source:
    """The source of a job's run: its request, and the labels used to find the run."""
    labels = {MODEL_LABEL: model.model_id, NAME_LABEL: model.title}
    return Source(api="art", metadata=labels, request=request)


def _common(model: ArtModel, adapter: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "dtype": model.dtype}
    fields |= model.settings.model_dump(exclude={*LORA_FIELDS, *_RL_ALONE}, exclude_none=True)
    return fields | {
        "name": model.published_as,
        "model": one_form(model.base_model),
        "trainable": model.settings.model_dump(include=set(LORA_FIELDS), exclude_none=True) | {"kind": "lora"},
        "initial_adapter": adapter,
    }


def _named(error: ValidationError, names: dict[str, str]) -> InvalidInput:
    """Return an InvalidInput with the client's name of the field, or else the name of the model's setting."""
    problem = validation_problem(error.errors())
    place = (problem.place or "").removeprefix("trainable.")
    name = names.get(place.rstrip(".0123456789"))  # an item of a list has the list's
    return InvalidInput(problem.message, name or f"longshore.{place}".rstrip("."))
