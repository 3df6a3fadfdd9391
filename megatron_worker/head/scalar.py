"""A head of scalars in the place of the language model's: a linear of the final hidden state, whole on every rank.

Ranks that share a bin compute the same values of it, so the hidden states' gradient is complete on each of them, and
the weight's as often as there are such ranks (under context parallelism, of the targets that are a rank's own).

Shape suffixes: N targets, H hidden size, L scalars.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from longshore.training import ScalarHead
from shared.families.tensor_slices import TensorSlice
from shared.models.peft import PREFIX

# --- An adapter of the output layer ---
# Its part of the logits comes from more hidden channels, [h, s h A^T] [W, B]^T.
#
# So every scan of the vocabulary works unchanged; [W, B] is made for some rows at a time (logprobs.py). Shape
# suffixes: N targets, V rows of this rank's shard, R rank.


@dataclass(frozen=True)
class LmHeadLora:
    """The adapter's channels for some targets, [N, R], and their columns of this rank's shard, [V, R]."""

    low_NR: Tensor
    b_VR: Tensor


MODULE = "score."
"""What transformers calls it: names of its parameters begin so."""
OWN = "own."
"""What names of one's own parameters begin with."""
WEIGHT, BIAS = f"{MODULE}weight", f"{MODULE}bias"


def head_slices(head: ScalarHead | None, hidden_size: int, last_stage: int = 0) -> list[TensorSlice]:
    """Return a head's tensors under PEFT's names, which the last pipeline stage holds."""
    if head is None:
        return []
    num = len(head.names)
    shapes = {WEIGHT: (num, hidden_size)} | ({BIAS: (num,)} if head.per == "token" else {})
    return [TensorSlice(PREFIX + name, name, shape, None, 0, num, stage=last_stage) for name, shape in shapes.items()]


def own_slices(own: Mapping[str, Parameter]) -> list[TensorSlice]:
    """Return the tensors of the user's parameters. A parameter must have at least one dimension."""
    return [TensorSlice(OWN + name, OWN + name, tuple(p.shape), None, 0, len(p)) for name, p in own.items()]


@dataclass(frozen=True)
class HeadWeights:
    weight_LH: Tensor
    bias_L: Tensor | None

    @classmethod
    def among(cls, parameters: Mapping[str, Tensor]) -> Self | None:
        """Return a head's of an adapter's parameters on this rank; None: there is none."""
        return cls(parameters[WEIGHT], parameters.get(BIAS)) if WEIGHT in parameters else None

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        return [("score", self.weight_LH), *([] if self.bias_L is None else [("score bias", self.bias_L)])]

    def values(self, hidden_NH: Tensor) -> Tensor:
        """Return the scalars of some targets, [N, L], in float32 (float64 for float64)."""
        wide = torch.promote_types(torch.float32, hidden_NH.dtype)
        bias_L = None if self.bias_L is None else self.bias_L.to(wide)
        return F.linear(hidden_NH.to(wide), self.weight_LH.to(wide), bias_L)
