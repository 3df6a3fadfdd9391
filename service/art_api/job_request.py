"""What ART's client says of a training job: parsed, and what could not be done as it is meant is refused."""

from typing import Literal, Self

from pydantic import Field, model_validator

from service.models.art_models import ModelId
from shared.errors import InvalidInput
from shared.jobs import CISPO, GSPO, PPO
from shared.models import Frozen

# What its trainer does where the client says nothing: CISPO's bounds, and those of PPO.
_CISPO_LOW, _CISPO_HIGH, _PPO = 1.0, 4.0, 0.2


class ExperimentalConfig(Frozen):
    """Of a reinforcement job. What is null is as ART has it."""

    learning_rate: float | None = None
    ppo: bool | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    scale_rewards: bool | None = None
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] | None = None
    max_negative_advantage_importance_sampling_weight: float | None = None
    precalculate_logprobs: bool | None = None
    advantage_balance: float | None = None
    mask_prob_ratio: bool | None = None
    kimi_k2_tau: float | None = None

    @property
    def loss(self) -> CISPO | PPO | GSPO:
        """ART's objective as a loss of ours: its clipped REINFORCE is CISPO, its clipped surrogate is PPO.

        Raises:
            InvalidInput: it is neither; names the field. ValidationError: a number is out of its bounds.
        """
        for name in ("advantage_balance", "mask_prob_ratio", "kimi_k2_tau"):
            if getattr(self, name):
                raise _refusal(name, "no loss here knows it: leave it at its default")
        low = self.epsilon if self.epsilon is not None else (_PPO if self.ppo else _CISPO_LOW)
        high = self.epsilon_high if self.epsilon_high is not None else (low if self.ppo else _CISPO_HIGH)
        most = self.max_negative_advantage_importance_sampling_weight
        old: Literal["sampler", "trainer"] = "trainer" if self.precalculate_logprobs else "sampler"
        match self.importance_sampling_level or "token", bool(self.ppo):
            case "token", True:
                return PPO(clip_low=low, clip_high=high, dual_clip=most, old=old)
            case "token", False:
                # The weight is clipped from above anyhow: a bound on the ratio is another upper clip.
                return CISPO(clip_low=low, clip_high=high if most is None else min(high, most - 1), old=old)
            case "sequence", True if most is None:
                return GSPO(clip_low=low, clip_high=high, aggregation="token_mean", old=old)
            case "sequence", _:
                rule = "by sequence alone with ppo, and without max_negative_advantage_importance_sampling_weight"
                raise _refusal("importance_sampling_level", rule)
            case level, _:
                raise _refusal("importance_sampling_level", f"no loss here weighs by {level}: token or sequence")


class SftConfig(Frozen):
    """Of a supervised job. A list of learning rates has one for every batch."""

    batch_size: int | None = None
    learning_rate: float | tuple[float, ...] | None = None

    @property
    def rate(self) -> float | None:
        """Raises InvalidInput for rates that change."""
        match self.learning_rate:
            case tuple() as rates:
                if len(set(rates)) != 1:
                    rule = "one rate for all batches: give a number (or train in several jobs, one after the other)"
                    raise InvalidInput(rule, "config.learning_rate")
                return rates[0]
            case rate:
                return rate


class SftRequest(Frozen):
    """`POST /v1/preview/sft-training-jobs`."""

    model_id: ModelId
    training_data_url: str = Field(min_length=1, max_length=2048, description="any URI that datasets are read from")
    config: SftConfig | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.training_data_url.startswith("wandb-artifact:"):
            raise ValueError(
                "training_data_url: W&B's artifacts are not downloaded: put the file where datasets are read from, or "
                "upload it to /api/v1/files, and send its URI"
            )
        return self


class RlRequest(Frozen):
    """`POST /v1/preview/training-jobs`, but for its groups, which are read one by one."""

    model_id: ModelId
    experimental_config: ExperimentalConfig | None = None


def _refusal(name: str, rule: str) -> InvalidInput:
    return InvalidInput(rule, f"experimental_config.{name}")
