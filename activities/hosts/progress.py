"""Reports a job's progress to its workflow by signals, with growing pauses, as the workflow's history must stay short.

A train step of reinforcement learning is one job of several optimizer steps (epochs times mini-batches), and its
metrics combine those of all of them. Any other job is the whole training of a run; its metrics are the newest step's.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from longshore.algorithms import Loss, is_policy_loss
from longshore.events import Evaluated, Evaluating, Event, Started, Step
from longshore.fields import Fence, Frozen
from longshore.metrics import combined_by
from longshore.views import CheckpointRef
from shared.jobs.job import AnyPlan

Metrics = Mapping[str, float]

# A signal costs four events of a history that ends at 51,200: the pause grows with the job, to at most five minutes.
_SHORTEST_S = 2.0
_SHARE = 0.02
_LONGEST_S = 300.0
_SIGNAL_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


def job_metrics(loss: Loss, steps: Iterable[Metrics]) -> dict[str, float]:
    """Combine the metrics of a job's optimizer steps, in order."""
    job = JobMetrics(loss)
    for metrics in steps:
        job.take(metrics)
    return job.combined()


class JobMetrics:
    """Combines the metrics of a job's optimizer steps, which are given in order.

    Skipped steps are always counted. For a policy loss each metric is combined as longshore/metrics.py says, over the
    steps that have it. For any other loss, each metric is its newest value.
    """

    def __init__(self, loss: Loss) -> None:
        self._is_train_step = is_policy_loss(loss)
        self._sums: dict[str, tuple[float, float]] = {}  # numerator and denominator of each value

    def take(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            before, weight = self._sums.get(name, (0.0, 0.0))
            match combined_by(name) if self._is_train_step or name == "skipped" else "last":
                case "last":
                    self._sums[name] = value, 1.0
                case "sum":
                    self._sums[name] = before + value, 1.0
                case "max":
                    self._sums[name] = max(before, value), 1.0
                case "mean":
                    self._sums[name] = before + value, weight + 1
                case "mean_of_tokens":
                    tokens = metrics["target_tokens"]
                    self._sums[name] = before + value * tokens, weight + tokens

    def combined(self) -> dict[str, float]:
        found = {name: value / weight for name, (value, weight) in self._sums.items()}
        if self._is_train_step and "tokens_per_s" in found:
            found["tokens_per_s"] = found["tokens"] / found["step_s"]
        return found


class Signals(Protocol):
    """Sends signals to the workflow of the current activity. To be called from the activity's thread."""

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        """Start to send a signal. The future's result is False if it did not arrive; that is not raised as an error."""
        ...


class WorkflowSignals:
    """Signals through the host's Temporal client, which lives in the host's event loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def send(self, name: str, message: Frozen) -> "Future[bool]":
        info = activity.info()
        assert info.workflow_id is not None
        handle = self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        return asyncio.run_coroutine_threadsafe(_send(handle, name, message), self._loop)


async def _send(handle: WorkflowHandle[Any, Any], name: str, message: Frozen) -> bool:
    try:
        await asyncio.wait_for(handle.signal(name, message), _SIGNAL_TIMEOUT_S)
    except (RPCError, TimeoutError) as error:
        _log.warning("signal %s did not reach %s: %s", name, handle.id, error)
        return False
    return True


class ProgressReport(Frozen):
    """A report on a job, signalled to its workflow, which ignores reports of other fences than its current one.

    `held_s`: seconds that the lease has had of its worker's time so far. `num_steps`: not meaningful for a session.
    `evaluations`: those that the job has made so far, which took `evaluating_s` seconds.
    """

    fence: Fence
    step: int
    num_steps: int
    metrics: dict[str, float]
    checkpoint: CheckpointRef | None
    held_s: float = 0.0
    evaluations: int = 0
    evaluating_s: float = 0.0


class Progress:
    """The newest state of a job, and when its workflow heard of it last. Evaluation metrics are named `eval_...`.

    `steps_before`: metrics of the optimizer steps before this attempt.
    """

    def __init__(
        self,
        plan: AnyPlan,
        fence: Fence,
        steps_before: Iterable[Metrics],
        signals: Signals,
        held_s: Callable[[], float],
    ) -> None:
        self.step = 0
        self._training = JobMetrics(plan.step_loss)
        for metrics in steps_before:
            self._training.take(metrics)
        self._evaluation: dict[str, float] = {}
        self._evaluations, self._evaluating_s, self._last_event_at = 0, 0.0, 0.0
        self._fence = fence
        self._num_steps = plan.last_step or 0
        self._signals = signals
        self._held_s = held_s
        self._begun_at = time.monotonic()
        self._told_at: float | None = None
        self._told: ProgressReport | None = None
        self._sending: Future[bool] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return self._training.combined() | self._evaluation

    def take(self, event: Event) -> None:
        match event:
            case Started(first_step=step):
                self.step = step
            case Step(step=step, metrics=metrics):
                self.step = step
                self._training.take(metrics)
            case Evaluated(metrics=metrics):
                self._evaluations += 1
                self._evaluating_s += event.time - self._last_event_at
                self._evaluation |= {n if n.startswith("eval_") else f"eval_{n}": value for n, value in metrics.items()}
        if not isinstance(event, Evaluating):
            self._last_event_at = event.time

    def tick(self, durable: CheckpointRef | None) -> None:
        """Signal new progress if the last signal is long enough ago; the first step is signalled at once."""
        if (self.step == 0 and not self.metrics) or (self._sending is not None and not self._sending.done()):
            return
        now = time.monotonic()
        pause_s = min(_LONGEST_S, max(_SHORTEST_S, _SHARE * (now - self._begun_at)))
        if self._told_at is not None and now - self._told_at < pause_s:
            return
        report = ProgressReport(
            fence=self._fence,
            step=self.step,
            num_steps=self._num_steps,
            metrics=self.metrics,
            checkpoint=durable,
            evaluations=self._evaluations,
            evaluating_s=self._evaluating_s,
        )
        if report != self._told:
            sent = report.model_copy(update={"held_s": self._held_s()})
            self._sending = self._signals.send("progress", sent)
            self._told, self._told_at = report, now
