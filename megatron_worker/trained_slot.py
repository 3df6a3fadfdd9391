"""A job's trained slot, and the commands on it. The job's program decides which are done (runner.py)."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from longshore.training import Optimizer
from megatron_worker.critic import CriticSlot
from megatron_worker.dispatch import Dispatcher
from megatron_worker.engine import LossFunction
from megatron_worker.process.background import Awaited
from megatron_worker.process.event_log import EventLog
from megatron_worker.process.faults import Fault, NotFinite
from megatron_worker.process.ranks import WorkerRanks
from megatron_worker.sums import MAX, reported
from megatron_worker.training.batches import PackedBatches
from megatron_worker.training.checkpoint import CheckpointState, Written, save_checkpoint
from megatron_worker.training.profiling import StepProfiler
from megatron_worker.training.scoring import TargetScores
from megatron_worker.training.sending import sent_meanwhile
from megatron_worker.warm_engine import WarmState
from shared.jobs.events import Saved, Step
from shared.jobs.job import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job, and the number of steps done. `fault`: the reason if it failed.

    `kept`: the state that it left in its slots, if another job is expected to continue from it.
    """

    state: Literal["succeeded", "failed", "cancelled"]
    step: int
    fault: Fault | None = None
    kept: WarmState | None = None


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
        names = sums.keys() | self.sums.keys()
        self.sums = {name: _both(name, self.sums.get(name, 0.0), sums.get(name, 0.0)) for name in names}
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
        norms = self.dispatcher.optim_step(self.slot, adam, learning_rate, denominator)
        if not math.isfinite(norms.grad_norm):
            raise NotFinite("the gradient's norm", norms.grad_norm)
        self._sums_s += time.perf_counter() - began
        update = {"learning_rate": learning_rate, "grad_norm": norms.grad_norm, "clipped": float(norms.clipped)}
        loss = {"loss": self.sums["loss"] / weight} if weight else {}
        return self._stepped(number, loss | update | dict(norms.noise) | dict(beside))

    def skip_step(self, number: int, beside: Mapping[str, float] = {}) -> dict[str, float]:
        """Drop the gradients of a step that trains no token, if it made any, and report it as step `number`."""
        if self.sums:
            self.dispatcher.zero_grad(self.slot)
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
        self.dispatcher.zero_grad(self.slot)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        """Begin to add up anew: the slot has no gradients any more."""
        self.sums, self._sums_s = {}, 0.0

    def load(self, folder: Path) -> None:
        """Go on from what a checkpoint's folder has. Raises InvalidInput as `Dispatcher.load_state` does."""
        if self.critic is not None:
            self.critic.load(folder)
        self.dispatcher.load_state(self.slot, folder)

    def _write(self, folder: Path) -> None:
        self.dispatcher.save_state(self.slot, folder)
        if self.critic is not None:
            self.critic.save(folder)

    def save(self) -> None:
        """Save a checkpoint of the state `at`, unless there is one. The weights have not changed since then."""
        if self.saved_at == self.at:
            return
        passes = self.micro_batch_tokens, self.recomputes
        self.written = save_checkpoint(self._write, self.ranks, self.job, self.model_sha256, self.at, *passes)
        self.saved_at = self.at
        self.report.emit(Saved, step=self.at, path=str(self.written.path), manifest_sha256=self.written.sha256)

    def sent(self) -> AbstractContextManager[None]:
        """Send the weights to samplers during a `with` block: those of the plan, or the one that the host has found."""
        plan = self.job.plan
        send = partial(self.dispatcher.send_weights, self.slot, plan.run_id)
        return sent_meanwhile(send, self.job, self.at, self.report, self.ranks, plan.sync_target)


def _both(name: str, one: float, other: float) -> float:
    return max(one, other) if name.endswith(MAX) else one + other


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
