"""Has a sampler answer a user's question to a published adapter or model, in a thread of a host's."""

import hashlib
import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from activities.formats.rows import Chat, Question, Row, message_of, messages_of, tools_of
from activities.host_context import HostContext
from activities.sampling.client import Tell
from activities.sampling.samplers import OpenSampler, Samplers, ServingAdapters, refusal
from activities.sandbox import calls as confined
from activities.tokenizing.render_prompts import ids_before_answers
from activities.tokenizing.tokenizer import (
    ModelTokenizer,
    TemplateProcess,
    check_characters,
    check_loading,
    stopping_at,
    stops_of,
    tokenizer_files,
)
from longshore.fields import Artifact
from shared.chat.completions import (
    Choice,
    CompletionRequest,
    CompletionResponse,
    ResponseFormat,
    StructuralTag,
    StructuredOutputs,
    Tag,
    TagContent,
    Tags,
    Usage,
)
from shared.chat.episodes import (
    EpisodeTurn,
    answer_before,
    answered_turn,
    check_turns,
    conversation_digest,
    record_turn,
)
from shared.chat.messages import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    name_of,
    parameters_of,
)
from shared.chat.trajectories import AnswerRecord, DrawnChoice, new_answer_id, remember
from shared.errors import DiskFull, InvalidInput, SamplerUnavailable, StoreUnavailable
from shared.serving import CompleteRequest, LeasedSampler, SamplerPlace, ServedSampler

# --- Converts tool calls between two forms: of chat completions, and in the text of an answer ---
#
# In texts the form of Qwen's and Hermes' templates is recognised: for each call `<tool_call>`, a JSON object with a
# name and arguments, `</tool_call>`. Other forms stay text.

_BEGIN, _END = "<tool_call>", "</tool_call>"
NO_CALLS: tuple[ToolCall, ...] = ()


def forced_calls(asked: ChatRequest) -> StructuredOutputs | None:
    """Return the form of an answer that calls one of the forced tools, or several; None if none is forced."""
    tags = [
        Tag(
            begin=f'{_BEGIN}\n{{"name": {json.dumps(name_of(tool), ensure_ascii=False)}, "arguments": ',
            content=TagContent(json_schema=parameters_of(tool)),
            end=f"}}\n{_END}",
        )
        for tool in asked.forced_tools
    ]
    if not tags:
        return None
    tag = StructuralTag(format=Tags(tags=tags, stop_after_first=asked.may_call_once))
    return StructuredOutputs(structural_tag=tag.model_dump_json())


def told_calls(text: str, answer_id: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split an answer into text and tool calls. If one call is broken, the whole answer is text.

    `answer_id`: unique to this answer; the calls' ids contain it.
    """
    blocks, rest = _taken_out(text)
    functions = [_function(block) for block in blocks]
    calls = [function for function in functions if function is not None]
    if not calls or len(calls) < len(functions) or _BEGIN in rest or _END in rest:
        return text, NO_CALLS
    numbered = (ToolCall(id=f"call_{answer_id}_{i}", function=function) for i, function in enumerate(calls))
    return rest.strip(), tuple(numbered)


def text_before_calls(text: str) -> str:
    """Return an unfinished answer's text before its first tool call, without a tail that may be the start of a call."""
    begin = text.find(_BEGIN)
    if begin < 0:
        begin = next((n for n in range(max(0, len(text) - len(_BEGIN)), len(text)) if _BEGIN.startswith(text[n:])), -1)
    return (text if begin < 0 else text[:begin]).rstrip()


def _taken_out(text: str) -> tuple[list[str], str]:
    """Split a text into the blocks between tags and the rest, in linear time even if many tags are not closed."""
    blocks, around, at = [], [], 0
    while (begin := text.find(_BEGIN, at)) >= 0 and (end := text.find(_END, begin)) >= 0:
        around.append(text[at:begin])
        blocks.append(text[begin + len(_BEGIN) : end])
        at = end + len(_END)
    return blocks, "".join((*around, text[at:]))


def _function(block: str) -> CalledFunction | None:
    try:
        said = json.loads(block)
    except (ValueError, RecursionError):
        return None
    match said:
        case {"name": str(name), "arguments": dict(arguments)} if name:
            return CalledFunction(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        case _:
            return None


# --- Chat requests as a sampler's requests, in token ids, and its answers as chat completions ---

_MAX_OPEN = 4  # models whose tokenizers stay loaded
_MAX_MEMORY_BYTES = 2 << 30  # a tokenizer that takes more memory to load is refused
_RENDER_LIMIT_S = 5.0
_PLACE = "messages"
_NO_CHARACTER = "\ufffd"  # the text of a token that is only a part of a character
_TEXT = ResponseFormat(type="text")
_IMPOSSIBLE = -9999.0  # JSON has no infinity
_SAME = ("stop_token_ids", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")


T = TypeVar("T")
Earlier = Callable[[str], AnswerRecord | None]
"""Returns the answer that ends a conversation, by its digest; None if there is none."""
_MOST_EARLIER = 8  # answers of a conversation that are looked for, the last ones first


@dataclass(frozen=True)
class Prompt:
    """The ids of a question.

    Attributes:
        after: the answer of the episode that ends the question's beginning, and the number of messages up to it.
        continues: the ids begin with that answer's.
    """

    ids: tuple[int, ...]
    question: Question
    after: tuple[int, AnswerRecord] | None = None
    continues: bool = False

    def conversation(self, answer: ChatAnswer) -> str:
        """Return the digest of the conversation that an answer makes."""
        told = answer.model_dump(mode="json", include={"role", "content", "tool_calls"}, exclude_none=True)
        said = message_of(Row(_PLACE, {}), "answer", {"content": "", **told})
        return conversation_digest([*self.question.messages, said], self.question.tools)


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

    def prompt(
        self,
        model: Artifact,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        earlier: Earlier | None = None,
    ) -> Prompt:
        """Return a prompt. Raises InvalidInput for malformed messages, or a template that is missing or fails.

        `earlier`: finds answers of the same episode, whose ids are kept as they were drawn.
        """
        check_characters(json.dumps([messages, tools], ensure_ascii=False), _PLACE)
        row = Row(_PLACE, {"messages": list(messages), "tools": list(tools)})
        question = Question(_PLACE, messages_of(row, "messages"), tools_of(row), {})
        text = self._by_template(model, lambda template: template.asked([question])[0].text)
        check_characters(text, _PLACE)  # a template may make a long text of short messages
        found = _last_answer(question, earlier) if earlier is not None else None
        ids = None if found is None else self._continued(model, question, text, *found)
        if ids is not None:
            return Prompt(ids, question, found, continues=True)
        return Prompt(tuple(next(ids_before_answers([text], self.tokenizer(model)))), question, found)

    def _continued(
        self, model: Artifact, question: Question, text: str, num: int, record: AnswerRecord
    ) -> tuple[int, ...] | None:
        """Return a prompt's ids after those of an earlier answer; None if the template rewrites what was before.

        However it writes the answer itself, only the text after the answer's end is taken from the template.

        Args:
            text: the whole prompt, rendered.
            num: the messages up to the answer.
        """
        messages, tools, drawn = question.messages, question.tools, record.choices[0]
        weights = [float(n == num) for n in range(1, len(messages) + 1)]
        chat, asked = Chat(_PLACE, messages, tools, weights), Question(_PLACE, messages[: num - 1], tools, {})
        try:
            [whole] = self._by_template(model, lambda template: template.spans([chat]))
            [before] = self._by_template(model, lambda template: template.asked([asked]))
        except InvalidInput:
            return None
        tokenizer = self.tokenizer(model)
        is_rewritten = not (text.startswith(whole.text) and whole.text.startswith(before.text))
        if is_rewritten or whole.dropped_reasoning or not whole.spans:
            return None
        begin, end = whole.spans[0].start, whole.spans[-1].end
        end_id = tokenizer.tokens_of(whole.text[begin:end])[-1]
        end_text = tokenizer.decode([end_id])
        is_closed = drawn.token_ids[-1] == end_id
        if not whole.text[:end].endswith(end_text) or (drawn.finish_reason == "stop" and not is_closed):
            return None
        # With the end before it, as tokens may depend on what is before them.
        after = next(ids_before_answers([end_text + text[end:]], tokenizer))
        if after[0] != end_id:
            return None
        return (*record.prompt_ids, *drawn.token_ids, *(after[1:] if is_closed else after))

    def close(self) -> None:
        with self._lock:
            for sha256 in list(self._templates):
                self._forget(sha256)

    def _tokenizer(self, model: Artifact) -> ModelTokenizer:
        if model.sha256 not in self._tokenizers:
            files = tokenizer_files(self._host, model)
            confined.call(
                self._limits, check_loading, files, reads=[files.folder]
            )  # tried in a child, as it may abort the process
            self._tokenizers[model.sha256] = files.load()
            if len(self._tokenizers) > _MAX_OPEN:
                self._forget(self._tokenizers.popitem(last=False)[0])
        self._tokenizers.move_to_end(model.sha256)
        return self._tokenizers[model.sha256]

    def _by_template(self, model: Artifact, ask: Callable[[TemplateProcess], T]) -> T:
        """Ask the process that renders a model's template, which no other thread asks meanwhile.

        The process is given up if it raises, also at a cancellation, as it may still send its answer.
        """
        with self._lock:
            tokenizer = self._tokenizer(model)
            if tokenizer.template is None:
                raise InvalidInput("the model has no chat template: ask it for completions of a text", "model")
            try:
                if model.sha256 not in self._templates:
                    process = TemplateProcess(tokenizer.template, tokenizer.place, _RENDER_LIMIT_S)
                    self._templates[model.sha256] = process
                return ask(self._templates[model.sha256])
            except BaseException:
                self._forget(model.sha256)
                raise

    def _forget(self, sha256: str) -> None:
        if (process := self._templates.pop(sha256, None)) is not None:
            with suppress(OSError):
                process.close()


def _last_answer(question: Question, earlier: Earlier) -> tuple[int, AnswerRecord] | None:
    """Find the last answer of a conversation that is an earlier turn's: the number of messages up to it, and it."""
    ends = [n for n, message in enumerate(question.messages, 1) if message["role"] == "assistant"]
    for num in reversed(ends[-_MOST_EARLIER:]):
        if (record := earlier(conversation_digest(question.messages[:num], question.tools))) is not None:
            return num, record
    return None


def sampler_request(
    asked: ChatRequest, model: str, prompt_ids: Sequence[int], max_model_len: int, *, takes_fewer: bool = False
) -> CompletionRequest:
    """Translate a chat request into a completion request in tokens.

    `takes_fewer`: the answer is as long as there is room for, at most.

    Raises InvalidInput: prompt and answer are longer than `max_model_len` together.
    """
    room = max_model_len - len(prompt_ids)
    max_tokens = asked.most_tokens or room
    if takes_fewer:
        max_tokens = min(max_tokens, room)
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
        ignore_eos=bool(asked.ignore_eos),
        logprobs=asked.top_logprobs or 0,  # 0 still returns the sampled tokens' logprobs, which training may need
        return_token_ids=True,
        structured_outputs=forced_calls(asked) or (asked.response_format or _TEXT).wanted,
        **{name: getattr(asked, name) for name in _SAME},
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
        finish_reason="length" if told.finish_reason == "length" else "stop",
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
        stop_reason=choice.stop_reason,
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
        self._max_model_lens: dict[str, int] = {}  # by the ids of leased samplers

    def close(self) -> None:
        self._prompts.close()

    def answer(self, request: CompleteRequest, asking: OpenQuestion) -> ChatCompletion | CompletionResponse:
        """Ask a sampler.

        Raises:
            InvalidInput: the question cannot be answered; names the field.
            SamplerUnavailable, WorkerLost: there is no sampler at this place now.
        """
        prompt, store, tenant, turn = None, self._host.store, request.tenant, request.turn
        earlier: Earlier | None = None
        if turn is not None:
            if (before := answered_turn(store, tenant, turn)) is not None:
                return before
            check_turns(store, tenant, turn)
            earlier = partial(answer_before, store, tenant, turn.episode)
        with self._samplers.open(request.place) as opened, asking.connected(opened.client.close):
            if isinstance(request.asked, ChatRequest):
                asked = request.asked
                prompt = self._prompts.prompt(request.model, asked.messages, asked.offered_tools, earlier)
                if request.counts_only:
                    return _count(asked, prompt.ids)
            if isinstance(request.place, ServedSampler):
                _check_base(opened, request)
            return self._answer(opened, request, prompt, _shown(request, asking.tell))

    def _answer(
        self, opened: OpenSampler, request: CompleteRequest, prompt: Prompt | None, tell: Tell | None
    ) -> ChatCompletion | CompletionResponse:
        """Answer; try again if the adapter was unloaded to make room for another one before it could answer."""
        for attempt in range(_ATTEMPTS):
            model = self._adapters.use(opened, request.adapter)
            try:
                return self._drawn(opened, model, request, prompt, tell)
            except SamplerUnavailable:
                if attempt + 1 == _ATTEMPTS or model in opened.client.models():
                    raise
        raise AssertionError("the last attempt answers or raises")

    def _drawn(
        self,
        opened: OpenSampler,
        model: str,
        request: CompleteRequest,
        prompt: Prompt | None,
        tell: Tell | None,
    ) -> ChatCompletion | CompletionResponse:
        asked, stops = request.asked, stops_of(request.place, self._host, request.model)
        if isinstance(asked, CompletionRequest):
            asked_for = {"model": model, "user": _asking(request)}
            drawn = _ask(opened, stopping_at(asked.model_copy(update=asked_for), stops), "prompt", tell)
            return drawn.model_copy(update={"model": asked.model})
        assert prompt is not None
        length, is_turn = self._max_model_len(opened, request.place), request.turn is not None
        wanted = stopping_at(sampler_request(asked, model, prompt.ids, length, takes_fewer=is_turn), stops)
        wanted = wanted.model_copy(update={"user": _asking(request)})
        drawn = _ask(opened, wanted, "messages", tell, "tools" if asked.forced_tools else "response_format")
        bytes_of = self._prompts.tokenizer(request.model).bytes_of
        answer_id = request.stream.answer_id if request.stream else new_answer_id(time.time())
        answer = chat_completion(asked, drawn, bytes_of, answer_id, prompt.ids)
        record = record_of(answer, drawn, prompt.ids, request.model.sha256)
        if record is not None and self._remembers(request, record):
            known = [choice.model_copy(update={"answer_id": answer.id}) for choice in answer.choices]
            answer = answer.model_copy(update={"choices": known})
        elif request.turn is not None:
            raise SamplerUnavailable("the tokens of this answer cannot be kept now, and an episode needs them")
        if (place := request.turn) is None:
            return answer
        num, before = prompt.after or (0, None)
        turn = EpisodeTurn(
            answer=answer,
            at=time.time(),
            is_side=place.is_side,
            after=before and before.answer_id,
            messages=tuple(asked.messages[num:]),
            continues=prompt.continues,
        )
        conversation = prompt.conversation(answer.choices[0].message)
        return record_turn(self._host.store, request.tenant, place, turn, conversation)

    def _max_model_len(self, opened: OpenSampler, place: SamplerPlace) -> int:
        """Return the greatest length of prompt and answer together, in tokens. A leased sampler is asked once."""
        worker_id = place.worker_id if isinstance(place, LeasedSampler) else ""
        if (known := self._max_model_lens.get(worker_id)) is not None:
            return known
        length = opened.client.models()[opened.model].max_model_len
        if length is None:
            raise SamplerUnavailable("the sampler does not say how long a sequence it takes")
        if worker_id:
            self._max_model_lens = {worker_id: length}  # a host has one sampler at a time
        return length

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


def _count(asked: ChatRequest, prompt_ids: Sequence[int]) -> ChatCompletion:
    created, num_tokens = int(time.time()), len(prompt_ids)
    usage = Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens)
    return ChatCompletion(id=new_answer_id(created), created=created, model=asked.model, choices=[], usage=usage)


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
