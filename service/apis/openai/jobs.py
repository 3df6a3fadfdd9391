"""OpenAI's fine-tuning API: jobs, their checkpoints, events and result files; and graders tried before one."""

import asyncio
import csv
import hashlib
import io
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field, JsonValue

from longshore.dataset_runs import DistillRun, DPORun, RewardRun, SFTRun
from longshore.events import Evaluated, Failed, RunEvent, Started, Step
from longshore.fields import Frozen
from longshore.grading import Grader, SampledItem
from longshore.runs import MAX_METADATA, RUN_ID, RLRun, Run, RunId
from longshore.training import SessionRun
from longshore.views import Cost, Metrics, Phase, RunView, StepStatus
from service.accounts.keys import Asking, Principal, reads_or_writes, require
from service.accounts.tenants import Documents, Quotas
from service.apis.bodies import JsonBody, JsonRoute, ListAnswer, RecordView, RetryCount, page_after, page_of
from service.apis.errors import client_place
from service.apis.openai.job_request import Examples, JobRequest, count_examples, openai_source, run_of_job
from service.backend import Backed, Backend, IdempotencyKey
from service.database.engine import Database
from service.files import PublishedFiles
from service.runs.files import RunHistory
from service.runs.views import SKIPPED, format_event, last_lines, seconds_left
from shared.errors import InvalidInput, NotFound

# --- The result files of a job ---
# Its metrics as CSV, and its published model as a tar. They are made on download.

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


FineTuningStatus = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled", "paused"]
Level = Literal["info", "warn", "error"]

_VALIDATING: tuple[Phase, ...] = ("queued", "checking", "downloading", "tokenizing")
_WAITING: tuple[Phase, ...] = ("packing", "waiting_for_worker", "waiting_for_sampler")
_PHASES: dict[Phase, str] = {
    "checking": "Checking the model",
    "downloading": "Reading the files",
    "tokenizing": "Validating the examples",
    "waiting_for_worker": "Waiting for a worker",
}
_READING = ("downloading", "tokenizing", "packing")


class JobError(BaseModel):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningProgress(RecordView):
    """Our own fields: a job's progress. `step`: optimizer steps of `num_steps`; train steps of reinforcement jobs.

    `estimated_tokens`: tokens of the examples of all steps; None until they are validated, and for reinforcement jobs.
    `trained_tokens` is less if examples share prefixes, trained once. `cost`: None if GPU hours have no price.
    """

    phase: Phase
    step: int
    num_steps: int | None
    estimated_tokens: int | None = Field(validation_alias="planned_tokens")
    gpu_seconds: float
    cost: Cost | None
    adapter: str | None


class JobObject(BaseModel):
    """A job as clients see it. OpenAI's API returns the status `paused`, though its documentation does not list it."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: JobError | None
    estimated_finish: int | None
    fine_tuned_model: str | None
    finished_at: int | None
    hyperparameters: dict[str, JsonValue]
    integrations: list[dict[str, JsonValue]] | None
    metadata: dict[str, str] | None
    method: dict[str, JsonValue]
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: FineTuningStatus
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    user_provided_suffix: str | None
    longshore: FineTuningProgress


class JobCheckpoint(BaseModel):
    """A checkpoint as clients see it. `metrics`: those of its step, as far as they were measured."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float]
    step_number: int


def status_of(view: RunView) -> FineTuningStatus:
    """Return a run's state and phase in OpenAI's words."""
    if view.state != "running":
        return view.state
    if view.phase in _VALIDATING:
        return "validating_files"
    if view.phase in _WAITING and not view.step:
        return "queued"
    return "running"


def job_of(view: RunView, trained_tokens: int | None) -> JobObject:
    """Return a run as a job. `trained_tokens`: the number of trained tokens, if the job has ended."""
    sent: dict[str, Any] = view.source.request or {}
    wandb, now = view.source.wandb, time.time()
    left_s = seconds_left(view, now)
    hyperparameters = sent.get("hyperparameters") or {}
    is_done = view.state == "succeeded"
    has_ended = view.state not in ("running", "paused")
    problem = view.problem if view.state == "failed" else None
    return JobObject(
        id=view.run_id,
        created_at=int(view.created_at),
        error=JobError(code=problem.kind, message=problem.message, param=_file_at_fault(view)) if problem else None,
        estimated_finish=int(now + left_s) if left_s is not None else None,
        fine_tuned_model=f"{view.name}:v{view.version}" if is_done and view.version is not None else None,
        finished_at=int(view.ended_at) if has_ended and view.ended_at is not None else None,
        hyperparameters=hyperparameters if isinstance(view.run, SFTRun) else {},
        integrations=[{"type": "wandb", "wandb": wandb.model_dump(mode="json", exclude_none=True)}] if wandb else None,
        metadata=view.source.metadata or None,
        method=_method(view.run, hyperparameters),
        model=sent.get("model") or view.run.model,
        organization_id=view.tenant,
        result_files=[f"{_METRICS}{view.run_id}", f"{_MODEL}{view.run_id}"] if is_done else [],
        seed=view.run.seed,
        status=status_of(view),
        trained_tokens=trained_tokens,
        training_file=sent.get("training_file") or "",
        validation_file=sent.get("validation_file"),
        user_provided_suffix=sent.get("suffix"),
        longshore=FineTuningProgress.of(view),
    )


def _method(run: Run, hyperparameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
    match run:
        case SFTRun() | DistillRun() | RewardRun():  # OpenAI has no method of the latter names
            return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        case DPORun():
            return {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
        case RLRun():
            grader = run.rollouts.grader.model_dump(mode="json") if run.rollouts else None
            settings: dict[str, JsonValue] = {"grader": grader, "hyperparameters": hyperparameters}
            return {"type": "reinforcement", "reinforcement": settings}
        case SessionRun():
            raise NotFound("a session is no fine-tuning job")


async def checkpoints_of(backend: Backend, view: RunView) -> list[JobCheckpoint]:
    history = await backend.histories.of(view.run_id)
    saved_at, metrics = history.saved_at(), history.metrics()
    train = {row.step: row.metrics for row in metrics.steps}
    valid = {row.step: row.metrics for row in metrics.evaluations}
    steps = {found.step for found in await asyncio.to_thread(backend.reader.checkpoints, view.run_id)}
    published = view.step if view.state == "succeeded" and view.version is not None else None
    return [
        JobCheckpoint(
            id=f"ftckpt-{view.run_id}-{step}",
            created_at=int(saved_at.get(step, view.created_at)),
            fine_tuned_model_checkpoint=f"{view.name}:v{view.version}"
            if step == published
            else f"{view.run_id}:step-{step}",
            fine_tuning_job_id=view.run_id,
            metrics=_metrics(step, train.get(step, {}), valid.get(step, {})),
            step_number=step,
        )
        for step in sorted(steps, reverse=True)
    ]


def _metrics(step: int, train: dict[str, float], valid: dict[str, float]) -> dict[str, float]:
    found = {"step": float(step)}
    if "loss" in train:
        found["train_loss"] = train["loss"]
    if "loss" in valid:
        found["valid_loss"] = found["full_valid_loss"] = valid["loss"]
    return found


def _file_at_fault(view: RunView) -> str | None:
    """Return the field of the file that could not be read or learned from; None if it was none, or nobody can say."""
    if view.problem is None or view.problem.kind != "invalid_input" or view.phase not in _READING:
        return None
    if view.kind == "rl" and (view.source.request or {}).get("validation_file"):
        return None
    return "validation_file" if [span.phase for span in view.timeline].count("downloading") > 1 else "training_file"


class JobEvent(BaseModel):
    """Something that happened. `metrics` events have numbers in `data`, by OpenAI's names and by ours."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Level = "info"
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, JsonValue] = {}


def job_events(view: RunView, history: RunHistory) -> list[JobEvent]:
    return [*_ended(view), *reversed(_happened(view, history)), *reversed(_begun(view))]


def _begun(view: RunView) -> list[JobEvent]:
    """Events before the first step, oldest first."""
    events = [_event(view, "created", view.created_at, f"Created fine-tuning job: {view.run_id}")]
    seen = set[Phase]()
    for span in view.timeline:
        if span.phase in _PHASES and span.phase not in seen and span.lease <= 1:
            seen.add(span.phase)
            events.append(_event(view, span.phase, span.began, _PHASES[span.phase]))
    return events if view.kind != "rl" else events[:1]


def _happened(view: RunView, history: RunHistory) -> list[JobEvent]:
    """Workers' events, and the train step behind each job of a reinforcement run; oldest first."""
    num_steps = next((e.event.num_steps for e in reversed(history.events) if isinstance(e.event, Started)), None)
    found: list[JobEvent] = []
    steps = list(reversed(history.steps))
    when = view.created_at
    for item in history.events:
        while steps and steps[-1].step < int(item.job_id):
            found.append(_train_step(view, steps.pop(), when))
        when = item.event.time
        found.append(_worker_event(view, item, num_steps))
    return found + [_train_step(view, step, when) for step in reversed(steps)]


def _worker_event(view: RunView, item: RunEvent, num_steps: int | None) -> JobEvent:
    event = item.event
    name = f"{item.job_id}-{item.fence.label}-{event.seq}"
    match event:
        case Step(step=step, metrics=metrics):
            of = f"/{num_steps}" if num_steps else ""
            text = f"Step {step}{of}: training loss={metrics.get('loss', float('nan')):.4f}"
            if "skipped" in metrics:
                text = f"Step {step}{of} {SKIPPED}"
            data: dict[str, JsonValue] = {"step": step, "total_steps": num_steps, **metrics}
            if "loss" in metrics:
                data["train_loss"] = metrics["loss"]
            return _event(view, name, event.time, text, level="warn" if "skipped" in metrics else "info", data=data)
        case Evaluated(step=step, metrics=metrics):
            text = f"Step {step}: validation loss={metrics.get('loss', float('nan')):.4f}"
            data = {"step": step, **{f"valid_{key}": value for key, value in metrics.items()}}
            if "loss" in metrics:
                data["full_valid_loss"] = metrics["loss"]
            return _event(view, name, event.time, text, data=data)
        case Failed():
            return _event(view, name, event.time, format_event(event), level="error")
        case _:
            return _event(view, name, event.time, format_event(event))


def _train_step(view: RunView, step: StepStatus, when: float) -> JobEvent:
    text = f"Train step {step.step} {step.state}"
    data: dict[str, JsonValue] = {"step": step.step, **step.metrics}
    for ours, theirs in (("reward_mean", "train_mean_reward"), ("eval_reward_mean", "valid_mean_reward")):
        if ours in step.metrics:
            data[theirs] = step.metrics[ours]
            text += f", {theirs}={step.metrics[ours]:.4f}"
    if step.problem is not None:
        return _event(view, f"step-{step.step}", when, f"{text}: {step.problem.message}", level="warn")
    return _event(view, f"step-{step.step}", when, text, data=data)


def _ended(view: RunView) -> list[JobEvent]:
    """Events of the job's end, if it has ended, newest first."""
    when = view.ended_at or view.created_at
    match view.state:
        case "running":
            return []
        case "succeeded":
            notices = [
                _event(view, f"notice-{number}", when, notice, level="warn")
                for number, notice in enumerate(view.notices)
            ]
            model = f"New fine-tuned model created: {view.name}:v{view.version}"
            text = "The job has successfully completed"
            return [_event(view, "succeeded", when, text), _event(view, "model", when, model), *notices]
        case state:
            level: Level = "error" if state == "failed" else "info"
            return [_event(view, state, when, last_lines(view)[0].replace("the run", "The job"), level=level)]


def _event(
    view: RunView,
    name: str,
    when: float,
    message: str,
    *,
    level: Level = "info",
    data: dict[str, JsonValue] | None = None,
) -> JobEvent:
    return JobEvent(
        id=f"ftevent-{view.run_id}-{name}",
        created_at=int(when),
        level=level,
        message=message,
        type="message" if data is None else "metrics",
        data={key: value for key, value in (data or {}).items() if value is not None},
    )


# --- `/v1/fine_tuning/jobs`: fine-tuning jobs in OpenAI's form. Each is a run ---
#
# A job is accepted by looking up its files and model, choosing its hyperparameters, and submitting its run.

router = APIRouter(
    route_class=JsonRoute, prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"], dependencies=[Depends(reads_or_writes)]
)

Limit = Annotated[int, Query(ge=1, le=100)]
_METADATA = "metadata["
_TRAINING_PURPOSE = "fine-tune"
WINDOW_S = 1800.0


async def _job(backend: Backend, tenant: str, run_id: str) -> RunView:
    """A run that came in through this API. Raises NotFound."""
    view = await backend.runs.view(tenant, run_id)
    if view.source.api != "openai":
        raise NotFound(f"{run_id} is no fine-tuning job: it was started through another API")
    return view


async def _shown(backend: Backend, view: RunView) -> JobObject:
    has_ended = view.state not in ("running", "paused")
    trained_tokens = (await backend.histories.of(view.run_id)).trained_tokens() if has_ended else None
    return job_of(view, trained_tokens)


@router.post("")
async def create_job(
    body: JsonBody[JobRequest],
    asking: Asking,
    backend: Backed,
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = None,
) -> JobObject:
    """Start a fine-tuning job. The same Idempotency-Key, and a client's own retry, give the same job."""
    if body.integrations and backend.settings.wandb_mode == "disabled":
        raise InvalidInput("W&B is switched off in this installation", "integrations")
    training = await _examples(backend, asking.tenant, body.training_file, "training_file")
    validation = None
    if body.validation_file is not None:
        validation = await _examples(backend, asking.tenant, body.validation_file, "validation_file")
    start = await asyncio.to_thread(backend.names.starting_point, asking.tenant, body.model)
    run, hyperparameters, names = run_of_job(body, start, training, validation)
    try:
        run = await asyncio.to_thread(backend.names.resolved, asking.tenant, run)
    except InvalidInput as error:
        raise InvalidInput(error.message, client_place(error.place, names)) from None
    sent = SentRequests(backend.database, backend.quotas)
    key = idempotency_key or await sent.key_of(asking, body, retry_count)
    return await _shown(
        backend, await backend.runs.submit(asking, run, key, openai_source(body, hyperparameters), asked=body)
    )


@router.get("")
async def list_jobs(
    request: Request,
    asking: Asking,
    backend: Backed,
    after: Annotated[RunId | None, Query(description="the id of the previous page's last job")] = None,
    limit: Limit = 20,
) -> ListAnswer[JobObject]:
    """Jobs, newest first; `metadata[k]=v` shows those alone that have it."""
    if after is not None:
        await _job(backend, asking.tenant, after)
    wanted = _wanted_metadata(request)
    page = await backend.runs.page(asking.tenant, limit=limit, after=after, api="openai", metadata=wanted)
    return page_of([await _shown(backend, view) for view in page.runs], page.has_more)


def _wanted_metadata(request: Request) -> dict[str, str]:
    """Return the filters `metadata[k]=v` of a query. Other filters are refused."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(_METADATA) and name.endswith("]"):
            found[name.removeprefix(_METADATA)[:-1]] = value
            if "\0" in name + value:
                raise InvalidInput("no metadata holds a NUL", "metadata")
        elif name not in ("after", "limit"):
            raise InvalidInput("jobs are not listed by this: after, limit and metadata[k]=v", name[:64])
    if len(found) > MAX_METADATA:
        raise InvalidInput(f"a job has at most {MAX_METADATA} of them", "metadata")
    return found


@router.get("/{run_id}")
async def get_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """A job's current status."""
    return await _shown(backend, await _job(backend, asking.tenant, run_id))


@router.post("/{run_id}/cancel")
async def cancel_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """End a job at its next step, with a checkpoint. 409 when it has ended."""
    await _job(backend, asking.tenant, run_id)
    return await _shown(backend, await backend.runs.cancel(asking.tenant, run_id))


@router.post("/{run_id}/pause")
async def pause_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """End a job at its next step, to be resumed later. 409 when it has ended."""
    await _job(backend, asking.tenant, run_id)
    return await _shown(backend, await backend.runs.pause(asking.tenant, run_id))


@router.post("/{run_id}/resume")
async def resume_job(run_id: RunId, asking: Asking, backend: Backed) -> JobObject:
    """Go on from the last checkpoint. 409 when the job runs, or succeeded."""
    await _job(backend, asking.tenant, run_id)
    return await _shown(backend, await backend.runs.resume(asking.tenant, run_id))


@router.get("/{run_id}/events")
async def list_events(
    run_id: RunId,
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=256, description="the id of the previous page's last event")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> ListAnswer[JobEvent]:
    """The job's events, newest first."""
    view = await _job(backend, asking.tenant, run_id)
    return page_after(job_events(view, await backend.histories.of(run_id)), after, limit)


@router.get("/{run_id}/checkpoints")
async def list_checkpoints(
    run_id: RunId,
    asking: Asking,
    backend: Backed,
    after: Annotated[str | None, Query(max_length=256)] = None,
    limit: Limit = 10,
) -> ListAnswer[JobCheckpoint]:
    """Checkpoints in the store, newest first."""
    found = await checkpoints_of(backend, await _job(backend, asking.tenant, run_id))
    return page_after(found, after, limit)


async def _examples(backend: Backend, tenant: str, given: str, place: str) -> Examples:
    """Look up a data file, and count its examples. Raises InvalidInput if it does not exist, or is not for training."""
    if not FILE_ID.fullmatch(given):
        if "/" in given:
            return Examples(given)
        raise InvalidInput("this is neither the id of a file, nor a URI", place)
    try:
        record = await backend.files.show(tenant, given)
    except NotFound as error:
        raise InvalidInput(str(error), place) from None
    if record.purpose != _TRAINING_PURPOSE:
        raise InvalidInput(f"{given} has the purpose {record.purpose}: jobs read files of {_TRAINING_PURPOSE}", place)
    return Examples(record.uri, await asyncio.to_thread(count_examples, backend.files.content(record), record.size))


class SentRequest(Frozen):
    """The Idempotency-Key that a request was given, and when."""

    key: str
    at: float


class SentRequests:
    """Remembers requests without an Idempotency-Key, so that a client's retry finds what its first attempt made."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._records = Documents(database, quotas, "sent request", SentRequest)

    async def key_of(self, asking: Principal, request: Frozen, retry_count: str | None) -> str:
        """Return the key for a request without one; the same for a client's retry. It is recorded before it is used."""
        digest = hashlib.sha256(f"{asking.key_id} {request.model_dump_json()}".encode()).hexdigest()
        if retry_count is not None and retry_count.isdecimal() and retry_count.strip("0"):
            before = await self._records.find(asking.tenant, digest)
            if before is not None and time.time() - before.at < WINDOW_S:
                return before.key
        sent = SentRequest(key=f"sent-{secrets.token_hex(16)}", at=time.time())
        await self._records.put(asking.tenant, digest, sent)
        return sent.key

    async def prune(self) -> None:
        """Forget requests that are too old to be retried."""
        await self._records.delete_older(WINDOW_S)


# --- `/v1/fine_tuning/alpha/graders`: graders tried before a job is started with them ---

graders_router = APIRouter(
    route_class=JsonRoute,
    prefix="/v1/fine_tuning/alpha/graders",
    tags=["graders"],
    dependencies=[Depends(require("write"))],
)

MAX_SAMPLE_CHARS = 100_000


class RunGrader(Frozen):
    """A grader, what a model wrote, and the dataset's row that this answers."""

    grader: Grader
    model_sample: str = Field(max_length=MAX_SAMPLE_CHARS)
    item: dict[str, JsonValue] | None = None


class ValidateGrader(Frozen):
    grader: Grader


class GraderErrors(BaseModel):
    """Kinds of errors: one is true where there is no grade. `details`, our own field, has the reason in words."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    details: str | None = None


class GraderMetadata(BaseModel):
    name: str
    type: str
    errors: GraderErrors
    execution_time: float
    scores: dict[str, float | None]
    sampled_model_name: str | None = None
    token_usage: int | None = None


class GraderAnswer(BaseModel):
    """`reward` is 0 if there is no grade; then `metadata.errors` says why."""

    object: Literal["grader.run"] = "grader.run"
    reward: float
    sub_rewards: dict[str, float | None]
    metadata: GraderMetadata
    model_grader_token_usage_per_model: dict[str, int] = {}


@graders_router.post("/run")
async def run_grader(body: JsonBody[RunGrader], asking: Asking, backend: Backed) -> GraderAnswer:
    """Grade one sample."""
    await backend.runs.check_access(asking.tenant, body)
    sample = SampledItem(sample={"output_text": body.model_sample}, item=body.item or {})
    grader, found = body.grader, await backend.checks.grade(asking.tenant, body.grader, sample)
    return GraderAnswer(
        reward=found.grade if found.grade is not None else 0.0,
        sub_rewards=found.parts,
        metadata=GraderMetadata(
            name=grader.name,
            type=grader.type,
            errors=_errors(grader, found.error),
            execution_time=found.duration_s,
            scores=found.parts or {grader.name: found.grade},
        ),
    )


@graders_router.post("/validate")
async def validate_grader(body: JsonBody[ValidateGrader], asking: Asking, backend: Backed) -> ValidateGrader:
    """See whether a grader could be used here: its source is loaded, its templates and formula are read."""
    await backend.runs.check_access(asking.tenant, body)
    await backend.checks.grade(asking.tenant, body.grader, None)
    return body


def _errors(grader: Grader, reason: str | None) -> GraderErrors:
    if reason is None:
        return GraderErrors()
    match grader.type:
        case "python":
            return GraderErrors(
                python_grader_runtime_error=True, python_grader_runtime_error_details=reason, details=reason
            )
        case "string_check" | "text_similarity":
            return GraderErrors(invalid_variable_error=True, details=reason)
        case _:
            return GraderErrors(other_error=True, details=reason)
