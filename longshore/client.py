"""A client of a Longshore service: everything that its native API does, typed, sync and async.

    from longshore import Client, SFTRun

    with Client() as client:  # the service and key that the command line uses; or Client(url, key)
        file = client.files.upload("train.jsonl")
        run = client.runs.submit(SFTRun(model="org/model", dataset={"uri": file.uri}, epochs=3, batch_size=8))
        run = client.runs.wait(run.run_id, progress=show_progress)
        client.models.download(run.run_id, "adapter")

`AsyncClient` has the same methods as coroutines. docs/client.md describes both.

Each method is written once, as a coroutine. `AsyncClient` hands it to the caller. `Client` runs it to its end at once:
its requests and pauses are blocking calls, so its coroutines never wait for an event loop.
"""

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache, partial, update_wrapper
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import httpx
from pydantic import BaseModel, TypeAdapter

from longshore.accounts import (
    AuditPage,
    FilePage,
    FileView,
    KeyHolder,
    KeyRequest,
    KeyView,
    NewKey,
    NewTenant,
    QuotaSettings,
    TenantRequest,
    TenantUsage,
    TenantView,
)
from longshore.automation import (
    Backfill,
    Delivery,
    GarbageView,
    NewWebhook,
    Pinged,
    Rotation,
    ScheduledRun,
    ScheduleView,
    Sweep,
    SweepView,
    WebhookChange,
    WebhookChoice,
    WebhookView,
)
from longshore.commands import (
    Asked,
    CommandResult,
    Datum,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveState,
    SessionLoss,
)
from longshore.connection import find_address
from longshore.dataset_runs import TrainedRun
from longshore.events import RunEvent
from longshore.grading import Grader, OneGrade, SampledItem
from longshore.losses import CrossEntropy
from longshore.runs import Kind, Run
from longshore.training import Adam, Optimizer, SessionRun
from longshore.views import (
    AskedProfile,
    CheckpointRef,
    CommandView,
    DeletedVersions,
    DrawnSample,
    Envelope,
    EpisodeRequest,
    EpisodeTurnView,
    EpisodeView,
    Estimate,
    EventPage,
    Export,
    ExportView,
    FileEntry,
    GraderTrial,
    GroupTexts,
    Health,
    JobFile,
    Metrics,
    ModelView,
    Overview,
    Preview,
    PreviewRequest,
    ProfileRequest,
    PublicKey,
    QueueHosts,
    RunPage,
    RunRemoved,
    RunReport,
    RunView,
    Sparkline,
    State,
    StepPage,
    StepStatus,
    StepSubmission,
    Traces,
)

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="Client | AsyncClient")
_API = "/api/v1"
_LONG_POLL_S, _POLL_S = 30.0, 1.0
_CONNECT_S, _ANSWER_S, _PREVIEW_S, _ONE_DAY_S = 5.0, 60.0, 310.0, 86_400.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_AT_ONCE = 16
_CHUNK_BYTES = 1 << 20

# --- Errors ---


class ServiceError(Exception):
    """The service refuses a call. The subclasses name the usual reasons.

    Attributes:
        status: the HTTP status; 0 if the service did not answer in time.
        rule: what is wrong, in the service's words.
        place: the field, file or line at fault, if the service names one.
        response: the answer, if there was one.
    """

    def __init__(
        self, status: int, rule: str, place: str | None = None, response: httpx.Response | None = None
    ) -> None:
        super().__init__(f"{place}: {rule}" if place else rule)
        self.status = status
        self.rule = rule
        self.place = place
        self.response = response

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.rule, self.place)


class Unauthorized(ServiceError):
    """The service does not know the key, or there is none."""


class Forbidden(ServiceError):
    """The key lacks a scope."""


class NotFound(ServiceError):
    """There is no such object, or it is another tenant's."""


class Conflict(ServiceError):
    """This cannot be done in the object's state."""


class Invalid(ServiceError):
    """The service cannot accept the request: `place` and `rule` say why."""


class TooMany(ServiceError):
    """A quota is used up (`is_quota`), or there are too many requests at a time."""

    @property
    def is_quota(self) -> bool:
        return self.response is not None and self.response.headers.get("x-should-retry") == "false"


class Unreachable(ServiceError):
    """The service does not answer, or is temporarily unavailable."""


_BY_STATUS = {401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 400: Invalid, 413: Invalid, 422: Invalid}
_BY_STATUS |= {429: TooMany, 502: Unreachable, 503: Unreachable, 504: Unreachable}


class CommandFailed(Exception):
    """A command failed; the session continues. `kind`: invalid_input, not_finite, error, or dropped."""

    def __init__(self, number: int, kind: str, message: str) -> None:
        super().__init__(f"command {number}: {message}")
        self.number = number
        self.kind = kind


class DownloadFailed(Exception):
    """A file that was downloaded is not the one that the service lists."""


def _refusal(answer: httpx.Response) -> ServiceError:
    try:
        error = answer.json()["error"]
        rule, place = str(error["message"]), error.get("place") or error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        rule, place = f"{answer.url} answered {answer.status_code}", None
    return _BY_STATUS.get(answer.status_code, ServiceError)(answer.status_code, rule, place, answer)


# --- Methods that are written once, as coroutines, for both clients ---


class _Method(Generic[P, T]):
    """A coroutine function as a method: `Client` returns its result, `AsyncClient` the coroutine."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self.function = function
        update_wrapper(cast(Any, self), function)

    @overload
    def __get__(self, group: "Group[Client]", owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, group: "Group[AsyncClient]", owner: Any = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, group: None, owner: Any = None) -> Self: ...
    def __get__(self, group: Any, owner: Any = None) -> Any:
        if group is None:
            return self
        made = partial(self.function, group)
        return update_wrapper(group.client.bound(made), self.function)


class _Iteration(Generic[P, T]):
    """An asynchronous generator function as a method: `Client` returns an iterator, `AsyncClient` the generator."""

    def __init__(self, function: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> None:
        self.function = function
        update_wrapper(cast(Any, self), function)

    @overload
    def __get__(self, group: "Group[Client]", owner: Any = None) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, group: "Group[AsyncClient]", owner: Any = None) -> Callable[P, AsyncIterator[T]]: ...
    @overload
    def __get__(self, group: None, owner: Any = None) -> Self: ...
    def __get__(self, group: Any, owner: Any = None) -> Any:
        if group is None:
            return self
        made = partial(self.function, group)
        return update_wrapper(group.client.iterated(made), self.function)


def _finished(steps: Any) -> Any:
    """Run a coroutine of `Client` to its end."""
    try:
        steps.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking client never waits for an event loop")


def _none(answer: type[T], method: str, path: str, doc: str) -> _Method[[], T]:
    """Make the method of a route without parameters."""

    async def ask(group: "Group[Any]") -> T:
        return await group.ask(answer, method, path)

    ask.__doc__ = doc
    return _Method(ask)


def _by_id(answer: type[T], method: str, path: str, doc: str, *, repeats: bool | None = None) -> _Method[[str], T]:
    """Make the method of a route whose only parameter is an id or a name in its path."""

    async def ask(group: "Group[Any]", id: str, /) -> T:
        return await group.ask(answer, method, path.format(_in_path(id)), repeats=repeats)

    ask.__doc__ = doc
    return _Method(ask)


def _file_of(path: str, doc: str) -> _Method[[str, str, str | Path], Path]:
    """Make the method that writes one file of a published folder."""

    async def save(group: "Group[Any]", id: str, file: str, into: str | Path, /) -> Path:
        return await group.save(path.format(_in_path(id), _in_path(file, safe="/")), into)

    save.__doc__ = doc
    return _Method(save)


def _in_path(part: object, safe: str = "") -> str:
    """Return one segment of a URL's path. (`:` is common in names, and needs no escape.)"""
    from urllib.parse import quote

    return quote(str(part), safe=f":{safe}")


@cache
def _adapter(answer: Any, /) -> TypeAdapter[Any]:
    return TypeAdapter(answer)


def _json_of(body: BaseModel) -> bytes:
    """Return the JSON of a request. Fields that were not set are left out if the service has a default."""
    if isinstance(body, QuotaSettings | TenantRequest | WebhookChange):
        return body.model_dump_json(exclude_unset=True).encode()
    # Without a `trainable`, an adapter named by `model` sets the shape.
    run = body.run if isinstance(body, Sweep) else body
    unset = {"trainable"} - run.model_fields_set if isinstance(run, TrainedRun) else set()
    return body.model_dump_json(exclude={"run": unset} if isinstance(body, Sweep) else unset).encode()


class Group(Generic[C]):
    """Methods of a client that belong together, such as `client.runs`."""

    def __init__(self, client: C) -> None:
        self.client = client

    async def ask(
        self,
        answer: type[T],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        repeats: bool | None = None,
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
        **params: Any,
    ) -> T:
        """Call a route of the native API, and return its answer as a model.

        Args:
            repeats: sent twice it does the same as once, so it is repeated while the service is away; if None,
                reading and replacing are.
            timeout_s: how long the service may take to answer.
            params: of the query; those that are None are left out.
        """
        options: dict[str, Any] = {"params": {name: value for name, value in params.items() if value is not None}}
        if body is not None:
            options["content"] = _json_of(body)
            headers = {"content-type": "application/json", **(headers or {})}
        sent = await self.client.send(
            method, f"{_API}{path}", repeats=repeats, timeout_s=timeout_s, headers=headers, **options
        )
        # A newer service may say more than this client knows.
        found: T = _adapter(cast(Any, answer)).validate_json(sent.content, extra="ignore")
        return found

    async def save(self, path: str, into: str | Path) -> Path:
        """Write the bytes of an answer to a file."""
        await self._write(path, Path(into))
        return Path(into)

    async def _write(self, path: str, target: Path) -> str:
        """Write the bytes of an answer to a file, and return their SHA-256."""
        digest = sha256()
        async with self.client.streamed("GET", f"{_API}{path}") as answer:
            with target.open("wb") as file:
                async for chunk in self.client.chunks(answer):
                    digest.update(chunk)
                    file.write(chunk)
        return digest.hexdigest()

    async def _save_folder(self, path: str, into: str | Path) -> tuple[FileEntry, ...]:
        """Fetch the files that a path lists. The folder is complete, each file with its listed hash, or absent."""
        target = Path(into)
        if target.exists():
            raise FileExistsError(f"{target} is there already")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            entries = await self.ask(tuple[FileEntry, ...], "GET", path)
            folder = temporary / "folder"  # its own permissions are the user's usual ones
            folder.mkdir()
            for entry in entries:
                await self._save_checked(f"{path}/{_in_path(entry.path, safe='/')}", folder / entry.path, entry.sha256)
            folder.rename(target)
        finally:
            shutil.rmtree(temporary)
        return entries

    async def _save_checked(self, path: str, file: Path, wanted_sha256: str, whose: str = "manifest") -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if await self._write(path, file) != wanted_sha256:
            raise DownloadFailed(f"{file.name}: the SHA-256 is not the {whose}'s: try the download again")


# --- The parts of the API ---


class Runs(Group[C]):
    """Runs: submitted, followed, changed; and their files."""

    @_Method
    async def submit(self, run: Run, idempotency_key: str | None = None) -> RunView:
        """Start a run. The same idempotency key always gives the same run, however often it is sent."""
        headers = {"idempotency-key": idempotency_key or f"client-{secrets.token_hex(16)}"}
        path = "/sessions" if isinstance(run, SessionRun) else "/runs"
        return await self.ask(RunView, "POST", path, body=run, headers=headers, repeats=True)

    @_Method
    async def list(
        self,
        limit: int = 50,
        *,
        after: str | None = None,
        state: State | None = None,
        kind: Kind | None = None,
        words: str | None = None,
        idle: bool | None = None,
    ) -> RunPage:
        """List runs, newest first.

        Args:
            after: the `next` of the previous page.
            words: text in the id, the name or the model.
            idle: include sessions that have waited for a command for a day.
        """
        found: dict[str, Any] = {"after": after, "state": state, "kind": kind, "words": words, "idle": idle}
        return await self.ask(RunPage, "GET", "/runs", limit=limit, **found)

    get = _by_id(RunView, "GET", "/runs/{}", "Return a run.")
    cancel = _by_id(RunView, "POST", "/runs/{}/cancel", "End a run: at its next step, with a checkpoint, or at once.")
    pause = _by_id(RunView, "POST", "/runs/{}/pause", "End a run at its next step, with a checkpoint, for a while.")
    resume = _by_id(RunView, "POST", "/runs/{}/resume", "Go on from the last checkpoint of a run that was stopped.")
    retry = _by_id(RunView, "POST", "/runs/{}/retry", "Start the request of a failed or cancelled run as a new run.")
    finish = _by_id(RunView, "POST", "/runs/{}/finish", "Let an RL run end after the steps that wait.")
    remove = _by_id(RunRemoved, "DELETE", "/runs/{}", "Remove a run that has ended. What it published stays.")
    metrics = _by_id(Metrics, "GET", "/runs/{}/metrics", "Return the metrics of every step and evaluation.")
    checkpoints = _by_id(tuple[CheckpointRef, ...], "GET", "/runs/{}/checkpoints", "List the checkpoints in the store.")
    report = _by_id(RunReport, "GET", "/runs/{}/report", "Return the reports of tokenizing and packing.")
    jobs = _by_id(tuple[JobFile, ...], "GET", "/runs/{}/jobs", "List every attempt at every job.")
    profiles = _by_id(Traces, "GET", "/runs/{}/profiles", "List the traces of a run's steps.")
    files = _by_id(tuple[FileEntry, ...], "GET", "/runs/{}/files", "List the files that a run published.")
    save_file = _file_of("/runs/{}/files/{}", "Write one file that a run published: its id, the path, the file here.")

    @_Method
    async def wait(
        self, run_id: str, timeout_s: float | None = None, progress: Callable[[RunView], object] | None = None
    ) -> RunView:
        """Wait until a run has ended or is paused, and return it. Leaving does not change the run.

        Args:
            progress: called with each new view; `show_progress` prints a line.

        Raises:
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            view = await self.ask(RunView, "GET", f"/runs/{_in_path(run_id)}")
            if progress is not None:
                progress(view)
            if view.state != "running":
                return view
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{run_id} has not ended within {timeout_s:g} s")
            await self.client.sleep(_POLL_S)

    @_Method
    async def events(
        self, run_id: str, after: str | None = None, limit: int | None = None, wait_s: float | None = None
    ) -> EventPage:
        """Return events after a cursor. `wait_s`: how long to wait for the first one."""
        path = f"/runs/{_in_path(run_id)}/events"
        return await self.ask(EventPage, "GET", path, after=after, limit=limit, wait_s=wait_s)

    @_Iteration
    async def follow(self, run_id: str, after: str | None = None, until_end: bool = True) -> AsyncIterator[RunEvent]:
        """Yield events after a cursor: all until the run ends, or those that there are now."""
        path = f"/runs/{_in_path(run_id)}"
        while True:
            ended = (await self.ask(RunView, "GET", path)).state != "running"  # first: the next page is then complete
            wait_s = _LONG_POLL_S if until_end and not ended else 0
            page = await self.ask(EventPage, "GET", f"{path}/events", after=after, wait_s=wait_s)
            for event in page.events:
                yield event
            after = page.next or after
            if not page.events and (ended or not until_end):
                return

    @_Iteration
    async def logs(self, run_id: str, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of a run's log: all until the run ends, or those that there are now."""
        path, params = f"{_API}/runs/{_in_path(run_id)}/logs", {"follow": str(follow).lower()}
        async with self.client.streamed("GET", path, params=params, timeout_s=_ONE_DAY_S) as answer:
            async for line in self.client.lines(answer):
                yield line

    @_Method
    async def steps(self, run_id: str, after: int | None = None, limit: int | None = None) -> StepPage:
        """Return train steps of an RL run that have ended. `after`: the `next` of the previous page."""
        return await self.ask(StepPage, "GET", f"/runs/{_in_path(run_id)}/steps", after=after, limit=limit)

    @_Iteration
    async def follow_steps(self, run_id: str, until_end: bool = True) -> AsyncIterator[StepStatus]:
        """Yield train steps of an RL run as they end: all until the run ends, or those that there are now."""
        after: int | None = None
        while True:
            ended = (await self.ask(RunView, "GET", f"/runs/{_in_path(run_id)}")).state != "running"
            page = await self.ask(StepPage, "GET", f"/runs/{_in_path(run_id)}/steps", after=after)
            for step in page.steps:
                yield step
            after = page.next
            if not page.has_more:
                if ended or not until_end:
                    return
                await self.client.sleep(_POLL_S)

    @_Method
    async def step(self, run_id: str, number: int, wait_s: float | None = None) -> StepStatus:
        """Return a train step. `wait_s`: how long to wait for its end, at most 60."""
        return await self.ask(StepStatus, "GET", f"/runs/{_in_path(run_id)}/steps/{number}", wait_s=wait_s)

    @_Method
    async def train(self, run_id: str, groups: str, key: str | None = None, wait_s: float = 0) -> StepStatus:
        """Send a train step to an RL run: the URI of its trajectory groups. The same key trains once."""
        body = StepSubmission(key=key or secrets.token_hex(16), groups=groups, wait_s=wait_s)
        return await self.ask(StepStatus, "POST", f"/runs/{_in_path(run_id)}/steps", body=body, repeats=True)

    @_Method
    async def rollouts(self, run_id: str, step: int, limit: int | None = None) -> tuple[GroupTexts, ...]:
        """Return the first groups of a train step as text, with their rewards."""
        path = f"/runs/{_in_path(run_id)}/steps/{step}/rollouts"
        return await self.ask(tuple[GroupTexts, ...], "GET", path, limit=limit)

    @_Method
    async def samples(
        self,
        run_id: str,
        step: int,
        of: str = "train",
        *,
        failed: bool = False,
        first: int = 0,
        limit: int | None = None,
    ) -> tuple[DrawnSample, ...]:
        """Return samples that a run drew itself, from number `first` on, with the course of their episodes.

        Args:
            of: `train`, or of an evaluation after the step `eval` or `eval_NAME`.
            failed: only episodes without a reward.
        """
        path = f"/runs/{_in_path(run_id)}/steps/{step}/samples"
        return await self.ask(tuple[DrawnSample, ...], "GET", path, of=of, failed=failed, first=first, limit=limit)

    @_Method
    async def sparklines(self, run_ids: Sequence[str]) -> dict[str, Sparkline]:
        """Return the loss, or the reward, of runs in a few dozen numbers each. Unknown runs are left out."""
        return await self.ask(dict[str, Sparkline], "GET", "/sparklines", run_id=tuple(run_ids))

    @_Method
    async def profile(self, run_id: str, steps: int = 3) -> ProfileRequest:
        """Ask for torch's trace of a run's next steps; `profiles` lists it when it is there."""
        body = AskedProfile(steps=steps)
        return await self.ask(ProfileRequest, "POST", f"/runs/{_in_path(run_id)}/profiles", body=body)

    @_Method
    async def save_profile(self, run_id: str, job_id: str, fence: str, profile_id: str, into: str | Path) -> Path:
        """Write a trace, as `profiles` lists it, for https://ui.perfetto.dev."""
        return await self.save(f"/runs/{_in_path(run_id)}/jobs/{job_id}/{fence}/profiles/{profile_id}", into)

    @_Method
    async def save_job(self, run_id: str, job_id: str, fence: str, into: str | Path) -> Path:
        """Write a job file, as `jobs` lists it, to the byte as the worker got it."""
        return await self.save(f"/runs/{_in_path(run_id)}/jobs/{job_id}/{fence}", into)

    @_Method
    async def output(self, run_id: str, job_id: str, fence: str) -> str:
        """Return the end of the output of the worker of a failed attempt."""
        path = f"{_API}/runs/{_in_path(run_id)}/jobs/{job_id}/{fence}/output"
        return (await self.client.send("GET", path)).text

    @_Method
    async def download(self, run_id: str, into: str | Path) -> tuple[FileEntry, ...]:
        """Fetch what a run published into a new folder, and check each file's hash."""
        return await self._save_folder(f"/runs/{_in_path(run_id)}/files", into)

    @_Method
    async def save_archive(self, run_id: str, into: str | Path) -> Path:
        """Write everything that a run published to a tar file."""
        return await self.save(f"/runs/{_in_path(run_id)}/download", into)

    @_Method
    async def save_checkpoint(self, run_id: str, fence: str, step: int, into: str | Path) -> Path:
        """Write a checkpoint, as `checkpoints` lists it, to a tar file; a manifest in it has the files' hashes."""
        return await self.save(f"/runs/{_in_path(run_id)}/checkpoints/{fence}/{step}/download", into)


class Files(Group[C]):
    """Uploaded files: datasets, and whatever else runs read."""

    get = _by_id(FileView, "GET", "/files/{}", "Return the record of a file.")
    delete = _by_id(FileView, "DELETE", "/files/{}", "Delete a file. A run that has not read it yet fails.")

    @_Method
    async def list(self, limit: int = 100, *, after: str | None = None) -> FilePage:
        """List files, newest first. `after`: the `next` of the previous page."""
        return await self.ask(FilePage, "GET", "/files", limit=limit, after=after)

    @_Method
    async def upload(self, path: str | Path, name: str | None = None) -> FileView:
        """Send a file; its `uri` is a dataset's. The same bytes under the same name have the same URI."""
        return (await Files.put.function(self, path, name))[0]

    @_Method
    async def put(self, path: str | Path, name: str | None = None) -> tuple[FileView, bool]:
        """Send a file as `upload` does. The second value: whether the store did not have it before."""
        path = Path(path)
        headers = {"content-length": str(path.stat().st_size)}
        options: dict[str, Any] = {"params": {"name": name or _plain_name(path.name)}, "headers": headers}
        with path.open("rb") as file:
            sent = await self.client.send(
                "POST", f"{_API}/files", content=lambda: self.client.body(file), repeats=True, **options
            )
        return _adapter(FileView).validate_json(sent.content, extra="ignore"), sent.status_code == 201

    @_Method
    async def content(self, file_id: str) -> bytes:
        """Return a file's bytes."""
        return (await self.client.send("GET", f"{_API}/files/{_in_path(file_id)}/content")).content

    @_Method
    async def download(self, file_id: str, into: str | Path) -> Path:
        """Write a file's bytes, and check their hash. The file here is complete, or absent."""
        record, target = await self.ask(FileView, "GET", f"/files/{_in_path(file_id)}"), Path(into)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            part = Path(folder) / record.name
            await self._save_checked(f"/files/{_in_path(file_id)}/content", part, record.sha256, "file")
            part.rename(target)
        return target


class Models(Group[C]):
    """Published adapters and models, and their exports. `NAME` is the newest version, `NAME:v3` one of them."""

    list = _none(tuple[ModelView, ...], "GET", "/models", "List published models: each name with its newest version.")
    get = _by_id(ModelView, "GET", "/models/{}", "Return a published version.")
    delete = _by_id(
        DeletedVersions, "DELETE", "/models/{}", "Delete a version (`NAME:v3`), or a name with all of them."
    )
    files = _by_id(tuple[FileEntry, ...], "GET", "/models/{}/files", "List the files of a version.")
    save_file = _file_of("/models/{}/files/{}", "Write one file of a version: its name, the path, the file here.")
    base_files = _by_id(tuple[FileEntry, ...], "GET", "/models/{}/base", "List the files of an adapter's base model.")
    save_base_file = _file_of("/models/{}/base/{}", "Write one file of an adapter's base model.")
    provenance = _by_id(Envelope, "GET", "/models/{}/provenance", "Return the signed statement of a version's origin.")
    public_keys = _none(tuple[PublicKey, ...], "GET", "/provenance/keys", "Return the keys that verify statements.")

    @_Method
    async def download(self, name: str, into: str | Path, export: str | None = None) -> tuple[FileEntry, ...]:
        """Fetch a version, or an export of it, into a new folder, and check each file's hash."""
        return await self._save_folder(f"{_export_path(name, export)}/files", into)

    @_Method
    async def save_archive(self, name: str, into: str | Path, export: str | None = None) -> Path:
        """Write all files of a version, or of an export of it, to a tar file."""
        return await self.save(f"{_export_path(name, export)}/download", into)

    @_Method
    async def export(self, name: str, export: Export) -> ExportView:
        """Ask for a whole model in another program's format; `get_export` says when it is there."""
        return await self.ask(ExportView, "POST", f"/models/{_in_path(name)}/exports", body=export, repeats=True)

    @_Method
    async def get_export(self, name: str, label: str) -> ExportView:
        """Return the status of an export."""
        return await self.ask(ExportView, "GET", _export_path(name, label))

    @_Method
    async def delete_export(self, name: str, label: str) -> ExportView:
        """Delete the files of an export. It can be asked for again."""
        return await self.ask(ExportView, "DELETE", _export_path(name, label))

    @_Method
    async def export_files(self, name: str, label: str) -> tuple[FileEntry, ...]:
        """List the files of an export."""
        return await self.ask(tuple[FileEntry, ...], "GET", f"{_export_path(name, label)}/files")

    @_Method
    async def save_export_file(self, name: str, label: str, file: str, into: str | Path) -> Path:
        """Write one file of an export."""
        return await self.save(f"{_export_path(name, label)}/files/{_in_path(file, safe='/')}", into)


class Schedules(Group[C]):
    """Runs that start at set times."""

    list = _none(tuple[ScheduleView, ...], "GET", "/schedules", "List schedules by name, without their actions.")
    get = _by_id(ScheduleView, "GET", "/schedules/{}", "Return a schedule, its next times and its last actions.")
    delete = _by_id(ScheduleView, "DELETE", "/schedules/{}", "Delete a schedule. Its runs stay.")
    resume = _by_id(ScheduleView, "POST", "/schedules/{}/resume", "Resume a paused schedule.", repeats=True)
    trigger = _by_id(ScheduleView, "POST", "/schedules/{}/trigger", "Start a run now, by the schedule's rules.")

    @_Method
    async def create(self, schedule: ScheduledRun) -> ScheduleView:
        """Create a schedule. The same request again is the same schedule."""
        return await self.ask(ScheduleView, "POST", "/schedules", body=schedule, repeats=True)

    @_Method
    async def pause(self, name: str, note: str | None = None) -> ScheduleView:
        """Start nothing until it is resumed."""
        return await self.ask(ScheduleView, "POST", f"/schedules/{_in_path(name)}/pause", note=note, repeats=True)

    @_Method
    async def backfill(self, name: str, span: Backfill) -> ScheduleView:
        """Start runs for the times of a span in the past."""
        return await self.ask(ScheduleView, "POST", f"/schedules/{_in_path(name)}/backfill", body=span)


class Sweeps(Group[C]):
    """Runs that differ in a few fields; the best one is published."""

    get = _by_id(SweepView, "GET", "/sweeps/{}", "Return a sweep with its trials.")
    cancel = _by_id(SweepView, "POST", "/sweeps/{}/cancel", "Start no more trials, and cancel those that are running.")

    @_Method
    async def create(self, sweep: Sweep, idempotency_key: str | None = None) -> SweepView:
        """Start a sweep. The same idempotency key gives the same sweep."""
        headers = {"idempotency-key": idempotency_key or f"client-{secrets.token_hex(16)}"}
        return await self.ask(SweepView, "POST", "/sweeps", body=sweep, headers=headers, repeats=True)

    @_Method
    async def list(self, limit: int = 20) -> tuple[SweepView, ...]:
        """List sweeps, newest first."""
        return await self.ask(tuple[SweepView, ...], "GET", "/sweeps", limit=limit)


class Webhooks(Group[C]):
    """URLs that are notified of runs."""

    list = _none(tuple[WebhookView, ...], "GET", "/webhooks", "List webhooks, oldest first.")
    get = _by_id(WebhookView, "GET", "/webhooks/{}", "Return a webhook.")
    delete = _by_id(WebhookView, "DELETE", "/webhooks/{}", "Delete a webhook and its deliveries.")
    ping = _by_id(Pinged, "POST", "/webhooks/{}/ping", "Send a `ping`; `deliveries` shows the answer.")

    @_Method
    async def create(self, webhook: WebhookChoice) -> NewWebhook:
        """Create a webhook. Only this answer shows its secret."""
        return await self.ask(NewWebhook, "POST", "/webhooks", body=webhook)

    @_Method
    async def change(self, webhook_id: str, change: WebhookChange) -> WebhookView:
        """Change a webhook. Fields that are not set stay."""
        return await self.ask(WebhookView, "PATCH", f"/webhooks/{_in_path(webhook_id)}", body=change, repeats=True)

    @_Method
    async def rotate(self, webhook_id: str, rotation: Rotation | None = None) -> NewWebhook:
        """Make a new secret, which only this answer shows. The old one also signs for a day, or as `rotation` says."""
        body = rotation or Rotation()
        return await self.ask(NewWebhook, "POST", f"/webhooks/{_in_path(webhook_id)}/rotate", body=body)

    @_Method
    async def deliveries(self, webhook_id: str, limit: int = 20) -> tuple[Delivery, ...]:
        """List deliveries and the receiver's answers, newest first."""
        path = f"/webhooks/{_in_path(webhook_id)}/deliveries"
        return await self.ask(tuple[Delivery, ...], "GET", path, limit=limit)


class Episodes(Group[C]):
    """Addresses at which agents ask a model. What they were answered can be trained on."""

    get = _by_id(EpisodeView, "GET", "/episodes/{}", "Return an episode.")
    end = _by_id(EpisodeView, "POST", "/episodes/{}/end", "End an episode. Ending it again changes nothing.")

    @_Method
    async def list(self, limit: int = 50, *, before: str | None = None) -> tuple[EpisodeView, ...]:
        """List episodes, newest first. `before`: the id of the last one of the previous page."""
        return await self.ask(tuple[EpisodeView, ...], "GET", "/episodes", limit=limit, before=before)

    @_Method
    async def turns(self, episode_id: str, first: int = 0, limit: int = 100) -> tuple[EpisodeTurnView, ...]:
        """Return an episode's turns in order, from number `first` on."""
        path = f"/episodes/{_in_path(episode_id)}/turns"
        return await self.ask(tuple[EpisodeTurnView, ...], "GET", path, first=first, limit=limit)

    @_Method
    async def begin(self, episode: EpisodeRequest) -> EpisodeView:
        """Make an episode. Only this answer has its address."""
        return await self.ask(EpisodeView, "POST", "/episodes", body=episode)


class Keys(Group[C]):
    """API keys of the tenant; for its admins."""

    list = _none(tuple[KeyView, ...], "GET", "/keys", "List keys, newest first, without their secrets.")
    revoke = _by_id(KeyView, "DELETE", "/keys/{}", "Revoke a key for good.")

    @_Method
    async def create(self, key: KeyRequest) -> NewKey:
        """Create a key. Only this answer shows it."""
        return await self.ask(NewKey, "POST", "/keys", body=key)


class Tenants(Group[C]):
    """Tenants of the installation; for admins of the first one."""

    list = _none(tuple[TenantView, ...], "GET", "/tenants", "List tenants by name.")
    usage = _by_id(TenantUsage, "GET", "/tenants/{}/usage", "Return a tenant's usage and quotas.")

    @_Method
    async def create(self, tenant: TenantRequest) -> NewTenant:
        """Create a tenant and its first key, which only this answer shows."""
        return await self.ask(NewTenant, "POST", "/tenants", body=tenant)

    @_Method
    async def set_quotas(self, tenant: str, quotas: QuotaSettings) -> TenantView:
        """Replace a tenant's quotas. Those that are not set return to the installation's."""
        return await self.ask(TenantView, "PUT", f"/tenants/{_in_path(tenant)}/quotas", body=quotas)


def _export_path(name: str, label: str | None) -> str:
    return f"/models/{_in_path(name)}" + (f"/exports/{_in_path(label)}" if label else "")


def _plain_name(name: str) -> str:
    """Replace the characters of a file name that a store refuses. The suffix stays, since it names the format."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return plain.lstrip(".-")[-128:] or "data"


# --- Sessions: a slot of a model, trained command by command ---


class Pending:
    """A command that is being sent or done. Call `result()`, or await it, to get its result."""

    def __init__(self, number: int, future: "Future[CommandResult] | asyncio.Future[CommandResult]") -> None:
        self.number = number
        self._future = future

    def result(self, timeout_s: float | None = None) -> CommandResult:
        """Wait for the command's result, for at most `timeout_s` seconds. With an `AsyncClient`, await it instead.

        Raises:
            CommandFailed: the command failed, or was dropped and must be sent again.
            ServiceError: the service refuses it, or was away for longer than the client's patience.
            TimeoutError: there is no result yet; `result` may be called again.
        """
        return self._future.result(timeout_s) if isinstance(self._future, Future) else self._future.result()

    def __await__(self) -> Generator[Any, None, CommandResult]:
        waited = asyncio.wrap_future(self._future) if isinstance(self._future, Future) else self._future
        return waited.__await__()


class Session(Group[C]):
    """A session. Its commands are numbered in the order of the calls, and done once each, in this order, even if
    requests or answers are lost. Each call returns at once. Safe to use from several threads.
    """

    def __init__(self, client: C, session_id: str, next_number: int) -> None:
        super().__init__(client)
        self.id = session_id
        self._next = next_number
        self._lock = threading.Lock()

    def forward(
        self,
        data: Sequence[Datum],
        *,
        entropy: bool = False,
        top_k: int = 0,
        adapter: bool = True,
        temperature: float = 1.0,
        share_prefixes: bool = False,
    ) -> Pending:
        """Score the data's tokens: `result().data` has log-probabilities in nats, by the weights as they are then.

        If the session's slot has a head of scalars, it has their values instead.
        """
        asked = Forward(
            data=tuple(data),
            entropy=entropy,
            top_k=top_k,
            adapter=adapter,
            temperature=temperature,
            share_prefixes=share_prefixes,
        )
        return self.send(asked)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: SessionLoss | None = None,
        *,
        temperature: float = 1.0,
        share_prefixes: bool = False,
    ) -> Pending:
        """Add the gradients of a loss over the data to what has been accumulated."""
        loss = loss or CrossEntropy()
        asked = ForwardBackward(data=tuple(data), loss=loss, temperature=temperature, share_prefixes=share_prefixes)
        return self.send(asked)

    def optim_step(
        self, learning_rate: float, optimizer: Optimizer | None = None, denominator: float | None = None
    ) -> Pending:
        """Divide the gradients, by default by the sum of weights; clip, step, zero."""
        asked = OptimStep(learning_rate=learning_rate, optimizer=optimizer or Adam(), denominator=denominator)
        return self.send(asked)

    def save_state(self, publish: bool = False) -> Pending:
        """Make the state as of the last step durable. With `publish` also publish it, as `result().adapter`."""
        return self.send(SaveState(publish=publish))

    def load_state(self, state: str, optimizer: bool = True) -> Pending:
        """Go on from a saved state, `<session or run>:step-<n>`, in place of the session's own.

        `n` is the `step` of a `save_state`'s result, or of a run's checkpoint. Accumulated gradients are dropped.
        `optimizer`: False to begin with moments of zero.
        """
        return self.send(LoadState(state=state, optimizer=optimizer))

    def send(self, asked: Asked) -> Pending:
        """Send a command with the next number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        return self.client.sessions.send(self.id, number, asked)

    @_Method
    async def status(self) -> RunView:
        """Return the session as a run: its state, phase, metrics, GPU seconds."""
        return await self.ask(RunView, "GET", f"/runs/{_in_path(self.id)}")

    @_Method
    async def close(self) -> RunView:
        """Take no more commands: the session ends after those that were sent, and its state stays."""
        return await self.ask(RunView, "POST", f"/sessions/{_in_path(self.id)}/close", repeats=True)


class Sessions(Group[C]):
    """Sessions: opened, continued, and single commands of them."""

    close = _by_id(RunView, "POST", "/sessions/{}/close", "Take no more commands.", repeats=True)

    @_Method
    async def open(self, run: SessionRun, idempotency_key: str | None = None) -> Session[C]:
        """Open a session. The same idempotency key always gives the same session."""
        headers = {"idempotency-key": idempotency_key or f"client-{secrets.token_hex(16)}"}
        view = await self.ask(RunView, "POST", "/sessions", body=run, headers=headers, repeats=True)
        return Session(self.client, view.run_id, 1)

    @_Method
    async def attach(self, session_id: str) -> Session[C]:
        """Go on with an open session, after the last command that was sent to it."""
        number = (await self.ask(RunView, "GET", f"/runs/{_in_path(session_id)}")).step + 1
        with suppress(NotFound):
            while True:
                await self.ask(CommandView, "GET", _command_path(session_id, number))
                number += 1
        return Session(self.client, session_id, number)

    @_Method
    async def list(self, limit: int = 50, *, after: str | None = None, state: State | None = None) -> RunPage:
        """List sessions, newest first. `after`: the `next` of the previous page."""
        return await self.ask(RunPage, "GET", "/sessions", limit=limit, after=after, state=state)

    @_Method
    async def command(self, session_id: str, number: int, wait_s: float | None = None) -> CommandView:
        """Return a command's state, or its result. `wait_s`: how long to wait for the result."""
        return await self.ask(CommandView, "GET", _command_path(session_id, number), wait_s=wait_s)

    def send(self, session_id: str, number: int, asked: Asked) -> Pending:
        """Send a command under a number that the caller chooses. Sending it again has no further effect."""
        return Pending(number, self.client.begun(self._result(session_id, number, asked)))

    async def _result(self, session_id: str, number: int, asked: Asked) -> CommandResult:
        path, content = f"{_API}{_command_path(session_id, number)}", asked.model_dump_json().encode()
        headers, params = {"content-type": "application/json"}, {"wait_s": _LONG_POLL_S}
        sent = await self.client.send("PUT", path, content=content, params=params, headers=headers)
        view = _adapter(CommandView).validate_json(sent.content, extra="ignore")
        while view.result is None:
            if view.state == "dropped":
                raise CommandFailed(number, "dropped", view.message or "")
            view = await self.ask(CommandView, "GET", _command_path(session_id, number), wait_s=_LONG_POLL_S)
        result: CommandResult = view.result
        if result.problem is not None:
            raise CommandFailed(number, result.problem.kind, result.problem.message)
        return result


def _command_path(session_id: str, number: int) -> str:
    return f"/sessions/{_in_path(session_id)}/commands/{number}"


# --- The clients ---


class _Api(Group[C]):
    """What is asked of the service itself."""

    whoami = _none(KeyHolder, "GET", "/whoami", "Return the tenant and the scopes of the key.")
    usage = _none(TenantUsage, "GET", "/usage", "Return the tenant's usage and quotas.")
    overview = _none(Overview, "GET", "/overview", "Return counts of runs, and positions in the queue for workers.")
    hosts = _none(tuple[QueueHosts, ...], "GET", "/hosts", "Return the hosts of each role.")

    @_Method
    async def health(self) -> Health:
        """Return whether Temporal and the store answer, also if they do not. It needs no key."""
        try:
            sent = await self.client.send("GET", f"{_API}/health", repeats=False)
        except Unreachable as error:
            if error.response is None:
                raise
            sent = error.response
        found: Health = _adapter(Health).validate_json(sent.content, extra="ignore")
        return found

    @_Method
    async def validate(self, request: PreviewRequest) -> Preview:
        """Count what a dataset's rows become, and say why a run would refuse them. Shows no rows."""
        return await self.ask(Preview, "POST", "/validate", body=request, timeout_s=_PREVIEW_S)

    @_Method
    async def preview(self, request: PreviewRequest) -> Preview:
        """Return the first rows of a dataset as a model will see them, and a report."""
        return await self.ask(Preview, "POST", "/preview", body=request, timeout_s=_PREVIEW_S)

    @_Method
    async def estimate(self, run: Run) -> Estimate:
        """Return the steps, tokens, time and cost of a run, without starting it."""
        return await self.ask(Estimate, "POST", "/estimate", body=run, timeout_s=_PREVIEW_S, repeats=True)

    @_Method
    async def grade(self, grader: Grader, sample: SampledItem | None = None) -> OneGrade:
        """Grade a sample, or say why it has no grade; without a sample, check that the grader can be used."""
        body = GraderTrial(grader=grader, sample=sample)
        return await self.ask(OneGrade, "POST", "/graders/run", body=body, timeout_s=_PREVIEW_S)

    @_Method
    async def audit(self, limit: int = 100, *, before: int | None = None, everybody: bool | None = None) -> AuditPage:
        """Return changes and refusals, newest first; for admins. `before`: the `next` of the previous page."""
        return await self.ask(AuditPage, "GET", "/audit", limit=limit, before=before, everybody=everybody)

    @_Method
    async def collect_garbage(self, dry_run: bool = True, wait_s: float = 60) -> GarbageView:
        """Delete objects that the policies expire, or report them; for operators. A repeated call joins."""
        timeout_s = wait_s + _LONG_POLL_S
        return await self.ask(
            GarbageView, "POST", "/gc", timeout_s=timeout_s, repeats=True, dry_run=dry_run, wait_s=wait_s
        )

    @_Method
    async def decode_payloads(self, payloads: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Open payloads of Temporal's, as its remote codecs do; for operators."""
        found = await _Api.call.function(self, "POST", "/codec/decode", json={"payloads": list(payloads)})
        return tuple(found["payloads"])

    @_Method
    async def call(self, /, method: str, path: str, **options: Any) -> Any:
        """Call any route below /api/v1, or one that begins with /v1, and return its JSON. `options`: httpx' own."""
        whole = path if path.startswith(("/v1/", _API)) else f"{_API}{path}"
        sent = await self.client.send(method, whole, **options)
        return json.loads(sent.content or b"null")

    @_Iteration
    async def chat(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Ask a published model by OpenAI's protocol, and yield the chunks of its answer as they are drawn."""
        body = request | {"stream": True}
        async with self.client.streamed("POST", "/v1/chat/completions", json=body, timeout_s=_ONE_DAY_S) as answer:
            async for line in self.client.lines(answer):
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if error := chunk.get("error"):
                        raise ServiceError(answer.status_code, str(error["message"]))
                    yield chunk


class _Connected(_Api[C]):
    """The base of both clients: requests that are repeated, and the groups of methods. Not to be used by itself."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        patience_s: float = 600.0,
        timeout_s: float = _ANSWER_S,
        traceparent: str | None = None,
    ) -> None:
        """
        Args:
            url: the service, as http://host:port; if None, it and the key are found as docs/cli.md describes.
            key: an API key.
            patience_s: how long a call is repeated while the service is away or too busy.
            timeout_s: how long a service that was reached may be silent.
            traceparent: W3C's header of the trace that calls which change something belong to.
        """
        super().__init__(cast(C, self))
        if url is None:
            found = find_address(None, key, os.environ.get("LONGSHORE_PROFILE"))
            url, key = found.url, found.key
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._trace = {"traceparent": traceparent} if traceparent else {}
        self._timeout_s = timeout_s
        self._open(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s)),
            # A proxy from the environment has no business between a user and their own machine's service.
            trust_env=not _is_loopback(self.url),
        )
        client = cast(C, self)
        self.runs = Runs(client)
        self.files = Files(client)
        self.models = Models(client)
        self.sessions = Sessions(client)
        self.schedules = Schedules(client)
        self.sweeps = Sweeps(client)
        self.webhooks = Webhooks(client)
        self.episodes = Episodes(client)
        self.keys = Keys(client)
        self.tenants = Tenants(client)

    def _open(self, **options: Any) -> None:
        """Make `http`, by httpx' options."""
        raise NotImplementedError

    async def send(
        self,
        method: str,
        path: str,
        *,
        repeats: bool | None = None,
        timeout_s: float | None = None,
        stream: bool = False,
        content: bytes | Callable[[], Any] | None = None,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Send a request, again while the service is away or too busy, for as long as the client is patient.

        A request that may have arrived is only sent again if that is as good as once (`repeats`). Raises ServiceError.
        """
        client, repeats = self.client, method in ("GET", "PUT") if repeats is None else repeats
        # A run that is waited for is looked at again and again: that is not part of a caller's trace.
        headers = {**(self._trace if method != "GET" else {}), **(headers or {})}
        wait_s = timeout_s or max(self._timeout_s, options.get("params", {}).get("wait_s", 0) + _ANSWER_S)
        options["timeout"] = httpx.Timeout(wait_s, connect=min(_CONNECT_S, wait_s))
        give_up_at, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                body = content() if callable(content) else content
                request = client.http.build_request(method, path, content=body, headers=headers, **options)
                answer = await client.exchange(request, stream)
                if not answer.is_error:
                    return answer
                await client.read(answer)
                problem = _refusal(answer)
                is_safe = repeats or answer.status_code == 429
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise ServiceError(
                    0, f"{self.url} is no address of a service: {error}; give http://host:port"
                ) from None
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                problem = Unreachable(0, f"no Longshore service answers at {self.url}: {reason}")
                is_safe = repeats or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            passes = isinstance(problem, Unreachable) or (isinstance(problem, TooMany) and not problem.is_quota)
            if not (passes and is_safe) or time.monotonic() > give_up_at:
                raise problem
            await client.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    @asynccontextmanager
    async def streamed(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """Yield an answer whose body is read as it arrives."""
        answer = await self.send(method, path, stream=True, **options)
        try:
            yield answer
        finally:
            await self.client.close_answer(answer)


class Client(_Connected["Client"]):
    """A connection to a Longshore service. Safe to use from several threads."""

    def _open(self, **options: Any) -> None:
        self.http = httpx.Client(**options)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="longshore")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Runs and sessions continue: `client.sessions.attach` continues a session."""
        self._threads.shutdown(cancel_futures=True)
        self.http.close()

    def bound(self, made: Callable[..., Any]) -> Any:
        return lambda *arguments, **named: _finished(made(*arguments, **named))

    def iterated(self, made: Callable[..., Any]) -> Any:
        def steps(*arguments: Any, **named: Any) -> Iterator[Any]:
            found = made(*arguments, **named)
            try:
                while True:
                    try:
                        item = _finished(found.__anext__())
                    except StopAsyncIteration:
                        return
                    yield item
            finally:
                _finished(found.aclose())

        return steps

    def begun(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return self._threads.submit(_finished, coroutine)

    async def exchange(self, request: httpx.Request, stream: bool) -> httpx.Response:
        return self.http.send(request, stream=stream)

    async def read(self, answer: httpx.Response) -> None:
        answer.read()

    async def close_answer(self, answer: httpx.Response) -> None:
        answer.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def chunks(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        with _told(self.url):
            for chunk in answer.iter_bytes(_CHUNK_BYTES):
                yield chunk

    async def lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        with _told(self.url):
            for line in answer.iter_lines():
                yield line

    def body(self, file: BinaryIO) -> Iterable[bytes]:
        file.seek(0)
        return iter(lambda: file.read(_CHUNK_BYTES), b"")


class AsyncClient(_Connected["AsyncClient"]):
    """A connection to a Longshore service, for coroutines of one event loop."""

    def _open(self, **options: Any) -> None:
        self.http = httpx.AsyncClient(**options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Runs and sessions continue: `client.sessions.attach` continues a session."""
        await self.http.aclose()

    def bound(self, made: Callable[..., Any]) -> Any:
        return made

    iterated = bound

    def begun(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        return asyncio.ensure_future(coroutine)

    async def exchange(self, request: httpx.Request, stream: bool) -> httpx.Response:
        return await self.http.send(request, stream=stream)

    async def read(self, answer: httpx.Response) -> None:
        await answer.aread()

    async def close_answer(self, answer: httpx.Response) -> None:
        await answer.aclose()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def chunks(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        with _told(self.url):
            async for chunk in answer.aiter_bytes(_CHUNK_BYTES):
                yield chunk

    async def lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        with _told(self.url):
            async for line in answer.aiter_lines():
                yield line

    async def body(self, file: BinaryIO) -> AsyncIterator[bytes]:
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Raise an error in the middle of an answer as ServiceError."""
    try:
        yield
    except httpx.HTTPError as error:
        raise Unreachable(0, f"{url}: the answer broke off: {error or type(error).__name__}") from None


def _is_loopback(url: str) -> bool:
    try:
        return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
    except httpx.InvalidURL:
        return False


def show_progress(view: RunView) -> None:
    """Print a run's phase, steps and loss to stderr: one line that is rewritten on a terminal, else a line each time
    that the phase changes or the run has done a tenth of its steps."""
    steps = f" {view.step}/{view.num_steps or '?'}" if view.step or view.num_steps else ""
    loss = next((f" {name} {view.metrics[name]:.4g}" for name in ("reward_mean", "loss") if name in view.metrics), "")
    line = f"{view.run_id}: {view.phase.replace('_', ' ') if view.state == 'running' else view.state}{steps}{loss}"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}" + ("" if view.state == "running" else "\n"))
    else:
        tenth = view.step * 10 // view.num_steps if view.num_steps else 0
        if _shown.get(view.run_id) != (said := (view.state, view.phase, tenth)):
            sys.stderr.write(f"{line}\n")
        _shown[view.run_id] = said
    if view.state != "running":
        _shown.pop(view.run_id, None)
    sys.stderr.flush()


_shown: dict[str, tuple[str, str, int]] = {}
