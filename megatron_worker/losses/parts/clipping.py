"""PPO's clip of a ratio (Schulman et al. 2017, arXiv:1707.06347, eq. 7), its bounds apart, and the dual clip."""

import torch
from torch import Tensor

from megatron_worker.losses.parts.targets import Surrogate


def clipped_surrogate(
    ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 no more than -dual A (Ye et al. 2020, arXiv:1912.09729,
    eq. 5). A ratio on a bound is not clipped: it has its gradient.
    """
    clips = {
        "clip_high": (1 + clip_high, (advantage_N > 0) & (ratio_N > 1 + clip_high)),
        "clip_low": (1 - clip_low, (advantage_N < 0) & (ratio_N < 1 - clip_low)),
    }
    if dual_clip is not None:
        clips["clip_dual"] = (dual_clip, (advantage_N < 0) & (ratio_N > dual_clip))
    bounded_N = ratio_N
    for bound, where_N in clips.values():
        bounded_N = torch.where(where_N, bound, bounded_N)
    clipped = {name: where_N for name, (_, where_N) in clips.items()}
    return Surrogate(-bounded_N * advantage_N, ratio_N.detach(), clipped)
