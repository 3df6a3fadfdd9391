"""Drawing tokens: logits and one number between 0 and 1 give each row a token and its logprob.

Every row by itself: no operation here mixes rows, so what is drawn for one does not depend on the others.

Shape suffixes: B rows, C rows of a chunk of a prompt, V vocabulary, K likeliest.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BITS = 52  # fewer than a double's 53, so that a number times a double total stays below that total
_SCORED = 64  # prompt tokens whose logits are held at a time


@dataclass(frozen=True)
class Drawn:
    """Drawn tokens, [B], and their logprobs, float32 in nats.

    `raw` is of the model's own distribution, among what a grammar allows; `processed` of the distribution drawn from.
    """

    token_B: Tensor
    raw_B: Tensor
    processed_B: Tensor
    raw_BV: Tensor


@dataclass(frozen=True)
class Penalties:
    """Additions to a sequence's logits, as in vLLM. Penalties are for tokens that were drawn, not the prompt's."""

    bias: Mapping[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def change_anything(self) -> bool:
        return bool(self.bias or self.presence or self.frequency)

    def add_to(self, logit_V: Tensor, drawn: Sequence[int]) -> None:
        """Change a sequence's logits in place: bias, then `frequency` times a drawn token's count, then `presence`."""
        if self.bias:
            logit_V[list(self.bias)] += torch.tensor(list(self.bias.values()), device=logit_V.device)
        if drawn and (self.presence or self.frequency):
            counts = Counter(drawn)
            logit_V[list(counts)] -= self.frequency * torch.tensor(list(counts.values()), device=logit_V.device)
            logit_V[list(counts)] -= self.presence


NO_PENALTIES = Penalties()


@dataclass
class PromptScores:
    """Scores of a prompt's tokens but the first: each one's logprob in nats, its rank (how many are at least as
    likely), and the likeliest tokens in its place with their logprobs, at temperature 1.
    """

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, logit_CV: Tensor, label_C: Tensor, num_top: int) -> None:
        """Score the next C tokens, `label_C`, with `num_top` of the likeliest tokens at each."""
        logprob_CV = logit_CV.log_softmax(-1)
        logprob_C1 = logprob_CV.gather(1, label_C[:, None])
        self.logprobs += logprob_C1[:, 0].tolist()
        self.ranks += (logprob_CV >= logprob_C1).sum(-1).tolist()
        self.top += likeliest(logprob_CV, num_top)


def score_prompt(
    token_ids: tuple[int, ...], rows_TH: Tensor, logits_of: Callable[[Tensor], Tensor], num_top: int
) -> PromptScores:
    """Score a prompt's tokens but the first, by the rows of the tokens before them and what makes logits of rows.

    Computed in chunks, never [T, V]; their shapes depend on the prompt alone.
    """
    label_T = torch.tensor(token_ids[1:], dtype=torch.int64, device=rows_TH.device)
    scores = PromptScores()
    for label_C, rows_CH in zip(label_T.split(_SCORED), rows_TH[:-1].split(_SCORED), strict=True):
        scores.add(logits_of(rows_CH), label_C, num_top)
    return scores


def likeliest(logprob_CV: Tensor, num: int) -> list[list[tuple[int, float]]]:
    """Return the ids of the `num` likeliest tokens of each row, with their logprobs, without impossible ones."""
    logprob_CK, token_CK = logprob_CV.topk(min(num, logprob_CV.shape[1]))
    rows = zip(token_CK.tolist(), logprob_CK.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -math.inf] for row in rows]


@dataclass(frozen=True)
class Cuts:
    """The unlikely tokens that each row leaves out: first by min_p, then by top_k, then by top_p, as in vLLM.

    Attributes:
        min_p_B: float32 in [0, 1]: tokens below this share of the likeliest one's probability (arXiv:2407.01082).
        top_k_B: int64, at least 1: tokens less likely than the k-th.
        top_p_B: float32 in (0, 1]: tokens whose likelier ones already add up to it (Holtzman et al. 2020,
            arXiv:1904.09751, section 3.1).
    """

    min_p_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), a hash of seed and position: it has no state that batching could change."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)


def draw(
    logit_BV: Tensor, temperature_B: Tensor, cuts: Cuts, uniform_B: Tensor, penalised_BV: Tensor | None = None
) -> Drawn:
    """Draw by inverting the cumulative distribution in vocabulary order.

    Args:
        logit_BV: float32; -inf of tokens that are not allowed.
        temperature_B: float32; 0 takes the likeliest token (the lowest id among equals) and ignores the cuts.
        uniform_B: float64 in [0, 1).
        penalised_BV: the logits that are drawn from, where they are others.
    """
    raw_BV = processed_BV = logit_BV.log_softmax(-1)
    greedy_B = temperature_B == 0
    if penalised_BV is not None:
        logit_BV, processed_BV = penalised_BV, penalised_BV.log_softmax(-1)
    if bool(((temperature_B != 1) & ~greedy_B).any()):
        # Divided by 1, a logit is itself: rows at temperature 1 come out the same whether or not others are here.
        processed_BV = (logit_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]).log_softmax(-1)
    for of_rows, asked_B, outside in (
        (cuts.min_p_B, cuts.min_p_B > 0, _below_min_p),
        (cuts.top_k_B, cuts.top_k_B < logit_BV.shape[1], _below_top_k),
        (cuts.top_p_B, cuts.top_p_B < 1, _outside_nucleus),
    ):
        if bool((asked_B := asked_B & ~greedy_B).any()):
            kept_BV = torch.where(outside(processed_BV, of_rows), -torch.inf, processed_BV).log_softmax(-1)
            processed_BV = torch.where(asked_B[:, None], kept_BV, processed_BV)
    cumulative_BV = processed_BV.exp().double().cumsum(-1)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0]
    token_B = torch.where(greedy_B, logit_BV.argmax(-1), drawn_B)
    raw_B, processed_B = (x_BV.gather(1, token_B[:, None])[:, 0] for x_BV in (raw_BV, processed_BV))
    return Drawn(token_B, raw_B, processed_B, raw_BV)


def _below_min_p(logprob_BV: Tensor, min_p_B: Tensor) -> Tensor:
    return logprob_BV < logprob_BV.amax(-1, keepdim=True) + min_p_B.log()[:, None]


def _below_top_k(logprob_BV: Tensor, top_k_B: Tensor) -> Tensor:
    """Return True for tokens less likely than the k-th. Those as likely as it stay."""
    last_B1 = top_k_B.clamp(max=logprob_BV.shape[1])[:, None] - 1
    return logprob_BV < logprob_BV.sort(dim=-1, descending=True).values.gather(1, last_B1)


def _outside_nucleus(logprob_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Return True for tokens whose likelier ones already add up to top_p. The likeliest is never outside."""
    sorted_BV, order_BV = logprob_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = sorted_BV.exp().double()
    before_BV = probability_BV.cumsum(-1) - probability_BV
    outside_BV = before_BV >= top_p_B.double()[:, None]
    outside_BV[:, 0] = False
    return torch.zeros_like(outside_BV).scatter_(1, order_BV, outside_BV)
