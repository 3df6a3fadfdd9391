"""The learning rate as a function of the step."""

import math

from shared.jobs.job import Schedule


def learning_rate(schedule: Schedule, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0) of `num_steps`, or of the schedule's own number.

    Warm-up rises by equal parts and reaches the full rate at step `warmup_steps`; no step has rate 0. Decay then falls
    to 0 at `num_steps`, one step after the last.
    """
    if schedule.rates:
        return schedule.rates[step]
    warmup, num_steps = schedule.warmup_steps, schedule.num_steps or num_steps
    if step < warmup:
        return schedule.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - warmup)
    match schedule.kind:
        case "constant":
            return schedule.learning_rate
        case "linear":
            return schedule.learning_rate * (1 - done)
        case "cosine":
            return schedule.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
