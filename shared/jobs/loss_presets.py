"""Published algorithms by name: each is a loss of job.py and a kind of advantages."""

from typing import Any, Literal, cast, get_args

from shared.jobs.job import CISPO, GSPO, PPO, Kl, PolicyLoss, Reinforce

AdvantageKind = Literal["group_mean", "group_normalized", "leave_one_out", "batch_normalized", "given"]
EqualRewards = Literal["drop", "keep"]
Preset = Literal["reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo"]
PRESETS: tuple[Preset, ...] = get_args(Preset)


def preset(name: Preset, max_completion_tokens: int) -> PolicyLoss:
    """The loss that a paper describes.

    Args:
        max_completion_tokens: the sampler's limit, by which Dr. GRPO divides every sequence.
    """
    match name:
        case "reinforce":
            return Reinforce()
        case "grpo":  # Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4; epsilon as in PPO, beta as in section 4.2
            return PPO(aggregation="sequence_mean", kl=Kl(coefficient=0.04, estimator="k3"))
        case "dr_grpo":  # Liu et al. 2025, arXiv:2503.20783, section 3.2
            return PPO(aggregation="constant_length", constant=max_completion_tokens)
        case "dapo":  # Yu et al. 2025, arXiv:2503.14476, eq. 8; clip-higher and token mean
            return PPO(aggregation="token_mean", clip_low=0.2, clip_high=0.28)
        case "gspo":
            return GSPO()
        case "cispo":
            return CISPO()


def advantages_of_preset(name: Preset) -> AdvantageKind:
    """Return the kind of advantages that a paper uses. Formulas: activities/trajectories/advantages.py."""
    match name:
        case "reinforce":  # Ahmadian et al. 2024, arXiv:2402.14740: REINFORCE with the others' mean as its baseline
            return "leave_one_out"
        case "dr_grpo":  # section 3.2: GRPO's without the division by the standard deviation
            return "group_mean"
        case "grpo" | "dapo" | "gspo" | "cispo":  # GRPO's section 4.1.2, which the other three papers take over
            return "group_normalized"


def equal_rewards_of_preset(name: Preset) -> EqualRewards:
    """Return what a paper does with groups whose rewards are all the same: without them its mean gradient is larger."""
    match name:
        case "dapo" | "cispo":  # DAPO, section 3.2: sampled until groups differ; MiniMax-M1 does so too
            return "drop"
        case "reinforce" | "grpo" | "dr_grpo" | "gspo":  # their means are over all outputs; GRPO's KL is of all, too
            return "keep"


def with_algorithm(fields: dict[str, Any], max_completion_tokens: int) -> dict[str, Any]:
    """A run's fields with the loss and the advantages of its `algorithm`. What the fields say themselves goes before.

    Args:
        max_completion_tokens: the sampler's limit, by which Dr. GRPO divides every sequence.

    Raises:
        ValueError: the fields have a loss of another kind, which would leave nothing of the algorithm.
    """
    name = cast(Preset, fields["algorithm"])
    papers = preset(name, max_completion_tokens)
    match fields.get("loss"):
        case None:
            loss: dict[str, Any] = {}
        case dict() as given:
            loss = given
        case given:
            loss = given.model_dump(exclude_unset=True) | {"kind": given.kind}
    if (kind := loss.get("kind", papers.kind)) != papers.kind:
        raise ValueError(f"algorithm {name} has the loss {papers.kind}: a loss {kind} leaves nothing of it")
    advantages = fields.get("advantages") or advantages_of_preset(name)
    chosen = fields | {"loss": papers.model_dump() | loss, "advantages": advantages}
    if advantages in ("batch_normalized", "given"):  # which know no groups
        return chosen
    return chosen | {"equal_rewards": fields.get("equal_rewards") or equal_rewards_of_preset(name)}
