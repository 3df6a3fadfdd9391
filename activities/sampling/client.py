"""A client of any sampler that speaks vLLM's OpenAI-compatible protocol: ours, or a vLLM server.

Blocking, and safe to share between threads (sample.py makes calls on a few). It retries
temporary failures a bounded number of times: a seeded completion is the same however often it is asked for.
"""

import math
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ValidationError

from activities.heartbeats import pause, stop_if_cancelled
from activities.sandbox import calls as confined
from shared.chat.completions import (
    Choice,
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
    DrawnBy,
    ErrorDetail,
    ErrorResponse,
    ModelCard,
    ModelList,
    SamplerMemory,
    Sampling,
    ScoreAnswer,
    TokenLogprobs,
    Usage,
)
from shared.errors import InvalidInput, SamplerUnavailable
from shared.field_rules import first_rule
from shared.settings import ConfinedSettings

if TYPE_CHECKING:
    import ssl

    import httpx


# --- Answers of samplers, read: whole, or as streams of events, with the text of each choice as it grows ---

M = TypeVar("M", bound=BaseModel)
MAX_EVENT_BYTES = 2 << 20
_DATA = "data:"
Tell = Callable[[tuple[str, ...]], None]


class StreamedAnswer:
    """The answer that the events of one response make. `tell` is given the texts of all choices after each event.

    Args:
        num_choices: the expected number.
        place: names the server in errors.
    """

    def __init__(self, num_choices: int, tell: Tell, place: str) -> None:
        self._num_choices = num_choices
        self._tell = tell
        self._place = place
        self.begin()

    def begin(self) -> None:
        """Forget the results of an earlier attempt."""
        self._parts: list[list[Choice]] = [[] for _ in range(self._num_choices)]
        self._texts = [""] * self._num_choices
        self._head: CompletionChunk | None = None
        self._usage: Usage | None = None

    def line(self, line: str) -> None:
        """Take a line of the response.

        Raises:
            InvalidInput: it is not an event of this answer, or the sampler refuses to continue the request.
            SamplerUnavailable: the sampler reports another error.
        """
        data = line.removeprefix(_DATA).strip()
        if not line.startswith(_DATA) or data == "[DONE]":
            return
        chunk = self._parsed(data)
        self._head = self._head or chunk
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            if not 0 <= choice.index < len(self._parts):
                raise InvalidInput(f"the sampler sends a choice {choice.index}", self._place)
            self._parts[choice.index].append(choice)
            self._texts[choice.index] += choice.text
        if chunk.choices:
            self._tell(tuple(self._texts))

    def _parsed(self, data: str) -> CompletionChunk:
        try:
            return CompletionChunk.model_validate_json(data)
        except ValidationError as error:
            if (reported := _reported(data)) is not None:
                if reported.type == "invalid_request_error":
                    place = f"{self._place}:{reported.param}"
                    raise InvalidInput(f"the sampler refuses ({reported.message[:500]})", place) from error
                raise SamplerUnavailable(f"{self._place}: {reported.message[:500]}") from error
            raise InvalidInput(f"the sampler's answer makes no sense: {first_rule(error)}", self._place) from error

    def answer(self) -> CompletionResponse:
        """Return the answer when the response has ended. Raises SamplerUnavailable if it ended before the answer."""
        choices = [_joined(index, parts) for index, parts in enumerate(self._parts)]
        if self._head is None or self._usage is None or any(choice.finish_reason is None for choice in choices):
            raise SamplerUnavailable(f"{self._place}: the stream ended before the answer")
        return CompletionResponse(
            id=self._head.id, created=self._head.created, model=self._head.model, choices=choices, usage=self._usage
        )


def _joined(index: int, parts: list[Choice]) -> Choice:
    """Put the pieces of a choice together."""
    last = next((part for part in reversed(parts) if part.finish_reason), None)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    token_ids = [part.token_ids for part in parts if part.token_ids is not None]
    return Choice(
        index=index,
        text="".join(part.text for part in parts),
        finish_reason=last and last.finish_reason,
        stop_reason=last and last.stop_reason,
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
        token_ids=[id for ids in token_ids for id in ids] if token_ids else None,
        prompt_token_ids=next((part.prompt_token_ids for part in parts if part.prompt_token_ids is not None), None),
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
    )


def _joined_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs:
    def of(rows: Callable[[TokenLogprobs], list[Any] | None]) -> list[Any]:
        return [each for part in parts for each in rows(part) or ()]

    return TokenLogprobs(
        tokens=of(lambda part: part.tokens),
        token_logprobs=of(lambda part: part.token_logprobs),
        text_offset=of(lambda part: part.text_offset) or None,
        top_logprobs=of(lambda part: part.top_logprobs) or None,
    )


def _reported(data: str | bytes) -> ErrorDetail | None:
    """Return an error that a server sends instead of an event, or of an answer."""
    try:
        return ErrorResponse.model_validate_json(data).error
    except ValidationError:
        return None


def bounded_pieces(response: "httpx.Response", max_bytes: int, place: str) -> Iterator[bytes]:
    """Yield an answer's bytes as they come. Raises InvalidInput if there are more than `max_bytes`."""
    num_bytes = 0
    for piece in response.iter_raw():
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise InvalidInput(f"the sampler answers with more than {max_bytes:,} bytes", place)
        yield piece


def lines(response: "httpx.Response", max_bytes: int, place: str) -> Iterator[str]:
    """Yield an answer's lines as they come. Raises InvalidInput if they, or one of them, are too long."""
    rest = b""
    for piece in bounded_pieces(response, max_bytes, place):
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise InvalidInput(f"the sampler sends an event of more than {MAX_EVENT_BYTES:,} bytes", place)
        yield from (line.decode(errors="replace") for line in whole)


def read_large_answer(text: str, place: str, max_tokens: int) -> CompletionResponse:
    """Parse an answer. Raises InvalidInput if it is malformed, or has more tokens than were asked for."""
    found = parsed(CompletionResponse, text.encode(), place)
    if sum(len(choice.token_ids or ()) for choice in found.choices) > max_tokens:
        raise InvalidInput("the sampler sends more tokens than were asked for", place)
    return found


def parsed(model: type[M], content: bytes, place: str) -> M:
    """Read an answer's JSON. Raises InvalidInput if it is malformed."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise InvalidInput(f"the sampler's answer makes no sense: {first_rule(error)}", place) from error


_WORTH_RETRYING = (408, 409, 425, 429)
# Seconds from a request's last byte to the answer's first, and how often a request is made.
TIMEOUT_S, ATTEMPTS = 600.0, 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# Bounds on an answer's length: bytes for each token (text, id, logprob), each likelier token beside it, and the rest.
_BYTES_A_TOKEN, _LIKELY_BYTES, _OTHER_BYTES = 512, 256, 1 << 20
_BYTES_AN_EVENT = 2048  # of a stream, each with a token
_MAX_ANSWER_BYTES = 128 << 20
_MODELS_BYTES = 4 << 20
_LARGE_BYTES = 2 << 20  # longer answers of servers that are not trusted are parsed in a child process
# Set explicitly: otherwise vLLM takes these from the model's generation_config.json.
_PLAIN = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Events of httpcore; after them a connection has a socket.
_CONNECTED = (
    "connection.connect_tcp.complete",
    "connection.connect_unix_socket.complete",
    "connection.start_tls.complete",
)


@dataclass(frozen=True)
class Completion:
    """One sample. `logprobs` are the sampler's, in nats, one for each of `token_ids`, which keep the end token.

    Attributes:
        policy_versions: the version of the policy that drew each token, None if the sampler does not say; or empty.
        drawn_by: the weights that drew it and the request's options, as far as the sampler reports them.
        was_cut_off: it reached max_tokens, and did not end by itself.
        stop_reason: the stop string or token that ended it; None for the model's own end token.
        routed_experts: as Choice has them, if they were asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    was_cut_off: bool
    stop_reason: int | str | None
    policy_versions: tuple[int | None, ...] = ()
    drawn_by: tuple[DrawnBy, ...] = ()
    routed_experts: str | None = None


class Sampler:
    """A client of one server.

    Args:
        url: without `/v1`.
        timeout_s: of one request, from its last byte to the answer's first.
        attempts: how often a request is made before SamplerUnavailable is raised.
        confinement: for a server that is not trusted: limits of the child process that parses its large answers.
        socket_path: the Unix socket on which the server listens, instead of the address of `url`.

    Every method raises InvalidInput if the server refuses the request (4xx), and SamplerUnavailable for passing faults.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        confinement: ConfinedSettings | None = None,
        socket_path: str | None = None,
    ) -> None:
        import httpx

        self._url = url.rstrip("/")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        # No proxy from the environment (trust_env). No limit on connections: each thread that calls needs one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        tls = _tls() if self._url.startswith("https:") else False
        transport = httpx.HTTPTransport(verify=tls, limits=limits, trust_env=False, uds=socket_path)
        self._client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout, transport=transport)
        self._socket_path = socket_path
        self._attempts = attempts
        self._confined = confinement
        self._sockets: list[socket.socket] = []
        self._sockets_lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, also of other threads' requests, so that the server stops sampling for them."""
        self.hang_up()
        self._client.close()

    def hang_up(self) -> None:
        """Have all requests fail, those of other threads too, and those that are still to be made."""
        self._is_closed = True
        with self._sockets_lock:
            for connection in self._sockets:
                _hang_up(connection)

    def _note(self, event: str, info: dict[str, Any]) -> None:
        if event in _CONNECTED:
            connection = info["return_value"].get_extra_info("socket")
            with self._sockets_lock:
                self._sockets = [each for each in self._sockets if each.fileno() >= 0]  # those still open
                self._sockets.append(connection)
            if self._is_closed:  # by another thread while this one connected
                _hang_up(connection)

    def sample(
        self, model: str, prompt_ids: tuple[int, ...], sampling: Sampling, n: int, seed: int, route_bytes: int = 0
    ) -> tuple[Completion, ...]:
        """Draw `n` samples. Sample j has the seed `seed + j`: a request with `n=1` and that seed gives it again.

        `route_bytes`: of a token's experts in an answer, if they are asked for; else 0.
        """
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            "n": n,
            "seed": seed,
            **_PLAIN,
            **sampling.model_dump(mode="json", exclude={"stop", "stop_token_ids"}),
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "logprobs": 0,  # only those of the sampled tokens
            "return_token_ids": True,
        } | ({"return_routed_experts": True} if route_bytes else {})
        most_routed = 2 * n * (len(prompt_ids) + sampling.max_tokens) * route_bytes  # in base64
        answer = self._completions(body, len(prompt_ids) + n * sampling.max_tokens, other_bytes=most_routed)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(n)):
            raise InvalidInput(f"the sampler sent {len(choices)} samples instead of {n}", self._url)
        return tuple(self._completion(choice, tuple(answer.drawn_by or ())) for choice in choices)

    def _completion(self, choice: Choice, drawn_by: tuple[DrawnBy, ...]) -> Completion:
        if choice.token_ids is None or choice.logprobs is None:
            raise InvalidInput("the sampler sends no token ids or logprobs (vLLM does from 0.10.2 on)", self._url)
        if choice.finish_reason not in ("stop", "length"):
            raise SamplerUnavailable(f"{self._url}: a sample was given up: {choice.finish_reason}")
        logprobs = tuple(value for value in choice.logprobs.token_logprobs if value is not None)
        if len(logprobs) != len(choice.token_ids) or not all(map(math.isfinite, logprobs)):
            raise InvalidInput("the sampler's logprobs are not one finite number a token", self._url)
        versions = tuple(choice.policy_versions or ())
        if versions and len(versions) != len(choice.token_ids):
            raise InvalidInput("the sampler's policy_versions are not one a token", self._url)
        return Completion(
            token_ids=tuple(choice.token_ids),
            logprobs=logprobs,
            text=choice.text,
            was_cut_off=choice.finish_reason == "length",
            stop_reason=choice.stop_reason,
            policy_versions=versions,
            drawn_by=drawn_by,
            routed_experts=choice.routed_experts,
        )

    def complete(self, request: CompletionRequest, tell: Tell | None = None) -> CompletionResponse:
        """Pass on a request and its answer as they are. `tell` is given the choices' texts as they are drawn."""
        body = _PLAIN | request.model_dump(mode="json", exclude_none=True, exclude={"stream", "stream_options"})
        num_choices = request.n * request.num_prompts
        if tell is None:
            return self._completions(body, request.most_tokens, request.num_likely)
        num_bytes = _OTHER_BYTES + request.most_tokens * (_BYTES_AN_EVENT + request.num_likely * _LIKELY_BYTES)
        max_bytes, found = min(num_bytes, _MAX_ANSWER_BYTES), StreamedAnswer(num_choices, tell, self._url)

        def take(response: "httpx.Response") -> bytes:
            found.begin()
            for line in lines(response, max_bytes, self._url):
                found.line(line)
            return b""

        body |= {"stream": True, "stream_options": {"include_usage": True}}
        self._ask("POST", "/v1/completions", body, max_bytes, take)
        return found.answer()

    def score(self, model: str, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs of token_ids[1:], each given those before it, in nats, at temperature 1."""
        return self.scored_by(model, token_ids)[0]

    def scored_by(self, model: str, token_ids: tuple[int, ...]) -> tuple[tuple[float, ...], DrawnBy]:
        """Score as `score` does. Also returns the weights that scored, as far as the sampler reports them."""
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._completions(body, len(token_ids) + 1)
        told = answer.choices[0].prompt_logprobs if answer.choices else None
        if told is None or len(told) != len(token_ids):
            raise InvalidInput("the sampler does not send prompt_logprobs, one a token", self._url)
        found = [(by_id or {}).get(token) for token, by_id in zip(token_ids[1:], told[1:], strict=True)]
        logprobs = tuple(one.logprob for one in found if one is not None)
        if len(logprobs) != len(found) or not all(map(math.isfinite, logprobs)):
            raise InvalidInput("the sampler's prompt_logprobs are not one finite number a token", self._url)
        return logprobs, answer.drawn_by[0] if answer.drawn_by else DrawnBy()

    def rewards(self, model: str, prompts: list[tuple[int, ...]]) -> list[list[float | None] | None]:
        """Score conversations by a reward model in our own sampler, as ScoreAnswer says."""
        body = {"model": model, "prompts": [list(ids) for ids in prompts]}
        found = parsed(ScoreAnswer, self._ask("POST", "/v1/score", body), self._url).scores
        if len(found) != len(prompts):
            raise InvalidInput(f"the sampler sent {len(found)} scores for {len(prompts)} conversations", self._url)
        return found

    @property
    def place(self) -> str:
        """The server's address: the path of its Unix socket, or its URL."""
        return self._socket_path or self._url

    def models(self) -> dict[str, ModelCard]:
        """List the names that requests may use: the model and its adapters."""
        answer = parsed(ModelList, self._ask("GET", "/v1/models", max_bytes=_MODELS_BYTES), self._url)
        return {card.id: card for card in answer.data}

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter, unless it is loaded. Raises InvalidInput if the name has another folder."""
        try:
            self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except InvalidInput:
            card = self.models().get(name)  # an earlier attempt's answer may have been lost on the way
            if card is None or card.root != folder:
                raise

    def load_weights(self, name: str, folder: str, again: bool = False) -> None:
        """Replace the model's weights by a folder's, under a name. Only samplers that hosts lease do this.

        `again`: also if they are already served.
        """
        self._ask("POST", "/v1/load_weights", {"name": name, "path": folder} | ({"again": True} if again else {}))

    def name_weights(self, name: str, digest: str) -> bool:
        """Name weights or an adapter that came by a weight sync. False if the sampler does not have them."""
        try:
            self._ask("POST", "/v1/name_weights", {"name": name, "digest": digest})
        except InvalidInput:
            return False
        return True

    def update_weights(self, name: str, version: int, folder: str | None, *, is_adapter: bool) -> None:
        """Replace older versions of a policy in a leased sampler by this one; `folder` None: the unchanged model.

        Samples in progress continue under it. A version that is not newer than the current one changes nothing.
        """
        body = {"name": name, "version": version, "path": folder, "lora": is_adapter}
        self._ask("POST", "/v1/update_weights", body)

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Keep a sampler's weights from being replaced by a trainer for a `with` block. A vLLM takes none from one."""
        import httpx

        place = f"{self._url}/v1/hold_weights"
        with ExitStack() as held:
            try:
                asked = self._client.stream("POST", "/v1/hold_weights", extensions={"trace": self._note})
                response = held.enter_context(asked)
            except httpx.TransportError as error:
                stop_if_cancelled()
                raise SamplerUnavailable(f"{place}: {type(error).__name__}: {error}") from error
            if response.status_code not in (200, 404):
                raise SamplerUnavailable(f"{place}: {response.status_code}")
            yield

    def sleep(self, level: Literal[1, 2]) -> SamplerMemory:
        """Make our own sampler free its memory when its running sequences have ended."""
        return parsed(SamplerMemory, self._ask("POST", "/v1/sleep", {"level": level}), self._url)

    def wake(self) -> SamplerMemory:
        """Have our own sampler take its memory again. One that is awake stays so."""
        return parsed(SamplerMemory, self._ask("POST", "/v1/wake"), self._url)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, if it is loaded."""
        try:
            self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except InvalidInput:
            if name in self.models():
                raise

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        max_bytes: int = _OTHER_BYTES,
        take: Callable[["httpx.Response"], bytes] | None = None,
    ) -> bytes:
        """Make a request, with retries, and return the answer's body. Raises as described for the class.

        `take`: reads a successful answer, instead of the bounded read.
        """
        import httpx

        problem, place, extensions = "", f"{self._url}{path}", {"trace": self._note}
        for attempt in range(self._attempts):
            longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)) if attempt else 0.0
            pause(longest_s * random.uniform(0.5, 1.0))
            try:
                with self._client.stream(method, path, json=body, extensions=extensions) as response:
                    status = response.status_code
                    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                        rule = f"the sampler sends its answer as {encoding!r:.40}, which it was not asked for"
                        raise InvalidInput(rule, place)  # unpacked, it may be of any size
                    if take is not None and status == 200:
                        content = take(response)
                    else:
                        content = b"".join(bounded_pieces(response, max_bytes, place))
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            finally:
                stop_if_cancelled()  # whatever a connection that was shut down raises
            if 200 <= status < 300:
                return content
            told = _reported(content)  # which need not have OpenAI's shape
            message, field = (told.message, told.param) if told else (content[:500].decode(errors="replace"), None)
            problem = f"{status}: {message[:500]}"
            if status < 500 and status not in _WORTH_RETRYING:
                raise InvalidInput(f"the sampler refuses ({problem})", f"{place}:{field}" if field else place)
        raise SamplerUnavailable(f"{place}: no answer after {self._attempts} attempts ({problem})")

    def _completions(
        self, body: dict[str, Any], num_tokens: int, likely: int = 0, other_bytes: int = 0
    ) -> CompletionResponse:
        """Ask for completions. The answer's length is bounded by `num_tokens`, `likely` tokens beside each, and
        `other_bytes` beside them all."""
        num_bytes = _OTHER_BYTES + num_tokens * (_BYTES_A_TOKEN + likely * _LIKELY_BYTES)
        answer = self._ask("POST", "/v1/completions", body, min(num_bytes, _MAX_ANSWER_BYTES) + other_bytes)
        if len(answer) <= _LARGE_BYTES or self._confined is None:
            return parsed(CompletionResponse, answer, self._url)
        text = answer.decode(errors="replace")
        return confined.call(self._confined, read_large_answer, text, self._url, num_tokens)


@cache
def _tls() -> "ssl.SSLContext":
    """Read the certificate authorities once: that takes some 24 ms, which every question would else wait for."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


def _hang_up(connection: socket.socket) -> None:
    """Shut a connection down: if it is only closed, it stays open while a thread reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
