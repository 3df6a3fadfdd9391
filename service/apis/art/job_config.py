"""The settings that ART's clients send with a job. A key is accepted or refused by its value, never by its presence.

Newer clients send all of their settings with every job, most of them at defaults that mean "off". Those of a release
that is not known yet are accepted while they mean that.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from longshore.fields import Frozen
from longshore.losses import CISPO, GSPO, PPO
from shared.errors import InvalidInput

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
