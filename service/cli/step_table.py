"""Train steps of RL runs as people read them: many as a table, one as a line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from service.cli.render import coloured, print_table

if TYPE_CHECKING:
    from service.run_views import TrainStepMetrics
    from shared.runs import StepStatus

# A column, the metric that it shows, and how; seconds are shown by the column of what took them.
_NUMBERS = (
    ("tokens", "response_tokens_mean", ".0f"),
    ("KL old", "kl_old_new", ".2g"),
    ("KL ref.", "kl_reference", ".2g"),
    ("ratio", "ratio_mean", ".4g"),
    *((f"{doing} s", f"{doing}_seconds", ".1f") for doing in ("sampling", "grading", "training", "publishing")),
)


def print_steps(steps: Iterable["StepStatus"]) -> None:
    """What became of each step, and what it measured."""
    from rich.markup import escape

    _print(
        [
            {
                "step": str(step.step),
                "state": coloured(step.state),
                "policy": "" if step.policy_version is None else str(step.policy_version),
                **_cells(step.metrics),
                "": escape(_remark(step)),
            }
            for step in steps
        ]
    )


def print_step_metrics(rows: Iterable["TrainStepMetrics"]) -> None:
    """What each step measured, alone."""
    _print([{"train step": str(row.step), **_cells(row.metrics)} for row in rows])


def step_line(step: "StepStatus") -> str:
    """A step that has ended, as a line. It says train step: a worker's own lines count optimizer steps."""
    cells = {} if step.same_as is not None else _cells(step.metrics)
    parts: list[str] = [step.state] if step.state != "done" else []
    parts += [f"{name} {cells[name]}" for name in ("reward", "held-out") if cells.get(name)]
    if step.version is not None and step.same_as is None:
        parts.append(f"published v{step.version}")
    if remark := _remark(step):
        parts.append(remark)
    return f"train step {step.step}: {', '.join(parts) or step.state}"


def _cells(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics that people look for, by their columns; nothing in those that the step did not measure."""
    reward, spread, held_out = (metrics.get(name) for name in ("reward_mean", "reward_std", "eval_reward_mean"))
    cells = {
        "reward": "" if reward is None else f"{reward:.3g}" + ("" if spread is None else f" ± {spread:.3g}"),
        "held-out": "" if held_out is None else f"{held_out:.3g}",
    }
    return cells | {name: format(metrics[key], form) if key in metrics else "" for name, key, form in _NUMBERS}


def _remark(step: "StepStatus") -> str:
    if step.same_as is not None:
        return f"the key of step {step.same_as} again: not trained twice"
    return step.problem.message if step.problem is not None else ""


def _print(rows: Sequence[Mapping[str, str]]) -> None:
    """A table of the columns in which there is something."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    print_table(names, ([row[name] for name in names] for row in rows))
