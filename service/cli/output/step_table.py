"""Print train steps of RL runs: as a table, or one as a line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from service.cli.output.render import coloured, print_table

if TYPE_CHECKING:
    from service.runs.views.history import TrainStepMetrics
    from shared.runs.status import StepStatus

_TIMED = ("sampling", "grading", "training", "publishing")
# Broken so that a whole row fits into a terminal of 80 columns.
_HEADERS = {"held-out": "held-\nout", "seconds": "seconds:\nsample/grade/\ntrain/publish"}


def print_steps(steps: Iterable["StepStatus"]) -> None:
    """Print the state and the metrics of each step."""
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
    """Print the metrics of each step."""
    _print([{"train step": str(row.step), **_cells(row.metrics)} for row in rows])


def step_line(step: "StepStatus") -> str:
    """Return the line of a finished step. It says "train step", since a worker's own lines count optimizer steps."""
    parts: list[str] = [step.state] if step.state != "done" else []
    if step.same_as is None:  # else all of this was said of the other step
        cells = _cells(step.metrics)
        parts += [f"{name} {cells[name].replace('±', ' ± ')}" for name in ("reward", "held-out") if cells[name]]
        parts += [f"published v{step.version}"] if step.version is not None else []
    if remark := _remark(step):
        parts.append(remark)
    return f"train step {step.step}: {', '.join(parts) or step.state}"


def _cells(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the main metrics by column; empty where the step did not measure one."""

    def cell(name: str, form: str, before: str = "") -> str:
        return before + format(metrics[name], form) if name in metrics else ""

    return {
        "reward": cell("reward_mean", ".3g") + cell("reward_std", ".3g", before="±"),
        "held-out": cell("eval_reward_mean", ".3g"),
        "tokens": cell("response_tokens_mean", ".0f"),
        "KL": cell("kl_reference", ".2g") or cell("kl_old_new", ".2g"),
        "ratio": cell("ratio_mean", ".4g"),
        "seconds": _seconds([metrics.get(f"{doing}_seconds") for doing in _TIMED]),
    }


def _seconds(found: Sequence[float | None]) -> str:
    """Format the seconds of each part of a step; - for a part that was not done by the run."""
    if not any(found):
        return ""
    return "/".join("-" if s is None else f"{s:.0f}" if s >= 10 else f"{s:.1f}" for s in found)


def _remark(step: "StepStatus") -> str:
    from service.runs.views.words import dropped

    if step.same_as is not None:
        return f"the key of step {step.same_as} again: not trained twice"
    if step.problem is not None:
        return step.problem.message
    return dropped(step.metrics) or ""


def _print(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table without its empty columns."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    print_table([_HEADERS.get(name, name) for name in names], ([row[name] for name in names] for row in rows))
