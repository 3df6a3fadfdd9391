"""Published algorithms as settings of the losses in jobs.py: what a name means is said here and nowhere else.

Advantages are the other half of an algorithm, and are made before packing.
"""

from typing import Literal

from shared.jobs import CISPO, GSPO, PPO, Kl, PolicyLoss, Reinforce

Preset = Literal["reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo"]
PRESETS: tuple[Preset, ...] = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo")


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
