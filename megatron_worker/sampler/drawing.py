"""Drawing tokens: logits and one number between 0 and 1 give each row a token and its logprob.

Every row by itself: no operation here mixes rows, so what is drawn for one does not depend on the others.

Shape suffixes: B rows, V vocabulary, K likeliest.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 52  # fewer than a double's 53, so that a number times a double total stays below that total


@dataclass(frozen=True)
class Drawn:
    """Drawn tokens, [B], and their logprobs, float32 in nats; `processed` is of the distribution drawn from."""

    token_B: Tensor
    raw_B: Tensor
    processed_B: Tensor
    raw_BV: Tensor


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), a hash of seed and position: it has no state that batching could change."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)


def draw(logit_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Drawn:
    """Draw by inverting the cumulative distribution in vocabulary order.

    Args:
        logit_BV: float32.
        temperature_B: float32; 0 takes the likeliest token (the lowest id among equals) and ignores the rest.
        top_p_B: float32 in (0, 1]: only the likeliest tokens that together reach it (Holtzman et al. 2020,
            arXiv:1904.09751, section 3.1) are drawn.
        uniform_B: float64 in [0, 1).
    """
    raw_BV = logit_BV.log_softmax(-1)
    greedy_B = temperature_B == 0
    processed_BV = raw_BV
    if bool(((temperature_B != 1) & ~greedy_B).any()):
        # Divided by 1, a logit is itself: rows at temperature 1 come out the same whether or not others are here.
        processed_BV = (logit_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]).log_softmax(-1)
    if bool(((top_p_B < 1) & ~greedy_B).any()):
        nucleus_BV = torch.where(_outside_nucleus(processed_BV, top_p_B), -torch.inf, processed_BV).log_softmax(-1)
        processed_BV = torch.where(((top_p_B < 1) & ~greedy_B)[:, None], nucleus_BV, processed_BV)
    cumulative_BV = processed_BV.exp().double().cumsum(-1)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0]
    token_B = torch.where(greedy_B, logit_BV.argmax(-1), drawn_B)
    raw_B, processed_B = (x_BV.gather(1, token_B[:, None])[:, 0] for x_BV in (raw_BV, processed_BV))
    return Drawn(token_B, raw_B, processed_B, raw_BV)


def _outside_nucleus(logprob_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Return True for tokens before which the likelier ones already reach top_p. The likeliest is never outside."""
    sorted_BV, order_BV = logprob_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = sorted_BV.exp().double()
    before_BV = probability_BV.cumsum(-1) - probability_BV
    outside_BV = before_BV >= top_p_B.double()[:, None]
    outside_BV[:, 0] = False
    return torch.zeros_like(outside_BV).scatter_(1, order_BV, outside_BV)
