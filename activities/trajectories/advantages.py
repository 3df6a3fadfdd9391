"""Advantages: how much better each trajectory of a group was than could be expected. Pure functions.

Legend: G trajectories of a group. All in float64. Rewards are finite.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.jobs.losses import AdvantageKind

Rewards = NDArray[np.float64]
_EPSILON = 1e-6  # keeps a group of equal rewards at 0, and changes no other by more than it


def group_mean(reward_G: Rewards) -> Rewards:
    """r_i - mean(r): Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2). A bias-free scale, unlike GRPO's."""
    return reward_G - reward_G.mean()


def group_normalized(reward_G: Rewards) -> Rewards:
    """(r_i - mean(r)) / std(r): GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2), std over the whole group."""
    return (reward_G - reward_G.mean()) / (reward_G.std() + _EPSILON)


def leave_one_out(reward_G: Rewards) -> Rewards:
    """r_i - mean of the others: RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, equation 8)."""
    num = len(reward_G)
    return reward_G - (reward_G.sum() - reward_G) / (num - 1)


def batch_normalized(rewards: Sequence[Rewards]) -> list[Rewards]:
    """(r_i - mean(r)) / std(r) over all groups of the batch: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, section 3).

    The paper takes the sum of a token's and later tokens' KL off the reward before this. Here a KL is taken off each
    token's own advantage after it (docs/losses.md).
    """
    mean, std = _of_batch(rewards)
    return [(reward_G - mean) / (std + _EPSILON) for reward_G in rewards]


def batch_scaled(rewards: Sequence[Rewards]) -> list[Rewards]:
    """(r_i - mean of its group) / std(r) over all groups of the batch (Liu et al. 2025, arXiv:2508.08221)."""
    _, std = _of_batch(rewards)
    return [group_mean(reward_G) / (std + _EPSILON) for reward_G in rewards]


def _of_batch(rewards: Sequence[Rewards]) -> tuple[float, float]:
    """Mean and standard deviation of all rewards; 0 of none."""
    whole = np.concatenate([np.zeros(0), *rewards])
    return (float(whole.mean()), float(whole.std())) if len(whole) else (0.0, 0.0)


def advantages_of(kind: AdvantageKind, rewards: Sequence[Rewards], given: Sequence[Rewards]) -> list[Rewards]:
    """The advantages of every group of a step. `given` is read for that kind alone.

    `leave_one_out` needs groups of two or more.
    """
    match kind:
        case "group_mean":
            return [group_mean(reward_G) for reward_G in rewards]
        case "group_normalized":
            return [group_normalized(reward_G) for reward_G in rewards]
        case "leave_one_out":
            return [leave_one_out(reward_G) for reward_G in rewards]
        case "batch_scaled":
            return batch_scaled(rewards)
        case "group_mean_normalized":  # REINFORCE++'s baseline: the batch's deviation is that from the groups' means
            return batch_normalized([group_mean(reward_G) for reward_G in rewards])
        case "batch_normalized":
            return batch_normalized(rewards)
        case "given":
            return list(given)
        case "none" | "gae":  # a critic's are computed in its training (megatron_worker/critic.py)
            return [np.zeros_like(reward_G) for reward_G in rewards]
