"""Views of sweeps in the API, and the current trials of a sweep, which the views are made from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from longshore.fields import Frozen
from service.runs.history import RunHistory
from service.runs.rows import IndexedRun
from shared.automation import Report, Sweep, SweepEnd, SweepRecord, Values
from shared.runs.requests import RunId
from shared.runs.status import State


class TrialView(Frozen):
    """A trial. `pruned`: successive halving ended it, or would have.

    `value`: the sweep's metric, as the run reported it last; of a pruned one as it was compared.
    """

    number: int
    run_id: RunId
    values: Values
    state: State | Literal["pruned"]
    step: int = 0
    value: float | None = None
    gpu_seconds: float = 0.0
    problem: str | None = None


class SweepView(SweepRecord):
    """A sweep. Times are seconds since 1970."""

    state: Literal["running", "succeeded", "failed", "cancelled"]
    ended_at: float | None = None
    problem: str | None = None
    metric: str
    direction: Literal["minimize", "maximize"]
    num_trials: int
    trials: tuple[TrialView, ...] = Field(description="trials that have begun, in order")
    best: int | None = Field(default=None, description="the number of the best trial so far that succeeded")
    adapter: str | None = Field(default=None, description="URI of the published model of the best trial")
    version: int | None = Field(default=None, description="the published version, under the sweep's name")


@dataclass(frozen=True)
class Trial:
    """A trial in its current state."""

    number: int
    run: IndexedRun
    pruned_by: Report | None = None

    @property
    def has_ended(self) -> bool:
        return self.run.status.state in ("succeeded", "failed", "cancelled")

    @property
    def values(self) -> Values:
        assert self.run.record.source.trial is not None
        return self.run.record.source.trial.values

    def value(self, metric: str) -> float | None:
        """Return the metric if it is a number."""
        found = self.run.status.metrics.get(metric, math.nan) if self.pruned_by is None else self.pruned_by.value
        return found if math.isfinite(found) else None

    def view(self, metric: str) -> TrialView:
        status = self.run.status
        return TrialView(
            number=self.number,
            run_id=self.run.run_id,
            values=self.values,
            state=status.state if self.pruned_by is None else "pruned",
            step=status.step,
            value=self.value(metric),
            gpu_seconds=status.gpu_seconds,
            problem=status.problem.message if status.problem else None,
        )


def best_of(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """Return the best of the trials that succeeded and were not pruned: of equal ones the first."""
    able = [trial for trial in trials if trial.run.status.state == "succeeded" and trial.pruned_by is None]
    valued = [(value, trial) for trial in able if (value := trial.value(sweep.measured)) is not None]
    best = (max if sweep.maximizes else min)(valued, key=lambda each: each[0], default=None)
    return None if best is None else best[1]


def sweep_view(record: SweepRecord, trials: Sequence[Trial], end: SweepEnd | None) -> SweepView:
    sweep, best = record.sweep, best_of(record.sweep, trials)
    return SweepView(
        **dict(record),
        metric=sweep.measured,
        direction="maximize" if sweep.maximizes else "minimize",
        num_trials=sweep.num_trials,
        trials=tuple(trial.view(sweep.measured) for trial in trials),
        best=best.number if best is not None else None,
        state="running" if end is None else end.state,
        **({} if end is None else end.model_dump(include={"ended_at", "problem", "adapter", "version"})),
    )


def reports_of(run: IndexedRun, history: RunHistory, metric: str) -> dict[int, float]:
    """Return a run's metric by train step of an RL run, else by optimizer step. Evaluations' are `eval_...`."""
    found = history.metrics()
    if run.record.run.kind == "rl":
        reported = [(step.step, step.metrics) for step in found.train_steps]
    else:
        reported = [(step.step, step.metrics) for step in found.steps]
        reported += [(e.step, {f"eval_{name}": value for name, value in e.metrics.items()}) for e in found.evaluations]
    return {step: metrics[metric] for step, metrics in reported if metric in metrics}
