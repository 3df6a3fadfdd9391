"""Print sweeps and their trials."""

import json
from typing import TYPE_CHECKING

from service.cli.output.render import plain, print_table

if TYPE_CHECKING:
    from service.automation.sweep_views import SweepView, TrialView


def print_sweep(view: "SweepView") -> None:
    """Print a sweep and a table of its trials."""
    print(f"{view.sweep_id} ({view.sweep.name}): {view.state}, {progress(view)} trials have ended")
    if view.problem:
        print(view.problem)
    paths = tuple(view.sweep.parameters)

    def row(trial: "TrialView") -> tuple[str, ...]:
        number = f"{trial.number}*" if trial.number == view.best else f"{trial.number}"
        values = (plain(json.dumps(trial.values.get(path))) for path in paths)
        return number, trial.state, _number(trial.value), f"{trial.step}", *values, trial.run_id

    print_table(("trial", "state", view.metric, "step", *paths, "run"), map(row, view.trials))
    if view.adapter:
        print(f"published: {view.sweep.name}:v{view.version} {view.adapter}")


def progress(view: "SweepView") -> str:
    """Return how many trials have ended, of how many."""
    return f"{sum(trial.state not in ('running', 'paused') for trial in view.trials)} of {view.num_trials}"


def best(view: "SweepView") -> str:
    """Return the metric and the number of the best trial."""
    return "" if view.best is None else f"{_number(view.trials[view.best].value)} (trial {view.best})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
