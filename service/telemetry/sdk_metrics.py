"""Temporal's own metrics of this process, at the same port as ours.

The SDK's runtime buffers its updates. They are added up here, since the SDK itself could only show them at
a separate port.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from temporalio.runtime import (
    BUFFERED_METRIC_KIND_COUNTER,
    BUFFERED_METRIC_KIND_GAUGE,
    MetricBuffer,
    MetricBufferDurationFormat,
    Runtime,
    TelemetryConfig,
)

_BUFFER = 100_000
_DRAIN_S = 5.0  # without scrapes; the SDK drops updates if its buffer is full
_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 3600.0, float("inf"))
_runtime: Runtime | None = None

Labels = tuple[tuple[str, str], ...]


class SdkMetrics(Collector):
    """Adds up the metric updates of the SDK's runtime, by name and labels."""

    def __init__(self, buffer: MetricBuffer) -> None:
        self._buffer = buffer
        self._lock = threading.Lock()
        self._told: dict[str, Any] = {}
        self._numbers: dict[str, dict[Labels, float]] = {}
        self._seconds: dict[str, dict[Labels, list[float]]] = {}  # counts by bucket, and the sum behind them

    def drain(self) -> None:
        with self._lock:
            for update in self._buffer.retrieve_updates():
                name, value = update.metric.name, float(update.value)
                labels = tuple((n, str(v)) for n, v in sorted(update.attributes.items()) if n != "service_name")
                self._told[name] = update.metric
                if update.metric.kind == BUFFERED_METRIC_KIND_COUNTER:
                    counts = self._numbers.setdefault(name, {})
                    counts[labels] = counts.get(labels, 0.0) + value
                elif update.metric.kind == BUFFERED_METRIC_KIND_GAUGE:
                    self._numbers.setdefault(name, {})[labels] = value
                else:
                    empty = [0.0] * (len(_BUCKETS_S) + 1)
                    seen = self._seconds.setdefault(name, {}).setdefault(labels, empty)
                    seen[bisect_left(_BUCKETS_S, value)] += 1
                    seen[-1] += value

    def collect(self) -> Iterable[Metric]:
        self.drain()
        with self._lock:
            return [*map(self._number, self._numbers), *map(self._histogram, self._seconds)]

    def _number(self, name: str) -> Metric:
        is_counter = self._told[name].kind == BUFFERED_METRIC_KIND_COUNTER
        found = Metric(name, self._told[name].description or name, "counter" if is_counter else "gauge")
        for labels, value in self._numbers[name].items():
            found.add_sample(f"{name}_total" if is_counter else name, dict(labels), value)
        return found

    def _histogram(self, name: str) -> Metric:
        found = Metric(name, self._told[name].description or name, "histogram")
        for labels, (*counts, total) in self._seconds[name].items():
            num = 0.0
            for bucket, count in zip(_BUCKETS_S, counts, strict=True):
                num += count
                le = "+Inf" if bucket == float("inf") else str(bucket)
                found.add_sample(f"{name}_bucket", {**dict(labels), "le": le}, num)
            found.add_sample(f"{name}_count", dict(labels), num)
            found.add_sample(f"{name}_sum", dict(labels), total)
        return found


def start_sdk_metrics() -> SdkMetrics:
    """Count the metrics of Temporal clients that connect from now on. Called once, at a process's start."""
    global _runtime
    buffer = MetricBuffer(_BUFFER, MetricBufferDurationFormat.SECONDS)
    _runtime = Runtime(telemetry=TelemetryConfig(metrics=buffer))
    metrics = SdkMetrics(buffer)

    def drain() -> None:
        while True:
            metrics.drain()
            time.sleep(_DRAIN_S)

    threading.Thread(target=drain, name="temporal metrics", daemon=True).start()
    return metrics


def sdk_runtime() -> Runtime | None:
    """Return the runtime that counts; None for the SDK's own."""
    return _runtime
