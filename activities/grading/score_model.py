"""Grading by a model: for each sample one chat completion of an OpenAI-compatible server."""

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from typing import Any

from activities.grading.outcome import NotGraded, attempt
from activities.sources.http import parse_http_uri, requested, shown_uri
from shared.errors import InvalidInput, StoreUnavailable
from shared.grading.graders import SampledItem, SampleGrade, ScoreModelGrader
from shared.grading.templates import TemplateError, render
from shared.settings import DownloadSettings, GradingSettings

_PAUSES_S = (1.0, 4.0)  # before the second and the third try
_LONGEST_PAUSE_S = 20.0
_MAX_ANSWER_BYTES = 4 << 20
_WORTH_RETRYING = (408, 409, 425, 429)
_FENCE = "```"


class ScoreModel:
    """Grades samples by asking a model, on an OpenAI-compatible server, for a score of each."""

    def __init__(self, grader: ScoreModelGrader, settings: GradingSettings, allow_private_addresses: bool) -> None:
        """Raises InvalidInput if no server is named, or its URL is not allowed."""
        self._grader = grader
        self._server = ModelServer(grader.base_url, settings, allow_private_addresses, "grader.base_url")
        self._concurrency = settings.score_model_concurrency

    def grade_all(self, rows: Sequence[SampledItem]) -> list[SampleGrade]:
        """Grade rows, several at a time. Returns for each row, in order, a grade or the reason why there is none.

        Raises:
            InvalidInput: the server refuses the request (4xx), or may not be asked.
            StoreUnavailable: it cannot be reached, or is too busy.
        """
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(lambda row: attempt(lambda: self._grade(row)), rows))

    def _grade(self, row: SampledItem) -> float:
        try:
            messages = [{"role": m.role, "content": render(m.template, row.namespaces)} for m in self._grader.input]
        except TemplateError as error:
            raise NotGraded(str(error)) from error
        answer = self._server.ask("/chat/completions", request_body(self._grader, messages))
        return score_in(answer, self._grader.range)


class ModelServer:
    """An OpenAI-compatible server that a user names, or the operator, whose key no other server gets."""

    def __init__(self, url: str | None, settings: GradingSettings, allow_private_addresses: bool, place: str) -> None:
        """Raises InvalidInput if no server is named (at `place` of the request), or its URL is not allowed."""
        url = url or settings.score_model_url
        if url is None:
            raise InvalidInput("name the server as base_url, or set grading.score_model_url", place)
        is_own = settings.score_model_url is not None and url.rstrip("/") == settings.score_model_url.rstrip("/")
        parse_http_uri(url)
        self._url = url.rstrip("/")
        self._key = settings.score_model_key if is_own else None
        # A server that the operator named may be on a private network.
        self._connect = DownloadSettings(
            allow_private_addresses=is_own or allow_private_addresses, timeout_s=settings.score_model_timeout_s
        )

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Post a request; retry if the server is busy. Returns the answer's JSON.

        Raises:
            NotGraded: the answer is too long, or no JSON.
            InvalidInput, StoreUnavailable: as `ScoreModel.grade_all`.
        """
        data = json.dumps(body).encode()
        for pause_s in _PAUSES_S:
            try:
                return self._ask_once(path, data)
            except _Busy as busy:
                time.sleep(min(_LONGEST_PAUSE_S, pause_s if busy.wait_s is None else busy.wait_s))
        try:
            return self._ask_once(path, data)
        except _Busy as busy:
            raise StoreUnavailable(f"{shown_uri(self._url)}: {busy}") from busy

    def _ask_once(self, path: str, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "longshore"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            with requested("POST", self._url + path, self._connect, headers, body) as response:
                return self._answer(response, _body(response, self._connect.timeout_s))
        except (OSError, HTTPException) as error:
            raise _Busy(f"the connection failed ({error or type(error).__name__})") from error

    def _answer(self, response: HTTPResponse, data: bytes) -> Any:
        said = f"the server answered {response.status} {response.reason}".rstrip()
        if response.status >= 500 or response.status in _WORTH_RETRYING:
            text = response.getheader("Retry-After", "")
            raise _Busy(said, float(text) if text.isascii() and text.isdigit() else None)
        if response.status != 200:
            text = data[:300].decode(errors="replace")
            text = text.replace(self._key, "…") if self._key else text  # some servers echo the request
            raise InvalidInput(f"{said}: {text}", shown_uri(self._url))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise NotGraded("the scoring server's answer is not JSON") from error


class _Busy(Exception):
    """The server is too busy; the request may be repeated, after `wait_s` seconds if the server said so."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        self.wait_s = wait_s
        super().__init__(message)


def _body(response: HTTPResponse, limit_s: float) -> bytes:
    """Read the whole answer, in bounded time and space however slowly it drips."""
    deadline = time.monotonic() + limit_s
    found = bytearray()
    while piece := response.read1(1 << 16):
        found += piece
        if len(found) > _MAX_ANSWER_BYTES:
            raise NotGraded(f"the scoring server answered with more than {_MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer does not end")
    return bytes(found)


def request_body(grader: ScoreModelGrader, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the request of a chat completion: a system message on the form of the answer, then the user's messages."""
    low, high = grader.range
    shape = (
        "You grade. Judge as the messages that follow say, and answer with one JSON object and nothing else: "
        f'{{"reasoning": "<in short>", "result": <a number from {low:g} to {high:g}>}}'
    )
    body: dict[str, Any] = {"model": grader.model, "messages": [{"role": "system", "content": shape}, *messages]}
    if grader.sampling_params:
        body |= grader.sampling_params.model_dump(exclude_none=True)
    if "max_completions_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_completions_tokens")
    return body


def score_in(answer: Any, bounds: tuple[float, float]) -> float:
    """The score in a chat completion: a JSON object's `result`, or a number alone. Raises NotGraded."""
    match answer:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            pass
        case _:
            raise NotGraded("the scoring server's answer has no choices[0].message.content")
    said = _unfenced(text.strip())
    try:
        parsed = json.loads(said)
        score = parsed["result"] if isinstance(parsed, dict) else parsed
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError("not a number")
        value = float(score)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:
        raise NotGraded(f"the scoring model gave no score but {said[:200]!r}") from error
    low, high = bounds
    if not (math.isfinite(value) and low <= value <= high):
        raise NotGraded(f"the scoring model gave {value:g}, outside its range {low:g} to {high:g}")
    return value


def _unfenced(text: str) -> str:
    """Strip a Markdown fence that encloses a whole text."""
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    return text[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()
