"""An adapter beside the output layer: its part of the logits comes from more hidden channels, [h, s h A^T] [W, B]^T.

So every scan of the vocabulary stays as it is, and costs a copy of the output embedding. Shape suffixes: N targets, H
hidden size, V rows of this rank's shard, R rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BesideHead:
    """The adapter's channels for some targets, [N, R], and their columns of this rank's shard, [V, R]."""

    low_NR: Tensor
    b_VR: Tensor

    def joined(self, hidden_NH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and output embedding with the channels behind theirs. The latter has no gradient."""
        joined_VX = torch.cat([weight_VH.detach(), self.b_VR.detach()], dim=1)
        return torch.cat([hidden_NH, self.low_NR], dim=1), joined_VX
