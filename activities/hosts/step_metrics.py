"""A job's metrics from those of its optimizer steps: what a run shows, and what a train step is recorded with.

A train step of reinforcement learning is one job of several optimizer steps (epochs times mini-batches): it is told by
all of them. Every other job is a run's whole course, and is told by its newest step.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from shared.jobs.job import Loss, is_policy_loss

Metrics = Mapping[str, float]

_SUMS = ("tokens", "target_tokens", "num_bins", "sequences", "step_s", "skipped")
_MEANS_OF_TOKENS = ("ratio_mean", "entropy", "importance_mean")


def job_metrics(loss: Loss, steps: Iterable[Metrics]) -> dict[str, float]:
    """Combine the metrics of a job's optimizer steps, in order."""
    job = JobMetrics(loss)
    for metrics in steps:
        job.take(metrics)
    return job.told()


class JobMetrics:
    """Takes the metrics of a job's optimizer steps, in order.

    Skipped steps are counted. Of a policy loss: counts and seconds are added up; `learning_rate` is the last; of
    `..._max` and `memory_bytes` the greatest counts; means over tokens (ratios, divergences, entropy, fractions) are
    weighed by each step's trained tokens; everything else (loss, norm) is the mean of the steps that have it. Of any
    other loss: the newest value of each.
    """

    def __init__(self, loss: Loss) -> None:
        self._is_train_step = is_policy_loss(loss)
        self._so_far: dict[str, tuple[float, float]] = {}  # a value, and what it is to be divided by

    def take(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            before, weight = self._so_far.get(name, (0.0, 0.0))
            match _kind(name) if self._is_train_step or name == "skipped" else "last":
                case "last":
                    self._so_far[name] = value, 1.0
                case "sum":
                    self._so_far[name] = before + value, 1.0
                case "max":
                    self._so_far[name] = max(before, value), 1.0
                case "mean":
                    self._so_far[name] = before + value, weight + 1
                case "mean_of_tokens":
                    tokens = metrics["target_tokens"]
                    self._so_far[name] = before + value * tokens, weight + tokens

    def told(self) -> dict[str, float]:
        found = {name: value / weight for name, (value, weight) in self._so_far.items()}
        if self._is_train_step and "tokens_per_s" in found:
            found["tokens_per_s"] = found["tokens"] / found["step_s"]
        return found


def _kind(name: str) -> Literal["last", "sum", "max", "mean", "mean_of_tokens"]:
    """The rule by which values of several optimizer steps become one. Maxima are of what is never negative."""
    if name == "learning_rate":
        return "last"
    if name in _SUMS:
        return "sum"
    if name.endswith("_max") or name == "memory_bytes":
        return "max"
    if name in _MEANS_OF_TOKENS or name.startswith("kl_") or name.endswith("_fraction"):
        return "mean_of_tokens"
    return "mean"
