"""A process that writes one run to W&B. Its host turns the run's events and train steps into rows of numbers.

    python -m activities.tracking.wandb_writer < lines > progress

On stdin comes a `WriterStart`, then a `HistoryRow` a line, and at the end `null`, all as JSON; on stdout goes the
`Done` of the run, once it is open. The process ends with status 0 when W&B has everything. It is separate from the host
because W&B starts threads and servers, and may hang: then the host kills it, with all that W&B started.
"""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import JsonValue

from longshore.events import Evaluated, EvaluationSample, Event, Offloaded, Step
from longshore.fields import Frozen
from longshore.metrics import is_of_the_machine
from longshore.views import StepStatus
from shared.log_lines import escape_output

STEP = "train/step"
EVALUATION = "eval/step"
TRAIN_STEP = "rollout/step"


Line = Event | StepStatus
"""Of a run: an event, or the record of an RL run's completed train step."""


class Done(Frozen):
    """A run's progress in W&B: the numbers of the last optimizer step, evaluation and train step; 0 or -1 for none."""

    step: int = 0
    evaluation: int = -1
    train_step: int = -1


class HistoryRow(Frozen):
    """A row of W&B's history, made of one event: numbers by W&B name, and the samples of an evaluation."""

    values: dict[str, float]
    samples: tuple[EvaluationSample, ...] = ()


class History:
    """Makes rows for W&B of a run's lines, which are given in order, in one or several calls.

    Steps that W&B has already (`done`) are left out, and so are those that a worker repeated after a checkpoint. A
    train step's row is at its last optimizer step; it has the metrics that the worker's own row there lacks.
    """

    def __init__(self, done: Done) -> None:
        self._done_step = self._step = done.step
        self._evaluation, self._train_step = done.evaluation, done.train_step
        self._workers_own: set[str] = set()

    def rows(self, lines: Iterable[Line]) -> Iterator[HistoryRow]:
        """The rows that these lines add."""
        for line in lines:
            match line:
                case Step():
                    self._workers_own |= line.metrics.keys()
                    if line.step > self._step:
                        self._step = line.step
                        yield HistoryRow(values={STEP: line.step, **_named("train", line.metrics)})
                case Evaluated() if line.step > self._evaluation:
                    self._evaluation = line.step
                    numbers = {EVALUATION: float(line.step), **_named("eval", line.metrics)}
                    yield HistoryRow(values={STEP: line.step, **numbers}, samples=line.samples)
                case Offloaded() if self._step > self._done_step:
                    numbers = line.model_dump(exclude={"seq", "time", "event"})
                    yield HistoryRow(
                        values={STEP: self._step, **{f"system/offload_{k}": v for k, v in numbers.items()}}
                    )
                case StepStatus() if line.step > self._train_step:
                    self._train_step = line.step
                    own = {name: value for name, value in line.metrics.items() if name not in self._workers_own}
                    if own and line.same_as is None:
                        step = {STEP: line.optimizer_step or 0, TRAIN_STEP: line.step}
                        yield HistoryRow(values=step | _named("rollout", own))


def _named(group: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under W&B names: sizes, times and speeds are `system/`, everything else is the group's."""
    return {f"{'system' if is_of_the_machine(name) else group}/{name}": v for name, v in metrics.items()}


class WriterStart(Frozen):
    """A run's description for W&B. `kind`: what the run optimises; `config`: its hyperparameters."""

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


END = b"null\n"
"""The line behind the last row."""


def write_run(lines: Iterable[bytes], progress: BinaryIO) -> bool:
    """Write a run to W&B. Returns False if the lines end before their end, as the host has gone."""
    import wandb

    sent = iter(lines)
    run = _open(WriterStart.model_validate_json(next(sent)))
    names = {"step": STEP, "evaluation": EVALUATION, "train_step": TRAIN_STEP} if run.resumed else {}
    found = {field: run.summary.get(name) for field, name in names.items()}  # a W&B server's
    done = Done.model_validate({field: int(value) for field, value in found.items() if value is not None})
    progress.write(done.model_dump_json().encode() + b"\n")
    progress.flush()
    for line in sent:
        if line == END:
            run.finish()
            return True
        row = HistoryRow.model_validate_json(line)
        values: dict[str, Any] = dict(row.values)
        if row.samples:
            data = [[row.values[STEP], s.prompt, s.completion, s.reference] for s in row.samples]
            values["eval/samples"] = wandb.Table(columns=["step", "prompt", "completion", "reference"], data=data)
        run.log(values)
    return False


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


if __name__ == "__main__":
    escape_output()
    own_progress = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # W&B's own output must not mix with ours
    try:
        is_written = write_run(sys.stdin.buffer, own_progress)
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
        os._exit(1)  # W&B's threads would keep the process
    if not is_written and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the run will be written again
    os._exit(0 if is_written else 1)
