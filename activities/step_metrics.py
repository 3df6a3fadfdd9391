"""A job's metrics from those of its optimizer steps: what a run shows, and what a train step is recorded with.

A train step of reinforcement learning is one job of several optimizer steps (epochs times mini-batches): its metrics are
of all of them. Every other job is a run's whole course, which is told by its newest step.
"""

from collections.abc import Iterable, Mapping, Sequence

from shared.jobs import Loss, is_policy_loss

Metrics = Mapping[str, float]

_TOTALS = ("tokens", "target_tokens", "num_bins", "sequences", "step_s", "skipped")
_MEANS_OF_TOKENS = ("ratio_mean", "entropy", "importance_mean")


def job_metrics(loss: Loss, steps: Sequence[Metrics]) -> dict[str, float]:
    """What the metrics of a job's optimizer steps, in order, come to.

    Of a policy loss: counts and seconds are added up; `learning_rate` is the last; of `..._max` and `memory_bytes` the
    greatest counts; means over tokens (ratios, divergences, entropy, fractions) are weighed by each step's trained
    tokens; everything else (loss, norm) is the mean of the steps that have it. Of any other loss: the newest value of
    each.
    """
    if not is_policy_loss(loss):
        return {name: value for metrics in steps for name, value in metrics.items()}
    names = sorted({name for metrics in steps for name in metrics})
    found = {name: _of_steps(name, [metrics for metrics in steps if name in metrics]) for name in names}
    if "tokens_per_s" in found:
        found["tokens_per_s"] = found["tokens"] / found["step_s"]
    return found


def _of_steps(name: str, steps: Sequence[Metrics]) -> float:
    """`steps`: those that have the metric, one at least."""
    values = [metrics[name] for metrics in steps]
    if name == "learning_rate":
        return values[-1]
    if name.endswith("_max") or name == "memory_bytes":
        return max(values)
    if name in _TOTALS:
        return sum(values)
    if name in _MEANS_OF_TOKENS or name.startswith("kl_") or name.endswith("_fraction"):
        return _mean(values, [metrics["target_tokens"] for metrics in steps])
    return _mean(values, [1.0] * len(values))


def _mean(values: Iterable[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
