"""Losses of commands and of jobs. Formulas and metrics: docs/losses.md."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from longshore.fields import Artifact, Frozen
from longshore.training import MAX_SCALARS


class CrossEntropy(Frozen):
    """Weighted negative log-likelihood of the labels, divided by the step's sum of weights."""

    kind: Literal["cross_entropy"] = "cross_entropy"


class SquaredError(Frozen):
    """Weighted squared error of a head's scalar against the values that the data names, over the sum of weights."""

    kind: Literal["squared_error"] = "squared_error"
    scalar: int | None = Field(
        default=0,
        ge=0,
        lt=MAX_SCALARS,
        description="index of the head's scalar, from 0; null, in jobs: the target's label",
    )


Reference = Literal["base"] | Artifact
"""The model that a policy is kept near: the base model (its adapter switched off, or as it was before full training),
or a published adapter on that base."""


def looked_up(named: Reference | str, field: str) -> Reference:
    """Return the model that a field names. Raises ValueError while it is a URI that nobody has looked up."""
    match named:
        case Artifact() as adapter:
            return adapter
        case "base":
            return "base"
        case uri:
            raise ValueError(f"{field}: a job has the adapter itself, and not where it is ({uri})")


class Kl(Frozen):
    """The divergence from a reference, estimated at the sampled tokens (Schulman 2020; docs/losses.md).

    `loss` differentiates the estimate; `reward` takes it, of the frozen old log-probabilities, off each token's
    advantage.
    """

    coefficient: float = Field(gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    placement: Literal["loss", "reward"] = "loss"
    reference: Reference | Annotated[str, Field(min_length=1, max_length=2048)] = Field(
        default="base", description="base, or a published adapter: in a run its URI, in a job its artifact"
    )

    @property
    def model(self) -> Reference:
        """Return the reference. Raises ValueError as `looked_up` does."""
        return looked_up(self.reference, "kl.reference")


class _PolicyLoss(Frozen):
    """The fields of every policy loss. Formulas and metrics: docs/losses.md."""

    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    constant: int | None = Field(default=None, ge=1, description="tokens by which constant_length divides a sequence")
    kl: Kl | None = None
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus; 0 for none")
    truncated_importance: float | None = Field(
        default=None, gt=0, description="upper limit of the weight trainer / sampler; None: not weighted"
    )
    importance_level: Literal["token", "sequence"] = Field(
        default="token",
        description="which ratio of trainer to sampler weights a token: its own, or its sequence's product",
    )
    importance_beyond: Literal["truncate", "mask"] = Field(
        default="truncate", description="a ratio above truncated_importance counts as that limit, or as 0"
    )
    importance_floor: float | None = Field(
        default=None, gt=0, description="with mask: ratios below this count as 0 too; None: no lower limit"
    )
    off_policy_bound: float | None = Field(
        default=None,
        gt=0,
        description="sequences of negative advantage are masked if their mean of log(sampler / new) is above it",
    )
    old: Literal["sampler", "trainer"] = Field(
        default="sampler",
        description="what ratios are against: the sampler's log-probabilities as they were sent, or this trainer's "
        "own, frozen at the start of the job",
    )

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if (self.aggregation == "constant_length") != (self.constant is not None):
            raise ValueError("constant belongs to the aggregation constant_length, which needs it")
        if self.truncated_importance is not None and self.old == "sampler":
            raise ValueError(
                "truncated_importance weighs the trainer's own log-probabilities against the sampler's: "
                "with old = sampler it would be ignored"
            )
        if self.truncated_importance is None and (self.importance_level, self.importance_beyond) != (
            "token",
            "truncate",
        ):
            raise ValueError("importance_level and importance_beyond say how truncated_importance weighs: give it, too")
        if self.importance_floor is not None:
            if self.truncated_importance is None or self.importance_beyond != "mask":
                raise ValueError("importance_floor belongs to truncated_importance with importance_beyond: mask")
            if self.importance_floor >= self.truncated_importance:
                raise ValueError("importance_floor lies below truncated_importance")
        return self


class Reinforce(_PolicyLoss):
    """Importance-weighted REINFORCE: -ratio * advantage, unclipped."""

    kind: Literal["reinforce"] = "reinforce"


class PPO(_PolicyLoss):
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347); GRPO, DAPO and others are presets of it."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, le=1, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(default=0.2, gt=0, description="ratios above 1 + clip_high are clipped")
    dual_clip: float | None = Field(default=None, gt=1, description="bounds the ratio if the advantage is negative")

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip must lie above 1 + clip_high = {1 + self.clip_high:g}")
        return self


class CISPO(_PolicyLoss):
    """REINFORCE with a clipped, constant importance weight (MiniMax-M1, arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(default=None, gt=0, le=1, description="None: no lower bound, as in the paper")
    clip_high: float = Field(default=4.0, gt=0, description="weights above 1 + clip_high are clipped")


class GSPO(_PolicyLoss):
    """PPO's clip with one ratio a sequence, the geometric mean of its tokens' (arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    level: Literal["token", "sequence"] = Field(
        default="token",
        description="which gradient a token's ratio has: its own (GSPO-token), or that of the whole sequence's ratio",
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "sequence_mean"
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    clip_high: float = Field(default=4e-4, gt=0)


class GMPO(_PolicyLoss):
    """The geometric mean of a sequence's ratios, each clipped in its logarithm (arXiv:2507.20673)."""

    kind: Literal["gmpo"] = "gmpo"
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "sequence_mean"
    clip_low: float = Field(default=0.4, gt=0, description="log ratios below -clip_low are clipped")
    clip_high: float = Field(default=0.4, gt=0, description="log ratios above clip_high are clipped")


class SAPO(_PolicyLoss):
    """A sigmoid of the ratio in place of a clip, which fades a token out as it moves (arXiv:2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "sequence_mean"
    tau_positive: float = Field(default=1.0, gt=0, le=1000, description="steepness if the advantage is positive")
    tau_negative: float = Field(default=1.05, gt=0, le=1000, description="steepness if the advantage is not positive")


class DRO(_PolicyLoss):
    """Direct reward optimisation: a quadratic pull towards the old policy (arXiv:2405.19107)."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(default=0.05, gt=0, description="strength of the pull")

    @model_validator(mode="after")
    def _is_not_weighed(self) -> Self:
        if self.truncated_importance is not None:
            raise ValueError("dro is no importance-weighted loss: truncated_importance has no meaning in it")
        return self


class TruncatedReinforce(_PolicyLoss):
    """REINFORCE with a truncated, constant importance weight (V-trace's, arXiv:1802.01561) and a pull towards the old
    policy.
    """

    kind: Literal["truncated_reinforce"] = "truncated_reinforce"
    truncation: float = Field(default=1.0, gt=0, description="ratios above it weigh as much as it")
    old_kl_coefficient: float = Field(
        default=0.01, ge=0, description="weight of the divergence from the old policy, estimated as (log ratio)²/2"
    )


PolicyLoss = Reinforce | PPO | CISPO | GSPO | GMPO | SAPO | DRO | TruncatedReinforce


DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"]
DivergenceTokens = Literal["all", "top_k", "drawn"]
MOST_TEACHERS = 16
_SKEWS: dict[DivergenceKind, float] = {"jsd": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.1}  # DistiLLM, section 4.3


class DistillationSettings(Frozen):
    """What a student's distributions are compared with its teacher's by. Formulas: docs/losses.md."""

    divergence: DivergenceKind = Field(
        default="forward_kl", description="the divergence that is minimised at every trained token"
    )
    skew: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share in the mixture: the teacher's for jsd (0.5) and skew_kl (0.1), "
        "the student's for skew_reverse_kl (0.1)",
    )
    tokens: DivergenceTokens = Field(
        default="all",
        description="all: the whole vocabulary; top_k: the teacher's likeliest tokens, and all others"
        " as one; drawn: the row's own token, and all others as one",
    )
    top_k: int | None = Field(default=None, ge=1, le=1024, description="for tokens top_k: how many ids are kept")

    @model_validator(mode="after")
    def _nothing_of_a_divergence_is_ignored(self) -> Self:
        if self.skew is not None and self.divergence not in _SKEWS:
            raise ValueError(f"{self.divergence} has no mixture: drop skew, or take {', '.join(_SKEWS)}")
        if (self.tokens == "top_k") != (self.top_k is not None):
            raise ValueError("top_k belongs to tokens top_k, which needs it")
        return self


class Distillation(DistillationSettings):
    """The divergence from a teacher on the same base, divided by the step's sum of weights."""

    kind: Literal["distillation"] = "distillation"
    teacher: Reference | Annotated[str, Field(min_length=1, max_length=2048)] = Field(
        default="base", description="base, or a published adapter on it: in a run its URI, in a job its artifact"
    )
    more_teachers: tuple[Reference, ...] = Field(
        default=(),
        max_length=MOST_TEACHERS,
        description="in a job: targets of advantage 1 learn from the first of these, and so on; "
        "targets of advantage 0 learn from `teacher`",
    )

    @model_validator(mode="after")
    def _several_are_asked_before(self) -> Self:
        several_teachers_fit(self.more_teachers, self)
        return self

    @property
    def mixed(self) -> float:
        """Return the skew; 0 for a divergence without one."""
        return _SKEWS.get(self.divergence, 0.0) if self.skew is None else self.skew


def several_teachers_fit(more: tuple[object, ...], loss: DistillationSettings) -> None:
    """Raise ValueError if several teachers would have to compute in the middle of a step."""
    if more and loss.tokens == "all":
        raise ValueError("several teachers are asked before the first step: take tokens top_k or drawn")
