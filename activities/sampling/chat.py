"""Chat requests as a sampler's requests, in token ids, and its answers as chat completions."""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from activities.confined import calls as confined
from activities.formats.examples import Question
from activities.formats.messages import messages_of, tools_of
from activities.formats.rows import Row
from activities.host_context import HostContext
from activities.tokenizing.render_prompts import ids_before_answers
from activities.tokenizing.template_process import TemplateProcess
from activities.tokenizing.tokenizer import ModelTokenizer, check_characters, check_loading, tokenizer_files
from activities.tokenizing.tool_calls import NO_CALLS, forced_calls, told_calls
from longshore.fields import Artifact
from shared.chat.answer_records import AnswerRecord, DrawnChoice
from shared.chat.completions import Choice, CompletionRequest, CompletionResponse
from shared.chat.messages import (
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    TokenLogprob,
    TopLogprob,
)
from shared.chat.structured_outputs import ResponseFormat
from shared.errors import InvalidInput, SamplerUnavailable

_MAX_OPEN = 4  # models whose tokenizers stay loaded
_MAX_MEMORY_BYTES = 2 << 30  # a tokenizer that takes more memory to load is refused
_RENDER_LIMIT_S = 5.0
_PLACE = "messages"
_NO_CHARACTER = "\ufffd"  # the text of a token that is only a part of a character
_TEXT = ResponseFormat(type="text")
_IMPOSSIBLE = -9999.0  # JSON has no infinity


class ChatPrompts:
    """Renders conversations to token ids: the same ids that precede the answer in training.

    Safe to use from several threads, which render one at a time.
    """

    def __init__(self, host: HostContext) -> None:
        confinement = host.settings.confined
        limit = min(confinement.memory_bytes, _MAX_MEMORY_BYTES)
        self._limits = confinement.model_copy(update={"memory_bytes": limit})
        self._host = host
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[str, ModelTokenizer] = OrderedDict()
        self._templates: dict[str, TemplateProcess] = {}

    def tokenizer(self, model: Artifact) -> ModelTokenizer:
        """Return a model's tokenizer. Raises InvalidInput if it has none, CorruptArtifact if its files have changed."""
        with self._lock:
            return self._tokenizer(model)

    def ids(
        self, model: Artifact, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return a prompt's ids. Raises InvalidInput for malformed messages, or a template that is missing or fails."""
        check_characters(json.dumps([messages, tools], ensure_ascii=False), _PLACE)
        row = Row(_PLACE, {"messages": list(messages), "tools": list(tools)})
        question = Question(_PLACE, messages_of(row, "messages"), tools_of(row), {})
        with self._lock:
            tokenizer = self._tokenizer(model)
            text = self._rendered(model, tokenizer, question)
        check_characters(text, _PLACE)  # a template may make a long text of short messages
        return tuple(next(ids_before_answers([text], tokenizer)))

    def close(self) -> None:
        with self._lock:
            for sha256 in list(self._templates):
                self._forget(sha256)

    def _tokenizer(self, model: Artifact) -> ModelTokenizer:
        if model.sha256 not in self._tokenizers:
            files = tokenizer_files(self._host, model)
            confined.call(self._limits, check_loading, files)  # tried in a child, as it may abort the process
            self._tokenizers[model.sha256] = files.load()
            if len(self._tokenizers) > _MAX_OPEN:
                self._forget(self._tokenizers.popitem(last=False)[0])
        self._tokenizers.move_to_end(model.sha256)
        return self._tokenizers[model.sha256]

    def _rendered(self, model: Artifact, tokenizer: ModelTokenizer, question: Question) -> str:
        if tokenizer.template is None:
            raise InvalidInput("the model has no chat template: ask it for completions of a text", "model")
        try:
            if model.sha256 not in self._templates:
                process = TemplateProcess(tokenizer.template, tokenizer.place, _RENDER_LIMIT_S)
                self._templates[model.sha256] = process
            return self._templates[model.sha256].asked([question])[0].text
        except BaseException:  # also after a cancellation, as the process may still send its answer
            self._forget(model.sha256)
            raise

    def _forget(self, sha256: str) -> None:
        if (process := self._templates.pop(sha256, None)) is not None:
            with suppress(OSError):
                process.close()


def sampler_request(asked: ChatRequest, model: str, prompt_ids: Sequence[int], max_model_len: int) -> CompletionRequest:
    """Translate a chat request into a completion request in tokens.

    Raises InvalidInput: prompt and answer are longer than `max_model_len` together.
    """
    room = max_model_len - len(prompt_ids)
    max_tokens = asked.most_tokens or room
    if max_tokens > room or room < 1:
        wanted = f"max_tokens={max_tokens}" if asked.most_tokens else "an answer"
        raise InvalidInput(
            f"{len(prompt_ids)} tokens of messages and {wanted} do not fit into {max_model_len} tokens",
            "max_tokens" if asked.most_tokens and room > 0 else "messages",
        )
    return CompletionRequest(
        model=model,
        prompt=list(prompt_ids),
        n=asked.n or 1,
        max_tokens=max_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        stop=asked.stop or None,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=bool(asked.ignore_eos),
        seed=asked.seed,
        logprobs=asked.top_logprobs or 0,  # 0 still returns the sampled tokens' logprobs, which training may need
        return_token_ids=True,
        top_k=asked.top_k,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        structured_outputs=forced_calls(asked) or (asked.response_format or _TEXT).wanted,
    )


def chat_completion(
    asked: ChatRequest,
    drawn: CompletionResponse,
    bytes_of: Callable[[int], bytes],
    answer_id: str,
    prompt_ids: Sequence[int],
) -> ChatCompletion:
    """Convert a sampler's answer into a chat completion.

    Args:
        bytes_of: returns the bytes of a token.
        answer_id: the id of the completion.
        prompt_ids: the ids of the prompt.

    Raises:
        SamplerUnavailable: the sampler has given up one of the choices.
    """
    choices = sorted(drawn.choices, key=lambda choice: choice.index)
    return ChatCompletion(
        id=answer_id,
        created=drawn.created,
        model=asked.model,
        choices=[_choice(choice, asked, drawn.id, bytes_of) for choice in choices],
        usage=drawn.usage,
        prompt_token_ids=list(prompt_ids) if asked.return_token_ids else None,
    )


def record_of(
    answer: ChatCompletion, drawn: CompletionResponse, prompt_ids: Sequence[int], model_sha256: str
) -> AnswerRecord | None:
    """Return the record of an answer; None if the sampler did not send all ids and logprobs."""
    drawn_of = {choice.index: choice for choice in drawn.choices}
    choices = [_drawn_choice(choice, drawn_of[choice.index]) for choice in answer.choices]
    whole = [choice for choice in choices if choice is not None]
    if len(whole) < len(choices):
        return None
    return AnswerRecord(
        answer_id=answer.id, model_sha256=model_sha256, prompt_ids=tuple(prompt_ids), choices=tuple(whole)
    )


def _drawn_choice(told: ChatChoice, drawn: Choice) -> DrawnChoice | None:
    logprobs = [value for value in (drawn.logprobs.token_logprobs if drawn.logprobs else ()) if value is not None]
    if not drawn.token_ids or len(logprobs) != len(drawn.token_ids) or not all(map(math.isfinite, logprobs)):
        return None
    return DrawnChoice(
        content=told.message.content,
        tool_calls=told.message.tool_calls or (),
        token_ids=tuple(drawn.token_ids),
        logprobs=tuple(logprobs),
    )


def _choice(choice: Choice, asked: ChatRequest, answer_id: str, bytes_of: Callable[[int], bytes]) -> ChatChoice:
    if choice.finish_reason not in ("stop", "length"):
        raise SamplerUnavailable(f"the sampler gave a choice up: {choice.finish_reason}")
    text, calls = choice.text, NO_CALLS
    if asked.offered_tools and choice.finish_reason == "stop":
        text, calls = told_calls(choice.text, f"{answer_id}_{choice.index}")
    return ChatChoice(
        index=choice.index,
        message=ChatAnswer(content=None if calls and not text else text, tool_calls=calls or None),
        logprobs=_logprobs(choice, asked, bytes_of) if asked.logprobs else None,
        finish_reason="tool_calls" if calls else choice.finish_reason,
        token_ids=choice.token_ids if asked.return_token_ids else None,
    )


def _logprobs(choice: Choice, asked: ChatRequest, bytes_of: Callable[[int], bytes]) -> ChoiceLogprobs:
    told = choice.logprobs
    if told is None or choice.token_ids is None or len(told.token_logprobs) != len(choice.token_ids):
        raise SamplerUnavailable("the sampler did not send a logprob a token")
    top = told.top_logprobs or [None] * len(told.tokens)
    rows = zip(told.tokens, told.token_logprobs, choice.token_ids, top, strict=True)
    return ChoiceLogprobs(
        content=[
            TokenLogprob(
                token=f"token_id:{token_id}" if asked.return_tokens_as_token_ids else text,
                logprob=_IMPOSSIBLE if logprob is None else logprob,
                bytes=list(bytes_of(token_id)),
                top_logprobs=_likeliest(likely or {}, asked.top_logprobs or 0),
            )
            for text, logprob, token_id, likely in rows
        ]
    )


def _likeliest(logprobs: dict[str, float], num_top: int) -> list[TopLogprob]:
    """Return the likeliest tokens in order, without the sampled token if the sampler only added it to the list."""
    ordered = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:num_top]
    return [
        TopLogprob(token=text, logprob=value, bytes=None if _NO_CHARACTER in text else list(text.encode()))
        for text, value in ordered
    ]
