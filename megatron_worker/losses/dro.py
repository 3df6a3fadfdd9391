"""DRO (Richemond et al. 2024, arXiv:2405.19107, eq. 5): the square of A - beta log r over 2 beta, less its constant."""

from torch import Tensor

from megatron_worker.losses.parts.targets import Surrogate, Targets
from shared.jobs.job import DRO


def surrogate(dro: DRO, targets: Targets, advantage_N: Tensor) -> Surrogate:
    log_ratio_N = targets.log_ratio_N
    loss_N = -advantage_N * log_ratio_N + dro.beta / 2 * log_ratio_N.square()
    return Surrogate(loss_N, targets.ratio_N.detach(), {})
