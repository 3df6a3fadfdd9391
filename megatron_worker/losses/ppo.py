"""PPO: the clipped ratio of each token (clipping.py)."""

from torch import Tensor

from megatron_worker.losses.parts.clipping import clipped_surrogate
from megatron_worker.losses.parts.targets import Surrogate, Targets
from shared.jobs.job import PPO


def surrogate(ppo: PPO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    return clipped_surrogate(targets.ratio_N, advantage_N, ppo.clip_low, ppo.clip_high, ppo.dual_clip)
