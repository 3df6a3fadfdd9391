"""The one process of a host that writes runs to W&B: commands on stdin, an answer to each on stdout, as JSON lines.

Its host turns a run's events and train steps into rows of numbers, each step once (`History`).

    python -m activities.tracking.wandb_writer < commands > answers

Several runs are open at a time, each on its own thread, so that one whose server does not answer delays no other.
W&B has a separate process because it starts threads and servers, and may hang: then the host can abandon the process.
End of input ends the process and all that W&B started.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field, JsonValue, TypeAdapter

from longshore.fields import Frozen
from shared.jobs.events import Evaluated, EvaluationSample, Event, Offloaded, Step
from shared.log_lines import escape_output
from shared.runs.status import StepStatus

STEP = "train/step"
EVALUATION = "eval/step"
TRAIN_STEP = "rollout/step"
_SYSTEM_SUFFIXES = ("_bytes", "_s", "_per_s")


class TrainStep(Frozen):
    """The record of an RL run's completed train step."""

    record: StepStatus


Line = Event | TrainStep


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
                case TrainStep(record=record) if record.step > self._train_step:
                    self._train_step = record.step
                    own = {name: value for name, value in record.metrics.items() if name not in self._workers_own}
                    if own and record.same_as is None:
                        step = {STEP: record.optimizer_step or 0, TRAIN_STEP: record.step}
                        yield HistoryRow(values=step | _named("rollout", own))


def _named(group: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics under W&B names: sizes, times and speeds are `system/`, everything else is the group's."""
    return {f"{'system' if name.endswith(_SYSTEM_SUFFIXES) else group}/{name}": v for name, v in metrics.items()}


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


class Open(Frozen):
    """Begin a run, or resume one that the server has."""

    command: Literal["open"] = "open"
    start: WriterStart


class Write(Frozen):
    """Add rows."""

    command: Literal["write"] = "write"
    rows: tuple[HistoryRow, ...]


class Close(Frozen):
    """End the run, once W&B has everything."""

    command: Literal["close"] = "close"


class Request(Frozen):
    """A command, and the name under which its run is open: `number` counts the runs of this process."""

    number: int
    body: Open | Write | Close = Field(discriminator="command")


class Answer(Frozen):
    """The answer to one request. `error`: W&B's message; such a run takes nothing more but its `close`."""

    number: int
    done: Done | None = None
    error: str | None = None


_request: TypeAdapter[Request] = TypeAdapter(Request)


def serve_requests(requests: Iterable[bytes], answers: BinaryIO) -> None:
    """Carry out requests until the input ends."""
    threads: dict[int, ThreadPoolExecutor] = {}
    runs: dict[int, Any] = {}
    lock = threading.Lock()

    def do(request: Request) -> None:
        answer = _do(request, runs)
        with lock:
            answers.write(answer.model_dump_json().encode() + b"\n")
            answers.flush()

    for line in requests:
        request = _request.validate_json(line)
        thread = threads.setdefault(request.number, ThreadPoolExecutor(1))
        thread.submit(do, request)
        if isinstance(request.body, Close):
            threads.pop(request.number).shutdown(wait=False)


def _do(request: Request, runs: dict[int, Any]) -> Answer:
    number = request.number
    try:
        match request.body:
            case Open(start=start):
                runs[number] = _open(start)
                return Answer(number=number, done=_done(runs[number]))
            case Write(rows=rows):
                for row in rows:
                    runs[number].log(row.values if not row.samples else {**row.values, "eval/samples": _table(row)})
            case Close():
                if (run := runs.pop(number, None)) is not None:
                    run.finish()
    except Exception as error:  # an error of one run must not end the others
        if not _core_is_up():  # W&B never restarts it, so this process must be replaced
            print(f"wandb-core is gone: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        return Answer(number=number, error=f"{type(error).__name__}: {error}"[:2000])
    return Answer(number=number)


def _core_is_up() -> bool:
    """True while W&B's own process, which all runs share, is there."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "wandb-core" in child.name() and child.status() != psutil.STATUS_ZOMBIE:
                return True
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
        reinit="create_new",
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
    """Ask a W&B server for a run's progress."""
    if not run.resumed:
        return Done()
    names = {"step": STEP, "evaluation": EVALUATION, "train_step": TRAIN_STEP}
    found = {field: run.summary.get(name) for field, name in names.items()}
    return Done.model_validate({field: int(value) for field, value in found.items() if value is not None})


def _table(row: HistoryRow) -> Any:
    import wandb

    data = [[row.values[STEP], s.prompt, s.completion, s.reference] for s in row.samples]
    return wandb.Table(columns=["step", "prompt", "completion", "reference"], data=data)


if __name__ == "__main__":
    escape_output()
    own_answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # W&B's own output must not mix with the answers
    serve_requests(sys.stdin.buffer, own_answers)
    # The host has gone. Runs that are still open will be written again from their beginning.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
