"""Parses ART's requests for training jobs, and makes runs of them. Settings that have no equivalent are refused."""

from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from service.apis.errors import describe
from service.inference.art_models import ArtModel, ModelId
from shared.contract import Frozen
from shared.errors import InvalidInput
from shared.jobs.job import CISPO, GSPO, PPO
from shared.runs.requests import RLRun, SFTRun, Source

# The defaults of ART's trainer: the bounds of CISPO, and those of PPO.
_CISPO_LOW, _CISPO_HIGH, _PPO = 1.0, 4.0, 0.2
# Keys of ART 0.5.20 and later, with the only values that are accepted: their defaults.
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "allow_training_without_logprobs": (False,),
    "kl_penalty_coef": (0,),
    "kl_ref_adapter_path": (),
    "normalize_advantages": (True,),
    "num_trajectories_learning_rate_multiplier_power": (0,),
    "plot_tensors": (False,),
    "scale_learning_rate_by_reward_std_dev": (False,),
    "truncated_importance_sampling": (),
}
_NEVER_READ = ("logprob_calculation_chunk_size", "packed_sequence_length")
_OF_A_KL = ("kl_penalty_reference_step", "kl_penalty_source", "kl_penalty_step_lag")
# Conversations of agents are long, and ART's clients cannot say how long.
_MAX_TOKENS = 8192
# Broken conversations are left out, since a single one of thousands would fail the client's step.
_BROKEN = "drop"
# The client's own defaults.
_RL_RATE, _SFT_RATE, _SFT_BATCH = 5e-6, 5e-5, 2
_LORA = {"rank", "alpha", "targets"}
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
    "batch_size": "config.batch_size",
}
MODEL_LABEL, NAME_LABEL = "art_model", "art_name"
"""Labels of a model's runs, by which they are found."""


def _without_defaults(given: object, no_effect: dict[str, tuple[object, ...]]) -> object:
    """Return a client's fields without nulls, and without keys that have no effect here.

    Raises:
        ValueError: a key that has no effect has another value than its default.
    """
    if not isinstance(given, dict):
        return given
    for name, values in no_effect.items():
        if given.get(name) is not None and given[name] not in values:
            raise ValueError(f"{name}: it is not done here: leave it at its default")
    return {name: value for name, value in given.items() if value is not None and name not in no_effect}


class ExperimentalConfig(Frozen):
    """Settings of a reinforcement job. Nulls have ART's defaults."""

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

    @model_validator(mode="before")
    @classmethod
    def _newer_keys(cls, given: object) -> object:
        """Convert keys of newer versions: `loss_fn` becomes `ppo`; settings of a KL penalty of 0 are dropped."""
        known = _without_defaults(given, _NO_EFFECT)
        if not isinstance(known, dict):
            return known
        rest = {name: value for name, value in known.items() if name not in (*_NEVER_READ, *_OF_A_KL)}
        name = rest.pop("loss_fn", None)
        if name is None:
            return rest
        if name not in ("cispo", "ppo") or rest.setdefault("ppo", name == "ppo") != (name == "ppo"):
            raise ValueError(f"loss_fn: cispo, or ppo where ppo is true: not {name!r:.40}")
        return rest

    @property
    def loss(self) -> CISPO | PPO | GSPO:
        """The loss that equals ART's objective: CISPO for its clipped REINFORCE, PPO for its clipped surrogate.

        Raises:
            InvalidInput: no loss equals it; names the field. ValidationError: a number is out of its bounds.
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
                # CISPO clips the weight from above, so a bound on the ratio is just a lower value of that clip.
                return CISPO(clip_low=low, clip_high=high if most is None else min(high, most - 1), old=old)
            case "sequence", True if most is None:
                return GSPO(clip_low=low, clip_high=high, aggregation="token_mean", old=old)
            case "sequence", _:
                rule = "by sequence alone with ppo, and without max_negative_advantage_importance_sampling_weight"
                raise _refusal("importance_sampling_level", rule)
            case level, _:
                raise _refusal("importance_sampling_level", f"no loss here weighs by {level}: token or sequence")


class SftConfig(Frozen):
    """Settings of a supervised job. A list of learning rates has one for every batch."""

    batch_size: int | None = None
    learning_rate: float | tuple[float, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _newer_keys(cls, given: object) -> object:
        return _without_defaults(given, {"assistant_turns": ("all",)})

    @property
    def rate(self) -> float | None:
        """Return the one learning rate, or None if none was sent. Raises InvalidInput for rates that change."""
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


def rl_run(model: ArtModel, config: ExperimentalConfig, adapter: str | None) -> RLRun:
    """The run that takes a model's train steps; steps with another config need another run.

    Args:
        adapter: URI of the adapter that the run goes on from.

    Raises:
        InvalidInput: names the client's field and the rule that it breaks.
    """
    try:
        return RLRun.model_validate(
            _common(model, adapter)
            | {"broken": _BROKEN}
            | model.settings.model_dump(include=_RL_ALONE, exclude_none=True)
            | {
                "loss": config.loss,
                "advantages": "group_mean" if config.scale_rewards is False else "group_normalized",
                "learning_rate": _RL_RATE if config.learning_rate is None else config.learning_rate,
            }
        )
    except ValidationError as error:
        raise _named(error, _RL_NAMES) from None


def sft_run(model: ArtModel, url: str, config: SftConfig, adapter: str | None) -> SFTRun:
    """One pass over a dataset.

    Args:
        adapter: URI of the adapter that the run goes on from.

    Raises:
        InvalidInput: names the client's field and the rule that it breaks.
    """
    rate = config.rate
    try:
        return SFTRun.model_validate(
            _common(model, adapter)
            | {
                "dataset": {"uri": url},
                "epochs": 1,
                "batch_size": _SFT_BATCH if config.batch_size is None else config.batch_size,
                "learning_rate": _SFT_RATE if rate is None else rate,
                "schedule": "constant",
            }
        )
    except ValidationError as error:
        raise _named(error, _SFT_NAMES) from None


def source_of(model: ArtModel, request: dict[str, Any]) -> Source:
    """The source of a job's run: its request, and labels by which the run is found."""
    labels = {MODEL_LABEL: model.model_id, NAME_LABEL: model.title}
    return Source(api="art", metadata=labels, request=request)


def _common(model: ArtModel, adapter: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
    fields |= model.settings.model_dump(exclude=_LORA | _RL_ALONE, exclude_none=True)
    return fields | {
        "name": model.published_as,
        "model": model.base_model,
        "trainable": model.settings.model_dump(include=_LORA, exclude_none=True) | {"kind": "lora"},
        "initial_adapter": adapter,
    }


def _named(error: ValidationError, names: dict[str, str]) -> InvalidInput:
    """Return an InvalidInput with the client's name of the field, or else the name of the model's setting."""
    problem = describe(error.errors())
    place = (problem.place or "").removeprefix("trainable.")
    return InvalidInput(problem.message, names.get(place) or f"longshore.{place}".rstrip("."))
