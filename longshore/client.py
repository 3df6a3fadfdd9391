"""Sessions from Python: a slot of a model on a Longshore service, trained command by command.

    with Client("http://127.0.0.1:8484", key) as client:
        session = client.open(SessionRun(model="/models/qwen3", trainable=Lora(rank=16)))
        session.forward_backward([Datum(tokens=(1, 2, 3))])
        print(session.optim_step(learning_rate=1e-4).result().metrics)
        session.close()

Every command returns a future at once: `result()` waits for it, and in a coroutine `await` does. Commands are done
once each, in the order of their calls, even if requests or answers are lost: calls are repeated until they answer.
"""

import asyncio
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import httpx

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
from longshore.losses import CrossEntropy
from longshore.training import Adam, Optimizer, SessionRun

_LONG_POLL_S = 30.0
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_AT_ONCE = 16
_TRY_AGAIN = (429, 502, 503, 504)


class ServiceError(Exception):
    """The service refuses a call. `status`: the HTTP status; 0 if it did not answer in time."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class CommandFailed(Exception):
    """A command failed; the session continues. `kind`: invalid_input, not_finite, error, or dropped."""

    def __init__(self, number: int, kind: str, message: str) -> None:
        super().__init__(f"command {number}: {message}")
        self.number = number
        self.kind = kind


class Pending:
    """A command that is being sent or done. Call `result()`, or await it, to get its result."""

    def __init__(self, number: int, future: "Future[CommandResult]") -> None:
        self.number = number
        self._future = future

    def result(self, timeout_s: float | None = None) -> CommandResult:
        """Wait for the command's result, for at most `timeout_s` seconds.

        Raises:
            CommandFailed: the command failed, or was dropped and must be sent again.
            ServiceError: the service refuses it, or was away for longer than the client's patience.
            TimeoutError: there is no result yet; `result` may be called again.
        """
        return self._future.result(timeout_s)

    def __await__(self) -> Generator[Any, None, CommandResult]:
        return asyncio.wrap_future(self._future).__await__()


class Client:
    """A connection to a Longshore service with an API key. Safe to use from several threads."""

    def __init__(self, url: str, key: str | None = None, patience_s: float = 600.0) -> None:
        """`patience_s`: how many seconds a call is repeated while the service is away or too busy."""
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="longshore")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(_LONG_POLL_S + _ANSWER_S, connect=_CONNECT_S)
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Sessions stay open: `attach` continues them."""
        self._threads.shutdown(cancel_futures=True)
        self._http.close()

    def open(self, run: SessionRun, idempotency_key: str | None = None) -> "Session":
        """Open a session. A repeated call with the same idempotency key returns the same session."""
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        opened = self.call("POST", "/sessions", json=run.model_dump(mode="json"), headers=headers)
        return Session(self, opened["run_id"], 1)

    def attach(self, session_id: str) -> "Session":
        """Go on with an open session, after the last command that was sent to it."""
        number = int(self.call("GET", f"/runs/{session_id}")["step"]) + 1
        while self._is_known(session_id, number):
            number += 1
        return Session(self, session_id, number)

    def _is_known(self, session_id: str, number: int) -> bool:
        try:
            self.call("GET", f"/sessions/{session_id}/commands/{number}")
        except ServiceError as error:
            if error.status != 404:
                raise
            return False
        return True

    def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Make a call of the API; it is repeated while the service is away. Raises ServiceError."""
        give_up_at, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            status, message = 0, "the service does not answer"
            try:
                answer = self._http.request(method, f"/api/v1{path}", **options)
            except httpx.TransportError as error:
                message = f"{message}: {error or type(error).__name__}"
            else:
                if answer.is_success:
                    found: dict[str, Any] = answer.json()
                    return found
                status, message = answer.status_code, _problem(answer)
            if (status and status not in _TRY_AGAIN) or time.monotonic() > give_up_at:
                raise ServiceError(status, message)
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def send(self, session_id: str, number: int, asked: Asked) -> Pending:
        """Send a command under a number that the caller chooses. Sending it again has no further effect."""
        return Pending(number, self._threads.submit(self._result, session_id, number, asked))

    def _result(self, session_id: str, number: int, asked: Asked) -> CommandResult:
        path, params = f"/sessions/{session_id}/commands/{number}", {"wait_s": _LONG_POLL_S}
        headers = {"content-type": "application/json"}
        view = self.call("PUT", path, content=asked.model_dump_json().encode(), params=params, headers=headers)
        while view["result"] is None:
            if view["state"] == "dropped":
                raise CommandFailed(number, "dropped", view["message"])
            view = self.call("GET", path, params=params)
        result = CommandResult.model_validate(view["result"])
        if result.problem is not None:
            raise CommandFailed(number, result.problem.kind, result.problem.message)
        return result


class Session:
    """A session. Its commands are numbered in the order of the calls. Safe to use from several threads."""

    def __init__(self, client: Client, session_id: str, next_number: int) -> None:
        self.id = session_id
        self._client = client
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
        with self._lock:
            number, self._next = self._next, self._next + 1
        return self._client.send(self.id, number, asked)

    def status(self) -> dict[str, Any]:
        """The session as a run: its state, phase, metrics, GPU seconds."""
        return self._client.call("GET", f"/runs/{self.id}")

    def close(self) -> None:
        """Take no more commands: the session ends after those that were sent, and its state stays."""
        self._client.call("POST", f"/sessions/{self.id}/close")


def _problem(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        return ": ".join(part for part in (error.get("place"), error["message"]) if part)
    except (ValueError, LookupError, TypeError):
        return f"HTTP {answer.status_code}"
