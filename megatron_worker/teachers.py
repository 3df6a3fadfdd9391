"""A loss's request for a teacher's distributions, and a teacher's outputs for a bin."""

from dataclasses import dataclass

from torch import Tensor

from longshore.losses import DivergenceKind, DivergenceTokens


@dataclass(frozen=True)
class Divergence:
    """A divergence from a teacher's distributions (head/distributions.py), and what is known of them."""

    kind: DivergenceKind
    skew: float
    tokens: DivergenceTokens


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of the targets of a bin that this rank scores, [N, H], after the final norm.

    `low_NR` and `b_VR`: the output layer's adapter computes its part of the logits from them (head/beside.py).
    """

    hidden_NH: Tensor
    low_NR: Tensor | None = None
    b_VR: Tensor | None = None


@dataclass(frozen=True)
class LikeliestIds:
    """Ids that a teacher names for each target of a bin, integers [N, K], and their log-probabilities, float32.

    A last id of -1 means all other ids: the sum of their probabilities. A teacher behind a URL does not give it.
    """

    id_NK: Tensor
    logprob_NK: Tensor
