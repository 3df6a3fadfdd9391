"""Plays episodes whose agent is a user's program. It asks the policy by itself, from a box, or from an env server.

The host answers on the loopback of the box, as OpenAI's and Anthropic's APIs do (`_Gateway`). A server asks at a secret
path below a port of the host (activities/sampling/env_servers.py). The ids that were drawn are trained. Each answer is
in the store before the program sees it. After a kill the program is started afresh, and gets the recorded answers to
the questions that it asks again; from its first other question on it is another episode. The same question has one
answer, which its digest and the run's seed determine.
"""

import base64
import binascii
import hmac
import json
import logging
import math
import os
import re
import secrets
import shlex
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

from activities.formats.dataset import question_of
from activities.formats.rows import Row, is_deep
from activities.heartbeats import on_thread, pause, stop_if_cancelled
from activities.host_context import OnHost
from activities.sampling.client import Completion
from activities.sampling.completions import sample_seed
from activities.sampling.env_servers import EnvServer, Verdict
from activities.sampling.episodes import (
    METRIC_NAME,
    MOST_METRICS,
    MOST_REWARD,
    EnvironmentProcess,
    EpisodePlan,
    Played,
    Player,
    Transcript,
    answer_of,
    begun,
    digest_of_ids,
)
from activities.sampling.questions import ChatPrompts, Prompt, chat_completion, sampler_request
from activities.sandbox.box import PORT, Box, BoxLimits, BoxLost, Ran
from activities.sandbox.kernel import IsolationRefused
from activities.tokenizing.render_prompts import PromptRow, PromptsFile, sources_of
from activities.tokenizing.tokenizer import ModelTokenizer
from longshore.dataset_runs import DatasetSource
from longshore.environments import Agent, Course, EndReason, agent_variables
from longshore.fields import Artifact, Frozen
from shared.chat.completions import Usage
from shared.chat.dialects import UNUSED, CountRequest, MessagesRequest, ResponseRequest, named, unused_names
from shared.chat.episodes import overridden
from shared.chat.messages import ChatChoice, ChatCompletion, ChatRequest
from shared.chat.streams import EventStream, StreamStart
from shared.chat.trajectories import AnswerRecord
from shared.errors import InvalidInput, LongshoreError, SamplerUnavailable
from shared.field_rules import refused_in_words
from shared.settings import AgentSettings, Settings

MODEL = "policy"
"""The policy's name in a box. Questions for other models are answered, and not trained."""
_PLACE = "rollouts.agent"
_MOST_BODY_BYTES = 8 << 20
_CONNECTIONS = 32  # of one program at once; each has a thread
_SHARE, _AHEAD_S = 0.1, 10.0  # of a processor of the host that a program's questions may take, and how far ahead of it
_CONNECTION_S = 0.0005  # processor time of a connection, beside that of its thread
_IDLE_S = 300.0  # of a connection from outside a box
_SIDE_TURNS = 4  # side questions for each counted one that an episode may have
_TRIES, _AGAIN_S = 3, 1.0  # of a box that is lost, of a program that asks nothing, or of a server that fails
_FILES, _FILES_BYTES = 1024, 32 << 20  # most files of a row, and their bytes
_REASONS = 8  # for refusals of one program that are shown
_OUTPUT_BYTES = 4096  # of a program's output that are shown
_REWARD_BYTES = 64 << 10
_OUTPUT, _CHECKED = "/logs/agent/output.txt", "/logs/verifier/output.txt"
_SET_UP, _SETUP_S = "/logs/setup.txt", 600.0
_REWARD = "/logs/verifier/reward"
_OF_OURS = "longshore: "  # before lines below a program's output
_JSON = "application/json"
_log = logging.getLogger(__name__)
_slots_held, _slots_wanted = Counter[str](), Counter[str]()  # agents that run, and those that wait, by their runs
_slots_changed = threading.Condition()


# --- A task: the row's files, and the verifier ---


@dataclass(frozen=True)
class Task:
    """What a row of the prompts says of an episode.

    Attributes:
        instruction: the text of the row's last message.
        variables: of the environment of all commands. `setup`: one that is run before the agent.
        files, tests: contents by absolute paths in the box; `tests` come when the agent has ended.
    """

    instruction: str
    folder: str
    place: str
    variables: Mapping[str, str]
    setup: str | None
    verifier: str | None
    time_s: float
    verifier_time_s: float
    files: Mapping[str, bytes]
    tests: Mapping[str, bytes]

    @classmethod
    def of(cls, prompt: PromptRow, source: DatasetSource, agent: Agent) -> "Task":
        """Read a row. Raises InvalidInput: names the field."""
        messages = question_of(source)(Row(prompt.place, prompt.item)).messages
        folder = prompt.item.get("folder") or agent.folder
        if not isinstance(folder, str) or not folder.startswith("/") or "\0" in folder:
            raise InvalidInput("folder: a path that begins with /", prompt.place)
        setup = prompt.item.get("setup")
        if setup is not None and (not isinstance(setup, str) or "\0" in setup):
            raise InvalidInput("setup: a command line", prompt.place)
        variables = prompt.item.get("variables") or {}
        if not isinstance(variables, dict) or not all(
            isinstance(value, str) and "\0" not in name + value and "=" not in name for name, value in variables.items()
        ):
            raise InvalidInput("variables: texts by name", prompt.place)
        tests = _contents(prompt, "tests", "/tests")
        has_script = "/tests/test.sh" in tests
        return cls(
            instruction=str(messages[-1]["content"] or ""),
            folder=folder,
            place=prompt.place,
            variables=variables,
            setup=setup,
            time_s=_time_s(prompt.item, "time_s", agent.time_s, prompt.place),
            verifier_time_s=_time_s(prompt.item, "verifier_time_s", agent.verifier_time_s, prompt.place),
            verifier=agent.verifier or ("bash /tests/test.sh" if has_script else None),
            files=_contents(prompt, "files", folder),
            tests=tests | {"/tests/row.json": json.dumps(prompt.item, ensure_ascii=False).encode()},
        )


def _task_data(prompt: PromptRow, agent: Agent) -> dict[str, Any]:
    """Return the task of a row for an env server, with the run's limits. Raises InvalidInput: names the field."""
    data = prompt.item.get("task_data")
    if not isinstance(data, dict) or not isinstance(stages := data.get("timeout") or {}, dict):
        rule = "task_data: a task of the server's task set (examples/verifiers_server.py writes such rows)"
        raise InvalidInput(rule, prompt.place)
    most = {"agent": agent.time_s, "scoring": agent.verifier_time_s}
    return data | {"timeout": stages | {name: _time_s(stages, name, most[name], prompt.place) for name in most}}


def _time_s(limits: Mapping[str, Any], name: str, most: float, place: str) -> float:
    """Return the seconds that a row allows, at most the run's."""
    given = limits.get(name)
    if given is None:
        return most
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise InvalidInput(f"{name}: seconds above 0", place)
    return min(given, most)


def _contents(prompt: PromptRow, name: str, folder: str) -> dict[str, bytes]:
    """Return a row's files by their absolute paths. Raises InvalidInput: they are none."""
    given = prompt.item.get(name) or {}
    rule = f'{name}: contents by path, each a text or {{"base64": ...}}'
    if not isinstance(given, dict) or len(given) > _FILES:
        raise InvalidInput(f"{rule}, at most {_FILES:,}", prompt.place)
    found: dict[str, bytes] = {}
    for path, content in given.items():
        try:
            match content:
                case str(text):
                    data = text.encode()
                case {"base64": str(text)}:
                    data = base64.b64decode(text, validate=True)
                case _:
                    raise InvalidInput(f"{rule} ({path})", prompt.place)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise InvalidInput(f"{rule} ({path}: {error})", prompt.place) from error
        if not path or "\0" in path:
            raise InvalidInput(f"{rule}: {path!r} is no path", prompt.place)
        found[os.path.normpath(f"{folder}/{path}" if not path.startswith("/") else path)] = data
    if sum(map(len, found.values())) > _FILES_BYTES:
        raise InvalidInput(f"{name}: at most {_FILES_BYTES:,} bytes", prompt.place)
    return found


def _limits_of(settings: AgentSettings) -> BoxLimits:
    own = settings.model_dump(include={"memory_bytes", "disk_bytes", "processes"})
    return BoxLimits(shown=tuple(map(str, settings.programs)), **own)


@contextmanager
def _opened(settings: AgentSettings, task: Task, check: Callable[[], None]) -> Iterator[Box]:
    """Open a box with a task's files. Raises BoxLost; InvalidInput: a file cannot be there, or this host has none."""
    try:
        box = Box(_limits_of(settings), check)
    except IsolationRefused as refused:
        raise InvalidInput(f"this host can isolate no agents: {refused}", _PLACE) from refused
    with closing(box):
        _put(box, {**task.files, "/task/instruction.md": task.instruction.encode()})
        if task.setup is not None and (ran := box.run(task.setup, task.variables, task.folder, _SET_UP, _SETUP_S)).code:
            said = _tail(box, _SET_UP) or "nothing"
            raise InvalidInput(f"setup ended with {ran.code}, and printed: {said} ({task.place})", _PLACE)
        yield box


def _put(box: Box, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        try:
            box.put(path, content, is_program=path.endswith(".sh") or content.startswith(b"#!"))
        except OSError as error:
            raise InvalidInput(f"a file cannot be put into the box: {error}", _PLACE) from error


def check_agent(settings: AgentSettings, agent: Agent, prompt: PromptRow, source: DatasetSource) -> None:
    """Open a box for the first row, and look for the program. Raises InvalidInput: there is none, or no box."""
    assert agent.command is not None
    task = Task.of(prompt, source, agent)
    with _opened(settings, task, stop_if_cancelled) as box:
        try:
            words = shlex.split(agent.command)
        except ValueError:  # more than a program and its arguments
            words = []
        if words and all(character.isalnum() or character in "_-./" for character in words[0]):
            ran = box.run(f"command -v {words[0]}", {}, task.folder, _OUTPUT, 60.0)
            if ran.code:
                rule = "agents see the system's programs, and those in the folders of LONGSHORE_AGENTS__PROGRAMS"
                raise InvalidInput(f"there is no program {words[0]} for agents: {rule}", f"{_PLACE}.command")


# --- The questions of a program, over HTTP on the loopback of its box ---


class _Gateway(ThreadingHTTPServer):
    """Answers the connections of one episode, whose `ask` and `count` it calls.

    `prefix`: what paths begin with; others are not found.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, episode: "_Episode | _Knock", prefix: str = "") -> None:
        super().__init__(listening.getsockname()[:2], _Asking, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.episode, self.prefix = episode, prefix
        self.reads = threading.Lock()
        self.is_over = threading.Event()
        self._paying = threading.Lock()
        self._paid_until = 0.0
        self._open = set[socket.socket]()
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._context = copy_context()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self.spent(_CONNECTION_S)
        self.pace()
        if is_free := self._free.acquire(timeout=0.5):  # others wait in the backlog; the last of them are closed
            self._open.add(request)
        return is_free

    def spent(self, cpu_s: float) -> None:
        """Count processor time of this host that the program has caused."""
        with self._paying:
            self._paid_until = max(self._paid_until, time.monotonic() - _AHEAD_S) + cpu_s / _SHARE

    def pace(self) -> None:
        """Wait until the program has no more than its share of a processor, as other tenants' work needs this host."""
        if (wait_s := self._paid_until - time.monotonic()) > 0:
            self.episode.is_slowed = True
            self.is_over.wait(wait_s)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            self._context.copy().run(super().process_request_thread, request, client_address)
        finally:
            self._open.discard(request)
            self._free.release()

    def hang_up(self) -> None:
        """End the connections, so that no more is answered."""
        for request in tuple(self._open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a box's connection failed", exc_info=True)


@contextmanager
def _answering(listening: socket.socket, episode: "_Episode | _Knock", prefix: str = "") -> Iterator[None]:
    gateway = _Gateway(listening, episode, prefix)
    thread = threading.Thread(target=gateway.serve_forever, args=(0.1,), name="gateway", daemon=True)
    thread.start()
    try:
        yield
    finally:
        gateway.is_over.set()
        gateway.shutdown()
        thread.join()
        gateway.hang_up()


@contextmanager
def _answering_at(host: str, episode: "_Episode | _Knock") -> Iterator[str]:
    """Answer at an address of this machine. Returns the URL, which holds a secret, as others may reach the port."""
    family, prefix = (socket.AF_INET6 if ":" in host else socket.AF_INET), f"/{secrets.token_urlsafe(24)}"
    with socket.create_server((host, 0), family=family) as listening, _answering(listening, episode, prefix):
        named = f"[{host}]" if ":" in host else host
        yield f"http://{named}:{listening.getsockname()[1]}{prefix}"


class _Asking(BaseHTTPRequestHandler):
    server: _Gateway
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        if self.server.prefix:  # others than the env server may hold connections
            self.request.settimeout(_IDLE_S)
        super().setup()

    def handle_one_request(self) -> None:
        self.server.pace()
        began = time.thread_time()
        try:
            super().handle_one_request()
        finally:
            self.server.spent(time.thread_time() - began)

    def do_GET(self) -> None:
        if self._path() == "/models":
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "longshore"}
            self._send(HTTPStatus.OK, json.dumps({"object": "list", "data": [card]}).encode())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path[:200]}")

    def do_POST(self) -> None:
        path = self._path()
        kind = _FORMS.get(path)
        if kind is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path[:200]}")
            return
        try:
            with refused_in_words():
                asked = kind.model_validate(self._body())
            if isinstance(asked, CountRequest) and not isinstance(asked, MessagesRequest):
                with named(asked.NAMES):
                    num_tokens = self.server.episode.count(asked.chat())
                self._send(HTTPStatus.OK, json.dumps({"input_tokens": num_tokens}).encode())
                return
            if isinstance(asked, ChatRequest):
                self._answer(asked, None)
            else:
                self._answer(asked.chat(), asked)
        except InvalidInput as error:
            code = "context_length_exceeded" if isinstance(error, _TooLong) else "invalid_input"
            self._refuse(HTTPStatus.BAD_REQUEST, error.message, error.place, code)
        except LongshoreError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _answer(self, chat: ChatRequest, form: ResponseRequest | MessagesRequest | None) -> None:
        """Answer a chat. `form`: the request of another API that it was made of."""
        with named(form.NAMES if form is not None else {}):
            answer = self.server.episode.ask(chat, self.headers.get("X-Session-ID", "")[:64])
        unused = overridden(chat) + [name for name in ("logprobs", "top_logprobs") if getattr(chat, name) is not None]
        unused += form.unused if form is not None else []
        headers = {UNUSED: unused_names(unused)} if unused else {}
        if chat.stream:
            begun = form.begun(answer.id, answer.created) if form is not None else None
            stream = EventStream(StreamStart.of(answer.id, answer.created, begun), chat)
            self._send(HTTPStatus.OK, stream.rest(answer), headers, "text/event-stream")
        else:
            whole = form.whole(answer) if form is not None else answer
            self._send(HTTPStatus.OK, whole.model_dump_json().encode(), headers)

    def _path(self) -> str:
        """Return the path below the episode's address; an empty one if it is not below it."""
        path, prefix = self.path.partition("?")[0], self.server.prefix
        if not hmac.compare_digest(path[: len(prefix)].encode(), prefix.encode()):
            return ""
        return path[len(prefix) :].removeprefix("/v1")

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BODY_BYTES:
            self.close_connection = True
            raise InvalidInput(f"a body needs a Content-Length, of at most {_MOST_BODY_BYTES:,} bytes")
        try:
            with self.server.reads:  # a program has one body at a time in this process' memory
                if len(body := self.rfile.read(int(length))) < int(length):
                    raise ConnectionAbortedError  # the program has left
                found = json.loads(body)
                del body
        except (ValueError, RecursionError) as error:
            raise InvalidInput("the body is no JSON that can be read here") from error
        if is_deep(found if isinstance(found, dict | list) else []):
            raise InvalidInput("the body is nested too deep")
        return found

    def _refuse(self, status: HTTPStatus, message: str, place: str | None = None, code: str = "invalid_input") -> None:
        self.server.episode.count_refusal(message)
        if self._path().startswith("/messages"):
            kind = "invalid_request_error" if status < 500 else "api_error"
            told: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
        else:
            kind = "invalid_request_error" if status < 500 else "server_error"
            told = {"error": {"message": message, "type": kind, "param": place, "code": code}}
        self._send(status, json.dumps(told).encode())

    def _send(
        self, status: HTTPStatus, content: bytes, others: Mapping[str, str] | None = None, kind: str = _JSON
    ) -> None:
        with suppress(OSError):  # the program has left
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(others or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


_FORMS: dict[str, type[ChatRequest | ResponseRequest | CountRequest]] = {
    "/chat/completions": ChatRequest,
    "/responses": ResponseRequest,
    "/messages": MessagesRequest,
    "/messages/count_tokens": CountRequest,
}


class _TooLong(InvalidInput):
    """A conversation leaves no room for an answer."""


class _Knock(Exception):
    """Stands for an episode before a run: it answers nothing, and ends the server's with the first question."""

    is_asked = is_slowed = False

    def check(self) -> None:
        stop_if_cancelled()
        if self.is_asked:
            raise self

    def ask(self, *asked: object) -> NoReturn:
        self.is_asked = True
        raise InvalidInput("nothing is answered before the run begins")

    count = ask

    def count_refusal(self, reason: str) -> None:
        """Nothing is shown of this."""


# --- The episode ---


@dataclass
class _Turn:
    """A question that counts, and its answer. `sessions`: who asked it."""

    number: int
    sessions: set[str]
    prompt: Prompt
    completion: Completion


@dataclass
class _Episode:
    """The questions of one program, and their answers. Its threads ask at once.

    Attributes:
        places: numbers of the group and of the sample.
        numbers: those of its turns in the store.
        is_slowed: its questions took more than their share of the host's processor, and had to wait.
        refused: why a question was refused last, if that was for a limit.
        failure: what made an answer impossible, which is not the program's doing.
    """

    player: Player
    writer: ChatPrompts
    agent: Agent
    place: str
    places: tuple[int, int]
    numbers: range
    is_slowed: bool = False
    refused: EndReason | None = None
    failure: BaseException | None = None
    turns: list[_Turn] = field(default_factory=list)
    _answers: dict[str, Future[ChatCompletion]] = field(default_factory=dict)
    _before: dict[str, AnswerRecord] = field(default_factory=dict)
    _sessions: dict[str, set[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_asked: int = 0
    _num_side: int = 0
    _refusals: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        known = [number for number in self.numbers if number in self.player.known]
        self.recorded = dict(map(self.player.recorded, known))
        self._free = [number for number in self.numbers if number not in self.player.known]

    def check(self) -> None:
        """Raise the error that ends the episode, if there is one."""
        stop_if_cancelled()
        if self.failure is not None:
            raise self.failure

    def count_refusal(self, reason: str) -> None:
        reason = reason[:200]
        with self._lock:
            self._refusals[reason if reason in self._refusals or len(self._refusals) < _REASONS else "others"] += 1

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the program's questions, shown below its output."""
        with self._lock:  # a request may still be under way
            told = [f"{num:,} requests were refused: {reason}" for reason, num in sorted(self._refusals.items())]
        slowed = "its requests took more than their share of the host's processor, and had to wait"
        return told + ([slowed] if self.is_slowed else [])

    def count(self, asked: ChatRequest) -> int:
        return len(self._prompt(asked).ids)

    def ask(self, asked: ChatRequest, session: str) -> ChatCompletion:
        """Answer a question, or give the answer that it had. Raises InvalidInput: it cannot be answered."""
        if asked.n not in (None, 1):
            raise InvalidInput("an episode continues from one answer: leave n out", "n")
        is_side = asked.model != MODEL or asked.has_forced_form
        prompt = self._prompt(asked)
        room = self.player.plan.max_tokens - len(prompt.ids)
        if room < 1:
            self.refused = "context_limit"
            raise _TooLong(f"{len(prompt.ids):,} tokens leave no room for an answer within max_tokens", "messages")
        max_tokens = min(room, self.player.how.sampling.max_tokens, asked.most_tokens or room)
        form = asked.model_dump_json(include={"model", "response_format", "tool_choice", "tools"}) if is_side else ""
        digest = digest_of_ids(prompt.ids, max_tokens, form)
        with self._lock:
            if (known := self._answers.get(digest)) is None:
                number = self._counted(is_side)
                mine = self._answers[digest] = Future()
            sessions = self._sessions.setdefault(digest, set())
            if len(sessions) < _CONNECTIONS:
                sessions.add(session)
        if known is not None:
            return known.result()
        try:
            answer = (
                self._side(asked, prompt, max_tokens) if is_side else self._drawn(prompt, max_tokens, digest, number)
            )
        except BaseException as error:
            self.failure = error
            mine.set_exception(SamplerUnavailable("the policy cannot answer now"))
            raise SamplerUnavailable("the policy cannot answer now") from error
        mine.set_result(answer)
        return answer

    def _counted(self, is_side: bool) -> int:
        if is_side:
            self._num_side += 1
            if self._num_side > _SIDE_TURNS * self.agent.max_turns:
                raise InvalidInput("this episode has had its side questions", "model")
            return 0
        if self._num_asked >= self.agent.max_turns:
            self.refused = "turn_limit"
            raise InvalidInput(f"this episode has had its {self.agent.max_turns:,} turns", "messages")
        self._num_asked += 1
        return self._num_asked

    def _prompt(self, asked: ChatRequest) -> Prompt:
        return self.writer.prompt(self.player.model, asked.messages, asked.offered_tools, self._before.get)

    def _drawn(self, prompt: Prompt, max_tokens: int, digest: str, number: int) -> ChatCompletion:
        completion = self.recorded.pop(digest, None)
        if completion is None:
            seed = sample_seed(self.player.how.seed, *self.places, int(digest[:12], 16))
            completion = self.player.draw(prompt.ids, max_tokens, seed, self.place)
            if not completion.token_ids:
                raise InvalidInput("the sampler sent no tokens", self.place)
            with self._lock:
                # Those of an earlier attempt that went another way make room, if there is no other.
                stored = self._free.pop(0) if self._free else self.numbers[number % len(self.numbers)]
            self.player.record(stored, digest, completion)
        answer, record = answer_of(prompt, completion, digest[:24], self.player.model)
        with self._lock:
            self.turns.append(_Turn(number, self._sessions[digest], prompt, completion))
            self._before[prompt.conversation(answer)] = record
        finish = "length" if completion.was_cut_off else "tool_calls" if answer.tool_calls else "stop"
        choice = {"index": 0, "message": answer, "finish_reason": finish, "stop_reason": completion.stop_reason}
        num_prompt, num_drawn = len(prompt.ids), len(completion.token_ids)
        usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_drawn, total_tokens=num_prompt + num_drawn)
        return ChatCompletion(
            id=f"chatcmpl-{digest[:24]}",
            created=int(time.time()),
            model=MODEL,
            choices=[ChatChoice.model_validate(choice)],
            usage=usage,
        )

    def _side(self, asked: ChatRequest, prompt: Prompt, max_tokens: int) -> ChatCompletion:
        """Answer a question that is not trained, as it was asked."""
        player = self.player
        shorter = asked.model_copy(update={"max_tokens": max_tokens, "max_completion_tokens": None, "n": 1})
        wanted = sampler_request(shorter, player.name, prompt.ids, player.plan.max_tokens, takes_fewer=True)
        drawn = player.sampler.complete(wanted)
        tokenizer: ModelTokenizer = self.writer.tokenizer(player.model)
        return chat_completion(shorter, drawn, tokenizer.bytes_of, drawn.id, prompt.ids)


@dataclass(frozen=True)
class _Outcome:
    """What is left of an episode: how the program ended, the reward, and what is wrong with it.

    `end`: how the episode ended, if a server has told it.
    """

    ran: Ran
    output: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    end: EndReason | None = None


def play(player: Player, group: int, member: int, prompt: PromptRow) -> Played:
    """Play one episode with the run's agent.

    Raises:
        InvalidInput: the program asks nothing, the row is malformed, or the sampler refuses the policy.
        SamplerUnavailable: it does not answer, or no longer serves the policy.
    """
    agent, settings = player.plan.agent, player.host.settings.agents
    assert agent is not None
    run: Callable[[_Episode], _Outcome]
    if agent.server is not None:
        run = partial(_run_at_server, player.host.settings, agent.server, _task_data(prompt, agent))
    else:
        run = partial(_run, settings, agent, Task.of(prompt, player.sources[prompt.source], agent))
    num_turns = 2 * agent.max_turns  # the records of an attempt that was killed, and of another that goes another way
    first = (group * player.how.group_size + member) * num_turns
    numbers = range(first, first + num_turns)
    writer = player.writer(group, member)
    with _slot(settings.at_once, player.run_id):
        for tries_left in reversed(range(_TRIES)):
            episode = _Episode(player, writer, agent, prompt.place, (group, member), numbers)
            try:
                outcome = run(episode)
            except BoxLost as error:
                if not tries_left:
                    raise InvalidInput(f"the box of an agent was lost {_TRIES} times: {error}", _PLACE) from error
                _log.warning("%s: an agent's box was lost, and is opened anew: %s", prompt.place, error)
                player = replace(player, known=player.turns.known())
                continue
            if outcome.end is not None and outcome.error is not None and tries_left:
                _log.warning("%s: an env server's episode is begun anew: %s", prompt.place, outcome.error)
                pause(_AGAIN_S)
                player = replace(player, known=player.turns.known())
            elif episode.turns:
                return _ended(player, episode, outcome)
        place = f"{_PLACE}.{'command' if agent.server is None else 'server'}"
        how = outcome.error or f"ended with {outcome.ran.code}, and printed: {outcome.output or 'nothing'}"
        raise InvalidInput(f"the program asked the policy nothing, {how} ({prompt.place})", place)


@contextmanager
def _slot(at_once: int, run: str) -> Iterator[None]:
    """Wait until fewer than `at_once` agents run in this process, and no other run that waits has fewer of them.

    A run that has none gets one more place, so that it need not wait for the long episodes of another.
    """

    def is_free() -> bool:
        fewest = min(_slots_held[waiting] for waiting in _slots_wanted)
        return _slots_held[run] == fewest and _slots_held.total() < at_once + (not _slots_held[run])

    with _slots_changed:
        _slots_wanted[run] += 1
        try:
            while not is_free():
                stop_if_cancelled()
                _slots_changed.wait(0.2)
            _slots_held[run] += 1
        finally:
            _forget_one(_slots_wanted, run)
    try:
        yield
    finally:
        with _slots_changed:
            _forget_one(_slots_held, run)
            _slots_changed.notify_all()


def _forget_one(counts: Counter[str], run: str) -> None:
    counts[run] -= 1
    if not counts[run]:
        del counts[run]


def _run(settings: AgentSettings, agent: Agent, task: Task, episode: _Episode) -> _Outcome:
    """Run the program in a box, and then its verifier. Raises BoxLost, and what `_Episode.check` does."""
    assert agent.command is not None
    variables = agent_variables(f"http://127.0.0.1:{PORT}", MODEL) | {"MODEL": MODEL, "PROMPT": task.instruction}
    with _opened(settings, task, episode.check) as box:
        with _answering(box.listening, episode):
            ran = box.run(agent.command, {**task.variables, **variables}, task.folder, _OUTPUT, task.time_s)
            episode.check()
        output = _tail(box, _OUTPUT)
        if not episode.turns:
            return _Outcome(ran, output)
        if task.verifier is None:
            return _rewarded(box, ran, output)
        box.run("find /tests /logs/verifier -mindepth 1 -delete", {}, "/", _OUTPUT, _SETUP_S)
        _put(box, task.tests)
        own = {**task.variables, "HOME": "/logs/verifier", "PYTHONNOUSERSITE": "1"}  # and what Python would load
        for tries_left in (1, 0):
            cleared = f"rm -rf {_REWARD}.txt {_REWARD}.json; {task.verifier}"
            checked = box.run(cleared, own, task.folder, _CHECKED, task.verifier_time_s)
            outcome = _rewarded(box, ran, f"{output}\n{_tail(box, _CHECKED)}".strip())
            if outcome.error is None and outcome.reward is not None:
                return outcome
            if tries_left:
                pause(0.2)
        left = outcome.error or f"the verifier left no {_REWARD}.txt or .json, and ended with {checked.code}"
        return _Outcome(ran, outcome.output, error=left)


def _run_at_server(settings: Settings, name: str, task_data: Mapping[str, Any], episode: _Episode) -> _Outcome:
    """Have an env server play the episode. Raises what `_Episode.check` does; InvalidInput: the server is away."""
    told = _told_by_server(settings, name, task_data, episode)
    episode.check()
    if told.trace is not None:  # without those of other seats, and of attempts that the server gave up
        episode.turns = [turn for turn in episode.turns if told.trace in turn.sessions]
    end = episode.refused if told.end == "completed" and episode.refused is not None else told.end
    if told.is_refused and episode.refused is not None:  # the policy's doing, and nothing was earned
        return _Outcome(Ran(0), told.error or "", 0.0, told.metrics, end=episode.refused)
    return _Outcome(Ran(0), "", told.reward, told.metrics, told.error, end)


def _told_by_server(settings: Settings, name: str, task_data: Mapping[str, Any], episode: _Episode | _Knock) -> Verdict:
    with EnvServer(settings, name, episode.check) as server, _answering_at(server.asks_at, episode) as url:
        return server.play(task_data, f"{url}/v1", MODEL)


def check_server(settings: Settings, agent: Agent, name: str, prompt: PromptRow) -> None:
    """Have the server begin the first row's episode, until it asks. Raises InvalidInput: it does not."""
    knock = _Knock()
    with suppress(_Knock):
        error = _told_by_server(settings, name, _task_data(prompt, agent), knock).error
        if not knock.is_asked:
            rule = f"env server {name} asked the policy nothing: {error} ({prompt.place})"
            raise InvalidInput(rule, f"{_PLACE}.server")


def _tail(box: Box, path: str) -> str:
    return (box.get(path, _OUTPUT_BYTES, from_end=True) or b"").decode(errors="replace").strip()


def _rewarded(box: Box, ran: Ran, output: str) -> _Outcome:
    """Read the reward: the number of reward.txt; or of reward.json the one named `reward`, or its only one."""
    outcome = partial(_Outcome, ran, output)
    if (text := box.get(f"{_REWARD}.json", _REWARD_BYTES)) is not None:
        try:
            told = json.loads(text)
            values = {str(name): _finite(value) for name, value in told.items()}
            [reward] = [values["reward"]] if "reward" in values else values.values()
        except (ValueError, AttributeError, RecursionError):
            return outcome(error="reward.json: numbers by name, one of them `reward`, or only one")
        names = [name for name in values if name != "reward" and re.fullmatch(METRIC_NAME, name)][:MOST_METRICS]
        left = [name for name in values if name not in ("reward", *names)]
        metrics = {name: values[name] for name in names}
        if left:
            rule = f"a name has letters, digits and _, at most 64; {MOST_METRICS} are taken"
            some = ", ".join(map(repr, left[:8])) + ("" if len(left) <= 8 else f" and {len(left) - 8:,} more")
            output = f"{output}\n{_OF_OURS}metrics of reward.json were left out ({rule}): {some[:500]}".strip()
            metrics |= {"metrics_left_out": len(left)}
        return _Outcome(ran, output, reward=reward, metrics=metrics)
    if (text := box.get(f"{_REWARD}.txt", _REWARD_BYTES)) is not None:
        try:
            return outcome(reward=_finite(float(text)))
        except ValueError:
            return outcome(error=f"reward.txt: a finite number, and not {text[:80]!r}")
    return outcome()


def _finite(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or abs(value) > MOST_REWARD
    ):
        raise ValueError("not a finite number")
    return float(value)


def _ended(player: Player, episode: _Episode, outcome: _Outcome) -> Played:
    """Put an episode's answers together, in the order of their questions."""
    turns = sorted(episode.turns, key=lambda turn: turn.number)
    transcript = Transcript(player.how, episode.place)
    for turn in turns:
        transcript.take(turn.prompt, turn.completion)
    ran, error = outcome.ran, outcome.error
    end: EndReason = "completed"
    if outcome.end is not None:
        end = outcome.end
    elif error is not None:
        end = "verifier_broke"
    elif ran.limit == "time":
        end = "time_limit"
    elif episode.refused is not None:
        end = episode.refused
    elif ran.code:
        end = "agent_failed"
    if outcome.reward is None and error is None:
        error = "the agent has no verifier, and left no reward: give agent.verifier, tests in the rows, or a grader"
    last = turns[-1]
    answer, _ = answer_of(last.prompt, last.completion, "last", player.model)
    said = answer.model_dump(mode="json", exclude_none=True)
    earned = [0.0] * len(turns)
    earned[-1] = outcome.reward or 0.0
    metrics = dict(outcome.metrics)
    if episode.recorded:  # answers of an attempt that was killed, which this one did not ask for
        metrics["replaced"] = 1.0
    course = Course(
        end=end,
        messages=(*last.prompt.question.messages, {"content": "", **said}),
        turn_rewards=tuple(earned[number] for number in transcript.order),
        reward=outcome.reward,
        error=error,
        metrics=metrics,
        num_kept=transcript.num_kept,
        output="\n".join(filter(None, [outcome.output, *(_OF_OURS + note for note in episode.notes)])),
    )
    return transcript.played(course)


# --- The check before any accelerator is asked for ---


class CheckEnvironmentRequest(Frozen):
    """An environment, the prompts of its episodes, and the policy's model."""

    plan: EpisodePlan
    prompts: Artifact
    model: Artifact


class CheckEnvironment(OnHost):
    """The activity `check_environment`."""

    @on_thread("check_environment")
    def check_environment(self, request: CheckEnvironmentRequest) -> None:
        """Begin an episode of the first prompt. Raises InvalidInput: it does not begin, or cannot be written."""
        folder, settings, plan = self._host.stage(request.prompts), self._host.settings, request.plan
        with PromptsFile(folder) as prompts, closing(ChatPrompts(self._host)) as rendering:
            prompt = prompts[0]
            source = sources_of(folder, plan.source)[prompt.source]
            if plan.agent is not None and plan.agent.server is not None:
                check_server(settings, plan.agent, plan.agent.server, prompt)
                return
            if plan.agent is not None:
                check_agent(settings.agents, plan.agent, prompt, source)
                return
            assert plan.environment is not None
            process = EnvironmentProcess(plan.environment, prompt.item, 0, settings.grading)
            with closing(process):
                messages, observed, tools = begun(source, process, prompt)
                rendering.prompt(request.model, [*messages, *observed], tools)
