"""Checks that a rendered chat template contains every message of the conversation, so that nothing is lost silently.

A template may cut the thoughts of turns before the last question (Qwen3's does): these are counted. If it leaves out
anything else, the row is refused. Marks that are put into the messages before rendering show where each message's
content ends.
"""

import json
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from activities.formats import THOUGHTS
from activities.tokenizing.template_environment import Unrendered

REASONING = THOUGHTS
"""The names of a message's thoughts."""
_THOUGHT_END = "</think>"
_FIRST, _LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")


@dataclass(frozen=True)
class Marks:
    """Private-use characters: no template knows them, and no case or whitespace rule touches them.

    Mark i, of message i, is the character `first + i`; two more mark `{% generation %}` blocks.
    """

    first: int
    num_messages: int

    @classmethod
    def beside(cls, text: str, num_messages: int) -> Self:
        """Choose marks that do not occur in a text. Raises Unrendered if there are not enough of them."""
        first = _FIRST
        for used in sorted({ord(character) for character in _PRIVATE.findall(text)}):
            if used >= first + num_messages + 2:
                break
            first = used + 1
        if first + num_messages + 1 > _LAST:
            raise Unrendered("the conversation has too many messages, or characters from U+F0000 to U+10FFFD")
        return cls(first, num_messages)

    @cached_property
    def of_blocks(self) -> tuple[str, str]:
        return chr(self.first + self.num_messages), chr(self.first + self.num_messages + 1)

    @cached_property
    def any(self) -> re.Pattern[str]:
        """Matches any mark, and captures it."""
        return re.compile(f"([{chr(self.first)}-{self.of_blocks[1]}])")

    def index_of(self, mark: str) -> int:
        return ord(mark) - self.first

    def marked(
        self, messages: list[dict[str, Any]], chosen: Container[int], at_the_end: bool = False
    ) -> list[dict[str, Any]]:
        """Return the messages, the chosen ones with a mark after the last character that is not space.

        `at_the_end`: after the trailing space of a content that ends with its thoughts, since templates cut there.
        """
        return [
            {**message, "content": self._with_mark(message["content"], i, at_the_end)}
            if i in chosen and message.get("content")
            else message
            for i, message in enumerate(messages)
        ]

    def _with_mark(self, text: str, i: int, at_the_end: bool) -> str:
        core = text.rstrip()
        if at_the_end and core.endswith("</think>"):
            core = text
        return f"{core}{chr(self.first + i)}{text[len(core) :]}" if core else text


@dataclass(frozen=True)
class CallForm:
    """How a template takes a message that calls tools: the content if it has none, and arguments as JSON text."""

    content: str | None
    are_texts: bool

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        if not message.get("tool_calls"):
            return message
        calls = [_with_text_arguments(call) for call in message["tool_calls"]] if self.are_texts else None
        return message | {"content": message.get("content") or self.content} | ({"tool_calls": calls} if calls else {})


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@dataclass
class HiddenThoughts:
    """Counts rows whose thoughts of earlier turns a template leaves out."""

    num_rows: int = 0
    first: str = ""

    def add(self, place: str, num_messages: int) -> None:
        if num_messages:
            self.num_rows += 1
            self.first = self.first or place

    def warnings(self) -> Iterator[str]:
        if self.num_rows:
            rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)}"
            yield f"the chat template leaves the thoughts of earlier turns out of {rows}; first: {self.first}"


def hidden_thoughts(text: str, messages: list[dict[str, Any]], tools: list[Any] | None, ends: dict[int, int]) -> int:
    """Count the messages of a rendered text whose thoughts are cut, as those of earlier turns may be.

    `ends`: by message, the position where its content ends, if known (-1: nowhere).

    Raises Unrendered: the text lacks another part of the messages or tools.
    """
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    hidden = 0
    for i, message in enumerate(messages):
        shown = text if i not in ends else text[: max(0, ends[i])]
        content, thoughts = _visible(message, shown, is_end=i in ends)
        if content and not _ends(shown, content, i in ends):
            raise Unrendered(
                f"messages[{i}]: the chat template leaves out what this message of the {message['role']} says"
            )
        near = _near(text, messages, ends, i)
        cut = any(not _holds(near, thought) for thought in thoughts)
        if cut and i > last_question:
            raise Unrendered(f"messages[{i}]: the chat template leaves out the thoughts of this message")
        hidden += cut
        for k, call in enumerate(message.get("tool_calls") or ()):
            if (missing := lacking(near, call["function"])) is not None:
                raise Unrendered(f"messages[{i}].tool_calls[{k}]: the chat template leaves out {missing!r:.60}")
    for k, tool in enumerate(tools or ()):
        if not _holds(text, tool["function"]["name"]):
            raise Unrendered(f"tools[{k}]: the chat template leaves out the tool {tool['function']['name']!r:.60}")
    return hidden


def says_a_tools_name(messages: list[dict[str, Any]], tools: list[Any]) -> bool:
    """True if a message contains a tool's name, so that finding the name in the text proves nothing."""
    said = json.dumps(messages, ensure_ascii=False)
    return any(tool["function"]["name"] in said for tool in tools)


def _near(text: str, messages: list[dict[str, Any]], ends: dict[int, int], i: int) -> str:
    """Return the text from the end of the previous message to the end of the next one, as far as these are known.

    A system message may be anywhere.
    """
    known = {k: end for k, end in ends.items() if end >= 0 and messages[k]["role"] != "system"}
    start = next((known[k] for k in range(i - 1, -1, -1) if k in known), 0)
    end = next((known[k] for k in range(i + 1, len(messages)) if k in known), len(text))
    return text[start:end] if start < end else text


def _visible(message: dict[str, Any], shown: str, is_end: bool) -> tuple[str, list[str]]:
    """Separate the contents that must be shown from thoughts, which have separate fields or begin the content."""
    core = (message.get("content") or "").strip()
    thoughts = [message[name].strip() for name in REASONING if isinstance(message.get(name), str)][:1]
    if message["role"] == "assistant" and _THOUGHT_END in core and not _ends(shown, core, is_end):
        thought, _, answer = core.rpartition(_THOUGHT_END)
        return answer.strip(), [*thoughts, thought.removeprefix("<think>").strip()]
    return core, thoughts


def _ends(shown: str, content: str, is_end: bool) -> bool:
    """True if a text ends with a content, verbatim or as JSON; if its end is unknown, it may be anywhere."""
    if not is_end:
        return _holds(shown, content)
    return shown.rstrip().endswith(content) or any(shown.endswith(each) for each in _as_json(content))


def _holds(text: str, part: str) -> bool:
    return part in text or any(each in text for each in _as_json(part))


def _as_json(text: str) -> Iterator[str]:
    """Yield a text as JSON writes it between quotes."""
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def lacking(text: str, function: dict[str, Any]) -> str | None:
    """Return the first part of a call that a text does not hold: its name, or a name or value of its arguments."""
    return next((part for part in (function["name"], *_leaves(function["arguments"])) if not _holds(text, part)), None)


def _leaves(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for key, item in value.items():
                yield key
                yield from _leaves(item)
        case list():
            for item in value:
                yield from _leaves(item)
        case str():
            yield value.strip()
        case bool() | None:
            return  # written as templates like: true, True
        case _:
            yield json.dumps(value)
