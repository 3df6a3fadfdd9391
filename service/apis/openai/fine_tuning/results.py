"""The result files of a job: its metrics as CSV, and its published model as a tar. They are made on download."""

import asyncio
import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from service.backend import Backend
from service.files.files import PublishedFiles
from service.runs.views.history import Metrics
from shared.errors import NotFound
from shared.runs.requests import RUN_ID

FILE_ID = re.compile(r"file-[A-Za-z0-9-]{1,59}")
_METRICS, _MODEL = "file-metrics-", "file-model-"


@dataclass(frozen=True)
class ResultFile:
    """A file of a job, and how to read it."""

    file_id: str
    name: str
    size: int
    created_at: float
    content: Callable[[], Iterator[bytes]]
    purpose: str = "fine-tune-results"


def result_ids(run_id: str) -> list[str]:
    """The files of a job that succeeded: metrics, then the published model."""
    return [f"{_METRICS}{run_id}", f"{_MODEL}{run_id}"]


def is_result(file_id: str) -> bool:
    return file_id.startswith((_METRICS, _MODEL))


async def find_result_file(backend: Backend, tenant: str, file_id: str) -> ResultFile:
    """Find a result file by its id. Raises NotFound unless it is of a job of this tenant that succeeded."""
    run_id = file_id.removeprefix(_METRICS).removeprefix(_MODEL)
    if not re.fullmatch(RUN_ID, run_id):
        raise NotFound(f"there is no file {file_id[:64]}")
    view = await backend.runs.view(tenant, run_id)
    if view.state != "succeeded" or view.source.api != "openai":
        raise NotFound(f"there is no file {file_id}")
    created_at = view.ended_at or view.created_at
    if file_id.startswith(_METRICS):
        data = metrics_csv((await backend.histories.of(run_id)).metrics())
        return ResultFile(file_id, "step_metrics.csv", len(data), created_at, lambda: iter([data]))
    files = await asyncio.to_thread(PublishedFiles.of, view, backend.settings.s3)
    return ResultFile(file_id, f"{run_id}.tar", files.tar_bytes(run_id), created_at, lambda: files.tar(run_id))


def metrics_csv(metrics: Metrics) -> bytes:
    """Format metrics as CSV: a line for each optimizer step, 0 before the first; `train_loss`, `valid_loss`, ..."""
    rows: dict[int, dict[str, float]] = {}
    for step in metrics.steps:
        rows.setdefault(step.step, {}).update({f"train_{name}": value for name, value in step.metrics.items()})
    for evaluation in metrics.evaluations:
        named = {f"valid_{name}": value for name, value in evaluation.metrics.items()}
        rows.setdefault(evaluation.step, {}).update(named)
    for train_step in metrics.train_steps:
        named = {f"rollout_{name}": value for name, value in train_step.metrics.items()}
        rows.setdefault(train_step.optimizer_step or 0, {}).update(named)
    names = sorted({name for row in rows.values() for name in row}, key=lambda name: (not name.endswith("_loss"), name))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"step": step, **rows[step]} for step in sorted(rows))
    return text.getvalue().encode()
