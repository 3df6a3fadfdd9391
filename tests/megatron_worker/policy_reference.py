"""The losses of policy optimisation as their papers write them, a target at a time, in float64; and a gradient without
autograd for any formula.

Formulas take complex log-probabilities: an imaginary part that is as small as can be is the derivative, exactly, and
which side of a clip holds is asked of the real part (Squire & Trapp 1998, "Using complex variables to estimate
derivatives of real functions"). Differences of two values would be wrong where a clip lies between them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from longshore.losses import CISPO, DRO, GMPO, GSPO, PPO, SAPO, Loss, PolicyLoss, Reinforce, TruncatedReinforce
from megatron_worker.engine import Batch, Scores
from megatron_worker.losses import loss_function
from tests.megatron_worker.training.test_batches import a_batch

ROWS = dict[str, np.ndarray]


def rows(seed: int, num_targets: int, spread: float = 0.4, constant_advantage: bool = False) -> ROWS:
    """Columns of a bin, float64: about one target in five masked, sequences of any length, in no order."""
    random = np.random.default_rng(seed)
    sequence = random.integers(0, max(1, num_targets // 3), num_targets)
    logprob = -random.exponential(1.5, num_targets)
    advantage = random.normal(size=num_targets)
    if constant_advantage:
        advantage = random.normal(size=num_targets)[sequence]
    return {
        "logprob": logprob,
        "old": logprob + random.normal(scale=spread, size=num_targets),
        "ref": logprob + random.normal(scale=spread, size=num_targets),
        "sampler": logprob + random.normal(scale=spread, size=num_targets),
        "entropy": random.exponential(2.0, num_targets),
        "advantage": advantage,
        "weight": np.where(random.random(num_targets) < 0.2, 0.0, random.choice([0.5, 1.0], num_targets)),
        "sequence": sequence,
    }


def as_batch(columns: ROWS, dtype: torch.dtype = torch.float64) -> tuple[Scores, Batch, torch.Tensor]:
    """The same as tensors; the last is the leaf to look for the gradient at."""
    tensor = {name: torch.tensor(values, dtype=dtype) for name, values in columns.items() if name != "sequence"}
    logprob_N = tensor["logprob"].requires_grad_()
    batch = dataclasses.replace(
        a_batch(weight=tensor["weight"]),
        advantage_N=tensor["advantage"],
        old_logprob_N=tensor["old"],
        ref_logprob_N=tensor["ref"],
        sampler_logprob_N=tensor["sampler"],
        sequence_N=torch.tensor(columns["sequence"], dtype=torch.int64),
    )
    return Scores(logprob_N, tensor["entropy"]), batch, logprob_N


def ours(loss: Loss, columns: ROWS) -> tuple[float, float, np.ndarray]:
    """Loss, normaliser, gradient by the log-probabilities."""
    scores, batch, logprob_N = as_batch(columns)
    sums = loss_function(loss).sums(scores, batch)
    sums.loss.backward()
    return sums.loss.item(), sums.weight.item(), logprob_N.grad.numpy()


def gradient_of(formula: Callable[[np.ndarray], complex], logprob: np.ndarray, step: float = 1e-30) -> np.ndarray:
    """The derivatives of a formula by each log-probability."""
    return np.array([formula(logprob + 1j * step * unit).imag / step for unit in np.eye(len(logprob))])


def least(a: complex, b: complex) -> complex:
    return a if a.real <= b.real else b


def most(a: complex, b: complex) -> complex:
    return a if a.real >= b.real else b


def k(estimator: str, log_p: float, log_q: float) -> float:
    d = log_p - log_q
    return {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator]


def _advantage(loss: PolicyLoss, c: ROWS, n: int) -> float:
    penalty = k(loss.kl.estimator, c["old"][n], c["ref"][n]) if loss.kl and loss.kl.placement == "reward" else 0.0
    return c["advantage"][n] - (loss.kl.coefficient * penalty if loss.kl else 0.0)


def reference(loss: PolicyLoss, c: ROWS, logprob: np.ndarray, frozen: np.ndarray) -> tuple[float, float]:
    """Loss and normaliser of a bin. `frozen`: log-probabilities where a formula stops the gradient."""
    live = [n for n in range(len(logprob)) if c["weight"][n] > 0]
    sequences = {s: [n for n in live if c["sequence"][n] == s] for s in {int(c["sequence"][n]) for n in live}}
    value = {}
    for members in sequences.values():
        mass = sum(c["weight"][n] for n in members)
        mean_log_ratio, moved = (
            sum(c["weight"][n] * (of[n] - c["old"][n]) for n in members) / mass for of in (frozen, logprob)
        )
        behind = sum(c["weight"][n] * (c["sampler"][n] - frozen[n]) for n in members) / mass
        sampled = [c["old"][n] - c["sampler"][n] for n in members]
        clipped = 0.0  # GMPO's mean of log ratios, each held by the sign of its own advantage
        for n in members if isinstance(loss, GMPO) else []:
            d, a = logprob[n] - c["old"][n], _advantage(loss, c, n)
            clipped += c["weight"][n] / mass * (least(d, loss.clip_high) if a > 0 else most(d, -loss.clip_low))
        for n in members:
            a = _advantage(loss, c, n)
            r = np.exp(logprob[n] - c["old"][n])
            match loss:
                case Reinforce():
                    v = -r * a
                case PPO():
                    v = least(r * a, least(most(r, 1 - loss.clip_low), 1 + loss.clip_high) * a)
                    if loss.dual_clip is not None and a < 0:
                        v = most(v, loss.dual_clip * a)
                    v = -v
                case CISPO():
                    low = 0.0 if loss.clip_low is None else 1 - loss.clip_low
                    v = -min(max(np.exp(frozen[n] - c["old"][n]), low), 1 + loss.clip_high) * a * logprob[n]
                case GMPO():
                    v = -a * np.exp(clipped)
                case SAPO():
                    tau = loss.tau_positive if a > 0 else loss.tau_negative
                    v = -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))
                case GSPO():
                    s = np.exp(mean_log_ratio) * np.exp(logprob[n] - frozen[n])
                    if loss.level == "sequence":
                        s = np.exp(moved)
                    v = -least(s * a, least(most(s, 1 - loss.clip_low), 1 + loss.clip_high) * a)
                case DRO():
                    v = (a - loss.beta * (logprob[n] - c["old"][n])) ** 2 / (2 * loss.beta) - a * a / (2 * loss.beta)
                case TruncatedReinforce():
                    v = -min(np.exp(frozen[n] - c["old"][n]), loss.truncation) * a * logprob[n]
                    v += loss.old_kl_coefficient * k("k2", logprob[n], c["old"][n])
            if loss.truncated_importance is not None:
                ratio = np.exp(sum(sampled) if loss.importance_level == "sequence" else c["old"][n] - c["sampler"][n])
                is_kept = (loss.importance_floor or 0.0) <= ratio <= loss.truncated_importance
                v *= min(ratio, loss.truncated_importance) * (loss.importance_beyond == "truncate" or is_kept)
            if loss.off_policy_bound is not None and c["advantage"][n] < 0 and behind > loss.off_policy_bound:
                v = 0.0
            if loss.kl is not None and loss.kl.placement == "loss":
                v += loss.kl.coefficient * k(loss.kl.estimator, logprob[n], c["ref"][n])
            value[n] = v - loss.entropy_coefficient * c["entropy"][n]
    match loss.aggregation:
        case "token_mean":
            return sum(c["weight"][n] * value[n] for n in live), sum(c["weight"][n] for n in live)
        case "sequence_mean":
            means = [
                sum(c["weight"][n] * value[n] for n in m) / sum(c["weight"][n] for n in m) for m in sequences.values()
            ]
            return sum(means), len(sequences)
        case "constant_length":
            return sum(c["weight"][n] * value[n] for n in live) / loss.constant, len(sequences)
