"""Answers to requests: the request is checked, sampled, and answered in OpenAI's fields. HTTP is in server.py."""

import base64
import io
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tokenizers import Tokenizer

from megatron_worker.sampler import generation
from megatron_worker.sampler.decoder import Decoder
from megatron_worker.sampler.drawing import Penalties
from megatron_worker.sampler.generation import End, Ending, RequestGroup, Sequence
from megatron_worker.sampler.models import Models, RequestRefused, parsed
from shared.chat.completions import (
    MAX_SAMPLES,
    TOKEN_ID,
    Choice,
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
    DrawnBy,
    ErrorDetail,
    ErrorResponse,
    LogprobsMode,
    PromptDetails,
    PromptLogprob,
    RoutedRequest,
    SamplerRequest,
    Sampling,
    ScoreAnswer,
    ScoreRequest,
    StructuredOutputs,
    TokenLogprobs,
    Usage,
)
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from megatron_worker.sampler.grammars.grammar import Grammar, Grammars

_NO_CHARACTER = "\ufffd"  # the text of tokens that are a part of a character
_FORM = "structured_outputs"
_CANCEL_PERIOD_S = 0.5
_STREAM_PERIOD_S = 0.03  # between two chunks of a stream
R = TypeVar("R", bound=SamplerRequest)


@dataclass(frozen=True)
class AnswerPiece:
    """Tokens `first` up to `last`, exclusive, of a sequence, and their text. Only the last piece has an end."""

    first: int
    last: int
    text: str
    end: End | None

    @classmethod
    def whole(cls, sequence: Sequence) -> "AnswerPiece":
        """Return a sequence that has ended as one piece."""
        return cls(0, len(sequence.token_ids), sequence.ending.text(sequence.token_ids), sequence.end)


class StreamChunks:
    """Cuts a sequence into pieces while another thread draws it. Together they have its tokens and its text."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._num_held = max((len(stop) for stop in sequence.sampling.stop), default=1) - 1
        self._num_tokens = 0
        self._text = ""
        self._has_ended = False

    def next(self) -> AnswerPiece | None:
        """Return what was drawn since the last call, as text; None if nothing was.

        Text that may change is held back: a character that is not complete, and what may begin a stop string.
        """
        end = self._sequence.end  # read first: all tokens were appended before it was set
        num_tokens = len(self._sequence.token_ids) if end else max(0, len(self._sequence.token_ids) - 1)
        if self._has_ended or (end is None and num_tokens == self._num_tokens):
            return None
        text = self._sequence.ending.text(self._sequence.token_ids) if end else self._settled(num_tokens)
        piece = AnswerPiece(self._num_tokens, num_tokens, text[len(self._text) :], end)
        self._num_tokens, self._text, self._has_ended = num_tokens, max(text, self._text, key=len), end is not None
        return piece

    def _settled(self, num_tokens: int) -> str:
        """Return the text of the first `num_tokens` tokens, as far as no later token can change it."""
        text = self._tokenizer.decode(self._sequence.token_ids[:num_tokens], skip_special_tokens=True)
        return text[: len(text) - self._num_held].rstrip(_NO_CHARACTER)


@dataclass(frozen=True)
class AnswerLimits:
    """The most tokens of prompt and completion together, and the kind of logprobs that is reported.

    `longest`: the most tokens that the model reads: what is only scored may be longer than what is drawn.
    """

    max_model_len: int
    logprobs_mode: LogprobsMode
    longest: int = sys.maxsize


class Answers:
    """Answers requests from many threads; the thread of `Generator.run` alone computes sequences."""

    def __init__(
        self,
        models: Models,
        decoder: Decoder,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        generator: generation.Generator,
        limits: AnswerLimits,
    ) -> None:
        self.models = models
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._generator = generator
        self._limits = limits
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._token_text = lru_cache(maxsize=1 << 16)(
            lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))
        )

    def complete(
        self, body: bytes, is_gone: Callable[[], bool]
    ) -> CompletionResponse | Generator[CompletionChunk | ErrorResponse, None, None] | None:
        """Complete prompts, in chunks if the request asks for a stream. None when the client has not waited."""
        request = parsed(RoutedRequest, body)
        if request.return_routed_experts and not self._decoder.architecture.num_experts:
            raise RequestRefused(400, "the model has no experts", "return_routed_experts")
        if request.return_routed_experts and (request.stream or not request.max_tokens):
            raise RequestRefused(400, "they are told of whole samples", "return_routed_experts")
        num_changes = self._generator.num_changes
        adapter = self.models.find(request.model)
        prompts = self._prompts(request)
        ticket = RequestGroup(adapter, self._sequences(request, prompts), num_changes)
        if not self._answered(ticket, is_gone, streams=bool(request.stream)):
            return None
        return self._chunks(request, ticket, is_gone) if request.stream else self._response(request, ticket)

    def score(self, body: bytes, is_gone: Callable[[], bool]) -> ScoreAnswer | None:
        """Score conversations by a reward model. None when the client has not waited."""
        request = parsed(ScoreRequest, body)
        num_changes = self._generator.num_changes
        adapter = self.models.find(request.model, scores=True)
        fits = [len(ids) <= self._limits.longest for ids in request.prompts]
        read = [self._checked(tuple(ids), 0, len(ids)) for ids, fit in zip(request.prompts, fits, strict=True) if fit]
        ticket = RequestGroup(adapter, [Sequence.scored(prompt, self._tokenizer) for prompt in read], num_changes)
        if read and not self._answered(ticket, is_gone):
            return None
        told = iter(ticket.sequences)
        return ScoreAnswer(scores=[next(told).scalars if fit else None for fit in fits])

    def _answered(self, ticket: RequestGroup, is_gone: Callable[[], bool], streams: bool = False) -> bool:
        """Wait for a ticket's sequences, of a stream for the first token. False when the client has not waited."""
        self._generator.submit(ticket)
        # A stream is only begun with its first token, as a refusal must come before it.
        while not ticket.done.wait(_STREAM_PERIOD_S if streams else _CANCEL_PERIOD_S):
            if streams and ticket.has_begun:
                break
            if is_gone():
                ticket.cancelled = True
                return False
        if ticket.is_late:
            raise RequestRefused(503, "the weights have changed: ask again")
        if ticket.problem is not None:
            raise RequestRefused(400, ticket.problem.message, ticket.problem.place)
        return True

    def _prompts(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        prompts = _several(request.prompt)
        if len(prompts) * request.n > MAX_SAMPLES:
            raise RequestRefused(400, f"a request may ask for {MAX_SAMPLES} samples of all its prompts together", "n")
        if not prompts:
            raise RequestRefused(400, "there is no prompt", "prompt")
        return [self._checked(self._ids(prompt), request.max_tokens) for prompt in prompts]

    def _ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt)

    def _checked(self, prompt: tuple[int, ...], max_tokens: int, most: int | None = None) -> tuple[int, ...]:
        vocab_size, length = self._decoder.architecture.vocab_size, most or self._limits.max_model_len
        if not prompt:
            raise RequestRefused(400, "a prompt has no tokens", "prompt")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise RequestRefused(400, f"a token id is outside the vocabulary of {vocab_size}", "prompt")
        if len(prompt) + max_tokens > length:
            message = f"{len(prompt)} tokens of a prompt and max_tokens={max_tokens} are more than {length} together"
            raise RequestRefused(400, message, "max_tokens", "context_length_exceeded")
        return prompt

    def _sequences(self, request: RoutedRequest, prompts: list[tuple[int, ...]]) -> list[Sequence]:
        sampling, penalties = _sampling(request), self._penalties(request)
        grammar = None if request.structured_outputs is None else self._grammar(request, request.structured_outputs)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
        num_prompt_top = max((each for each in asked if each is not None), default=None)
        return [
            Sequence(
                prompt,
                sampling,
                seed + j,
                Ending(sampling, self._end_ids, self._tokenizer),
                num_top=request.logprobs or 0,
                top_k=request.top_k if request.top_k and request.top_k > 0 else sys.maxsize,
                min_p=request.min_p or 0.0,
                penalties=penalties,
                grammar=grammar,
                num_prompt_top=num_prompt_top,
                draws_nothing=not request.max_tokens,
                asking=request.user or "",
                tells_routes=request.return_routed_experts,
            )
            for prompt in prompts
            for j in range(request.n)
        ]

    def _penalties(self, request: CompletionRequest) -> Penalties:
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        if max(bias, default=0) >= (vocab_size := self._decoder.architecture.vocab_size):
            raise RequestRefused(400, f"a token id is outside the vocabulary of {vocab_size}", "logit_bias")
        return Penalties(bias, request.presence_penalty or 0.0, request.frequency_penalty or 0.0)

    def _grammar(self, request: CompletionRequest, wanted: StructuredOutputs) -> "Grammar":
        if request.ignore_eos:
            raise RequestRefused(400, "an answer of a given form ends with the model's end token", "ignore_eos")
        try:
            with self._grammars_lock:
                if self._grammars is None:
                    from megatron_worker.sampler.grammars.grammar import Grammars

                    vocab_size = self._decoder.architecture.vocab_size
                    self._grammars = Grammars(self._tokenizer, vocab_size, self._end_ids)
            return self._grammars.compiled(wanted, request.user or "")
        except ImportError:
            raise RequestRefused(400, "this sampler has no llguidance, which gives answers their form", _FORM) from None
        except InvalidInput as error:
            raise RequestRefused(400, error.message, error.place) from None

    def _response(self, request: CompletionRequest, ticket: RequestGroup) -> CompletionResponse:
        return CompletionResponse(
            id=_new_id(),
            created=int(time.time()),
            model=request.model,
            choices=[
                self._choice(request, i, each, AnswerPiece.whole(each)) for i, each in enumerate(ticket.sequences)
            ],
            usage=_usage(request, ticket),
            drawn_by=list(dict.fromkeys(each for s in ticket.sequences for each in s.drawn_by)),
        )

    def _chunks(
        self, request: CompletionRequest, ticket: RequestGroup, is_gone: Callable[[], bool]
    ) -> Generator[CompletionChunk | ErrorResponse, None, None]:
        """Yield what is new, from time to time. The request is cancelled if the caller stops iterating."""
        head = CompletionChunk(id=_new_id(), created=int(time.time()), model=request.model, choices=[])
        pieces = [StreamChunks(sequence, self._tokenizer) for sequence in ticket.sequences]
        try:
            is_over = False
            while not is_over and not is_gone():
                is_over = ticket.done.wait(_STREAM_PERIOD_S)
                news = [(i, piece) for i, each in enumerate(pieces) if (piece := each.next()) is not None]
                if news:
                    choices = [self._choice(request, i, ticket.sequences[i], piece) for i, piece in news]
                    yield head.model_copy(update={"choices": choices})
            if ticket.problem is not None:
                kind, problem = "invalid_request_error", ticket.problem
                yield ErrorResponse(error=ErrorDetail(message=problem.message, type=kind, param=problem.place))
            elif is_over and request.stream_options is not None and request.stream_options.include_usage:
                yield head.model_copy(update={"usage": _usage(request, ticket)})
        finally:
            ticket.cancelled = True

    def _choice(self, request: CompletionRequest, index: int, sequence: Sequence, piece: AnswerPiece) -> Choice:
        """Return a piece of a sequence as a choice. The first one carries the prompt's scores."""
        tells_prompt = piece.first == 0
        prompt_text = self._text(_several(request.prompt)[index // request.n]) if request.echo and tells_prompt else ""
        return Choice(
            index=index,
            text=prompt_text + piece.text,
            finish_reason=piece.end and piece.end.finish_reason,
            stop_reason=piece.end and piece.end.stop_reason,
            logprobs=None if request.logprobs is None else self._logprobs(request, sequence, piece),
            token_ids=sequence.token_ids[piece.first : piece.last] if request.return_token_ids else None,
            prompt_token_ids=list(sequence.prompt) if request.return_token_ids and tells_prompt else None,
            prompt_logprobs=None
            if request.prompt_logprobs is None or not tells_prompt
            else self._prompt_logprobs(sequence, request.prompt_logprobs),
            policy_versions=_versions(sequence.drawn_by[piece.first : piece.last]),
            routed_experts=self._routes(sequence) if sequence.tells_routes else None,
        )

    def _routes(self, sequence: Sequence) -> str:
        file, dtype = io.BytesIO(), np.min_scalar_type(self._decoder.architecture.num_experts - 1)
        np.save(file, np.concatenate(sequence.routes).astype(dtype), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()

    def _prompt_logprobs(self, sequence: Sequence, num_top: int) -> list[dict[int, PromptLogprob] | None]:
        scores = sequence.prompt_scores
        assert scores is not None
        told: list[dict[int, PromptLogprob] | None] = [None]
        for token, logprob, rank, top in zip(
            sequence.prompt[1:], scores.logprobs, scores.ranks, scores.top, strict=True
        ):
            likely = [(each, value, place) for place, (each, value) in enumerate(top[:num_top], 1)]
            told.append(
                {
                    each: PromptLogprob(logprob=value, rank=place, decoded_token=self._token_text(each))
                    for each, value, place in (*likely, (token, logprob, rank))
                }
            )
        return told

    def _logprobs(self, request: CompletionRequest, sequence: Sequence, piece: AnswerPiece) -> TokenLogprobs:
        """Return the logprobs of a piece's tokens; of an echoed prompt, whose first token has none, with the first."""
        values = sequence.raw if self._limits.logprobs_mode == "raw_logprobs" else sequence.processed
        drawn = slice(piece.first, piece.last)
        tops = sequence.top[drawn] if sequence.num_top else [[] for _ in sequence.token_ids[drawn]]
        rows: list[tuple[int, float | None, list[tuple[int, float]]]] = []
        before = [*(sequence.prompt if request.echo else ()), *sequence.token_ids[: piece.first]]
        if request.echo and piece.first == 0:
            scores, before = sequence.prompt_scores, []
            assert scores is not None
            rows = [(sequence.prompt[0], None, [])]
            rows += zip(sequence.prompt[1:], scores.logprobs, scores.top, strict=True)
        rows += zip(sequence.token_ids[drawn], values[drawn], tops, strict=True)
        by_id = bool(request.return_tokens_as_token_ids)
        texts = [self._token_text(token) for token, _, _ in rows]
        names = [f"{TOKEN_ID}{token}" for token, _, _ in rows] if by_id else texts
        offsets = accumulate(map(len, texts), initial=sum(len(self._token_text(token)) for token in before))
        return TokenLogprobs(
            tokens=names,
            token_logprobs=[value for _, value, _ in rows],
            text_offset=list(offsets)[:-1],
            top_logprobs=[
                None if value is None else self._likeliest(top[: request.logprobs], by_id) | {name: value}
                for name, (_, value, top) in zip(names, rows, strict=True)
            ],
        )

    def _likeliest(self, top: list[tuple[int, float]], by_id: bool) -> dict[str, float]:
        """Name likely tokens, by their text or their id. If two have the same text, the likelier one stays."""
        return {f"{TOKEN_ID}{token}" if by_id else self._token_text(token): value for token, value in reversed(top)}

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)


def _versions(drawn_by: list[DrawnBy]) -> list[int | None] | None:
    """Return the version of the policy that drew each token; None if none is known."""
    versions = [each.policy_version for each in drawn_by]
    return versions if any(version is not None for version in versions) else None


def _new_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"


def _usage(request: CompletionRequest, ticket: RequestGroup) -> Usage:
    num_prompt = sum(len(sequence.prompt) for sequence in ticket.sequences) // request.n
    num_drawn = sum(len(sequence.token_ids) for sequence in ticket.sequences)
    num_reused = sum(sequence.num_reused for sequence in ticket.sequences[:: request.n])
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_drawn,
        total_tokens=num_prompt + num_drawn,
        prompt_tokens_details=PromptDetails(cached_tokens=num_reused) if num_reused else None,
    )


def _several(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return a list of prompts: a text or a list of ids is one prompt, a list of those several."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [part for part in prompt if isinstance(part, int)]
    return [ids] if ids else [part for part in prompt if not isinstance(part, int)]


def _sampling(request: CompletionRequest) -> Sampling:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stop):
        raise RequestRefused(400, "a stop string may not be empty", "stop")
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=max(1, request.max_tokens),
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
    )
