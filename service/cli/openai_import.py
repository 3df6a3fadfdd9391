"""Import of an account's fine-tuning jobs at OpenAI: they are read by its API, and started here."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, JsonValue, ValidationError

from longshore.client import Client, ServiceError
from service.cli.command import FAILED, NOT_FOUND, USAGE, Stop, stop_of
from shared.field_rules import first_rule

# --- The account: jobs, names of checkpoints, files ---

_TIMEOUT_S = 60.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class TheirJob(BaseModel):
    """A fine-tuning job in OpenAI's API. `method` is null for old jobs, which have `hyperparameters` instead."""

    id: Id
    model: _Name
    status: _Name
    training_file: Id
    validation_file: Id | None = None
    method: dict[str, JsonValue] | None = None
    hyperparameters: dict[str, JsonValue] | None = None
    seed: int | None = None
    fine_tuned_model: _Name | None = None
    user_provided_suffix: _Name | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    integrations: list[JsonValue] | None = None

    @property
    def suffix(self) -> str | None:
        """The suffix that it was asked for: `ft:<model>:<organisation>:<suffix>:<id>`."""
        parts = (self.fine_tuned_model or "").split(":")
        return self.user_provided_suffix or (parts[3] if len(parts) == 5 and parts[3] else None)


class TheirFile(BaseModel):
    """`bytes`: the file's size according to the server."""

    filename: str
    bytes: int


class _Page(BaseModel):
    data: list[dict[str, JsonValue]]
    has_more: bool = False


M = TypeVar("M", bound=BaseModel)


class Account:
    """Reads an account. Every error is a Stop; a missing object is a Stop with NOT_FOUND."""

    def __init__(self, base_url: str, key: str, max_file_bytes: int) -> None:
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise Stop(f"{base_url}: {error}", USAGE) from None
        if url.scheme != "https" and not (url.scheme == "http" and url.host in _LOOPBACK):
            raise Stop(f"{base_url}: a key is sent by https alone", USAGE)
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S)
        self._max_file_bytes = max_file_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def jobs(self) -> list[TheirJob]:
        """Return all fine-tuning jobs, the oldest first."""
        path = "/fine_tuning/jobs"
        return [_parsed(path, TheirJob.model_validate, row) for row in self._listed(path)][::-1]

    def checkpoints(self, job_id: str) -> list[str]:
        """Return the names under which a job's checkpoints are asked."""
        found = self._listed(f"/fine_tuning/jobs/{job_id}/checkpoints")
        return [str(each.get("fine_tuned_model_checkpoint")) for each in found]

    def name_of(self, file_id: str) -> str:
        """Return a file's name. Raises Stop if the file is longer than is taken."""
        found = self._read(f"/files/{file_id}", {}, TheirFile)
        if found.bytes > self._max_file_bytes:
            raise Stop(f"{file_id} has {found.bytes:,} bytes, and {self._max_file_bytes:,} are read: --max-file-bytes")
        return found.filename

    def read(self, file_id: str, target: BinaryIO) -> None:
        """Write a file's bytes. Raises Stop if they exceed the limit, whatever size its record has."""
        for chunk in self._body(f"/files/{file_id}/content", {}):
            target.write(chunk)
            if target.tell() > self._max_file_bytes:
                raise Stop(f"{file_id} has more than {self._max_file_bytes:,} bytes: --max-file-bytes")

    def _listed(self, path: str) -> Iterator[dict[str, JsonValue]]:
        page, after = _Page(data=[], has_more=True), dict[str, JsonValue]()
        while page.has_more:
            page = self._read(path, {"limit": 100, **after}, _Page)
            yield from page.data
            after = {"after": page.data[-1].get("id")} if page.data else {}

    def _read(self, path: str, params: dict[str, JsonValue], kind: type[M]) -> M:
        return _parsed(path, kind.model_validate_json, b"".join(self._body(path, params)))

    def _body(self, path: str, params: dict[str, Any]) -> Iterator[bytes]:
        try:
            with self._http.stream("GET", path, params=params) as answer:
                if answer.is_error:
                    code = NOT_FOUND if answer.status_code == httpx.codes.NOT_FOUND else FAILED
                    told = printable(answer.read().decode(errors="replace"))
                    raise Stop(f"{path}: {answer.status_code}: {told}", code)
                yield from answer.iter_bytes()
        except httpx.HTTPError as error:
            raise Stop(f"{self._http.base_url}: {error or type(error).__name__}") from None


def _parsed(path: str, parse: Callable[[Any], M], given: Any) -> M:
    try:
        return parse(given)
    except ValidationError as error:
        raise Stop(f"{path}: this is no answer of OpenAI's API: {printable(first_rule(error))}") from None


def printable(text: str) -> str:
    """Return a text of a stranger's that may be written to a terminal."""
    return _UNPRINTABLE.sub("?", text)[:300]


# --- Jobs here for those there ---

State = Literal["started", "would start", "imported before", "waits", "no counterpart", "left out"]
_MARK = "openai_job"
_UPLOAD_S = 3600.0
_PLAIN = ("n_epochs", "batch_size", "learning_rate_multiplier")
# Hyperparameters that a method has here, by the names that they have there.
_KNOWN = {
    "supervised": _PLAIN,
    "dpo": (*_PLAIN, "beta"),
    "reinforcement": (*_PLAIN, "compute_multiplier", "eval_interval", "eval_samples"),
}
_SAYS_NOTHING = (None, "auto", "default")


@dataclass
class Imported:
    """What became of one job. `left_out`: its settings that have no counterpart here."""

    job: str
    state: State
    why: str = ""
    model: str | None = None
    run: str | None = None
    left_out: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)


def notes(imported: Imported) -> list[str]:
    left_out = [f"without {', '.join(imported.left_out)}"] if imported.left_out else []
    return [*([imported.why] if imported.why else []), *left_out]


def named_models(given: "list[str] | tuple[str, ...]") -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if not all(theirs and ours for theirs, _, ours in pairs):
        raise Stop("--model: give a name of OpenAI's and one of ours, as gpt-4.1-mini-2025-04-14=Qwen/Qwen3-8B", USAGE)
    return {theirs: ours for theirs, _, ours in pairs}


class _NotStarted(Exception):
    """A job that is not started here: its state in the report, and why."""

    def __init__(self, why: str, state: State = "no counterpart") -> None:
        super().__init__(why)
        self.state = state


class AccountImport:
    """One import of an account."""

    def __init__(self, client: Client, account: Account, models: Mapping[str, str], is_dry: bool) -> None:
        self._client = client
        self._account = account
        self._models = models
        self._is_dry = is_dry
        self._ours: dict[str, dict[str, Any] | None] = {}  # jobs here, by the names of the models that theirs made
        self._uploaded: dict[str, str] | None = None

    def all(self, wanted: list[str] | None) -> list[Imported]:
        """Import the jobs that succeeded, oldest first, since a job may start from an older one's model."""
        jobs = self._account.jobs()
        if missing := sorted(set(wanted or ()) - {each.id for each in jobs}):
            raise Stop(f"--job: the account has no job {', '.join(missing)}", NOT_FOUND)
        return [self._one(each) for each in jobs if wanted is None or each.id in wanted]

    def _one(self, job: TheirJob) -> Imported:
        if job.status != "succeeded":
            return Imported(job.id, "left out", f"its status is {printable(job.status)}")
        checkpoints = [printable(name) for name in self._account.checkpoints(job.id)]
        found = Imported(job.id, "imported before", checkpoints=checkpoints)
        ours = self._found(job)
        try:
            if ours is None:
                body, found.left_out = translated(job, self._model_of(job))
                found.state, found.model = "would start", body["model"]
                if not self._is_dry:
                    ours = self._started(job, body)
                    found.state = "started"
        except _NotStarted as reason:
            return Imported(job.id, reason.state, str(reason), checkpoints=checkpoints)
        except (Stop, ServiceError) as refusal:
            stop = stop_of(refusal) if isinstance(refusal, ServiceError) else refusal
            if stop.advice:  # of the service or the key, and not of this job
                raise
            return Imported(job.id, "no counterpart", printable(stop.message), checkpoints=checkpoints)
        if ours is not None:
            found.model, found.run = ours["model"], ours["id"]
        if job.fine_tuned_model:
            self._ours[job.fine_tuned_model] = ours
        return found

    def _started(self, job: TheirJob, body: dict[str, Any]) -> dict[str, Any]:
        for place in ("training_file", "validation_file"):
            if body.get(place):
                body[place] = self._file(body[place])
        headers = {"idempotency-key": f"openai-{job.id}"}
        ours: dict[str, Any] = self._client.call("POST", "/v1/fine_tuning/jobs", json=body, headers=headers)
        return ours

    def _found(self, job: TheirJob) -> dict[str, Any] | None:
        """Return the job here that an earlier import has started."""
        page = self._client.call("GET", "/v1/fine_tuning/jobs", params={"limit": 1, f"metadata[{_MARK}]": job.id})
        return page["data"][0] if page["data"] else None

    def _model_of(self, job: TheirJob) -> str:
        theirs = job.model
        if theirs in self._models:
            return self._models[theirs]
        if theirs in self._ours:
            ours = self._ours[theirs]
            if ours is None or not ours["fine_tuned_model"]:  # told when it has succeeded
                name = ours["id"] if ours else printable(theirs)
                raise _NotStarted(f"it goes on from what {name} makes: import again when that has succeeded", "waits")
            return str(ours["fine_tuned_model"])
        if theirs.startswith("ft:"):
            raise _NotStarted(f"it goes on from {printable(theirs)}, which no imported job makes")
        raise _NotStarted(f"say what is trained in the place of its model: --model {printable(theirs)}=...")

    def _file(self, file_id: str) -> str:
        """Return the id here of a file at OpenAI. It is copied once: its name contains the original's id."""
        name = f"{file_id}-{_plain(self._account.name_of(file_id))}"
        if self._uploaded is None:
            page = self._client.call("GET", "/v1/files", params={"purpose": "fine-tune"})
            self._uploaded = {each["filename"]: each["id"] for each in page["data"]}
        if name not in self._uploaded:
            with tempfile.TemporaryFile() as copy:
                self._account.read(file_id, copy)
                copy.seek(0)
                form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": (name, copy)}}
                self._uploaded[name] = self._client.call("POST", "/v1/files", **form, timeout_s=_UPLOAD_S)["id"]
        return self._uploaded[name]


def translated(job: TheirJob, model: str) -> tuple[dict[str, Any], list[str]]:
    """Return a job's request here, with their ids of files, and the settings that it is without.

    Raises:
        _NotStarted: its method is none that there is here.
    """
    method: dict[str, Any] = dict(job.method or {"type": "supervised"})
    kind = method.get("type")
    if kind not in _KNOWN:
        raise _NotStarted(f"there is no method {printable(str(kind))}")
    settings = method.get(kind)
    settings = dict(settings) if isinstance(settings, dict) else {}
    of_method = settings.pop("hyperparameters", None)
    given = (of_method if isinstance(of_method, dict) else None) or job.hyperparameters or {}
    known = {name: given[name] for name in _KNOWN[kind] if given.get(name) is not None}
    ours: dict[str, Any] = {"hyperparameters": known}
    if kind == "reinforcement":
        ours["grader"] = settings.pop("grader", None)
    left_out = [f"{kind}.{printable(name)}" for name, value in settings.items() if value not in _SAYS_NOTHING]
    left_out += [printable(name) for name in given if name not in known and given[name] not in _SAYS_NOTHING]
    left_out += ["integrations"] if job.integrations else []
    metadata = dict(list((job.metadata or {}).items())[:15])
    left_out += ["a pair of metadata"] if len(metadata) < len(job.metadata or {}) else []
    body = {
        "model": model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "suffix": job.suffix,
        "seed": job.seed,
        "method": {"type": kind, kind: ours},
        "metadata": metadata | {_MARK: job.id},
    }
    return {name: value for name, value in body.items() if value is not None}, left_out


def _plain(name: str) -> str:
    """Return the last part of a file's name, with _ for anything other than letters, digits, dots and dashes."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in last)[-80:] or "data.jsonl"
