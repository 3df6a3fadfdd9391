"""Chat requests as a sampler's requests, and its answers as chat completions: pure functions."""

import math
from collections.abc import Callable, Sequence

from activities.tokenizing.tool_calls import NO_CALLS, told_calls
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
from shared.errors import InvalidInput, SamplerUnavailable

_NO_CHARACTER = "\ufffd"  # what a token of a part of a character is decoded to
_IMPOSSIBLE = -9999.0  # JSON has no infinity


def sampler_request(asked: ChatRequest, model: str, prompt_ids: Sequence[int], max_model_len: int) -> CompletionRequest:
    """The same question in tokens.

    Raises:
        InvalidInput: prompt and answer are longer than `max_model_len` together.
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
        logprobs=asked.top_logprobs or 0,  # also of answers that are asked for without: they may be trained on
        return_token_ids=True,
    )


def chat_completion(
    asked: ChatRequest,
    drawn: CompletionResponse,
    bytes_of: Callable[[int], bytes],
    answer_id: str,
    prompt_ids: Sequence[int],
) -> ChatCompletion:
    """A sampler's answer as the client expects it.

    Args:
        bytes_of: a token id's own bytes.
        answer_id: what the answer is to be known by.
        prompt_ids: what the sampler was asked with.

    Raises:
        SamplerUnavailable: the sampler gave a choice up.
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
    """The record of an answer; None where the sampler does not tell ids and logprobs of all of it."""
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
        logprobs=_logprobs(choice, asked.top_logprobs or 0, bytes_of) if asked.logprobs else None,
        finish_reason="tool_calls" if calls else choice.finish_reason,
        token_ids=choice.token_ids if asked.return_token_ids else None,
    )


def _logprobs(choice: Choice, num_top: int, bytes_of: Callable[[int], bytes]) -> ChoiceLogprobs:
    told = choice.logprobs
    if told is None or choice.token_ids is None or len(told.token_logprobs) != len(choice.token_ids):
        raise SamplerUnavailable("the sampler did not send a logprob a token")
    top = told.top_logprobs or [None] * len(told.tokens)
    rows = zip(told.tokens, told.token_logprobs, choice.token_ids, top, strict=True)
    return ChoiceLogprobs(
        content=[
            TokenLogprob(
                token=text,
                logprob=_IMPOSSIBLE if logprob is None else logprob,
                bytes=list(bytes_of(token_id)),
                top_logprobs=_likeliest(likely or {}, num_top),
            )
            for text, logprob, token_id, likely in rows
        ]
    )


def _likeliest(logprobs: dict[str, float], num_top: int) -> list[TopLogprob]:
    """In order. A sampler tells of the drawn token beside them, which may not be one."""
    ordered = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:num_top]
    return [
        TopLogprob(token=text, logprob=value, bytes=None if _NO_CHARACTER in text else list(text.encode()))
        for text, value in ordered
    ]
