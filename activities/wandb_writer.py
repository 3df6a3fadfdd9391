"""The one process that writes a run to W&B: JSON lines on stdin, nothing back but an exit status.

    python -m activities.wandb_writer < lines

The first line is a `WriterStart`, every other one an event (shared/events.py) or a `TrainStep`. End of input ends the
W&B run. W&B lives in a process of its own because it starts threads and servers, and may hang: whoever feeds it can
leave it behind.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, TypeAdapter

from shared.events import Evaluated, Event, Offloaded, Sample, Step
from shared.models import Frozen
from shared.runs import StepStatus

STEP = "train/step"
EVALUATION = "eval/step"
TRAIN_STEP = "rollout/step"
_SYSTEM_SUFFIXES = ("_bytes", "_s", "_per_s")


class WriterStart(Frozen):
    """What W&B needs to know before the first event. `kind`: what the run optimises; `config`: its hyperparameters."""

    run_id: str
    name: str
    project: str
    entity: str | None = None
    tags: tuple[str, ...] = ()
    kind: str
    mode: Literal["offline", "online"]
    folder: Path
    init_timeout_s: float
    config: dict[str, JsonValue]


class TrainStep(Frozen):
    """A train step of an RL run that has ended, as it stands on record."""

    record: StepStatus


Line = Event | TrainStep
_line: TypeAdapter[Line] = TypeAdapter(Line)


class Done(Frozen):
    """What stands in W&B already: the last optimizer step, evaluation and train step. -1: none; no step is step 0."""

    step: int = 0
    evaluation: int = -1
    train_step: int = -1


class Row(Frozen):
    """What one event adds to the history: numbers by W&B name, and the samples of an evaluation."""

    values: dict[str, float]
    samples: tuple[Sample, ...] = ()


def rows(lines: Iterable[Line], done: Done = Done()) -> Iterator[Row]:  # noqa: B008 - it is frozen
    """Rows of events and train steps, in order, each step and each evaluation once.

    A worker that goes on from a checkpoint repeats the steps after it, and gives the same numbers: they count once.
    What is done stands in W&B already. A train step stands at the last optimizer step that it made, where the worker's
    own numbers are already, and adds the others.
    """
    last_step, last_evaluation, last_train_step = done.step, done.evaluation, done.train_step
    workers_own: set[str] = set()
    for line in lines:
        match line:
            case Step():
                workers_own |= line.metrics.keys()
                if line.step > last_step:
                    last_step = line.step
                    yield Row(values={STEP: line.step, **_named("train", line.metrics)})
            case Evaluated() if line.step > last_evaluation:
                last_evaluation = line.step
                numbers = {EVALUATION: float(line.step), **_named("eval", line.metrics)}
                yield Row(values={STEP: line.step, **numbers}, samples=line.samples)
            case Offloaded() if last_step > done.step:
                numbers = line.model_dump(exclude={"seq", "time", "event"})
                yield Row(values={STEP: last_step, **{f"system/offload_{k}": v for k, v in numbers.items()}})
            case TrainStep(record=record) if record.step > last_train_step:
                last_train_step = record.step
                own = _named("rollout", {k: v for k, v in record.metrics.items() if k not in workers_own})
                if own and record.same_as is None:
                    yield Row(values={STEP: record.optimizer_step or 0, TRAIN_STEP: record.step, **own})


def _named(group: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under W&B names: sizes, times and speeds are `system/`, everything else is the group's."""
    return {f"{'system' if name.endswith(_SYSTEM_SUFFIXES) else group}/{name}": v for name, v in metrics.items()}


def write(lines: Iterable[bytes]) -> None:
    """Write a whole stream of lines to W&B."""
    stream = iter(lines)
    start = WriterStart.model_validate_json(next(stream))
    run = _open(start)
    for row in rows(map(_line.validate_json, stream), _done(run)):
        run.log(row.values if not row.samples else {**row.values, "eval/samples": _table(row)})
    run.finish()


def _open(start: WriterStart) -> Any:
    import wandb

    run = wandb.init(
        id=start.run_id,
        name=start.name,
        project=start.project,
        entity=start.entity,
        tags=start.tags or None,
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


def _done(run: Any) -> Done:
    """What a W&B server has of a run."""
    if not run.resumed:
        return Done()
    names = {"step": STEP, "evaluation": EVALUATION, "train_step": TRAIN_STEP}
    found = {field: run.summary.get(name) for field, name in names.items()}
    return Done.model_validate({field: int(value) for field, value in found.items() if value is not None})


def _table(row: Row) -> Any:
    import wandb

    data = [[row.values[STEP], s.prompt, s.completion, s.reference] for s in row.samples]
    return wandb.Table(columns=["step", "prompt", "completion", "reference"], data=data)


if __name__ == "__main__":
    write(sys.stdin.buffer)
