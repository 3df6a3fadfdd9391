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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from activities.tokenizing.shown import REASONING, CallForm, Marks, hidden_thoughts, says_a_tools_name
from activities.tokenizing.template_environment import Raised, Unrendered, template_environment, tracking_generation

Message = dict[str, Any]

_PROBE = {"name": "winch", "description": "Winds.", "parameters": {"type": "object", "properties": {}}}
_PROBE_TOOL = {"type": "function", "function": _PROBE}
_PROBE_CALL = {
    "type": "function",
    "id": "callprobe",
    "function": {"name": "winch", "arguments": {"cable": "Kittiwake"}},
}


@dataclass(frozen=True, slots=True)
class WeightedSpan:
    """Characters [start, end) of a rendered text, and the loss weight of the tokens in it."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and its trained spans, in order. `prompt`: the text up to where its last answer begins.

    `hidden_thoughts`: messages whose thoughts the template leaves out. `refusal`: the error that the template raises,
    in the place of a text.
    """

    text: str
    spans: list[WeightedSpan]
    prompt: str | None = None
    hidden_thoughts: int = 0
    refusal: str | None = None


@dataclass(frozen=True)
class _Turns:
    """The texts that a template puts around an assistant's words, learned from two short conversations."""

    generation_prompt: str
    header: str
    terminators: tuple[str, ...]
    space: str = ""  # between a question and its answer, where the template has no generation prompt
    trims: bool = False  # takes the space off an answer's beginning


@dataclass(frozen=True)
class _Marked:
    """A rendered text; by message, the position where its content ends; and the spans of `{% generation %}` blocks."""

    text: str
    ends: dict[int, int]
    blocks: list[tuple[int, int]] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)  # where each mark is that was set; -1: nowhere


class ChatTemplate:
    """A compiled template, and another for conversations with tools if the model has one (`tool_source`).

    `special_tokens`: bos_token and the like; `control_tokens`: added tokens that mark turns; `end_tokens`: those that
    the model's files name as its end, with which a turn that calls tools may end.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        control_tokens: list[str],
        tool_source: str | None = None,
        end_tokens: Sequence[str] = (),
        is_of_tools: bool = False,
    ) -> None:
        self._of_tools = (
            ChatTemplate(tool_source, special_tokens, control_tokens, None, end_tokens, True) if tool_source else None
        )
        self._end_tokens = end_tokens
        self._probe_tools = [_PROBE_TOOL] if is_of_tools else None
        self._environment = template_environment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise Unrendered(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self._control = one_of(control_tokens)
        self._has_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._turns = self._learn()

    @property
    def stops(self) -> tuple[str, ...]:
        """The token that ends an answer. (Another one may stand in its place in turns that others follow.)"""
        return self._turns.terminators[:1]

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> str:
        """The text, as transformers' apply_chat_template gives it; `prompt` adds the generation prompt."""
        if tools and self._of_tools:
            return self._of_tools.render(messages, tools, prompt=prompt)
        if (calling := next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)) is not None:
            if self._call_form is None:
                raise Unrendered(f"messages[{calling}].tool_calls: the chat template shows no tool calls")
            messages = [self._call_form.of(message) for message in messages]
        return self._rendered(messages, tools, prompt)

    def _rendered(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
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
            raise Raised(f"the chat template refuses the conversation: {error}") from error

    def spans(self, messages: list[Message], tools: list[Any] | None, weights: list[float]) -> Rendered:
        """The text and its trained spans; `weights[i]` is message i's.

        Raises:
            Raised: the template refuses the row.
            Unrendered: it leaves a part of the row out, or the spans cannot be known for certain.
        """
        if tools and self._of_tools:
            return self._of_tools.spans(messages, tools, weights)
        self._refuse_control_tokens(messages, tools)
        text = self.render(messages, tools)
        marked = self._mark(text, messages, tools)
        hidden = self._checked(text, messages, tools, marked.positions)
        found = self._block_spans(marked, messages, weights) if self._has_blocks else None
        if found is None:
            found = self._turn_spans(marked, messages, weights)
        return Rendered(text, [span for span in found if span.weight], hidden_thoughts=hidden)

    def prompt_of(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the text that ends where the last answer begins."""
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return self.render(messages[:last], tools, prompt=True)

    def asked(self, messages: list[Message], tools: list[Any] | None) -> Rendered:
        """Return the text that asks for an answer. Raises Unrendered as `spans` does, but of spans there are none."""
        if tools and self._of_tools:
            return self._of_tools.asked(messages, tools)
        text = self.render(messages, tools, prompt=True)
        marks = Marks.beside(text, len(messages))
        marked = self._read_marks(marks, marks.marked(messages, range(len(messages))), tools, prompt=True)
        positions = marked.positions if marked is not None and marked.text == text else {}
        return Rendered(text, [], hidden_thoughts=self._checked(text, messages, tools, positions))

    def _checked(self, text: str, messages: list[Message], tools: list[Any] | None, positions: dict[int, int]) -> int:
        """Count hidden thoughts. Raises Unrendered where the text lacks anything else (see `hidden_thoughts`)."""
        if tools and not self._probe_tools and says_a_tools_name(messages, tools):
            without = [self._render_or("", messages, prompt=prompt) for prompt in (False, True)]
            if text in without:
                raise Unrendered("tools: the chat template leaves them out")
        return hidden_thoughts(text, messages, tools, positions)

    @cached_property
    def _call_form(self) -> CallForm | None:
        """Learn how the template wants tool calls; None if it shows none."""
        for tools in (self._probe_tools, [_PROBE_TOOL]):
            for form in (CallForm(None, False), CallForm("", False), CallForm(None, True), CallForm("", True)):
                asked = {"role": "user", "content": "Quayside?"}
                try:
                    text = self._rendered([asked, form.of({"role": "assistant", "tool_calls": [_PROBE_CALL]})], tools)
                except Unrendered:
                    continue
                is_whole = "winch" in text and "cable" in text and "Kittiwake" in text
                if is_whole and '\\"cable' not in text and "None" not in text:
                    return form
        return None

    # Learning the template's turns.

    def _learn(self) -> _Turns:
        """Learn the template's turns from short conversations.

        Raises Unrendered if assistant turns have no terminator, since a model trained on them would never stop.
        """
        question, answer = "Quayside?", "Zephyrine!"
        user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        tools = self._probe_tools
        asked = self.render([user], tools)
        prompt = self.render([user], tools, prompt=True)
        last = self.render([user, assistant], tools)
        middle = self._render_or(last, [user, assistant, {"role": "user", "content": "Harbour?"}])
        for text in (last, middle):
            if text.count(answer) != 1 or question not in text:
                raise Unrendered(
                    "the chat template does not show a user's question and an assistant's answer once each"
                )
        generation_prompt = prompt[len(asked) :] if prompt.startswith(asked) else ""
        headers = [text[len(asked) : text.index(answer)] for text in (last, middle) if text.startswith(asked)]
        header = os.path.commonprefix([generation_prompt, *headers]) if len(headers) == 2 else ""  # noqa: RUF071 - texts
        if header not in (generation_prompt, *headers):
            header = ""  # the header in the prompt differs from that in the history: use neither
        space = headers[0] if len(set(headers)) == 1 and headers[0].isspace() and not generation_prompt else ""
        terminators = self._terminators(last, middle, question, answer, generation_prompt)
        trims = self._render_or("", [user, {"role": "assistant", "content": f" {answer}"}]) == last
        return _Turns(generation_prompt, header, terminators, space, trims)

    def _render_or(self, otherwise: str, messages: list[Message], prompt: bool = False) -> str:
        try:
            return self.render(messages, self._probe_tools, prompt=prompt)
        except Unrendered:  # a template for one question and one answer
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
            raise Unrendered(
                "the chat template ends an assistant's turn with no special token, so nothing teaches a stop"
            )
        return tuple(ends)

    # Finding a row's spans.

    def _refuse_control_tokens(self, messages: list[Message], tools: list[Any] | None) -> None:
        """Raise Unrendered if a control token occurs outside of contents, where it could pass for the end of a turn.

        Within contents it cannot, as markers show where they end.
        """
        others = [{key: value for key, value in message.items() if key != "content"} for message in messages]
        if tools is None and all(len(other) == 1 for other in others):
            return  # nothing but roles
        if found := self._control.search(json.dumps([others, tools], ensure_ascii=False)):
            raise Unrendered(f"a message field other than content, or a tool, holds the control token {found.group()}")

    def _mark(self, text: str, messages: list[Message], tools: list[Any] | None) -> _Marked:
        """Render with markers, and check that nothing but the markers changed."""
        marks = Marks.beside(text, len(messages))
        everyone = range(len(messages))
        assistants = [i for i in everyone if messages[i]["role"] == "assistant"]
        for chosen in (everyone, assistants):
            for at_the_end in (False, True):
                marked = self._read_marks(marks, marks.marked(messages, chosen, at_the_end), tools)
                if marked is not None and marked.text == text and (chosen is everyone or self._is_unquoted(messages)):
                    return marked
        raise Unrendered("the chat template changes its output with the contents, so trained spans cannot be known")

    def _is_unquoted(self, messages: list[Message]) -> bool:
        """True if the header occurs in no message but an assistant's, so that it cannot be a quotation."""
        others = json.dumps([m.get("content") for m in messages if m["role"] != "assistant"], ensure_ascii=False)
        return bool(self._turns.header) and not self._control.search(others)

    def _read_marks(
        self, marks: Marks, messages: list[Message], tools: list[Any] | None, prompt: bool = False
    ) -> _Marked | None:
        with tracking_generation(self._environment, marks.of_blocks):
            try:
                marked = self.render(messages, tools, prompt=prompt)
            except Unrendered:
                return None
        pieces, length = list[str](), 0
        ends, starts, blocks = dict[int, int](), list[int](), list[tuple[int, int]]()
        for piece in marks.any.split(marked):  # texts and marks by turns
            if not marks.any.fullmatch(piece):
                pieces.append(piece)
                length += len(piece)
            elif piece == marks.of_blocks[0]:
                starts.append(length)
            elif piece == marks.of_blocks[1]:
                blocks.append((starts.pop(), length))
            else:
                index = marks.index_of(piece)
                if index in ends and messages[index]["role"] == "assistant":
                    return None  # shown twice: which one is the turn?
                ends[index] = length
        placed = [i for i, message in enumerate(messages) if marks.any.search(message.get("content") or "")]
        return _Marked("".join(pieces), ends, blocks, {i: ends.get(i, -1) for i in placed})

    def _turn_spans(self, marked: _Marked, messages: list[Message], weights: list[float]) -> Iterator[WeightedSpan]:
        cursor = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                cursor = max(cursor, marked.ends.get(i, 0))
                continue
            start = self._start(marked, message, i, cursor)
            content_end = max(start, marked.ends.get(i, start))
            cursor = self._end(marked, messages, i, content_end)
            yield WeightedSpan(start, cursor, weights[i])

    def _start(self, marked: _Marked, message: Message, i: int, cursor: int) -> int:
        """Find the end of the turn's header."""
        turns = self._turns
        if turns.header:
            at = marked.text.find(turns.header, cursor)
            limit = marked.ends.get(i, _next_end(marked, i))
            if at < 0 or at + len(turns.header) > limit:
                raise Unrendered(f"messages[{i}]: the turn does not begin with the header {turns.header!r}")
            longer = turns.generation_prompt
            is_longer = marked.text.startswith(longer, at) and at + len(longer) <= limit
            return at + len(longer if is_longer else turns.header)
        start = _content_start(marked, message, i)
        if start is None or start < cursor or len(message.keys() - {"role", "content", "name"}) > 0:
            raise Unrendered(f"messages[{i}]: the template has no generation prompt, and the turn is not its content")
        return start if turns.generation_prompt else self._with_space(marked, message, start, cursor)

    def _with_space(self, marked: _Marked, message: Message, start: int, cursor: int) -> int:
        """Find the beginning of the space in front of a content. Nothing prompts it, so the model has to write it:
        what the template puts there (Mistral's do), and what the content begins with."""
        content = message["content"]
        most = len(self._turns.space) + (0 if self._turns.trims else len(content) - len(content.lstrip()))
        in_front = marked.text[max(cursor, start - most) : start]
        return start - (len(in_front) - len(in_front.rstrip()))

    def _end(self, marked: _Marked, messages: list[Message], i: int, content_end: int) -> int:
        """Find the end of the turn's terminator."""
        limit = _next_end(marked, i)
        following = min((j for j in marked.ends if j > i), default=None)
        if following is not None:
            limit = _content_start(marked, messages[following], following) or limit
        for found in self._control.finditer(marked.text, content_end, limit):
            if found.group() in self.stops or (messages[i].get("tool_calls") and found.group() in self._end_tokens):
                return found.end()
            if found.group() in self._turns.terminators:  # put there by the template: the model writes a stop
                return found.start()
            if not messages[i].get("tool_calls"):
                break
        raise Unrendered(
            f"messages[{i}]: no end-of-turn token ({', '.join(self._turns.terminators)}) follows the answer"
        )

    def _block_spans(self, marked: _Marked, messages: list[Message], weights: list[float]) -> Iterator[WeightedSpan]:
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
                raise Unrendered("the template's generation blocks cannot be matched with the messages' weights")
            after = self._control.match(marked.text, end)
            yield WeightedSpan(start, after.end() if after and after.group() in self.stops else end, weight)


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


def _with_reasoning(message: Message) -> Message:
    """Copy a message's reasoning, which has one of three names, to the names that transformers gives to templates."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def one_of(texts: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some texts; without texts, one that matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first) or "(?!)")
