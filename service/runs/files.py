"""A run's parts in the store: events, train steps, metrics, checkpoints; job files, reports, rollouts as text.

Also the overview next to a list of runs, and the installation's gauges.
"""

import asyncio
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import Gauge
from pydantic import JsonValue, TypeAdapter, ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from longshore import views
from longshore.environments import END_REASONS
from longshore.events import Evaluated, RunEvent, Saved, Step
from longshore.fields import Artifact, Fence
from longshore.grading import SampledItem
from service.accounts.tenants import Quotas, used_gpu_seconds
from service.database.engine import Database, KeyRow, RunRow
from service.files import PublishedFiles
from service.runs.rows import IndexedRun
from service.runs.views import IN_QUEUE
from service.temporal import Temporal
from shared.chat.trajectories import ChatTrajectory, EpisodeTrajectory, SentGroup, SentTrajectory, Trajectory
from shared.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from shared.jobs.job import Job
from shared.runs.events import EventCursor, read_run_events
from shared.settings import S3Settings, Settings
from shared.storage import artifacts
from shared.storage.artifacts import find_artifact, stored_checkpoints
from shared.storage.paths import MANIFEST, SAMPLES, RunKeys
from shared.storage.store import ObjectStore, open_store, open_uri, uri_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_CONCURRENT = 16
_MOST_RUNS, _MOST_EVENTS = 64, 200_000
_AT_ONCE = 5000
_ALL_STEPS = 1_000_000


class RunReader:
    """Reads a run's events, steps and checkpoints in the store. Events are in copies of the workers' logs there."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def events(self, run_id: str, after: str | None, limit: int) -> views.EventPage:
        """Events after a cursor, at most `limit`. Raises InvalidInput if `after` is no cursor."""
        start = EventCursor.parse(after)
        found, cursor = await asyncio.to_thread(read_run_events, self._store, run_id, start, limit)
        return views.EventPage(events=tuple(found), next=str(cursor) if found else after)

    async def steps(self, run_id: str, after: int | None, limit: int) -> views.StepPage:
        """Train steps on record, at most `limit`: those after a number, or from the first."""
        keys = RunKeys(run_id)
        found = await asyncio.to_thread(lambda: [info.key for info in self._store.list(f"{keys.steps}/")])
        wanted = found if after is None else [key for key in found if key > keys.step(after)]
        steps: list[views.StepStatus] = []
        for start in range(0, min(limit, len(wanted)), _CONCURRENT):
            chunk = wanted[start : min(start + _CONCURRENT, limit)]
            steps += await asyncio.gather(*(asyncio.to_thread(self._step, key) for key in chunk))
        return views.StepPage(steps=tuple(steps), has_more=len(wanted) > limit, next=steps[-1].step if steps else after)

    def _step(self, key: str) -> views.StepStatus:
        return views.StepStatus.model_validate_json(self._store.get_bytes(key))

    def checkpoints(self, run_id: str) -> tuple[views.CheckpointRef, ...]:
        """Read the checkpoints in the store, in order of step; of a step that two workers saved, both. Blocking."""
        found = []
        for each in stored_checkpoints(self._store, run_id):
            artifact = find_artifact(self._store, each.key)
            if artifact is not None:  # else it was pruned since it was listed
                found.append(
                    views.CheckpointRef(step=each.step, fence=Fence.from_label(each.fence_label), artifact=artifact)
                )
        return tuple(found)


@dataclass
class RunHistory:
    """The events and train steps of a run. Each `read` adds those that are new.

    Events are in order of job, then of fence. A step that another worker has repeated occurs twice: the last counts.
    """

    events: list[RunEvent] = field(default_factory=list)
    steps: list[views.StepStatus] = field(default_factory=list)
    _cursor: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, reader: RunReader, run_id: str) -> None:
        async with self._lock:
            while (page := await reader.events(run_id, self._cursor, _AT_ONCE)).events:
                self.events += page.events
                self._cursor = page.next
            last = self.steps[-1].step if self.steps else None
            self.steps += (await reader.steps(run_id, last, _ALL_STEPS)).steps

    def step_metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of each optimizer step, in order of step."""
        found = (item.event for item in self.events)
        return dict(sorted({event.step: event.metrics for event in found if isinstance(event, Step)}.items()))

    def metrics(self) -> views.Metrics:
        found = (item.event for item in self.events)
        evaluated = {event.step: event for event in found if isinstance(event, Evaluated)}
        return views.Metrics(
            steps=tuple(views.StepMetrics(step=step, metrics=metrics) for step, metrics in self.step_metrics().items()),
            evaluations=tuple(
                views.EvaluationMetrics(**event.model_dump(include={"step", "metrics", "samples", "drawn"}))
                for _, event in sorted(evaluated.items())
            ),
            train_steps=tuple(
                views.TrainStepMetrics(step=step.step, optimizer_step=step.optimizer_step, metrics=step.metrics)
                for step in self.steps
                if step.same_as is None
            ),
        )

    def trained_tokens(self) -> int:
        """Count the trained tokens, of each step once."""
        return int(sum(metrics.get("tokens", 0.0) for metrics in self.step_metrics().values()))

    def saved_at(self) -> dict[int, float]:
        """Return the time at which the checkpoint of each step was saved, in seconds since 1970."""
        return {item.event.step: item.event.time for item in self.events if isinstance(item.event, Saved)}


class Histories:
    """Keeps the histories of the runs that were asked for last, up to a number of events."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._kept: OrderedDict[str, RunHistory] = OrderedDict()

    async def of(self, run_id: str) -> RunHistory:
        """Return a run's history up to now. The caller has checked who owns the run."""
        history = self._kept.setdefault(run_id, RunHistory())
        self._kept.move_to_end(run_id)
        await history.read(self._reader, run_id)
        num_events = sum(len(kept.events) for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > _MOST_RUNS or num_events > _MOST_EVENTS):
            num_events -= len(self._kept.popitem(last=False)[1].events)
        return history


# --- Files other than events: job files, workers' output, traces, reports, rollouts as text ---

_READ_BYTES = 4 << 20
_MOST_CHARACTERS = 8000
_MOST_SAMPLES = 16
_MOST_TRACES = 8
_TRACE = re.compile(r"profile-([0-9a-f]{16})\.json\.gz")
_report: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
Decode = Callable[[list[int]], str]


class RunFiles:
    """Reads a run's files. Blocking: call it from a thread. The caller has checked who owns the run."""

    def __init__(self, store: ObjectStore, s3: S3Settings, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas
        self._s3 = s3
        self._tokenizer = lru_cache(maxsize=4)(self._read_tokenizer)
        self._report_at = lru_cache(maxsize=256)(self._at)  # lists of jobs ask for the same ones again and again

    def jobs(self, run_id: str) -> tuple[views.JobFile, ...]:
        """List every attempt at every job of a run, in order."""
        logs = f"{RunKeys(run_id).logs}/"
        found: dict[tuple[str, str], set[str]] = {}
        for info in self._store.list(logs):
            job_id, fence, name = info.key.removeprefix(logs).split("/", 2)
            found.setdefault((job_id, fence), set()).add(name)
        return tuple(
            views.JobFile(job_id=job_id, fence=fence, has_job="job.json" in names, has_output="output.log" in names)
            for (job_id, fence), names in sorted(found.items())
        )

    def job(self, run_id: str, job_id: str, fence: str) -> bytes:
        """The job file, to the byte. Raises NotFound."""
        return self._store.get_bytes(RunKeys(run_id).job(job_id, _fence(fence)))

    def output(self, run_id: str, job_id: str, fence: str) -> bytes:
        """The end of a worker's stdout and stderr. Raises NotFound."""
        return self._store.get_bytes(RunKeys(run_id).output(job_id, _fence(fence)))

    def report(self, status: views.RunStatus) -> views.RunReport:
        """The dataset's report and the newest plan's header, as far as they are there."""
        dataset, packing = self.dataset(status), None
        job = self._newest_job(status.run_id)
        if job is not None and job.plan.packed:
            packing = views.PlanHeader.model_validate_json(self._at(f"{job.plan.packed[0].plan.uri}/plan.json"))
        return views.RunReport(dataset=dataset, packing=packing)

    def dataset(self, status: views.RunStatus) -> dict[str, JsonValue] | None:
        """The dataset's report, once it is tokenized."""
        return None if status.dataset_report is None else _report.validate_json(self._report_at(status.dataset_report))

    async def ask_profile(self, tenant: str, run_id: str, steps: int) -> views.ProfileRequest:
        """Ask for a trace of a running run's next steps. To be awaited, as it counts the request's bytes.

        Raises:
            Conflict: one is asked for, or there are enough.
            QuotaExceeded
        """
        if len((await asyncio.to_thread(self.traces, run_id)).traces) >= _MOST_TRACES:
            raise Conflict(f"the run has {_MOST_TRACES} traces, the most that are kept")
        request = views.ProfileRequest(profile_id=secrets.token_hex(8), steps=steps)
        data = request.model_dump_json().encode()
        put = partial(asyncio.to_thread, self._store.put_if_absent, RunKeys(run_id).profile_request, data)
        if not await self._quotas.put_noted(tenant, run_id, "records", len(data), put):
            raise Conflict("a trace of this run is waited for already")
        return request

    def traces(self, run_id: str) -> views.Traces:
        """Return the traces of a run's steps, and the one that is waited for."""
        keys = RunKeys(run_id)
        found = []
        for info in self._store.list(f"{keys.logs}/"):
            job_id, fence, name = info.key.removeprefix(f"{keys.logs}/").split("/", 2)
            if match := _TRACE.fullmatch(name):
                found.append(views.Trace(profile_id=match[1], job_id=job_id, fence=fence, num_bytes=info.size))
        asked = None
        with suppress(NotFound):
            asked = views.ProfileRequest.model_validate_json(self._store.get_bytes(keys.profile_request))
        return views.Traces(asked=asked, traces=tuple(found))

    def trace(self, run_id: str, job_id: str, fence: str, profile_id: str) -> Iterator[bytes]:
        """One trace, in pieces. Raises NotFound."""
        key = RunKeys(run_id).profile(job_id, _fence(fence), profile_id)
        if (info := self._store.head(key)) is None:
            raise NotFound(f"there is no trace {profile_id}")
        starts = range(0, info.size, _READ_BYTES)
        return (self._store.read_range(key, start, min(_READ_BYTES, info.size - start)) for start in starts)

    def checkpoint(self, run_id: str, fence: str, step: int) -> PublishedFiles:
        """The files of a checkpoint. Raises NotFound for one that is not there, or no longer."""
        key = RunKeys(run_id).checkpoint(_fence(fence), step)
        data = self._store.get_bytes(f"{key}/{MANIFEST}")
        store = open_store(uri_of(self._store, key), self._s3)
        return PublishedFiles(store, artifacts.Manifest.model_validate_json(data), data)

    def rollouts(self, run_id: str, step: views.StepStatus, limit: int) -> tuple[views.GroupTexts, ...]:
        """The first groups of a train step, as text. Raises Conflict: the groups lie elsewhere, or are compressed."""
        if not step.groups:
            return ()
        if not step.groups.startswith(f"{self._store.uri}/"):
            raise Conflict("this step's groups are stored where its client put them, not here")
        key = step.groups.removeprefix(f"{self._store.uri}/")
        info = self._store.head(key)
        if info is None:
            raise NotFound("the groups of this step are no longer in the store")
        data = self._store.read_range(key, 0, min(_READ_BYTES, info.size))
        lines = data.splitlines()[: None if info.size <= _READ_BYTES else -1]
        try:
            groups = [SentGroup.model_validate_json(line) for line in lines[:limit]]
        except ValidationError:
            raise Conflict("the groups of this step are compressed, or no lines of JSON: they are not shown") from None
        decode = self._decoder(run_id)
        return tuple(_texts(group, decode) for group in groups)

    def samples(
        self, drawn: Mapping[str, str], of: str, group_size: int, only_failed: bool, first: int, limit: int
    ) -> tuple[views.DrawnSample, ...]:
        """Samples of a step or of an evaluation after it, from number `first` on. `drawn`: URIs of all, by name.

        Raises NotFound: there are none of this name, or they are no longer in the store.
        """
        if (uri := drawn.get(of)) is None:
            known = ", ".join(drawn) or "none"
            raise NotFound(f"this step has no samples of '{of}'; those that it has: {known}")
        key = f"{uri.removeprefix(f'{self._store.uri}/')}/{SAMPLES}"
        if (info := self._store.head(key)) is None:
            raise NotFound("the samples of this step are no longer in the store")
        lines, found = _lines(self._store, key, info.size), list[views.DrawnSample]()
        for number, line in enumerate(lines):
            if number < first:
                continue
            told = SampledItem.model_validate_json(line)
            sample = views.DrawnSample.model_validate(
                {"number": number, "group": number // group_size, "text": told.sample["output_text"], "item": told.item}
                | {name: told.sample.get(name) for name in ("num_tokens", "finish_reason", "episode")}
            )
            if not only_failed or (sample.episode is not None and sample.episode.error is not None):
                found.append(sample)
            if len(found) == limit:
                break
        return tuple(found)

    def _decoder(self, run_id: str) -> Decode:
        job = self._newest_job(run_id)
        tokenizer = self._tokenizer(job.plan.model) if job is not None else None
        if tokenizer is None:
            return lambda ids: " ".join(str(token) for token in ids)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))

    def _read_tokenizer(self, model: Artifact) -> "Tokenizer | None":
        from tokenizers import Tokenizer

        try:
            store, _ = artifacts.open_artifact(model, self._s3)
            return Tokenizer.from_buffer(store.get_bytes("tokenizer.json"))
        except (NotFound, StoreUnavailable, InvalidInput, ValueError):  # without the tokenizer, ids are shown
            return None

    def _newest_job(self, run_id: str) -> Job | None:
        for job in reversed(self.jobs(run_id)):
            if job.has_job:
                return Job.model_validate_json(self.job(run_id, job.job_id, job.fence))
        return None

    def _at(self, uri: str) -> bytes:
        store, key = open_uri(uri, self._s3)
        return store.get_bytes(key)


def _fence(label: str) -> Fence:
    try:
        return Fence.from_label(label)
    except ValueError:
        raise NotFound(f"there is no attempt {label}") from None


def _lines(store: ObjectStore, key: str, size: int) -> Iterator[bytes]:
    """Yield the lines of an object, which is read in pieces."""
    rest = b""
    for start in range(0, size, _READ_BYTES):
        *whole, rest = (rest + store.read_range(key, start, min(_READ_BYTES, size - start))).split(b"\n")
        yield from whole


def _texts(group: SentGroup, decode: Decode) -> views.GroupTexts:
    samples = [_sample(one, decode) for one in group.trajectories[:_MOST_SAMPLES]]
    place = group.metadata.get("place")
    return views.GroupTexts(
        prompt=_prompt(group.trajectories[0], decode)[-_MOST_CHARACTERS:],
        samples=tuple(samples),
        place=place if isinstance(place, str) else None,
    )


def _prompt(one: SentTrajectory, decode: Decode) -> str:
    match one:
        case Trajectory():
            return decode(list(one.token_ids[: _first_sampled(one)]))
        case ChatTrajectory():
            return "\n".join(_turns(one.messages[:-1]))
        case EpisodeTrajectory():
            return ""


def _sample(one: SentTrajectory, decode: Decode) -> views.SampleText:
    match one:
        case Trajectory():
            parts = list(_parts(one, decode))
            text, end = "".join(part.text for part in parts), one.metadata.get("end")
            shown = views.SampleText(
                text="",
                reward=one.reward,
                num_tokens=sum(sum(each.sampled) for each in (one, *one.branches)),
                finish_reason=one.finish_reason,
                parts=_cut(parts) if len(parts) > 1 else (),
                turn_rewards=one.turn_rewards,
                end=end if end in END_REASONS else None,
            )
        case ChatTrajectory():
            text, shown = "\n".join(_turns(one.messages[-1:])), views.SampleText(text="", reward=one.reward)
        case EpisodeTrajectory():
            text, shown = f"episode {one.episode}", views.SampleText(text="", reward=one.reward)
    return shown.model_copy(update={"text": text[:_MOST_CHARACTERS], "is_cut": len(text) > _MOST_CHARACTERS})


def _parts(one: Trajectory, decode: Decode) -> Iterator[views.TextPart]:
    """Yield what comes behind the prompt, and the whole of further branches."""
    rest = slice(_first_sampled(one), None)
    sequences = [(one.token_ids[rest], one.sampled[rest]), *((each.token_ids, each.sampled) for each in one.branches)]
    for token_ids, sampled in sequences:
        for is_drawn, tokens in groupby(zip(token_ids, sampled, strict=True), key=lambda pair: pair[1]):
            yield views.TextPart(text=decode([token for token, _ in tokens]), is_drawn=is_drawn)


def _cut(parts: list[views.TextPart]) -> tuple[views.TextPart, ...]:
    """Return the parts up to the most characters that are shown."""
    left, kept = _MOST_CHARACTERS, []
    for part in parts:
        kept.append(part.model_copy(update={"text": part.text[:left]}))
        left -= len(part.text)
        if left <= 0:
            break
    return tuple(kept)


def _first_sampled(one: Trajectory) -> int:
    return one.sampled.index(True) if True in one.sampled else len(one.sampled)


def _turns(messages: tuple[dict[str, Any], ...]) -> Iterator[str]:
    for choice in messages:
        message = choice.get("message", choice)
        message = message if isinstance(message, dict) else {}
        content = message.get("content")
        yield f"{message.get('role', '?')}: {content if isinstance(content, str) else json.dumps(content)}"


# --- The overview next to a list of runs: counts by state, places in the queue for workers, sparklines of losses ---

_POINTS = 48
_FRESH_S = 5.0
_MOST_KEPT = 2000
_SPARKLINES_AT_ONCE = 4


class Overviews:
    """Reads counts from the index, and metrics of runs from the store."""

    def __init__(self, database: Database, store: ObjectStore, histories: Histories) -> None:
        self._database = database
        self._store = store
        self._histories = histories
        self._kept: OrderedDict[str, tuple[object, float, views.Sparkline]] = OrderedDict()
        self._places = asyncio.Semaphore(_SPARKLINES_AT_ONCE)

    async def show(self, tenant: str) -> views.Overview:
        """Return counts of runs by state, places in the queue for workers, and titles of keys."""
        counts = select(RunRow.state, func.count()).where(RunRow.tenant == tenant).group_by(RunRow.state)
        waiting = (
            select(RunRow.run_id, RunRow.tenant)
            .where(RunRow.state == "running", RunRow.phase.in_(IN_QUEUE))
            .order_by(RunRow.created_at, RunRow.run_id)
        )
        owners = select(KeyRow.key_id, KeyRow.title).where(KeyRow.tenant == tenant, KeyRow.title != "")
        found = await self._database.reading(
            lambda session: [session.execute(query).all() for query in (counts, waiting, owners)]
        )
        return views.Overview(
            counts=dict(map(tuple, found[0])),
            waiting={run_id: place for place, (run_id, owner) in enumerate(found[1], 1) if owner == tenant},
            owners=dict(map(tuple, found[2])),
        )

    async def sparkline(self, run: IndexedRun) -> views.Sparkline:
        """Return a run's sparkline: read once if the run has ended, else every few seconds."""
        stamp = (run.status.state, run.status.step)
        before, since, line = self._kept.get(run.run_id, (None, 0.0, None))
        if line is None or (before != stamp and (not run.is_open or time.monotonic() - since > _FRESH_S)):
            async with self._places:
                if run.record.run.kind == "rl":
                    line = await asyncio.to_thread(self._rewards, run.run_id)
                else:
                    line = await self._losses(run.run_id)
            self._kept[run.run_id] = stamp, time.monotonic(), line
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return line

    async def _losses(self, run_id: str) -> views.Sparkline:
        steps = (await self._histories.of(run_id)).step_metrics().values()
        losses = [metrics["loss"] for metrics in steps if "loss" in metrics]
        return views.Sparkline(name="loss", values=tuple(losses[place] for place in _places_of(len(losses))))

    def _rewards(self, run_id: str) -> views.Sparkline:
        keys = [info.key for info in self._store.list(f"{RunKeys(run_id).steps}/")]
        chosen = [keys[place] for place in _places_of(len(keys))]
        steps = (views.StepStatus.model_validate_json(self._store.get_bytes(key)) for key in chosen)
        rewards = (step.metrics.get("reward_mean") for step in steps)
        return views.Sparkline(name="reward", values=tuple(reward for reward in rewards if reward is not None))


def _places_of(number: int) -> list[int]:
    """Choose at most a few dozen indices of a list, evenly spaced, the first and the last among them."""
    if number <= _POINTS:
        return list(range(number))
    return [round(place * (number - 1) / (_POINTS - 1)) for place in range(_POINTS)]


# --- Gauges of the whole installation, the same in every web service: queues, runs, tenants' GPU seconds ---

_MOST_TENANTS = 20
_OTHERS = "(others)"
_NONE_ENDED = {
    state: 0 for state in get_args(views.State) if state != "running"
}  # Prometheus sees no change in a first value
QUEUE_DEPTH = Gauge("longshore_queue_depth", "Activities that wait for a host: of a shape, leases", ["role", "shape"])
QUEUE_AGE = Gauge("longshore_queue_age_seconds", "Since the oldest of them was asked for", ["role", "shape"])
RUNS = Gauge("longshore_runs", "Runs that go on, by phase", ["phase"])
ENDED_RUNS = Gauge("longshore_ended_runs", "Runs that have ended or are paused, by state", ["state"])
TENANT_GPU_SECONDS = Gauge(
    "longshore_tenant_gpu_seconds",
    "Of 30 days: the tenants that used most, and all others together",
    ["tenant"],
)


class InstallationGauges:
    """Reads them again. At most twenty tenants, even of 10,000, have a separate series at a time."""

    def __init__(self, settings: Settings, database: Database, temporal: Temporal) -> None:
        self._settings = settings
        self._database = database
        self._temporal = temporal

    async def refresh(self) -> None:
        """Raises TemporalUnavailable, DatabaseUnavailable: the rest stays as it was."""
        states, phases, tenants = await self._database.reading(_counts)
        _set(RUNS, phases)
        _set(ENDED_RUNS, list((_NONE_ENDED | dict(states)).items()))
        most, rest = tenants[:_MOST_TENANTS], tenants[_MOST_TENANTS:]
        _set(TENANT_GPU_SECONDS, [*most, (_OTHERS, sum(seconds for _, seconds in rest))])
        settings = self._settings
        for role, shape, queue in (
            ("gpu", settings.shape, settings.lease_queue),
            ("sampler", settings.shape, settings.sampler_queue),
            ("control", "", settings.control_queue),
        ):
            waiting = await self._temporal.backlog(queue)
            QUEUE_DEPTH.labels(role, shape).set(waiting.num)
            QUEUE_AGE.labels(role, shape).set(waiting.age_s)


def _counts(session: Session) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[tuple[str, float]]]:
    num = func.count()
    states = select(RunRow.state, num).where(RunRow.state != "running").group_by(RunRow.state)
    phases = select(RunRow.phase, num).where(RunRow.state == "running").group_by(RunRow.phase)
    tuples = [[(name, count) for name, count in session.execute(query)] for query in (states, phases)]
    return tuples[0], tuples[1], used_gpu_seconds(session)


def _set(gauge: Gauge, values: "list[tuple[str, int]] | list[tuple[str, float]]") -> None:
    gauge.clear()
    for label, value in values:
        gauge.labels(label).set(value)
