"""The one process that writes a run to W&B: JSON lines on stdin, nothing back but an exit status.

    python -m activities.wandb_writer < lines

The first line is a `WriterStart`, every other one an event (shared/events.py). End of input ends the W&B run. W&B lives
in a process of its own because it starts threads and servers, and may hang: whoever feeds it can leave it behind.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from shared.events import Evaluated, Event, Offloaded, Sample, Step, parse_event
from shared.models import Frozen

STEP = "train/step"
EVALUATION = "eval/step"
_SYSTEM_SUFFIXES = ("_bytes", "_s", "_per_s")


class WriterStart(Frozen):
    """What W&B needs to know before the first event. `kind`: what the run optimises; `config`: its hyperparameters."""

    run_id: str
    name: str
    project: str
    kind: str
    mode: Literal["offline", "online"]
    folder: Path
    init_timeout_s: float
    config: dict[str, JsonValue]


class Row(Frozen):
    """What one event adds to the history: numbers by W&B name, and the samples of an evaluation."""

    values: dict[str, float]
    samples: tuple[Sample, ...] = ()


def rows(events: Iterable[Event], done_step: int = 0, done_evaluation: int = -1) -> Iterator[Row]:
    """Rows of events, in order, each step and each evaluation once.

    A worker that goes on from a checkpoint repeats the steps after it, and gives the same numbers: they count once.
    Steps up to `done_step`, and evaluations up to that after step `done_evaluation`, stand in W&B already.
    """
    last_step, last_evaluation = done_step, done_evaluation
    for event in events:
        match event:
            case Step() if event.step > last_step:
                last_step = event.step
                yield Row(values={STEP: event.step, **_named("train", event.metrics)})
            case Evaluated() if event.step > last_evaluation:
                last_evaluation = event.step
                numbers = {EVALUATION: float(event.step), **_named("eval", event.metrics)}
                yield Row(values={STEP: event.step, **numbers}, samples=event.samples)
            case Offloaded() if last_step > done_step:
                numbers = event.model_dump(exclude={"seq", "time", "event"})
                yield Row(values={STEP: last_step, **{f"system/offload_{k}": v for k, v in numbers.items()}})


def _named(group: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under W&B names: sizes, times and speeds are `system/`, everything else is the group's."""
    return {f"{'system' if name.endswith(_SYSTEM_SUFFIXES) else group}/{name}": v for name, v in metrics.items()}


def write(lines: Iterable[bytes]) -> None:
    """Write a whole stream of lines to W&B."""
    stream = iter(lines)
    start = WriterStart.model_validate_json(next(stream))
    run = _open(start)
    for row in rows(map(parse_event, stream), *_done(run)):
        run.log(row.values if not row.samples else {**row.values, "eval/samples": _table(row)})
    run.finish()


def _open(start: WriterStart) -> Any:
    import wandb

    run = wandb.init(
        id=start.run_id,
        name=start.name,
        project=start.project,
        job_type=start.kind,
        mode=start.mode,
        resume="allow" if start.mode == "online" else None,
        dir=str(start.folder),
        config=start.config,
        settings=wandb.Settings(
            init_timeout=start.init_timeout_s, silent=True, console="off", disable_git=True, disable_code=True
        ),
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def _done(run: Any) -> tuple[int, int]:
    """The last step and the last evaluation that a W&B server has of a run."""
    if not run.resumed:
        return 0, -1
    step, evaluation = run.summary.get(STEP), run.summary.get(EVALUATION)
    return int(step or 0), -1 if evaluation is None else int(evaluation)


def _table(row: Row) -> Any:
    import wandb

    data = [[row.values[STEP], s.prompt, s.completion, s.reference] for s in row.samples]
    return wandb.Table(columns=["step", "prompt", "completion", "reference"], data=data)


if __name__ == "__main__":
    write(sys.stdin.buffer)
