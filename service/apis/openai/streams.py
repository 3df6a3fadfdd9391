"""Answers as streams of chunks: new text of each choice while it is sampled, then the rest of the finished answer."""

from collections.abc import Iterator
from typing import ClassVar

from service.inference.asking import PartialAnswer
from shared.chat.completions import Choice, CompletionChunk, CompletionResponse, ErrorDetail, ErrorResponse, Usage
from shared.chat.messages import ChatChoice, ChatChunk, ChatCompletion, ChunkChoice
from shared.errors import SamplerUnavailable

DONE = "data: [DONE]\n\n"


class SentTexts:
    """The text that was sent of each choice."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def begins(self, index: int) -> bool:
        """Return True the first time that a choice is asked about."""
        is_new = index not in self._texts
        self._texts.setdefault(index, "")
        return is_new

    def new(self, index: int, text: str) -> str:
        """Return the part of a choice's current text that has not been sent.

        Raises SamplerUnavailable: the text does not begin with the part that was sent.
        """
        sent = self._texts.get(index, "")
        if not text.startswith(sent):
            sent = sent.lstrip()  # of an answer with tool calls the text is stripped
        if not text.startswith(sent):
            raise SamplerUnavailable("the sampler was lost, and another one's answer differs: ask again")
        self._texts[index] = text
        return text[len(sent) :]


def failure(message: str) -> ErrorResponse:
    """Return the event that ends a stream whose answer does not come."""
    return ErrorResponse(error=ErrorDetail(message=message, type="server_error"))


class ChatChunks:
    """The chunks of an answer to messages: each choice's role, text, tool calls and finish reason.

    If the answer is remembered, a choice's first and last chunks have `answer_id`: openai's client takes a choice's
    extra fields from its first chunk.
    """

    end: ClassVar[str] = DONE

    def __init__(self, draft: PartialAnswer, model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._head = ChatChunk(id=draft.answer_id, created=draft.created, model=model, choices=[])
        self._sent = SentTexts()

    def grown(self, texts: tuple[str, ...]) -> Iterator[ChatChunk]:
        """Return what is new in the texts of the choices."""
        for index, text in enumerate(texts):
            if self._sent.begins(index):
                yield self._opening(index)
            if new := self._sent.new(index, text):
                yield self._chunk(ChunkChoice(index=index, delta={"content": new}))

    def rest(self, answer: ChatCompletion) -> Iterator[ChatChunk]:
        """Return the rest of the answer. Log-probabilities and token ids come with the last of the text."""
        prompt_ids = answer.prompt_token_ids
        for choice in answer.choices:
            if self._sent.begins(choice.index):
                yield self._opening(choice.index).model_copy(update={"prompt_token_ids": prompt_ids})
                prompt_ids = None
            yield from self._end(choice)
        if self._include_usage:
            yield self._chunk(usage=answer.usage)

    def failed(self, message: str) -> ErrorResponse:
        return failure(message)

    def _end(self, choice: ChatChoice) -> Iterator[ChatChunk]:
        text = self._sent.new(choice.index, choice.message.content or "")
        if text or choice.logprobs is not None or choice.token_ids is not None:
            piece = {"delta": {"content": text}, "logprobs": choice.logprobs, "token_ids": choice.token_ids}
            yield self._chunk(ChunkChoice.model_validate({"index": choice.index, **piece}))
        if calls := choice.message.tool_calls:
            deltas = [{"index": i, **call.model_dump()} for i, call in enumerate(calls)]
            yield self._chunk(ChunkChoice(index=choice.index, delta={"tool_calls": deltas}))
        ended = {"finish_reason": choice.finish_reason, "answer_id": choice.answer_id}
        yield self._chunk(ChunkChoice.model_validate({"index": choice.index, "delta": {}, **ended}))

    def _opening(self, index: int) -> ChatChunk:
        delta = {"role": "assistant", "content": ""}
        return self._chunk(ChunkChoice(index=index, delta=delta, answer_id=self._head.id))

    def _chunk(self, *choices: ChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return self._head.model_copy(update={"choices": [*choices], "usage": usage})


class TextChunks:
    """The chunks of a continued text: of each choice its text, then why it ended with all else that was asked for."""

    end: ClassVar[str] = DONE

    def __init__(self, draft: PartialAnswer, model: str, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        id = draft.answer_id.replace("chatcmpl", "cmpl")
        self._head = CompletionChunk(id=id, created=draft.created, model=model, choices=[])
        self._sent = SentTexts()

    def grown(self, texts: tuple[str, ...]) -> Iterator[CompletionChunk]:
        """Return what is new in the texts of the choices."""
        for index, text in enumerate(texts):
            if new := self._sent.new(index, text):
                yield self._chunk(Choice(index=index, text=new))

    def rest(self, answer: CompletionResponse) -> Iterator[CompletionChunk]:
        """Return the rest of the answer."""
        for choice in answer.choices:
            yield self._chunk(choice.model_copy(update={"text": self._sent.new(choice.index, choice.text)}))
        if self._include_usage:
            yield self._chunk(usage=answer.usage)

    def failed(self, message: str) -> ErrorResponse:
        return failure(message)

    def _chunk(self, *choices: Choice, usage: Usage | None = None) -> CompletionChunk:
        return self._head.model_copy(update={"choices": [*choices], "usage": usage})
