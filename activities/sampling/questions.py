"""Has a sampler answer a user's question to a published adapter or model, in a thread of a host's."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from activities.host_context import HostContext
from activities.sampling.chat import ChatPrompts, chat_completion, record_of, sampler_request
from activities.sampling.samplers import OpenSampler, Samplers, ServingAdapters, refusal
from activities.sampling.streamed import Tell
from activities.tokenizing.tokenizer import stopping_at, stops_of
from activities.tokenizing.tool_calls import text_before_calls
from shared.chat.answer_records import AnswerRecord, new_answer_id, remember
from shared.chat.completions import CompletionRequest, CompletionResponse
from shared.chat.messages import ChatCompletion, ChatRequest
from shared.errors import DiskFull, InvalidInput, SamplerUnavailable, StoreUnavailable
from shared.serving import CompleteRequest, ServedSampler

logger = logging.getLogger("longshore.questions")

_ATTEMPTS = 3
_FORM, _BIAS = "structured_outputs", "logit_bias"  # fields that samplers name


class OpenQuestion:
    """One running question. Another thread may hang up its client at any time.

    `tell`: takes the text of each choice as it grows; None if nobody wants it.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self.tell = tell
        self._lock = threading.Lock()
        self._close: Callable[[], None] | None = None
        self._is_over = False

    def hang_up(self) -> None:
        """Close the connection to the sampler, so that it stops."""
        with self._lock:
            self._is_over = True
            if self._close is not None:
                self._close()

    @contextmanager
    def connected(self, close: Callable[[], None]) -> Iterator[None]:
        """Have `close` called if the client hangs up during the block. Raises SamplerUnavailable if it has already."""
        with self._lock:
            if self._is_over:
                raise SamplerUnavailable("nobody waits for this answer any more")
            self._close = close
        try:
            yield
        finally:
            with self._lock:
                self._close = None


class Questions:
    """Answers questions. Safe to use from several threads. Call `close` at the end."""

    def __init__(self, host: HostContext, samplers: Samplers) -> None:
        self._host = host
        self._samplers = samplers
        self._prompts = ChatPrompts(host)
        self._adapters = ServingAdapters(host)

    def close(self) -> None:
        self._prompts.close()

    def answer(self, request: CompleteRequest, asking: OpenQuestion) -> ChatCompletion | CompletionResponse:
        """Ask a sampler.

        Raises:
            InvalidInput: the question cannot be answered; names the field.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now.
        """
        prompt_ids = None
        with self._samplers.open(request.place) as opened, asking.connected(opened.client.close):
            if isinstance(request.asked, ChatRequest):
                prompt_ids = self._prompts.ids(request.model, request.asked.messages, request.asked.offered_tools)
            if isinstance(request.place, ServedSampler):
                _check_base(opened, request)
            return self._answer(opened, request, prompt_ids, _shown(request, asking.tell))

    def _answer(
        self, opened: OpenSampler, request: CompleteRequest, prompt_ids: tuple[int, ...] | None, tell: Tell | None
    ) -> ChatCompletion | CompletionResponse:
        """Answer; try again if the adapter was unloaded to make room for another one before it could answer."""
        for attempt in range(_ATTEMPTS):
            model = self._adapters.use(opened, request.adapter)
            try:
                return self._drawn(opened, model, request, prompt_ids, tell)
            except SamplerUnavailable:
                if attempt + 1 == _ATTEMPTS or model in opened.client.models():
                    raise
        raise AssertionError("the last attempt answers or raises")

    def _drawn(
        self,
        opened: OpenSampler,
        model: str,
        request: CompleteRequest,
        prompt_ids: tuple[int, ...] | None,
        tell: Tell | None,
    ) -> ChatCompletion | CompletionResponse:
        asked, stops = request.asked, stops_of(request.place, self._host, request.model)
        if isinstance(asked, CompletionRequest):
            asked_for = {"model": model, "user": _asking(request)}
            drawn = _ask(opened, stopping_at(asked.model_copy(update=asked_for), stops), "prompt", tell)
            return drawn.model_copy(update={"model": asked.model})
        assert prompt_ids is not None
        wanted = stopping_at(sampler_request(asked, model, prompt_ids, _max_model_len(opened)), stops)
        wanted = wanted.model_copy(update={"user": _asking(request)})
        drawn = _ask(opened, wanted, "messages", tell, "tools" if asked.forced_tools else "response_format")
        bytes_of = self._prompts.tokenizer(request.model).bytes_of
        answer_id = request.answer_id or new_answer_id(time.time())
        answer = chat_completion(asked, drawn, bytes_of, answer_id, prompt_ids)
        record = record_of(answer, drawn, prompt_ids, request.model.sha256)
        if record is None or not self._remembers(request, record):
            return answer
        known = [choice.model_copy(update={"answer_id": answer.id}) for choice in answer.choices]
        return answer.model_copy(update={"choices": known})

    def _remembers(self, request: CompleteRequest, record: AnswerRecord) -> bool:
        """Store the answer's token ids. Returns False if that fails: the answer is then sent without its id."""
        if not self._host.settings.serving.answers_kept_s:
            return False
        try:
            named = record.model_copy(update={"name": request.name, "version": request.version})
            remember(self._host.store, request.tenant, named)
        except (StoreUnavailable, DiskFull) as error:
            logger.warning("an answer is not remembered, and can be trained on by its text alone: %s", error)
            return False
        return True


def _shown(request: CompleteRequest, tell: Tell | None) -> Tell | None:
    """Return the function that streams the answer's text, without tool calls; None if the client wants no stream."""
    if tell is None or not request.tells_text:
        return None
    if not (isinstance(request.asked, ChatRequest) and request.asked.offered_tools):
        return tell
    return lambda texts: tell(tuple(map(text_before_calls, texts)))


def _ask(
    opened: OpenSampler, request: CompletionRequest, place: str, tell: Tell | None, form: str = _FORM
) -> CompletionResponse:
    """Ask a sampler. A refusal names `form` if the sampler blames that, else the prompt, `place`."""
    try:
        return opened.client.complete(request, tell)
    except InvalidInput as error:
        field = (error.place or "").rpartition(":")[2]
        place = {_FORM: form, _BIAS: _BIAS}.get(field, place)
        raise refusal(opened.client, request.model, error, place) from error


def _asking(request: CompleteRequest) -> str:
    """Return a name of the caller that only distinguishes tenants."""
    return hashlib.sha256(request.tenant.encode()).hexdigest()[:16]


def _max_model_len(opened: OpenSampler) -> int:
    """The greatest length of prompt and answer together, in tokens."""
    length = opened.client.models()[opened.model].max_model_len
    if length is None:
        raise SamplerUnavailable("the sampler does not say how long a sequence it takes")
    return length


def _check_base(opened: OpenSampler, request: CompleteRequest) -> None:
    """Check that a server behind a URL serves the adapter's base model: its operator may have chosen another one.

    Raises InvalidInput: neither its id nor its root has the base model's name.
    """
    card = opened.client.models()[opened.model]
    if _last_name(request.base) not in [_last_name(name) for name in (card.id, card.root) if name]:
        raise InvalidInput(
            f"the installation's sampler serves {card.id}, and this was trained from {request.base}", "model"
        )


def _last_name(model: str) -> str:
    """Return a model's last name in lower case: `qwen3-8b` of s3://bucket/Qwen3-8B/ and of Qwen/Qwen3-8B@main."""
    path = unquote(urlsplit(model).path) if "://" in model else model.partition("@")[0]
    return PurePosixPath(path).name.lower()
