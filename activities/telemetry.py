"""What hosts count (docs/observability.md has the table), and spans of a job's steps, made of the worker's events, and
of a host's own beginning."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import psutil
from opentelemetry import trace
from opentelemetry.context import Context
from prometheus_client import Counter, Gauge, Histogram

from longshore import events
from longshore.fields import Fence
from shared.errors import SamplerMismatch
from shared.jobs.job import AnyPlan

_LONG_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
LEASES = Gauge("longshore_leases", "Leases that this host has in hand", ["role"])
GPU_SECONDS = Counter("longshore_gpu_seconds", "Seconds that workers of this host were leased, times their ranks")
JOBS = Counter("longshore_jobs", "Jobs that ended, by outcome; `lost`: without a terminal event", ["outcome"])
STEPS = Counter("longshore_steps", "Optimizer steps")
TOKENS = Counter("longshore_trained_tokens", "Tokens that passed through optimizer steps")
STEP_SECONDS = Histogram("longshore_step_seconds", "Of an optimizer step, as its worker says", buckets=_LONG_S)
SYNC_SECONDS = Histogram(
    "longshore_weight_sync_seconds", "Until the last sampler had the trainer's weights", buckets=_LONG_S
)
SYNC_BLOCKED = Counter("longshore_weight_sync_blocked_seconds", "That trainers waited for a sync")
SYNC_BYTES = Counter("longshore_weight_sync_bytes", "Of weights that travelled to each sampler")
SYNC_PROBLEMS = Counter("longshore_weight_sync_problems", "Samplers that a sync did not reach")
PROOFS = Counter(
    "longshore_sampler_proofs", "Comparisons of a sampler's log-probabilities with the trainer's", ["outcome"]
)
# From the beginning at 0: Prometheus takes a series' first value for no increase, and one of these may be an alarm.
for _outcome in ("succeeded", "failed", "cancelled", "lost"):
    JOBS.labels(_outcome)
for _outcome in ("proved", "refuted", "unavailable"):
    PROOFS.labels(_outcome)
_SPANS = {
    events.Saved: "save checkpoint",
    events.Evaluated: "evaluate",
    events.Probed: "probe",
    events.Offloaded: "offload",
}


MAX_SPANS = 1000
"""Spans of a job's steps in one trace."""


@contextmanager
def proof_counted() -> Iterator[None]:
    """Count the proof of a `with` block."""
    outcome = "unavailable"
    try:
        yield
        outcome = "proved"
    except SamplerMismatch:
        outcome = "refuted"
        raise
    finally:
        PROOFS.labels(outcome).inc()


class JobSeen:
    """Counts a job's events, and makes spans of them below the span of the current activity.

    Each span begins when the one before ended. After `MAX_SPANS` of them the job continues in a new trace, whose `job`
    span links to the previous one: collectors cut or refuse unbounded traces. `begun_at`: when the job was written, in
    seconds since 1970.
    """

    def __init__(self, plan: AnyPlan, fence: Fence, begun_at: float) -> None:
        self._tracer = trace.get_tracer("longshore.worker")
        self._ids = {"longshore.run": plan.run_id, "longshore.job": plan.job_id, "longshore.fence": fence.label}
        self._until = begun_at
        self._outcome = "lost"
        self._begin(self._tracer.start_span("job", start_time=_ns(begun_at), attributes=self._ids))

    def _begin(self, job: trace.Span) -> None:
        self._job, self._inside, self._num_spans = job, trace.set_span_in_context(job), 0

    def take(self, event: events.Event) -> None:
        match event:
            case events.Started():
                self._job.set_attributes({"longshore.ranks": event.world_size, "longshore.device": event.device})
                # The span of everything before the first step, and spans of its phases; the last phase ends with it.
                load = self._tracer.start_span("load", self._inside, start_time=_ns(self._until))
                inside, at = trace.set_span_in_context(load), event.time - sum(event.seconds.values())
                for phase, seconds in event.seconds.items():
                    _told(self._tracer, phase, at, at + seconds, inside)
                    at += seconds
                self._until = max(self._until, event.time)
                load.end(_ns(self._until))
            case events.Step(step=step, metrics=metrics):
                STEPS.inc()
                TOKENS.inc(metrics.get("tokens", 0.0))
                STEP_SECONDS.observe(metrics.get("step_s", 0.0))
                counts = {f"longshore.{name}": metrics[name] for name in ("tokens", "num_bins") if name in metrics}
                self._span("optimizer step", event, {"longshore.step": step, **counts})
            case events.Applied(kind=kind, command=number):
                self._span(f"command {kind}", event, {"longshore.command": number})
            case events.Synced(outcome=sync):
                SYNC_SECONDS.observe(sync.duration_s)
                SYNC_BLOCKED.inc(sync.blocked_s)
                SYNC_BYTES.inc(sync.num_bytes)
                SYNC_PROBLEMS.inc(len(sync.problems))
                self._span("sync weights", event, {"longshore.bytes": sync.num_bytes})
            case events.Succeeded() | events.Failed() | events.Cancelled():
                self._outcome, self._until = event.event, event.time
            case events.Saved() | events.Evaluated() | events.Probed() | events.Offloaded():
                self._span(_SPANS[type(event)], event)

    def end(self) -> None:
        """End the job's span at the time of its last event."""
        JOBS.labels(self._outcome).inc()
        if self._outcome in ("failed", "lost"):
            self._job.set_status(trace.StatusCode.ERROR, self._outcome)
        self._job.end(_ns(self._until))

    def _span(self, name: str, event: events.Event, attributes: dict[str, float | int] | None = None) -> None:
        if self._num_spans == MAX_SPANS:
            before, at = self._job, _ns(self._until)
            links = [trace.Link(before.get_span_context())]
            before.end(at)
            self._begin(self._tracer.start_span("job", Context(), start_time=at, attributes=self._ids, links=links))
        self._num_spans += 1
        begin, self._until = self._until, max(self._until, event.time)
        span = self._tracer.start_span(name, self._inside, start_time=_ns(begin), attributes=attributes)
        span.end(_ns(self._until))


class HostStart:
    """What this host did before it could take its first lease. If it was started while that lease waited, the lease's
    trace shows this as spans.
    """

    def __init__(self) -> None:
        self._reached: list[tuple[str, float]] = []

    def begin(self) -> None:
        """Note that the host's program has finished its imports."""
        self._reached = [("", psutil.Process().create_time()), ("host: imports", time.time())]

    def reached(self, phase: str) -> None:
        """Note that a phase has ended, unless the spans were made already, or `begin` was never called."""
        if self._reached:
            self._reached.append((phase, time.time()))

    def tell(self, asked_at: float) -> None:
        """Make the spans, once, below the current one. `asked_at`: when the first lease was asked for."""
        tracer, marks = trace.get_tracer("longshore.host"), self._reached
        self._reached = []
        if not marks or marks[0][1] < asked_at:
            return
        for (_, begin), (phase, end) in pairwise(marks):
            _told(tracer, phase, begin, end)


HOST_START = HostStart()


def phase(name: str) -> AbstractContextManager[object]:
    """Record a span of this host around a `with` block."""
    return trace.get_tracer("longshore.host").start_as_current_span(name)


def _told(tracer: trace.Tracer, name: str, begin: float, end: float, inside: Context | None = None) -> None:
    tracer.start_span(name, inside, start_time=_ns(begin)).end(_ns(end))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
