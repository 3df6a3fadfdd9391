"""Plays an episode at an env server of the package verifiers 0.4, a process beside the host, which has the task set.

A client's ZeroMQ socket sends frames (request, method, MessagePack) and gets (request, `delta` or `reply`, MessagePack)
(verifiers/v1/serve). The task's data and the address of the policy travel with each request. Deltas tell what has
changed in the episode's traces: only what a reward depends on is kept of them.
"""

import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from activities.sampling.episodes import METRIC_NAME, MOST_METRICS, MOST_REWARD
from longshore.environments import EndReason
from longshore.fields import bounded
from shared.errors import InvalidInput
from shared.field_rules import first_rule
from shared.settings import Settings

PLACE = "rollouts.agent.server"
_MESSAGE_BYTES, _QUEUED = 8 << 20, 4  # of a message of the server, and how many of one episode wait for us
_TRACES, _TEXT = 64, 2000
_LOOK_EVERY_MS, _AGAIN_S = 200, 1.0
_CANCEL_MS = 1000  # that a request to cancel has to leave, after its socket was closed
_KEY_VARIABLE = "LONGSHORE_EPISODE_KEY"  # of the server, which has none: the address is the key
_ODD = "it sent what env servers do not"
_reading = threading.Lock()  # messages are read one at a time, as their objects are many times their bytes
_ENDS: dict[str | None, EndReason] = {
    "max_turns": "turn_limit",
    "max_output_tokens": "token_limit",
    "max_input_tokens": "context_limit",
    "max_total_tokens": "context_limit",
    "agent_timeout": "time_limit",
}
"""How an episode ended, by a trace's `stop_condition`. Others are ends that the task set knows."""


class _Lost(Exception):
    """The server was lost, or has sent what env servers do not."""


class _Failure(BaseModel):
    type: str = ""
    message: str = ""


class _Seat(BaseModel):
    trainable: bool = True


class _Reward(BaseModel):
    score: FiniteFloat
    weight: FiniteFloat = 1.0


class _Trace(BaseModel):
    """What one of an episode's agents did, as far as it matters here."""

    agent: _Seat = _Seat()
    ok: bool = False
    stop_condition: str | None = None
    rewards: dict[str, _Reward | None] = {}
    metrics: dict[str, float | None] = {}
    error: _Failure | None = None


class _Delta(BaseModel):
    trace: str
    discard: bool = False
    set: dict[str, Any] = {}
    errors: list[_Failure] = []


class _Head(BaseModel):
    ok: bool = False
    errors: list[_Failure] = []


class _Summary(BaseModel):
    id: str


class _Reply(BaseModel):
    success: bool
    error: str | None = None
    head: _Head = _Head()
    traces: list[_Summary] = Field(default=[], max_length=_TRACES)


@dataclass(frozen=True)
class Verdict:
    """What a server says of an episode that has ended.

    Attributes:
        trace: whose questions are trained. They have its id as X-Session-ID.
        reward: None if there is none, for the reason `error`.
        is_refused: it failed since the policy's address refused a question.
    """

    trace: str | None
    end: EndReason = "environment_broke"
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    is_refused: bool = False


class EnvServer:
    """A connection to an env server, for one episode. Use it as a context.

    `asks_at`: the address of this machine at which the server reaches the policy.
    """

    def __init__(self, settings: Settings, name: str, check: Callable[[], None]) -> None:
        """Connect. `check`: raises what ends the episode; called five times a second while the server works.

        Raises InvalidInput: the installation has no such server, or no packages to ask it.
        """
        if (address := settings.agents.servers.get(name)) is None:
            known = ", ".join(sorted(settings.agents.servers)) or "none"
            raise InvalidInput(f"this host knows no env server {name}: LONGSHORE_AGENTS__SERVERS names {known}", PLACE)
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise InvalidInput(f"this host cannot ask env servers: install longshore[verifiers] ({error})") from error
        self._zmq, self._msgpack = zmq, msgpack
        self._name, self._check, self._wait_s = name, check, settings.agents.server_wait_s
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        options = {zmq.MAXMSGSIZE: _MESSAGE_BYTES, zmq.RCVHWM: _QUEUED, zmq.LINGER: _CANCEL_MS}
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        is_here = address.startswith(("ipc:", "tcp://127.", "tcp://localhost:"))
        self.asks_at = "127.0.0.1" if is_here or settings.host_address is None else str(settings.host_address)
        self._losses: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.disable_monitor()
        self._socket.close()

    def play(self, task: Mapping[str, Any], url: str, model: str) -> Verdict:
        """Have the server play an episode with the policy at `url`. It is cancelled if this fails.

        `task`: as TaskData of verifiers; the `agent` and `scoring` seconds of its `timeout` are the episode's time.
        Raises InvalidInput: the server does not answer for `server_wait_s` seconds; and what the check does.
        """
        self._await_health()
        client = {"type": "eval", "base_url": url, "api_key_var": _KEY_VARIABLE}
        request = self._send("run", {"task_data": task, "client": client, "model": model, "sampling": {}})
        try:
            return self._followed(request, task["timeout"]["agent"] + task["timeout"]["scoring"] + self._wait_s)
        except BaseException as error:
            with suppress(_Lost):
                self._send("cancel", {"request_id": request.decode()})
            if not isinstance(error, _Lost):
                raise
            return Verdict(None, error=f"env server {self._name}: {error}")

    def _followed(self, request: bytes, limit_s: float) -> Verdict:
        traces: dict[str, dict[str, Any]] = {}
        until, has_begun = time.monotonic() + limit_s, False
        while True:
            kind, data = self._receive(request, until)
            try:
                with _reading:
                    verdict = _read(kind, self._msgpack.unpackb(data, strict_map_key=False), traces)
            except ValidationError as error:
                raise _Lost(f"{_ODD}: {first_rule(error)}") from error
            except (ValueError, TypeError, self._msgpack.exceptions.UnpackException) as error:
                raise _Lost(f"{_ODD}: no MessagePack") from error
            if verdict is not None:
                return verdict
            if not has_begun:  # it may have waited for its turn
                until, has_begun = time.monotonic() + limit_s, True

    def _await_health(self) -> None:
        until = time.monotonic() + self._wait_s
        while True:
            try:
                self._receive(self._send("health", {}), until)
                return
            except _Lost as error:
                if time.monotonic() >= until:
                    raise InvalidInput(f"env server {self._name} does not answer: {error}", PLACE) from error
                time.sleep(_AGAIN_S)

    def _send(self, method: str, asked: Mapping[str, Any]) -> bytes:
        """Send a request. Returns its id. Raises _Lost: too many wait for a connection."""
        request, packed = uuid.uuid4().hex.encode(), self._msgpack.packb(asked)
        if len(packed) > _MESSAGE_BYTES // 2:  # which the server sends back
            raise InvalidInput(f"task_data: at most {_MESSAGE_BYTES // 2:,} bytes as MessagePack", PLACE)
        try:
            self._socket.send_multipart([request, method.encode(), packed], self._zmq.NOBLOCK)
        except self._zmq.Again as error:
            raise _Lost("it takes no requests") from error
        return request

    def _receive(self, request: bytes, until: float) -> tuple[bytes, bytes]:
        """Return kind and data of the next message for a request. Raises _Lost, and what the check does."""
        poller = self._zmq.Poller()
        for socket in (self._socket, self._losses):
            poller.register(socket, self._zmq.POLLIN)
        while True:
            self._check()
            ready = dict(poller.poll(_LOOK_EVERY_MS))
            if self._socket in ready:
                match self._socket.recv_multipart():
                    case [answered, (b"delta" | b"reply") as kind, data]:
                        if answered == request:  # and not late, about its health
                            return kind, data
                    case _:
                        raise _Lost(f"{_ODD}: delta or reply, in three parts")
            elif self._losses in ready:
                self._losses.recv_multipart()
                raise _Lost(f"its connection ended, or a message had more than {_MESSAGE_BYTES:,} bytes")
            elif time.monotonic() >= until:
                raise _Lost("it was silent for too long")


def _read(kind: bytes, told: Any, traces: dict[str, dict[str, Any]]) -> Verdict | None:
    """Return the verdict of a reply; None: it is a delta; the traces keep its fields that `_Trace` has."""
    if kind == b"reply":
        return _verdict(_Reply.model_validate(told), traces)
    delta = _Delta.model_validate(told)
    if delta.discard:
        traces.pop(delta.trace, None)
        return None
    trace = traces.setdefault(delta.trace, {})
    trace |= {name: delta.set[name] for name in _Trace.model_fields.keys() & delta.set.keys()}
    if delta.errors:
        trace["error"] = delta.errors[-1]
    if len(traces) > _TRACES:
        raise _Lost(f"an episode has more than {_TRACES} traces")
    return None


def _verdict(reply: _Reply, told: Mapping[str, dict[str, Any]]) -> Verdict:
    """Return what a reply and the traces before it come to. Raises ValidationError; InvalidInput: two agents learn."""
    traces = {one.id: _Trace.model_validate(told.get(one.id, {})) for one in reply.traces}
    learning = [name for name, trace in traces.items() if trace.agent.trainable]
    if len(learning) > 1:
        rule = f"{len(learning)} agents of an episode are trainable, and one of them can learn here"
        raise InvalidInput(rule, PLACE)
    failures = [*reply.head.errors, *(trace.error for trace in traces.values() if trace.error is not None)]
    errors = [reply.error or "", *(": ".join(filter(None, [one.type, one.message])) for one in failures)]
    verdict = partial(Verdict, learning[0] if learning else None)
    if not reply.success or not reply.head.ok or not learning:
        is_refused = bool(failures) and failures[-1].type == "ProviderError"
        reason = bounded(next(filter(None, reversed(errors)), "its episode failed"), _TEXT)
        return verdict(error=reason, is_refused=is_refused)
    trace = traces[learning[0]]
    given = [each for each in trace.rewards.values() if each is not None]
    if not given or len(given) < len(trace.rewards):
        return verdict("verifier_broke", error="the task set gave no reward")
    reward = math.fsum(each.score * each.weight for each in given)
    if abs(reward) > MOST_REWARD:
        return verdict("verifier_broke", error=f"the task set gave a reward above {MOST_REWARD:,}")
    numbers = {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)}
    metrics = dict([(name, numbers[name]) for name in numbers if re.fullmatch(METRIC_NAME, name)][:MOST_METRICS])
    if num_left := len(numbers) - len(metrics):
        metrics["metrics_left_out"] = num_left
    return verdict(_ENDS.get(trace.stop_condition, "completed"), reward, metrics)
