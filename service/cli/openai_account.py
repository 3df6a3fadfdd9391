"""An account at OpenAI, read by its API: fine-tuning jobs, names of checkpoints, files.

The server is not trusted: bytes, pages, and the form of every id are limited here.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Self, TypeVar

import httpx
from pydantic import BaseModel, Field, JsonValue, ValidationError

from service.cli.render import NOT_FOUND, USAGE, Stop
from shared.field_rules import first_rule

_MAX_JOBS, _MAX_CHECKPOINTS = 10_000, 1000
_MAX_ANSWER_BYTES = 16 << 20
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


class TheirCheckpoint(BaseModel):
    id: Id
    fine_tuned_model_checkpoint: _Name


class TheirFile(BaseModel):
    """`bytes`: the file's size according to the server."""

    id: Id
    filename: Annotated[str, Field(max_length=1024)]
    bytes: int = Field(ge=0)


class _Page(BaseModel):
    data: list[JsonValue] = Field(max_length=1000)
    has_more: bool = False


T = TypeVar("T", TheirJob, TheirCheckpoint, TheirFile)


class Account:
    """Reads an account. Every error is a Stop; a missing object is a Stop with NOT_FOUND."""

    def __init__(self, base_url: str, key: str, max_file_bytes: int) -> None:
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise Stop(f"{base_url}: {error}", USAGE) from None
        if url.scheme != "https" and not (url.scheme == "http" and url.host in _LOOPBACK):
            raise Stop(f"{base_url}: a key is sent by https alone", USAGE)
        headers = {"authorization": f"Bearer {key}", "accept-encoding": "identity"}
        self._http = httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S)
        self._max_file_bytes = max_file_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def jobs(self) -> list[TheirJob]:
        """Return all fine-tuning jobs, the oldest first."""
        return list(self._listed("/fine_tuning/jobs", TheirJob, _MAX_JOBS))[::-1]

    def checkpoints(self, job_id: str) -> list[str]:
        """Return the names under which a job's checkpoints are asked."""
        found = self._listed(f"/fine_tuning/jobs/{job_id}/checkpoints", TheirCheckpoint, _MAX_CHECKPOINTS)
        return [each.fine_tuned_model_checkpoint for each in found]

    def file(self, file_id: str) -> TheirFile:
        """Return a file's record. Raises Stop if it is longer than is taken."""
        path = f"/files/{file_id}"
        found = _parsed(TheirFile, b"".join(self._body(path, {}, _MAX_ANSWER_BYTES)), path)
        if found.bytes > self._max_file_bytes:
            raise Stop(f"{file_id} has {found.bytes:,} bytes, and {self._max_file_bytes:,} are read: --max-file-bytes")
        return found

    def read(self, file_id: str, target: BinaryIO) -> None:
        """Write a file's bytes. Raises Stop if they exceed the limit, whatever size its record has."""
        for chunk in self._body(f"/files/{file_id}/content", {}, self._max_file_bytes):
            target.write(chunk)

    def _listed(self, path: str, kind: type[T], most: int) -> Iterator[T]:
        seen: set[str] = set()
        after: dict[str, Any] = {}
        while True:
            page = _parsed(_Page, b"".join(self._body(path, {"limit": 100, **after}, _MAX_ANSWER_BYTES)), path)
            for row in page.data:
                item = _parsed(kind, row, path)
                if item.id in seen:
                    raise Stop(f"{path}: {item.id} is listed twice: the pages run in a circle")
                seen.add(item.id)
                if len(seen) > most:
                    raise Stop(f"{path}: more than {most:,} are listed")
                yield item
                after = {"after": item.id}
            if not page.has_more or not page.data:
                return

    def _body(self, path: str, params: dict[str, Any], most: int) -> Iterator[bytes]:
        try:
            with self._http.stream("GET", path, params=params) as answer:
                if answer.status_code != httpx.codes.OK:
                    code = NOT_FOUND if answer.status_code == httpx.codes.NOT_FOUND else 100
                    raise Stop(f"{path}: {answer.status_code}: {_told(answer)}", code)
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise Stop(f"{path}: the answer is compressed, which was not asked for")
                num_bytes = 0
                for chunk in answer.iter_raw():
                    num_bytes += len(chunk)
                    if num_bytes > most:
                        raise Stop(f"{path}: the answer has more than {most:,} bytes")
                    yield chunk
        except httpx.HTTPError as error:
            raise Stop(f"{self._http.base_url}: {error or type(error).__name__}") from None


def printable(text: str) -> str:
    """Return a text of a stranger's that may be written to a terminal."""
    return _UNPRINTABLE.sub("?", text)[:300]


def _told(answer: httpx.Response) -> str:
    for chunk in answer.iter_raw(1024):
        return printable(chunk.decode(errors="replace"))
    return ""


M = TypeVar("M", bound=BaseModel)


def _parsed(kind: type[M], given: Any, path: str) -> M:
    try:
        return kind.model_validate_json(given) if isinstance(given, bytes) else kind.model_validate(given)
    except ValidationError as error:
        raise Stop(f"{path}: this is no answer of OpenAI's API: {printable(first_rule(error))}") from None
