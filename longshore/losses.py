"""Losses of commands and of jobs. Formulas and metrics: docs/losses.md."""

from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard, cast, get_args

from pydantic import Field, model_validator

from longshore.fields import Artifact, Frozen, added
from longshore.training import LINEARS, MAX_SCALARS, Full, Lora, ScalarHead


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


# --- Losses of jobs and commands, and published algorithms by name: each is a loss and a kind of advantages ---

_VALUE = ScalarHead(names=("value",))
PairObjective = Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down", "simpo", "orpo"]
Objective = Literal[PairObjective, "kto"]
_WITHOUT_REFERENCE = ("simpo", "orpo")
_READ_BY: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("sigmoid", "robust"),
    "gamma": ("simpo",),
    "rpo_alpha": tuple(each for each in get_args(PairObjective) if each != "orpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": tuple(each for each in get_args(Objective) if each not in _WITHOUT_REFERENCE),
}
"""The objectives that read a field of a loss, or of a run, on preferences."""


class _OfPairs(Frozen):
    objective: PairObjective = "sigmoid"
    beta: float = Field(
        default=0.1,
        gt=0,
        le=1000,
        description="strength of the pull towards the reference; scale of simpo's rewards; weight of orpo's odds ratio",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="for sigmoid and robust: the assumed share of wrong pairs"
    )
    gamma: float = Field(
        default=0.5, ge=0, le=1000, description="for simpo: the margin by which the chosen answer should win"
    )
    rpo_alpha: float = Field(
        default=0.0, ge=0, le=1000, description="weight of the chosen answer's cross entropy, added to a loss of pairs"
    )

    @model_validator(mode="after")
    def _no_field_is_ignored(self) -> Self:
        for name, readers in _READ_BY.items():
            field = type(self).model_fields.get(name)
            if field is not None and getattr(self, name) != field.default and self.objective not in readers:
                raise ValueError(f"{name} would be ignored by {self.objective}: it is read by {', '.join(readers)}")
        return self

    @property
    def has_reference(self) -> bool:
        """True if log-probabilities are compared with those of a reference model."""
        return self.objective not in _WITHOUT_REFERENCE


class DPO(_OfPairs):
    """Direct preference optimisation (arXiv:2305.18290) and its relatives. Sequences 2k and 2k + 1 of a unit are a
    pair: the chosen one has advantage +1, the rejected one -1. Formulas: docs/losses.md."""

    kind: Literal["dpo"] = "dpo"
    reference: Reference = "base"


class KTO(Frozen):
    """Kahneman-Tversky optimisation (arXiv:2402.01306) of single answers: sequence 2k of a unit, with advantage +1
    if it is desirable, else -1. Sequence 2k + 1 answers another prompt: its advantage and weight are 0, and it is only
    scored."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    desirable_weight: float = Field(default=1.0, gt=0)
    undesirable_weight: float = Field(default=1.0, gt=0)
    reference: Reference = "base"


class BradleyTerry(Frozen):
    """The likelihood that the chosen answer of a pair is the better one, from a head's scalar at their last tokens.

    Sequences 2k and 2k + 1 of a unit are the chosen and the rejected answer; the former's advantage is the margin.
    """

    kind: Literal["bradley_terry"] = "bradley_terry"
    center: float = Field(default=0.0, ge=0, le=1000, description="weight of the squared sum of a pair's rewards")
    scalar: int = Field(default=0, ge=0, lt=MAX_SCALARS, description="the number of the head's scalar, from 0")


class Preferences(_OfPairs):
    """The fields of a run that learns from preferences, with an objective of pairs or kto."""

    objective: Objective = Field(default="sigmoid", description="the preference loss (docs/losses.md)")  # type: ignore[assignment]
    desirable_weight: float = Field(default=1.0, gt=0, le=1000, description="for kto: weight of good answers")
    undesirable_weight: float = Field(default=1.0, gt=0, le=1000, description="for kto: weight of bad answers")

    @property
    def reads_labels(self) -> bool:
        return self.objective == "kto"

    @property
    def reads_pairs(self) -> bool:
        return not self.reads_labels

    def loss(self, reference: Reference) -> DPO | KTO:
        """Return the loss against a reference. Some objectives ignore the reference."""
        kind = KTO if self.reads_labels else DPO
        shared = set(kind.model_fields) & set(Preferences.model_fields)
        return kind(**self.model_dump(include=shared), reference=reference if self.has_reference else "base")


def check_teacher_is_frozen(trainable: Lora | Full, loss: DistillationSettings) -> None:
    """Raise ValueError if the teacher scores in the middle of a step that changes the teacher's weights."""
    if isinstance(trainable, Full) and loss.tokens == "all":
        raise ValueError(
            "full training changes the base, which the teacher computes whole distributions with at every step: train "
            "a lora, or take tokens top_k or drawn, which are scored before the first step"
        )


RLLoss = PolicyLoss | Distillation
Loss = Annotated[
    CrossEntropy | PolicyLoss | DPO | KTO | Distillation | SquaredError | BradleyTerry, Field(discriminator="kind")
]


def check_head(loss: Loss, head: ScalarHead | None) -> None:
    """Raise ValueError unless a loss fits a slot's head. `head`: a head of scalars; None: the language head."""
    is_of_scalars = isinstance(loss, SquaredError | BradleyTerry)
    if is_of_scalars and head is None:
        raise ValueError(f"loss: {loss.kind} is of a head of scalars, and this trains the language head: name a head")
    if not is_of_scalars and head is not None:
        raise ValueError(f"loss: {loss.kind} is of the language head, and this trains {head} in its place")
    if head is None or not isinstance(loss, SquaredError | BradleyTerry):
        return
    if isinstance(loss, BradleyTerry) and head.per != "sequence":
        raise ValueError(f"loss: {loss.kind} is of a scalar a sequence, and this trains {head}")
    if (loss.scalar or 0) >= len(head.names):
        raise ValueError(f"loss.scalar: {loss.scalar} is behind the last of {', '.join(head.names)}, counted from 0")


def has_several_teachers(loss: Loss) -> TypeGuard[Distillation]:
    return isinstance(loss, Distillation) and len(loss.more_teachers) > 0


def adapters_of(loss: Loss) -> list[Artifact]:
    """Return the adapters that a loss uses besides the trained one: its reference, or its teachers."""
    more = loss.more_teachers if isinstance(loss, Distillation) else ()
    return [each for each in (reference_of(loss), *more) if isinstance(each, Artifact)]


def reference_of(loss: Loss) -> Reference | None:
    """Return the reference model of a loss; None if it has none. Raises ValueError as `looked_up` does."""
    match loss:
        case CrossEntropy() | SquaredError() | BradleyTerry():
            return None
        case DPO():
            return loss.reference if loss.has_reference else None
        case KTO():
            return loss.reference
        case Distillation():
            return looked_up(loss.teacher, "teacher")
        case _:
            return loss.kl.model if loss.kl else None


def reference_uri(loss: RLLoss) -> str | None:
    """Return the URI of the adapter that a run's loss keeps the policy near, or its teacher, if it names one."""
    match loss.teacher if isinstance(loss, Distillation) else loss.kl and loss.kl.reference:
        case str() as uri if uri != "base":
            return uri
        case _:
            return None


def with_reference(loss: RLLoss, adapter: Artifact | None) -> RLLoss:
    """Return the loss with the adapter that its reference's URI names; unchanged if it names none."""
    if adapter is None:
        return loss
    if isinstance(loss, Distillation):
        return loss.model_copy(update={"teacher": adapter})
    return loss.model_copy(update={"kl": loss.kl and loss.kl.model_copy(update={"reference": adapter})})


def is_policy_loss(loss: Loss) -> TypeGuard[PolicyLoss]:
    """Return True for losses of sampled sequences: reinforcement learning."""
    return isinstance(loss, PolicyLoss)


def scores_old(loss: Loss) -> bool:
    """Return True if ratios are against the trainer's own log-probabilities, frozen at the start of the job."""
    return is_policy_loss(loss) and loss.old == "trainer"


class Critic(Frozen):
    """A critic, which estimates future rewards, and the settings of generalized advantage estimation (Schulman et al.
    2016, arXiv:1506.02438), which makes advantages from it. Formulas: docs/losses.md."""

    trainable: Lora | None = Field(
        default=None, description="the adapter below its head, on the policy's base; if absent, like the policy's"
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount of a reward one action later")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="1: actual rewards; 0: the next state's value")
    per: Literal["token", "turn"] = Field(default="token", description="an action: a sampled token, or a whole answer")
    whiten: bool = Field(default=True, description="scale a step's advantages to mean 0 and variance 1")
    learning_rate: float | None = Field(
        default=None, gt=0, le=10, description="the critic's learning rate; if absent, the policy's"
    )
    clip: float | None = Field(
        default=0.2, gt=0, description="how far values may move in a step before they are clipped; null: no limit"
    )
    value_scale: Literal["none", "running"] = Field(
        default="none", description="running: the head gives values in units of the returns' running mean and spread"
    )
    warmup_steps: int = Field(default=0, ge=0, description="train steps that only update the critic")
    own_worker: bool = added(
        False, description="update the critic on another worker, while the policy is updated on the first"
    )

    @model_validator(mode="after")
    def _has_a_head_of_its_own(self) -> Self:
        if self.trainable is not None and self.trainable.head not in (None, _VALUE):
            raise ValueError("critic.trainable.head: a critic has one scalar a token; drop it")
        if self.trainable is not None and "lm_head" in self.trainable.targets:
            raise ValueError("critic.trainable.targets: a critic has no lm_head; drop it")
        return self

    def trained_beside(self, policy: Lora) -> Lora:
        """Return what is trained: the head, and its own adapter or one like the policy's without the output layer."""
        if self.trainable is not None:
            return self.trainable.model_copy(update={"head": _VALUE})
        targets = tuple(target for target in policy.targets if target != "lm_head")
        return policy.model_copy(update={"head": _VALUE, "targets": targets or LINEARS})


AdvantageKind = Literal[
    "group_mean",
    "group_normalized",
    "leave_one_out",
    "batch_scaled",
    "group_mean_normalized",
    "batch_normalized",
    "gae",
    "given",
    "none",
]
COMPARE_GROUPS: tuple[AdvantageKind, ...] = (
    "group_mean", "group_normalized", "leave_one_out", "batch_scaled", "group_mean_normalized"
)  # fmt: skip
"""Advantages that compare the rewards within a group: a group of one, or of equal rewards, gives no signal."""
EqualRewards = Literal["drop", "keep"]
Preset = Literal[
    "reinforce", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "ppo", "distill", "gkd",
]  # fmt: skip
PRESETS: tuple[Preset, ...] = get_args(Preset)


class Algorithm(NamedTuple):
    """A paper's loss and advantages, and whether groups of equal rewards count in its means.

    Formulas: docs/losses.md and activities/trajectories/pack_trajectories.py.
    """

    loss: RLLoss
    advantages: AdvantageKind
    equal_rewards: EqualRewards


def preset(name: Preset, max_completion_tokens: int) -> Algorithm:
    """Return the algorithm that a paper describes.

    Args:
        max_completion_tokens: the sampler's limit; Dr. GRPO divides every sequence by it.
    """
    match name:
        case "reinforce":  # Ahmadian et al. 2024, arXiv:2402.14740: REINFORCE with the others' mean as its baseline
            return Algorithm(Reinforce(), "leave_one_out", "keep")
        case "rloo":  # Ahmadian et al. 2024, eq. 8, as written: a sequence's sum over its tokens
            return Algorithm(Reinforce(aggregation="constant_length", constant=1), "leave_one_out", "keep")
        case "reinforce_plus_plus":  # Hu et al. 2025, arXiv:2501.03262: PPO's clip, no baseline but the batch's mean
            return Algorithm(PPO(), "batch_normalized", "drop")
        case "reinforce_plus_plus_baseline":  # the same, less the group's mean first
            return Algorithm(PPO(), "group_mean_normalized", "keep")
        case "gmpo":
            return Algorithm(GMPO(), "group_normalized", "keep")
        case "sapo":
            return Algorithm(SAPO(), "group_normalized", "keep")
        case "grpo":  # Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4, section 4.1.2; epsilon as PPO's, beta as in 4.2
            loss = PPO(aggregation="sequence_mean", kl=Kl(coefficient=0.04, estimator="k3"))
            return Algorithm(loss, "group_normalized", "keep")
        case "dr_grpo":  # Liu et al. 2025, arXiv:2503.20783, section 3.2: not divided by the standard deviation
            loss = PPO(aggregation="constant_length", constant=max_completion_tokens)
            return Algorithm(loss, "group_mean", "keep")
        case "dapo":  # Yu et al. 2025, arXiv:2503.14476, eq. 8: clip-higher, token mean; section 3.2: groups differ
            loss = PPO(aggregation="token_mean", clip_low=0.2, clip_high=0.28)
            return Algorithm(loss, "group_normalized", "drop")
        case "gspo":
            return Algorithm(GSPO(), "group_normalized", "keep")
        case "cispo":  # MiniMax-M1 samples until groups differ, as DAPO does
            return Algorithm(CISPO(), "group_normalized", "drop")
        case "ppo":  # Schulman et al. 2017, arXiv:1707.06347, with a critic
            return Algorithm(PPO(), "gae", "drop")
        case "distill":  # the policy gradient of KL(student, teacher) by token: Gu et al. 2024, arXiv:2306.08543, eq. 2
            kl = Kl(coefficient=1, estimator="k1", placement="reward")
            return Algorithm(Reinforce(kl=kl), "none", "drop")
        case "gkd":  # Agarwal et al. 2024, arXiv:2306.13649, algorithm 1 with lambda = 1: all of it on own samples
            return Algorithm(Distillation(divergence="jsd"), "none", "drop")


def with_algorithm(fields: dict[str, Any], max_completion_tokens: int) -> dict[str, Any]:
    """Return a run's fields with the loss and advantages of its `algorithm`. Fields that are set take precedence.

    Args:
        max_completion_tokens: the sampler's limit; Dr. GRPO divides every sequence by it.

    Raises:
        ValueError: the fields have a loss of another kind, so that the algorithm would have no effect.
    """
    name = cast(Preset, fields["algorithm"])
    paper = preset(name, max_completion_tokens)
    match fields.get("loss"):
        case None:
            loss: dict[str, Any] = {}
        case dict() as given:
            loss = given
        case given:
            loss = given.model_dump(exclude_unset=True) | {"kind": given.kind}
    if (kind := loss.get("kind", paper.loss.kind)) != paper.loss.kind:
        raise ValueError(f"algorithm {name} has the loss {paper.loss.kind}: a loss {kind} leaves nothing of it")
    advantages = fields.get("advantages") or paper.advantages
    whole = paper.loss.model_dump() | loss
    if name == "distill" and isinstance(loss.get("kl"), dict):  # so that a request can set only the teacher
        whole["kl"] = paper.loss.model_dump()["kl"] | loss["kl"]
    chosen = fields | {"loss": whole, "advantages": advantages}
    if advantages == "gae":
        chosen |= {"critic": fields.get("critic") or {}}
    if advantages not in COMPARE_GROUPS:
        return chosen
    return chosen | {"equal_rewards": fields.get("equal_rewards") or paper.equal_rewards}
