"""Renders conversations by a model's chat template as transformers does, and finds the characters that are trained.

Of an assistant's turn, those are the ones that the model has to write: everything after the turn's header (the
generation prompt), up to and including its terminator (the end-of-turn token). To find them reliably, the conversation
is rendered again with a marker character after the last word of every message. A row is refused if taking the markers
out does not give the same text, or if a header or terminator is not where it is expected.

This module runs in a process of its own (activities/tokenizing/template_process.py): templates are untrusted code.
"""

import json
import os.path
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from activities.tokenizing.template_environment import (
    GENERATION_END,
    GENERATION_START,
    template_environment,
    tracking_generation,
)

Message = dict[str, Any]

# Private-use characters: no template knows them, and no case or whitespace rule touches them.
_MARK = 0xF0000
_MAX_MESSAGES = 0xF000
_ANY_MARK = re.compile("([\U000f0000-\U000ffffd])")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Refused(Exception):
    """A row or a template cannot be rendered with exact spans; the text says why."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, end) of a rendered text, and the loss weight of the tokens in it."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and its trained spans, in order. `prompt`: the text up to where its last answer begins."""

    text: str
    spans: list[Span]
    prompt: str | None = None


@dataclass(frozen=True)
class _Turns:
    """The texts that a template puts around an assistant's words, learned from two short conversations."""

    generation_prompt: str
    header: str
    terminators: tuple[str, ...]
    space: str = ""  # between a question and its answer, where the template has no generation prompt


@dataclass(frozen=True)
class _Marked:
    """A rendered text; by message, the position where its content ends; and the spans of `{% generation %}` blocks."""

    text: str
    ends: dict[int, int]
    blocks: list[tuple[int, int]] = field(default_factory=list)


class ChatTemplate:
    """A compiled template. `special_tokens`: bos_token and the like; `control_tokens`: added tokens that mark turns."""

    def __init__(self, source: str, special_tokens: dict[str, str], control_tokens: list[str]) -> None:
        self._environment = template_environment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise Refused(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self._control = one_of(control_tokens)
        self._has_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._turns = self._learn()

    @property
    def terminators(self) -> tuple[str, ...]:
        """The tokens that end an assistant's turn."""
        return self._turns.terminators

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The text, as transformers' apply_chat_template gives it; `prompt` adds the generation prompt."""
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever a stranger's code does
            raise Refused(f"the chat template refuses the conversation: {error}") from error

    def spans(self, messages: list[Message], tools: list[Any] | None, weights: list[float]) -> Rendered:
        """The text and its trained spans; `weights[i]` is message i's.

        Raises:
            Refused: the template refuses the row, or the spans cannot be known for certain.
        """
        self._refuse_control_tokens(messages, tools)
        text = self.render(messages, tools)
        marked = self._mark(text, messages, tools)
        found = self._block_spans(marked, messages, weights) if self._has_blocks else None
        if found is None:
            found = self._turn_spans(marked, messages, weights)
        return Rendered(text, [span for span in found if span.weight > 0])

    def prompt_of(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the text that ends where the last answer begins."""
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return self.render(messages[:last], tools, prompt=True)

    # Learning the template's turns.

    def _learn(self) -> _Turns:
        """Learn the template's turns from short conversations.

        Raises Refused if assistant turns have no terminator, since a model trained on them would never stop.
        """
        question, answer = "Quayside?", "Zephyrine!"
        user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        asked = self.render([user])
        prompt = self.render([user], prompt=True)
        last = self.render([user, assistant])
        middle = self._render_or(last, [user, assistant, {"role": "user", "content": "Harbour?"}])
        for text in (last, middle):
            if text.count(answer) != 1 or question not in text:
                raise Refused("the chat template does not show a user's question and an assistant's answer once each")
        generation_prompt = prompt[len(asked) :] if prompt.startswith(asked) else ""
        headers = [text[len(asked) : text.index(answer)] for text in (last, middle) if text.startswith(asked)]
        header = os.path.commonprefix([generation_prompt, *headers]) if len(headers) == 2 else ""  # noqa: RUF071 - texts
        if header not in (generation_prompt, *headers):
            header = ""  # the header in the prompt differs from that in the history: use neither
        space = headers[0] if len(set(headers)) == 1 and headers[0].isspace() and not generation_prompt else ""
        terminators = self._terminators(last, middle, question, answer, generation_prompt)
        return _Turns(generation_prompt, header, terminators, space)

    def _render_or(self, otherwise: str, messages: list[Message]) -> str:
        try:
            return self.render(messages)
        except Refused:  # a template for one question and one answer
            return otherwise

    def _terminators(self, last: str, middle: str, question: str, answer: str, prompt: str) -> tuple[str, ...]:
        """Return the tokens that end an assistant's turn: the last turn, and one that another turn follows."""
        tail = last[last.index(answer) + len(answer) :]
        ends = self._control.findall(tail)[:1]
        between = self._control.search(middle, middle.index(answer) + len(answer))
        after_question = self._control.search(last, last.index(question) + len(question))
        if between and between.group() not in ends:
            # Without a terminator of its own, the next header's first token would stand here.
            closes_users = after_question and after_question.group() == between.group()
            if between.group() in tail or (prompt and closes_users and between.group() not in prompt):
                ends.append(between.group())
        if not ends:
            raise Refused("the chat template ends an assistant's turn with no special token, so nothing teaches a stop")
        return tuple(ends)

    # Finding a row's spans.

    def _refuse_control_tokens(self, messages: list[Message], tools: list[Any] | None) -> None:
        """Raise Refused if a control token occurs outside of contents, where it could be taken for the end of a turn.

        Within contents it cannot, as markers show where they end.
        """
        others = [{key: value for key, value in message.items() if key != "content"} for message in messages]
        if tools is None and all(len(other) == 1 for other in others):
            return  # nothing but roles
        if found := self._control.search(json.dumps([others, tools], ensure_ascii=False)):
            raise Refused(f"a message field other than content, or a tool, holds the control token {found.group()}")

    def _mark(self, text: str, messages: list[Message], tools: list[Any] | None) -> _Marked:
        """Render with markers, and check that nothing but the markers changed."""
        if len(messages) > _MAX_MESSAGES or _ANY_MARK.search(text):
            raise Refused("the conversation has too many messages, or characters from U+F0000 to U+FFFFD")
        everyone = range(len(messages))
        assistants = [i for i in everyone if messages[i]["role"] == "assistant"]
        for chosen in (everyone, assistants):
            marked = self._read_marks([_with_mark(m, i) if i in chosen else m for i, m in enumerate(messages)], tools)
            if marked is not None and marked.text == text and (chosen is everyone or self._is_unquoted(messages)):
                return marked
        raise Refused("the chat template changes its output with the contents, so trained spans cannot be known")

    def _is_unquoted(self, messages: list[Message]) -> bool:
        """True if the header occurs in no message but an assistant's, so that it cannot be a quotation."""
        others = json.dumps([m.get("content") for m in messages if m["role"] != "assistant"], ensure_ascii=False)
        return bool(self._turns.header) and not self._control.search(others)

    def _read_marks(self, messages: list[Message], tools: list[Any] | None) -> _Marked | None:
        with tracking_generation(self._environment):
            try:
                marked = self.render(messages, tools)
            except Refused:
                return None
        pieces, length = list[str](), 0
        ends, starts, blocks = dict[int, int](), list[int](), list[tuple[int, int]]()
        for piece in _ANY_MARK.split(marked):  # texts and marks by turns
            if not _ANY_MARK.fullmatch(piece):
                pieces.append(piece)
                length += len(piece)
            elif piece == GENERATION_START:
                starts.append(length)
            elif piece == GENERATION_END:
                blocks.append((starts.pop(), length))
            else:
                index = ord(piece) - _MARK
                if index in ends and messages[index]["role"] == "assistant":
                    return None  # shown twice: which one is the turn?
                ends[index] = length
        return _Marked("".join(pieces), ends, blocks)

    def _turn_spans(self, marked: _Marked, messages: list[Message], weights: list[float]) -> Iterator[Span]:
        cursor = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                cursor = max(cursor, marked.ends.get(i, 0))
                continue
            start = self._start(marked, message, i, cursor)
            content_end = max(start, marked.ends.get(i, start))
            cursor = self._end(marked, messages, i, content_end)
            yield Span(start, cursor, weights[i])

    def _start(self, marked: _Marked, message: Message, i: int, cursor: int) -> int:
        """Find the end of the turn's header."""
        turns = self._turns
        if turns.header:
            at = marked.text.find(turns.header, cursor)
            limit = marked.ends.get(i, _next_end(marked, i))
            if at < 0 or at + len(turns.header) > limit:
                raise Refused(f"messages[{i}]: the turn does not begin with the header {turns.header!r}")
            longer = turns.generation_prompt
            is_longer = marked.text.startswith(longer, at) and at + len(longer) <= limit
            return at + len(longer if is_longer else turns.header)
        start = _content_start(marked, message, i)
        if start is None or start < cursor or len(message.keys() - {"role", "content", "name"}) > 0:
            raise Refused(f"messages[{i}]: the template has no generation prompt, and the turn is not its content")
        return start if turns.generation_prompt else self._with_space(marked, message, start, cursor)

    def _with_space(self, marked: _Marked, message: Message, start: int, cursor: int) -> int:
        """Find the beginning of the space in front of a content. Nothing prompts it, so the model has to write it:
        what the template puts there (Mistral's do), and what the content begins with."""
        content = message["content"]
        most = len(self._turns.space) + len(content) - len(content.lstrip())
        in_front = marked.text[max(cursor, start - most) : start]
        return start - (len(in_front) - len(in_front.rstrip()))

    def _end(self, marked: _Marked, messages: list[Message], i: int, content_end: int) -> int:
        """Find the end of the turn's terminator."""
        limit = _next_end(marked, i)
        following = min((j for j in marked.ends if j > i), default=None)
        if following is not None:
            limit = _content_start(marked, messages[following], following) or limit
        for found in self._control.finditer(marked.text, content_end, limit):
            if found.group() in self._turns.terminators:
                return found.end()
            if not messages[i].get("tool_calls"):
                break
        raise Refused(f"messages[{i}]: no end-of-turn token ({', '.join(self._turns.terminators)}) follows the answer")

    def _block_spans(self, marked: _Marked, messages: list[Message], weights: list[float]) -> Iterator[Span]:
        """The template's own `{% generation %}` blocks, each with the terminator if that follows at once."""
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for k, (start, end) in enumerate(marked.blocks):
            inside = [i for i in assistants if start <= marked.ends.get(i, -1) <= end]
            if len(inside) == 1:
                weight = weights[inside[0]]
            elif len({weights[i] for i in assistants}) == 1:
                weight = weights[assistants[0]]
            elif len(marked.blocks) == len(assistants):
                weight = weights[assistants[k]]
            else:
                raise Refused("the template's generation blocks cannot be matched with the messages' weights")
            after = self._control.match(marked.text, end)
            yield Span(start, after.end() if after and after.group() in self._turns.terminators else end, weight)


def _next_end(marked: _Marked, i: int) -> int:
    """The end of the next message's content, or of the text."""
    return min((end for j, end in marked.ends.items() if j > i), default=len(marked.text))


def _content_start(marked: _Marked, message: Message, i: int) -> int | None:
    """Find the beginning of message i's content; None if the text does not hold it unchanged (but for outer space)."""
    content = message.get("content")
    if i not in marked.ends or not isinstance(content, str):
        return None
    core = content.strip()
    start = marked.ends[i] - len(core)
    return start if start >= 0 and marked.text.startswith(core, start) else None


def _with_mark(message: Message, i: int) -> Message:
    """Return the message with a marker after the last character of its content that is not space, if there is one."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _mark_text(content, i)}
    if isinstance(content, list):
        parts = list(content)
        for k in reversed(range(len(parts))):
            if parts[k]["text"].strip():
                parts[k] = {**parts[k], "text": _mark_text(parts[k]["text"], i)}
                break
        return {**message, "content": parts}
    return message


def _mark_text(text: str, i: int) -> str:
    core = text.rstrip()
    return f"{core}{chr(_MARK + i)}{text[len(core) :]}" if core else text


def _with_reasoning(message: Message) -> Message:
    """Copy a message's reasoning, which has one of three names, to the names that transformers gives to templates."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def one_of(texts: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some texts; without texts, one that matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or "(?!)")
