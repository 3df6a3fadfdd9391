"""A job's trained slot, and the commands on it. The job's program decides which are done (worker.py)."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from longshore.events import Best, Saved, Step, Synced
from longshore.training import Evaluations, Optimizer
from longshore.views import ProfileRequest
from megatron_worker.critic import CriticSlot
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import MAX, LossFunction, reported
from megatron_worker.process.job_queue import EventLog
from megatron_worker.process.ranks import Awaited, BackgroundCall, Fault, NotFinite, WorkerRanks
from megatron_worker.training.batches import PackedBatches, TargetScores
from megatron_worker.training.checkpoint import CheckpointState, Written, checkpoint_state, save_checkpoint
from megatron_worker.warm_engine import WarmState
from megatron_worker.weight_sync.sender import Sending
from shared.jobs.job import Job, SyncAccess, SyncTarget

# --- Traces the next optimizer steps of a job with torch's profiler, if its host asks for a trace ---


class StepProfiler:
    """Looks for a request at each step's end, and traces this rank's steps from there on.

    Used as a context of a job: what was traced until its end is written then. Other jobs of the worker have their turns
    between two steps, and their operations are in the trace, too. It has names and times, and no data.

    `log`: the job's, on rank 0; other ranks have None, and do nothing.
    """

    _is_busy: ClassVar[bool] = False  # torch has one profiler a process

    def __init__(self, log: str | None) -> None:
        self._log = log
        self._request: ProfileRequest | None = None
        self._profile: profile | None = None
        self._left = 0
        self._step: record_function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._profile is not None:
            self._step.__exit__(None, None, None)
            self._write()

    def at_boundary(self) -> None:
        """To be called before the first step, and after each."""
        if self._log is None:
            return
        if self._profile is not None:
            self._step.__exit__(None, None, None)
            self._left -= 1
            if self._left == 0:
                self._write()
            else:
                self._step = _marked_step()
        elif not StepProfiler._is_busy and (path := ProfileRequest.path(self._log)).exists():
            self._begin(path)

    def _begin(self, path: Path) -> None:
        self._request = ProfileRequest.model_validate_json(path.read_bytes())
        path.unlink()
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile, self._left = profile(activities=[ProfilerActivity.CPU, *devices]), self._request.steps
        StepProfiler._is_busy = True
        self._profile.start()
        self._step = _marked_step()

    def _write(self) -> None:
        """Write the trace, if there is one. A disk without room for it is no fault of the job."""
        if self._profile is None or self._request is None or self._log is None:
            return
        taken, self._profile = self._profile, None
        taken.stop()
        StepProfiler._is_busy = False
        path = self._request.trace(self._log)
        temporary = path.with_name(f".{path.name}")
        try:
            taken.export_chrome_trace(str(temporary))
            temporary.rename(path)
        except OSError as error:
            print(f"the trace of profile {self._request.profile_id} cannot be written: {error}", file=sys.stderr)
            with suppress(OSError):
                temporary.unlink()


def _marked_step() -> record_function:
    """Begin a span in the trace that covers a step."""
    mark = record_function("optimizer step")
    mark.__enter__()
    return mark


# --- Weights that travel to samplers while they are saved ---

Send = Callable[[SyncTarget, SyncAccess], Sending | BackgroundCall[None] | None]


@contextmanager
def sent_meanwhile(
    send: Send, job: Job, step: int, report: EventLog, ranks: WorkerRanks, named: SyncTarget | None = None
) -> Iterator[None]:
    """Send weights during a `with` block that does not change them, and report `synced`. Collective.

    Args:
        send: begins to send, as `Dispatcher.send_weights` does.
        step: what the weights are after.
        named: the samplers that the plan names. Without any the weights go to the one that the host has found, if it
            has found one.

    Raises:
        InvalidInput: as `send` does.
    """
    access = SyncAccess.read(job.log_path) if ranks.rank == 0 else SyncAccess()
    target = named
    if target is None:  # the host may write it while ranks look: what rank 0 has read counts
        data = ranks.broadcast(access.target.model_dump_json().encode() if access.target is not None else b"")
        target = SyncTarget.model_validate_json(data).model_copy(update={"version": step}) if data else None
    if target is not None and target.profile_path is not None:
        where = ranks.broadcast((access.profile or "").encode()).decode()
        access = access.model_copy(update={"profile": where or None})  # each rank writes its own file beside it
    sending = send(target, access) if target else None
    try:
        yield
    finally:
        if sending is not None and (outcome := sending.result()) is not None:
            report.emit(Synced, step=step, outcome=outcome)


T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job, and the number of steps done. `fault`: the reason if it failed.

    `kept`: the state that it left in its slots, if another job is expected to continue from it. `best`: the evaluation
    whose weights are kept, if the job keeps the best. `awaits_grades`: steps are left, as `Succeeded` says.
    """

    state: Literal["succeeded", "failed", "cancelled"]
    step: int
    fault: Fault | None = None
    kept: WarmState | None = None
    best: Best | None = None
    awaits_grades: bool = False


Passes = Generator[Awaited | None, None, Outcome]
"""A job in progress. It yields between its passes: None, or a function that tells when the next one can be done."""


class Program(ABC):
    """A job's work on its slot: the steps of a plan (planned.py), or a session's commands (session.py)."""

    def before_loading(self, before: CheckpointState | None, kept: WarmState | None) -> Iterator[None]:
        """Do what must precede loading a checkpoint, which may replace the base.

        Args:
            before: the checkpoint that the job resumes from, or else begins with.
            kept: what the run's last job left in the engine, if the job begins with that.
        """
        return iter(())

    def at_the_beginning(self) -> Iterator[None]:
        """Do what needs the weights before the job's first step."""
        return iter(())

    @abstractmethod
    def run(self, by_hand: bool) -> Passes:
        """Do the commands, then save a checkpoint. `by_hand`: nobody sends any further commands."""


@dataclass
class TrainedSlot:
    """The slot, and its progress. Every rank has one, and gives the same commands.

    Attributes:
        slot: the dispatcher's name of it; None for the base.
        at: the number of the last state without gradients: steps of the run, or commands of a session.
        saved_at: that of the newest checkpoint, -1 before the first. `written`: this attempt's newest one.
        micro_batch_tokens: of the largest micro-batch, if the job has a memory budget.
        evaluations: by step, the values of the metrics that the job's evaluation watches.
        sums: the loss's sums since the last optimizer step, as the dispatcher reports them; empty without gradients.
        critic: the critic that is trained with it, if any.
        profiler: traces steps, if the job's host wants that.
    """

    job: Job
    slot: str | None
    model_sha256: str
    dispatcher: Dispatcher
    report: EventLog
    ranks: WorkerRanks
    cancelled: Callable[[], bool]
    at: int
    saved_at: int = -1
    written: Written | None = None
    micro_batch_tokens: int | None = None
    evaluations: Evaluations = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    critic: CriticSlot | None = None
    profiler: StepProfiler = field(default_factory=lambda: StepProfiler(None))
    _sums_s: float = 0.0  # seconds that computing them took

    def forward_backward(
        self, data: PackedBatches, step: int, loss: LossFunction, scores: TargetScores | None = None
    ) -> Generator[None, None, dict[str, float]]:
        """Add the gradients of a step's examples to those accumulated. Returns the loss's sums over them.

        Raises:
            NotFinite: as the loss is.
        """
        passes = self.dispatcher.forward_backward(self.slot, data, step, loss, scores)
        sums, seconds = yield from _timed(passes)
        if not math.isfinite(sums["loss"]):
            raise NotFinite("the loss", sums["loss"])
        for name, value in sums.items():
            before = self.sums.get(name, 0.0)
            self.sums[name] = max(before, value) if name.endswith(MAX) else before + value
        self._sums_s += seconds
        return sums

    def optim_step(
        self, number: int, adam: Optimizer, learning_rate: float, denominator: float, beside: Mapping[str, float] = {}
    ) -> dict[str, float]:
        """Divide the gradients, make one update, and report it as step `number`. Returns the metrics that it reports.

        `beside`: further metrics.

        Raises:
            NotFinite: as the gradient's norm is.
        """
        began, weight = time.perf_counter(), self.sums["weight"]
        with self.dispatcher.resident(self.slot) as engine:
            norms = engine.optim_step(adam, learning_rate, denominator)
        if not math.isfinite(norms.grad_norm):
            raise NotFinite("the gradient's norm", norms.grad_norm)
        self._sums_s += time.perf_counter() - began
        update = {"learning_rate": learning_rate, "grad_norm": norms.grad_norm, "clipped": float(norms.clipped)}
        loss = {"loss": self.sums["loss"] / weight} if weight else {}
        return self._stepped(number, loss | update | dict(norms.noise) | dict(beside))

    def skip_step(self, number: int, beside: Mapping[str, float] = {}) -> dict[str, float]:
        """Drop the gradients of a step that trains no token, if it made any, and report it as step `number`."""
        if self.sums:
            self._zero_grad()
        return self._stepped(number, {"skipped": 1.0, **beside})

    @property
    def recomputes(self) -> bool:
        """True if layers are computed again in the backward."""
        return self.slot in self.dispatcher.recomputing

    def _stepped(self, number: int, update: dict[str, float]) -> dict[str, float]:
        metrics = {
            **update,
            **{name: value for name, value in reported(self.sums).items() if name not in ("loss", "weight")},
            **({"step_s": self._sums_s, "tokens_per_s": self.sums["tokens"] / self._sums_s} if self.sums else {}),
            **({"recomputed": 1.0} if self.recomputes else {}),
            "memory_bytes": float(self.ranks.largest([self.dispatcher.engine.memory().device_bytes])[0]),
        }
        self._forget_gradients()
        self.at = number
        self.report.emit(Step, step=number, metrics=metrics)
        self.profiler.at_boundary()
        return metrics

    def drop_gradients(self) -> None:
        self._zero_grad()
        self._forget_gradients()

    def _zero_grad(self) -> None:
        with self.dispatcher.resident(self.slot) as engine:
            engine.zero_grad()

    def _forget_gradients(self) -> None:
        """Begin to add up anew: the slot has no gradients any more."""
        self.sums, self._sums_s = {}, 0.0

    def load(self, folder: Path) -> None:
        """Go on from what a checkpoint's folder has. Raises InvalidInput as `Dispatcher.load_state` does."""
        if self.critic is not None and self.critic.plan.part != "policy":
            self.critic.load(folder)
        self.dispatcher.load_state(self.slot, folder)

    def load_initial(self, folder: Path) -> None:
        """Begin with what the checkpoint of the run's last job has, as `load` does."""
        if self.critic is not None and self.critic.plan.checkpoint is None:
            self.critic.load(folder)
        self.dispatcher.load_state(self.slot, folder)

    def _write(self, folder: Path) -> None:
        with self.dispatcher.resident(self.slot) as engine:
            engine.save(folder)
        if self.critic is not None and self.critic.plan.part != "policy":
            self.critic.save(folder)

    def save(self) -> None:
        """Save a checkpoint of the state `at`, unless there is one. The weights have not changed since then."""
        if self.saved_at == self.at:
            return
        state = checkpoint_state(
            self.job.plan,
            self.model_sha256,
            self.at,
            micro_batch_tokens=self.micro_batch_tokens,
            recompute=self.recomputes,
            evaluations=self.evaluations,
        )
        self.written = save_checkpoint(self._write, self.ranks, self.job, state)
        self.saved_at = self.at
        self.report.emit(Saved, step=self.at, path=str(self.written.path), manifest_sha256=self.written.sha256)

    def sent(self) -> AbstractContextManager[None]:
        """Send the weights to samplers during a `with` block: those of the plan, or the one that the host has found."""
        plan = self.job.plan
        send = partial(self.dispatcher.send_weights, self.slot, plan.run_id)
        return sent_meanwhile(send, self.job, self.at, self.report, self.ranks, plan.sync_target)


def _timed(passes: Generator[None, None, T]) -> Generator[None, None, tuple[T, float]]:
    """Do the passes of a command. Returns its result, and the seconds that the passes took, without those of others."""
    seconds = 0.0
    while True:
        began = time.perf_counter()
        try:
            next(passes)
        except StopIteration as end:
            return end.value, seconds + time.perf_counter() - began
        seconds += time.perf_counter() - began
        yield None
