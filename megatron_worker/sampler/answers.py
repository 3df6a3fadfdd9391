"""Answers to requests: the request is checked, sampled, and answered in OpenAI's fields. HTTP is in server.py."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from tokenizers import Tokenizer

from megatron_worker.sampler.decoder import Adapter, Decoder, load_adapter
from megatron_worker.sampler.generation import Ending, Generator, Sequence, Ticket
from shared.chat.completions import (
    MAX_SAMPLES,
    Choice,
    CompletionRequest,
    CompletionResponse,
    LoadAdapterRequest,
    LogprobsMode,
    ModelCard,
    ModelList,
    PromptLogprob,
    Request,
    Sampling,
    TokenLogprobs,
    UnloadAdapterRequest,
    Usage,
)
from shared.errors import InvalidInput
from shared.models import peft as peft_format

_CANCEL_PERIOD_S = 0.5
R = TypeVar("R", bound=Request)


class Refused(Exception):
    """A request is refused: an answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """The most tokens of prompt and completion together, and the kind of logprobs that is reported."""

    max_model_len: int
    logprobs_mode: LogprobsMode


class Answers:
    """Answers requests from many threads; the thread of `Generator.run` alone computes sequences."""

    def __init__(
        self,
        name: str,
        folder: Path,
        decoder: Decoder,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        generator: Generator,
        limits: Limits,
    ) -> None:
        self._base = Adapter(name, str(folder), {})
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._generator = generator
        self._limits = limits
        self._adapters: dict[str, Adapter] = {}
        self._lock = threading.Lock()
        self._created = int(time.time())
        self._token_text = lru_cache(maxsize=1 << 16)(self._decode_one)

    # Models.

    def models(self) -> ModelList:
        with self._lock:
            adapters = list(self._adapters.values())
        cards = [self._card(adapter, self._base.name) for adapter in adapters]
        return ModelList(data=[self._card(self._base, None), *cards])

    def _card(self, adapter: Adapter, parent: str | None) -> ModelCard:
        name, folder, length = adapter.name, adapter.folder, self._limits.max_model_len
        return ModelCard(id=name, created=self._created, root=folder, parent=parent, max_model_len=length)

    def load(self, body: bytes) -> str:
        request = _parse(LoadAdapterRequest, body)
        self._refuse_taken(request.lora_name)
        folder = Path(request.lora_path)
        if not (folder / peft_format.CONFIG).is_file():
            raise Refused(404, f"no adapter is at {folder}: it has no {peft_format.CONFIG}", "lora_path")
        try:
            adapter = load_adapter(request.lora_name, folder, self._decoder)
        except InvalidInput as error:
            raise Refused(400, f"the adapter cannot be used: {error}", "lora_path") from error
        with self._lock:
            self._refuse_taken(request.lora_name)
            self._adapters[request.lora_name] = adapter
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    def _refuse_taken(self, name: str) -> None:
        if name == self._base.name or name in self._adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded: unload it first", "lora_name")

    def unload(self, body: bytes) -> str:
        """Unload an adapter. Sequences that are being drawn from it go on."""
        name = _parse(UnloadAdapterRequest, body).lora_name
        with self._lock:
            if self._adapters.pop(name, None) is None:
                raise Refused(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _find(self, name: str) -> Adapter:
        with self._lock:
            adapter = self._base if name == self._base.name else self._adapters.get(name)
        if adapter is None:
            raise Refused(404, f"The model `{name}` does not exist.", "model", "model_not_found")
        return adapter

    # Completions.

    def complete(self, body: bytes, is_gone: Callable[[], bool]) -> CompletionResponse | None:
        """Complete prompts; None when the client did not wait for the answer."""
        request = _parse(CompletionRequest, body)
        adapter = self._find(request.model)
        prompts = self._prompts(request)
        ticket = Ticket(adapter, self._sequences(request, prompts))
        self._generator.submit(ticket)
        while not ticket.done.wait(_CANCEL_PERIOD_S):
            if is_gone():
                ticket.cancelled = True
                return None
        return self._response(request, prompts, ticket)

    def _prompts(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        prompts = _several(request.prompt)
        if len(prompts) * request.n > MAX_SAMPLES:
            raise Refused(400, f"a request may ask for {MAX_SAMPLES} samples of all its prompts together", "n")
        if not prompts:
            raise Refused(400, "there is no prompt", "prompt")
        return [self._checked(self._ids(prompt), request.max_tokens) for prompt in prompts]

    def _ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt)

    def _checked(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        vocab_size, length = self._decoder.architecture.vocab_size, self._limits.max_model_len
        if not prompt:
            raise Refused(400, "a prompt has no tokens", "prompt")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise Refused(400, f"a token id is outside the vocabulary of {vocab_size}", "prompt")
        if len(prompt) + max_tokens > length:
            message = f"{len(prompt)} tokens of a prompt and max_tokens={max_tokens} are more than {length} together"
            raise Refused(400, message, "max_tokens", "context_length_exceeded")
        return prompt

    def _sequences(self, request: CompletionRequest, prompts: list[tuple[int, ...]]) -> list[Sequence]:
        sampling = _sampling(request)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        return [
            Sequence(
                prompt,
                sampling,
                seed + j,
                Ending(sampling, self._end_ids, self._tokenizer),
                num_top=request.logprobs or 0,
                scores_prompt=request.prompt_logprobs is not None,
            )
            for prompt in prompts
            for j in range(request.n)
        ]

    def _response(
        self, request: CompletionRequest, prompts: list[tuple[int, ...]], ticket: Ticket
    ) -> CompletionResponse:
        num_prompt, num_drawn = sum(map(len, prompts)), sum(len(s.token_ids) for s in ticket.sequences)
        return CompletionResponse(
            id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=request.model,
            choices=[self._choice(request, index, sequence) for index, sequence in enumerate(ticket.sequences)],
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_drawn, total_tokens=num_prompt + num_drawn),
        )

    def _choice(self, request: CompletionRequest, index: int, sequence: Sequence) -> Choice:
        assert sequence.end is not None
        return Choice(
            index=index,
            text=sequence.ending.text(sequence.token_ids),
            finish_reason=sequence.end.finish_reason,
            stop_reason=sequence.end.stop_reason,
            logprobs=None if request.logprobs is None else self._logprobs(sequence),
            token_ids=sequence.token_ids if request.return_token_ids else None,
            prompt_token_ids=list(sequence.prompt) if request.return_token_ids else None,
            prompt_logprobs=None if sequence.prompt_scores is None else self._prompt_logprobs(sequence),
        )

    def _prompt_logprobs(self, sequence: Sequence) -> list[dict[int, PromptLogprob] | None]:
        assert sequence.prompt_scores is not None
        return [
            None,
            *(
                {token: PromptLogprob(logprob=logprob, rank=rank, decoded_token=self._token_text(token))}
                for token, logprob, rank in zip(sequence.prompt[1:], *sequence.prompt_scores, strict=True)
            ),
        ]

    def _logprobs(self, sequence: Sequence) -> TokenLogprobs:
        values = sequence.raw if self._limits.logprobs_mode == "raw_logprobs" else sequence.processed
        texts = [self._token_text(token) for token in sequence.token_ids]
        offsets = [0]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        likeliest: list[dict[str, float] | None] = []
        for number, text in enumerate(texts):
            row = sequence.top[number] if sequence.top else []
            likeliest.append({self._token_text(token): value for token, value in row} | {text: values[number]})
        return TokenLogprobs(tokens=texts, token_logprobs=list(values), text_offset=offsets, top_logprobs=likeliest)

    def _decode_one(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _several(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return a list of prompts: a text or a list of ids is one prompt, a list of those several."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [part for part in prompt if isinstance(part, int)]
    return [ids] if ids else [part for part in prompt if not isinstance(part, int)]


def _sampling(request: CompletionRequest) -> Sampling:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stop):
        raise Refused(400, "a stop string may not be empty", "stop")
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_tokens,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
    )


def _parse(model: type[R], body: bytes) -> R:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refused(400, f"{place}: {first['msg']}" if place else first["msg"], place or None) from error
