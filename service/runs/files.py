"""Reads a run's files in the store, other than its events: job files, workers' output, reports, rollouts as text."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from longshore.fields import Artifact, Frozen
from service.accounts.tenants import Quotas
from service.errors import Conflict
from service.files import PublishedFiles
from shared.chat.trajectories import ChatTrajectory, SentGroup, Trajectory
from shared.errors import InvalidInput, NotFound, StoreUnavailable
from shared.jobs.job import Job
from shared.jobs.packed import PlanHeader
from shared.runs.status import RunStatus, StepStatus
from shared.settings import S3Settings
from shared.storage import artifacts
from shared.storage.files import ProfileRequest
from shared.storage.paths import MANIFEST, Fence, RunKeys
from shared.storage.store import ObjectStore, open_uri

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_READ_BYTES = 4 << 20
_MOST_CHARACTERS = 8000
_MOST_SAMPLES = 16
_MOST_TRACES = 8
_TRACE = re.compile(r"profile-([0-9a-f]{16})\.json\.gz")
_report: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
Decode = Callable[[list[int]], str]


class JobFile(Frozen):
    """One attempt at a job. `has_output`: its worker's last output was stored, which happens if it fails."""

    job_id: str
    fence: str
    has_job: bool = False
    has_output: bool = False


class RunReport(Frozen):
    """Reports on a run's data. `dataset`: the tokenizing's own report (of an RL run: of its last step's groups).

    None: it is not there yet.
    """

    dataset: dict[str, JsonValue] | None = None
    packing: PlanHeader | None = None


class SampleText(Frozen):
    """One trajectory as text. `is_cut`: not all of it is shown."""

    text: str
    reward: float
    num_tokens: int | None = None
    finish_reason: str | None = None
    is_cut: bool = False


class GroupTexts(Frozen):
    """The trajectories of one prompt. `prompt`: the tokens before the first sampled one."""

    prompt: str
    samples: tuple[SampleText, ...]
    place: str | None = None


class Trace(Frozen):
    """A trace of steps, of one attempt at a job: Chrome's JSON, as gzip, for Perfetto."""

    profile_id: str
    job_id: str
    fence: str
    num_bytes: int


class Traces(Frozen):
    """A run's traces, and the one that is waited for."""

    asked: ProfileRequest | None
    traces: tuple[Trace, ...]


class RunFiles:
    """Reads a run's files. Blocking: call it from a thread. The caller has checked who owns the run."""

    def __init__(self, store: ObjectStore, s3: S3Settings, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas
        self._s3 = s3
        self._tokenizer = lru_cache(maxsize=4)(self._read_tokenizer)
        self._report_at = lru_cache(maxsize=256)(self._at)  # lists of jobs ask for the same ones again and again

    def jobs(self, run_id: str) -> tuple[JobFile, ...]:
        """Attempts at jobs, in order of job, then of fence."""
        logs = f"{RunKeys(run_id).logs}/"
        found: dict[tuple[str, str], set[str]] = {}
        for info in self._store.list(logs):
            job_id, fence, name = info.key.removeprefix(logs).split("/", 2)
            found.setdefault((job_id, fence), set()).add(name)
        return tuple(
            JobFile(job_id=job_id, fence=fence, has_job="job.json" in names, has_output="output.log" in names)
            for (job_id, fence), names in sorted(found.items())
        )

    def job(self, run_id: str, job_id: str, fence: str) -> bytes:
        """The job file, to the byte. Raises NotFound."""
        return self._store.get_bytes(RunKeys(run_id).job(job_id, _fence(fence)))

    def output(self, run_id: str, job_id: str, fence: str) -> bytes:
        """The end of a worker's stdout and stderr. Raises NotFound."""
        return self._store.get_bytes(RunKeys(run_id).output(job_id, _fence(fence)))

    def report(self, status: RunStatus) -> RunReport:
        """The dataset's report and the newest plan's header, as far as they are there."""
        dataset, packing = self.dataset(status), None
        job = self._newest_job(status.run_id)
        if job is not None and job.plan.packed:
            packing = PlanHeader.model_validate_json(self._at(f"{job.plan.packed[0].plan.uri}/plan.json"))
        return RunReport(dataset=dataset, packing=packing)

    def dataset(self, status: RunStatus) -> dict[str, JsonValue] | None:
        """The dataset's report, once it is tokenized."""
        return None if status.dataset_report is None else _report.validate_json(self._report_at(status.dataset_report))

    async def ask_profile(self, tenant: str, run_id: str, steps: int) -> ProfileRequest:
        """Ask for a trace of a running run's next steps. To be awaited, as it counts the request's bytes.

        Raises:
            Conflict: one is asked for, or there are enough.
            QuotaExceeded
        """
        if len((await asyncio.to_thread(self.traces, run_id)).traces) >= _MOST_TRACES:
            raise Conflict(f"the run has {_MOST_TRACES} traces, the most that are kept")
        request = ProfileRequest(profile_id=secrets.token_hex(8), steps=steps)
        data = request.model_dump_json().encode()
        put = partial(self._store.put_if_absent, RunKeys(run_id).profile_request, data)
        if not await self._quotas.put_noted(tenant, run_id, "profile", data, put):
            raise Conflict("a trace of this run is waited for already")
        return request

    def traces(self, run_id: str) -> Traces:
        """A run's traces, in order of jobs."""
        keys = RunKeys(run_id)
        found = []
        for info in self._store.list(f"{keys.logs}/"):
            job_id, fence, name = info.key.removeprefix(f"{keys.logs}/").split("/", 2)
            if match := _TRACE.fullmatch(name):
                found.append(Trace(profile_id=match[1], job_id=job_id, fence=fence, num_bytes=info.size))
        asked = None
        with suppress(NotFound):
            asked = ProfileRequest.model_validate_json(self._store.get_bytes(keys.profile_request))
        return Traces(asked=asked, traces=tuple(found))

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
        return PublishedFiles(self._store, key, data, artifacts.Manifest.model_validate_json(data))

    def rollouts(self, run_id: str, step: StepStatus, limit: int) -> tuple[GroupTexts, ...]:
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


def _texts(group: SentGroup, decode: Decode) -> GroupTexts:
    samples = [_sample(one, decode) for one in group.trajectories[:_MOST_SAMPLES]]
    place = group.metadata.get("place")
    return GroupTexts(
        prompt=_prompt(group.trajectories[0], decode)[-_MOST_CHARACTERS:],
        samples=tuple(samples),
        place=place if isinstance(place, str) else None,
    )


def _prompt(one: Trajectory | ChatTrajectory, decode: Decode) -> str:
    match one:
        case Trajectory():
            return decode(list(one.token_ids[: _first_sampled(one)]))
        case ChatTrajectory():
            return "\n".join(_turns(one.messages[:-1]))


def _sample(one: Trajectory | ChatTrajectory, decode: Decode) -> SampleText:
    match one:
        case Trajectory():
            text = decode(list(one.token_ids[_first_sampled(one) :]))
            shown = SampleText(text="", reward=one.reward, num_tokens=sum(one.sampled), finish_reason=one.finish_reason)
        case ChatTrajectory():
            text, shown = "\n".join(_turns(one.messages[-1:])), SampleText(text="", reward=one.reward)
    return shown.model_copy(update={"text": text[:_MOST_CHARACTERS], "is_cut": len(text) > _MOST_CHARACTERS})


def _first_sampled(one: Trajectory) -> int:
    return one.sampled.index(True) if True in one.sampled else len(one.sampled)


def _turns(messages: tuple[dict[str, Any], ...]) -> Iterator[str]:
    for choice in messages:
        message = choice.get("message", choice)
        message = message if isinstance(message, dict) else {}
        content = message.get("content")
        yield f"{message.get('role', '?')}: {content if isinstance(content, str) else json.dumps(content)}"
