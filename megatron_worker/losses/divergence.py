"""Estimates of a Kullback-Leibler divergence from single samples (Schulman 2020, http://joschu.net/blog/kl-approx.html).

With x drawn from p and d = log p(x) - log q(x), KL(p, q) = E[d] is estimated by

    k1 = d                   unbiased, of either sign
    k2 = d^2 / 2             biased, never negative
    k3 = exp(-d) - 1 + d     unbiased, never negative

Beyond -d = 20, k3 follows its tangent: it stays finite, and its gradient still pulls towards q. With a clamped
exponential the gradient would be that of d alone, away from q; with a clamped k3 (TRL, verl) it is 0.
"""

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

# exp(20) is beyond any ratio of use, and finite: a zero gradient times infinity would be no number.
LARGEST_LOG_RATIO = 20.0


def bounded(log_ratio_N: Tensor) -> Tensor:
    """Clamp a logarithm so that its exponential is finite."""
    return log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def divergence(logprob_N: Tensor, other_N: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(p, q) at samples of p, in nats. `logprob_N`: log p; `other_N`: log q."""
    difference_N = logprob_N - other_N
    match estimator:
        case "k1":
            return difference_N
        case "k2":
            return difference_N.square() / 2
        case "k3":
            exponent_N = (-difference_N).clamp(max=LARGEST_LOG_RATIO)
            return exponent_N.exp() * (1 - difference_N - exponent_N) - 1 + difference_N
