"""An adapter of the output layer: its part of the logits comes from more hidden channels, [h, s h A^T] [W, B]^T.

So every scan of the vocabulary works unchanged; [W, B] is made for some rows at a time (logprobs.py). Shape suffixes: N
targets, V rows of this rank's shard, R rank.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BesideHead:
    """The adapter's channels for some targets, [N, R], and their columns of this rank's shard, [V, R]."""

    low_NR: Tensor
    b_VR: Tensor
