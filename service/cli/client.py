"""A typed client of the native API."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx
from pydantic import TypeAdapter

from service.cli.render import FAILED, NOT_FOUND, ServiceRefused, Stop, Unreachable
from service.runs.views import EventPage, RunPage, RunView, StepPage
from shared.runs.events import RunEvent
from shared.runs.requests import Run
from shared.runs.status import StepStatus

if TYPE_CHECKING:
    from service.runs.estimates import Estimate
    from shared.grading import Grader
    from shared.runs.previews import Preview, PreviewRequest

T = TypeVar("T")
_CHUNK_BYTES = 1 << 20
_RETRY_EVERY_S = 0.5
_LONG_POLL_S = 10.0
_STEP_POLL_S = 1.0
_TIMEOUT_S = 60.0
_CONNECT_S = 5.0
_PREVIEW_TIMEOUT_S = 310.0


class CliClient:
    """Call the native API. Errors are `Stop`s: 404 with its own exit code, an absent service `Unreachable`."""

    def __init__(
        self,
        api_url: str,
        api_key: str | None,
        patience_s: float = 2.0,
        timeout_s: float = _TIMEOUT_S,
        traceparent: str | None = None,
    ) -> None:
        """
        Args:
            patience_s: how long calls that may be repeated are repeated while the service is away.
            timeout_s: how long a service that was reached may be silent.
            traceparent: W3C's header of the trace for calls that change something.
        """
        self._patience_s = patience_s
        self.api_url = api_url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._trace = {"traceparent": traceparent} if traceparent else {}
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        # A proxy from the environment has no business between a user and their own machine's service.
        self._http = httpx.Client(
            base_url=self.api_url, headers=headers, timeout=timeout, trust_env=not _is_loopback(self.api_url)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, model: type[T], **params: Any) -> T:
        """Read a resource as its model. Parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return TypeAdapter(model).validate_python(self._retried("GET", path, params=given))

    def post(self, path: str, model: type[T], *, is_repeatable: bool = False, **options: Any) -> T:
        """Send a request, and return its answer as a model.

        Args:
            is_repeatable: sent twice it does the same as once, so it is repeated while the service is away.
            options: as for httpx.
        """
        call = self._retried if is_repeatable else self._call
        return TypeAdapter(model).validate_python(call("POST", path, **options))

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Make any call, and return its parsed JSON: for small things that are shown as they are."""
        call = self._retried if method == "GET" else self._call
        return call(method, path, **options)

    def submit(self, run: Run, idempotency_key: str) -> RunView:
        """Start a run of any kind. The same key makes one run."""
        headers = {"idempotency-key": idempotency_key}
        return self.post(f"/runs/{run.kind}", RunView, is_repeatable=True, json=_body_of(run), headers=headers)

    def train_step(self, run_id: str, key: str, groups: str) -> StepStatus:
        """Hand a step to an RL run. The same key is the same step."""
        body = {"key": key, "groups": groups}
        return self.post(f"/runs/{run_id}/steps", StepStatus, is_repeatable=True, json=body)

    def step(self, run_id: str, number: int, wait_s: float = 0) -> StepStatus:
        return self.get(f"/runs/{run_id}/steps/{number}", StepStatus, wait_s=wait_s)

    def steps(self, run_id: str, after: int | None = None) -> Iterator[StepStatus]:
        """Read every recorded train step after a number, or from the first."""
        while True:
            page = self.get(f"/runs/{run_id}/steps", StepPage, after=after)
            yield from page.steps
            after = page.next
            if not page.has_more:
                return

    def steps_to_the_end(self, run_id: str) -> Iterator[StepStatus]:
        """Read train steps as they are recorded, until the run ends."""
        after: int | None = None
        while True:
            ended = self.run(run_id).state != "running"  # asked first: what is read next is then complete
            for step in self.steps(run_id, after):
                yield step
                after = step.step
            if ended:
                return
            time.sleep(_STEP_POLL_S)

    def run(self, run_id: str) -> RunView:
        return self.get(f"/runs/{run_id}", RunView)

    def runs(self, limit: int, state: str | None, **query: str | bool | None) -> RunPage:
        """List runs, newest first. `query`: after, kind, words, idle."""
        return self.get("/runs", RunPage, limit=limit, state=state, **query)

    def change(self, run_id: str, verb: str) -> RunView:
        """`cancel`, `pause`, `resume` or `finish` a run; `retry` starts its request as a new one."""
        return self.post(f"/runs/{run_id}/{verb}", RunView)

    def close_session(self, run_id: str) -> RunView:
        """Take no more commands."""
        return self.post(f"/sessions/{run_id}/close", RunView)

    def events(self, run_id: str, after: str | None, wait_s: float = 0) -> EventPage:
        return self.get(f"/runs/{run_id}/events", EventPage, wait_s=wait_s, after=after)

    def events_to_the_end(self, run_id: str, after: str | None, follow: bool) -> Iterator[RunEvent]:
        """Read events after a cursor: those that there are, or all until the run ends."""
        while True:
            ended = self.run(run_id).state != "running"  # asked first: what is read next is then complete
            page = self.events(run_id, after, _LONG_POLL_S if follow and not ended else 0)
            yield from page.events
            after = page.next or after
            if not page.events and (ended or not follow):
                return

    def save(self, path: str, target: Path) -> None:
        """Write an answer's body to a file."""
        with self.body(path) as chunks, target.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    @contextmanager
    def body(self, path: str) -> Iterator[Iterator[bytes]]:
        """Yield an answer's body in pieces, as they arrive."""
        with self._stream("GET", f"/api/v1{path}") as answer:
            yield answer.iter_bytes(_CHUNK_BYTES)

    def chat(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Ask a model, and yield the chunks of its answer as they are drawn."""
        with self._stream("POST", "/v1/chat/completions", json=request | {"stream": True}, timeout=None) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if error := chunk.get("error"):
                        raise Stop(str(error["message"]))
                    yield chunk

    def upload_file(self, path: Path) -> dict[str, Any]:
        """Stream a file into the store. Returns its record; `is_new` is false if the store had it before."""
        with path.open("rb") as file:
            body = iter(lambda: file.read(_CHUNK_BYTES), b"")
            headers = {"content-length": str(path.stat().st_size)}
            params = {"name": _plain_name(path)}
            answer = self._sent("POST", "/files", params=params, content=body, headers=headers)
        return {**answer.json(), "is_new": answer.status_code == 201}

    def at_v1(self, method: str, path: str, **options: Any) -> Any:
        """Call the service's OpenAI API, and return its parsed JSON."""
        with self._stream(method, f"/v1{path}", **options) as answer:
            return json.loads(answer.read())

    def preview(self, request: "PreviewRequest", path: str = "/preview") -> "Preview":
        """Read a dataset as a model will see it; with /validate, count its rows only."""
        from shared.runs.previews import Preview

        return self.post(path, Preview, json=request.model_dump(), timeout=_PREVIEW_TIMEOUT_S)

    def estimate(self, run: Run) -> "Estimate":
        """Estimate a run. Its model may be a published name."""
        from service.runs.estimates import Estimate

        body = _body_of(run)
        return self.post("/estimate", Estimate, is_repeatable=True, json=body, timeout=_PREVIEW_TIMEOUT_S)

    def grade(self, grader: "Grader", sample: dict[str, Any] | None) -> dict[str, Any]:
        """Grade a sample, or say why it has no grade; without a sample, check that the grader can be used."""
        body = {"grader": grader.model_dump(mode="json"), "sample": sample}
        grade: dict[str, Any] = self._call("POST", "/graders/run", json=body, timeout=_PREVIEW_TIMEOUT_S)
        return grade

    def places(self) -> dict[str, int]:
        """Return the queue positions, from 1, of the tenant's runs that wait for a worker."""
        return dict(self._retried("GET", "/overview")["waiting"])

    def health(self) -> dict[str, Any]:
        """Return the health report, of a degraded service too. Raises Unreachable when nothing answers."""
        with self._translated():
            answer: dict[str, Any] = self._http.get("/api/v1/health").json()
        return answer

    def _retried(self, method: str, path: str, **options: Any) -> Any:
        """Make a call that may be repeated, and repeat it for a while when the service is away."""
        end = time.monotonic() + self._patience_s
        while True:
            try:
                return self._call(method, path, **options)
            except Unreachable:
                if time.monotonic() > end:
                    raise
            time.sleep(_RETRY_EVERY_S)

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._translated():
            return self._sent(method, path, **options).json()

    def _sent(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._translated():
            if method != "GET":  # a run that is waited for is looked at again and again
                options["headers"] = {**self._trace, **options.get("headers", {})}
            answer = self._http.request(method, f"/api/v1{path}", **options)
            if answer.is_error:
                raise _problem(answer)
            return answer

    @contextmanager
    def _stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        with self._translated(), self._http.stream(method, path, **options) as answer:
            if answer.is_error:
                answer.read()
                raise _problem(answer)
            yield answer

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Stop(f"{self.api_url}: {error}", advice="give --api-url as http://host:port") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            advice = "start the stack with `longshore dev`, or name another service with --api-url"
            raise Unreachable(f"no Longshore service answers at {self.api_url}: {reason}", advice=advice) from None
        except ValueError:
            raise Stop(f"{self.api_url} is no Longshore service: its answer is no JSON") from None


def _body_of(run: Run) -> dict[str, Any]:
    """Return the request of a run. Without a `trainable`, an adapter named by `model` sets the shape."""
    return run.model_dump(exclude={"trainable"} - run.model_fields_set)


def _problem(answer: httpx.Response) -> Stop:
    """Turn the body of an error into the error that ends the command."""
    try:
        error = answer.json()["error"]
        rule, place = error["message"], error.get("place") or error.get("param")
    except (ValueError, KeyError, TypeError):
        rule, place = f"{answer.url} answered {answer.status_code}", None
    message = f"{place}: {rule}" if place else rule
    match answer.status_code:
        case 401:
            advice = "`longshore login` keeps a key; or set LONGSHORE_API_KEY, or give --api-key"
            if "authorization" in answer.request.headers:
                advice = f"`longshore config show --origin` says where it comes from; {advice}"
            return Stop(message, FAILED, advice)
        case 422:
            return ServiceRefused(rule, place)
        case 403:
            return Stop(
                message, FAILED, "`longshore whoami` shows your scopes; an admin's `longshore keys create` gives others"
            )
        case 404:
            return Stop(message, NOT_FOUND, _where_to_look(answer.url.path))
        case 429 if "quota" in message or answer.headers.get("x-should-retry") == "false":
            return Stop(message, FAILED, "`longshore usage` shows what is used, and the quotas")
        case 429:
            return Stop(message, FAILED, f"ask again in {answer.headers.get('retry-after', 'a few')} seconds")
        case 502 | 503 | 504:
            return Unreachable(message, FAILED, "`longshore doctor` says what is away")
        case 500:
            return Stop(f"{message} ({answer.headers.get('x-request-id')})")
        case _:
            return Stop(message)


def _where_to_look(path: str) -> str:
    """Name the command that lists the resources of a kind."""
    kinds = {"files": "files", "keys": "keys", "tenants": "tenants", "schedules": "schedule", "webhooks": "webhook"}
    kinds |= {"models": "models", "chat": "models", "sweeps": "sweep"}
    kind = path.removeprefix("/api").removeprefix("/v1/").partition("/")[0]
    command = f"longshore {kinds[kind]} ls" if kind in kinds else "longshore ls"
    return f"`{command}` shows what there is"


def _plain_name(path: Path) -> str:
    """Replace the characters of a file name that a store refuses. The suffix stays, since it names the format."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in path.name)
    return plain.lstrip(".-")[-128:] or "data"


def _is_loopback(url: str) -> bool:
    try:
        return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
    except httpx.InvalidURL:
        return False
