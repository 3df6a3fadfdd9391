"""Answers of samplers, read: whole, or as streams of events, with the text of each choice as it grows."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared.chat.completions import (
    Choice,
    CompletionChunk,
    CompletionResponse,
    ErrorDetail,
    ErrorResponse,
    TokenLogprobs,
    Usage,
)
from shared.errors import InvalidInput, SamplerUnavailable
from shared.field_rules import first_rule

if TYPE_CHECKING:
    import httpx

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


def _reported(data: str) -> ErrorDetail | None:
    """Return an error that a server sends instead of an event."""
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


def error_of(answer: bytes) -> tuple[str, str | None]:
    """Return an error's message and the field that it names, if it has OpenAI's shape; else the answer's beginning."""
    try:
        error = ErrorResponse.model_validate_json(answer).error
    except ValidationError:
        return answer[:500].decode(errors="replace"), None
    return error.message[:500], error.param


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
