"""A client of any sampler that speaks vLLM's OpenAI-compatible protocol: ours, or a vLLM server.

Blocking, and safe to share between threads. What fails in passing is tried again, a bounded number of times: a seeded
completion is the same however often it is asked for.
"""

import math
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from shared.completions import (
    Choice,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    Sampling,
)
from shared.errors import InvalidInput, SamplerUnavailable

if TYPE_CHECKING:
    import httpx

M = TypeVar("M", bound=BaseModel)
_WORTH_RETRYING = (408, 409, 425, 429)
# Of one request: from its last byte to the answer's first, and how often it is made.
TIMEOUT_S, ATTEMPTS = 600.0, 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# vLLM would take these from the model's generation_config.json, and draw from another distribution.
_PLAIN = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Completion:
    """One sample. `logprobs` are the sampler's, in nats, one for each of `token_ids`, which keep the end token.

    Attributes:
        was_cut_off: it reached max_tokens, and did not end by itself.
        stop_reason: the stop string or token that ended it; None for the model's own end token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    was_cut_off: bool
    stop_reason: int | str | None


class Sampler:
    """One server.

    Args:
        url: without `/v1`.
        timeout_s: of one request, from its last byte to the answer's first.
        attempts: how often a request is made before SamplerUnavailable is raised.

    Every method raises InvalidInput for what the server refuses (4xx) and SamplerUnavailable for what passes.
    """

    def __init__(
        self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S, attempts: int = ATTEMPTS
    ) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        # A proxy of the environment has nothing to do with a sampler; as many connections as callers have threads.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        self._url = url.rstrip("/")
        self._attempts = attempts
        self._sockets: list[socket.socket] = []
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up on requests of other threads, so that nobody draws on for nobody."""
        self._is_closed = True
        for connection in self._sockets:
            _hang_up(connection)
        self._client.close()

    def _note(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            connection = info["return_value"].get_extra_info("socket")
            self._sockets.append(connection)
            if self._is_closed:  # by another thread while this one connected
                _hang_up(connection)

    def sample(
        self, model: str, prompt_ids: tuple[int, ...], sampling: Sampling, n: int, seed: int
    ) -> tuple[Completion, ...]:
        """`n` samples; sample j is drawn with `seed + j`, so that it can be asked for alone: `n=1, seed=seed + j`."""
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            "n": n,
            "seed": seed,
            **sampling.model_dump(mode="json", exclude={"stop", "stop_token_ids"}),
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "logprobs": 0,  # of the sampled tokens alone
            "return_token_ids": True,
            **_PLAIN,
        }
        answer = _parsed(CompletionResponse, self._ask("POST", "/v1/completions", body), self._url)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(n)):
            raise InvalidInput(f"the sampler sent {len(choices)} samples where {n} were asked for", self._url)
        return tuple(self._completion(choice) for choice in choices)

    def _completion(self, choice: Choice) -> Completion:
        if choice.token_ids is None or choice.logprobs is None:
            raise InvalidInput("the sampler sends no token ids or logprobs (vLLM does from 0.10.2 on)", self._url)
        if choice.finish_reason not in ("stop", "length"):
            raise SamplerUnavailable(f"{self._url}: a sample was given up: {choice.finish_reason}")
        logprobs = tuple(value for value in choice.logprobs.token_logprobs if value is not None)
        if len(logprobs) != len(choice.token_ids) or not all(map(math.isfinite, logprobs)):
            raise InvalidInput("the sampler's logprobs are not one finite number a token", self._url)
        return Completion(
            tuple(choice.token_ids), logprobs, choice.text, choice.finish_reason == "length", choice.stop_reason
        )

    def complete(self, request: CompletionRequest) -> CompletionResponse:
        """A request as it is, and its answer as it is."""
        body = request.model_dump(mode="json", exclude_none=True) | _PLAIN
        return _parsed(CompletionResponse, self._ask("POST", "/v1/completions", body), self._url)

    def score(self, model: str, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs of token_ids[1:], each given those before it, in nats, at temperature 1."""
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = _parsed(CompletionResponse, self._ask("POST", "/v1/completions", body), self._url)
        told = answer.choices[0].prompt_logprobs if answer.choices else None
        if told is None or len(told) != len(token_ids):
            raise InvalidInput("the sampler does not send prompt_logprobs, one a token", self._url)
        found = [(by_id or {}).get(token) for token, by_id in zip(token_ids[1:], told[1:], strict=True)]
        logprobs = tuple(one.logprob for one in found if one is not None)
        if len(logprobs) != len(found) or not all(map(math.isfinite, logprobs)):
            raise InvalidInput("the sampler's prompt_logprobs are not one finite number a token", self._url)
        return logprobs

    def models(self) -> dict[str, ModelCard]:
        """What requests may name: the model and its adapters."""
        answer = _parsed(ModelList, self._ask("GET", "/v1/models"), self._url)
        return {card.id: card for card in answer.data}

    def load_adapter(self, name: str, folder: str) -> None:
        """Repeating it is harmless; the same name from another folder is InvalidInput."""
        try:
            self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except InvalidInput:
            card = self.models().get(name)  # an earlier attempt's answer may have been lost on the way
            if card is None or card.root != folder:
                raise

    def unload_adapter(self, name: str) -> None:
        """Repeating it is harmless."""
        try:
            self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except InvalidInput:
            if name in self.models():
                raise

    def is_healthy(self) -> bool:
        """Asked once, without retries."""
        import httpx

        try:
            return self._client.get("/health", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> "httpx.Response":
        import httpx

        problem = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(_pause_s(attempt))
            try:
                response = self._client.request(method, path, json=body, extensions={"trace": self._note})
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            problem = f"{response.status_code}: {_message(response)}"
            if response.status_code < 500 and response.status_code not in _WORTH_RETRYING:
                raise InvalidInput(f"the sampler refuses ({problem})", f"{self._url}{path}")
        raise SamplerUnavailable(f"{self._url}{path}: no answer after {self._attempts} attempts ({problem})")


def _hang_up(connection: socket.socket) -> None:
    """Merely closed, a socket stays open for as long as a thread reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _pause_s(attempt: int) -> float:
    """Doubling, up to a bound, and spread so that many clients do not come back together."""
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))


def _message(response: "httpx.Response") -> str:
    """What the server says is wrong, in OpenAI's shape or as it is."""
    try:
        return ErrorResponse.model_validate_json(response.content).error.message
    except ValidationError:
        return response.text[:500]


def _parsed(model: type[M], response: "httpx.Response", place: str) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"the sampler's answer makes no sense: {where}: {first['msg']}", place) from error
